"""One call of an operator: how it is moved to a device with all its memory, and how what it left there is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pacache_torch import _rules, ops, reference
from pacache_torch.verify.vectors import Vector

POSITIONAL = {
    _rules.SCATTER: ("key", "value", "key_cache", "value_cache", "slot_mapping"),
    _rules.LOAD: ("key_cache", "value_cache", "block_tables", "context_lens", "key", "value"),
}


@dataclass(frozen=True)
class Call:
    """The arguments of one call.

    A call is made on the CPU. Its clones have memory of their own, everything around the tensors included, so that what
    must not be written is compared too.
    """

    op: str
    arguments: dict[str, Any]
    written: tuple[str, ...]
    mean_slots: tuple[int, ...] = ()  # slots that hold a mean
    memory: dict[str, Tensor] = field(default_factory=dict)  # of a clone: the bytes of each tensor's storage

    def clone(self, device: torch.device | str) -> Call:
        """Copy to a device; tensors that shared a storage still do."""
        copies: dict[int, Tensor] = {}
        arguments: dict[str, Any] = {}
        memory: dict[str, Tensor] = {}
        for name, argument in self.arguments.items():
            if not isinstance(argument, Tensor):
                arguments[name] = argument
                continue
            storage = argument.untyped_storage()
            key = storage._cdata
            if key not in copies:
                copies[key] = torch.empty(0, dtype=torch.uint8).set_(storage).to(device, copy=True)
            memory[name] = copies[key]
            arguments[name] = (
                copies[key].view(argument.dtype).as_strided(argument.shape, argument.stride(), _offset(argument))
            )
        return replace(self, arguments=arguments, memory=memory)

    def run(self, function: Callable[..., object]) -> None:
        """Call the function; it writes into the arguments."""
        named = dict(self.arguments)
        positional = [named.pop(name) for name in POSITIONAL[self.op]]
        function(*positional, **named)

    def run_operator(self) -> None:
        """Run the operator on the device where the tensors are."""
        self.run(getattr(ops, self.op))

    def run_reference(self) -> None:
        """Run the Python reference."""
        self.run(getattr(reference, self.op))

    def describe(self) -> str:
        """Say what is passed: dtypes, shapes and strides, and the integers of keyword arguments."""
        parts = []
        for name, argument in self.arguments.items():
            if isinstance(argument, Tensor):
                dtype = str(argument.dtype).removeprefix("torch.")
                parts.append(f"{name} {dtype} {list(argument.shape)} strides {list(argument.stride())}")
            else:
                parts.append(f"{name} {argument!r}")
        return f"{self.op}: {', '.join(parts)}"


def from_vector(op: str, vector: Vector) -> tuple[Call, Call]:
    """Make the call of a worked example, and what it must leave behind."""
    arguments = dict(zip(POSITIONAL[op], vector.positional, strict=True)) | vector.keyword
    call = Call(op, arguments, tuple(vector.written))
    expected = call.clone("cpu")
    for name, values in vector.expected.items():
        expected.arguments[name].copy_(values)
    return call, expected


def differences(actual: Call, expected: Call, *, mean_ulps: int) -> tuple[list[str], int]:
    """Compare the whole memory of two clones, bit for bit.

    Args:
        actual: the clone that a device has written.
        expected: the clone that the reference has written.
        mean_ulps: by how many units in the last place a mean may differ.

    Returns:
        A line for each tensor that differs, and the number of means that differ within what is allowed.
    """
    lines = []
    near_means = 0
    for name, wanted in expected.memory.items():
        got = actual.memory[name].cpu()
        if mean_ulps and name in actual.written and actual.mean_slots:
            near_means += _accept_near_means(got, wanted, expected.arguments[name], actual.mean_slots, mean_ulps)
        where = (got != wanted).nonzero().flatten()
        if where.numel():
            tensor = expected.arguments[name]
            first = int(where[0])
            element = first // tensor.element_size() - _offset(tensor)
            lines.append(
                f"{name}: {where.numel()} bytes of its storage differ, the first in element {element} from its data "
                f"pointer: got {int(got[first])}, expected {int(wanted[first])}"
            )
    return lines, near_means


def _accept_near_means(got: Tensor, wanted: Tensor, like: Tensor, slots: tuple[int, ...], ulps: int) -> int:
    """Replace means that are near enough by what was wanted; return how many there were."""
    views = [t.view(like.dtype).as_strided(like.shape, like.stride(), _offset(like)) for t in (got, wanted)]
    count = 0
    for slot in slots:
        got_row, wanted_row = (view[slot // like.size(1), slot % like.size(1), 0] for view in views)
        distance = (_ordered(got_row) - _ordered(wanted_row)).abs()
        near = (distance > 0) & (distance <= ulps)
        count += int(near.sum())
        got_row[near] = wanted_row[near]
    return count


def _ordered(row: Tensor) -> Tensor:
    """Floating-point numbers as integers in the same order, neighbours one apart."""
    bits = row.view({2: torch.int16, 4: torch.int32}[row.element_size()]).to(torch.int64)
    magnitude = bits & (2 ** (8 * row.element_size() - 1) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def _offset(t: Tensor) -> int:
    return int(t.storage_offset())
