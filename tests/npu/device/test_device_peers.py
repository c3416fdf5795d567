"""torch_npu's own operators in the same process on a simulated NPU give what ours give, where they can."""

from __future__ import annotations

import pytest
import torch
import torch_npu
from strategies import Call
from support import ACLNN_LOAD, COPIES, LOAD, NPU, SCATTER, calls, noise, operator


def same(call: Call, function: object, peer: object, launches: tuple[str, str]) -> None:
    """Two clones, one to each; whole storages are equal, and each launched its device operator."""
    ours, theirs = call.clone(NPU), call.clone(NPU)
    with calls() as made:
        ours.run(function)
    assert made[launches[0]] == 1
    with calls() as made:
        peer(theirs)
    assert made[launches[1]] == 1
    assert ours.clone("cpu").differences(theirs.clone("cpu")) == []
    assert ours.clone("cpu").differences(call) != [], "nothing was written"


@pytest.mark.parametrize("dtype", COPIES)
@pytest.mark.parametrize("cache_mode", ("Norm", "PA_NZ"))
def test_npu_scatter_pa_kv_cache(cache_mode: str, dtype: torch.dtype) -> None:
    """torch_npu has the order key, value, key_cache, value_cache; its own default is PA_NZ."""
    unit = 32 // dtype.itemsize
    nz = cache_mode == "PA_NZ"
    shapes = [(5, 6, 7, unit), (5, 2, 7, unit)] if nz else [(5, 7, 2, 3 * unit), (5, 7, 2, unit)]
    call = Call(
        SCATTER,
        {
            "key": noise(4, 2, 3 * unit, dtype=dtype),
            "value": noise(4, 2, unit, dtype=dtype),
            "key_cache": noise(*shapes[0], dtype=dtype),
            "value_cache": noise(*shapes[1], dtype=dtype),
            "slot_mapping": torch.tensor([33, -1, 4, 19], dtype=torch.int32),
        },
        {"cache_mode": cache_mode},
        ("key_cache", "value_cache"),
    )
    name = "aclnnScatterPaKvCache"
    same(call, operator(SCATTER), lambda c: c.run(torch_npu.npu_scatter_pa_kv_cache), (name, name))


def load(*, nz: bool = False, cumsum: bool = False, starts: bool = False, dtype: torch.dtype = torch.float16) -> Call:
    unit = 32 // dtype.itemsize
    caches = [(5, 6, 16, unit), (5, 2, 16, unit)] if nz else [(5, 3, 2, 3 * unit), (5, 3, 2, unit)]
    outputs = [(9, 6 * unit), (9, 2 * unit)] if nz else [(9, 2, 3 * unit), (9, 2, unit)]
    return Call(
        LOAD,
        {
            "key_cache": noise(*caches[0], dtype=dtype),
            "value_cache": noise(*caches[1], dtype=dtype),
            "block_tables": torch.tensor([[4, 0, 3], [1, 2, 0]], dtype=torch.int32),
            "context_lens": torch.tensor([1, 6, 8] if cumsum else [5, 2], dtype=torch.int32),
            "key": noise(*outputs[0], dtype=dtype, seed=3),
            "value": noise(*outputs[1], dtype=dtype, seed=4),
        },
        {
            "seq_starts": torch.tensor([3, 4], dtype=torch.int32) if starts else None,
            "cache_mode": "PA_NZ" if nz else "Norm",
            "is_seq_lens_cumsum": cumsum,
        },
        ("key", "value"),
    )


OURS = "aclnnGatherPaKvCache" if ACLNN_LOAD else "AtbPagedCacheLoad"


@pytest.mark.parametrize("dtype", COPIES)
@pytest.mark.parametrize("cumsum", (False, True))
@pytest.mark.parametrize("starts", (False, True))
def test_npu_gather_pa_kv_cache(starts: bool, cumsum: bool, dtype: torch.dtype) -> None:
    """With and without starts; NZ it knows only by a tensor format that ours does not use."""

    def peer(c: Call) -> None:
        torch_npu.npu_gather_pa_kv_cache(
            *c.positional.values(),
            seq_offset=c.keyword["seq_starts"],
            is_seq_lens_cumsum=c.keyword["is_seq_lens_cumsum"],
        )

    call = load(cumsum=cumsum, starts=starts, dtype=dtype)
    same(call, operator(LOAD), peer, (OURS, "aclnnGatherPaKvCache"))


@pytest.mark.parametrize("dtype", COPIES)
@pytest.mark.parametrize("cumsum", (False, True))
def test_atb_npu_paged_cache_load_out(cumsum: bool, dtype: torch.dtype) -> None:
    """It needs starts: without them ATB refuses it."""

    def peer(c: Call) -> None:
        t = c.positional
        torch.ops.atb.npu_paged_cache_load.out(
            *(t[name] for name in ("key_cache", "value_cache", "block_tables", "context_lens")),
            seq_starts=c.keyword["seq_starts"],
            cumsum=c.keyword["is_seq_lens_cumsum"],
            key=t["key"],
            value=t["value"],
        )

    call = load(cumsum=cumsum, starts=True, dtype=dtype)
    same(call, operator(LOAD), peer, (OURS, "AtbPagedCacheLoad"))


def test_atb_npu_paged_cache_load() -> None:
    """The functional form makes its outputs; the rows that were loaded are the same."""
    call = load(starts=True).clone(NPU)
    call.run(operator(LOAD))
    t = call.positional
    with calls() as made:
        key, value = torch_npu.atb.npu_paged_cache_load(
            *(t[name] for name in ("key_cache", "value_cache", "block_tables", "context_lens")),
            seq_starts=call.keyword["seq_starts"],
        )
    assert made["AtbPagedCacheLoad"] == 1
    assert key.shape == (7, 2, 48) and value.shape == (7, 2, 16)
    for mine, theirs in ((t["key"], key), (t["value"], value)):
        assert torch.equal(mine[:7].cpu().view(torch.int16), theirs.cpu().view(torch.int16))


def test_in_turns() -> None:
    """Ours and theirs on one stream, each reading what the other wrote, without a wait between them."""
    scatter = [noise(3, 2, 16, seed=seed).to(NPU) for seed in (1, 2)]
    caches = [torch.zeros(2, 4, 2, 16, dtype=torch.float16, device=NPU) for _ in "kv"]
    slots = torch.tensor([0, 1, 2], dtype=torch.int32).to(NPU)
    tables = torch.tensor([[0]], dtype=torch.int32).to(NPU)
    lens, starts = torch.tensor([3], dtype=torch.int32).to(NPU), torch.tensor([0], dtype=torch.int32).to(NPU)
    first, second = ([torch.zeros(3, 2, 16, dtype=torch.float16, device=NPU) for _ in "kv"] for _ in range(2))
    operator(SCATTER)(*scatter, *caches, slots)
    torch_npu.npu_gather_pa_kv_cache(*caches, tables, lens, *first, seq_offset=starts)
    torch_npu.npu_scatter_pa_kv_cache(first[1], first[0], *caches, slots, cache_mode="Norm")
    operator(LOAD)(*caches, tables, lens, *second)
    for loaded, source in zip((*first, *second), (*scatter, *reversed(scatter)), strict=True):
        assert torch.equal(loaded.cpu().view(torch.int16), source.cpu().view(torch.int16))
