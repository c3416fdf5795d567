"""Made-up calls: every row of `capabilities` in every dtype, and the edges of what a device takes.

Sizes are small and coprime, and so that every supported CANN version takes them (tokens of a multiple of 32 bytes);
contents are random bit patterns, except where a mean is computed. Unused entries of a block table are junk.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pacache_torch import _rules
from pacache_torch.verify.calls import Call, from_vector
from pacache_torch.verify.vectors import Vector, load_vectors, scatter_vectors

BLOCKS, TOKENS, HEADS = 7, 11, 3
LENGTHS = (9, 0, 4, 13)
JUNK = -(2**31) + 7
_16_BIT = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """A call, and what is expected of it.

    ``expected`` is what it must leave behind, by default what the reference does. ``must_run`` says that the device
    claims it: a refusal is a failure then.
    """

    group: str
    name: str
    call: Call
    expected: Call | None = None
    must_run: bool = True


def vector_cases() -> Iterator[Case]:
    """The worked examples in both index dtypes; a device may refuse what it does not do."""
    makers: tuple[tuple[str, Callable[[torch.dtype], list[Vector]]], ...] = (
        (_rules.SCATTER, scatter_vectors),
        (_rules.LOAD, load_vectors),
    )
    for op, make in makers:
        for index in (torch.int32, torch.int64):
            for vector in make(index):
                call, expected = from_vector(op, vector)
                yield Case("vectors", f"{op} {vector.name} {_name(index)}", call, expected, must_run=False)


def sweep_cases(rows: list[dict[str, Any]]) -> Iterator[Case]:
    """Every row of a device's capabilities in every dtype of it."""
    for row in rows:
        for dtype_name in row["dtypes"]:
            dtype = getattr(torch, dtype_name)
            if row["op"] == _rules.LOAD:
                yield from _load_row(row["mode"], dtype)
            elif row["scenario"] in (3, 4, 5):
                yield from _compressed_row(row["scenario"], row["mode"], dtype)
            else:
                yield from _token_row(row["scenario"], row["mode"], dtype)


def edge_cases(rows: list[dict[str, Any]]) -> Iterator[Case]:
    """What the device's own code gets wrong or does not check: each is done right, or refused."""
    have = {(row["op"], row.get("scenario"), row["mode"]) for row in rows}
    half = torch.float16
    if (_rules.SCATTER, 2, "None") in have:
        yield _edge("value strided and key dense", _tokens(2, "None", half, source="value strided"))
        yield _edge("heads with gaps", _tokens(2, "None", half, source="head gaps"))
        yield _edge("tokens that are one row", _tokens(2, "None", half, source="expanded"))
        yield _edge("no tokens", _tokens(2, "None", half, tokens=0))
        yield _edge("only negative slots", _tokens(2, "None", half, slots=[-1] * TOKENS))
        yield _edge("one block", _tokens(2, "None", half, blocks=1, block_size=TOKENS, slots=list(range(TOKENS))[::-1]))
        yield _edge("tokens of 30 bytes", _tokens(2, "None", half, sizes=(5, 5)))
        yield _edge(
            "keys and values block by block in one cache", _tokens(2, "None", half, caches="interleaved"), False
        )
    if (_rules.SCATTER, 6, "None") in have:
        yield _edge("key only, tokens of 30 bytes", _tokens(6, "None", half, sizes=(5, 5)), False)
    if (_rules.SCATTER, 2, "Nct") in have:
        yield _edge("Nct int8, unequal strides", _tokens(2, "Nct", torch.int8, source="unequal"))
    if (_rules.SCATTER, 1, "PA_NZ") in have:
        yield _edge("PA_NZ, blocks of one token", _tokens(1, "PA_NZ", half, block_size=1, blocks=TOKENS + 2))
    for scenario, mode in ((4, "Alibi"), (5, "Omni")):
        if (_rules.SCATTER, scenario, mode) in have:
            yield _edge(f"{mode}, negative slots", _compressed(scenario, mode, half, negative=True))
            yield _edge(f"{mode}, head_size 6", _compressed(scenario, mode, half, size=6), False)
    if (_rules.LOAD, None, "Norm") in have:
        yield _edge("load, no lengths but zero", _load("Norm", half, lengths=(0, 0)))
        yield _edge("load, no sequences", _load("Norm", half, lengths=()))
        yield _edge("load, starts inside a block", _load("Norm", half, starts=(7, 0, 12, 3)))
        yield _edge("load, tokens of 30 bytes", _load("Norm", half, sizes=(5, 5)), False)
        yield _edge("load, outputs at 2 bytes", _load("Norm", half, lead_bytes=2), False)
        yield _edge("load, cumulative lengths from 2", _load("Norm", half, cumsum=True, first_row=2))
    if (_rules.LOAD, None, "PA_NZ") in have:
        yield _edge("load PA_NZ, blocks of 5 tokens", _load("PA_NZ", half, block_size=5), False)
        yield _edge("load PA_NZ, 10224 columns", _load("PA_NZ", half, columns=10224), False)


