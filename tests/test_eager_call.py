"""pacache_torch's functions call the kernels directly where they may, and leave every other call to torch.ops."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pacache_torch

Arguments = dict[str, Any]
WRITTEN = {
    "scatter_pa_kv_cache": ("key_cache", "value_cache"),
    "paged_cache_load": ("key", "value"),
    "scatter_pa_kv_cache_packed": ("kv_cache",),
    "paged_cache_load_packed": ("key", "value"),
}
NAMES = tuple(WRITTEN)
MODE = {name: "kv_layout" if name.endswith("packed") else "cache_mode" for name in NAMES}
LAYOUT = {name: {"kv_layout": "BHNC"} if name.endswith("packed") else {} for name in NAMES}


def arguments_of(name: str) -> Arguments:
    """The tensors of a call of two tokens, by the names and in the order of the public function."""
    rows = {"key": torch.randn(2, 3, 5), "value": torch.randn(2, 3, 5)}
    caches = {"key_cache": torch.randn(3, 7, 3, 5), "value_cache": torch.randn(3, 7, 3, 5)}
    if LAYOUT[name]:
        caches = {"kv_cache": torch.randn(3, 3, 7, 10)}
    if name.startswith("scatter"):
        return {**rows, **caches, "slot_mapping": torch.tensor([11, 2])}
    tables = {"block_tables": torch.tensor([[2], [0]]), "context_lens": torch.tensor([1, 1])}
    return {**caches, **tables, **rows}


def by_position(name: str, arguments: Arguments) -> tuple[Any, ...]:
    """Every argument of the schema, as csrc/eager_call.cpp takes them."""
    rest: dict[str, tuple[Any, ...]] = {
        "scatter_pa_kv_cache": (None, None, None, "Norm", "None", None, None),
        "paged_cache_load": (None, "Norm", False),
        "scatter_pa_kv_cache_packed": ("BHNC",),
        "paged_cache_load_packed": ("BHNC", None, False),
    }
    return (*arguments.values(), *rest[name])


def call(door: Any, name: str, *values: Any, **keywords: Any) -> None:
    """Call the operator by torch.ops or the function of the package."""
    getattr(door, name)(*values, **LAYOUT[name] | keywords)


@pytest.fixture
def native() -> Any:
    """The library, whose kernels these tests are about."""
    if os.environ.get("PACACHE_FORCE_REFERENCE") == "1":
        pytest.skip("PACACHE_FORCE_REFERENCE=1")
    return pytest.importorskip("pacache_torch._C")


def expected_of(name: str, arguments: Arguments) -> list[Tensor]:
    """What torch.ops writes into copies."""
    copies = {key: t.detach().as_subclass(Tensor).clone() for key, t in arguments.items()}
    call(torch.ops.pacache, name, *copies.values())
    return [copies[written] for written in WRITTEN[name]]


def check_written(name: str, arguments: Arguments, expected: list[Tensor]) -> None:
    for written, wanted in zip(WRITTEN[name], expected, strict=True):
        assert torch.equal(arguments[written].as_subclass(Tensor), wanted)


@pytest.mark.parametrize("guard", (contextlib.nullcontext, torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("name", NAMES)
def test_a_plain_call_is_made_directly(native: Any, name: str, guard: Callable[[], Any]) -> None:
    with guard():
        arguments = arguments_of(name)
        expected = expected_of(name, arguments)
        assert getattr(native, f"call_{name}")(*by_position(name, arguments)) is True
        check_written(name, arguments, expected)


class Named(Tensor):
    """A subclass that says what it is asked."""

    asked: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("name", NAMES)
def test_a_subclass_is_asked(native: Any, name: str) -> None:
    for position, argument in enumerate(arguments_of(name)):
        arguments = arguments_of(name)
        expected = expected_of(name, arguments)
        arguments[argument] = arguments[argument].as_subclass(Named)
        values = by_position(name, arguments)
        assert isinstance(values[position], Named)
        assert getattr(native, f"call_{name}")(*values) is False
        Named.asked.clear()
        call(pacache_torch, name, *arguments.values())
        assert f"pacache.{name}.default" in Named.asked
        check_written(name, arguments, expected)


class Functions(TorchFunctionMode):
    """Records functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Records operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", (Functions, Operators))
