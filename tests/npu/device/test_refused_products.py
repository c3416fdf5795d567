"""On a product or a CANN version that has none of it, every call is refused with its name before CANN is called."""

from __future__ import annotations

import pytest
import torch
from support import CANN, CAPABILITIES, NPU, PRODUCT, SOC, calls, operator
from test_device_capabilities import SCENARIOS, make

OLD_ABI = CANN == "8.3.RC1.alpha003"

pytestmark = pytest.mark.skipif(PRODUCT != "other" and not OLD_ABI, reason="this product and version can")


def test_nothing_is_listed() -> None:
    assert CAPABILITIES["rows"] == []
    assert (CAPABILITIES["product"], CAPABILITIES["soc"], CAPABILITIES["cann"]) == (PRODUCT, SOC, CANN)


@pytest.mark.parametrize(("op", "scenario", "mode"), SCENARIOS, ids=str)
def test_everything_is_refused(op: str, scenario: int | None, mode: str) -> None:
    call = make(op, scenario, mode, torch.float16)
    actual = call.clone(NPU)
    with calls() as made, pytest.raises(NotImplementedError) as caught:
        actual.run(operator(op))
    assert made == {}
    text = str(caught.value)
    assert f"{PRODUCT} ({SOC}) with CANN {CANN}" in text
    if OLD_ABI:
        assert "needs CANN 8.3.RC1 or later (older releases have the same function names with other arguments)" in text
    else:
        assert (f"scenario {scenario} " if scenario else f"cache_mode '{mode}'") in text
        assert "is not available on" in text
    assert actual.clone("cpu").differences(call) == []
