"""Read and steer the simulated CANN from inside the process that uses it.

The libraries are those that the dynamic loader finds, so the process must
have been started in `cann_sim.build.environment`.
"""

from __future__ import annotations

import ctypes
import functools
import json
from typing import Any, TypedDict


class Violation(TypedDict):
    """One thing that must not happen; kinds are listed in README.md."""

    kind: str
    op: str
    text: str


class LiveObject(TypedDict):
    """A handle that was created and not destroyed yet.

    `adopted` handles are kept on purpose by pools (pinned host memory).
    """

    kind: str
    module: str
    handle: str
    serial: int
    adopted: bool


class DeviceMemory(TypedDict):
    """What one device has allocated."""

    live_bytes: int
    live_blocks: int
    peak_bytes: int
    mallocs: int
    frees: int


@functools.cache
def _core() -> ctypes.CDLL:
    library = ctypes.CDLL("libascendcl.so")
    library.cann_sim_free.argtypes = [ctypes.c_void_p]
    library.cann_sim_free.restype = None
    for name in ("violations", "counters", "trace", "live_objects", "device_memory"):
        getattr(library, f"cann_sim_{name}").restype = ctypes.c_void_p
    library.cann_sim_violation_count.restype = ctypes.c_int64
    library.cann_sim_pending.restype = ctypes.c_int64
    library.cann_sim_version.restype = ctypes.c_char_p
    library.cann_sim_fail_next.argtypes = [
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    library.cann_sim_set_phase_cost.argtypes = [ctypes.c_int64, ctypes.c_int64]
    library.cann_sim_peek.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
    ]
    return library


@functools.cache
def _nnopbase() -> ctypes.CDLL:
    return ctypes.CDLL("libnnopbase.so")


def _json(pointer: int) -> Any:
    try:
        return json.loads(ctypes.string_at(pointer))
    finally:
        _core().cann_sim_free(pointer)


def violations(kind: str | None = None) -> list[Violation]:
    """All violations so far, or those of one kind, oldest first."""
    found = _json(_core().cann_sim_violations())
    return [v for v in found if kind is None or v["kind"] == kind]


def clear() -> None:
    """Forget violations, counters, the trace and planned failures."""
    _core().cann_sim_clear()


def counters() -> dict[str, int]:
    """Calls per API, and "sync", "pta_hit", "pta_miss", "violation"."""
    return _json(_core().cann_sim_counters())


def trace(api: str | None = None) -> list[dict[str, Any]]:
    """The last 20000 traced calls, or those of one API, oldest first."""
    calls = _json(_core().cann_sim_trace())
    return [c for c in calls if api is None or c["api"] == api]


def clear_trace() -> None:
    """Forget the trace only."""
    _core().cann_sim_clear_trace()


def set_trace(on: bool) -> None:
    """Switch the trace on (as it starts) or off (for timing)."""
    _core().cann_sim_set_trace(int(on))


def fail_next(api: str, code: int, nth: int = 1) -> None:
    """Make the nth call of `api` from now on return `code`.

    A function that returns a handle returns null; one that returns bool,
    false. Methods and mangled functions go by their C++ name, for example
    ``atb::Context::SetExecuteStream``.
    """
    _core().cann_sim_fail_next(api.encode(), code, nth)


def set_lazy(on: bool) -> None:
    """Run queued work only at a synchronisation, or at once again."""
    _core().cann_sim_set_lazy(int(on))


def set_races(on: bool) -> None:
    """Look for unordered accesses of two streams (on as it starts)."""
    _core().cann_sim_set_races(int(on))


def set_phase_cost(phase1_us: int, phase2_us: int) -> None:
    """Busy-wait that long in every phase one and phase two."""
    _core().cann_sim_set_phase_cost(phase1_us, phase2_us)


def set_version(version: str) -> None:
    """Be another CANN edition. torch_npu reads it early and keeps it."""
    if _core().cann_sim_set_version(version.encode()):
        raise ValueError(f"cann_sim: unknown version {version}")


def version() -> str:
    """The CANN edition that is simulated."""
    return _core().cann_sim_version().decode()


def set_soc(name: str) -> None:
    """Be another SoC (a full name, such as Ascend910B3)."""
    _core().cann_sim_set_soc(name.encode())


def set_pta(on: bool) -> None:
    """Let CanUsePTACache say yes (as it starts) or no."""
    _nnopbase().cann_sim_set_pta(int(on))


def set_pta_verify(on: bool) -> None:
    """Never hit the executor cache, and compare what a key stands for.

    Every call then makes phase one; a key that was used before for another
    signature is the violation "pta_collision".
    """
    _nnopbase().cann_sim_set_pta_verify(int(on))


def live_objects(kind: str | None = None, module: str | None = None) -> list[LiveObject]:
    """Handles that are alive, by kind and by creating library."""
    found = _json(_core().cann_sim_live_objects())
    return [
        item
        for item in found
        if (kind is None or item["kind"] == kind) and (module is None or module in item["module"])
    ]


def device_memory(device: int = 0) -> DeviceMemory:
    """Allocations of one device."""
    return _json(_core().cann_sim_device_memory(device))


def pending() -> int:
    """Tasks that are queued on streams and did not run yet."""
    return _core().cann_sim_pending()


def peek(pointer: int, count: int) -> bytes:
    """Copy device memory out, without a call that the trace would show."""
    buffer = ctypes.create_string_buffer(count)
    if _core().cann_sim_peek(pointer, buffer, count):
        raise ValueError(f"cann_sim: [{pointer:#x}, +{count}) is not allocated")
    return buffer.raw
