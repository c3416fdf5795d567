"""Which lines of the CPU kernels and of the argument rules are run by the tests, and by the fuzzer's corpus?

    python tests/fuzz/coverage.py [--tests NAME ...]

Prints every line that neither runs, records the figures for docs/reliability.md, and ends with 1 below 95 %.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fuzzer  # noqa: E402
import native  # noqa: E402
from reliability import record  # noqa: E402

OUT = native.ROOT / "build" / "coverage"
CORPUS = HERE / "corpus"
LEAST = 95.0
FLAGS = ("-O1", "-g", "-fprofile-instr-generate", "-fcoverage-mapping")
TESTS = (
    *("test_vectors.py", "test_bad_arguments.py", "test_behaviours.py", "test_memory_rules.py", "test_parity.py"),
    *("test_random_calls.py", "test_cpu_kernels.py", "test_processes.py"),
)


def measured() -> list[Path]:
    """The files in question."""
    csrc = native.ROOT / "csrc"
    patterns = ("*_args.*", "*_rules.*", "packed_layout.*", "cpu/*")
    return sorted(path for pattern in patterns for path in csrc.glob(pattern))


def extension() -> Path:
    """Build `_C` with counters into a copy of the package."""
    clang = native.need("clang++", "clang libclang-rt-dev")
    package = OUT / "package" / "pacache_torch"
    shutil.copytree(
        native.ROOT / "pacache_torch", package, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    flags = [*native.torch_flags(), *FLAGS, "-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    csrc = native.ROOT / "csrc"
    objects = native.compile_all(clang, flags, [*csrc.glob("*.cpp"), *csrc.glob("cpu/*.cpp")])
    out = package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    return native.link(clang, ["-shared", *FLAGS], objects, out, *native.torch_libraries("-ltorch_python"))


def program() -> Path:
    """Build the fuzzer with counters; its copy of csrc/ counts as csrc/ itself."""
    clang = native.need("clang++", "clang libclang-rt-dev")
    csrc = native.with_low_thresholds(native.BUILD / "csrc")
    flags = [*native.torch_flags(), *FLAGS, f"-fcoverage-prefix-map={csrc}={native.ROOT / 'csrc'}", native.SHARES]
    sources = [*native.operator_sources(csrc), *fuzzer.CALLS, HERE / "fuzz_operators.cpp"]
    objects = native.compile_all(clang, flags, sources)
    return native.link(clang, [*FLAGS, "-fsanitize=fuzzer"], objects, OUT / "fuzz_operators", *native.torch_libraries())


def merged(name: str, raw: Path) -> Path:
    """Merge what processes have left in a folder."""
    out = OUT / f"{name}.profdata"
    files = [str(path) for path in raw.glob("*.profraw")]
    subprocess.run([native.need("llvm-profdata", "llvm"), "merge", "-sparse", *files, "-o", str(out)], check=True)
    return out


def percent(profile: Path, objects: list[Path]) -> dict[str, float]:
    """Covered lines of every file and of all ("")."""
    command = [native.need("llvm-cov", "llvm"), "export", "-summary-only", f"-instr-profile={profile}", str(objects[0])]
    command += [f"-object={path}" for path in objects[1:]] + [str(path) for path in measured()]
    data = json.loads(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout)["data"][0]
    found = {Path(f["filename"]).name: f["summary"]["lines"]["percent"] for f in data["files"]}
    return found | {"": data["totals"]["lines"]["percent"]}


def missed(profile: Path, objects: list[Path]) -> list[str]:
    """Every line that was never run, as llvm-cov shows it."""
    command = ["llvm-cov", "show", "-show-instantiations=0", f"-instr-profile={profile}", str(objects[0])]
    command += [f"-object={path}" for path in objects[1:]] + [str(path) for path in measured()]
    lines, name = [], ""
    for line in subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines():
        if line.startswith("/"):
            name = Path(line.rstrip(":")).name
        parts = line.split("|", 2)
        if len(parts) == 3 and parts[1].strip() == "0":
            lines.append(f"{name}:{parts[0].strip()}: {parts[2]}")
    return list(dict.fromkeys(lines))


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description="Line coverage of csrc/cpu and of the argument rules.")
    parser.add_argument("--tests", nargs="*", default=TESTS)
    arguments = parser.parse_args()
    raw = {name: OUT / name for name in ("tests", "corpus")}
    for folder in raw.values():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    library, calls = extension(), program()
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *(str(HERE.parent / name) for name in arguments.tests)],
        cwd=OUT,
        env=os.environ | {"LLVM_PROFILE_FILE": f"{raw['tests']}/%2m-%p.profraw", "PYTHONPATH": str(OUT / "package")},
        check=True,
    )
    for kernels in ("", "avx2", "portable"):
        subprocess.run(
            [str(calls), "-runs=0", str(CORPUS)],
            env=os.environ
            | {"LLVM_PROFILE_FILE": f"{raw['corpus']}/{kernels}-%p.profraw", "PACACHE_CPU_KERNELS": kernels},
            stderr=subprocess.DEVNULL,
            check=True,
        )
    both = OUT / "both"
    shutil.rmtree(both, ignore_errors=True)
    both.mkdir()
    for folder in raw.values():
        for path in folder.glob("*.profraw"):
            shutil.copy2(path, both / f"{folder.name}-{path.name}")
    found = {
        "tests": percent(merged("tests", raw["tests"]), [library]),
        "corpus": percent(merged("corpus", raw["corpus"]), [calls]),
        "both": percent(merged("both", both), [library, calls]),
    }
    for line in missed(OUT / "both.profdata", [library, calls]):
        print(line)
    files = [name for name in found["both"] if name]
    rows = [
        [name or "**all**", *(f"{found[part].get(name, 0):.1f} %" for part in ("tests", "corpus", "both"))]
        for name in [*files, ""]
    ]
    for row in rows:
        print(" ".join(f"{cell:>24}" for cell in row))
    record("fuzzing", "3_coverage", ["lines run", "by the tests", "by the corpus", "by either"], rows)
    if found["both"][""] < LEAST:
        sys.exit(f"tests/fuzz/coverage.py: {found['both']['']:.1f} % is less than {LEAST} %")


if __name__ == "__main__":
    main()
