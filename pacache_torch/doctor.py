"""``python -m pacache_torch doctor``: what is installed, what is loaded and whether it works.

Every fact is collected on its own, so that one that cannot be had does not hide the others: the
doctor is for machines on which something is broken.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import pacache_torch
from pacache_torch import _library

_DISPATCH_KEYS = ("CPU", "Meta", "PrivateUse1")

_ENVIRONMENT_PREFIXES = ("PACACHE_", "ASCEND_")
_ENVIRONMENT_NAMES = (
    "ATB_HOME_PATH",
    "OMP_NUM_THREADS",
    "TASK_QUEUE_ENABLE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
)
_PRESENCE_ONLY = ("LD_LIBRARY_PATH",)
_SECRET_WORDS = ("KEY", "PASSWORD", "SECRET", "TOKEN")

_CPU_FEATURES = (
    "avx2", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16", "amx_tile",
    "asimd", "asimdhp", "bf16", "sve", "sve2",
)  # fmt: skip
_TEXT_SECTIONS = (
    "versions", "built_with", "platform", "cpu", "kernels", "torch_npu", "environment",
)  # fmt: skip
_CANN_LIBRARY = "libascendcl.so"
_CANN_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")


@dataclasses.dataclass(frozen=True)
class SelfCheck:
    """One operator run on one device against expected numbers."""

    device: str
    cache_mode: str
    ok: bool
    detail: str


def examine(*, self_check: bool = True) -> dict[str, Any]:
    """Collect everything the doctor knows, as JSON-ready values; without ``self_check`` no operator is run."""
    kernels = {op: _kernels(op) for op in _library.OPERATORS}
    npu = _torch_npu()
    checks = self_checks("cpu") if self_check else []
    # Without a kernel of ours torch_npu would run the operator on the CPU and look right.
    if self_check and npu["devices"] and all("PrivateUse1" in keys for keys in kernels.values()):
        checks += self_checks("npu:0")
    return {
        "ok": all(check.ok for check in checks if check.device == "cpu"),
        "cpu_operators_run_by": _cpu_operators_run_by(),
        "versions": _collect(_versions),
        "built_with": _collect(_build),
        "platform": _collect(_platform),
        "cpu": _collect(_cpu),
        "extensions": [dataclasses.asdict(status) for status in _library.status()],
        "kernels": kernels,
        "torch_npu": npu,
        "environment": environment(os.environ),
        "self_checks": [dataclasses.asdict(check) for check in checks],
    }


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change what is loaded or how it runs.

    Search paths are reported as present with their number of entries, and anything whose name
    sounds like a secret as set.
    """
    found = {}
    for name in sorted(variables):
        if name in _PRESENCE_ONLY:
            entries = [entry for entry in variables[name].split(os.pathsep) if entry]
            found[name] = f"set, {len(entries)} entries"
        elif name.startswith(_ENVIRONMENT_PREFIXES) or name in _ENVIRONMENT_NAMES:
            secret = any(word in name for word in _SECRET_WORDS)
            found[name] = "set" if secret else variables[name]
    for name in (*_PRESENCE_ONLY, *_ENVIRONMENT_NAMES):
        found.setdefault(name, "not set")
    return found


def self_checks(device: str) -> list[SelfCheck]:
    """Run both operators on a tiny cache in both layouts and compare the whole result."""
    checks = []
    for cache_mode in ("Norm", "PA_NZ"):
        try:
            problem = _self_check(device, cache_mode)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        ok = problem is None
        checks.append(SelfCheck(device, cache_mode, ok, "as expected" if ok else str(problem)))
    return checks


