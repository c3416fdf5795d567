"""Which arguments do the operators take? The rules that need no tensor data, in Python.

The C++ rules (``csrc/scatter_args.cpp``, ``csrc/load_args.cpp``) are mirrored here once, word for word, for the
fake kernels and for the reference. Sizes may be ``SymInt``. Rules on memory (storage bounds, overlap) and on
values (slots, ids, lengths) need real tensors and stand in :mod:`pacache_torch.reference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
from torch import Tensor

SCATTER = "scatter_pa_kv_cache"
LOAD = "paged_cache_load"
SCATTER_PACKED = "scatter_pa_kv_cache_packed"
LOAD_PACKED = "paged_cache_load_packed"

COPY_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int8,
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
INDEX_DTYPES = (torch.int32, torch.int64)
CACHE_MODES = ("Norm", "PA_NZ")
SCATTER_MODES = ("None", "Nct", "Alibi", "Rope", "Omni", "NHSD")
MAX_NZ_BLOCK_SIZE = 65535


@dataclass(frozen=True)
class PackedLayout:
    """Where keys and values lie in a cache that holds both: its shape, and which dimension is what.

    Letters of a name: B num_blocks, N block_size, H num_heads, D head_size, C the elements of key and then of value of
    one token and head.
    """

    name: str
    shape: str
    rank: int
    half: int | None  # of size 2: key, value; None: the last dimension holds both
    block: int
    position: int
    head: int


PACKED_LAYOUTS = {
    layout.name: layout
    for layout in (
        PackedLayout("2BNHD", "[2, num_blocks, block_size, num_heads, head_size]", 5, 0, 1, 2, 3),
        PackedLayout("B2NHD", "[num_blocks, 2, block_size, num_heads, head_size]", 5, 1, 0, 2, 3),
        PackedLayout("BHNC", "[num_blocks, num_heads, block_size, C]", 4, None, 0, 2, 1),
        PackedLayout("BNHC", "[num_blocks, block_size, num_heads, C]", 4, None, 0, 1, 2),
    )
}

Kind = Literal["norm", "nct", "nz", "nhsd", "alibi", "rope", "omni"]


def _shape(t: Tensor) -> list[int]:
    return list(t.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float16`` as ``float16``."""
    return str(dtype).removeprefix("torch.")


def require(
    condition: bool | torch.SymBool,
    error: type[Exception],
    op: str,
    argument: str,
    text: Callable[[], str],
) -> None:
    """Raise ``error("op: argument text")`` unless the condition holds; a symbolic condition becomes a guard."""
    message: Callable[[], str] = lambda: f"{op}: {argument} {text()}"  # noqa: E731
    if isinstance(condition, bool):
        if not condition:
            raise error(message())
    else:
        torch._check_value(condition, message)


def fail(error: type[Exception], op: str, argument: str, text: str) -> NoReturn:
    """Raise the error of a rule that does not hold."""
    raise error(f"{op}: {argument} {text}")


def nz_unit(dtype: torch.dtype) -> int:
    """Elements in one 32-byte unit of the NZ layout: 8, 16 or 32."""
    return 32 // dtype.itemsize


def check_tensors(op: str, tensors: Sequence[tuple[str, Tensor | None]]) -> None:
    """Layout, device and grad rules; the first tensor leads."""
    lead_name, lead = tensors[0]
    assert lead is not None
    for name, t in tensors:
        if t is None:
            continue
        if t.layout != torch.strided:
            fail(
                ValueError,
                op,
                name,
                f"must be a strided tensor, got layout {str(t.layout).removeprefix('torch.')}",
            )
        if t.device != lead.device:
            fail(ValueError, op, name, f"must be on {lead.device} as {lead_name}, got {t.device}")
        if t.requires_grad and torch.is_grad_enabled():
            fail(
                RuntimeError,
                op,
                name,
                "must not require grad while grad mode is on (the op has no backward; "
                "use torch.no_grad() or detach()), got requires_grad=True",
            )
        # For sizes that are known: a graph of dynamic sizes learns of such at its calls.
        sizes = [max(size, 1) for size in t.shape if type(size) is int]
        if math.prod(sizes) * t.dtype.itemsize >= 2**62:
            text = f"must have sizes, each taken as 1 at least, of less than 2^62 bytes, got {list(t.shape)}"
            fail(ValueError, op, name, text)


