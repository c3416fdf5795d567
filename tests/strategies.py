"""Complete, valid calls of the operators, for any backend that is held against the reference.

Sizes are small and coprime, memory is what serving engines really pass: key and value out of a fused buffer, caches as
views of one allocation, index tensors with gaps, and around everything bytes that nobody may touch. Contents are random
bit patterns, NaN payloads included. A :class:`Call` is cloned with its memory, run on a backend, and compared with
another clone over whole storages, so that what must not change is compared too.

Structure is drawn, so that failures shrink; values come from a drawn seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

COPY_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.float32,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
MEAN_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

SCATTER_FORMS = (
    "norm",
    "norm_key_only",
    "nct",
    "nct_key_only",
    "nz",
    "nhsd",
    "alibi",
    "rope",
    "omni",
    "alibi_padded",
    "rope_padded",
)
LOAD_FORMS = ("norm", "norm_cumsum", "nz")
PACKED_FORMS = ("2BNHD", "B2NHD", "BHNC", "BNHC")
FORMS = [
    *(("scatter_pa_kv_cache", form) for form in SCATTER_FORMS),
    *(("paged_cache_load", form) for form in LOAD_FORMS),
    *(("scatter_pa_kv_cache_packed", form) for form in PACKED_FORMS),
    *(("paged_cache_load_packed", form) for form in PACKED_FORMS),
]


# ---------------------------------------------------------------------------------------------------------------------
# A call


@dataclass(frozen=True)
class Call:
    """One call of an operator: its arguments, and how results of it may be compared."""

    op: str
    positional: dict[str, Tensor | None]
    keyword: dict[str, Any]
    written: tuple[str, ...]
    duplicates: bool = False  # a slot is written twice: only defined in deterministic mode, which run() turns on
    mean_slots: tuple[int, ...] = field(default=())  # slots that hold a mean, whose NaN payload is left open

    def run(self, function: Callable[..., None]) -> None:
        """Call the function with these arguments; it writes into them."""
        with _deterministic(self.duplicates):
            function(*self.positional.values(), **self.keyword)

    def tensors(self) -> dict[str, Tensor]:
        """Give every tensor that is passed, by name."""
        return {k: v for k, v in (self.positional | self.keyword).items() if isinstance(v, Tensor)}

    def clone(self, device: torch.device | str | None = None) -> Call:
        """Copy all memory, also what lies around the tensors; what shared a storage still does."""
        copies: dict[int, Tensor] = {}

        def copy(argument: Any) -> Any:
            if not isinstance(argument, Tensor):
                return argument
            memory = _memory(argument)
            where = memory.data_ptr()
            if where not in copies or where == 0:
                copies[where] = memory.to(memory.device if device is None else device, copy=True)
            return copies[where].view(argument.dtype).as_strided(argument.shape, argument.stride(), _offset(argument))

        return replace(
            self,
            positional={name: copy(argument) for name, argument in self.positional.items()},
            keyword={name: copy(argument) for name, argument in self.keyword.items()},
        )

    def differences(self, other: Call) -> list[str]:
        """Where the whole memory of two clones differs, one line for each tensor; empty if they are equal.

        A NaN in a row that holds a mean equals any other NaN; every other bit counts.
        """
        self._unify_means()
        other._unify_means()
        lines = []
        theirs = other.tensors()
        for name, tensor in self.tensors().items():
            mine, its = _memory(tensor).cpu(), _memory(theirs[name]).cpu()
            different = (mine != its).nonzero().flatten().tolist()
            if different:
                first = different[0]
                elements = sorted({byte // tensor.element_size() - _offset(tensor) for byte in different[:64]})
                lines.append(
                    f"{name}: {len(different)} bytes of its storage differ, the first at byte {first} "
                    f"({int(mine[first])} and {int(its[first])}); elements from its data pointer: {elements[:8]}"
                )
        return lines

    def _unify_means(self) -> None:
        for name in self.written:
            cache = self.tensors()[name]
            for slot in self.mean_slots:
                row = cache[slot // cache.size(1), slot % cache.size(1), 0]
                row[row.isnan()] = torch.nan

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def __repr__(self) -> str:
        parts: list[str] = []
        for name, argument in (self.positional | self.keyword).items():
            if not isinstance(argument, Tensor):
                parts.append(f"{name}={argument!r}")
                continue
            text = f"{name}={str(argument.dtype).removeprefix('torch.')} {list(argument.shape)}"
            text += f" strides {list(argument.stride())} at {_offset(argument)}"
            if argument.dtype in (torch.int32, torch.int64) and name not in (
                "key",
                "value",
                "key_cache",
                "value_cache",
                "kv_cache",
            ):
                text += f" {argument.tolist()}"
            parts.append(text)
        return f"{self.op}({', '.join(parts)})" + (" with duplicates" if self.duplicates else "")


@contextmanager
def _deterministic(on: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _memory(t: Tensor) -> Tensor:
    """Give the whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def _offset(t: Tensor) -> int:
    return int(t.storage_offset())


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


