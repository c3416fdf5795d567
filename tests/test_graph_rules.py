"""Fit for a captured graph: with outputs given, a call reads no value on the host and allocates nothing.

Held on the Python layer by recording every operator that it dispatches and every block that torch allocates. Where a
call breaks the rule by design (a load that counts its own rows), the same record shows it.
"""

from __future__ import annotations

from typing import Any

import pytest
from bad_arguments import BASES, LOAD, SCATTER, Build
from graphs import largest_allocation
from torch.utils._python_dispatch import TorchDispatchMode

import pacache_torch


class Recorder(TorchDispatchMode):
    """The names of all operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def dispatched(op: str, arguments: dict[str, Any]) -> list[str]:
    with Recorder() as record:
        getattr(pacache_torch, op)(**arguments)
    return record.seen


@pytest.mark.parametrize("base", BASES)
def test_a_call_is_one_operator(base: str) -> None:
    """No .item(), no cast, no copy, no allocation: only the operator itself."""
    op, build = BASES[base]
    arguments = build(Build("cpu"))
    assert dispatched(op, arguments) == [f"pacache::{op}"]
    assert largest_allocation(lambda: getattr(pacache_torch, op)(**arguments)) == 0


@pytest.mark.parametrize("base", ("load", "load_cumsum", "load_nz", "load_bhnc"))
def test_outputs_that_are_allocated(base: str) -> None:
    """With num_tokens two allocations of a size that is known ahead; without it the lengths are read."""
    op, build = BASES[base]
    arguments = build(Build("cpu")) | {"key": None, "value": None}
    assert dispatched(op, arguments | {"num_tokens": 8}) == ["aten::empty.memory_format"] * 2 + [f"pacache::{op}"]
    assert "aten::_local_scalar_dense" in dispatched(op, arguments)


@pytest.mark.parametrize("op", (SCATTER, LOAD))
def test_fake_tensors_pass(op: str) -> None:
    """What has no values passes: nothing on the way asks for one."""
    base = "norm" if op == SCATTER else "load"
    getattr(pacache_torch, op)(**BASES[base][1](Build("meta")))
