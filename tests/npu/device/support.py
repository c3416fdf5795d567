"""The simulated device under test: what it is, what was launched on it, and what it must refuse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from cann_sim import control
from strategies import Call
from torch import Tensor

import pacache_torch

CANN = os.environ["CANN_SIM_VERSION"]
SOC = os.environ["CANN_SIM_SOC"]
LAZY = os.environ.get("CANN_SIM_LAZY") == "1"
PRODUCT = {"Ascend910B3": "Atlas A2", "Ascend910_9392": "Atlas A3", "Ascend310P3": "other"}[SOC]
ACLNN_LOAD = os.environ.get("PACACHE_LOAD_BACKEND") == "aclnn"

SCATTER = "scatter_pa_kv_cache"
LOAD = "paged_cache_load"
SCATTER_PACKED = "scatter_pa_kv_cache_packed"
LOAD_PACKED = "paged_cache_load_packed"
PHASE_TWO = {
    SCATTER: "aclnnScatterPaKvCache",
    LOAD: "aclnnGatherPaKvCache" if ACLNN_LOAD else "AtbPagedCacheLoad",
}
PHASE_TWO |= {SCATTER_PACKED: PHASE_TWO[SCATTER], LOAD_PACKED: PHASE_TWO[LOAD]}

NPU = torch.device("npu:0")
COPIES = (torch.float16, torch.bfloat16, torch.int8)
MEANS = (torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)


CAPABILITIES = pacache_torch.capabilities("npu")  # asks for the product and the version, which is done once


def short(dtype: torch.dtype) -> str:
    """float16 and not torch.float16."""
    return str(dtype).removeprefix("torch.")


def cann_at_least(*version: int) -> bool:
    """Is the simulated CANN this release or a later one?"""
    return tuple(int(part) for part in CANN.split(".")[:2]) >= version


def operator(op: str) -> Any:
    """The registered operator."""
    return getattr(torch.ops.pacache, op)


# ---------------------------------------------------------------------------------------------------------------------
# What was called


class Calls(dict[str, int]):
    """Calls of each API of CANN in a block, by name; 0 for all others."""

    def __missing__(self, name: str) -> int:
        return 0


def _counters() -> dict[str, int]:
    torch.npu.synchronize()
    return control.counters()


def _difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    found = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count for name, count in found.items() if count}


def _cost_of_counting() -> dict[str, int]:
    before = _counters()
    return _difference(_counters(), before)


@contextmanager
def calls() -> Iterator[Calls]:
    """Count what is called in the block, what it queues included; filled at its end."""
    made = Calls()
    cost = _cost_of_counting()
    before = _counters()
    try:
        yield made
    finally:
        made.update(_difference(_difference(_counters(), before), cost))
        # torch_npu's queue thread sets its device when it starts, whenever that is.
        made.pop("aclrtSetDevice", None)


def launched(made: Calls) -> dict[str, int]:
    """Of the calls of a block, the device operators of this project."""
    return {name: made[name] for name in PHASE_TWO.values() if made[name]}


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def memory(t: Tensor) -> Tensor:
    """The whole storage of a tensor as bytes, on the host."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()).cpu()


def memories(tensors: dict[str, Any]) -> dict[str, bytes]:
    """The whole storage of every tensor that has one."""
    return {
        name: memory(t).numpy().tobytes()
        for name, t in tensors.items()
        if isinstance(t, Tensor) and t.layout == torch.strided and t.device.type != "meta"
    }


