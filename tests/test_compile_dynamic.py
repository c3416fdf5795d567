"""Compiled with dynamic sizes: one graph for all of them, and what goes wrong with a view at a symbolic offset.

Tokens, batch, table columns and the number of blocks are dynamic. A size that a fake kernel made constant would raise
(``mark_dynamic``) or compile again; both are looked for.
"""

from __future__ import annotations

import os

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # its disk cache replays code for an old schema

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graphs import (
    BLOCK_SIZE,
    HEADS,
    PACKED_SHAPES,
    SIZE,
    Form,
    Inputs,
    Interleaved,
    Packed,
    PackedLast,
    compiled,
    contexts,
    noise,
    split,
    tokens,
)
from torch import Tensor
from torch._dynamo.utils import counters

import pacache_torch

pytestmark = [
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning"),
]

# Tokens, batch, blocks.
SIZES = ((29, 2, 137), (31, 3, 141), (18, 5, 99), (64, 4, 200), (8, 2, 150))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def plain(blocks: int) -> tuple[Tensor, ...]:
    return tuple(noise(blocks, BLOCK_SIZE, HEADS, SIZE, seed=seed) for seed in (3, 4))


CACHES: dict[type[Form], tuple[Callable[[int], tuple[Tensor, ...]], tuple[int, ...]]] = {
    # What the model is given, and which dimension of each holds the blocks.
    Inputs: (plain, (0, 0)),
    Interleaved: (lambda blocks: (noise(blocks, 2, BLOCK_SIZE, HEADS, SIZE),), (0,)),
    PackedLast: (lambda blocks: (noise(blocks, HEADS, BLOCK_SIZE, 2 * SIZE),), (0,)),
    Packed: (lambda blocks: tuple(noise(*shape(blocks)) for shape in PACKED_SHAPES.values()), (1, 0, 0, 0)),
}


@pytest.mark.parametrize("form", CACHES, ids=lambda form: form.__name__)
def test_one_graph_for_all_sizes(form: type[Form]) -> None:
    """Nothing is compiled again and nothing made constant, and every result is that of eager mode."""
    make, block_dims = CACHES[form]
    fast, eager = compiled(form()), form()
    for seed, (count, batch, blocks) in enumerate(SIZES):
        inputs = (*tokens(count, seed, blocks), *contexts(count, batch, blocks))
        expected, actual = make(blocks), make(blocks)
        for t, dims in zip(inputs, ((0,), (0,), (0, 1), (0,)), strict=True):
            torch._dynamo.mark_dynamic(t, dims)
        for t, dim in zip(actual, block_dims, strict=True):
            torch._dynamo.mark_dynamic(t, dim)
        rows = fast(*inputs, *actual)
        for mine, theirs in zip((*rows, *actual), (*eager(*inputs, *expected), *expected), strict=True):
            assert torch.equal(mine, theirs), (count, batch, blocks)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_sizes_that_nobody_marked() -> None:
    """Left to itself torch compiles once for the first sizes and once for each kind of change, then no more."""
    fast = compiled(Interleaved())
    make, _ = CACHES[Interleaved]
    for seed, (count, batch, blocks) in enumerate(SIZES):
        fast(*tokens(count, seed, blocks), *contexts(count, batch, blocks), *make(blocks))
    assert counters["stats"]["unique_graphs"] <= 3


# A view at a symbolic storage offset ---------------------------------------------------------------------------------

# Releases that write such a view at offset 0 (pytorch/pytorch#198068). docs/torch_compile.md names them too.
WRONG_IN = ("2.13", "2.14")
MINOR = ".".join(torch.__version__.split(".")[:2])


def stacked(qkv: Tensor, slots: Tensor, kv: Tensor) -> None:
    key, value = split(qkv)
    pacache_torch.scatter_pa_kv_cache(key, value, kv[0], kv[1], slots)


def packed(qkv: Tensor, slots: Tensor, kv: Tensor) -> None:
    key, value = split(qkv)
    pacache_torch.scatter_pa_kv_cache_packed(key, value, kv, slots, kv_layout="2BNHD")


def interleaved(qkv: Tensor, slots: Tensor, kv: Tensor) -> None:
    key, value = split(qkv)
    pacache_torch.scatter_pa_kv_cache(key, value, kv[:, 0], kv[:, 1], slots)


def run(store: Callable[..., Any], dim: int, *, static: bool = False) -> tuple[Tensor, Tensor]:
    """The cache after a compiled store with a dynamic number of blocks, and after an eager one."""
    fast, qkv, slots = compiled(store), *tokens(29, blocks=21)
    actual = expected = torch.empty(0)
    for blocks in (21, 23):  # the second number makes it dynamic
        shape = [BLOCK_SIZE, HEADS, SIZE]
        shape[:0] = (2, blocks) if dim == 1 else (blocks, 2)
        actual, expected = noise(*shape), noise(*shape)
        if static:
            torch._dynamo.mark_static(actual, dim)
        else:
            torch._dynamo.maybe_mark_dynamic(actual, dim)
        fast(qkv, slots, actual)
        store(qkv, slots, expected)
    return actual, expected


def values_only(qkv: Tensor, slots: Tensor, kv: Tensor) -> None:
    pacache_torch.scatter_pa_kv_cache(split(qkv)[1], None, kv[1], None, slots)


SAY_SO = f"torch {torch.__version__} is not what WRONG_IN and docs/torch_compile.md say of it"


def test_a_view_at_a_symbolic_offset() -> None:
    """``kv[1]`` of a cache whose number of blocks is dynamic, alone: no error, and values written where keys are."""
    actual, expected = run(values_only, 1)
    assert torch.equal(actual, expected) == (MINOR not in WRONG_IN), SAY_SO
    if MINOR in WRONG_IN:
        before = noise(2, 23, BLOCK_SIZE, HEADS, SIZE)
        assert torch.equal(actual[1], before[1]) and not torch.equal(expected[1], before[1])
        qkv, slots = tokens(29, blocks=21)
        pacache_torch.scatter_pa_kv_cache(split(qkv)[1], None, before[0], None, slots)
        assert torch.equal(actual[0], before[0])


def test_both_views_at_a_symbolic_offset() -> None:
    """``kv[0]`` and ``kv[1]`` in one call: both come at offset 0, which the rule on shared memory sees."""
    if MINOR in WRONG_IN:
        text = "value_cache must not share memory with key_cache, got storage offsets 0 and 0"
        with pytest.raises(ValueError, match=text):
            run(stacked, 1)
    else:
        assert torch.equal(*run(stacked, 1)), SAY_SO


@pytest.mark.parametrize(
    ("store", "dim", "static"),
    ((packed, 1, False), (interleaved, 0, False), (stacked, 1, True)),
    ids=("packed operator", "blocks first", "mark_static"),
)
def test_the_safe_ways(store: Callable[..., Any], dim: int, static: bool) -> None:
    actual, expected = run(store, dim, static=static)
    assert torch.equal(actual, expected)
