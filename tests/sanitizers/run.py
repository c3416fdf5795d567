"""The C++ of the package under sanitizers. Run by `make sanitize`; `--quick` is the part that the gate runs.

    python tests/sanitizers/run.py cpu|threads|npu ... [--quick]

cpu      `_C` and the CPU tests under AddressSanitizer and UndefinedBehaviorSanitizer, with g++
threads  calls on many threads under ThreadSanitizer, with g++
npu      `_C_npu`, the simulated CANN and the NPU tests as cpu; needs an environment with torch_npu

Each works in build/sanitizers, on a copy of the Python files, so that no library of the source tree is touched. A
finding ends the process that has it, and this command with 1.

Leaks are looked for by the fuzzer (`make fuzz`), which has no interpreter: at the end of a Python process everything
that Python and torch keep looks like one. Nothing is suppressed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch_npu, where it is, needs CANN

import native  # noqa: E402
import torch  # noqa: E402
from reliability import record  # noqa: E402

BUILD = native.ROOT / "build" / "sanitizers"
REPORTS = BUILD / "reports"
CORPUS = native.ROOT / "tests" / "fuzz" / "corpus"
ADDRESS = ("-fsanitize=address,undefined,float-divide-by-zero", "-fno-sanitize-recover=all")
DIVIDES = "-fno-sanitize=float-divide-by-zero"  # the operators of torch that the simulated CANN has: 1 / 0 is inf
OPTIMIZED = ("-O1", "-g", "-fno-omit-frame-pointer")
SOON_BUILT = ("-O0", "-g1")  # for the gate: most of its time would be the compiler's
EVERY = 6  # of the corpus' calls, for the gate
THREAD = "-fsanitize=thread"
# No finding could come of the first two: they compile the package anew, without a sanitizer, or only read files. The
# others measure or limit the memory of a process, of which AddressSanitizer itself takes most.
WITHOUT = (
    "test_packaging.py",
    "test_benchmarks.py",
    "test_memory_use.py",
    "test_processes.py::test_process[without_new_threads]",
)
QUICK = (
    "test_vectors.py",
    "test_bad_arguments.py::test_refused_and_nothing_written",
    "test_random_calls.py::test_spoiled_calls_are_refused_and_nothing_is_written",
)


def _tree(name: str) -> Path:
    """Copy what a test needs of the repository; objects of the simulated CANN stay where they are."""
    tree = BUILD / name
    for folder in ("pacache_torch", "tests", "benchmarks", "csrc", "docs", "requirements"):
        if (native.ROOT / folder).exists():
            shutil.copytree(
                native.ROOT / folder,
                tree / folder,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("*.so", "__pycache__", "build", "_built_with.json", ".hypothesis"),
            )
    for path in native.ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, tree)
    return tree


def _extension(
    tree: Path, name: str, sources: Sequence[Path], flags: Sequence[str], libraries: Sequence[str] = ()
) -> None:
    """Build one extension module into a tree, as setup.py does but for the sanitizers."""
    compiler = native.need("g++", "g++")
    common = [*native.torch_flags(), *ADDRESS, "-fopenmp", "-fvisibility=hidden"]
    common += [f"-DTORCH_EXTENSION_NAME={name}", "-DTORCH_API_INCLUDE_EXTENSION_H", *flags]
    objects = native.compile_all(compiler, common, sources)
    out = tree / "pacache_torch" / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    native.link(
        compiler,
        ["-shared", "-fopenmp", *ADDRESS],
        objects,
        out,
        *native.torch_libraries("-ltorch_python", *libraries),
    )


def _csrc(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((native.ROOT / "csrc" / folder).glob("*.cpp"))]


def _build_cpu(tree: Path, quick: bool) -> None:
    _extension(tree, "_C", _csrc(".", "cpu"), SOON_BUILT if quick else OPTIMIZED)
    built_with = {"torch": torch.__version__, "python": platform.python_version()}
    (tree / "pacache_torch" / "_built_with.json").write_text(json.dumps(built_with) + "\n")


def _library(name: str) -> str:
    """Where g++ keeps a library."""
    return subprocess.run(
        [native.need("g++", "g++"), f"-print-file-name={name}"], check=True, text=True, stdout=subprocess.PIPE
    ).stdout.strip()


def _address_environment(tree: Path) -> dict[str, str]:
    """The variables of a Python process on libraries that were built with ADDRESS."""
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)
    reports = f"log_path={REPORTS / 'finding'}:abort_on_error=1"  # not in what pytest holds back
    # libstdc++ with it: ASan looks for __cxa_throw when it starts, long before Python loads a library of C++.
    preloaded = [_library(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    # Not what this file sets for itself: processes of the NPU tests load torch_npu with torch, as a user's do.
    inherited = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    return inherited | {
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1:allocator_may_return_null=1:" + reports,
        "UBSAN_OPTIONS": f"print_stacktrace=1:halt_on_error=1:{reports}",
        "PYTHONPATH": str(tree),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def _pytest(tree: Path, folder: Path, arguments: Sequence[str], variables: dict[str, str]) -> str:
    """Run tests in a tree; gives how many passed."""
    loaded = subprocess.run(
        [sys.executable, "-c", "import pacache_torch; print(pacache_torch.__file__)"],
        cwd=folder,
        env=variables | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    ).stdout.strip()
    if not Path(loaded).is_relative_to(tree):
        sys.exit(f"tests/sanitizers/run.py: the tests would run on {loaded}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, env=variables, check=False, text=True, stdout=subprocess.PIPE)
    print(done.stdout)
    for path in REPORTS.iterdir():
        print(path.read_text())
    if done.returncode:
        sys.exit(f"tests/sanitizers/run.py: {' '.join(command)} ended with {done.returncode}")
    return re.findall(r"\d+ passed", done.stdout)[-1].removesuffix(" passed")


def cpu(quick: bool) -> str:
    """See the module's text; gives what was run, in words."""
    tree = _tree("cpu")
    _build_cpu(tree, quick)
    if quick:
        arguments = [f"tests/{name}" for name in QUICK]
    else:
        arguments = ["tests", "--ignore=tests/npu", *(f"--deselect=tests/{name}" for name in WITHOUT)]
    return f"{_pytest(tree, tree, arguments, _address_environment(tree))} CPU tests"