@pytest.mark.parametrize("name", NAMES)
def test_modes_see_the_operator(name: str, mode: Callable[[], Any]) -> None:
    arguments = arguments_of(name)
    expected = expected_of(name, arguments)
    with mode() as active:
        call(pacache_torch, name, *arguments.values())
    assert f"pacache.{name}.default" in active.seen
    check_written(name, arguments, expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_profiler_sees_the_operator(name: str) -> None:
    arguments = arguments_of(name)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(pacache_torch, name, *arguments.values())
    assert f"pacache::{name}" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_run_the_fake_kernel(name: str) -> None:
    real = arguments_of(name)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in real.values()]
        call(pacache_torch, name, *fake)
        fake[0] = fake[0][..., 0]
        with pytest.raises(ValueError, match=f"^{name}: "):
            call(pacache_torch, name, *fake)


@pytest.mark.parametrize("name", NAMES)
def test_a_transform_sees_the_operator(name: str) -> None:
    """Functorch's tensors look plain from Python; the call must go through its layers."""
    arguments = arguments_of(name)
    expected = expected_of(name, arguments)

    def function(t: Tensor) -> Tensor:
        call(pacache_torch, name, **arguments)
        return t.sin()

    assert torch.func.grad(function)(torch.tensor(0.0)) == 1.0
    check_written(name, arguments, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", (3, "text", [1.0]))
def test_what_is_no_tensor_is_refused_as_by_the_operator(native: Any, name: str, wrong: object) -> None:
    values: list[Any] = list(arguments_of(name).values())
    for position in range(len(values)):
        spoiled = [*values]
        spoiled[position] = wrong
        with pytest.raises(Exception) as by_operator:
            call(torch.ops.pacache, name, *spoiled)
        with pytest.raises(type(by_operator.value)) as by_function:
            call(pacache_torch, name, *spoiled)
        assert str(by_function.value) == str(by_operator.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", (None, 3, "\ud800", "Norm\0"))
def test_what_is_no_mode_is_refused_as_by_the_operator(name: str, wrong: object) -> None:
    arguments = arguments_of(name)
    with pytest.raises(Exception) as by_operator:
        call(torch.ops.pacache, name, *arguments.values(), **{MODE[name]: wrong})
    with pytest.raises(type(by_operator.value)) as by_function:
        call(pacache_torch, name, *arguments.values(), **{MODE[name]: wrong})
    assert str(by_function.value) == str(by_operator.value)


@pytest.mark.parametrize("name", NAMES)
def test_it_counts_its_arguments(native: Any, name: str) -> None:
    with pytest.raises(ValueError, match="arguments"):
        getattr(native, f"call_{name}")(torch.zeros(1))


# Autograd learns of the write ------------------------------------------------------


@pytest.mark.parametrize("door", (torch.ops.pacache, pacache_torch))
@pytest.mark.parametrize("name", NAMES)
def test_a_backward_that_saved_what_was_written_raises(door: Any, name: str) -> None:
    for written in WRITTEN[name]:
        arguments = arguments_of(name)
        weight = torch.ones((), requires_grad=True)
        loss = (weight * arguments[written]).sum()  # saves what is written, to multiply with later
        call(door, name, *arguments.values())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("door", (torch.ops.pacache, pacache_torch))
@pytest.mark.parametrize("name", NAMES)
def test_inference_tensors_are_written(door: Any, name: str) -> None:
    with torch.inference_mode():
        arguments = arguments_of(name)
        expected = expected_of(name, arguments)
        call(door, name, *arguments.values())
        check_written(name, arguments, expected)
