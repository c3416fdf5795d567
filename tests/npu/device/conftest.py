"""What holds for every test on the simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import support
import torch
from cann_sim import control

# Handles that outlive a call by design: torch_npu's streams and events, the ATB context of a thread and its operations.
# Executors are alive while CANN's cache holds them ("adopted").
KEPT = {"stream", "event", "notify", "atb::Context", "atb::Operation"}


def pytest_report_header() -> str:
    """Say what is simulated."""
    return f"simulated CANN {support.CANN} on {support.SOC}, lazy {support.LAZY}"


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No violation during a test, and no handle of CANN alive after it that is not kept on purpose."""
    torch.npu.synchronize()
    control.clear()
    yield
    torch.npu.synchronize()
    assert control.violations() == []
    alive = [item for item in control.live_objects() if item["kind"] not in KEPT and not item["adopted"]]
    assert alive == []
    assert control.pending() == 0


@pytest.fixture()
def without_executor_cache() -> Iterator[None]:
    """Every call makes its phase one, so that the trace shows its arguments."""
    control.set_pta(False)
    yield
    control.set_pta(True)


def pytest_make_parametrize_id(config: pytest.Config, val: Any) -> str | None:
    """Dtypes by their name."""
    return support.short(val) if isinstance(val, torch.dtype) else None
