"""Compiled, the operators do what they do in eager mode, in place: no cache is ever cloned.

Inductor with ``fullgraph=True``, caches in every form in which a model holds them (graphs.py). What is left behind is
the same in every storage; a copy is looked for in the generated code, in what is allocated, and by the address that a
kernel is given. The first tests show that a copy, once made, is seen by each of these.
"""

from __future__ import annotations

import os

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # its disk cache replays code for an old schema

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bad_arguments import BASES, WRITTEN, Build
from graphs import (
    BLOCK_SIZE,
    BLOCKS,
    CACHE,
    DTYPE,
    FORMS,
    HEADS,
    SIZE,
    Buffers,
    Form,
    Inputs,
    cache_addresses,
    compiled,
    contexts,
    copies_in,
    kernel_arguments,
    largest_allocation,
    noise,
    split,
    step,
    tokens,
)
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import pacache_torch

pytestmark = [
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning"),
]

ELEMENTS = torch.Size(CACHE).numel()
CACHE_BYTES = ELEMENTS * DTYPE.itemsize


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def tensors(found: Any) -> list[Tensor]:
    """Every tensor in nested lists."""
    if isinstance(found, Tensor):
        return [found]
    return [t for item in found for t in tensors(item)]


def equal(actual: Any, expected: Any) -> bool:
    pairs = zip(tensors(actual), tensors(expected), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


# What would show a copy ----------------------------------------------------------------------------------------------


def cloning_store(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> Any:
    """What a schema that returns new caches comes to."""
    new = key_cache.clone(), value_cache.clone()
    torch.ops.pacache.scatter_pa_kv_cache(key, value, *new, slots)
    return new


def test_a_schema_that_clones_is_seen() -> None:
    """A functional store, whose results are copied back, by each of the three ways."""
    library = torch.library.Library("pacache_test", "FRAGMENT")
    try:
        library.define(
            "store(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slots) -> Tensor[]"
        )
        library.impl("store", lambda *arguments: list(cloning_store(*arguments)), "CPU")
        fake = lambda key, value, *rest: [torch.empty_like(t) for t in rest[:2]]  # noqa: E731
        torch.library.register_fake("pacache_test::store", fake, lib=library)

        class Cloning(Inputs):
            def forward(self, qkv: Tensor, slots: Tensor, tables: Tensor, lens: Tensor, *given: Any) -> list[Tensor]:
                new = torch.ops.pacache_test.store(*split(qkv), *given, slots)
                for cache, written in zip(given, new, strict=True):
                    cache.copy_(written)
                return list(pacache_torch.paged_cache_load(*given, tables, lens, num_tokens=qkv.size(0)))

        inputs = (*tokens(29), *contexts(29))
        form, given, expected = Cloning(), Cloning().given(), Inputs().given()
        fast = compiled(form)
        result, code = run_and_get_code(fast, *inputs, *given)
        assert equal(result, Inputs()(*inputs, *expected)) and equal(given, expected), "a copy is not an error"
        assert copies_in(code, ELEMENTS)
        assert largest_allocation(lambda: fast(*inputs, *given)) >= CACHE_BYTES
        with kernel_arguments() as seen:
            fast(*inputs, *given)
        assert cache_addresses(seen)[0] != tuple(t.data_ptr() for t in given)
    finally:
        library._destroy()


def test_a_copy_that_torch_makes_of_our_arguments_is_seen() -> None:
    """Halves of one buffer that are taken apart outside the graph: the second is cloned and copied back."""
    inputs, (stacked, other) = (*tokens(29), *contexts(29)), (noise(2, *CACHE) for _ in range(2))
    fast = compiled(Inputs())
    fast(*inputs, *stacked.unbind(0))
    Inputs()(*inputs, *other.unbind(0))
    assert torch.equal(stacked, other)
    assert largest_allocation(lambda: fast(*inputs, *stacked.unbind(0))) >= CACHE_BYTES
    with kernel_arguments() as seen:
        fast(*inputs, *stacked.unbind(0))
    assert cache_addresses(seen)[0] != tuple(t.data_ptr() for t in stacked.unbind(0))


# No copy -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_no_cache_is_copied(form: type[Form]) -> None:
    """Store then load: the result and every cache as in eager mode, and the kernels write the caller's memory."""
    inputs = (*tokens(29), *contexts(29))
    eager, model = form(), form()
    theirs, given = eager.given(), model.given()
    expected = eager(*inputs, *theirs)
    fast = compiled(model)
    result, code = run_and_get_code(fast, *inputs, *given)
    assert equal(result, expected)
    caches = model.caches(*given)
    assert equal(caches, eager.caches(*theirs)) and not equal(caches, form().caches(*form().given()))
    assert not copies_in(code, ELEMENTS)
    assert largest_allocation(lambda: fast(*inputs, *given)) < CACHE_BYTES
    with kernel_arguments() as seen:
        fast(*inputs, *given)
    addresses = [tuple(t.data_ptr() for t in pair) for pair in caches]
    assert cache_addresses(seen) == [pair for pair in addresses for _ in ("store", "load")]
    assert not counters["graph_break"]


def test_between_generated_kernels() -> None:
    """With work for the code generator before, between and after."""

    def layer(qkv: Tensor, slots: Tensor, tables: Tensor, lens: Tensor, *caches: Tensor) -> Tensor:
        qkv = qkv * -2  # needs no rounding
        key, value = step(qkv, slots, tables, lens, [(caches[0], caches[1])])
        pacache_torch.scatter_pa_kv_cache(key * 4, value * 8, *caches, slots)
        key, value = pacache_torch.paged_cache_load(*caches, tables, lens, num_tokens=qkv.size(0))
        return key.float() + 2 * value.float()

    inputs = (*tokens(29), *contexts(29))
    expected, given = Inputs().given(), Inputs().given()
    fast = compiled(layer)
    result, code = run_and_get_code(fast, *inputs, *given)
    assert torch.equal(result, layer(*inputs, *expected)) and equal(given, expected)
    assert any("cpp_fused" in text for text in code)
    assert not copies_in(code, ELEMENTS)
    assert largest_allocation(lambda: fast(*inputs, *given)) < CACHE_BYTES


def test_rows_loaded_before_a_store() -> None:
    """What was read stays what it was, without a copy of the cache that is written after it."""

    def layer(qkv: Tensor, slots: Tensor, tables: Tensor, lens: Tensor, *caches: Tensor) -> tuple[Tensor, Tensor]:
        rows = pacache_torch.paged_cache_load(*caches, tables, lens, num_tokens=qkv.size(0))
        pacache_torch.scatter_pa_kv_cache(*split(qkv), *caches, slots)
        return rows

    inputs = (*tokens(29), *contexts(29))
    expected, given = Inputs().given(), Inputs().given()
    fast = compiled(layer)
    assert equal(fast(*inputs, *given), layer(*inputs, *expected)) and equal(given, expected)
    assert largest_allocation(lambda: fast(*inputs, *given)) < CACHE_BYTES


def test_load_into_outputs_and_new_tensors() -> None:
    key_cache, value_cache = Inputs().given()
    tables, lens = contexts(22)

    def into(table: Tensor, lens: Tensor, key: Tensor, value: Tensor) -> None:
        pacache_torch.paged_cache_load(key_cache, value_cache, table, lens, key, value)

    outputs = [torch.zeros(2, 23, HEADS, SIZE, dtype=DTYPE) for _ in range(2)]
    into(tables, lens, *outputs[0])
    fast = compiled(into)
    _, code = run_and_get_code(fast, tables, lens, *outputs[1].unbind(0))
    assert torch.equal(outputs[0], outputs[1]) and outputs[0].any()
    assert not copies_in(code, ELEMENTS)


@pytest.mark.parametrize("base", [base for base, (op, _) in BASES.items() if not op.endswith("_packed")])
def test_every_mode_compiles(base: str) -> None:
    """Every scenario passes through a graph, and what it writes is the caller's memory."""
    op, build = BASES[base]
    operator = getattr(torch.ops.pacache, op)

    def call(arguments: dict[str, Any]) -> None:
        operator(**arguments)

    expected, actual = build(Build("cpu")), build(Build("cpu"))
    call(expected)
    fast = compiled(call)
    with kernel_arguments() as seen:
        fast(actual)
    for name, value in expected.items():
        assert not isinstance(value, Tensor) or torch.equal(value, actual[name])
    written = [name for name in WRITTEN[op] if actual[name] is not None]
    assert {name: seen[0][name] for name in written} == {name: actual[name].data_ptr() for name in written}


# Sizes ---------------------------------------------------------------------------------------------------------------


def test_token_counts_do_not_compile_again() -> None:
    """One graph for the first count and one for all others."""
    model, eager = Buffers(), Buffers()
    fast = compiled(model)
    for seed, count in enumerate((29, 17, 64, 8, 41, 100)):
        inputs = (*tokens(count, seed=seed), *contexts(count))
        assert equal(fast(*inputs), eager(*inputs))
        assert torch.equal(model.key_cache, eager.key_cache) and torch.equal(model.value_cache, eager.value_cache)
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]


def test_a_batch_without_tokens() -> None:
    """T == 0, compiled with dynamic sizes: nothing is written. [sgl-project/sglang#24252]."""

    def store(qkv: Tensor, slots: Tensor, *caches: Tensor) -> None:
        pacache_torch.scatter_pa_kv_cache(*split(qkv), *caches, slots)

    fast = compiled(store, dynamic=True)
    for count in (29, 0, 11):
        expected, actual = Inputs().given(), Inputs().given()
        store(*tokens(count), *expected)
        fast(*tokens(count), *actual)
        assert equal(actual, expected)


# Errors --------------------------------------------------------------------------------------------------------------


def test_a_bad_call_is_refused_with_the_operators_words() -> None:
    """Shapes while tracing, values while running."""
    inputs = (*tokens(29), *contexts(29))
    key_cache, value_cache = Inputs().given()
    with pytest.raises(Exception, match=r"scatter_pa_kv_cache: value_cache must be \[num_blocks"):
        compiled(Inputs())(*inputs, key_cache, value_cache[..., :-1])
    torch._dynamo.reset()
    inputs[1][7] = BLOCKS * BLOCK_SIZE
    before = key_cache.clone()
    slots = BLOCKS * BLOCK_SIZE
    with pytest.raises(
        IndexError, match=rf"slot_mapping\[7\] must be less than num_blocks \* block_size = {slots}, got"
    ):
        compiled(Inputs())(*inputs, key_cache, value_cache)
    assert torch.equal(key_cache, before)
