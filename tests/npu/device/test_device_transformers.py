"""`PagedCache` with tensors of a simulated NPU: what is read is what a dense cache on the CPU holds, bit for bit."""

from __future__ import annotations

import pytest
import torch
from support import LOAD, NPU, PHASE_TWO, SCATTER, calls, launched, numbers
from transformers import DynamicCache, LlamaConfig

from pacache_torch.integrations.transformers import PagedCache

LAYERS, BATCH, HEADS, SIZE = 2, 3, 2, 32
CONFIG = LlamaConfig(num_hidden_layers=LAYERS, hidden_size=64, num_attention_heads=2, num_key_value_heads=HEADS)


@pytest.mark.parametrize("cache_mode", ("Norm", "PA_NZ"))
def test_a_cache_lives_on_the_device(cache_mode: str) -> None:
    """Grown, reordered, cropped and forked; each step is one store per layer, and one load where there is context."""
    paged = PagedCache(CONFIG, num_blocks=40, block_size=16, cache_mode=cache_mode)
    dense = DynamicCache()
    seed = 0

    def step(count: int, loads: int, copies: int) -> None:
        nonlocal seed
        with calls() as made:
            for layer in range(LAYERS):
                seed += 1
                key, value = (numbers(BATCH, count, HEADS, SIZE, seed=seed + 100 * part) for part in range(2))
                wanted = dense.update(key.transpose(1, 2), value.transpose(1, 2), layer)
                got = paged.update(key.to(NPU).transpose(1, 2), value.to(NPU).transpose(1, 2), layer)
                for ours, theirs in zip(got, wanted, strict=True):
                    assert ours.device.type == "npu" and torch.equal(ours.cpu(), theirs)
        counts = {PHASE_TWO[SCATTER]: LAYERS * (1 + copies), PHASE_TWO[LOAD]: LAYERS * (loads + copies)}
        assert launched(made) == {name: count for name, count in counts.items() if count}

    with torch.no_grad():
        step(21, loads=0, copies=0)
        step(1, loads=1, copies=0)
        beams = torch.tensor([1, 1, 0])
        for cache in (paged, dense):
            cache.reorder_cache(beams)
        step(1, loads=1, copies=1)  # two sequences go on in one block: one of them takes a copy
        for cache in (paged, dense):
            cache.crop(-5)
        step(2, loads=1, copies=0)
        fork = paged.fork()
        paged.reset()
        paged = fork
        step(30, loads=1, copies=0)
