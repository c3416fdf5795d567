"""Calls of both operators by the way they take through CANN, for tests that need every one of its functions called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from strategies import Call
from torch import Tensor

SCATTER, LOAD = "scatter_pa_kv_cache", "paged_cache_load"
NPU = torch.device("npu:0")


class Maker:
    """Host tensors full of noise; ``size`` is part of their shapes, ``seed`` is not."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.generator = torch.Generator().manual_seed(1000 * size + seed)

    def noise(self, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        bits = torch.randint(-(2**15), 2**15, shape, generator=self.generator, dtype=torch.int16)
        return bits.to(dtype) if dtype == torch.int8 else bits.view(dtype)

    def slots(self, tokens: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Some slots of a cache of `blocks` blocks of 16, one of them negative."""
        slots = torch.randperm(16 * self.blocks, generator=self.generator)[:tokens]
        slots[tokens // 2] = -1
        return slots.to(dtype)

    @property
    def blocks(self) -> int:
        return self.size + 3


def _ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _scatter(positional: dict[str, Tensor | None], **keyword: Any) -> Call:
    modes = {"cache_mode": "Norm", "scatter_mode": "None"}
    written = tuple(name for name in ("key_cache", "value_cache") if positional[name] is not None)
    return Call(SCATTER, positional, modes | keyword, written)


def _tokens(
    key: Tensor, value: Tensor | None, cache: Tensor, value_cache: Tensor | None, slots: Tensor, **k: Any
) -> Call:
    return _scatter(
        {"key": key, "value": value, "key_cache": cache, "value_cache": value_cache, "slot_mapping": slots}, **k
    )


def norm(m: Maker) -> Call:
    """Everything dense, int32: straight down."""
    caches = [m.noise(m.blocks, 16, 2, 32) for _ in range(2)]
    return _tokens(m.noise(5, 2, 32), m.noise(5, 2, 32), *caches, m.slots(5))


def key_only(m: Maker) -> Call:
    """No value: a tensor without elements goes down for it."""
    return _tokens(m.noise(5, 2, 32), None, m.noise(m.blocks, 16, 2, 32), None, m.slots(5))


def nct(m: Maker) -> Call:
    """Slices of a fused buffer: described by integer arrays."""
    fused = m.noise(5, 6, 32)
    caches = [m.noise(m.blocks, 16, 2, 32) for _ in range(2)]
    return _tokens(fused[:, :2], fused[:, 2:4], *caches, m.slots(5))


def copied(m: Maker) -> Call:
    """Views that nothing describes and int64 slots: made dense and int32 by torch_npu's operators first."""
    fused = m.noise(5, 2, 96)
    caches = [m.noise(m.blocks, 16, 2, 32) for _ in range(2)]
    return _tokens(fused[..., :32], fused[..., 40:72], *caches, m.slots(5, torch.int64))


def nz(m: Maker) -> Call:
    """PA_NZ."""
    caches = [m.noise(m.blocks, 4, 16, 16) for _ in range(2)]
    return _tokens(m.noise(5, 2, 32), m.noise(5, 2, 32), *caches, m.slots(5), cache_mode="PA_NZ")


def nhsd(m: Maker) -> Call:
    """NHSD, where a negative slot is the caller's fault."""
    caches = [m.noise(m.blocks, 2, 16, 32) for _ in range(2)]
    return _tokens(m.noise(5, 2, 32), m.noise(5, 2, 32), *caches, m.slots(5).abs(), scatter_mode="NHSD")


def _windows(m: Maker, mode: str) -> Call:
    """Two sequences of 4 and 3 tokens with 2 heads, the second of which is skipped where that can be."""
    caches = [m.noise(m.blocks, 16, 1, 32) for _ in range(2)]
    skipped = 16 if mode == "Rope" else -1
    lens = _ints(2, 3, 0, 1) if mode == "Alibi" else _ints(2, 1, 0, 2)
    starts = {} if mode == "Alibi" else {"compress_seq_offsets": _ints(1, -1, 1, 1)}
    call = _tokens(m.noise(7, 2, 32), m.noise(7, 2, 32), *caches, _ints(0, skipped, 20, 32))
    windows = {"compress_lens": lens, "seq_lens": _ints(4, 3), "scatter_mode": mode}
    return _scatter(call.positional, **starts, **windows)


def alibi(m: Maker) -> Call:
    """Windows; a skipped head is given another by torch_npu's operators."""
    return _windows(m, "Alibi")


def omni(m: Maker) -> Call:
    """As Alibi, with offsets."""
    return _windows(m, "Omni")


def rope(m: Maker) -> Call:
    """Windows with a mean. The numbers are small: a mean of noise may be a NaN, whose bits are open."""
    call = _windows(m, "Rope")
    tokens = {name: torch.full((7, 2, 32), m.size / 8.0, dtype=torch.float16) for name in ("key", "value")}
    return _scatter(call.positional | tokens, **call.keyword)


def _load(m: Maker, tables: Tensor, lens: Tensor, **keyword: Any) -> Call:
    nz = keyword.get("cache_mode") == "PA_NZ"
    shape = (m.blocks, 4, 16, 16) if nz else (m.blocks, 16, 2, 32)
    rows = (m.size + 50, 64) if nz else (m.size + 50, 2, 32)
    positional = {
        "key_cache": m.noise(*shape),
        "value_cache": m.noise(*shape),
        "block_tables": tables,
        "context_lens": lens,
        "key": m.noise(*rows),
        "value": m.noise(*rows),
    }
    modes = {"seq_starts": None, "cache_mode": "Norm", "is_seq_lens_cumsum": False}
    return Call(LOAD, positional, modes | keyword, ("key", "value"))


def load(m: Maker) -> Call:
    """Norm: ATB wants starts, zeros are made once."""
    return _load(m, _ints(2, 1, 0, 3).view(2, 2), _ints(27, 4))


def load_starts(m: Maker) -> Call:
    """With starts."""
    return _load(m, _ints(2, 1, 0, 3).view(2, 2), _ints(9, 4), seq_starts=_ints(16, 3))


def load_cumsum(m: Maker) -> Call:
    """With row boundaries for lengths."""
    return _load(m, _ints(2, 1, 0, 3).view(2, 2), _ints(1, 28, 32), is_seq_lens_cumsum=True)


def load_nz(m: Maker) -> Call:
    """PA_NZ."""
    return _load(m, _ints(2, 1, 0, 3).view(2, 2), _ints(27, 4), cache_mode="PA_NZ")


def load_converted(m: Maker) -> Call:
    """Index tensors of int64 with gaps."""
    tables = _ints(2, 9, 1, 9, 0, 9, 3, 9, dtype=torch.int64).view(2, 4)[:, ::2]
    return _load(m, tables, _ints(27, 9, 4, 9, dtype=torch.int64)[::2])


def packed(m: Maker) -> Call:
    """Keys and values in one tensor."""
    positional = {
        "key": m.noise(5, 2, 32),
        "value": m.noise(5, 2, 32),
        "kv_cache": m.noise(2, m.blocks, 16, 2, 32),
        "slot_mapping": m.slots(5),
    }
    return Call(f"{SCATTER}_packed", positional, {"kv_layout": "2BNHD"}, ("kv_cache",))


def load_packed(m: Maker) -> Call:
    """Out of one tensor."""
    positional = {
        "kv_cache": m.noise(2, m.blocks, 16, 2, 32),
        "block_tables": _ints(2, 1, 0, 3).view(2, 2),
        "context_lens": _ints(27, 4),
        "key": m.noise(m.size + 50, 2, 32),
        "value": m.noise(m.size + 50, 2, 32),
    }
    return Call(f"{LOAD}_packed", positional, {"kv_layout": "2BNHD"}, ("key", "value"))


KINDS: dict[str, Callable[[Maker], Call]] = {
    kind.__name__: kind
    for kind in (norm, key_only, nct, copied, nz, nhsd, alibi, omni, rope,
                 load, load_starts, load_cumsum, load_nz, load_converted, packed, load_packed)
}  # fmt: skip