@dataclass(frozen=True)
class Sizes:
    """Upper ends and choices of the sizes that are drawn."""

    tokens: int = 12  # of a call, or of one sequence
    batch: int = 3
    heads: tuple[int, ...] = (1, 2, 3)
    head_sizes: tuple[int, ...] = (1, 2, 3, 5, 8, 16, 33)
    units: tuple[int, ...] = (1, 2, 3)  # 32-byte units of a head in NZ
    block_sizes: tuple[int, ...] = (1, 2, 3, 5, 8)


SMALL = Sizes()
# Enough bytes to be split between threads, not a multiple of anything.
LARGE = Sizes(tokens=211, batch=5, heads=(3, 7), head_sizes=(64, 132), units=(3, 5), block_sizes=(7, 16))


# ---------------------------------------------------------------------------------------------------------------------
# Memory


class _Memory:
    """Draws how tensors lie in memory, and fills it."""

    def __init__(self, draw: DrawFn, *, dense: bool) -> None:
        self.draw = draw
        self.dense = dense
        self.rng = random.Random(draw(st.integers(0, 2**32 - 1), label="seed"))
        self.generator = torch.Generator().manual_seed(self.rng.getrandbits(32))

    def choose(self, *options: Any) -> Any:
        return options[0] if self.dense else self.draw(st.sampled_from(options))

    def pad(self) -> int:
        return int(self.choose(0, 1, 3))

    def storage(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Make a storage of random bits, 1-D."""
        bits = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8, generator=self.generator)
        return bits.view(dtype)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make a tensor with a dense last dimension and others in any order, with gaps, inside a larger storage."""
        order = list(range(len(shape) - 1))
        if self.choose(False, False, True):
            order = list(self.draw(st.permutations(order)))
        strides = [1] * len(shape)
        extent = max(shape[-1], 1) + self.pad()
        for dim in reversed(order):
            strides[dim] = extent
            extent = extent * max(shape[dim], 1) + self.pad()
        lead = self.pad()
        return self.storage(lead + extent + self.pad(), dtype).as_strided(shape, strides, lead)

    def pair(
        self, shapes: tuple[tuple[int, ...], tuple[int, ...]], dtypes: tuple[torch.dtype, torch.dtype]
    ) -> tuple[Tensor, Tensor]:
        """Key and value, or their caches: apart or out of one allocation."""
        first, second = shapes
        ways = ["apart"]
        if dtypes[0] == dtypes[1]:
            if first[:-1] == second[:-1]:
                ways.append("split")
            if first == second:
                ways += ["unbind(0)", "unbind(1)"]
            if len(first) == len(second) == 3 and first[0] == second[0]:
                ways.append("fused")
        way = self.choose(*ways)
        if way == "apart":
            return self.tensor(first, dtypes[0]), self.tensor(second, dtypes[1])
        if way == "split":
            both = self.tensor((*first[:-1], first[-1] + second[-1]), dtypes[0])
            return both[..., : first[-1]], both[..., first[-1] :]
        if way == "fused":  # rows of a projection: [query heads, key heads, value heads]
            (rows, key_heads, key_size), (_, value_heads, value_size) = first, second
            query, key, value = self.pad(), key_heads * key_size, value_heads * value_size
            both = self.tensor((rows, query + key + value), dtypes[0])
            return (
                both[:, query : query + key].view(rows, key_heads, key_size),
                both[:, query + key :].view(rows, value_heads, value_size),
            )
        dim = 0 if way == "unbind(0)" else 1
        both = self.tensor((*first[:dim], 2, *first[dim:]), dtypes[0])
        return both.select(dim, 0), both.select(dim, 1)

    def source(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make a tensor that is only read; its tokens may all be the same memory."""
        if self.choose(False, False, False, True):
            return self.tensor((1, *shape[1:]), dtype).expand(shape)
        return self.tensor(shape, dtype)

    def sources(
        self, shapes: tuple[tuple[int, ...], tuple[int, ...]], dtypes: tuple[torch.dtype, torch.dtype]
    ) -> tuple[Tensor, Tensor]:
        if self.choose(False, True):
            return self.pair(shapes, dtypes)
        return self.source(shapes[0], dtypes[0]), self.source(shapes[1], dtypes[1])

    def numbers(self, *tensors: Tensor | None) -> None:
        """Half the time, put numbers of one magnitude into tensors of a float dtype, so that sums have to round."""
        if self.draw(st.booleans(), label="numbers"):
            for t in tensors:
                if t is not None:
                    flat = torch.randn(_memory(t).numel() // t.element_size(), generator=self.generator)
                    _memory(t).view(t.dtype).copy_(flat)

    def index(self, values: list[int], shape: tuple[int, ...], label: str) -> Tensor:
        """Make an index tensor of either dtype, dense or with gaps, or with its dimensions swapped in memory."""
        dtype = self.draw(st.sampled_from((torch.int32, torch.int64)), label=f"dtype of {label}")
        info = torch.iinfo(dtype)
        step, lead = self.choose((1, 0), (1, 1), (2, 0), (3, 2))
        order = list(range(len(shape)))
        if self.choose(False, True):
            order.reverse()
        strides = [1] * len(shape)
        extent = step
        for dim in reversed(order):
            strides[dim] = extent
            extent *= max(shape[dim], 1)
        storage = torch.full((lead + extent + 1,), info.min + 77, dtype=dtype)
        index = storage.as_strided(shape, strides, lead)
        clipped = [min(max(value, info.min), info.max) for value in values]
        index.copy_(torch.tensor(clipped, dtype=dtype).view(shape))
        return index

    def negative(self) -> int:
        return self.rng.choice((-1, -1, -2, -1000, -(2**31), -(2**63)))

    def junk(self) -> int:
        """Draw a value of an index tensor that must not be looked at."""
        return self.rng.choice((-1, -(2**63), 2**31 - 1, 2**63 - 1, 0))


# ---------------------------------------------------------------------------------------------------------------------
# scatter_pa_kv_cache


def scatter_calls(
    form: str,
    *,
    dtypes: tuple[torch.dtype, ...] = COPY_DTYPES,
    sizes: Sizes = SMALL,
    duplicates: bool = True,
    dense: bool = False,
) -> SearchStrategy[Call]:
    """Draw valid calls of scatter_pa_kv_cache.

    Args:
        form: one of SCATTER_FORMS.
        dtypes: dtypes of key and value (of these, Rope takes MEAN_DTYPES).
        sizes: sizes to draw.
        duplicates: also give calls that write a slot twice; they run in deterministic mode.
        dense: only contiguous tensors at the beginning of their storage.
    """
    if form in ("alibi", "rope", "omni", "alibi_padded", "rope_padded"):
        return _compressed_calls(form, dtypes, sizes, duplicates, dense)
    return _token_calls(form, dtypes, sizes, duplicates, dense)


def _slots(rng: random.Random, tokens: int, total: int, way: str) -> list[int]:
    """Slots of tokens: in a run, a run with one stranger, anywhere, or anywhere and possibly twice."""
    if way == "twice":
        few = [rng.randrange(total) for _ in range(max(1, tokens // 2))]
        return [rng.choice(few) for _ in range(tokens)]
    if way == "anywhere":
        return rng.sample(range(total), tokens)
    first = rng.randrange(total - tokens + 1)
    slots = list(range(first, first + tokens))
    free = [*range(first), *range(first + tokens, total)]
    if way == "stranger" and slots and free:
        slots[rng.randrange(tokens)] = rng.choice(free)
    return slots


@st.composite
def _token_calls(
    draw: DrawFn, form: str, dtypes: tuple[torch.dtype, ...], sizes: Sizes, duplicates: bool, dense: bool
) -> Call:
    """Scenarios 1, 2, 6 and 7."""
    memory = _Memory(draw, dense=dense)
    nz = form == "nz"
    key_dtype = draw(st.sampled_from(dtypes), label="dtype")
    value_dtype = draw(st.sampled_from(dtypes), label="dtype of value") if nz else key_dtype
    heads = draw(st.sampled_from(sizes.heads), label="heads")
    if nz:
        key_size = draw(st.sampled_from(sizes.units), label="units") * 32 // key_dtype.itemsize
        value_size = draw(st.sampled_from(sizes.units), label="units of value") * 32 // value_dtype.itemsize
    else:
        key_size = draw(st.sampled_from(sizes.head_sizes), label="head_size")
        value_size = draw(st.sampled_from((key_size, *sizes.head_sizes)), label="head_size of value")
    tokens = draw(st.integers(0, sizes.tokens), label="tokens")
    block_size = draw(st.sampled_from(sizes.block_sizes), label="block_size")
    num_blocks = -(-tokens // block_size) + draw(st.integers(1, 2), label="free blocks")

    ways = ["run", "stranger", "anywhere"] + (["twice"] if duplicates else [])
    way = draw(st.sampled_from(ways), label="slots")
    slots = _slots(memory.rng, tokens, num_blocks * block_size, way)
    if draw(st.booleans(), label="padding slots"):
        slots = [memory.negative() if memory.rng.random() < 0.3 else slot for slot in slots]

    def cache_shape(size: int, dtype: torch.dtype) -> tuple[int, ...]:
        if form == "nhsd":
            return (num_blocks, heads, block_size, size)
        if not nz:
            return (num_blocks, block_size, heads, size)
        unit = 32 // dtype.itemsize
        if draw(st.booleans(), label="5-D"):
            return (num_blocks, heads, size // unit, block_size, unit)
        return (num_blocks, heads * size // unit, block_size, unit)

    caches = memory.pair(
        (cache_shape(key_size, key_dtype), cache_shape(value_size, value_dtype)), (key_dtype, value_dtype)
    )
    padding = draw(st.tuples(st.sampled_from((0, 0, 3)), st.sampled_from((0, 0, 2))), label="padding tokens")
    shapes = ((tokens + padding[0], heads, key_size), (tokens + padding[1], heads, value_size))
    keyword: dict[str, Any] = {
        "cache_mode": "PA_NZ" if nz else "Norm",
        "scatter_mode": {"nhsd": "NHSD", "nct": "Nct", "nct_key_only": "Nct"}.get(form, "None"),
    }
    if form.startswith("nct"):
        fused = [_nct_source(memory, shape, key_dtype, tokens) for shape in shapes]
        key, value = fused[0][0], fused[1][0]
        keyword["strides"] = [stride for _, stride, _ in fused]
        offsets = [offset for _, _, offset in fused]
        keyword["offsets"] = None if offsets == [0, 0] and draw(st.booleans(), label="no offsets") else offsets
    else:
        key, value = memory.sources(shapes, (key_dtype, value_dtype))

    key_only = form.endswith("_key_only")
    return Call(
        "scatter_pa_kv_cache",
        {
            "key": key,
            "value": None if key_only else value,
            "key_cache": caches[0],
            "value_cache": None if key_only else caches[1],
            "slot_mapping": memory.index(slots, (tokens,), "slot_mapping"),
        },
        keyword,
        ("key_cache",) if key_only else ("key_cache", "value_cache"),
        duplicates=way == "twice",
    )


def _nct_source(memory: _Memory, shape: tuple[int, ...], dtype: torch.dtype, tokens: int) -> tuple[Tensor, int, int]:
    """Make a tensor, and the stride and offset that say where its tokens really are; they may overlap."""
    width = shape[1] * shape[2]
    stride = memory.draw(st.integers(1, width + 5), label="stride")
    offset = memory.draw(st.sampled_from((0, 1, 4)), label="offset")
    reach = max(offset + (tokens - 1) * stride + width if tokens else 0, shape[0] * width)
    lead = memory.pad()
    strides = memory.choose((width, shape[2], 1), (0, 0, 0))  # not looked at
    return memory.storage(lead + reach + memory.pad(), dtype).as_strided(shape, strides, lead), stride, offset


@st.composite
def _compressed_calls(
    draw: DrawFn, form: str, dtypes: tuple[torch.dtype, ...], sizes: Sizes, duplicates: bool, dense: bool
) -> Call:
    """Scenarios 3, 4 and 5."""
    memory = _Memory(draw, dense=dense)
    rng = memory.rng
    padded = form.endswith("_padded")
    kind = form.removesuffix("_padded")
    if kind == "rope":
        dtypes = tuple(dtype for dtype in dtypes if dtype in MEAN_DTYPES)
    dtype = draw(st.sampled_from(dtypes), label="dtype")
    batch = draw(st.integers(0, sizes.batch), label="batch")
    heads = draw(st.sampled_from(sizes.heads), label="heads")
    key_size = draw(st.sampled_from(sizes.head_sizes), label="head_size")
    value_size = (
        draw(st.sampled_from((key_size, *sizes.head_sizes)), label="head_size of value") if padded else key_size
    )
    lengths = [draw(st.integers(0, max(1, sizes.tokens // 2)), label="seq_len") for _ in range(batch)]
    overlapping = duplicates and draw(st.booleans(), label="overlapping heads")

    windows, offsets, rows = [], [], []
    for length in lengths:
        for _ in range(heads):
            window = rng.randint(0, length)
            offset = rng.choice((-1, length, rng.randint(0, length - window), rng.randint(0, length - window)))
            whole = window == 0 or offset in (-1, length)
            windows.append(window)
            offsets.append(offset)
            if kind == "alibi":
                rows.append(window)
            else:
                rows.append(length if whole else length - window + (kind == "rope"))
    gaps = [rng.randint(0, 2) for _ in rows]
    block_size = draw(st.sampled_from(sizes.block_sizes), label="block_size")
    # -(-a // b): rounded up
    num_blocks = -(-(sum(rows) + sum(gaps)) // block_size) + draw(st.integers(0, 1), label="free blocks")
    total = num_blocks * block_size

    slots = [0] * len(rows)
    next_slot = 0
    order = list(range(len(rows)))
    rng.shuffle(order)
    for task in order:
        slots[task] = rng.randint(0, total - rows[task]) if overlapping else next_slot + gaps[task]
        next_slot += rows[task] + gaps[task]
    skipped = draw(st.booleans(), label="skipped heads")
    mean_slots = []
    for task, slot in enumerate(slots):
        if skipped and rng.random() < 0.3:  # nothing of a skipped head is looked at
            slots[task], windows[task], offsets[task] = memory.negative(), memory.junk(), memory.junk()
            continue
        length = lengths[task // heads]
        if kind == "rope" and windows[task] != 0 and offsets[task] not in (-1, length):
            mean_slots.append(slot + offsets[task])

    tokens = sum(lengths)
    if padded:
        seq_len = max(lengths, default=0) + draw(st.integers(0, 2), label="padding")
        shapes: tuple[tuple[int, ...], tuple[int, ...]] = (
            (batch, seq_len, heads, key_size),
            (batch, seq_len, heads, value_size),
        )
    else:
        shapes = ((tokens, heads, key_size), (tokens, heads, value_size))
    key, value = memory.sources(shapes, (dtype, dtype))
    if kind == "rope":
        memory.numbers(key, value)
    caches = memory.pair(
        ((num_blocks, block_size, 1, key_size), (num_blocks, block_size, 1, value_size)), (dtype, dtype)
    )
    task_shape = (batch, heads) if padded else (batch * heads,)
    keyword: dict[str, Any] = {
        "compress_lens": memory.index(windows, task_shape, "compress_lens"),
        "seq_lens": memory.index(lengths, (batch,), "seq_lens"),
        "cache_mode": "Norm",
        "scatter_mode": "None" if padded else {"alibi": "Alibi", "rope": "Rope", "omni": "Omni"}[kind],
    }
    if kind != "alibi":
        keyword["compress_seq_offsets"] = memory.index(offsets, (batch * heads,), "compress_seq_offsets")
    return Call(
        "scatter_pa_kv_cache",
        {
            "key": key,
            "value": value,
            "key_cache": caches[0],
            "value_cache": caches[1],
            "slot_mapping": memory.index(slots, task_shape, "slot_mapping"),
        },
        keyword,
        ("key_cache", "value_cache"),
        duplicates=overlapping,
        mean_slots=tuple(mean_slots),
    )


# ---------------------------------------------------------------------------------------------------------------------
# paged_cache_load


def load_calls(
    form: str,
    *,
    dtypes: tuple[torch.dtype, ...] = COPY_DTYPES,
    sizes: Sizes = SMALL,
    dense: bool = False,
) -> SearchStrategy[Call]:
    """Draw valid calls of paged_cache_load.

    Args:
        form: one of LOAD_FORMS.
        dtypes: dtypes of the caches.
        sizes: sizes to draw.
        dense: only contiguous tensors at the beginning of their storage.
    """
    return _load_calls(form, dtypes, sizes, dense)


@st.composite
def _load_calls(draw: DrawFn, form: str, dtypes: tuple[torch.dtype, ...], sizes: Sizes, dense: bool) -> Call:
    memory = _Memory(draw, dense=dense)
    rng = memory.rng
    nz, cumsum = form == "nz", form == "norm_cumsum"
    key_dtype = draw(st.sampled_from(dtypes), label="dtype")
    value_dtype = draw(st.sampled_from(dtypes), label="dtype of value") if nz else key_dtype
    heads = draw(st.sampled_from(sizes.heads), label="heads")
    num_blocks = draw(st.integers(1, 2 * max(sizes.tokens // 8, 2)), label="num_blocks")
    block_size = draw(st.sampled_from(sizes.block_sizes), label="block_size")

    batch = draw(st.integers(0, sizes.batch), label="batch")
    lengths = [draw(st.integers(0, sizes.tokens), label="length") for _ in range(batch)]
    starts = None
    if not nz and draw(st.booleans(), label="with seq_starts"):
        starts = [draw(st.integers(0, 2 * block_size + 1), label="seq_start") for _ in range(batch)]
    used = [
        range(first // block_size, first // block_size + -(-length // block_size))
        for first, length in zip(starts or [0] * batch, lengths, strict=True)
    ]
    columns = max((columns.stop for columns, length in zip(used, lengths, strict=True) if length), default=0)
    columns += draw(st.integers(0, 2), label="free columns")
    table = [
        rng.randrange(num_blocks) if column in used[b] else memory.junk()
        for b in range(batch)
        for column in range(columns)
    ]
    if starts is not None:  # of a sequence without tokens, any start will do
        starts = [
            start if length else rng.choice((start, 2**31 - 1)) for start, length in zip(starts, lengths, strict=True)
        ]
    first_row = draw(st.integers(0, 2), label="first row") if cumsum else 0
    num_rows = first_row + sum(lengths) + draw(st.integers(0, 2), label="free rows")
    lens = lengths
    if cumsum:
        lens = [first_row + sum(lengths[:b]) for b in range(batch + 1)]

    def shapes(dtype: torch.dtype, size_label: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a cache and of its output."""
        if not nz:
            size = draw(st.sampled_from(sizes.head_sizes), label=size_label)
            return (num_blocks, block_size, heads, size), (num_rows, heads, size)
        unit = 32 // dtype.itemsize
        units = draw(st.sampled_from(sizes.units), label=size_label)
        cache: tuple[int, ...] = (num_blocks, heads * units, block_size, unit)
        if draw(st.booleans(), label="5-D"):
            cache = (num_blocks, heads, units, block_size, unit)
        return cache, (num_rows, heads * units * unit)

    key_shapes = shapes(key_dtype, "head_size")
    value_shapes = shapes(value_dtype, "head_size of value")
    caches = memory.pair((key_shapes[0], value_shapes[0]), (key_dtype, value_dtype))
    outputs = memory.pair((key_shapes[1], value_shapes[1]), (key_dtype, value_dtype))
    if nz:  # rows are dense; the heads of the output are its own business: 4 of them may end inside a unit
        split = [draw(st.sampled_from((0, heads, 4, 1)), label="heads of output") for _ in outputs]
        key, value = (
            out.view(num_rows, n, out.size(1) // n) if n else out for out, n in zip(outputs, split, strict=True)
        )
        outputs = key, value
    return Call(
        "paged_cache_load",
        {
            "key_cache": caches[0],
            "value_cache": caches[1],
            "block_tables": memory.index(table, (batch, columns), "block_tables"),
            "context_lens": memory.index(lens, (len(lens),), "context_lens"),
            "key": outputs[0],
            "value": outputs[1],
        },
        {
            "seq_starts": None if starts is None else memory.index(starts, (batch,), "seq_starts"),
            "cache_mode": "PA_NZ" if nz else "Norm",
            "is_seq_lens_cumsum": cumsum,
        },
        ("key", "value"),
    )


# ---------------------------------------------------------------------------------------------------------------------
# The packed operators: a call of the plain one with another cache


def packed_shape(form: str, num_blocks: int, block_size: int, heads: int, sizes: tuple[int, int]) -> tuple[int, ...]:
    """Shape of a cache of this kv_layout; sizes are the head sizes of key and value."""
    content = sum(sizes)
    return {
        "2BNHD": (2, num_blocks, block_size, heads, sizes[0]),
        "B2NHD": (num_blocks, 2, block_size, heads, sizes[0]),
        "BHNC": (num_blocks, heads, block_size, content),
        "BNHC": (num_blocks, block_size, heads, content),
    }[form]


def packed_calls(
    op: str,
    form: str,
    *,
    dtypes: tuple[torch.dtype, ...] = COPY_DTYPES,
    sizes: Sizes = SMALL,
    duplicates: bool = True,
    dense: bool = False,
) -> SearchStrategy[Call]:
    """Draw valid calls of a packed operator.

    Args:
        op: scatter_pa_kv_cache_packed or paged_cache_load_packed.
        form: the kv_layout, one of PACKED_FORMS.
        dtypes: dtypes of all but the index tensors.
        sizes: sizes to draw.
        duplicates: also give calls that write a slot twice; they run in deterministic mode.
        dense: only contiguous tensors at the beginning of their storage.
    """
    return _packed_calls(op, form, dtypes, sizes, duplicates, dense)


@st.composite
def _packed_calls(
    draw: DrawFn, op: str, form: str, dtypes: tuple[torch.dtype, ...], sizes: Sizes, duplicates: bool, dense: bool
) -> Call:
    if op == "scatter_pa_kv_cache_packed":
        call = draw(_token_calls("norm", dtypes, sizes, duplicates, dense))
    else:
        call = draw(_load_calls(draw(st.sampled_from(("norm", "norm_cumsum"))), dtypes, sizes, dense))
    plain = call.tensors()
    num_blocks, block_size, heads, key_size = plain["key_cache"].shape
    head_sizes = (key_size, plain["value_cache"].size(3) if form in ("BHNC", "BNHC") else key_size)
    dtype = plain["key"].dtype
    memory = _Memory(draw, dense=dense)
    kv_cache = memory.tensor(packed_shape(form, num_blocks, block_size, heads, head_sizes), dtype)
    shapes = (
        (plain["key"].size(0), heads, head_sizes[0]),
        (plain["value"].size(0), heads, head_sizes[1]),
    )
    if op == "scatter_pa_kv_cache_packed":
        key, value = memory.sources(shapes, (dtype, dtype))
        return Call(
            op,
            {"key": key, "value": value, "kv_cache": kv_cache, "slot_mapping": plain["slot_mapping"]},
            {"kv_layout": form},
            ("kv_cache",),
            duplicates=call.duplicates,
        )
    key, value = memory.pair(shapes, (dtype, dtype))
    return Call(
        op,
        {
            "kv_cache": kv_cache,
            "block_tables": plain["block_tables"],
            "context_lens": plain["context_lens"],
            "key": key,
            "value": value,
        },
        {
            "kv_layout": form,
            "seq_starts": call.keyword["seq_starts"],
            "is_seq_lens_cumsum": call.keyword["is_seq_lens_cumsum"],
        },
        ("key", "value"),
    )


def any_calls(
    op: str, form: str, *, dtypes: tuple[torch.dtype, ...] = COPY_DTYPES, sizes: Sizes = SMALL, duplicates: bool = True
) -> SearchStrategy[Call]:
    """Draw valid calls of one of FORMS."""
    if op.endswith("_packed"):
        return packed_calls(op, form, dtypes=dtypes, sizes=sizes, duplicates=duplicates)
    if op == "paged_cache_load":
        return load_calls(form, dtypes=dtypes, sizes=sizes)
    return scatter_calls(form, dtypes=dtypes, sizes=sizes, duplicates=duplicates)