def noise(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    """Random bits on the host."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    elements = torch.Size(shape).numel()
    bits = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape)


def numbers(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    """Numbers that are small enough for every dtype, on the host."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def with_dense_caches(call: Call, *, together: bool = False) -> Call:
    """The call with its caches (and the outputs of a load) dense on 64 bytes, with bytes of nobody around them.

    Args:
        call: any call.
        together: both caches, and both outputs, out of one allocation. A cache that holds both is dense either way;
            in B2NHD, together means that the blocks of a half are not.
    """
    pairs: list[tuple[str, ...]] = [("key_cache", "value_cache")]
    if "kv_cache" in call.positional:
        pairs = [("kv_cache",)]
    if call.op in (LOAD, LOAD_PACKED):
        pairs.append(("key", "value"))
    positional = dict(call.positional)
    for names in pairs:
        tensors = {name: t for name in names if (t := positional[name]) is not None}
        starts, end = {}, 0
        for name, t in tensors.items():
            starts[name] = end + 64
            end += 64 + -(-t.numel() * t.element_size() // 64) * 64
        shared = noise(end + 36, dtype=torch.uint8, seed=end)
        for name, t in tensors.items():
            bits = shared if together else shared.clone()
            dense = bits[starts[name] :][: t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            if call.keyword.get("kv_layout") == "B2NHD" and name == "kv_cache" and not together:
                dense = dense.view(2, t.size(0), *t.shape[2:]).transpose(0, 1)
            dense.copy_(t)
            positional[name] = dense
    return Call(call.op, positional, call.keyword, call.written, call.duplicates, call.mean_slots)


# ---------------------------------------------------------------------------------------------------------------------
# What the device cannot do, as the specification has it


def does_nothing(call: Call) -> bool:
    """There is nothing to copy, so nothing may be launched."""
    t = call.tensors()
    if call.op in (LOAD, LOAD_PACKED):
        return 0 in (t["block_tables"].numel(), t["key"].numel(), t["value"].numel())
    return t["slot_mapping"].numel() == 0 or t["key"].numel() == 0


def refusal(call: Call) -> str | None:
    """Why this product and version cannot run a valid call: what is wrong, in a word; None if it can."""
    if "kv_cache" in call.positional:
        call = unpacked(call)
    return _load_refusal(call) if call.op == LOAD else _scatter_refusal(call)


def unpacked(call: Call) -> Call:
    """The call of the plain operator on the two halves of a cache."""
    cache, key_size = call.tensors()["kv_cache"], call.tensors()["key"].size(2)
    layout = call.keyword["kv_layout"]
    if layout in ("2BNHD", "B2NHD"):
        halves = cache.unbind(layout.index("2"))
    else:
        halves = cache.split((key_size, cache.size(3) - key_size), 3)
    if layout == "BHNC":
        halves = tuple(half.transpose(1, 2) for half in halves)
    rest = {name: t for name, t in call.positional.items() if name != "kv_cache"}
    keyword = {"cache_mode": "Norm"}
    if call.op == SCATTER_PACKED:
        keyword["scatter_mode"] = "None"
    positional = {"key_cache": halves[0], "value_cache": halves[1], **rest}
    return Call(SCATTER if call.op == SCATTER_PACKED else LOAD, positional, keyword, call.written)


def _scatter_refusal(call: Call) -> str | None:
    t = call.tensors()
    key, cache = t["key"], t["key_cache"]
    value = t.get("value", key)
    mode, nz = call.keyword["scatter_mode"], call.keyword["cache_mode"] == "PA_NZ"
    key_only = "value" not in t
    compressed = mode in ("Alibi", "Rope", "Omni")
    if key.dim() == 4:
        return "scenario 3"
    if key.dtype not in (MEANS if mode in ("Rope", "Omni") else COPIES) or value.dtype not in COPIES:
        return "dtype"
    if nz and value.dtype == torch.int8 and key.dtype != torch.int8:
        return "int8 value"
    if key_only and not cann_at_least(9, 0) and key.size(1) * key.size(2) * key.element_size() % 32:
        return "unaligned token"
    if mode == "NHSD":
        if not cann_at_least(9, 1):
            return "NHSD"
        if key.size(2) * key.element_size() % 32 or value.size(2) * value.element_size() % 32:
            return "unaligned head"
    if compressed:
        if key.size(2) % 32:
            return "head_size"
        if cache.size(0) * cache.size(1) < key.size(0):
            return "too few slots"
    for name in ("key_cache", "value_cache"):
        if name in t and not t[name].is_contiguous():
            plain = mode == "None" and not nz and not key_only
            if not (plain and cann_at_least(9, 1) and _only_blocks_padded(t[name])):
                return "strided cache"
    return None


def _only_blocks_padded(cache: Tensor) -> bool:
    _, block_size, heads, size = cache.shape
    dense = (heads * size, size, 1)
    return cache.stride()[1:] == dense and cache.stride(0) >= block_size * heads * size


def _load_refusal(call: Call) -> str | None:
    t = call.tensors()
    nz = call.keyword["cache_mode"] == "PA_NZ"
    key, value = t["key_cache"], t["value_cache"]
    if key.dtype not in COPIES or value.dtype not in COPIES:
        return "dtype"
    if key.dtype != value.dtype and (key.dtype != torch.int8 or ACLNN_LOAD):
        return "dtypes differ"
    block_size = key.size(-2) if nz else key.size(1)
    if nz and block_size % 16:
        return "block_size"
    for cache in (key, value):
        if not nz and cache.size(2) * cache.size(3) * cache.element_size() % 32:
            return "unaligned token"
    for name in ("key_cache", "value_cache", "key", "value"):
        if t[name].numel() and t[name].storage_offset() * t[name].element_size() % 32:
            return "unaligned tensor"
        if not t[name].is_contiguous():
            return "strided tensor"
    return None
