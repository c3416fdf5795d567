"""torch_npu's backend of torch.compile that captures graphs, npugraph_ex, on a simulated NPU."""

from __future__ import annotations

import gc
from typing import Any

import torch
from cann_sim import control
from support import LOAD, NPU, PHASE_TWO, SCATTER, calls, launched, noise
from test_device_compile import call_of

import pacache_torch
from pacache_torch import reference


def test_npugraph_ex() -> None:
    """It captures a store and a load once, and never copies a cache."""
    stored, loaded = call_of(SCATTER), call_of(LOAD)
    t: dict[str, Any] = {name: x for name, x in (loaded.clone().tensors() | stored.clone().tensors()).items()}
    rows = [loaded.clone().tensors()[name] for name in ("key", "value")]
    names = ("key_cache", "value_cache", "slot_mapping", "block_tables", "context_lens")
    held = [x.to(NPU) for x in (*(t[name] for name in names), *rows)]

    def layer(key: torch.Tensor, value: torch.Tensor, *rest: torch.Tensor) -> None:
        pacache_torch.scatter_pa_kv_cache(key, value, *rest[:3])
        pacache_torch.paged_cache_load(*rest[:2], *rest[3:])

    pacache_torch.warmup(NPU)
    torch._dynamo.reset()
    fast = torch.compile(layer, backend="npugraph_ex", fullgraph=True)
    copied: set[tuple[int, ...]] = set()
    for seed in range(3):
        key, value = noise(*t["key"].shape, seed=seed), noise(*t["value"].shape, seed=seed + 10)
        mine = key.to(NPU), value.to(NPU)
        control.clear_trace()
        with calls() as made, torch.no_grad():
            fast(*mine, *held)
        assert made["aclmdlRIExecuteAsync"] == 1
        assert launched(made) == ({} if seed else {PHASE_TWO[SCATTER]: 1, PHASE_TWO[LOAD]: 1}), "captured once"
        for entry in control.trace("aclnnInplaceCopyGetWorkspaceSize") + control.trace("pta_hit"):
            copied.add(tuple(entry["self"]["dims"]) if entry.get("self") else ())
        reference.scatter_pa_kv_cache(key, value, *(t[name] for name in names[:3]))
        reference.paged_cache_load(*(t[name] for name in (*names[:2], *names[3:])), *rows)
        for found, expected in zip(held, (*(t[name] for name in names), *rows), strict=True):
            assert torch.equal(found.cpu().view(torch.int16), expected.view(torch.int16))
    assert tuple(t["key"].shape) in copied, "inputs go to where the graph reads them"
    assert tuple(t["key_cache"].shape) not in copied
    torch._dynamo.reset()
    del fast
    gc.collect()
