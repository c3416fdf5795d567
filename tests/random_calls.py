"""Calls at random, as many as asked for: valid ones against the reference, and spoiled ones that must be refused.

A spoiled call is a valid one (strategies.py, or a base of bad_arguments.py) in which one or two things were changed
without looking at what they mean. Where the reference still takes it, it is no spoiled call and is not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from bad_arguments import BASES, ROWS, Build, unchecked_view
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from strategies import FORMS, LARGE, SMALL, Call, any_calls
from torch import Tensor

from pacache_torch import reference

THREADS = (1, 2, 3, 5, 16)
REFUSALS = (ValueError, TypeError, IndexError, NotImplementedError, RuntimeError)
DTYPES = (torch.float16, torch.float32, torch.int8, torch.int32, torch.int64, torch.float64, torch.bool, torch.int16)

Arguments = dict[str, Any]


def _settings(count: int, first_seed: int | None) -> settings:
    return settings(
        max_examples=count,
        derandomize=first_seed is None,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


def _run(check: Callable[[], None], first_seed: int | None) -> None:
    if first_seed is not None:
        check = seed(first_seed)(check)
    check()


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Valid calls ---------------------------------------------------------------------------------------------------------


def calls(*, large: bool) -> SearchStrategy[Call]:
    """Draw a valid call of any form."""
    sizes = LARGE if large else SMALL
    return st.sampled_from(FORMS).flatmap(lambda form: any_calls(*form, sizes=sizes))


def check_valid_calls(count: int, first_seed: int | None = None) -> Counter[str]:
    """Hold so many valid calls to the reference, each on a number of threads that is drawn.

    Args:
        count: how many calls.
        first_seed: another one gives other calls; None gives the same each time.

    Returns:
        How many calls there were: "calls", "<n> threads" and of which operator.
    """
    counted: Counter[str] = Counter()

    @_settings(count, first_seed)
    @given(st.integers(0, 19).flatmap(lambda n: calls(large=n == 0)), st.sampled_from(THREADS))
    def check(call: Call, threads: int) -> None:
        expected, actual = call.clone(), call.clone()
        expected.run(getattr(reference, call.op))
        with use_threads(threads):
            actual.run(getattr(torch.ops.pacache, call.op))
        assert actual.differences(expected) == [], f"on {threads} threads"
        counted.update(("calls", f"{threads} threads", call.op))

    _run(check, first_seed)
    return counted


# Spoiled calls -------------------------------------------------------------------------------------------------------


def _fresh(rng: Random, shape: list[int], dtype: torch.dtype) -> Tensor:
    """A tensor of its own, dense or not, whose values may be good indices."""
    numbers = torch.tensor([rng.randrange(4) for _ in range(min(97, max(1, torch.Size(shape).numel())))])
    flat = numbers.repeat(-(-torch.Size(shape).numel() // numbers.numel())).to(dtype)
    dense = flat[: torch.Size(shape).numel()].view(shape)
    if len(shape) < 2 or rng.random() < 0.5:
        return dense
    gaps = torch.zeros([*shape[:-1], shape[-1] + 2], dtype=dtype)[..., 1:-1]
    return gaps.copy_(dense)


def _other_shape(rng: Random, t: Tensor) -> Tensor:
    shape = list(t.shape)
    if not shape or rng.random() < 0.3:  # of another rank
        shape = rng.choice(([*shape, 1], [1, *shape], shape[1:], [t.numel()], []))
    else:
        dim = rng.randrange(len(shape))
        shape[dim] = max(0, rng.choice((shape[dim] - 1, shape[dim] + 1, 2 * shape[dim], 0, 1)))
    return _fresh(rng, shape, t.dtype)


def _other_memory(rng: Random, t: Tensor, others: list[Tensor]) -> Tensor:
    """The same shape somewhere else: in another argument's storage, expanded, with a strided last dimension, or out."""
    shape, strides, offset = list(t.shape), list(t.stride()), t.storage_offset()
    way = rng.randrange(4)
    if way == 0:
        other = rng.choice(others)
        if other.untyped_storage().nbytes() % t.element_size() == 0:
            flat = torch.empty(0, dtype=torch.uint8).set_(other.untyped_storage())
            if flat.numel():
                return unchecked_view(flat.view(t.dtype), shape, strides, rng.randrange(flat.numel() // t.itemsize))
        return unchecked_view(t, shape, strides, offset + 1)
    if way == 1 and shape:
        strides[rng.randrange(len(shape))] = rng.choice((0, 0, 2, 2**31, 2**62, 2**63 - 1))
        return unchecked_view(t, shape, strides, offset)
    if way == 2:
        return unchecked_view(t, shape, strides, offset + rng.choice((1, 2, 2**20)))
    t.untyped_storage().resize_(rng.randrange(t.untyped_storage().nbytes() + 1))
    return t


def _is_there(t: Tensor) -> bool:
    """Does it lie within its storage, which another change may have cut down?"""
    last = t.storage_offset() + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.numel() > 0 and (last + 1) * t.element_size() <= t.untyped_storage().nbytes()


def _other_value(rng: Random, t: Tensor) -> Tensor:
    if _is_there(t) and t.dtype in (torch.int32, torch.int64):
        limits = torch.iinfo(t.dtype)
        where = tuple(rng.randrange(size) for size in t.shape)
        near = int(t[where]) + rng.choice((-1, 1, 2, 5, 50))
        t[where] = min(max(rng.choice((near, near, near, limits.min, limits.max, 2**32)), limits.min), limits.max)
    return t


def _other_kind(rng: Random, t: Tensor) -> Tensor | None:
    kinds: list[Callable[[], Tensor | None]] = [
        lambda: None,
        lambda: torch.empty(t.shape, dtype=t.dtype, layout=torch.sparse_coo),
        lambda: torch.empty(t.shape, dtype=t.dtype, device="meta"),
    ]
    if t.dtype.is_floating_point:
        kinds.append(lambda: t.detach().requires_grad_())
    return rng.choice(kinds)()


def _spoil(rng: Random, arguments: Arguments) -> Arguments:
    """Change one argument."""
    name = rng.choice(list(arguments))
    value = arguments[name]
    tensors = [t for t in arguments.values() if isinstance(t, Tensor) and t.layout == torch.strided and t.is_cpu]
    if isinstance(value, str):
        new: Any = rng.choice(
            ("None", "Nct", "Alibi", "Rope", "Omni", "NHSD", "Norm", "PA_NZ", "2BNHD", "BHNC", "norm", "")
        )
    elif isinstance(value, bool):
        new = not value
    elif isinstance(value, list) or name in ("strides", "offsets"):
        new = [rng.choice((0, 1, 7, -1, 2**31, 2**62, -(2**63))) for _ in range(rng.choice((0, 1, 2, 2, 3)))]
    elif value is None:
        new = rng.choice(tensors)
    elif not any(t is value for t in tensors) or math.prod(size or 1 for size in value.shape) > 2**31:
        new = value  # was spoiled before, or is a row's with sizes of which torch makes no other tensor
    else:
        way = rng.randrange(12)
        if way < 4:
            new = _other_value(rng, value)
        elif way < 7:
            new = _other_shape(rng, value)
        elif way < 10:
            new = _other_memory(rng, value, tensors)
        elif way == 10:
            new = _fresh(rng, list(value.shape), rng.choice(DTYPES))
        else:
            new = _other_kind(rng, value)
    return arguments | {name: new}


@st.composite
def _spoiled(draw: DrawFn) -> tuple[str, Arguments]:
    rng = draw(st.randoms(use_true_random=False))
    if draw(st.integers(0, 3)) == 0:  # two rows of the table at once, or one and something else
        row = draw(st.sampled_from(ROWS))
        op, arguments = row.op, row.build("cpu")
        other = rng.choice([r for r in ROWS if r.base == row.base])
        if rng.random() < 0.5:
            arguments |= other.change(Build("cpu"), BASES[row.base][1](Build("cpu")))
        else:
            arguments = _spoil(rng, arguments)
        return op, arguments
    call = draw(calls(large=False))
    arguments = {a.name: a.default_value for a in _schema(call.op)} | call.positional | call.keyword
    for _ in range(rng.choice((1, 1, 2))):
        arguments = _spoil(rng, arguments)
    return call.op, arguments


def _schema(op: str) -> list[Any]:
    return list(getattr(torch.ops.pacache, op).default._schema.arguments)


def _contents(arguments: Arguments) -> dict[str, bytes]:
    found = {}
    for name, t in arguments.items():
        if isinstance(t, Tensor) and t.layout == torch.strided and t.is_cpu:
            found[name] = bytes(torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy())
    return found


def _refusal(function: Callable[..., None], arguments: Arguments) -> Exception | None:
    try:
        function(**arguments)
    except REFUSALS as error:
        return error
    return None


def check_spoiled_calls(count: int, first_seed: int | None = None) -> Counter[str]:
    """See that spoiled calls are refused as the reference refuses them, and that not one bit of memory has changed.

    Args:
        count: how many calls to draw; some of them are still valid.
        first_seed: as for :func:`check_valid_calls`.

    Returns:
        How many were "refused", and by which error; how many were "valid" after all.
    """
    counted: Counter[str] = Counter()

    @_settings(count, first_seed)
    @given(_spoiled())
    def check(spoiled: tuple[str, Arguments]) -> None:
        op, arguments = spoiled
        if any(arguments[a.name] is None for a in _schema(op) if str(a.type) == "Tensor"):
            return  # the schema has no such call
        before = _contents(arguments)
        expected = _refusal(getattr(reference, op), arguments)
        if expected is None:
            counted["valid"] += 1
            return
        assert _contents(arguments) == before, "the reference has written"
        found = _refusal(getattr(torch.ops.pacache, op), arguments)
        assert _contents(arguments) == before, "written by a call that was refused"
        assert (type(found), str(found)) == (type(expected), str(expected))
        assert str(found).startswith(f"{op}: ") and ", got " in str(found)
        counted.update(("refused", type(found).__name__))

    _run(check, first_seed)
    return counted
