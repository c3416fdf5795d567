"""``python -m pacache_torch verify``: options, progress, the exit code."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from pacache_torch import LibraryNotLoadedError, capabilities
from pacache_torch.demo.device import DeviceUnavailable, choose_device
from pacache_torch.verify import report as reporting
from pacache_torch.verify.run import NOT_RUN, run_cases
from pacache_torch.verify.sweep import Case, edge_cases, sweep_cases, vector_cases
from pacache_torch.verify.timing import QUICK, Timing, Workload, measure

# A device may round a mean otherwise than float32 does; the CPU kernels may not.
_MEAN_ULPS = {"cpu": 0, "npu": 1}
_QUICK_STEP = 3  # of the sweep, which repeats itself in every dtype


def main(argv: Sequence[str] | None = None) -> int:
    """Verify, print or write the report; 0 when everything that was run passed, 1 otherwise."""
    arguments = _parser().parse_args(argv)
    try:
        device, _ = choose_device(arguments.device)
        if device.type == "cpu":
            device = torch.device("cpu")
        cases = _cases(device, quick=arguments.quick)
    except (DeviceUnavailable, LibraryNotLoadedError) as error:
        print(f"verify: {error}\nsee: python -m pacache_torch doctor", file=sys.stderr)
        return 1
    started = time.perf_counter()
    with tqdm(total=len(cases), unit="case", disable=not sys.stderr.isatty()) as bar:
        outcomes = run_cases(cases, device, mean_ulps=_MEAN_ULPS[device.type], on_progress=lambda outcome: bar.update())
    timings: list[Timing] = []
    timing_error = None
    if any(outcome.outcome == NOT_RUN for outcome in outcomes):
        timing_error = "the device stopped"
    else:
        try:
            timings = measure(QUICK if arguments.quick else Workload(), device)
        except Exception as error:
            timing_error = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - started

    report = reporting.make(device, outcomes, timings, timing_error, seconds, arguments.quick)
    text = reporting.as_text(report)
    if arguments.output is None:
        print(text)
    else:
        arguments.output.write_text(text + "\n", encoding="utf-8")
        print("\n".join(text.split("\n")[: 8 if report["simulated"] else 5]))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if report["ok"] else 1


def _cases(device: torch.device, *, quick: bool) -> list[Case]:
    rows = capabilities(device)["rows"]
    sweep = list(sweep_cases(rows))
    if quick:
        sweep = sweep[::_QUICK_STEP]
    return [*vector_cases(), *sweep, *edge_cases(rows)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pacache_torch verify",
        description="Run both operators on a device against worked examples and the Python reference, time them, and "
        "report, for an issue of this project. Nothing but this process's own memory is touched.",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "npu"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report as JSON")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there and print its head only")
    parser.add_argument("--quick", action="store_true", help="a third of the sweep, and small sizes for the times")
    return parser
