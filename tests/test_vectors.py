"""The worked examples hold for the reference and for the operator on the CPU, every element of every written tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from vectors import Vector, load_vectors, scatter_vectors

from pacache_torch import reference

INDEX_DTYPES = (torch.int32, torch.int64)
BACKENDS = ("reference", "cpu")


def _function(op: str, backend: str) -> Callable[..., None]:
    function: Callable[..., None]
    if backend == "reference":
        function = getattr(reference, op)
    else:
        function = getattr(torch.ops.pacache, op)
    return function


def _check(vector: Vector, function: Callable[..., None]) -> None:
    vector.run(function)
    for name, written in vector.written.items():
        expected = vector.expected[name]
        assert written.dtype == expected.dtype and written.shape == expected.shape
        different = written.view(torch.uint8) != expected.view(torch.uint8)
        assert not different.any(), f"{name} differs at bytes {different.nonzero()[:5].tolist()}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("number", range(17), ids=[v.name for v in scatter_vectors(torch.int64)])
def test_scatter_vector(number: int, index_dtype: torch.dtype, backend: str) -> None:
    _check(scatter_vectors(index_dtype)[number], _function("scatter_pa_kv_cache", backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("number", range(9), ids=[v.name for v in load_vectors(torch.int64)])
def test_load_vector(number: int, index_dtype: torch.dtype, backend: str) -> None:
    _check(load_vectors(index_dtype)[number], _function("paged_cache_load", backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nz_load_into_three_dimensions(backend: str) -> None:
    """[num_tokens, num_heads, head_size] is the same memory as CANN's own [num_tokens, num_heads * head_size]."""
    vectors = [v for v in load_vectors(torch.int32) if v.keyword["cache_mode"] == "PA_NZ"]
    assert len(vectors) == 3
    for vector in vectors:
        key_cache, value_cache, tables, lens, key, value = vector.positional
        assert key is not None and value is not None
        outputs = [out.view(out.size(0), 4, out.size(1) // 4) for out in (key, value)]
        _function("paged_cache_load", backend)(key_cache, value_cache, tables, lens, *outputs, **vector.keyword)
        assert torch.equal(key, vector.expected["key"]) and torch.equal(value, vector.expected["value"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nz_five_dimensions_are_the_same_memory(backend: str) -> None:
    """An NZ cache in its 5-D form is written and read as the 4-D one."""
    for vector in scatter_vectors(torch.int64)[:2]:
        key, value, key_cache, value_cache, slots = vector.positional
        assert key is not None and key_cache is not None and value_cache is not None
        heads = key.size(1)
        caches = [
            cache.view(cache.size(0), heads, cache.size(1) // heads, *cache.shape[2:])
            for cache in (key_cache, value_cache)
        ]
        _function("scatter_pa_kv_cache", backend)(key, value, *caches, slots, **vector.keyword)
        assert torch.equal(key_cache, vector.expected["key_cache"])
        assert torch.equal(value_cache, vector.expected["value_cache"])
    vector = next(v for v in load_vectors(torch.int64) if v.name == "nz_fp16")
    key_cache, value_cache, *rest = vector.positional
    assert key_cache is not None and value_cache is not None
    caches = [key_cache.view(3, 2, 1, 16, 16), value_cache.view(3, 1, 1, 16, 16)]
    _function("paged_cache_load", backend)(*caches, *rest, **vector.keyword)
    for name, written in vector.written.items():
        assert torch.equal(written, vector.expected[name])
