"""Compiled, the operators do what they do in eager mode, in place: no cache is ever cloned.

Inductor with ``fullgraph=True``; a cache may be an input or a buffer, and a store may be followed by a load. Copies are
looked for twice: in the generated code, and by the address that the kernel is given.
"""

from __future__ import annotations

import os

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # its disk cache replays code for an old schema

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from bad_arguments import BASES, LOAD, SCATTER, Build
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import pacache_torch
from pacache_torch import reference

pytestmark = [
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning"),
]

HEADS, SIZE, BLOCKS, BLOCK_SIZE = 3, 16, 37, 7


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def caches(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Key and value caches of one allocation, full of something."""
    generator = torch.Generator().manual_seed(1)
    both = torch.randn(BLOCKS, 2, BLOCK_SIZE, HEADS, SIZE, generator=generator).to(dtype)
    return both[:, 0], both[:, 1]


def tokens(count: int, seed: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """A projection and slots, some of them padding."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:count]
    slots[3::5] = -1
    qkv = torch.randn(count, 5 * HEADS * SIZE, generator=generator).to(torch.bfloat16)
    return qkv, slots, torch.tensor([count // 2, count - count // 2])


def split(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value out of a projection, after something for the compiler to fuse (that needs no rounding)."""
    key, value = (qkv * -2)[:, 3 * HEADS * SIZE :].unflatten(1, (2, HEADS, SIZE)).unbind(1)
    return key, value


def store(qkv: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
    key, value = split(qkv)
    pacache_torch.scatter_pa_kv_cache(key, value, key_cache, value_cache, slots)
    return key.float() * 2


def load(key_cache: Tensor, value_cache: Tensor, tables: Tensor, lens: Tensor, rows: int) -> Tensor:
    key, value = pacache_torch.paged_cache_load(key_cache, value_cache, tables, lens, num_tokens=rows)
    return key.float() + 2 * value.float()


def tables(count: int) -> Tensor:
    columns = -(-count // BLOCK_SIZE)
    return (torch.arange(2 * columns).view(2, columns) * 5 + 2) % BLOCKS


def store_then_load(qkv: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor, lens: Tensor) -> Tensor:
    total = store(qkv, slots, key_cache, value_cache)
    table = tables(qkv.size(0))
    return load(key_cache, value_cache, table, lens, qkv.size(0)) - total


class Layer(nn.Module):
    """Caches as buffers."""

    def __init__(self) -> None:
        super().__init__()
        key_cache, value_cache = caches()
        self.register_buffer("key_cache", key_cache.clone())
        self.register_buffer("value_cache", value_cache.clone())

    def forward(self, qkv: Tensor, slots: Tensor, lens: Tensor) -> Tensor:
        return store_then_load(qkv, slots, self.key_cache, self.value_cache, lens)


@contextmanager
def kernel_arguments() -> Iterator[list[dict[str, int]]]:
    """The addresses of the tensors that reach the CPU kernels, for which the reference stands in."""
    seen: list[dict[str, int]] = []
    library = torch.library.Library("pacache", "IMPL")

    def watched(name: str) -> Callable[..., None]:
        arguments = [argument.name for argument in getattr(torch.ops.pacache, name).default._schema.arguments]

        def kernel(*args: Any, **kwargs: Any) -> None:
            given = dict(zip(arguments, args, strict=False)) | kwargs
            seen.append({name: t.data_ptr() for name, t in given.items() if isinstance(t, Tensor)})
            getattr(reference, name)(*args, **kwargs)

        return kernel

    try:
        for name in (SCATTER, LOAD):
            library.impl(name, watched(name), "CPU", allow_override=True)
        yield seen
    finally:
        library._destroy()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    result: Callable[..., Any] = torch.compile(function, fullgraph=True, backend="inductor", **options)
    return result


CACHE_SHAPES = (f"({BLOCKS}, {BLOCK_SIZE}, {HEADS}, {SIZE})", f"({BLOCKS}, 2, {BLOCK_SIZE}, {HEADS}, {SIZE})")


def copies(code: list[str]) -> list[str]:
    """Lines of generated code that make something of the size of a cache."""
    return [
        line
        for text in code
        for line in text.splitlines()
        if any(f"empty_strided_cpu({shape}" in line or f"empty_strided({shape}" in line for shape in CACHE_SHAPES)
    ]


def test_a_copy_would_be_seen() -> None:
    """The same search finds the clone that a functional store makes."""

    def functional(cache: Tensor) -> Tensor:
        return cache + 1

    _, code = run_and_get_code(compiled(functional), caches()[0])
    assert copies(code)


@pytest.mark.parametrize("dynamic", (False, True))
def test_store_into_inputs(dynamic: bool) -> None:
    qkv, slots, _ = tokens(29)
    expected, actual = caches(), caches()
    total = store(qkv, slots, *expected)
    result, code = run_and_get_code(compiled(store, dynamic=dynamic), qkv, slots, *actual)
    assert torch.equal(result, total)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    assert not torch.equal(actual[0], caches()[0])
    assert any("pacache.scatter_pa_kv_cache" in text for text in code)
    assert not copies(code)


def test_load_into_outputs_and_new_tensors() -> None:
    key_cache, value_cache = caches()
    lens = torch.tensor([13, 9])

    def into(key_cache: Tensor, value_cache: Tensor, table: Tensor, lens: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pacache_torch.paged_cache_load(key_cache, value_cache, table, lens, key, value)
        return key.float() * 3 + value.float()

    table = tables(22)
    outputs = [torch.zeros(2, 23, HEADS, SIZE, dtype=torch.bfloat16) for _ in range(2)]
    expected = into(key_cache, value_cache, table, lens, *outputs[0])
    result, code = run_and_get_code(compiled(into), key_cache, value_cache, table, lens, *outputs[1].unbind(0))
    assert torch.equal(result, expected) and torch.equal(outputs[0], outputs[1]) and outputs[0].any()
    assert not copies(code)

    result, code = run_and_get_code(compiled(load), key_cache, value_cache, table, lens, 22)
    assert torch.equal(result, load(key_cache, value_cache, table, lens, 22))
    assert not copies(code)


def test_store_then_load_with_caches_as_buffers() -> None:
    """The load sees what the store has written; kernels get the buffers' own memory."""
    eager, layer = Layer(), Layer()
    qkv, slots, lens = tokens(29)
    expected = eager(qkv, slots, lens)
    fast = compiled(layer)
    result, code = run_and_get_code(fast, qkv, slots, lens)
    assert torch.equal(result, expected)
    assert torch.equal(layer.key_cache, eager.key_cache) and torch.equal(layer.value_cache, eager.value_cache)
    assert not copies(code)
    with kernel_arguments() as seen:
        fast(qkv, slots, lens)
    assert len(seen) == 2, "one store, one load"
    for call in seen:
        assert call["key_cache"] == layer.key_cache.data_ptr()
        assert call["value_cache"] == layer.value_cache.data_ptr()


def test_store_into_inputs_by_address() -> None:
    qkv, slots, lens = tokens(29)
    key_cache, value_cache = caches()
    fast = compiled(store_then_load)
    fast(qkv, slots, key_cache, value_cache, lens)
    with kernel_arguments() as seen:
        fast(qkv, slots, key_cache, value_cache, lens)
    assert [(call["key_cache"], call["value_cache"]) for call in seen] == [
        (key_cache.data_ptr(), value_cache.data_ptr())
    ] * 2


def test_token_counts_do_not_compile_again() -> None:
    """One graph for the first count and one for all others."""
    fast = compiled(store_then_load)
    expected, actual = caches(), caches()
    for step, count in enumerate((29, 17, 64, 8, 41, 100)):
        qkv, slots, lens = tokens(count, seed=step)
        assert torch.equal(fast(qkv, slots, *actual, lens), store_then_load(qkv, slots, *expected, lens))
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]


def test_a_batch_without_tokens() -> None:
    """T == 0, compiled with dynamic sizes: nothing is written. [sgl-project/sglang#24252]."""
    fast = compiled(store, dynamic=True)
    for count in (29, 0, 11):
        qkv, slots, _ = tokens(count)
        expected, actual = caches(), caches()
        assert torch.equal(fast(qkv, slots, *actual), store(qkv, slots, *expected))
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@pytest.mark.parametrize(
    "base", ("key_only", "nct", "nz_5d", "nhsd", "alibi", "rope", "padded_rope", "load_cumsum", "load_nz")
)
def test_every_mode_compiles(base: str) -> None:
    """Modes, lists of integers and missing tensors go through a graph."""
    op, build = BASES[base]
    operator = getattr(torch.ops.pacache, op)

    def call(arguments: dict[str, Any]) -> Tensor:
        operator(**arguments)
        written = "key_cache" if op == SCATTER else "key"
        result: Tensor = arguments[written] + 0
        return result

    expected, actual = build(Build("cpu")), build(Build("cpu"))
    assert torch.equal(compiled(call)(actual), call(expected))
    for name, value in expected.items():
        assert not isinstance(value, Tensor) or torch.equal(value, actual[name])


def test_a_bad_call_is_refused_with_the_operators_words() -> None:
    """Shapes while tracing, values while running."""
    qkv, slots, _ = tokens(29)
    key_cache, value_cache = caches()
    with pytest.raises(Exception, match=r"scatter_pa_kv_cache: value_cache must be \[num_blocks"):
        compiled(store)(qkv, slots, key_cache, value_cache[..., :-1])
    torch._dynamo.reset()
    slots[7] = BLOCKS * BLOCK_SIZE
    before = key_cache.clone()
    with pytest.raises(
        IndexError, match=r"slot_mapping\[7\] must be less than num_blocks \* block_size = 259, got 259"
    ):
        compiled(store)(qkv, slots, key_cache, value_cache)
    assert torch.equal(key_cache, before)


def test_export_keeps_the_operator_and_its_mutation() -> None:
    qkv, slots, lens = tokens(29)
    program = torch.export.export(Layer(), (qkv, slots, lens))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "pacache.scatter_pa_kv_cache.default" in targets and "pacache.paged_cache_load.default" in targets
    eager, exported = Layer(), program.module()
    assert torch.equal(exported(qkv, slots, lens), eager(qkv, slots, lens))
    assert torch.equal(exported.key_cache, eager.key_cache)