def _edge(name: str, call: Call, must_run: bool = True) -> Case:
    return Case("edges", name, call, must_run=must_run)


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def _token_row(scenario: int, mode: str, dtype: torch.dtype) -> Iterator[Case]:
    variants: dict[str, dict[str, Any]] = {
        "dense int32": {"index": torch.int32},
        "padded, negative slots, int64": {"index": torch.int64, "source": "padded", "slots": "negative"},
    }
    if mode == "Nct":
        variants |= {"unequal strides, int32": {"index": torch.int32, "source": "unequal"}}
    else:
        variants |= {"fused, int64": {"index": torch.int64, "source": "fused"}}
    if mode == "PA_NZ":
        variants |= {"5-D": {"five_d": True}}
        if dtype == torch.int8:
            variants |= {f"value {_name(d)}": {"value_dtype": d, "slots": "negative"} for d in _16_BIT}
    if mode == "NHSD":  # the device does not skip a negative slot
        variants["padded, negative slots, int64"] = {"index": torch.int64, "source": "padded"}
    for name, options in variants.items():
        call = _tokens(scenario, mode, dtype, **options)
        yield Case("sweep", f"scatter scenario {scenario} {mode} {_name(dtype)} {name}", call)


def _compressed_row(scenario: int, mode: str, dtype: torch.dtype) -> Iterator[Case]:
    for index in (torch.int32, torch.int64):
        call = _compressed(scenario, mode, dtype, index=index)
        yield Case("sweep", f"scatter scenario {scenario} {mode} {_name(dtype)} {_name(index)}", call)


def _load_row(mode: str, dtype: torch.dtype) -> Iterator[Case]:
    if mode == "Norm":
        variants: dict[str, dict[str, Any]] = {
            "int32": {},
            "starts, int64": {"index": torch.int64, "starts": (10, 0, 5, 0)},
            "cumulative lengths, int32": {"cumsum": True},
            "cumulative lengths, starts, int64": {"index": torch.int64, "cumsum": True, "starts": (5, 0, 0, 15)},
        }
    else:
        variants = {
            "4-D, 2-D outputs, int32": {},
            "5-D, 3-D outputs, int64": {"index": torch.int64, "five_d": True, "outputs_3d": True},
        }
        if dtype == torch.int8:
            variants |= {f"value {_name(d)}": {"value_dtype": d} for d in _16_BIT}
    for name, options in variants.items():
        yield Case("sweep", f"load {mode} {_name(dtype)} {name}", _load(mode, dtype, **options))


# ---------------------------------------------------------------------------------------------------------------------
# Calls


class _Bits:
    """Random bit patterns, the same in every run for the same options."""

    def __init__(self, *options: object) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(repr(options).encode()))

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, *, lead_bytes: int = 64) -> Tensor:
        """Make a dense tensor with memory around it that nobody may touch."""
        count = 1
        for size in shape:
            count *= size
        num_bytes = lead_bytes + count * dtype.itemsize + 64
        bits = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=self.generator)
        flat = bits[: num_bytes // dtype.itemsize * dtype.itemsize].view(dtype)
        first = lead_bytes // dtype.itemsize
        return flat[first : first + count].view(shape)

    def numbers(self, *tensors: Tensor) -> None:
        """Put numbers of one magnitude into floating-point tensors, so that means round and never overflow."""
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=self.generator))

    def order(self, count: int) -> list[int]:
        return torch.randperm(count, generator=self.generator).tolist()


