"""The long run: random calls from Python, and calls guided by coverage from C++. Run by `make fuzz`.

    python tests/fuzz/run.py [--calls 20000] [--minutes 30] [--corpus tests/fuzz/corpus]
    python tests/fuzz/run.py --quick          # the calls of the corpus once, for the gate
    python tests/fuzz/run.py --keep-corpus    # and then put what was found into the corpus, as little as covers it

Figures go to build/reliability for docs/reliability.md; minutes of several runs add up. A finding ends it with 1; what
libFuzzer has found lies in build/fuzz then, and `build/native/fuzz_operators FILE` makes that call again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fuzzer  # noqa: E402
import native  # noqa: E402
from reliability import record  # noqa: E402

OUT = native.ROOT / "build" / "fuzz"
CORPUS = HERE / "corpus"
KERNELS = ("", "avx2", "portable")  # PACACHE_CPU_KERNELS: what the processor gets, and others that it has
LONGEST = 400  # bytes of a call: the reader has no use for more


def python_calls(kernels: str, count: int, seed: int) -> tuple[Counter[str], float]:
    """Make `count` valid and `count` refused calls in a process of their own; gives what was counted, and seconds."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import random_calls as r\n"
        "count, seed = int(sys.argv[2]), int(sys.argv[3])\n"
        "counted = r.check_valid_calls(count, seed)\n"
        "while counted['refused'] < count:\n"
        "    seed += 1\n"
        "    counted += r.check_spoiled_calls(max(100, count - counted['refused']), seed)\n"
        "print(json.dumps(counted))\n"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, str(HERE.parent), str(count), str(seed)],
        env=os.environ | ({"PACACHE_CPU_KERNELS": kernels} if kernels else {}),
        text=True,
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        sys.exit(f"tests/fuzz/run.py: calls from seed {seed} on, PACACHE_CPU_KERNELS={kernels!r}: see above")
    return Counter(json.loads(done.stdout.splitlines()[-1])), time.monotonic() - began


def from_python(count: int, seed: int) -> None:
    """Make the calls of hypothesis, with each set of copy kernels, and record them."""
    rows = []
    for kernels in KERNELS:
        counted, seconds = python_calls(kernels, -(-count // len(KERNELS)), seed)
        errors = ", ".join(f"{counted[name]} {name}" for name in sorted(counted) if name.endswith("Error"))
        rows.append(
            [
                f"copy kernels: {kernels or 'of the processor'}",
                f"{counted['calls']}",
                f"{counted['refused']} ({errors})",
                f"{seconds:.0f}",
            ]
        )
        print(f"fuzz: {', '.join(rows[-1])} s", flush=True)
    head = ["hypothesis, from Python", "valid calls, as the reference", "refused calls, nothing written", "seconds"]
    record("fuzzing", "1_python", head, rows)


def libfuzzer(*arguments: str) -> str:
    """Run the fuzzer; gives what it printed."""
    OUT.mkdir(parents=True, exist_ok=True)
    command = [
        str(fuzzer.build()),
        f"-max_len={LONGEST}",
        "-timeout=30",
        "-print_funcs=0",
        "-len_control=20",
        "-rss_limit_mb=4096",
        f"-artifact_prefix={OUT}/",
        *arguments,
    ]
    done = subprocess.run(command, text=True, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        print(done.stderr[-20000:])
        sys.exit(f"tests/fuzz/run.py: {' '.join(command)} ended with {done.returncode}")
    return done.stderr


def guided(minutes: float, seed: int) -> None:
    """Let libFuzzer look for calls, and record how many it made."""
    found = OUT / "corpus"
    found.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    printed = libfuzzer(
        f"-max_total_time={int(minutes * 60)}",
        f"-seed={seed}",
        "-print_final_stats=1",
        "-verbosity=1",
        str(found),
        str(CORPUS),
    )
    pieces = OUT / "pieces.json"
    before = json.loads(pieces.read_text()) if pieces.exists() else []
    runs = int(re.findall(r"number_of_executed_units: (\d+)", printed)[-1])
    edges, features = re.findall(r"cov: (\d+) ft: (\d+)", printed)[-1]
    every = [*before, {"runs": runs, "seconds": time.monotonic() - began}]
    pieces.write_text(json.dumps(every))
    total = sum(piece["seconds"] for piece in every)
    row = [str(sum(piece["runs"] for piece in every)), f"{total / 60:.0f}", edges, features, "0"]
    print(f"fuzz: {runs} calls guided by coverage, {edges} edges; {total / 60:.0f} minutes in all", flush=True)
    record("fuzzing", "2_guided", ["libFuzzer, calls made", "minutes", "edges", "features", "findings"], [row])


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description="Random calls of both operators.")
    parser.add_argument("--calls", type=int, default=20000, help="valid and as many refused ones, from Python")
    parser.add_argument("--minutes", type=float, default=30, help="of libFuzzer")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--keep-corpus", action="store_true")
    parser.add_argument("--quick", action="store_true", help="only the calls of the corpus")
    arguments = parser.parse_args()
    if arguments.quick:
        printed = libfuzzer("-runs=0", str(CORPUS))
        print(f"fuzz: {len(list(CORPUS.iterdir()))} calls of the corpus, no finding", flush=True)
        if "INITED" not in printed:
            sys.exit(f"tests/fuzz/run.py: they were not made:\n{printed}")
        return
    seed = arguments.seed or random.SystemRandom().randrange(1, 2**31)
    print(f"fuzz: --seed {seed}", flush=True)
    if arguments.calls:
        from_python(arguments.calls, seed)
    if arguments.minutes:
        guided(arguments.minutes, seed)
    if arguments.keep_corpus:
        libfuzzer("-merge=1", str(CORPUS), str(OUT / "corpus"))


if __name__ == "__main__":
    main()
