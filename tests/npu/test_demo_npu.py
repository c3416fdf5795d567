"""The demo on npu:0 of the simulated CANN: equal to a dense cache, by the device operators, said to be simulated."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from cann_sim.run import Result, run  # noqa: E402


def demo(tmp_path: Path, *options: str, **simulator: Any) -> tuple[Result, dict[str, Any], set[str]]:
    """Run the quick demo; its result, what it wrote as JSON, and every CANN function that it called."""
    numbers, trace = tmp_path / "demo.json", tmp_path / "trace.jsonl"
    command = [sys.executable, "-m", "pacache_torch", "demo", "--device", "npu", "--quick", "--json", str(numbers)]
    result = run([*command, *options], trace=trace, **simulator)
    assert result.code == 0, result
    assert result.violations == [], result
    called = {json.loads(line)["api"] for line in trace.read_text().splitlines()}
    return result, json.loads(numbers.read_text()), called


def test_every_layout_and_dtype_is_equal_to_the_dense_run(tmp_path: Path) -> None:
    """Norm and PA_NZ in bfloat16 and float16, in lazy mode, on both device operators."""
    result, facts, called = demo(tmp_path, lazy=True)
    assert facts["ok"] and facts["device"] == "npu:0"
    ran = {(report["layout"], report["dtype"]) for report in facts["runs"]}
    assert ran == {(layout, dtype) for layout in ("Norm", "PA_NZ") for dtype in ("bfloat16", "float16")}
    for report in facts["runs"]:
        assert report["rows_checked"] > 1000 and report["rows_different"] == report["tokens_different"] == 0
    assert {"aclnnScatterPaKvCache", "AtbPagedCacheLoad"} <= called
    assert "aclnnGatherPaKvCache" not in called
    # Nobody may take this for an NPU.
    assert "SIMULATED: npu:0 is the simulated CANN 9.1.0" in result.stdout
    assert result.stdout.rstrip().endswith("on a SIMULATED device.")
    assert facts["simulated"].startswith("SIMULATED")


@pytest.mark.parametrize("version", ["8.5.0", "9.0.0"])
def test_on_an_a3_without_atb(tmp_path: Path, version: str) -> None:
    """Older CANNs, another chip, and the aclnn sibling that loads without ATB."""
    _, facts, called = demo(tmp_path, "--dtype", "bfloat16", "--layers", "1", version=version, soc="A3", atb=False)
    assert facts["ok"] and len(facts["runs"]) == 2
    assert {"aclnnScatterPaKvCache", "aclnnGatherPaKvCache"} <= called
    assert "AtbPagedCacheLoad" not in called


def test_there_is_no_npu_on_an_unsupported_chip(tmp_path: Path) -> None:
    """A chip that the operators do not know fails with its name."""
    command = [sys.executable, "-m", "pacache_torch", "demo", "--device", "npu", "--quick"]
    result = run(command, soc="310P")
    assert result.code != 0 and "Ascend310P3" in result.stderr, result
    assert result.violations == [], result
