"""With PACACHE_CHECK=1 the values of index tensors are looked at on a simulated NPU too: the words of the CPU.

The rows of the table have sizes and gaps that the device does not take, so their caches are made anew for it; index
tensors stay as they are.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from bad_arguments import ROWS, SCATTER, WRITTEN, Arguments, Row
from strategies import Call
from support import NPU, PHASE_TWO, calls, cann_at_least, launched, memories, noise, operator

from pacache_torch import reference

pytestmark = pytest.mark.skipif(os.environ.get("PACACHE_CHECK") != "1", reason="PACACHE_CHECK is not 1")

# NZ blocks are multiples of 16 on the device, and these need more than one block for 5 tokens.
NOT_HERE = (
    "load_nz_5d: more tokens than the table has columns for",
    f"load_nz_5d: block_tables {[[4, 2**32, 3], [1, 2, 0]]}",
)
ROWS_HERE = {row.name: row for row in ROWS if row.needs == "values" and row.name not in NOT_HERE}


def fitted(row: Row) -> Arguments:
    """The arguments of a row with dense tensors of sizes that the device takes."""
    arguments = row.build(NPU)
    for name in ("key", "value", "key_cache", "value_cache", "kv_cache"):
        t = arguments.get(name)
        if t is None:
            continue
        shape = [*t.shape]
        if row.base.startswith("load_nz"):
            shape = {"key": [8, 96], "value": [8, 96]}.get(name, [5, 6, 16, 16])
        elif not row.base.startswith("nz"):
            shape[-1] = 64 if name == "kv_cache" and t.dim() == 4 else 32
        arguments[name] = noise(*shape).to(NPU)
    if row.base == "nct":
        arguments |= {"strides": [96, 96], "offsets": [0, 0]}
    return arguments


@pytest.mark.parametrize("name", ROWS_HERE)
def test_refused_as_on_the_cpu(name: str) -> None:
    row = ROWS_HERE[name]
    arguments = fitted(row)
    before = memories(arguments)
    with calls() as made, pytest.raises(Exception) as caught:
        operator(row.op)(**arguments)
    assert launched(made) == {}
    assert memories(arguments) == before
    newer = row.base in ("nhsd", "b2nhd") and not cann_at_least(9, 1)
    strided = row.base in ("bhnc", "bnhc", "load_b2nhd", "load_bhnc", "load_bnhc")
    unsupported = row.base.startswith("padded") or newer or strided
    if unsupported:
        assert isinstance(caught.value, NotImplementedError)
    else:
        assert (type(caught.value), str(caught.value)) == (row.error, row.message(NPU))


def test_the_rows_that_run_here() -> None:
    """Two rows are left out, and both operators have some."""
    assert len(ROWS_HERE) == len([row for row in ROWS if row.needs == "values"]) - len(NOT_HERE)
    assert {row.op for row in ROWS_HERE.values()} == set(WRITTEN)


def rope(slots: list[int]) -> Call:
    positional: dict[str, Any] = {
        "key": noise(7, 2, 32),
        "value": noise(7, 2, 32),
        "key_cache": noise(6, 3, 1, 32),
        "value_cache": noise(6, 3, 1, 32),
        "slot_mapping": torch.tensor(slots),
    }
    keyword = {
        "compress_lens": torch.tensor([2, 1, 0, 2]),
        "compress_seq_offsets": torch.tensor([1, -1, 1, 1]),
        "seq_lens": torch.tensor([4, 3]),
        "scatter_mode": "Rope",
    }
    return Call(SCATTER, positional, keyword, ("key_cache", "value_cache"), mean_slots=(1, 13))


def test_negative_slots_that_the_device_does_not_skip() -> None:
    """Rope would write its mean, NHSD its token: refused when it can be known."""
    call = rope([0, -1, 8, 12]).clone(NPU)
    with calls() as made, pytest.raises(NotImplementedError) as caught:
        call.run(operator(SCATTER))
    assert launched(made) == {}
    assert str(caught.value) == (
        "scatter_pa_kv_cache: slot_mapping[1] must not be negative in scenario 5 on npu:0 "
        "(the device kernel does not skip it), got -1"
    )


def test_valid_values_pass() -> None:
    """The check looks, and lets the call through."""
    call = rope([0, 4, 8, 12])
    expected, actual = call.clone(), call.clone(NPU)
    expected.run(reference.scatter_pa_kv_cache)
    with calls() as made:
        actual.run(operator(SCATTER))
    assert launched(made) == {PHASE_TWO[SCATTER]: 1}
    assert actual.clone("cpu").differences(expected) == []
