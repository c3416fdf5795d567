"""What holds for the whole suite.

``PACACHE_REQUIRE_ALL=1`` (set in CI) turns a skipped test into a failed one: a part of ours that is missing must not
look like one that works. Only what is not ours may be missing: a test that needs it says so by a reason that begins
with ``not ours:``.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

# Before any file imports torch, which reads it once: Inductor's disk cache replays code for an old schema, or for
# caches that lay otherwise.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

# The gate gives the same verdict on the same tree: its examples are chosen by the test, not by the day. By hand they
# are new each time.
settings.register_profile("gate", derandomize=True)
if os.environ.get("PACACHE_REQUIRE_ALL") == "1":
    settings.load_profile("gate")

NOT_OURS = "not ours:"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a report is one of a skip, as it was given."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr)


def _fail_if_ours_was_skipped(report: Any) -> None:
    skipped = report.outcome == "skipped" and not hasattr(report, "wasxfail")
    if skipped and os.environ.get("PACACHE_REQUIRE_ALL") == "1" and not _reason(report).startswith(NOT_OURS):
        report.outcome = "failed"
        report.longrepr = f"PACACHE_REQUIRE_ALL=1 and this was skipped: {_reason(report)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Look at every test that was skipped."""
    report = yield
    _fail_if_ours_was_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Look at every file that was skipped whole."""
    report = yield
    _fail_if_ours_was_skipped(report)
    return report
