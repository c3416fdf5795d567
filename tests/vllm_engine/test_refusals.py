"""What the backend does not do it refuses by name, before anything is generated; and how it cuts a step into reads."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from pacache_torch.integrations import vllm_plugin
from pacache_torch.integrations.vllm_backend import (
    ContiguousBackend,
    PacacheMetadataBuilder,
    PackedBackend,
    PackedImpl,
    groups,
)


def spec(dtype: torch.dtype = torch.float32, head_size_v: int = 64) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, head_size_v=head_size_v, dtype=dtype)


@pytest.mark.parametrize(
    "given",
    [
        {"alibi_slopes": [0.5] * 4},
        {"sliding_window": 128},
        {"logits_soft_cap": 30.0},
        {"kv_sharing_target_layer_name": "model.layers.0.self_attn.attn"},
        {"sinks": 1.0},
    ],
    ids=lambda given: next(iter(given)),
)
def test_attention_of_another_kind(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(NotImplementedError, match=f"^pacache vLLM backend: {name} must be None, got "):
        PackedImpl(4, 64, 0.125, 2, **given)


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only", "encoder_decoder"])
def test_an_encoder(attn_type: str) -> None:
    with pytest.raises(NotImplementedError, match=f"attn_type must be 'decoder', got '{attn_type}'"):
        PackedImpl(4, 64, 0.125, 2, attn_type=attn_type)


def test_a_quantised_cache() -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32, max_model_len=64))
    with pytest.raises(NotImplementedError, match=r"the model's dtype torch\.float32, got torch\.uint8"):
        PacacheMetadataBuilder(spec(torch.uint8), [], config, torch.device("cpu"))


def test_contiguous_caches_of_two_head_sizes() -> None:
    with pytest.raises(NotImplementedError, match="head_size of key for contiguous caches, got 32 and 64"):
        ContiguousBackend.customize_spec(spec(head_size_v=32))
    assert PackedBackend.customize_spec(spec(head_size_v=32)) == spec(head_size_v=32)


def test_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(NotImplementedError, match="must run on vLLM's CPU platform, got platform 'cpu'"):
        vllm_plugin.register()


@pytest.mark.parametrize("limit", [1, 5, 8, 9, 100])
@pytest.mark.parametrize("lengths", [[], [9], [3, 4, 5, 9, 1], [1, 1, 1, 1, 1, 1, 1]])
def test_a_step_is_cut_into_reads(lengths: list[int], limit: int) -> None:
    runs = groups(lengths, limit)
    assert [request for first, last in runs for request in range(first, last)] == list(range(len(lengths)))
    for first, last in runs:
        assert sum(lengths[first:last]) <= limit or last == first + 1
    for (_, last), (first, _) in itertools.pairwise(runs):
        assert first == last
    for first, last in runs[:-1]:
        assert sum(lengths[first : last + 1]) > limit, "a run ends only where the next request is too much"
