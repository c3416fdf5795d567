"""Long lives of a paged cache on the CPU, in every layout: see cache_machine.py."""

from __future__ import annotations

import pytest
from cache_layouts import LAYOUTS
from cache_machine import CacheMachine, live


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_lost(layout: str) -> None:
    """Whatever is done to a cache, every sequence reads back, and nothing else is written."""
    done = live(type("Machine", (CacheMachine,), {"layout_name": layout}), place="CPU")
    assert done["step"] > 100 and min(done["prefill"], done["decode"], done["fork"], done["load"]) > 0
