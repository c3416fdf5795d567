"""A KV cache with no blocks: one row per position, one tensor per sequence and layer.

It is what the paged cache is compared with, and keeps everything until the end for that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pacache_torch.demo.scheduler import Request, Step


class DenseCache:
    """Keys and values of every request, ``[max_cached, num_kv_heads, head_size]`` per layer."""

    def __init__(
        self,
        requests: list[Request],
        *,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make room for every request to its last token."""

        def rows(request: Request) -> Tensor:
            shape = (request.max_cached, num_kv_heads, head_size)
            return torch.zeros(shape, dtype=dtype, device=device)

        self._rows = [{request.id: (rows(request), rows(request)) for request in requests} for _ in range(num_layers)]

    def begin_step(self, step: Step) -> None:
        """Remember the chunks; a row's place is its position."""
        self._chunks = step.chunks

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Copy each chunk to its positions."""
        for chunk in self._chunks:
            keys, values = self._rows[layer][chunk.sequence.request.id]
            keys[chunk.start : chunk.length].copy_(key[chunk.row : chunk.row + chunk.count])
            values[chunk.start : chunk.length].copy_(value[chunk.row : chunk.row + chunk.count])

    def read(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Return views of the rows so far of every sequence that has context."""
        return [
            self.rows(layer, chunk.sequence.request.id, chunk.length) for chunk in self._chunks if chunk.has_context
        ]

    def rows(self, layer: int, request_id: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the first ``length`` keys and values of one request."""
        keys, values = self._rows[layer][request_id]
        return keys[:length], values[:length]
