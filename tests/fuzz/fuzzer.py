"""Builds the fuzzer and what shares its calls."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import native  # noqa: E402

CALLS = [HERE / "call.cpp", HERE / "expectation.cpp", HERE / "check.cpp"]
SANITIZERS = "-fsanitize=address,undefined,float-divide-by-zero"


def build() -> Path:
    """Build the libFuzzer program, under AddressSanitizer and UndefinedBehaviorSanitizer."""
    clang = native.need("clang++", "clang libclang-rt-dev")
    csrc = native.with_low_thresholds(native.BUILD / "csrc")
    flags = [*native.torch_flags(), "-O1", "-g", SANITIZERS, "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    sources = [*native.operator_sources(csrc), *CALLS, HERE / "fuzz_operators.cpp"]
    objects = native.compile_all(clang, [*flags, "-fsanitize=fuzzer-no-link", native.SHARES], sources)
    return native.link(
        clang, [SANITIZERS, "-fsanitize=fuzzer"], objects, native.BUILD / "fuzz_operators", *native.torch_libraries()
    )


if __name__ == "__main__":
    print(build())
