"""How long both operators take, by the device's own events; on the CPU by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pacache_torch import layouts, ops
from pacache_torch.verify.run import synchronize

_LAYOUTS: dict[str, layouts.Layout] = {"Norm": "ND", "PA_NZ": "NZ"}


@dataclass(frozen=True)
class Workload:
    """A KV cache of one layer, a batch that is written and contexts that are read."""

    num_blocks: int = 192
    block_size: int = 128
    num_heads: int = 8
    head_size: int = 128
    decode_tokens: int = 256
    prefill_tokens: int = 8192
    sequences: int = 16
    context: int = 1021
    repeats: int = 21


QUICK = Workload(num_blocks=11, block_size=16, num_heads=2, decode_tokens=5, prefill_tokens=67, sequences=3, context=29,
                 repeats=3)  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """The median, smallest and largest time of one call, and the bytes that it reads and writes."""

    name: str
    median_us: float
    smallest_us: float
    largest_us: float
    bytes: int

    @property
    def gb_per_second(self) -> float:
        """Bytes of key and value, read and written, per second, in 1e9."""
        return self.bytes / self.median_us / 1e3


def measure(workload: Workload, device: torch.device) -> list[Timing]:
    """Time writing (a decode and a prefill batch) and reading, in both layouts, in bfloat16."""
    return [
        _time(name, num_bytes, call, workload.repeats, device) for name, num_bytes, call in _calls(workload, device)
    ]


def _calls(w: Workload, device: torch.device) -> Iterator[tuple[str, int, Callable[[], object]]]:
    dtype = torch.bfloat16
    token_bytes = 2 * w.num_heads * w.head_size * dtype.itemsize
    order = torch.randperm(w.num_blocks * w.block_size, generator=torch.Generator().manual_seed(0))

    def rows(count: int) -> tuple[Tensor, Tensor]:
        return (
            torch.ones(count, w.num_heads, w.head_size, dtype=dtype).to(device),
            torch.ones(count, w.num_heads, w.head_size, dtype=dtype).to(device),
        )

    for mode, layout in _LAYOUTS.items():
        caches = layouts.allocate_kv_cache(
            w.num_blocks, w.block_size, w.num_heads, w.head_size, layout=layout, dtype=dtype, device=device
        )
        for what, count in (("decode", w.decode_tokens), ("prefill", w.prefill_tokens)):
            slots = order[:count].to(torch.int32).to(device)
            name = f"scatter_pa_kv_cache {mode}, {what}: {count} tokens"
            yield name, 2 * count * token_bytes, _scatter(rows(count), caches, slots, mode)
        columns = -(-w.context // w.block_size)
        blocks = torch.randperm(w.num_blocks, generator=torch.Generator().manual_seed(1))
        tables = blocks[: w.sequences * columns].view(w.sequences, columns).to(torch.int32).to(device)
        lengths = torch.full((w.sequences,), w.context, dtype=torch.int32).to(device)
        total = w.sequences * w.context
        name = f"paged_cache_load {mode}: {w.sequences} x {w.context} tokens"
        yield name, 2 * total * token_bytes, _load(caches, tables, lengths, rows(total), mode)


def _scatter(rows: tuple[Tensor, Tensor], caches: tuple[Tensor, Tensor], slots: Tensor, mode: str) -> Callable[[], Any]:
    return lambda: ops.scatter_pa_kv_cache(*rows, *caches, slots, cache_mode=mode)


def _load(
    caches: tuple[Tensor, Tensor], tables: Tensor, lengths: Tensor, rows: tuple[Tensor, Tensor], mode: str
) -> Callable[[], Any]:
    return lambda: ops.paged_cache_load(*caches, tables, lengths, *rows, cache_mode=mode)


def _time(name: str, num_bytes: int, call: Callable[[], object], repeats: int, device: torch.device) -> Timing:
    for _ in range(2):
        call()
    synchronize(device)
    microseconds = []
    for _ in range(repeats):
        if device.type == "cpu":
            started = time.perf_counter()
            call()
            microseconds.append((time.perf_counter() - started) * 1e6)
            continue
        module = torch.get_device_module(device)
        begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        microseconds.append(begin.elapsed_time(end) * 1e3)
    return Timing(name, statistics.median(microseconds), min(microseconds), max(microseconds), num_bytes)
