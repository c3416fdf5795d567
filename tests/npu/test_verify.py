"""``python -m pacache_torch verify --device npu`` on the simulated CANN: it passes, and fails when it should."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from cann_sim.run import Result, run  # noqa: E402


def verify(
    tmp_path: Path, *options: str, code: str | None = None, variables: dict[str, str] | None = None, **simulator: Any
) -> tuple[Result, dict[str, Any], str]:
    """Run the command, or some code that ends with it; its result and both reports."""
    as_json, as_text = tmp_path / "report.json", tmp_path / "report.txt"
    arguments = ["verify", "--device", "npu", "--json", str(as_json), "--output", str(as_text), *options]
    command = [sys.executable, "-m", "pacache_torch", *arguments]
    if code is not None:
        end = f"from pacache_torch.__main__ import main\nraise SystemExit(main({arguments!r}))"
        command = [sys.executable, "-c", f"{code}\n{end}"]
    result = run(command, variables=variables, **simulator)
    assert as_json.exists(), result
    return result, json.loads(as_json.read_text()), as_text.read_text()


def names(report: dict[str, Any], outcome: str) -> list[str]:
    return [case["name"] for case in report["cases"] if case["outcome"] == outcome]


def test_it_passes_and_says_what_ran_where(tmp_path: Path) -> None:
    """Everything: vectors, every row of the capabilities in every dtype, edges, times, versions and libraries."""
    result, report, text = verify(tmp_path, lazy=True)
    assert result.code == 0 and result.violations == [], result
    assert report["ok"] and report["counts"]["failed"] == report["counts"]["not run"] == 0
    assert report["counts"]["passed"] > 120

    assert report["simulated"] == "9.1.0"
    assert text.splitlines()[0] == "SIMULATED: npu:0 is the simulated CANN 9.1.0 of this project's tests."
    assert result.stdout.splitlines()[0] == text.splitlines()[0]
    assert "pacache_torch verify: PASSED on npu:0 (Atlas A2, Ascend910B3, CANN 9.1.0)" in text

    swept = [name for name in names(report, "passed") if name.startswith(("scatter scenario", "load"))]
    for row in report["capabilities"]["rows"]:
        for dtype in row["dtypes"]:
            prefix = f"scatter scenario {row['scenario']} {row['mode']}" if "scenario" in row else f"load {row['mode']}"
            assert any(name.startswith(f"{prefix} {dtype} ") for name in swept), (prefix, dtype)
    vectors = [case for case in report["cases"] if case["group"] == "vectors"]
    assert len(vectors) == 2 * (17 + 9)
    # What a device does not do is refused by name, and only that.
    for case in report["cases"]:
        if case["outcome"] == "refused":
            assert "Ascend910B3" in case["message"] and case["group"] in ("vectors", "edges")

    assert {timing["name"].split()[0] for timing in report["timings"]} == {"scatter_pa_kv_cache", "paged_cache_load"}
    assert len(report["timings"]) == 6 and all(timing["median_us"] > 0 for timing in report["timings"])
    assert set(report["versions"]) >= {"pacache_torch", "torch", "python", "driver"}
    npu = report["torch_npu"]
    assert npu["installed"] == "2.13.0" and npu["cann_version"] == npu["atb_version"] == "9.1.0"
    for library in (npu["op_api_libraries"][-1], npu["atb_libraries"][0]):
        assert Path(library[library.index("(") + 1 : -1]).is_file()
        assert library in text


@pytest.mark.parametrize(
    ("version", "soc", "atb"), [("8.5.0", "A3", True), ("9.0.0", "A2", True), ("9.1.0", "A2", False)]
)
def test_it_passes_on_every_cann(tmp_path: Path, version: str, soc: str, atb: bool) -> None:
    """The simulated CANNs of other versions, with their faults, and without ATB."""
    result, report, _ = verify(tmp_path, "--quick", version=version, soc=soc, atb=atb)
    assert result.code == 0 and result.violations == [], result
    assert report["ok"] and report["simulated"] == version
    loader = "AtbPagedCacheLoad" if atb else "aclnnGatherPaKvCache"
    assert report["torch_npu"]["load_backend"] == loader


def test_a_wrong_row_fails_it(tmp_path: Path) -> None:
    """One element that is wrong in a cache after scatter: case, tensor and element are named; exit code 1."""
    code = """
import torch, torch_npu
from pacache_torch import ops
right = ops.scatter_pa_kv_cache
def wrong(key, value, key_cache, *rest, **options):
    right(key, value, key_cache, *rest, **options)
    if key.dtype == torch.bfloat16 and options.get("scatter_mode") == "Alibi":
        key_cache.view(torch.int16).flatten()[37].add_(1)
ops.scatter_pa_kv_cache = wrong
"""
    result, report, text = verify(tmp_path, code=code)
    assert result.code == 1 and not report["ok"]
    failed = names(report, "failed")
    assert failed == [f"scatter scenario 4 Alibi bfloat16 {index}" for index in ("int32", "int64")]
    (line,) = (
        line for line in text.splitlines() if line.startswith("  sweep: scatter scenario 4 Alibi bfloat16 int32:")
    )
    assert "key_cache: " in line and "bytes of its storage differ, the first in element 37 " in line
    assert "pacache_torch verify: FAILED on npu:0" in text


def test_a_failing_device_ends_in_a_report(tmp_path: Path) -> None:
    """A launch that fails: the case has the error's text, what torch_npu does not run any more is not called passed."""
    code = """
import torch, torch_npu
from cann_sim import control
control.fail_next("aclnnScatterPaKvCache", 507015, 20)
"""
    result, report, text = verify(tmp_path, "--quick", code=code, variables={"TASK_QUEUE_ENABLE": "1"})
    assert result.code == 1 and not report["ok"]
    assert report["counts"]["failed"] == 1 and report["counts"]["not run"] > 40
    assert report["timing_error"] == "the device stopped" and report["timings"] == []
    assert "(ASCEND_LAUNCH_BLOCKING=1 goes on)" in text
    (case,) = (case for case in report["cases"] if case["outcome"] == "failed")
    assert "aclnnScatterPaKvCache failed with 507015" in case["message"]

    result, report, text = verify(tmp_path, "--quick", code=code, variables={"ASCEND_LAUNCH_BLOCKING": "1"})
    assert result.code == 1 and report["counts"]["failed"] == 1 and report["counts"]["not run"] == 0
    (case,) = (case for case in report["cases"] if case["outcome"] == "failed")
    assert "aclnnScatterPaKvCache failed with 507015" in case["message"] and case["call"] in text


def test_nothing_ran(tmp_path: Path) -> None:
    """On a chip that the operators do not know everything is refused, and that is no success."""
    result, report, text = verify(tmp_path, "--quick", soc="310P")
    assert result.code == 1 and not report["ok"] and report["counts"]["passed"] == 0
    assert "FAILED, nothing could be run, on npu:0" in text
    assert report["timing_error"].startswith("NotImplementedError")
