"""What machine is this, and how fast does it copy by itself?"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch  # loaded where it is needed: plots and comparisons do without

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = ROOT / "build" / "benchmarks"
QUIET_LOAD = 0.3  # above this load average something else is running


def compile_library(source: Path, *, torch_headers: bool = False) -> Path:
    """Compile one C++ file to a shared library, once per content.

    Args:
        source: the file.
        torch_headers: whether it includes torch's headers and is linked with torch.

    Returns:
        The library, below ``build/benchmarks``.

    Raises:
        RuntimeError: the compiler refuses, with what it said.
    """
    import torch

    flags = ["-O2", "-std=c++17", "-fPIC", "-shared", "-fopenmp", f"-ffile-prefix-map={HERE}/="]
    link: list[str] = []
    if torch_headers:
        from torch.utils import cpp_extension

        flags += [f"-isystem{path}" for path in cpp_extension.include_paths()]
        flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
        folder = Path(torch.__file__).parent / "lib"
        link = [f"-L{folder}", f"-Wl,-rpath,{folder}", "-ltorch", "-ltorch_cpu", "-lc10"]
    compiler = os.environ.get("CXX", "g++")
    parts = [compiler, *flags, torch.__version__, platform.machine(), source.read_text()]
    library = BUILD / f"{source.stem}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:12]}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            [compiler, *flags, str(source), "-o", str(fresh), *link], text=True, capture_output=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"benchmarks: {source.name} does not compile\n{done.stderr}")
        fresh.replace(library)  # whole, also with two processes at it
    return library


@functools.cache
def _copies() -> ctypes.CDLL:
    library = ctypes.CDLL(str(compile_library(HERE / "machine_copy.cpp")))
    library.machine_stream_name.restype = ctypes.c_char_p
    library.machine_copy.restype = None
    library.machine_read_write.restype = ctypes.c_uint64
    library.machine_read_write.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int,
    ]
    return library


def stream_name() -> str:
    """What non-temporal copies are made of on this machine, or "none"."""
    return _copies().machine_stream_name().decode()


class PlainCopy:
    """A copy of whole contiguous tensors by nothing but memcpy or non-temporal stores."""

    def __init__(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, threads: int, non_temporal: bool = False
    ) -> None:
        """Take (destination, source) pairs, contiguous and of equal sizes; they are kept alive."""
        for destination, source in pairs:
            if not (destination.is_contiguous() and source.is_contiguous()):
                raise ValueError("PlainCopy: tensors must be contiguous")
            if destination.nbytes != source.nbytes:
                raise ValueError("PlainCopy: tensors must have equal sizes")
        count = len(pairs)
        self._tensors = list(pairs)
        self._call = functools.partial(
            _copies().machine_copy,
            count,
            (ctypes.c_void_p * count)(*(destination.data_ptr() for destination, _ in pairs)),
            (ctypes.c_void_p * count)(*(source.data_ptr() for _, source in pairs)),
            (ctypes.c_int64 * count)(*(source.nbytes for _, source in pairs)),
            threads,
            int(non_temporal),
        )

    def __call__(self) -> None:
        """Copy."""
        self._call()


class ReadAndWrite:
    """Read a source once and write its first bytes to a destination: the least a reducing operator can do."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, threads: int) -> None:
        """Take (destination, source) pairs, contiguous, no destination larger than its source."""
        self._tensors = list(pairs)
        self._calls = [
            functools.partial(
                _copies().machine_read_write,
                destination.data_ptr(),
                source.data_ptr(),
                source.nbytes,
                destination.nbytes,
                threads,
            )
            for destination, source in pairs
        ]

    def __call__(self) -> None:
        """Read and write."""
        for call in self._calls:
            call()


def load_average() -> float:
    """How many processes wanted to run during the last minute."""
    return round(os.getloadavg()[0], 2)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_model() -> str:
    for text, name in ((_read("/proc/cpuinfo"), "model name"), (_run("lscpu"), "Model name")):
        found = re.search(rf"^{name}\s*:\s*(.+)$", text, flags=re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _caches() -> dict[str, str]:
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind = _read(index / "type")
        if kind != "Instruction":
            found[f"L{_read(index / 'level')}"] = _read(index / "size")
    return found


def parse_size(text: str) -> int:
    """Bytes of a size as the kernel writes it, "32768K"; 0 for anything else."""
    found = re.fullmatch(r"(\d+)([KMG])", text)
    return int(found.group(1)) << {"K": 10, "M": 20, "G": 30}[found.group(2)] if found else 0


def format_size(text: str) -> str:
    """A size as the kernel writes it, for people."""
    size = parse_size(text)
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size else text


def _memory_gib() -> float:
    found = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), flags=re.MULTILINE)
    return round(int(found.group(1)) / 2**20, 1) if found else 0.0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _openmp_runtimes() -> list[str]:
    """Names of the OpenMP libraries in this process; with two of them their threads fight over the cores."""
    maps = _read("/proc/self/maps")
    return sorted({Path(path).name for path in re.findall(r"\S*/lib(?:g|i)?omp\S*\.so\S*", maps)})


def _built_with() -> dict[str, str]:
    import pacache_torch._C

    return dict(pacache_torch._C.build_info())


def describe() -> dict[str, Any]:
    """Everything that a figure depends on and that can be told without naming the machine."""
    import torch

    revision = _run("git", "rev-parse", "HEAD")
    changed = bool(
        _run("git", "status", "--porcelain", "--untracked-files=no", "--", "csrc", "pacache_torch", "setup.py")
    )
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "caches": _caches(),
        "memory_gib": _memory_gib(),
        "huge_pages": "".join(re.findall(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled"))),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "torch_npu", "pacache_torch", "numpy")},
        "built_with": _built_with(),
        "openmp": _openmp_runtimes(),
        "openmp_variables": {
            name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_NUM"))
        },
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "revision": revision,
        "sources_changed": changed,
        "load_average": load_average(),
    }


def warn_if_busy() -> None:
    """Say on stderr that figures will be poor when something else is running."""
    load = load_average()
    if load > QUIET_LOAD:
        print(f"warning: load average {load} is above {QUIET_LOAD}: these timings mean little", file=sys.stderr)
