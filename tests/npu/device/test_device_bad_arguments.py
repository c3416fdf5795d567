"""Calls that must be refused are refused on a simulated NPU with the words of the CPU, and CANN is not called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_arguments import BASES, ROWS, Arguments, Build, Row
from strategies import Call
from support import NPU, calls, memories, operator

import pacache_torch

BY_NAME = {row.name: row for row in ROWS if row.needs != "values"}


def build(row: Row) -> Arguments:
    """Give the arguments of a row on the NPU.

    The device casts to no float64 and to no complex numbers, so tensors of these are copied there as bytes.
    """
    if row.name.endswith((" float64", " complex64")):
        return Call(row.op, {}, row.build("cpu"), ()).clone(NPU).keyword
    return row.build(NPU)


def refused(function: Callable[..., None], arguments: Arguments) -> Exception:
    """Call, and give the exception; nothing was written and no function of CANN called."""
    before = memories(arguments)
    with calls() as made, pytest.raises(Exception) as caught:
        function(**arguments)
    assert made == {}
    assert memories(arguments) == before
    return caught.value


@pytest.mark.parametrize("name", BY_NAME)
def test_refused_as_on_the_cpu(name: str) -> None:
    row = BY_NAME[name]
    error = refused(operator(row.op), build(row))
    assert (type(error), str(error)) == (row.error, row.message(NPU))


@pytest.mark.parametrize("name", BY_NAME)
def test_wrappers_add_nothing(name: str) -> None:
    row = BY_NAME[name]
    error = refused(getattr(pacache_torch, row.op), build(row))
    assert (type(error), str(error)) == (row.error, row.message(NPU))


@pytest.mark.parametrize("name", ("padded_alibi", "padded_rope"))
def test_valid_elsewhere(name: str) -> None:
    """What the CPU does and this product does not is another exception, made as early."""
    op, build = BASES[name]
    error = refused(operator(op), build(Build(NPU)))
    assert isinstance(error, NotImplementedError) and "scenario 3 (scatter_mode 'None')" in str(error)


@pytest.mark.parametrize("which", ("slot_mapping", "value_cache"))
def test_another_npu_is_elsewhere(which: str) -> None:
    """Tensors of two NPUs do not come together."""
    arguments: dict[str, Any] = BASES["norm"][1](Build(NPU))
    arguments[which] = torch.zeros_like(arguments[which], device="npu:1")
    torch.npu.synchronize("npu:1")
    error = refused(operator("scatter_pa_kv_cache"), arguments)
    assert isinstance(error, ValueError)
    assert str(error) == f"scatter_pa_kv_cache: {which} must be on npu:0 as key, got npu:1"