def _check_copy_dtype(op: str, name: str, t: Tensor) -> None:
    if t.dtype not in COPY_DTYPES:
        fail(TypeError, op, name, f"must have a 1-, 2- or 4-byte dtype, got {dtype_name(t.dtype)}")


def _check_same_dtype(op: str, name: str, t: Tensor, as_name: str, as_t: Tensor, why: str = "") -> None:
    if t.dtype != as_t.dtype:
        fail(
            TypeError,
            op,
            name,
            f"must have dtype {dtype_name(as_t.dtype)} as {as_name}{why}, got {dtype_name(t.dtype)}",
        )


def _check_index_dtype(op: str, name: str, t: Tensor | None) -> None:
    if t is not None and t.dtype not in INDEX_DTYPES:
        fail(TypeError, op, name, f"must be int32 or int64, got {dtype_name(t.dtype)}")


def _check_dense_last_dim(op: str, name: str, t: Tensor) -> None:
    if t.size(-1) > 1:
        require(
            t.stride(-1) == 1,
            ValueError,
            op,
            name,
            lambda: f"must have a dense last dimension (stride 1), got strides {list(t.stride())}",
        )


def _check_rank_and_dims(
    op: str,
    name: str,
    t: Tensor,
    rank: int,
    dims: dict[int, int],
    text: Callable[[], str],
) -> None:
    """The tensor has this rank and, at these dimensions, these sizes."""
    require(t.dim() == rank, ValueError, op, name, lambda: f"must be {text()}, got {_shape(t)}")
    for dim, size in dims.items():
        require(t.size(dim) == size, ValueError, op, name, lambda: f"must be {text()}, got {_shape(t)}")


@dataclass(frozen=True)
class ScatterArgs:
    """What a checked call of scatter_pa_kv_cache is: kind of copy, scenario (CANN's number) and geometry."""

    kind: Kind
    scenario: int
    num_tokens: int
    num_heads: int
    num_blocks: int
    block_size: int


def check_scatter(
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping: Tensor,
    compress_lens: Tensor | None,
    compress_seq_offsets: Tensor | None,
    seq_lens: Tensor | None,
    cache_mode: str,
    scatter_mode: str,
    strides: Sequence[int] | None,
    offsets: Sequence[int] | None,
) -> ScatterArgs:
    """Check a call of scatter_pa_kv_cache; raises as the operator's docstring says."""
    op = SCATTER
    check_tensors(
        op,
        (
            ("key", key),
            ("value", value),
            ("key_cache", key_cache),
            ("value_cache", value_cache),
            ("slot_mapping", slot_mapping),
            ("compress_lens", compress_lens),
            ("compress_seq_offsets", compress_seq_offsets),
            ("seq_lens", seq_lens),
        ),
    )
    kind, scenario, with_mode = _scatter_scenario(key, compress_seq_offsets, cache_mode, scatter_mode)
    _check_presence(
        kind,
        scenario,
        with_mode,
        value,
        value_cache,
        compress_lens,
        compress_seq_offsets,
        seq_lens,
        strides,
        offsets,
    )
    if scenario == 2 and value is None:
        scenario = 6

    _check_copy_dtype(op, "key", key)
    _check_same_dtype(op, "key_cache", key_cache, "key", key)
    if value is not None and value_cache is not None:
        _check_copy_dtype(op, "value", value)
        if kind != "nz":
            _check_same_dtype(op, "value", value, "key", key, " (only PA_NZ may mix)")
        _check_same_dtype(op, "value_cache", value_cache, "value", value)
    for name, index in (
        ("slot_mapping", slot_mapping),
        ("compress_lens", compress_lens),
        ("compress_seq_offsets", compress_seq_offsets),
        ("seq_lens", seq_lens),
    ):
        _check_index_dtype(op, name, index)
    if kind == "rope" and key.dtype not in MEAN_DTYPES:
        fail(
            TypeError,
            op,
            "key",
            f"must be float16, bfloat16 or float32 for the window mean of Rope, got {dtype_name(key.dtype)}",
        )

    num_tokens = _check_scatter_inputs(
        kind, scenario, key, value, slot_mapping, compress_lens, compress_seq_offsets, seq_lens
    )
    num_heads = key.size(-2)
    num_blocks, block_size = _check_scatter_cache(kind, "key", key, key_cache)
    if value is not None and value_cache is not None:
        value_blocks = _check_scatter_cache(kind, "value", value, value_cache)
        for mine, theirs in zip(value_blocks, (num_blocks, block_size), strict=True):
            require(
                mine == theirs,
                ValueError,
                op,
                "value_cache",
                lambda: (
                    f"must have num_blocks {num_blocks} and block_size {block_size} as key_cache, "
                    f"got {_shape(value_cache)}"
                ),
            )
    if kind in ("norm", "nct", "nz", "nhsd") and scenario != 3:
        _check_capacity(op, num_blocks, block_size, num_tokens)
    for name, t in (("key", key), ("value", value)):
        if t is not None and kind != "nct":
            _check_dense_last_dim(op, name, t)
    for name, t in (("key_cache", key_cache), ("value_cache", value_cache)):
        if t is not None:
            _check_dense_last_dim(op, name, t)
    return ScatterArgs(kind, scenario, num_tokens, num_heads, num_blocks, block_size)