def threads(quick: bool) -> str:
    """See the module's text; gives what was run, in words."""
    compiler = native.need("g++", "g++")
    level = SOON_BUILT if quick else OPTIMIZED
    corpus = BUILD / "corpus"
    shutil.rmtree(corpus, ignore_errors=True)
    corpus.mkdir(parents=True)
    for path in sorted(CORPUS.iterdir())[:: EVERY if quick else 1]:
        shutil.copy2(path, corpus)
    fuzz = native.ROOT / "tests" / "fuzz"
    csrc = native.with_low_thresholds(native.BUILD / "csrc")
    sources = [
        *native.operator_sources(csrc),
        *(fuzz / name for name in ("call.cpp", "expectation.cpp", "check.cpp", "on_threads.cpp")),
    ]
    objects = native.compile_all(compiler, [*native.torch_flags(), *level, THREAD, native.SHARES], sources)
    driver = native.link(compiler, [THREAD, "-pthread"], objects, BUILD / "on_threads", *native.torch_libraries())
    # Memory at places that ThreadSanitizer does not know ends it before main: no randomness in where things are.
    done = subprocess.run(
        [native.need("setarch", "util-linux"), "-R", str(driver), str(corpus)],
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
        check=False,
        text=True,
        stdout=subprocess.PIPE,
    )
    print(done.stdout)
    if done.returncode:
        sys.exit(f"tests/sanitizers/run.py: {driver} ended with {done.returncode}")
    made = re.findall(r"(\d+) calls done, (\d+) refused", done.stdout)
    return f"{sum(int(number) for pair in made for number in pair)} calls on 8 threads at once"


def npu(quick: bool) -> str:
    """See the module's text; gives what was run, in words."""
    spec = find_spec("torch_npu")
    if spec is None or spec.origin is None:
        sys.exit("tests/sanitizers/run.py npu: needs an environment with torch_npu (make sanitize uses .venv-npu)")
    folder = Path(spec.origin).parent
    tree = _tree("npu")
    _build_cpu(tree, quick)
    includes = [f"-isystem{folder / 'include' / part}" for part in ("", "third_party/acl/inc", "third_party/hccl/inc")]
    _extension(
        tree,
        "_C_npu",
        [*_csrc("npu"), *native.shared_rules()],
        [*includes, *(SOON_BUILT if quick else OPTIMIZED)],
        [f"-L{folder / 'lib'}", "-ltorch_npu", "-Wl,--allow-shlib-undefined"],
    )
    # The simulated CANN is made by the tests, with these flags.
    variables = _address_environment(tree) | {"CXXFLAGS": " ".join((*OPTIMIZED, *ADDRESS, DIVIDES))}
    arguments = ["test_device_suite.py", "-k", "9.1.0 and A2"] if quick else ["."]
    return f"{_pytest(tree, tree / 'tests' / 'npu', arguments, variables)} NPU tests on the simulated CANN"


PARTS: dict[str, tuple[Callable[[bool], str], str]] = {
    "cpu": (cpu, "AddressSanitizer, UndefinedBehaviorSanitizer"),
    "threads": (threads, "ThreadSanitizer"),
    "npu": (npu, "AddressSanitizer, UndefinedBehaviorSanitizer"),
}


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description="Run the package under sanitizers.")
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="what the gate runs")
    arguments = parser.parse_args()
    for name in arguments.parts:
        run, sanitizers = PARTS[name]
        began = time.monotonic()
        what = run(arguments.quick)
        seconds = time.monotonic() - began
        print(f"{sanitizers}: {what} in {seconds:.0f} s with the build, no finding", flush=True)
        if not arguments.quick:
            row = [sanitizers, what, "0", f"{seconds:.0f}"]
            record("sanitizers", name, ["under", "ran", "findings", "seconds, with the build"], [row])


if __name__ == "__main__":
    main()
