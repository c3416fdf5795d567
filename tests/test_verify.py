"""``python -m pacache_torch verify`` on the CPU: passes here, and sees what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pacache_torch import __main__ as command_line
from pacache_torch import capabilities, ops
from pacache_torch.verify.calls import Call, differences
from pacache_torch.verify.run import FAILED, NOT_RUN, PASSED, REFUSED, run_case, run_cases
from pacache_torch.verify.sweep import Case, edge_cases, sweep_cases, vector_cases

CPU = torch.device("cpu")


def verify(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "report.json"
    code = command_line.main(["verify", "--device", "cpu", "--json", str(path), *options])
    return code, json.loads(path.read_text())


def test_the_cpu_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every case is run and passes, none is refused; the report says where and with what."""
    code, report = verify(tmp_path, "--quick")
    assert code == 0 and report["ok"]
    counts = report["counts"]
    assert counts["passed"] == len(report["cases"]) > 150
    assert report["simulated"] is None and report["device"] == "cpu"
    assert {case["group"] for case in report["cases"]} == {"vectors", "sweep", "edges"}
    assert len(report["timings"]) == 6 and report["timing_error"] is None
    text = capsys.readouterr().out
    assert text.startswith("pacache_torch verify: PASSED on cpu") and f"torch: {torch.__version__}" in text
    for case in report["cases"]:
        assert f"  {case['group']}: {case['name']}" in text


def test_the_text_goes_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--output writes the whole text and prints its head."""
    path = tmp_path / "report.txt"
    code, _ = verify(tmp_path, "--quick", "--output", str(path))
    text, printed = path.read_text(), capsys.readouterr().out
    assert code == 0 and text.startswith(printed.rstrip()) and len(text) > 10 * len(printed) > 0


def test_every_row_is_swept() -> None:
    """Each scenario, mode and dtype of the capabilities has a case; names are unique."""
    rows = capabilities("cpu")["rows"]
    cases = [*vector_cases(), *sweep_cases(rows), *edge_cases(rows)]
    seen = [f"{case.group} {case.name}" for case in cases]
    assert len(set(seen)) == len(seen)
    for row in rows:
        for dtype in row["dtypes"]:
            what = f"scenario {row['scenario']} {row['mode']}" if "scenario" in row else row["mode"]
            assert any(f" {what} {dtype} " in name for name in seen), (what, dtype)


def _all_cases() -> list[Case]:
    rows = capabilities("cpu")["rows"]
    rows = [row | {"dtypes": [d for d in row["dtypes"] if d in ("float16", "int8")]} for row in rows]
    return [case for case in (*sweep_cases(rows), *edge_cases(rows)) if _writes(case.call)]


def _writes(call: Call) -> bool:
    before, after = call.clone("cpu"), call.clone("cpu")
    after.run_reference()
    return differences(after, before, mean_ulps=0)[0] != []


def test_every_case_sees_a_call_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the operator every case that writes fails; only a handful write nothing."""
    cases = _all_cases()
    everything = [*sweep_cases(capabilities("cpu")["rows"])]
    assert len(cases) > 50 and all(_writes(case.call) for case in everything)
    for op in ("scatter_pa_kv_cache", "paged_cache_load"):
        monkeypatch.setattr(ops, op, lambda *args, **kwargs: None)
    assert {run_case(case, CPU, mean_ulps=0)[0] for case in cases} == {FAILED}


def test_a_byte_beside_the_rows_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte of the storage that no row covers is compared too."""
    right = ops.paged_cache_load

    def wrong(*args: Any, **kwargs: Any) -> None:
        right(*args, **kwargs)
        storage = args[4].untyped_storage()
        torch.empty(0, dtype=torch.uint8).set_(storage)[-1] ^= 1

    monkeypatch.setattr(ops, "paged_cache_load", wrong)
    case = next(iter(sweep_cases([{"op": "paged_cache_load", "mode": "Norm", "dtypes": ["float16"]}])))
    outcome, message = run_case(case, CPU, mean_ulps=0)
    assert outcome == FAILED and message.startswith("key: 1 bytes of its storage differ")


def test_a_mean_may_be_off_by_one_unit_on_a_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One unit in the last place of a mean passes where it is allowed, two never, and no copy may be off at all."""
    right = ops.scatter_pa_kv_cache
    row = {"op": "scatter_pa_kv_cache", "scenario": 5, "mode": "Rope", "dtypes": ["float16"]}
    case = next(iter(sweep_cases([row])))
    mean = case.call.mean_slots[0]
    block_size = case.call.arguments["key_cache"].size(1)

    def off_by(units: int, slot: int) -> tuple[str, str]:
        def wrong(*args: Any, **kwargs: Any) -> None:
            right(*args, **kwargs)
            bits = args[2].view(torch.int16)
            bits[slot // block_size, slot % block_size, 0, 5] += units

        monkeypatch.setattr(ops, "scatter_pa_kv_cache", wrong)
        return run_case(case, CPU, mean_ulps=1)

    assert off_by(0, mean) == (PASSED, "")
    assert off_by(1, mean) == (PASSED, "1 elements of means differ by one unit in the last place")
    assert off_by(2, mean)[0] == FAILED
    assert off_by(1, mean + 1)[0] == FAILED
    off_by(1, mean)
    assert run_case(case, CPU, mean_ulps=0)[0] == FAILED


def test_a_refusal_is_a_failure_where_the_device_claims_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """NotImplementedError fails a case of the sweep, and is noted for an edge; one that has written fails both."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("not on this device")

    def write_and_refuse(*args: Any, **kwargs: Any) -> None:
        args[2].view(torch.uint8).bitwise_not_()
        raise NotImplementedError("not on this device")

    rows = capabilities("cpu")["rows"]
    must = next(iter(sweep_cases(rows)))
    may = next(case for case in edge_cases(rows) if not case.must_run)
    monkeypatch.setattr(ops, "scatter_pa_kv_cache", refuse)
    assert run_case(must, CPU, mean_ulps=0) == (FAILED, "claimed, but refused: not on this device")
    assert run_case(may, CPU, mean_ulps=0) == (REFUSED, "not on this device")
    monkeypatch.setattr(ops, "scatter_pa_kv_cache", write_and_refuse)
    outcome, message = run_case(may, CPU, mean_ulps=0)
    assert outcome == FAILED and message.startswith("refused, but written: not on this device")


def test_a_dead_queue_ends_the_run_but_not_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """After torch_npu's queue has stopped, cases are not run, and none is called passed."""

    def stop(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("The Inner error is reported as above. The process exits for this inner error")

    cases = list(sweep_cases(capabilities("cpu")["rows"]))[:5]
    monkeypatch.setattr(ops, "scatter_pa_kv_cache", stop)
    outcomes = run_cases(cases, CPU, mean_ulps=0)
    assert [outcome.outcome for outcome in outcomes] == [FAILED, *[NOT_RUN] * 4]
    assert cases[0].name in outcomes[1].message


def test_without_an_npu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--device npu on a machine without one: one sentence and exit code 1."""
    from pacache_torch.demo import device
    from pacache_torch.verify import cli

    def unavailable(name: str) -> None:
        raise device.DeviceUnavailable("no NPU to run on: torch_npu is not installed")

    monkeypatch.setattr(cli, "choose_device", unavailable)
    assert command_line.main(["verify", "--device", "npu"]) == 1
    assert "verify: no NPU to run on: torch_npu is not installed" in capsys.readouterr().err