def _scatter_scenario(
    key: Tensor, compress_seq_offsets: Tensor | None, cache_mode: str, scatter_mode: str
) -> tuple[Kind, int, str]:
    """Kind and scenario, and how an error names the mode that chose them."""
    op = SCATTER
    if cache_mode not in CACHE_MODES:
        fail(ValueError, op, "cache_mode", f"must be 'Norm' or 'PA_NZ', got '{cache_mode}'")
    if scatter_mode not in SCATTER_MODES:
        fail(
            ValueError,
            op,
            "scatter_mode",
            f"must be 'None', 'Nct', 'Alibi', 'Rope', 'Omni' or 'NHSD', got '{scatter_mode}'",
        )
    if cache_mode == "PA_NZ":
        if scatter_mode != "None":
            fail(ValueError, op, "scatter_mode", f"must be 'None' with cache_mode 'PA_NZ', got '{scatter_mode}'")
        return "nz", 1, "with cache_mode 'PA_NZ'"
    with_mode = f"with scatter_mode '{scatter_mode}'"
    if scatter_mode == "None":
        if key.dim() == 4:
            return ("alibi" if compress_seq_offsets is None else "rope"), 3, "with a 4-D key"
        return "norm", 2, with_mode
    if scatter_mode == "Nct":
        return "nct", 2, with_mode
    if scatter_mode == "Alibi":
        return "alibi", 4, with_mode
    if scatter_mode == "Rope":
        return "rope", 5, with_mode
    if scatter_mode == "Omni":
        return "omni", 5, with_mode
    return "nhsd", 7, with_mode


