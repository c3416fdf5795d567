"""vLLM's own functions have the signatures that ours have, and those that run on the CPU give what ours give."""

from __future__ import annotations

import inspect

import pytest
import torch
from vllm import _custom_ops

from pacache_torch.integrations import vllm as ours

BLOCKS, BLOCK_SIZE, LATENT, ROTATED = 5, 16, 512, 64


def noise(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).bfloat16()


@pytest.mark.parametrize(
    "name", ("reshape_and_cache_flash", "reshape_and_cache", "concat_and_cache_mla", "cp_gather_cache")
)
def test_signatures(name: str) -> None:
    mine, theirs = (inspect.signature(getattr(module, name)).parameters for module in (ours, _custom_ops))
    assert [(p.name, p.kind, p.default) for p in mine.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_concat_and_cache_mla() -> None:
    latent, rotated = noise(9, LATENT + 8)[:, 8:], noise(9, ROTATED)
    slots = torch.tensor([17, -1, 3, 79, 0, 64, 33, -1, 20])
    mine = noise(BLOCKS, BLOCK_SIZE, LATENT + ROTATED)
    theirs = mine.clone()
    ours.concat_and_cache_mla(latent, rotated, mine, slots, "auto", torch.ones(1))
    torch.ops._C.concat_and_cache_mla_cpu(latent, rotated, theirs, slots)
    assert torch.equal(mine, theirs)
    assert not torch.equal(mine, noise(BLOCKS, BLOCK_SIZE, LATENT + ROTATED))


@pytest.mark.parametrize("starts", ([0, 0, 0], [16, 0, 32], [5, 17, 1]))
def test_gather(starts: list[int]) -> None:
    """On the CPU vLLM gathers the context of MLA by another name, from any token on."""
    cache = noise(BLOCKS, BLOCK_SIZE, LATENT + ROTATED)
    table = torch.tensor([[4, 0, 3], [1, 2, 0], [2, 3, 1]], dtype=torch.int32)
    boundaries = torch.tensor([0, 20, 20, 29], dtype=torch.int32)
    begin = torch.tensor(starts, dtype=torch.int32)
    mine = noise(31, LATENT + ROTATED)
    theirs = mine.clone()
    ours.cp_gather_cache(cache, mine, table, boundaries, 3, begin)
    _custom_ops.gather_mla_context_cache_cpu(
        src_cache=cache, dst=theirs, block_table=table, starts=begin, cu_seq_lens=boundaries
    )
    assert torch.equal(mine, theirs)
