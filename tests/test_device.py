"""What a device can do is told, and a device that is not there is refused with the reason."""

from __future__ import annotations

import doctest

import pytest

import pacache_torch
from pacache_torch import device


def test_the_cpu_lists_every_scenario_and_both_layouts() -> None:
    rows = pacache_torch.capabilities("cpu")["rows"]
    scatter = {(row["scenario"], row["mode"]) for row in rows if row["op"] == "scatter_pa_kv_cache"}
    assert {scenario for scenario, _ in scatter} == set(range(1, 8))
    assert {row["mode"] for row in rows if row["op"] == "paged_cache_load"} == {"Norm", "PA_NZ"}
    assert next(row for row in rows if row["mode"] == "Rope")["dtypes"] == ["float16", "bfloat16", "float32"]


def test_the_example_holds() -> None:
    result = doctest.testmod(device)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("function", [pacache_torch.capabilities, pacache_torch.warmup])
def test_an_npu_that_is_not_there_is_refused_with_the_reason(function) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(pacache_torch.LibraryNotLoadedError, match="_C_npu is not loaded: torch_npu is not installed"):
        function("npu:0")
    with pytest.raises(ValueError, match=f"{function.__name__}: device must be cpu or npu, got meta"):
        function("meta")


def test_warming_up_the_cpu_is_nothing() -> None:
    assert pacache_torch.warmup("cpu") is None