def _check_presence(
    kind: Kind,
    scenario: int,
    with_mode: str,
    value: Tensor | None,
    value_cache: Tensor | None,
    compress_lens: Tensor | None,
    compress_seq_offsets: Tensor | None,
    seq_lens: Tensor | None,
    strides: Sequence[int] | None,
    offsets: Sequence[int] | None,
) -> None:
    """Which optional arguments the scenario takes, and which it does not."""
    op = SCATTER
    if (value is None) != (value_cache is None):
        given = "value and no value_cache" if value_cache is None else "value_cache and no value"
        fail(ValueError, op, "value", f"and value_cache must be given together, got {given}")
    if value is None and scenario != 2:
        fail(ValueError, op, "value", f"must be given {with_mode}, got None")

    compressed = scenario in (3, 4, 5)
    offsets_needed = scenario == 5
    offsets_taken = scenario == 3 or offsets_needed
    for name, t, needed, taken in (
        ("compress_lens", compress_lens, compressed, compressed),
        ("compress_seq_offsets", compress_seq_offsets, offsets_needed, offsets_taken),
        ("seq_lens", seq_lens, compressed, compressed),
    ):
        if t is None and needed:
            fail(ValueError, op, name, f"must be given {with_mode}, got None")
        if t is not None and not taken:
            fail(ValueError, op, name, f"must be None {with_mode}, got a tensor of shape {_shape(t)}")

    if kind == "nct" and strides is None:
        fail(ValueError, op, "strides", f"must be given {with_mode}, got None")
    for name, pair, least in (("strides", strides, 1), ("offsets", offsets, 0)):
        if pair is None:
            continue
        if kind != "nct":
            fail(ValueError, op, name, f"must be None {with_mode}, got {list(pair)}")
        if len(pair) != 2:
            fail(ValueError, op, name, f"must have 2 elements (key, value), got {list(pair)}")
        _check_pair(name, pair, least)


def _check_pair(name: str, pair: Sequence[int], least: int) -> None:
    for element in pair:
        require(element >= least, ValueError, SCATTER, name, lambda: f"must be at least {least} each, got {list(pair)}")


def _check_token_inputs(
    op: str, key: Tensor, value: Tensor | None, slot_mapping: Tensor, *, may_be_padded: bool
) -> int:
    """Scenarios 1, 2, 6 and 7: one row per slot; gives the number of tokens."""
    text = "[num_tokens, num_heads, head_size]"
    key_text = f"{text} or [batch, seq_len, num_heads, head_size]" if may_be_padded else text
    _check_rank_and_dims(op, "key", key, 3, {}, lambda: key_text)
    _check_rank_and_dims(op, "slot_mapping", slot_mapping, 1, {}, lambda: "[num_tokens]")
    num_tokens = slot_mapping.size(0)
    if value is not None:
        heads = key.size(1)
        _check_rank_and_dims(op, "value", value, 3, {1: heads}, lambda: f"{text} with num_heads {heads} as key")
    for name, t in (("key", key), ("value", value)):
        if t is not None:
            _check_rows(op, name, t, num_tokens)
    return num_tokens


def _check_rows(op: str, name: str, t: Tensor, num_tokens: int) -> None:
    require(
        t.size(0) >= num_tokens,
        ValueError,
        op,
        name,
        lambda: f"must have at least the {num_tokens} tokens of slot_mapping, got {_shape(t)}",
    )


def _check_capacity(op: str, num_blocks: int, block_size: int, num_tokens: int) -> None:
    require(
        num_blocks * block_size >= num_tokens,
        ValueError,
        op,
        "slot_mapping",
        lambda: f"must have at most num_blocks * block_size = {num_blocks * block_size} elements, got {num_tokens}",
    )


