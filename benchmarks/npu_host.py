"""One process of host_cost.py --npu: what calls cost on the calling thread, and until the device is idle.

    python npu_host.py CONFIG.json RESULT.json

Started by host_cost.py with the environment that is to be measured: TASK_QUEUE_ENABLE, PACACHE_LOAD_BACKEND, and which
functions CANN offers are read once per process. CONFIG has ``simulated``, ``cases``, ``rounds``, ``calls`` (per
sample) and ``phase_us`` (what phase one and two are made to take where CANN is simulated).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch_npu
import torch_npu.atb

import pacache_torch

TOKENS, HEADS, HEAD_SIZE, BLOCK = 32, 8, 128, 128
LAYERS = 64
COUNTED = 100  # calls over which the counters are read, but for the layers: one step
DEVICE = "npu:0"
OURS = "pacache"
THEIRS = "torch_npu"
NO_TOKENS = "pacache, no tokens"

Calls = dict[str, Callable[[], object]]


def is_simulated() -> bool:
    """Whether the CANN in this process is the simulated one."""
    return hasattr(ctypes.CDLL("libascendcl.so"), "cann_sim_set_phase_cost")


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the NPU."""
    return tensor.to(DEVICE)


def caches(num_blocks: int = 16) -> list[torch.Tensor]:
    """A key and a value cache."""
    return [torch.zeros(num_blocks, BLOCK, HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]


def rows(tokens: int = TOKENS) -> list[torch.Tensor]:
    """Keys and values of a batch."""
    return [on_device(torch.randn(tokens, HEADS, HEAD_SIZE).to(torch.bfloat16)) for _ in range(2)]


def slots(seed: int = 0, num_blocks: int = 16) -> torch.Tensor:
    """Distinct slots of a batch, int32."""
    order = torch.randperm(num_blocks * BLOCK, generator=torch.Generator().manual_seed(seed))
    return on_device(order[:TOKENS].to(torch.int32))


def in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """The next of many calls each time."""
    cycle: Iterator[Callable[[], object]] = itertools.cycle(calls)
    return lambda: next(cycle)()


def ours(key: torch.Tensor, value: torch.Tensor, cache: Sequence[torch.Tensor], slot: torch.Tensor) -> Any:
    """Our scatter, bound."""
    return functools.partial(pacache_torch.scatter_pa_kv_cache, key, value, *cache, slot)


def theirs(key: torch.Tensor, value: torch.Tensor, cache: Sequence[torch.Tensor], slot: torch.Tensor) -> Any:
    """torch_npu's scatter, bound; the operator itself, without a Python wrapper."""
    return functools.partial(torch.ops.npu.npu_scatter_pa_kv_cache, key, value, *cache, slot, cache_mode="Norm")


def scatter_same() -> Calls:
    """The same tensors every time."""
    key, value, cache, slot = *rows(), caches(), slots()
    return {
        OURS: ours(key, value, cache, slot),
        THEIRS: theirs(key, value, cache, slot),
        NO_TOKENS: ours(key, value, cache, slot[:0]),
    }


def scatter_new() -> Calls:
    """Other tensors of one signature every time."""
    cache = caches()
    batches = [(rows(), slots(seed)) for seed in range(32)]
    return {
        OURS: in_turn([ours(*row, cache, slot) for row, slot in batches]),
        THEIRS: in_turn([theirs(*row, cache, slot) for row, slot in batches]),
    }


def scatter_int64() -> Calls:
    """int64 slots, against int32 ones."""
    key, value, cache, slot = *rows(), caches(), slots()
    wide = slot.to(torch.int64)
    return {
        OURS: ours(key, value, cache, wide),
        f"{OURS}, int32 slots": ours(key, value, cache, slot),
        THEIRS: theirs(key, value, cache, wide),
    }


def scatter_layers() -> Calls:
    """A step of a model: 64 layers with caches of their own and one int64 slot mapping."""
    narrow = slots(num_blocks=4)
    wide = narrow.to(torch.int64)
    layers = [(rows(), caches(4)) for _ in range(LAYERS)]
    return {
        OURS: in_turn([ours(*row, cache, wide) for row, cache in layers]),
        f"{OURS}, int32 slots": in_turn([ours(*row, cache, narrow) for row, cache in layers]),
        THEIRS: in_turn([theirs(*row, cache, wide) for row, cache in layers]),
    }


def load() -> Calls:
    """The contexts of two sequences into given outputs; torch_npu has an operator by ATB and one by aclnn."""
    cache = caches()
    lengths = [24, 8]  # few, so that the copy itself, made by the host where CANN is simulated, stays small
    tables = on_device(torch.randperm(16)[:4].view(2, 2).to(torch.int32))
    lens = on_device(torch.tensor(lengths, dtype=torch.int32))
    starts = on_device(torch.zeros(2, dtype=torch.int32))
    key, value = rows(sum(lengths))
    return {
        OURS: functools.partial(pacache_torch.paged_cache_load, *cache, tables, lens, key, value),
        "torch_npu.atb": functools.partial(
            torch.ops.atb.npu_paged_cache_load.out, *cache, tables, lens, seq_starts=starts, key=key, value=value
        ),
        "torch_npu gather": functools.partial(
            torch.ops.npu.npu_gather_pa_kv_cache, *cache, tables, lens, key, value, seq_offset=starts
        ),
    }


CASES: dict[str, Callable[[], Calls]] = {
    "scatter/same": scatter_same,
    "scatter/new": scatter_new,
    "scatter/int64": scatter_int64,
    "scatter/layers": scatter_layers,
    "load": load,
}


def time_calls(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Seconds per call on this thread, and until the device is idle."""
    torch.npu.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call()
    returned = time.perf_counter_ns()
    torch.npu.synchronize()
    idle = time.perf_counter_ns()
    return (returned - begin) / calls * 1e-9, (idle - begin) / calls * 1e-9


def count_calls(call: Callable[[], object], calls: int, control: Any) -> dict[str, int]:
    """What the simulated CANN saw of so many calls: first phases, casts, handles made, waits of the host."""
    torch.npu.synchronize()
    control.clear()
    for _ in range(calls):
        call()
    waits = control.counters().get("sync", 0)
    torch.npu.synchronize()
    seen = control.counters()
    return {
        "phase_one": sum(n for name, n in seen.items() if name.endswith("GetWorkspaceSize")),
        "casts": seen.get("aclnnCast", 0) + seen.get("aclnnInplaceCopy", 0),
        "handles": sum(n for name, n in seen.items() if name.startswith("aclCreate")),
        "waits": waits,
    }


def run_case(name: str, config: dict[str, Any], control: Any) -> dict[str, Any]:
    """Warm up, count, then time the peers of one case in turn."""
    peers = CASES[name]()
    found: dict[str, Any] = {"calling": {}, "idle": {}, "counts": {}}
    for peer, call in peers.items():
        time_calls(call, max(LAYERS, config["calls"]))  # every layer once
        found["calling"][peer], found["idle"][peer] = [], []
        if control is not None:
            found["counts"][peer] = count_calls(call, LAYERS if name == "scatter/layers" else COUNTED, control)
    calls = LAYERS if name == "scatter/layers" else config["calls"]
    for _ in range(config["rounds"]):
        for peer, call in peers.items():
            calling, idle = time_calls(call, calls)
            found["calling"][peer].append(calling)
            found["idle"][peer].append(idle)
    return found


def main(argv: Sequence[str]) -> int:
    """Run the cases of a configuration and write what was found."""
    config = json.loads(Path(argv[0]).read_text())
    simulated = is_simulated()
    if simulated != config["simulated"]:
        raise RuntimeError(f"npu_host: CANN is {'simulated' if simulated else 'real'}, which is not what was asked for")
    control: Any = None
    if simulated:
        from cann_sim import control as simulator

        control = simulator
        control.set_trace(False)
        control.set_races(False)
        control.set_phase_cost(*config["phase_us"])
    torch.npu.set_device(DEVICE)
    with torch.inference_mode():
        found = {name: run_case(name, config, control) for name in config["cases"]}
    if control is not None and (violations := control.violations()):
        raise RuntimeError(f"npu_host: the simulated CANN objects: {violations[:3]}")
    device = pacache_torch._C_npu.found()
    kept = {name: device[name] for name in ("soc", "product", "cann", "atb", "load_backend")}  # not its paths
    kept |= {"name": torch.npu.get_device_name(0), "torch_npu": torch_npu.__version__}
    result = {"cases": found, "device": kept, "simulated": simulated}
    Path(argv[1]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