def _integers(values: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(dtype).view(shape)


def _nz_shape(heads: int, size: int, block_size: int, dtype: torch.dtype, blocks: int, five_d: bool) -> tuple[int, ...]:
    unit = 32 // dtype.itemsize
    if five_d:
        return (blocks, heads, size // unit, block_size, unit)
    return (blocks, heads * size // unit, block_size, unit)


def _tokens(
    scenario: int,
    mode: str,
    dtype: torch.dtype,
    *,
    value_dtype: torch.dtype | None = None,
    index: torch.dtype = torch.int32,
    source: str = "dense",
    slots: str | list[int] = "any",
    sizes: tuple[int, int] = (32, 64),
    tokens: int = TOKENS,
    blocks: int = BLOCKS,
    block_size: int = 5,
    five_d: bool = False,
    caches: str = "apart",
) -> Call:
    """Scenarios 1, 2, 6 and 7: one row per token."""
    bits = _Bits(scenario, mode, dtype, value_dtype, source, sizes, five_d)
    value_dtype = value_dtype or dtype
    if isinstance(slots, str):
        chosen = bits.order(blocks * block_size)[:tokens]
        if slots == "negative":
            chosen[1], chosen[-1] = -1, -7
        slots = chosen

    def cache(size: int, kind: torch.dtype) -> Tensor:
        if mode == "PA_NZ":
            return bits.tensor(_nz_shape(HEADS, size, block_size, kind, blocks, five_d), kind)
        if mode == "NHSD":
            return bits.tensor((blocks, HEADS, block_size, size), kind)
        return bits.tensor((blocks, block_size, HEADS, size), kind)

    if caches == "interleaved":
        sizes = (sizes[0], sizes[0])
        both = bits.tensor((blocks, 2, block_size, HEADS, sizes[0]), dtype)
        key_cache, value_cache = both[:, 0], both[:, 1]
    else:
        key_cache, value_cache = cache(sizes[0], dtype), cache(sizes[1], value_dtype)
    key, value, strides, offsets = _sources(bits, mode, source, tokens, sizes, (dtype, value_dtype))
    key_only = scenario == 6
    arguments: dict[str, Any] = {
        "key": key,
        "value": None if key_only else value,
        "key_cache": key_cache,
        "value_cache": None if key_only else value_cache,
        "slot_mapping": _integers(slots, (tokens,), index),
        "cache_mode": "PA_NZ" if mode == "PA_NZ" else "Norm",
        "scatter_mode": mode if mode in ("Nct", "NHSD") else "None",
        "strides": strides,
        "offsets": offsets,
    }
    return Call(_rules.SCATTER, arguments, ("key_cache",) if key_only else ("key_cache", "value_cache"))


def _sources(
    bits: _Bits,
    mode: str,
    source: str,
    tokens: int,
    sizes: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor, Tensor, list[int] | None, list[int] | None]:
    """Key and value as an engine has them; for Nct with strides and offsets."""
    widths = tuple(HEADS * size for size in sizes)
    if mode == "Nct":
        gaps = (64, 128) if source == "unequal" else (sum(widths) - widths[0], sum(widths) - widths[1])
        strides = [width + gap for width, gap in zip(widths, gaps, strict=True)]
        memory = [bits.tensor((stride * (tokens + 1),), kind) for stride, kind in zip(strides, dtypes, strict=True)]
        views = [
            flat[: tokens * HEADS * size].view(tokens, HEADS, size) for flat, size in zip(memory, sizes, strict=True)
        ]
        return views[0], views[1], strides, [32, 64]
    if source == "fused" and dtypes[0] == dtypes[1]:  # rows of a projection: query, key and value
        rows = bits.tensor((tokens, 64 + sum(widths)), dtypes[0])
        key = rows[:, 64 : 64 + widths[0]].view(tokens, HEADS, sizes[0])
        return key, rows[:, 64 + widths[0] :].view(tokens, HEADS, sizes[1]), None, None
    if source == "head gaps":
        key, value = (
            bits.tensor((tokens, HEADS, size + 32), kind)[..., :size] for size, kind in zip(sizes, dtypes, strict=True)
        )
        return key, value, None, None
    if source == "expanded":
        key, value = (
            bits.tensor((1, HEADS, size), kind).expand(tokens, HEADS, size)
            for size, kind in zip(sizes, dtypes, strict=True)
        )
        return key, value, None, None
    extra = (3, 2) if source == "padded" else (0, 0)
    key = bits.tensor((tokens + extra[0], HEADS, sizes[0]), dtypes[0])
    if source == "value strided":
        return key, bits.tensor((tokens, HEADS + 1, sizes[1]), dtypes[1])[:, :HEADS], None, None
    return key, bits.tensor((tokens + extra[1], HEADS, sizes[1]), dtypes[1]), None, None


def _compressed(
    scenario: int,
    mode: str,
    dtype: torch.dtype,
    *,
    index: torch.dtype = torch.int32,
    size: int = 32,
    negative: bool = False,
) -> Call:
    """Scenarios 3, 4 and 5: one window per head."""
    bits = _Bits(scenario, mode, dtype, size, negative)
    lengths, heads, block_size = [7, 5], HEADS, 9
    kind = {3: "Alibi"}.get(scenario, mode)
    # A window of each head and where it begins, -1 for nowhere: Alibi keeps the last tokens, Omni drops the window,
    # Rope puts one row in its place.
    windows = [[2, 7, 3], [0, 5, 1]]
    begins = [[1, 0, -1], [2, 0, 4]]
    if kind == "Rope":
        windows, begins = [[2, 3, 5], [1, 2, 4]], [[1, -1, 2], [0, 3, -1]]
    order = bits.order(len(lengths) * heads)
    slots = [block * block_size for block in order]  # a block of its own for each head
    means = []
    if kind == "Rope":
        flat_begins = [begin for row in begins for begin in row]
        means = [slot + begin for slot, begin in zip(slots, flat_begins, strict=True) if begin >= 0]
    if negative:
        slots[1] = -3
    total = sum(lengths)
    if scenario == 3:
        longest = max(lengths)
        shape: tuple[int, ...] = (len(lengths), longest, heads, size)
    else:
        shape = (total, heads, size)
    key, value = bits.tensor(shape, dtype), bits.tensor(shape, dtype)
    blocks = len(lengths) * heads
    caches = [bits.tensor((blocks, block_size, 1, size), dtype) for _ in range(2)]
    if kind == "Rope":
        bits.numbers(key, value)
    flat = [n for row in windows for n in row]
    two_d = scenario == 3
    shape_of_heads = (len(lengths), heads) if two_d else (len(lengths) * heads,)
    arguments: dict[str, Any] = {
        "key": key,
        "value": value,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "slot_mapping": _integers(slots, shape_of_heads, index),
        "compress_lens": _integers(flat, shape_of_heads, index),
        "compress_seq_offsets": (
            None if kind == "Alibi" else _integers([n for row in begins for n in row], (len(lengths) * heads,), index)
        ),
        "seq_lens": _integers(lengths, (len(lengths),), index),
        "cache_mode": "Norm",
        "scatter_mode": "None" if scenario == 3 else mode,
    }
    return Call(_rules.SCATTER, arguments, ("key_cache", "value_cache"), tuple(means))


def _load(
    mode: str,
    dtype: torch.dtype,
    *,
    value_dtype: torch.dtype | None = None,
    index: torch.dtype = torch.int32,
    lengths: tuple[int, ...] = LENGTHS,
    starts: tuple[int, ...] | None = None,
    cumsum: bool = False,
    first_row: int = 0,
    sizes: tuple[int, int] = (32, 64),
    block_size: int | None = None,
    columns: int = 0,
    five_d: bool = False,
    outputs_3d: bool = False,
    lead_bytes: int = 64,
) -> Call:
    """paged_cache_load with rows to spare at the end of its outputs, and columns in its table."""
    bits = _Bits(mode, dtype, value_dtype, lengths, starts, cumsum, sizes)
    nz = mode == "PA_NZ"
    block_size = block_size or (16 if nz else 5)
    value_dtype = value_dtype or dtype
    batch = len(lengths)
    rows = first_row + sum(lengths) + 2
    first_columns = [start // block_size for start in starts] if starts else [0] * batch
    used = [-(-length // block_size) for length in lengths]
    needed = max((f + u for f, u in zip(first_columns, used, strict=True)), default=0)
    columns = max(columns, needed + 1)
    tables = [JUNK] * (batch * columns)
    for b in range(batch):
        blocks = bits.order(BLOCKS)
        for i in range(used[b]):
            tables[b * columns + first_columns[b] + i] = blocks[i]
    lens = list(lengths)
    if cumsum:
        lens = [first_row + sum(lengths[:b]) for b in range(batch + 1)]

    def pair(size: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        if not nz:
            cache = bits.tensor((BLOCKS, block_size, HEADS, size), kind)
            return cache, bits.tensor((rows, HEADS, size), kind, lead_bytes=lead_bytes)
        cache = bits.tensor(_nz_shape(HEADS, size, block_size, kind, BLOCKS, five_d), kind)
        shape = (rows, HEADS, size) if outputs_3d else (rows, HEADS * size)
        return cache, bits.tensor(shape, kind, lead_bytes=lead_bytes)

    key_cache, key = pair(sizes[0], dtype)
    value_cache, value = pair(sizes[1], value_dtype)
    arguments: dict[str, Any] = {
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_tables": _integers(tables, (batch, columns), index),
        "context_lens": _integers(lens, (len(lens),), index),
        "key": key,
        "value": value,
        "seq_starts": None if starts is None else _integers(list(starts), (batch,), index),
        "cache_mode": mode,
        "is_seq_lens_cumsum": cumsum,
    }
    return Call(_rules.LOAD, arguments, ("key", "value"))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