def _check_scatter_inputs(
    kind: Kind,
    scenario: int,
    key: Tensor,
    value: Tensor | None,
    slot_mapping: Tensor,
    compress_lens: Tensor | None,
    compress_seq_offsets: Tensor | None,
    seq_lens: Tensor | None,
) -> int:
    """Shapes of everything but the caches; gives the number of tokens (rows of key that are read)."""
    op = SCATTER
    if scenario in (1, 2, 6, 7):
        return _check_token_inputs(op, key, value, slot_mapping, may_be_padded=kind == "norm")

    assert value is not None and compress_lens is not None and seq_lens is not None
    if scenario == 3:
        batch, seq_len, heads = key.shape[:3]
        _check_rank_and_dims(
            op,
            "value",
            value,
            4,
            {0: batch, 1: seq_len, 2: heads},
            lambda: (
                f"[batch, seq_len, num_heads, head_size] with batch {batch}, seq_len {seq_len} and "
                f"num_heads {heads} as key"
            ),
        )
        _check_rank_and_dims(op, "seq_lens", seq_lens, 1, {0: batch}, lambda: f"[batch] = [{batch}]")
        for name, t in (("slot_mapping", slot_mapping), ("compress_lens", compress_lens)):
            _check_rank_and_dims(
                op, name, t, 2, {0: batch, 1: heads}, lambda: f"[batch, num_heads] = [{batch}, {heads}]"
            )
        num_tokens = batch * seq_len
    else:
        _check_rank_and_dims(op, "key", key, 3, {}, lambda: "[num_tokens, num_heads, head_size]")
        num_tokens, heads, head_size = key.shape
        _check_rank_and_dims(
            op,
            "value",
            value,
            3,
            dict(enumerate(key.shape)),
            lambda: f"[{num_tokens}, {heads}, {head_size}] as key",
        )
        _check_rank_and_dims(op, "seq_lens", seq_lens, 1, {}, lambda: "[batch]")
        batch = seq_lens.size(0)
        for name, t in (("slot_mapping", slot_mapping), ("compress_lens", compress_lens)):
            _check_rank_and_dims(op, name, t, 1, {0: batch * heads}, lambda: f"[batch * num_heads] = [{batch * heads}]")
    if compress_seq_offsets is not None:
        _check_rank_and_dims(
            op,
            "compress_seq_offsets",
            compress_seq_offsets,
            1,
            {0: batch * heads},
            lambda: f"[batch * num_heads] = [{batch * heads}]",
        )
    return num_tokens


