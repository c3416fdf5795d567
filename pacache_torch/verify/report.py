"""What is written down: versions, libraries, the outcome of every case, times. As JSON values and as text."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from pacache_torch import capabilities, doctor
from pacache_torch.verify.run import FAILED, NOT_RUN, PASSED, REFUSED, Outcome
from pacache_torch.verify.timing import Timing

FORMAT = 1
_DRIVER = Path("/usr/local/Ascend/driver/version.info")


def make(
    device: torch.device,
    outcomes: list[Outcome],
    timings: list[Timing],
    timing_error: str | None,
    seconds: float,
    quick: bool,
) -> dict[str, Any]:
    """Collect everything, as JSON-ready values."""
    counts = Counter(outcome.outcome for outcome in outcomes)
    facts = doctor.examine(self_check=False)
    return {
        "format": FORMAT,
        "ok": counts[PASSED] > 0 and not counts[FAILED] and not counts[NOT_RUN] and timing_error is None,
        "simulated": doctor.simulated_cann() if device.type != "cpu" else None,
        "device": str(device),
        "product": _product(device),
        "quick": quick,
        "seconds": round(seconds, 1),
        "counts": {name: counts[name] for name in (PASSED, FAILED, REFUSED, NOT_RUN)},
        "versions": facts["versions"] | {"driver": _driver()},
        "torch_npu": facts["torch_npu"],
        "built_with": facts["built_with"],
        "platform": {name: facts["platform"].get(name) for name in ("system", "machine", "libc")},
        "environment": facts["environment"],
        "extensions": facts["extensions"],
        "capabilities": capabilities(device),
        "cases": [dataclasses.asdict(outcome) for outcome in outcomes],
        "timing_error": timing_error,
        "timings": [dataclasses.asdict(timing) | {"gb_per_second": timing.gb_per_second} for timing in timings],
    }


def as_text(report: dict[str, Any]) -> str:
    """Return the report for a reader, what is wrong first."""
    lines = []
    if report["simulated"]:
        lines += [
            f"SIMULATED: {report['device']} is the simulated CANN {report['simulated']} of this project's tests.",
            "It shows that the calls are right; it says nothing about hardware, and its times mean nothing.",
            "",
        ]
    counts = ", ".join(f"{count} {name}" for name, count in report["counts"].items())
    verdict = "PASSED" if report["ok"] else "FAILED"
    if not report["counts"][PASSED]:
        verdict += ", nothing could be run,"
    lines += [
        f"pacache_torch verify: {verdict} on {report['device']} ({report['product']})",
        f"{counts}; {report['seconds']} s{', --quick' if report['quick'] else ''}",
        "",
    ]
    for outcome, title in ((FAILED, "failed"), (NOT_RUN, "not run"), (REFUSED, "refused by this device or CANN")):
        cases = [case for case in report["cases"] if case["outcome"] == outcome]
        if cases:
            lines.append(f"{title}")
            lines += [line for case in cases for line in _case_lines(case)]
            lines.append("")
    lines.append("times")
    if report["timing_error"]:
        lines.append(f"  not taken: {report['timing_error']}")
    lines += [_timing_line(timing) for timing in report["timings"]]
    for section in ("versions", "torch_npu", "built_with", "platform", "environment"):
        lines += ["", section]
        lines += [f"  {name}: {doctor.readable(value)}" for name, value in report[section].items()]
    lines += ["", "extensions"]
    for status in report["extensions"]:
        lines.append(f"  {status['name']}: {'loaded' if status['loaded'] else status['cause']}")
    lines += ["", "passed"]
    lines += [line for case in report["cases"] if case["outcome"] == PASSED for line in _case_lines(case)]
    return "\n".join(lines)


def _case_lines(case: dict[str, Any]) -> list[str]:
    lines = [f"  {case['group']}: {case['name']}{': ' + case['message'] if case['message'] else ''}"]
    if case["outcome"] == FAILED:
        lines.append(f"    {case['call']}")
    return lines


def _timing_line(timing: dict[str, Any]) -> str:
    spread = f"{timing['smallest_us']:.1f} to {timing['largest_us']:.1f}"
    return f"  {timing['name']}: {timing['median_us']:.1f} us ({spread}), {timing['gb_per_second']:.2f} GB/s"


def _product(device: torch.device) -> str:
    if device.type == "cpu":
        return "the CPU kernels"
    found = capabilities(device)
    return f"{found['product']}, {found['soc']}, CANN {found['cann']}"


def _driver() -> str:
    try:
        lines = _DRIVER.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition("=")[2] for line in lines if line.lower().startswith("version=")), "unknown")
