"""Layouts: conversions agree with what the operators write, and slots with where a token is."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pacache_torch import layouts, reference

DTYPES = (torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS = 3, 5, 2


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def _random_nd(dtype: torch.dtype, units: int = 3) -> Tensor:
    """Make a strided ND cache of random bits: a view out of the middle of a larger one."""
    head_size = units * layouts.nz_unit(dtype)
    shape = (NUM_BLOCKS, BLOCK_SIZE + 2, NUM_HEADS + 1, head_size * dtype.itemsize)
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    return bits.view(dtype)[:, 1:-1, 1:]


def _filled_by_scatter(nd: Tensor, cache: Tensor, **modes: Any) -> Tensor:
    """Give the cache after the operator has written every slot of the ND cache into it."""
    tokens = nd.reshape(-1, *nd.shape[2:])
    slots = torch.arange(tokens.size(0))
    reference.scatter_pa_kv_cache(tokens, tokens, cache, cache.clone(), slots, **modes)
    return cache


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("layout", "convert", "modes"),
    [
        ("ND", lambda nd: nd.clone(), {}),
        ("NZ", layouts.nd_to_nz, {"cache_mode": "PA_NZ"}),
        ("NZ_5D", lambda nd: layouts.nd_to_nz(nd, five_d=True), {"cache_mode": "PA_NZ"}),
        ("NHSD", layouts.nd_to_nhsd, {"scatter_mode": "NHSD"}),
    ],
    ids=["ND", "NZ", "NZ_5D", "NHSD"],
)
def test_conversion_is_what_scatter_writes(
    layout: Any, convert: Callable[[Tensor], Tensor], modes: dict[str, str], dtype: torch.dtype
) -> None:
    """An allocated cache that scatter fills token by token equals the converted ND cache, bit for bit."""
    nd = _random_nd(dtype)
    cache, _ = layouts.allocate_kv_cache(NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, nd.size(3), layout=layout, dtype=dtype)
    converted = convert(nd)
    assert converted.shape == cache.shape
    assert torch.equal(_bits(converted), _bits(_filled_by_scatter(nd, cache, **modes)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_conversions_have_inverses(dtype: torch.dtype) -> None:
    """Every way from ND and back gives the same bits."""
    nd = _random_nd(dtype)
    nhsd = layouts.nd_to_nhsd(nd)
    for back in (
        layouts.nhsd_to_nd(nhsd),
        layouts.nz_to_nd(layouts.nd_to_nz(nd), NUM_HEADS),
        layouts.nz_to_nd(layouts.nd_to_nz(nd, five_d=True), NUM_HEADS),
    ):
        assert back.shape == nd.shape and torch.equal(_bits(back), _bits(nd))
    for five_d in (False, True):
        nz = layouts.nhsd_to_nz(nhsd, five_d=five_d)
        assert torch.equal(_bits(nz), _bits(layouts.nd_to_nz(nd, five_d=five_d)))
        assert torch.equal(_bits(layouts.nz_to_nhsd(nz, NUM_HEADS)), _bits(nhsd))


def test_nz_addresses() -> None:
    """Slot s and channel c stand at [s // block_size, c // L, s % block_size, c % L]."""
    nd = torch.arange(2 * 3 * 2 * 16, dtype=torch.float32).view(2, 3, 2, 16)
    nz = layouts.nd_to_nz(nd)
    assert nz.shape == (2, 4, 3, 8)
    for block in range(2):
        for position in range(3):
            for c in range(32):
                assert nz[block, c // 8, position, c % 8] == nd[block, position, c // 16, c % 16]


def test_a_head_may_end_inside_a_unit() -> None:
    """The 4-D form knows tokens, not heads: 4 heads of 24 int8 are 3 units of 32."""
    nz = torch.arange(2 * 3 * 2 * 32).remainder(127).to(torch.int8).view(2, 3, 2, 32)
    nd = layouts.nz_to_nd(nz, num_heads=4)
    assert nd.shape == (2, 2, 4, 24)
    assert nd[1, 0, 1, 10] == nz[1, (24 + 10) // 32, 0, (24 + 10) % 32]


@pytest.mark.parametrize("shape", [(2, 1, 1, 16), (1, 1, 2, 16), (0, 3, 2, 16)], ids=str)
def test_results_are_new_memory(shape: tuple[int, ...]) -> None:
    """Converting gives a copy, contiguous, also where the two layouts are the same memory."""
    nd = torch.ones(shape, dtype=torch.float16)
    nhsd_shape = (shape[0], shape[2], shape[1], shape[3])
    results = [
        layouts.nd_to_nz(nd),
        layouts.nd_to_nz(nd, five_d=True),
        layouts.nd_to_nhsd(nd),
        layouts.nhsd_to_nd(nd.view(nhsd_shape)),
        layouts.nz_to_nd(nd.view(shape[0], shape[2], shape[1], 16), shape[2]),
    ]
    for result in results:
        assert result.is_contiguous()
        assert result.numel() == nd.numel()
        result.zero_()
    assert bool((nd == 1).all())


def test_allocated_caches() -> None:
    """Zeros, contiguous, one storage each, with the value's own head size and dtype."""
    key_cache, value_cache = layouts.allocate_kv_cache(
        3, 5, 2, 64, layout="NZ", dtype=torch.int8, value_head_size=48, value_dtype=torch.bfloat16
    )
    assert (key_cache.shape, key_cache.dtype) == ((3, 4, 5, 32), torch.int8)
    assert (value_cache.shape, value_cache.dtype) == ((3, 6, 5, 16), torch.bfloat16)
    for cache in (key_cache, value_cache):
        assert cache.is_contiguous() and not _bits(cache).any()
    assert key_cache.untyped_storage().data_ptr() != value_cache.untyped_storage().data_ptr()
    key_cache, value_cache = layouts.allocate_kv_cache(3, 5, 2, 7, dtype=torch.float32, value_head_size=4)
    assert key_cache.shape == (3, 5, 2, 7) and value_cache.shape == (3, 5, 2, 4)
    key_cache, value_cache = layouts.allocate_kv_cache(3, 5, 2, 16, layout="NHSD", dtype=torch.float16)
    assert key_cache.shape == value_cache.shape == (3, 2, 5, 16)
    key_cache, _ = layouts.allocate_kv_cache(0, 5, 2, 16, layout="NZ_5D", dtype=torch.float16, device="meta")
    assert key_cache.shape == (0, 2, 1, 5, 16) and key_cache.device.type == "meta"


@pytest.mark.parametrize("ids_dtype", layouts._INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("table_dtype", layouts._INDEX_DTYPES, ids=str)
def test_slot_mapping(table_dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    """A token stands in the block of its position; padding gives -1, whatever its sequence says."""
    tables = layouts.pad_block_tables([[7, 2, 4], [5]], fill=-1, dtype=table_dtype)
    ids = torch.tensor([0, 1, 0, 9, 0], dtype=ids_dtype)
    positions = torch.tensor([0, 2, 7, -1, 8], dtype=ids_dtype)
    slots = layouts.slot_mapping(tables, ids, positions, 3)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [7 * 3, 5 * 3 + 2, 4 * 3 + 1, -1, 4 * 3 + 2]


def test_slot_mapping_beyond_32_bits() -> None:
    """int32 block ids give slots that need 64 bits."""
    tables = torch.tensor([[2**30]], dtype=torch.int32)
    zero = torch.tensor([5], dtype=torch.int32)
    assert layouts.slot_mapping(tables, torch.zeros_like(zero), zero, 128).tolist() == [2**37 + 5]


def test_slot_mapping_of_nothing() -> None:
    """No tokens, no blocks and only padding are all fine; a position without any table is not."""
    nothing = torch.empty(0, dtype=torch.int64)
    padding = torch.tensor([-1, -2])
    assert layouts.slot_mapping(torch.zeros(2, 3, dtype=torch.int32), nothing, nothing, 4).tolist() == []
    assert layouts.slot_mapping(torch.zeros(2, 0, dtype=torch.int32), padding, padding, 4).tolist() == [-1, -1]
    with pytest.raises(IndexError, match="slot_mapping: block_tables must have a block for every position"):
        layouts.slot_mapping(torch.zeros(0, 2, dtype=torch.int32), padding, torch.tensor([-1, 0]), 4)


def test_slots_and_load_agree() -> None:
    """What is scattered to the slots of a block table is what loading by that table gives back, in every layout."""
    tables = layouts.pad_block_tables([[4, 0, 2], [3], []], num_columns=4, fill=99)
    lengths = [13, 4, 0]
    ids = torch.tensor([b for b, n in enumerate(lengths) for _ in range(n)])
    positions = torch.tensor([j for n in lengths for j in range(n)])
    slots = layouts.slot_mapping(tables, ids, positions, BLOCK_SIZE)
    key, value = torch.randn(17, 2, 16), torch.randn(17, 2, 8)
    layout: Any
    for layout, cache_mode in (("ND", "Norm"), ("NZ", "PA_NZ"), ("NZ_5D", "PA_NZ")):
        caches = layouts.allocate_kv_cache(5, BLOCK_SIZE, 2, 16, layout=layout, dtype=torch.float32, value_head_size=8)
        reference.scatter_pa_kv_cache(key, value, *caches, slots, cache_mode=cache_mode)
        loaded = torch.zeros_like(key), torch.zeros_like(value)
        reference.paged_cache_load(*caches, tables, torch.tensor(lengths), *loaded, cache_mode=cache_mode)
        assert torch.equal(loaded[0], key) and torch.equal(loaded[1], value)


def test_pad_block_tables() -> None:
    """Rows keep their order and are filled up; an empty batch is a table too."""
    padded = layouts.pad_block_tables([[7, 2], [], [5]], num_columns=3, fill=-1, dtype=torch.int64)
    assert padded.dtype == torch.int64
    assert padded.tolist() == [[7, 2, -1], [-1, -1, -1], [5, -1, -1]]
    assert layouts.pad_block_tables([[1], [2, 3]]).tolist() == [[1, 0], [2, 3]]
    assert layouts.pad_block_tables([[1]]).dtype == torch.int32
    assert layouts.pad_block_tables([]).shape == (0, 0)
    assert layouts.pad_block_tables([], num_columns=4).shape == (0, 4)


def _nz(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float16)


UNKNOWN: Any = "BSND"
TABLES, ONE = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: layouts.allocate_kv_cache(1, 1, 1, 16, layout=UNKNOWN, dtype=torch.int8),
            ValueError,
            "allocate_kv_cache: layout must be 'ND', 'NZ', 'NZ_5D' or 'NHSD', got 'BSND'",
        ),
        (
            lambda: layouts.allocate_kv_cache(1, 0, 1, 16, dtype=torch.int8),
            ValueError,
            "allocate_kv_cache: block_size must be at least 1, got 0",
        ),
        (
            lambda: layouts.allocate_kv_cache(-1, 1, 1, 16, dtype=torch.int8),
            ValueError,
            "allocate_kv_cache: num_blocks must be at least 0, got -1",
        ),
        (
            lambda: layouts.allocate_kv_cache(1, 1, 1, 16, layout="NZ", dtype=torch.int8),
            ValueError,
            "allocate_kv_cache: head_size must be a multiple of 32 (32 bytes of int8) in the NZ layouts, got 16",
        ),
        (
            lambda: layouts.allocate_kv_cache(1, 1, 1, 16, layout="NZ", dtype=torch.float16, value_head_size=8),
            ValueError,
            "allocate_kv_cache: value_head_size must be a multiple of 16 (32 bytes of float16) in the NZ layouts, "
            "got 8",
        ),
        (
            lambda: layouts.allocate_kv_cache(1, 1, 1, 16, layout="NZ_5D", dtype=torch.float64),
            TypeError,
            "nz_unit: dtype must be a 1-, 2- or 4-byte dtype, got float64",
        ),
        (
            lambda: layouts.allocate_kv_cache(1, 1, 1, 16, dtype=torch.int8, value_dtype=torch.float16),
            ValueError,
            "allocate_kv_cache: value_dtype must be int8 as dtype in layout 'ND' (only NZ and NZ_5D may mix), "
            "got float16",
        ),
        (
            lambda: layouts.nd_to_nz(_nz(2, 3, 16)),
            ValueError,
            "nd_to_nz: cache must be [num_blocks, block_size, num_heads, head_size], got [2, 3, 16]",
        ),
        (
            lambda: layouts.nd_to_nz(_nz(2, 3, 1, 8)),
            ValueError,
            "nd_to_nz: cache must have a head_size that is a multiple of 16 (32 bytes of float16) in the NZ layouts, "
            "got 8",
        ),
        (
            lambda: layouts.nz_to_nd(_nz(2, 3, 5, 8), 1),
            ValueError,
            "nz_to_nd: cache must be [num_blocks, num_heads * head_size / 16, block_size, 16] or "
            "[num_blocks, num_heads, head_size / 16, block_size, 16], got [2, 3, 5, 8]",
        ),
        (
            lambda: layouts.nz_to_nd(_nz(2, 3, 5, 16), 5),
            ValueError,
            "nz_to_nd: num_heads must divide the 48 elements of a token, got 5",
        ),
        (
            lambda: layouts.nz_to_nd(_nz(2, 3, 1, 5, 16), 1),
            ValueError,
            "nz_to_nd: num_heads must be 3 for cache [2, 3, 1, 5, 16], got 1",
        ),
        (
            lambda: layouts.nhsd_to_nd(_nz(2, 3)),
            ValueError,
            "nhsd_to_nd: cache must be [num_blocks, num_heads, block_size, head_size], got [2, 3]",
        ),
        (
            lambda: layouts.slot_mapping(TABLES.float(), ONE, ONE, 4),
            TypeError,
            "slot_mapping: block_tables must be int32 or int64, got float32",
        ),
        (
            lambda: layouts.slot_mapping(TABLES, ONE, ONE[None], 4),
            ValueError,
            "slot_mapping: positions must be [num_tokens], got [1, 1]",
        ),
        (
            lambda: layouts.slot_mapping(TABLES, ONE, ONE.repeat(2), 4),
            ValueError,
            "slot_mapping: sequence_ids must have the 2 elements of positions, got [1]",
        ),
        (
            lambda: layouts.slot_mapping(TABLES, ONE, ONE, 0),
            ValueError,
            "slot_mapping: block_size must be at least 1, got 0",
        ),
        (
            lambda: layouts.pad_block_tables([[1, 2], [3]], num_columns=1),
            ValueError,
            "pad_block_tables: num_columns must be at least the 2 blocks of the longest table, got 1",
        ),
        (
            lambda: layouts.pad_block_tables([[1]], dtype=torch.int16),
            TypeError,
            "pad_block_tables: dtype must be int32 or int64, got int16",
        ),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    """An error names function, argument, rule and value."""
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize("module", [layouts, reference], ids=lambda module: module.__name__)
def test_examples(module: Any) -> None:
    """The examples of the docstrings give what they say."""
    results = doctest.testmod(module, extraglobs={"torch": torch})
    assert results.attempted > 0 and results.failed == 0
