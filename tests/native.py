"""Compiles the package's C++ with other compilers and flags than setup.py: for sanitizers, the fuzzer and coverage.

Objects are kept in build/native by what they were made from, so only what has changed is compiled again.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "native"
# The drivers' own at::parallel_for stands before ATen's.
SHARES = f"-I{ROOT / 'tests' / 'fuzz' / 'include'}"
# From these many bytes on a call is split, and stores past the cache. A fuzzer's calls are far smaller.
THRESHOLDS = {
    "kGrainBytes": 192,
    "kNewThreadBytes": 192,
    "kStreamLongRuns": 2048,
    "kStreamShortRuns": 1024,
    "kLongRun": 512,
    "kColdMemory": 8192,
}


def need(program: str, package: str) -> str:
    """Find a program, or end with a sentence that says how to get it."""
    found = shutil.which(program)
    if found is None:
        sys.exit(f"{program} is needed and was not found: apt-get install {package} (or your system's package of it)")
    return found


def torch_flags() -> list[str]:
    """What compiles against torch and Python."""
    folders = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    return ["-std=c++20", "-fPIC", *(f"-isystem{folder}" for folder in folders)]


def torch_libraries(*more: str) -> list[str]:
    """What links with torch, found at run time where it was linked."""
    folder = Path(torch.__file__).parent / "lib"
    return [f"-L{folder}", f"-Wl,-rpath,{folder}", "-ltorch", "-ltorch_cpu", "-lc10", *more]


def with_low_thresholds(target: Path) -> Path:
    """Copy csrc/, with the thresholds of large calls lowered so that small calls take their paths."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "csrc", target)
    replaced = set()
    for path in target.rglob("*.h"):
        text = path.read_text()
        for name, value in THRESHOLDS.items():
            text, count = re.subn(rf"(constexpr int64_t {name}) = [^;]+;", rf"\1 = {value};", text)
            if count:
                replaced.add(name)
        path.write_text(text)
    if replaced != set(THRESHOLDS):
        sys.exit(f"tests/native.py: no such constants in csrc/: {sorted(set(THRESHOLDS) - replaced)}")
    return target


def _digest(command: Sequence[str], source: Path) -> str:
    """Of the command and of everything of ours that the file may include."""
    found = hashlib.sha256(" ".join([torch.__version__, *command]).encode())
    roots = [folder for folder in source.parents if folder.name in ("csrc", "fuzz")][:1]
    for root in [*roots, ROOT / "tests" / "fuzz" / "include"]:
        for path in sorted([*root.rglob("*.h"), *root.rglob("*.inc")]):
            found.update(path.read_bytes())
    found.update(source.read_bytes())
    return found.hexdigest()[:20]


def compile_all(compiler: str, flags: Iterable[str], sources: Iterable[Path], jobs: int | None = None) -> list[Path]:
    """Compile files with the same flags; gives their objects."""
    command = [compiler, *flags]

    def compile_one(source: Path) -> Path:
        out = BUILD / "objects" / f"{source.stem}-{_digest(command, source)}.o"
        if not out.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            partial = out.with_suffix(f".{os.getpid()}.o")
            subprocess.run([*command, "-c", str(source), "-o", str(partial)], check=True)
            partial.replace(out)
        return out

    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(compile_one, sources))


def link(compiler: str, flags: Iterable[str], objects: Iterable[Path], out: Path, *libraries: str) -> Path:
    """Link objects into a program or, with -shared among the flags, a library."""
    out.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([compiler, *flags, *map(str, objects), "-o", str(out), *libraries], check=True)
    return out


def operator_sources(csrc: Path) -> list[Path]:
    """Everything of csrc/ that needs neither Python nor CANN."""
    python = re.compile(r"#include <(Python|pybind11|torch/csrc|torch/extension|torch/python)")
    found = sorted([*csrc.glob("*.cpp"), *csrc.glob("cpu/*.cpp")])
    return [path for path in found if not python.search(path.read_text())]


def shared_rules() -> list[Path]:
    """The argument rules, which both extension modules hold, as setup.py names them."""
    names = re.search(r"^SHARED_RULES = (\(.*\))$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    if names is None:
        sys.exit("tests/native.py: setup.py names no SHARED_RULES")
    return [ROOT / "csrc" / f"{name}.cpp" for name in ast.literal_eval(names[1])]
