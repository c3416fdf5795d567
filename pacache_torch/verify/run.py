"""What becomes of each case on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from pacache_torch.verify.calls import differences
from pacache_torch.verify.sweep import Case

PASSED, FAILED, REFUSED, NOT_RUN = "passed", "failed", "refused", "not run"
# torch_npu runs nothing more in a process whose task queue has failed, and says so once.
_DEAD_QUEUE = ("The Inner error is reported", "the task queue of")


@dataclass(frozen=True)
class Outcome:
    """One case: passed, failed, refused (NotImplementedError of a device that does not claim it) or not run."""

    group: str
    name: str
    outcome: str
    message: str
    call: str


def run_cases(
    cases: Iterable[Case],
    device: torch.device,
    *,
    mean_ulps: int,
    on_progress: Callable[[Outcome], object] = lambda outcome: None,
) -> list[Outcome]:
    """Run each case on the device and compare its memory; a broken device does not end the report."""
    outcomes = []
    cause_of_end = ""
    for case in cases:
        if cause_of_end:
            outcome, message = NOT_RUN, f"the device runs nothing since {cause_of_end}"
        else:
            outcome, message = run_case(case, device, mean_ulps=mean_ulps)
            if outcome == FAILED and any(text in message for text in _DEAD_QUEUE):
                cause_of_end = f"{case.group}, {case.name} (ASCEND_LAUNCH_BLOCKING=1 goes on)"
        # What was passed is only of interest where something is wrong with it.
        call = "" if outcome == PASSED else case.call.describe()
        outcomes.append(Outcome(case.group, case.name, outcome, message, call))
        on_progress(outcomes[-1])
    return outcomes


def run_case(case: Case, device: torch.device, *, mean_ulps: int) -> tuple[str, str]:
    """Run one case; return its outcome and what there is to say."""
    expected = case.expected
    if expected is None:
        expected = case.call.clone("cpu")
        expected.run_reference()
    try:
        actual = case.call.clone(device)
        synchronize(device)
        refusal = ""
        try:
            actual.run_operator()
            synchronize(device)
        except NotImplementedError as error:
            refusal = str(error)
            expected = case.call.clone("cpu")  # a refused call has written nothing
        lines, near_means = differences(actual, expected, mean_ulps=mean_ulps)
    except Exception as error:
        return FAILED, f"{type(error).__name__}: {error}{_queued_error(case, device, str(error))}"
    if lines:
        return FAILED, "; ".join(([f"refused, but written: {refusal}"] if refusal else []) + lines)
    if refusal:
        return (FAILED, f"claimed, but refused: {refusal}") if case.must_run else (REFUSED, refusal)
    return PASSED, f"{near_means} elements of means differ by one unit in the last place" if near_means else ""


def _queued_error(case: Case, device: torch.device, message: str) -> str:
    """Return what torch_npu's text leaves out; an operator of ours that it does not run any more tells it."""
    if not message.startswith(_DEAD_QUEUE[0]):
        return ""
    try:
        case.call.clone(device).run_operator()
    except Exception as error:
        return f"\n{error}"
    return ""


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was queued."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
