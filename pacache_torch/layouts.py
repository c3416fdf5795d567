"""How a paged cache is laid out, and which slot a token has.

Allocation and conversion of whole caches, and the index arithmetic around them, in plain torch. With L = 32 bytes of
elements (8 of 4 bytes, 16 of 2 bytes, 32 of 1 byte):

========  ==============================================================  ===========================
layout    shape                                                           used with
========  ==============================================================  ===========================
ND        [num_blocks, block_size, num_heads, head_size]                  ``cache_mode="Norm"``
NZ        [num_blocks, num_heads * head_size / L, block_size, L]          ``cache_mode="PA_NZ"``
NZ_5D     [num_blocks, num_heads, head_size / L, block_size, L]           ``cache_mode="PA_NZ"``
NHSD      [num_blocks, num_heads, block_size, head_size]                  ``scatter_mode="NHSD"``
========  ==============================================================  ===========================

NZ and NZ_5D are the same memory. Key and value cache are always two tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NoReturn

import torch
from torch import Tensor

Layout = Literal["ND", "NZ", "NZ_5D", "NHSD"]

__all__ = [
    "Layout",
    "allocate_kv_cache",
    "nd_to_nhsd",
    "nd_to_nz",
    "nhsd_to_nd",
    "nhsd_to_nz",
    "nz_to_nd",
    "nz_to_nhsd",
    "nz_unit",
    "pad_block_tables",
    "slot_mapping",
]

_INDEX_DTYPES = (torch.int32, torch.int64)


def nz_unit(dtype: torch.dtype) -> int:
    """Give L, the elements of one 32-byte unit of the NZ layouts.

    Args:
        dtype: a dtype of 1, 2 or 4 bytes.

    Returns:
        32, 16 or 8.

    Raises:
        TypeError: a dtype of another size.

    Example:
        >>> nz_unit(torch.bfloat16)
        16
    """
    if dtype.itemsize not in (1, 2, 4):
        _fail(TypeError, "nz_unit", "dtype", "must be a 1-, 2- or 4-byte dtype", _dtype_name(dtype))
    return 32 // dtype.itemsize


def allocate_kv_cache(
    num_blocks: int,
    block_size: int,
    num_heads: int,
    head_size: int,
    *,
    layout: Layout = "ND",
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    value_head_size: int | None = None,
    value_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Allocate a key cache and a value cache, filled with zeros.

    Args:
        num_blocks: number of blocks (pages), 0 or more.
        block_size: slots in a block, 1 or more.
        num_heads: KV heads, the same for key and value; 0 or more.
        head_size: elements of a head of the key.
        layout: "ND", "NZ", "NZ_5D" or "NHSD" (the table above).
        dtype: dtype of the key cache; for the NZ layouts one of 1, 2 or 4 bytes.
        device: device of both caches.
        value_head_size: elements of a head of the value; ``head_size`` if None.
        value_dtype: dtype of the value cache; ``dtype`` if None. Only the NZ layouts may mix.

    Returns:
        (key_cache, value_cache), contiguous, each with a storage of its own.

    Raises:
        ValueError: an unknown layout, a negative size, a head size that is not whole 32-byte units in an NZ layout, or
            mixed dtypes in another one.
        TypeError: a dtype that an NZ layout cannot hold.

    Example:
        >>> key_cache, value_cache = allocate_kv_cache(
        ...     64, 16, 8, 128, layout="NZ", dtype=torch.int8, value_dtype=torch.float16
        ... )
        >>> key_cache.shape  # 8 * 128 elements are 32 units of 32 int8
        torch.Size([64, 32, 16, 32])
        >>> value_cache.shape  # and 64 units of 16 float16
        torch.Size([64, 64, 16, 16])
    """
    name = "allocate_kv_cache"
    if layout not in ("ND", "NZ", "NZ_5D", "NHSD"):
        _fail(ValueError, name, "layout", "must be 'ND', 'NZ', 'NZ_5D' or 'NHSD'", f"'{layout}'")
    value_size = head_size if value_head_size is None else value_head_size
    for argument, size, least in (
        ("num_blocks", num_blocks, 0),
        ("block_size", block_size, 1),
        ("num_heads", num_heads, 0),
        ("head_size", head_size, 0),
        ("value_head_size", value_size, 0),
    ):
        if size < least:
            _fail(ValueError, name, argument, f"must be at least {least}", size)
    if value_dtype is not None and value_dtype != dtype and layout in ("ND", "NHSD"):
        _fail(
            ValueError,
            name,
            "value_dtype",
            f"must be {_dtype_name(dtype)} as dtype in layout '{layout}' (only NZ and NZ_5D may mix)",
            _dtype_name(value_dtype),
        )

    def allocate(argument: str, size: int, of_dtype: torch.dtype) -> Tensor:
        shape: tuple[int, ...]
        if layout == "ND":
            shape = (num_blocks, block_size, num_heads, size)
        elif layout == "NHSD":
            shape = (num_blocks, num_heads, block_size, size)
        else:
            unit = _whole_units(name, argument, size, of_dtype)
            if layout == "NZ":
                shape = (num_blocks, num_heads * size // unit, block_size, unit)
            else:
                shape = (num_blocks, num_heads, size // unit, block_size, unit)
        return torch.zeros(shape, dtype=of_dtype, device=device)

    value_argument = "head_size" if value_head_size is None else "value_head_size"
    key_cache = allocate("head_size", head_size, dtype)
    return key_cache, allocate(value_argument, value_size, dtype if value_dtype is None else value_dtype)


def nd_to_nz(cache: Tensor, *, five_d: bool = False) -> Tensor:
    """Convert a whole cache from ND to NZ.

    Args:
        cache: [num_blocks, block_size, num_heads, head_size], a 1-, 2- or 4-byte dtype, any strides;
            head_size is a multiple of L.
        five_d: give the 5-D form of the same memory.

    Returns:
        A new contiguous cache, [num_blocks, num_heads * head_size / L, block_size, L] or
        [num_blocks, num_heads, head_size / L, block_size, L].

    Raises:
        ValueError: a rank other than 4, or a head that is not whole 32-byte units.
        TypeError: a dtype of 8 bytes or more.

    Example:
        >>> nd = torch.arange(2 * 64).view(1, 2, 2, 32).to(torch.int8)  # 2 slots of 2 heads of 32
        >>> nd_to_nz(nd).shape
        torch.Size([1, 2, 2, 32])
        >>> nd_to_nz(nd)[0, 1, 0, 5]  # unit 1 = head 1, slot 0, element 5: nd[0, 0, 1, 5]
        tensor(37, dtype=torch.int8)
    """
    _check_rank("nd_to_nz", cache, (4,), "[num_blocks, block_size, num_heads, head_size]")
    num_blocks, block_size, num_heads, head_size = cache.shape
    unit = _whole_units("nd_to_nz", "cache", head_size, cache.dtype)
    units = cache.reshape(num_blocks, block_size, num_heads, head_size // unit, unit)
    nz = _new(units.permute(0, 2, 3, 1, 4))
    return nz if five_d else nz.view(num_blocks, num_heads * head_size // unit, block_size, unit)


def nz_to_nd(cache: Tensor, num_heads: int) -> Tensor:
    """Convert a whole cache from NZ or NZ_5D to ND.

    Args:
        cache: [num_blocks, num_heads * head_size / L, block_size, L] or
            [num_blocks, num_heads, head_size / L, block_size, L], any strides.
        num_heads: the heads of a token, which the 4-D form does not tell. A head may end inside a unit.

    Returns:
        A new contiguous cache [num_blocks, block_size, num_heads, head_size].

    Raises:
        ValueError: a rank or a last dimension that is not NZ, or a number of heads that does not fit.
        TypeError: a dtype of 8 bytes or more.

    Example:
        >>> nz = torch.zeros(4, 6, 16, 8)  # float32: 4 blocks of 16 slots, 6 * 8 = 48 elements in a token
        >>> nz_to_nd(nz, num_heads=3).shape
        torch.Size([4, 16, 3, 16])
    """
    name = "nz_to_nd"
    _check_nz(name, cache)
    if cache.dim() == 5:
        if num_heads != cache.size(1):
            _fail(ValueError, name, "num_heads", f"must be {cache.size(1)} for cache {list(cache.shape)}", num_heads)
        cache = cache.flatten(1, 2)
    num_blocks, num_units, block_size, unit = cache.shape
    width = num_units * unit
    if num_heads < 1 or width % num_heads != 0:
        _fail(ValueError, name, "num_heads", f"must divide the {width} elements of a token", num_heads)
    tokens = _new(cache.permute(0, 2, 1, 3))
    return tokens.view(num_blocks, block_size, num_heads, width // num_heads)


def nd_to_nhsd(cache: Tensor) -> Tensor:
    """Convert a whole cache from ND to NHSD.

    Args:
        cache: [num_blocks, block_size, num_heads, head_size], any dtype and strides.

    Returns:
        A new contiguous cache [num_blocks, num_heads, block_size, head_size].

    Raises:
        ValueError: a rank other than 4.

    Example:
        >>> nd_to_nhsd(torch.zeros(64, 16, 8, 128)).shape
        torch.Size([64, 8, 16, 128])
    """
    _check_rank("nd_to_nhsd", cache, (4,), "[num_blocks, block_size, num_heads, head_size]")
    return _new(cache.transpose(1, 2))


def nhsd_to_nd(cache: Tensor) -> Tensor:
    """Convert a whole cache from NHSD to ND.

    Args:
        cache: [num_blocks, num_heads, block_size, head_size], any dtype and strides.

    Returns:
        A new contiguous cache [num_blocks, block_size, num_heads, head_size].

    Raises:
        ValueError: a rank other than 4.

    Example:
        >>> nhsd_to_nd(torch.zeros(64, 8, 16, 128)).shape
        torch.Size([64, 16, 8, 128])
    """
    _check_rank("nhsd_to_nd", cache, (4,), "[num_blocks, num_heads, block_size, head_size]")
    return _new(cache.transpose(1, 2))


def nz_to_nhsd(cache: Tensor, num_heads: int) -> Tensor:
    """Convert a whole cache from NZ or NZ_5D to NHSD.

    Args:
        cache: [num_blocks, num_heads * head_size / L, block_size, L] or
            [num_blocks, num_heads, head_size / L, block_size, L], any strides.
        num_heads: the heads of a token, which the 4-D form does not tell.

    Returns:
        A new contiguous cache [num_blocks, num_heads, block_size, head_size].

    Raises:
        ValueError: as :func:`nz_to_nd`.
        TypeError: as :func:`nz_to_nd`.

    Example:
        >>> nz_to_nhsd(torch.zeros(4, 6, 16, 8), num_heads=3).shape
        torch.Size([4, 3, 16, 16])
    """
    return nd_to_nhsd(nz_to_nd(cache, num_heads))


def nhsd_to_nz(cache: Tensor, *, five_d: bool = False) -> Tensor:
    """Convert a whole cache from NHSD to NZ.

    Args:
        cache: [num_blocks, num_heads, block_size, head_size], a 1-, 2- or 4-byte dtype, any strides;
            head_size is a multiple of L.
        five_d: give the 5-D form of the same memory.

    Returns:
        A new contiguous cache, [num_blocks, num_heads * head_size / L, block_size, L] or
        [num_blocks, num_heads, head_size / L, block_size, L].

    Raises:
        ValueError: as :func:`nd_to_nz`.
        TypeError: as :func:`nd_to_nz`.

    Example:
        >>> nhsd_to_nz(torch.zeros(4, 3, 16, 16), five_d=True).shape  # float32: L = 8
        torch.Size([4, 3, 2, 16, 8])
    """
    return nd_to_nz(nhsd_to_nd(cache), five_d=five_d)


def slot_mapping(block_tables: Tensor, sequence_ids: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Give the slot of each token: block id * block_size + offset in the block.

    Args:
        block_tables: [batch, max_num_blocks], int32 or int64: the block ids of each sequence, in order.
        sequence_ids: [num_tokens], int32 or int64: the row of block_tables that a token belongs to; not negative.
        positions: [num_tokens], int32 or int64: the position of a token in its sequence; negative for padding.
        block_size: slots in a block.

    Returns:
        [num_tokens], int64 whatever the dtypes given, on the device of block_tables: the slot of each token, -1 (which
        scatter_pa_kv_cache skips) where the position is negative. The sequence id of such a token is not looked at.
        Slots of block tables that hold padding are what the padding says; only ask for positions that have a block.

    Raises:
        ValueError: a shape, or a block_size below 1.
        TypeError: a dtype.
        IndexError: a sequence or a position past block_tables (from torch, on the CPU).

    Example:
        >>> tables = torch.tensor([[7, 2], [5, 0]])
        >>> ids, positions = torch.tensor([0, 0, 1, 1]), torch.tensor([15, 16, 3, -1])
        >>> slot_mapping(tables, ids, positions, 16)  # 7*16+15, 2*16+0, 5*16+3, padding
        tensor([127,  32,  83,  -1])
    """
    name = "slot_mapping"
    for argument, t, rank in (
        ("block_tables", block_tables, 2),
        ("sequence_ids", sequence_ids, 1),
        ("positions", positions, 1),
    ):
        if t.dtype not in _INDEX_DTYPES:
            _fail(TypeError, name, argument, "must be int32 or int64", _dtype_name(t.dtype))
        if t.dim() != rank:
            shape = "[batch, max_num_blocks]" if rank == 2 else "[num_tokens]"
            _fail(ValueError, name, argument, f"must be {shape}", list(t.shape))
    if sequence_ids.shape != positions.shape:
        _fail(
            ValueError,
            name,
            "sequence_ids",
            f"must have the {positions.numel()} elements of positions",
            list(sequence_ids.shape),
        )
    if block_size < 1:
        _fail(ValueError, name, "block_size", "must be at least 1", block_size)
    if positions.numel() == 0 or block_tables.numel() == 0:
        # Without a table every position must be padding, which the indexing below could not say.
        if block_tables.numel() == 0 and bool((positions >= 0).any()):
            raise IndexError(
                f"{name}: block_tables must have a block for every position, got shape {list(block_tables.shape)}"
            )
        return torch.full_like(positions, -1, dtype=torch.int64, device=block_tables.device)
    padding = positions < 0
    rows = torch.where(padding, 0, sequence_ids).to(torch.int64)
    known = torch.where(padding, 0, positions).to(torch.int64)
    blocks = block_tables[rows, known // block_size].to(torch.int64)
    return torch.where(padding, -1, blocks * block_size + known % block_size)


def pad_block_tables(
    tables: Sequence[Sequence[int]],
    *,
    num_columns: int | None = None,
    fill: int = 0,
    dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Make one rectangular tensor of block tables of different lengths.

    Args:
        tables: the block ids of each sequence, in order.
        num_columns: columns of the result; as many as the longest table has if None.
        fill: what stands where a sequence has no block. Neither operator reads it.
        dtype: int32 or int64.
        device: device of the result.

    Returns:
        [len(tables), num_columns].

    Raises:
        ValueError: a table that is longer than num_columns, or a negative num_columns.
        TypeError: a dtype.

    Example:
        >>> pad_block_tables([[7, 2], [5]], num_columns=3, fill=-1)
        tensor([[ 7,  2, -1],
                [ 5, -1, -1]], dtype=torch.int32)
    """
    name = "pad_block_tables"
    if dtype not in _INDEX_DTYPES:
        _fail(TypeError, name, "dtype", "must be int32 or int64", _dtype_name(dtype))
    longest = max((len(table) for table in tables), default=0)
    columns = longest if num_columns is None else num_columns
    if columns < longest:
        _fail(ValueError, name, "num_columns", f"must be at least the {longest} blocks of the longest table", columns)
    rows = [[*table, *[fill] * (columns - len(table))] for table in tables]
    return torch.tensor(rows, dtype=dtype, device=device).view(len(tables), columns)


def _new(view: Tensor) -> Tensor:
    """Make a contiguous copy, also where the view happens to be contiguous already."""
    return view.clone(memory_format=torch.contiguous_format)


def _check_rank(name: str, cache: Tensor, ranks: tuple[int, ...], shape: str) -> None:
    if cache.dim() not in ranks:
        _fail(ValueError, name, "cache", f"must be {shape}", list(cache.shape))


def _check_nz(name: str, cache: Tensor) -> None:
    unit = nz_unit(cache.dtype)
    text = (
        f"[num_blocks, num_heads * head_size / {unit}, block_size, {unit}] or "
        f"[num_blocks, num_heads, head_size / {unit}, block_size, {unit}]"
    )
    _check_rank(name, cache, (4, 5), text)
    if cache.size(-1) != unit:
        _fail(ValueError, name, "cache", f"must be {text}", list(cache.shape))


def _whole_units(name: str, argument: str, head_size: int, dtype: torch.dtype) -> int:
    unit = nz_unit(dtype)
    if head_size % unit != 0:
        what = "must have a head_size that is" if argument == "cache" else "must be"
        _fail(
            ValueError,
            name,
            argument,
            f"{what} a multiple of {unit} (32 bytes of {_dtype_name(dtype)}) in the NZ layouts",
            head_size,
        )
    return unit


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fail(error: type[Exception], name: str, argument: str, rule: str, got: object) -> NoReturn:
    raise error(f"{name}: {argument} {rule}, got {got}")