def _check_scatter_cache(kind: Kind, source_name: str, source: Tensor, cache: Tensor) -> tuple[int, int]:
    """One cache against the tensor that is written into it; gives (num_blocks, block_size)."""
    op = SCATTER
    name = f"{source_name}_cache"
    heads, head_size = source.shape[-2:]
    if kind == "nz":
        unit = nz_unit(source.dtype)
        require(
            head_size % unit == 0,
            ValueError,
            op,
            source_name,
            lambda: (
                f"must have a head_size that is a multiple of {unit} (32 bytes) with cache_mode 'PA_NZ', "
                f"got {_shape(source)}"
            ),
        )
        block_dim = _check_nz_rank(
            op,
            name,
            cache,
            {1: heads * head_size // unit, 3: unit},
            {1: heads, 2: head_size // unit, 4: unit},
            lambda: (
                f"[num_blocks, {heads * head_size // unit}, block_size, {unit}] or "
                f"[num_blocks, {heads}, {head_size // unit}, block_size, {unit}] for {source_name} {_shape(source)}"
            ),
        )
    elif kind == "nhsd":
        block_dim = 2
        _check_rank_and_dims(
            op,
            name,
            cache,
            4,
            {1: heads, 3: head_size},
            lambda: (
                f"[num_blocks, num_heads, block_size, head_size] with num_heads {heads} and head_size {head_size} "
                f"as {source_name}"
            ),
        )
    elif kind in ("norm", "nct"):
        block_dim = 1
        _check_rank_and_dims(
            op,
            name,
            cache,
            4,
            {2: heads, 3: head_size},
            lambda: (
                f"[num_blocks, block_size, num_heads, head_size] with num_heads {heads} and head_size {head_size} "
                f"as {source_name}"
            ),
        )
    else:
        block_dim = 1
        _check_rank_and_dims(
            op,
            name,
            cache,
            4,
            {2: 1, 3: head_size},
            lambda: f"[num_blocks, block_size, 1, head_size] with head_size {head_size} as {source_name}",
        )
    block_size = _check_block_size(op, name, cache, block_dim)
    if kind == "nz":
        require(
            block_size <= MAX_NZ_BLOCK_SIZE,
            ValueError,
            op,
            name,
            lambda: (
                f"must have a block_size of at most {MAX_NZ_BLOCK_SIZE} with cache_mode 'PA_NZ', got {_shape(cache)}"
            ),
        )
    return cache.size(0), block_size


def _check_nz_rank(
    op: str,
    name: str,
    cache: Tensor,
    dims_4d: dict[int, int],
    dims_5d: dict[int, int],
    text: Callable[[], str],
) -> int:
    """An NZ cache in its 4-D or its 5-D form; gives the dimension that holds block_size."""
    rank = 5 if cache.dim() == 5 else 4
    _check_rank_and_dims(op, name, cache, rank, dims_5d if rank == 5 else dims_4d, text)
    return rank - 2


def _check_block_size(op: str, name: str, cache: Tensor, block_dim: int) -> int:
    block_size = cache.size(block_dim)
    require(block_size >= 1, ValueError, op, name, lambda: f"must have a block_size of at least 1, got {_shape(cache)}")
    return block_size


@dataclass(frozen=True)
class LoadArgs:
    """What a checked call of paged_cache_load is."""

    nz: bool
    batch: int
    num_rows: int
    num_blocks: int
    block_size: int


def check_load(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    key: Tensor,
    value: Tensor,
    seq_starts: Tensor | None,
    cache_mode: str,
    is_seq_lens_cumsum: bool,
) -> LoadArgs:
    """Check a call of paged_cache_load; raises as the operator's docstring says."""
    op = LOAD
    check_tensors(
        op,
        (
            ("key_cache", key_cache),
            ("value_cache", value_cache),
            ("block_tables", block_tables),
            ("context_lens", context_lens),
            ("key", key),
            ("value", value),
            ("seq_starts", seq_starts),
        ),
    )
    if cache_mode not in CACHE_MODES:
        fail(ValueError, op, "cache_mode", f"must be 'Norm' or 'PA_NZ', got '{cache_mode}'")
    nz = cache_mode == "PA_NZ"
    if nz and is_seq_lens_cumsum:
        fail(ValueError, op, "is_seq_lens_cumsum", "must be False with cache_mode 'PA_NZ', got True")
    if nz and seq_starts is not None:
        fail(
            ValueError,
            op,
            "seq_starts",
            f"must be None with cache_mode 'PA_NZ', got a tensor of shape {_shape(seq_starts)}",
        )

    _check_copy_dtype(op, "key_cache", key_cache)
    _check_copy_dtype(op, "value_cache", value_cache)
    if not nz:
        _check_same_dtype(op, "value_cache", value_cache, "key_cache", key_cache, " (only PA_NZ may mix)")
    _check_same_dtype(op, "key", key, "key_cache", key_cache)
    _check_same_dtype(op, "value", value, "value_cache", value_cache)
    for name, index in (("block_tables", block_tables), ("context_lens", context_lens), ("seq_starts", seq_starts)):
        _check_index_dtype(op, name, index)

    batch = _check_load_indices(op, block_tables, context_lens, seq_starts, is_seq_lens_cumsum)
    if nz:
        num_blocks, block_size = _check_nz_load("key", key_cache, key)
        value_blocks = _check_nz_load("value", value_cache, value)
    else:
        num_blocks, block_size = _check_norm_load("key", key_cache, key)
        value_blocks = _check_norm_load("value", value_cache, value)
        heads = key_cache.size(2)
        require(
            value_cache.size(2) == heads,
            ValueError,
            op,
            "value_cache",
            lambda: f"must have num_heads {heads} as key_cache, got {_shape(value_cache)}",
        )
    for mine, theirs in zip(value_blocks, (num_blocks, block_size), strict=True):
        require(
            mine == theirs,
            ValueError,
            op,
            "value_cache",
            lambda: (
                f"must have num_blocks {num_blocks} and block_size {block_size} as key_cache, got {_shape(value_cache)}"
            ),
        )
    num_rows = key.size(0)
    require(
        value.size(0) == num_rows,
        ValueError,
        op,
        "value",
        lambda: f"must have num_tokens {num_rows} as key, got {_shape(value)}",
    )
    for name, t in (("key_cache", key_cache), ("value_cache", value_cache), ("key", key), ("value", value)):
        _check_dense_last_dim(op, name, t)
    for name, t in (("key", key), ("value", value)):
        if nz and t.dim() == 3 and t.size(1) > 1 and t.size(2) > 0:
            _check_dense_rows(name, t)
    return LoadArgs(nz, batch, num_rows, num_blocks, block_size)


def _check_load_indices(
    op: str, block_tables: Tensor, context_lens: Tensor, seq_starts: Tensor | None, is_seq_lens_cumsum: bool
) -> int:
    """The index tensors among themselves; gives the batch size."""
    _check_rank_and_dims(op, "block_tables", block_tables, 2, {}, lambda: "[batch, max_num_blocks]")
    batch = block_tables.size(0)
    if is_seq_lens_cumsum:
        _check_rank_and_dims(
            op,
            "context_lens",
            context_lens,
            1,
            {0: batch + 1},
            lambda: f"[batch + 1] = [{batch + 1}] with is_seq_lens_cumsum",
        )
    else:
        _check_rank_and_dims(op, "context_lens", context_lens, 1, {0: batch}, lambda: f"[batch] = [{batch}]")
    if seq_starts is not None:
        _check_rank_and_dims(op, "seq_starts", seq_starts, 1, {0: batch}, lambda: f"[batch] = [{batch}]")
    return batch


def _check_dense_rows(name: str, t: Tensor) -> None:
    require(
        t.stride(1) == t.size(2),
        ValueError,
        LOAD,
        name,
        lambda: f"must have dense rows with cache_mode 'PA_NZ', got shape {_shape(t)} and strides {list(t.stride())}",
    )


def _check_norm_load(out_name: str, cache: Tensor, out: Tensor) -> tuple[int, int]:
    """One Norm cache and its output; gives (num_blocks, block_size)."""
    op = LOAD
    name = f"{out_name}_cache"
    _check_rank_and_dims(op, name, cache, 4, {}, lambda: "[num_blocks, block_size, num_heads, head_size]")
    block_size = _check_block_size(op, name, cache, 1)
    heads, head_size = cache.shape[2:]
    _check_rank_and_dims(
        op,
        out_name,
        out,
        3,
        {1: heads, 2: head_size},
        lambda: f"[num_tokens, num_heads, head_size] with num_heads {heads} and head_size {head_size} as {name}",
    )
    return cache.size(0), block_size


def _check_nz_load(out_name: str, cache: Tensor, out: Tensor) -> tuple[int, int]:
    """One NZ cache and its output; gives (num_blocks, block_size)."""
    op = LOAD
    name = f"{out_name}_cache"
    unit = nz_unit(cache.dtype)
    block_dim = _check_nz_rank(
        op,
        name,
        cache,
        {3: unit},
        {4: unit},
        lambda: (
            f"[num_blocks, num_heads * head_size / {unit}, block_size, {unit}] or "
            f"[num_blocks, num_heads, head_size / {unit}, block_size, {unit}]"
        ),
    )
    block_size = _check_block_size(op, name, cache, block_dim)
    width = cache.size(1) * unit if cache.dim() == 4 else cache.size(1) * cache.size(2) * unit
    text: Callable[[], str] = lambda: (  # noqa: E731
        f"must be [num_tokens, {width}] or [num_tokens, num_heads, head_size] with num_heads * head_size {width} "
        f"as {name}, got {_shape(out)}"
    )
    require(out.dim() in (2, 3), ValueError, op, out_name, text)
    out_width = out.size(1) if out.dim() == 2 else out.size(1) * out.size(2)
    require(out_width == width, ValueError, op, out_name, text)
    return cache.size(0), block_size


def check_scatter_packed(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_layout: str
) -> tuple[ScatterArgs, PackedLayout]:
    """Check a call of scatter_pa_kv_cache_packed; raises as the operator's docstring says."""
    op = SCATTER_PACKED
    check_tensors(op, (("key", key), ("value", value), ("kv_cache", kv_cache), ("slot_mapping", slot_mapping)))
    layout = _packed_layout(op, kv_layout)
    _check_copy_dtype(op, "key", key)
    _check_same_dtype(op, "value", value, "key", key)
    _check_same_dtype(op, "kv_cache", kv_cache, "key", key)
    _check_index_dtype(op, "slot_mapping", slot_mapping)
    num_tokens = _check_token_inputs(op, key, value, slot_mapping, may_be_padded=False)
    num_blocks, block_size = _check_packed_cache(op, layout, key, value, kv_cache)
    _check_capacity(op, num_blocks, block_size, num_tokens)
    for name, t in (("key", key), ("value", value), ("kv_cache", kv_cache)):
        _check_dense_last_dim(op, name, t)
    return ScatterArgs("norm", 2, num_tokens, key.size(1), num_blocks, block_size), layout


def check_load_packed(
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    key: Tensor,
    value: Tensor,
    kv_layout: str,
    seq_starts: Tensor | None,
    is_seq_lens_cumsum: bool,
) -> tuple[LoadArgs, PackedLayout]:
    """Check a call of paged_cache_load_packed; raises as the operator's docstring says."""
    op = LOAD_PACKED
    check_tensors(
        op,
        (
            ("kv_cache", kv_cache),
            ("block_tables", block_tables),
            ("context_lens", context_lens),
            ("key", key),
            ("value", value),
            ("seq_starts", seq_starts),
        ),
    )
    layout = _packed_layout(op, kv_layout)
    _check_copy_dtype(op, "kv_cache", kv_cache)
    _check_same_dtype(op, "key", key, "kv_cache", kv_cache)
    _check_same_dtype(op, "value", value, "kv_cache", kv_cache)
    for name, index in (("block_tables", block_tables), ("context_lens", context_lens), ("seq_starts", seq_starts)):
        _check_index_dtype(op, name, index)
    batch = _check_load_indices(op, block_tables, context_lens, seq_starts, is_seq_lens_cumsum)
    text = "[num_tokens, num_heads, head_size]"
    _check_rank_and_dims(op, "key", key, 3, {}, lambda: text)
    num_rows, heads = key.shape[:2]
    _check_rank_and_dims(
        op,
        "value",
        value,
        3,
        {0: num_rows, 1: heads},
        lambda: f"{text} with num_tokens {num_rows} and num_heads {heads} as key",
    )
    num_blocks, block_size = _check_packed_cache(op, layout, key, value, kv_cache)
    for name, t in (("kv_cache", kv_cache), ("key", key), ("value", value)):
        _check_dense_last_dim(op, name, t)
    return LoadArgs(False, batch, num_rows, num_blocks, block_size), layout


def _packed_layout(op: str, kv_layout: str) -> PackedLayout:
    layout = PACKED_LAYOUTS.get(kv_layout)
    if layout is None:
        fail(ValueError, op, "kv_layout", f"must be '2BNHD', 'B2NHD', 'BHNC' or 'BNHC', got '{kv_layout}'")
    return layout


def _check_packed_cache(op: str, layout: PackedLayout, key: Tensor, value: Tensor, cache: Tensor) -> tuple[int, int]:
    """The cache, and the head size of value beside key's; gives (num_blocks, block_size).

    Key and value have been found to be 3-D with the same number of heads.
    """
    heads, key_size = key.shape[1:]
    value_size = value.size(2)
    if layout.half is not None:
        require(
            value_size == key_size,
            ValueError,
            op,
            "value",
            lambda: f"must have head_size {key_size} as key with kv_layout '{layout.name}', got {_shape(value)}",
        )
        _check_rank_and_dims(
            op,
            "kv_cache",
            cache,
            layout.rank,
            {layout.half: 2, layout.head: heads, 4: key_size},
            lambda: f"{layout.shape} with num_heads {heads} and head_size {key_size} as key",
        )
    else:
        _check_rank_and_dims(
            op,
            "kv_cache",
            cache,
            layout.rank,
            {layout.head: heads, 3: key_size + value_size},
            lambda: (
                f"{layout.shape} with num_heads {heads} as key and C {key_size} + {value_size}, "
                "the head sizes of key and value"
            ),
        )
    return cache.size(layout.block), _check_block_size(op, "kv_cache", cache, layout.position)
