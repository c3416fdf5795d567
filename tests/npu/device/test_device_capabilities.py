"""What capabilities() lists is what runs on the simulated product and version; all else is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cann_sim import control
from strategies import Call
from support import (
    CANN,
    CAPABILITIES,
    LOAD,
    MEANS,
    NPU,
    PHASE_TWO,
    PRODUCT,
    SCATTER,
    SOC,
    calls,
    cann_at_least,
    launched,
    noise,
    numbers,
    operator,
    short,
)

from pacache_torch import capabilities, reference

DTYPES = (torch.float16, torch.bfloat16, torch.int8, torch.float32, torch.uint8, torch.int16, torch.int32)


def scatter_call(mode: str, dtype: torch.dtype, *, key_only: bool = False, padded: bool = False) -> Call:
    """A call of a mode that is within every limit of its row."""
    nz = mode == "PA_NZ"
    unit = 32 // dtype.itemsize
    compressed = mode in ("Alibi", "Rope", "Omni") or padded
    shape: tuple[int, ...] = (2, 4, 2, 32) if padded else (7, 2, 32)
    cache: tuple[int, ...] = (5, 3, 1, 32) if compressed else (5, 3, 2, 32)
    if nz:
        cache = (5, 2 * 32 // unit, 3, unit)
    if mode == "NHSD":
        cache = (5, 2, 3, 32)
    index = torch.int32
    slots = torch.tensor([0, 4, 8, 12] if compressed else [0, 9, 3, 14, 2, 8, 5], dtype=index)
    keyword: dict[str, Any] = {
        "cache_mode": "PA_NZ" if nz else "Norm",
        "scatter_mode": "None" if nz or padded else mode,
    }
    if mode == "Nct":
        keyword["strides"] = [64, 64]
    if compressed:
        windows = torch.tensor([2, 1, 0, 2], dtype=index)
        keyword |= {"compress_lens": windows.view(2, 2) if padded else windows, "seq_lens": torch.tensor([4, 3])}
        slots = slots.view(2, 2) if padded else slots
        if mode != "Alibi" and not padded:
            keyword["compress_seq_offsets"] = torch.tensor([1, -1, 1, 1], dtype=index)
    # Numbers where a mean is taken: the payload of a NaN that is a mean is left open.
    key, value = (numbers(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
    caches = [noise(*cache, dtype=dtype, seed=seed) for seed in (3, 4)]
    return Call(
        SCATTER,
        {
            "key": key,
            "value": None if key_only else value,
            "key_cache": caches[0],
            "value_cache": None if key_only else caches[1],
            "slot_mapping": slots,
        },
        keyword,
        ("key_cache",) if key_only else ("key_cache", "value_cache"),
    )


def load_call(mode: str, dtype: torch.dtype) -> Call:
    unit = 32 // dtype.itemsize
    nz = mode == "PA_NZ"
    cache = (5, 4, 16, unit) if nz else (5, 3, 2, 2 * unit)
    output = (9, 4 * unit) if nz else (9, 2, 2 * unit)
    return Call(
        LOAD,
        {
            "key_cache": noise(*cache, dtype=dtype, seed=1),
            "value_cache": noise(*cache, dtype=dtype, seed=2),
            "block_tables": torch.tensor([[4, 0, 3], [1, 2, 0]], dtype=torch.int32),
            "context_lens": torch.tensor([5, 2], dtype=torch.int32),
            "key": noise(*output, dtype=dtype, seed=3),
            "value": noise(*output, dtype=dtype, seed=4),
        },
        {"cache_mode": mode},
        ("key", "value"),
    )


# Every scenario of both operators, listed or not, by (operator, scenario, mode).
SCENARIOS = [
    (SCATTER, 1, "PA_NZ"),
    (SCATTER, 2, "None"),
    (SCATTER, 2, "Nct"),
    (SCATTER, 3, "None"),
    (SCATTER, 4, "Alibi"),
    (SCATTER, 5, "Rope"),
    (SCATTER, 5, "Omni"),
    (SCATTER, 6, "None"),
    (SCATTER, 6, "Nct"),
    (SCATTER, 7, "NHSD"),
    (LOAD, None, "Norm"),
    (LOAD, None, "PA_NZ"),
]
NEVER_HERE = {3}  # another product


def listed() -> dict[tuple[str, int | None, str], list[str]]:
    return {(row["op"], row.get("scenario"), row["mode"]): row["dtypes"] for row in CAPABILITIES["rows"]}


def make(op: str, scenario: int | None, mode: str, dtype: torch.dtype) -> Call:
    if op == LOAD:
        return load_call(mode, dtype)
    return scatter_call(mode, dtype, key_only=scenario == 6, padded=scenario == 3)


def test_what_is_listed() -> None:
    """A2 and A3 alike; NHSD from 9.1.0 on, and never what belongs to another product."""
    assert CAPABILITIES == capabilities(NPU) == capabilities("npu")
    assert (CAPABILITIES["product"], CAPABILITIES["soc"], CAPABILITIES["cann"]) == (PRODUCT, SOC, CANN)
    assert CAPABILITIES["verified_on_hardware"] is False
    expected = {s for s in SCENARIOS if s[1] not in NEVER_HERE and (s[1] != 7 or cann_at_least(9, 1))}
    rows = listed()
    assert set(rows) == expected and len(CAPABILITIES["rows"]) == len(expected)
    for (_, _, mode), dtypes in rows.items():
        assert dtypes == [short(d) for d in (MEANS if mode in ("Rope", "Omni") else (*MEANS, torch.int8))]
    assert all(row["limits"] and row["since"] for row in CAPABILITIES["rows"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "scenario", "mode"), SCENARIOS, ids=str)
def test_listed_is_what_runs(op: str, scenario: int | None, mode: str, dtype: torch.dtype) -> None:
    """With a dtype of its row a scenario runs and is right; without, it is refused by product, version and scenario."""
    call = make(op, scenario, mode, dtype)
    expected, actual = call.clone(), call.clone(NPU)
    if short(dtype) in listed().get((op, scenario, mode), []):
        expected.run(getattr(reference, op))
        with calls() as made:
            actual.run(operator(op))
        assert launched(made) == {PHASE_TWO[op]: 1}
        assert control.violations() == []
        assert actual.clone("cpu").differences(expected) == []
        return
    if mode == "Rope" and not dtype.is_floating_point:
        error, text = TypeError, "for the window mean of Rope"  # on every device
    else:
        error, text = NotImplementedError, f"on {PRODUCT} ({SOC}) with CANN {CANN}"
    with calls() as made, pytest.raises(error) as caught:
        actual.run(operator(op))
    assert made == {}
    assert text in str(caught.value)
    assert f"scenario {scenario} " in str(caught.value) or op == LOAD or error is TypeError
    assert actual.clone("cpu").differences(call) == []
