"""Long lives of a paged cache on the simulated device, in every layout that it takes: see cache_machine.py."""

from __future__ import annotations

import os

import pytest
from cache_layouts import LAYOUTS, ONLY_BLOCKS_PADDED
from cache_machine import CacheMachine, live
from cann_sim import control
from soak import short_or_long
from support import ACLNN_LOAD, CANN, COPIES, LAZY, NPU, SOC, calls, cann_at_least

TAKEN = [
    name
    for name, layout in LAYOUTS.items()
    if (layout.dense or (name in ONLY_BLOCKS_PADDED and cann_at_least(9, 1)))
    and (layout.scatter_mode != "NHSD" or cann_at_least(9, 1))
]
PLACE = f"simulated {SOC}, CANN {CANN}, {'lazy' if LAZY else 'eager'}{', no ATB' if ACLNN_LOAD else ''}"
LIVES = short_or_long(6, 60)


@pytest.mark.parametrize("name", TAKEN)
def test_nothing_is_lost(name: str) -> None:
    """Whatever is done to a cache, every sequence reads back, and nothing else is written."""
    layout = LAYOUTS[name]
    nz, nhsd = layout.cache_mode == "PA_NZ", layout.scatter_mode == "NHSD"
    loads = layout.dense and not nhsd
    # Sizes that the device operators take: whole 32-byte units, and blocks of whole 16 tokens in NZ.
    machine = type(
        "Machine",
        (CacheMachine,),
        {
            "layout_name": name,
            "device": str(NPU),
            "dtypes": COPIES,
            "sizes": (32, 64),
            "block_sizes": (16, 32) if nz else (1, 3, 7) if loads else (3, 7),
            "heads": (1, 3) if loads else (2, 3),  # with one of either NHSD is dense read as Norm, too
            "loads": loads,
            "checks_values": os.environ.get("PACACHE_CHECK") == "1",
            "skips_negative": not nhsd,
        },
    )
    control.set_trace(False)
    with calls() as made:
        done = live(machine, place=PLACE, lives=LIVES)
    control.set_trace(True)
    assert done["step"] > 50 and min(done["prefill"], done["decode"]) > 0
    assert made["aclnnScatterPaKvCache"] >= done["prefill"]
    if loads:
        assert made["aclnnGatherPaKvCache" if ACLNN_LOAD else "AtbPagedCacheLoad"] >= done["load"]
    else:
        assert done["refused load"] > 0
