"""The paged KV cache of the demo: the only file that calls the two operators."""

from __future__ import annotations

import torch
from torch import Tensor

from pacache_torch import layouts, ops
from pacache_torch.demo.op_clock import OpClock
from pacache_torch.demo.scheduler import Step

_ALLOCATION_LAYOUT: dict[str, layouts.Layout] = {"Norm": "ND", "PA_NZ": "NZ"}


class PagedCache:
    """Key and value caches of every layer, cut into blocks.

    Shapes:
        ``Norm``: ``[num_blocks, block_size, num_kv_heads, head_size]``.
        ``PA_NZ``: ``[num_blocks, num_kv_heads * head_size / L, block_size, L]``, ``L`` being 32
        bytes' worth of elements.

    Key and value are separate tensors, and each layer has its own pair. What is read goes into
    two buffers that are made once and shared by all layers and steps: a fresh output per call
    costs more in page faults than the copy itself.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        max_context_tokens: int,
        cache_mode: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the caches and room to read ``max_context_tokens`` tokens in one step."""
        self.block_size = block_size
        self.cache_mode = cache_mode
        self.device = device
        self.clock = OpClock(device)
        self.caches = [
            layouts.allocate_kv_cache(
                num_blocks,
                block_size,
                num_kv_heads,
                head_size,
                layout=_ALLOCATION_LAYOUT[cache_mode],
                dtype=dtype,
                device=device,
            )
            for _ in range(num_layers)
        ]
        rows = (max_context_tokens, num_kv_heads, head_size)
        self._key_rows = torch.empty(rows, dtype=dtype, device=device)
        self._value_rows = torch.empty(rows, dtype=dtype, device=device)
        # Key and value, each read once and written once.
        self._bytes_per_token = 4 * num_kv_heads * head_size * dtype.itemsize

    def begin_step(self, step: Step) -> None:
        """Compute slots, block tables and lengths once; every layer uses the same ones."""
        chunks = step.chunks
        tables = layouts.pad_block_tables([chunk.sequence.block_table.blocks for chunk in chunks])
        table_rows = [row for row, chunk in enumerate(chunks) for _ in range(chunk.count)]
        slots = layouts.slot_mapping(tables, torch.tensor(table_rows), torch.tensor(step.positions), self.block_size)
        # int32 is what the NPU kernels read; the slots of a cache this size fit.
        self._slots = slots.to(torch.int32).to(self.device)

        with_context = [row for row, chunk in enumerate(chunks) if chunk.has_context]
        self._lengths = [chunks[row].length for row in with_context]
        self._context_lens = torch.tensor(self._lengths, dtype=torch.int32).to(self.device)
        self._block_tables = tables[with_context].to(self.device)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Scatter the rows of the step to their slots."""
        key_cache, value_cache = self.caches[layer]
        with self.clock.measure("scatter_pa_kv_cache", key.size(0) * self._bytes_per_token):
            ops.scatter_pa_kv_cache(key, value, key_cache, value_cache, self._slots, cache_mode=self.cache_mode)

    def read(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Load, in one call, all tokens so far of every sequence that has context."""
        if not self._lengths:
            return []
        num_tokens = sum(self._lengths)
        key_cache, value_cache = self.caches[layer]
        with self.clock.measure("paged_cache_load", num_tokens * self._bytes_per_token):
            keys, values = ops.paged_cache_load(
                key_cache,
                value_cache,
                self._block_tables,
                self._context_lens,
                self._key_rows[:num_tokens],
                self._value_rows[:num_tokens],
                cache_mode=self.cache_mode,
            )
        per_sequence = (torch.split(rows, self._lengths) for rows in (keys, values))
        return list(zip(*per_sequence, strict=True))
