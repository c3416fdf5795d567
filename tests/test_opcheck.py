"""Both operators keep what they promise to PyTorch, by PyTorch's own ``torch.library.opcheck``.

The schema tells the truth about what is mutated and aliased, nothing is registered for autograd keys, the fake kernels
agree with the real ones, and tracing with dynamic sizes gives what eager gives: for every scenario, both index dtypes,
dense and strided inputs. The last tests show that opcheck sees a schema that lies.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bad_arguments import BASES, LOAD, SCATTER, Arguments, Build
from torch import Tensor
from torch.testing._internal.optests import OpCheckError

import pacache_torch  # noqa: F401 - registers the operators

INDICES = (
    "slot_mapping",
    "compress_lens",
    "compress_seq_offsets",
    "seq_lens",
    "block_tables",
    "context_lens",
    "seq_starts",
)
ALL_CHECKS = {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}


KEY_AND_VALUE = (("key", 7), ("value", 5))  # and their head sizes


def check(op: str, arguments: Arguments) -> None:
    overload = getattr(torch.ops.pacache, op).default
    positional = [a.name for a in overload._schema.arguments if not a.kwarg_only]
    keyword = {name: value for name, value in arguments.items() if name not in positional}
    results = torch.library.opcheck(overload, tuple(arguments[name] for name in positional), keyword)
    assert results == dict.fromkeys(ALL_CHECKS, "SUCCESS")


def dense(arguments: Arguments) -> Arguments:
    return {k: v.contiguous() if isinstance(v, Tensor) else v for k, v in arguments.items()}


def with_indices(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    return {k: v.to(dtype) if k in INDICES else v for k, v in arguments.items()}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("layout", ("strided-int64", "dense-int32"))
def test_opcheck(base: str, layout: str) -> None:
    """Every scenario: tensors with gaps and int64 indices (with a stride of 2), dense tensors and int32 indices."""
    op, build = BASES[base]
    arguments = build(Build("cpu"))
    if base == "nct":  # opcheck clones its inputs: strides may lead through the tensor, not through what lies around it
        arguments |= {name: Build("cpu").memory(7 * 3 * d, torch.float16).view(7, 3, d) for name, d in KEY_AND_VALUE}
    if layout == "dense-int32":
        check(op, with_indices(dense(arguments), torch.int32))
    else:
        check(op, arguments | {k: Build("cpu").index(arguments[k].tolist()) for k in INDICES if k in arguments})


@pytest.mark.parametrize("base", ("norm", "nz_5d", "load", "load_nz"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.int8), ids=str)
def test_opcheck_dtypes(base: str, dtype: torch.dtype) -> None:
    op, build = BASES[base]
    arguments = build(Build("cpu"))
    if "nz" in base:
        unit = 32 // dtype.itemsize
        b = Build("cpu")
        arguments |= {"key_cache": b.tensor(4, 3, 2, 3, unit), "value_cache": b.tensor(4, 3, 1, 3, unit)}
        arguments["block_tables"] = b.index([[3, 0, 2], [1, 2, 0]])
        if op == SCATTER:
            arguments |= {"key": b.tensor(5, 3, 2 * unit), "value": b.tensor(5, 3, unit)}
            del arguments["block_tables"]
        else:
            arguments |= {"key": b.tensor(8, 6 * unit), "value": b.tensor(8, 3 * unit)}
    tensors = ("key", "value", "key_cache", "value_cache")
    check(op, {k: v.to(dtype) if k in tensors else v for k, v in arguments.items()})


def fused(rows: int) -> Arguments:
    """Key and value out of one projection, caches out of one allocation: what a model passes."""
    qkv = torch.randn(rows, 5 * 8 + 2 * 3 * 8)
    key, value = (x.unflatten(1, (3, 8)) for x in qkv[:, 40:].split(24, 1))
    key_cache, value_cache = torch.randn(7, 2, 3, 3, 8).unbind(1)
    return {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}


@pytest.mark.parametrize("tokens", (0, 1, 11))
def test_opcheck_of_what_a_model_passes(tokens: int) -> None:
    check(SCATTER, fused(tokens + 2) | {"slot_mapping": torch.randperm(21)[:tokens]})
    if tokens:
        arguments = fused(tokens) | {
            "block_tables": torch.randint(0, 7, (1, 4)),
            "context_lens": torch.tensor([tokens]),
        }
        check(LOAD, arguments)


# What opcheck is worth -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "failing"),
    (
        ("(Tensor key, Tensor cache) -> ()", "test_schema"),  # the mutation is not declared
        ("(Tensor key, Tensor(a!) cache) -> Tensor(a!)", "test_aot_dispatch_dynamic"),  # the cache is returned
    ),
)
def test_opcheck_sees_a_schema_that_lies(schema: str, failing: str) -> None:
    library = torch.library.Library("pacache_test", "FRAGMENT")
    try:
        library.define("store" + schema)

        def store(key: Tensor, cache: Tensor) -> Any:
            cache[: key.size(0)] = key
            return cache if "-> Tensor" in schema else None

        library.impl("store", store, "CPU")
        torch.library.register_fake("pacache_test::store", lambda key, cache: None, lib=library)
        if "-> Tensor" in schema:
            return_cache = lambda key, cache: cache  # noqa: E731
            torch.library.register_fake("pacache_test::store", return_cache, lib=library, allow_override=True)
        op = torch.ops.pacache_test.store.default
        with pytest.raises(OpCheckError, match=failing):
            torch.library.opcheck(op, (torch.ones(2, 3), torch.zeros(4, 3)))
    finally:
        library._destroy()