def _self_check(device: str, cache_mode: str) -> str | None:
    from pacache_torch import ops

    num_blocks, block_size, heads, head_size, lanes = 3, 16, 2, 16, 16
    width = heads * head_size
    slots = [40, -1, 16, 5]
    untouched = -1.0

    def row(token: int, sign: int) -> list[float]:
        # Whole numbers below 2048, so float16 holds them exactly.
        return [float(sign * (100 * (token + 1) + x)) for x in range(width)]

    def expected_cache(sign: int) -> torch.Tensor:
        rows = torch.full((num_blocks * block_size, width), untouched)
        for token, slot in enumerate(slots):
            if slot >= 0:
                rows[slot] = torch.tensor(row(token, sign))
        return rows

    def in_layout(rows: torch.Tensor) -> torch.Tensor:
        if cache_mode == "Norm":
            return rows.view(num_blocks, block_size, heads, head_size)
        return rows.view(num_blocks, block_size, width // lanes, lanes).transpose(1, 2).contiguous()

    def on_device(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.float16).to(device)

    def integers(values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    def tokens(sign: int) -> torch.Tensor:
        rows = torch.tensor([row(token, sign) for token in range(len(slots))])
        return on_device(rows.view(len(slots), heads, head_size))

    empty = in_layout(torch.full((num_blocks * block_size, width), untouched))
    key_cache, value_cache = on_device(empty), on_device(empty).clone()
    ops.scatter_pa_kv_cache(tokens(1), tokens(-1), key_cache, value_cache, integers(slots), cache_mode=cache_mode)
    for name, sign, cache in (("key", 1, key_cache), ("value", -1, value_cache)):
        if not torch.equal(cache.cpu().float(), in_layout(expected_cache(sign))):
            return f"scatter_pa_kv_cache wrote a wrong {name}_cache"

    # 17 tokens through blocks 2 and 1, then 6 tokens of block 0; one slot written in each.
    wanted_rows = [*range(32, 48), 16, *range(6)]
    shape = (len(wanted_rows), heads, head_size)
    key, value = on_device(torch.zeros(shape)), on_device(torch.zeros(shape))
    block_tables, context_lens = integers([[2, 1], [0, 0]]), integers([17, 6])
    ops.paged_cache_load(key_cache, value_cache, block_tables, context_lens, key, value, cache_mode=cache_mode)
    for name, sign, output in (("key", 1, key), ("value", -1, value)):
        if not torch.equal(output.cpu().float(), expected_cache(sign)[wanted_rows].view(shape)):
            return f"paged_cache_load returned a wrong {name}"
    return None


def _cpu_operators_run_by() -> str:
    if _library.reference_forced():
        return "the Python reference (PACACHE_FORCE_REFERENCE=1)"
    loaded = {status.name: status.loaded for status in _library.status()}
    return "the kernels of _C" if loaded["_C"] else "nothing: _C is not loaded"


def _collect(facts: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return facts()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _versions() -> dict[str, Any]:
    return {
        "pacache_torch": pacache_torch.__version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": str(torch.__version__),
    }


def _build() -> dict[str, Any]:
    info = _library.build_info()
    return dict(info) if info is not None else {"unknown": "the extension tells, once it loads"}


def _platform() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "package": str(Path(pacache_torch.__file__).parent),
    }


def _cpu() -> dict[str, Any]:
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "features": _cpu_features(),
        "cores": os.cpu_count(),
        "cores_usable": len(affinity(0)) if affinity else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "threads_interop": torch.get_num_interop_threads(),
        "torch_parallel_backend": _parallel_backend(),
    }


def _parallel_backend() -> str:
    info: str = torch.__config__.parallel_info()
    _, _, backend = info.rpartition("ATen parallel backend: ")
    return backend.strip()


def _cpu_features() -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return []
    for line in text.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            present = set(flags.split())
            return [feature for feature in _CPU_FEATURES if feature in present]
    return []


def _kernels(op: str) -> list[str]:
    """Return the dispatch keys that have a kernel; none when there is no such operator."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        return [key for key in _DISPATCH_KEYS if has_kernel(f"pacache::{op}", key)]
    except RuntimeError:
        return []


def _torch_npu() -> dict[str, Any]:
    facts: dict[str, Any] = {"installed": _installed_version("torch_npu"), "devices": 0}
    facts["cann"] = _find_cann() or (f"{_CANN_LIBRARY} not found through LD_LIBRARY_PATH, {', '.join(_CANN_HOMES)}")
    if "torch_npu" in sys.modules and hasattr(torch, "npu"):
        facts["imported"] = "yes"
        facts |= _collect(lambda: {"devices": torch.get_device_module("npu").device_count()})
        facts |= _collect(_npu_library)
    elif facts["installed"] is None:
        facts["imported"] = "no: not installed"
    else:
        # Importing it without CANN fails, and can take the process with it.
        facts["imported"] = "no: torch did not load it (TORCH_DEVICE_BACKEND_AUTOLOAD, CANN)"
    return facts


def _npu_library() -> dict[str, Any]:
    """Return what the NPU kernels found: versions, the real files of CANN's libraries, who loads the cache."""
    simulated = simulated_cann()
    facts: dict[str, Any] = {"simulated": f"yes, CANN {simulated}: this is no NPU" if simulated else False}
    if not _library.status()[1].loaded:
        return facts
    found = _library.npu_module().found()
    return facts | {
        "soc": f"{found['soc']} ({found['product']})",
        "cann_version": found["cann"],
        "atb_version": found["atb"],
        "load_backend": {"atb": "AtbPagedCacheLoad", "aclnn": "aclnnGatherPaKvCache"}[found["load_backend"]],
        "op_api_libraries": _files(found["op_api"]),
        "atb_libraries": _files(found["atb_libraries"]),
    }


def _files(libraries: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{name} ({path or 'not found'})" for name, path in libraries]


def simulated_cann() -> str | None:
    """Return the version that the simulated CANN of this project's tests claims to be, or None on a real one.

    The simulator says so itself: its libascendcl exports functions that CANN does not have.
    """
    try:
        # Only if it is loaded already.
        library = ctypes.CDLL(_CANN_LIBRARY, mode=os.RTLD_LAZY | getattr(os, "RTLD_NOLOAD", 0))
        version = library.cann_sim_version
    except (OSError, AttributeError):
        return None
    version.restype = ctypes.c_char_p
    return str(version().decode())


def _installed_version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


def _find_cann() -> str | None:
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    for name in _CANN_HOMES:
        if (home := os.environ.get(name, "")).startswith("/"):
            folders += [str(Path(home) / "lib64"), str(Path(home) / "runtime" / "lib64")]
    for folder in folders:
        if folder and (Path(folder) / _CANN_LIBRARY).exists():
            return os.path.realpath(Path(folder) / _CANN_LIBRARY)
    return None


def as_text(facts: dict[str, Any]) -> str:
    """Return what `examine` found as lines for a reader."""
    lines = []
    for section in _TEXT_SECTIONS:
        lines.append(section)
        lines += [f"  {name}: {readable(value)}" for name, value in facts[section].items()]
        lines.append("")
    lines.append("extensions")
    for status in facts["extensions"]:
        state = f"loaded from {os.path.realpath(status['path'])}" if status["loaded"] else "not loaded"
        lines.append(f"  {status['name']}: {state}")
        if status["cause"]:
            lines += [f"    {line}" for line in status["cause"].splitlines()]
    lines += ["", "self-check"]
    for check in facts["self_checks"]:
        lines.append(
            f"  {check['device']} {check['cache_mode']}: {'ok' if check['ok'] else 'FAILED'}, {check['detail']}"
        )
    verdict = "work" if facts["ok"] else "do NOT work"
    run_by = facts["cpu_operators_run_by"]
    return "\n".join([*lines, "", f"The CPU operators {verdict}; run by {run_by}."])


def readable(value: Any) -> str:
    """Return a value as it stands in a report."""
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the examination; 0 when the CPU operators work, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m pacache_torch doctor",
        description="Show what is installed and loaded, and run both operators once.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    facts = examine()
    print(json.dumps(facts, indent=2) if arguments.json else as_text(facts))
    return 0 if facts["ok"] else 1
