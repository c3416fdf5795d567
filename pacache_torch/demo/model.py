"""A small Llama-like decoder in plain torch: GQA, RoPE, RMSNorm, SwiGLU, byte-level tokens.

The weights are random but not small: the best logit stands clear of the second, so a greedy token
means something and a wrong row in the cache changes the text. On the device it uses only matmul,
add, mul, softmax, cat, index_select, embedding, rsqrt, mean, silu and views; tables and weights
are made on the CPU and moved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pacache_torch.demo.scheduler import Step


class KVCache(Protocol):
    """What the decoder asks of a cache; paged or dense is not its concern."""

    def begin_step(self, step: Step) -> None:
        """Prepare what is the same for every layer of ``step``."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the rows of the step, ``[num_tokens, num_kv_heads, head_size]``, any stride."""

    def read(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Return all keys and values so far of each chunk that has context.

        Each is ``[chunk.length, num_kv_heads, head_size]``, in the order of the chunks, and valid
        until the next call.
        """


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the decoder."""

    num_layers: int = 4
    hidden_size: int = 512
    num_heads: int = 8
    num_kv_heads: int = 4
    head_size: int = 64
    mlp_size: int = 1024
    vocab_size: int = 256
    max_positions: int = 1024
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor  # [hidden_size]
    qkv: Tensor  # [hidden_size, (num_heads + 2 * num_kv_heads) * head_size]
    attention_out: Tensor  # [num_heads * head_size, hidden_size]
    mlp_norm: Tensor  # [hidden_size]
    gate: Tensor  # [hidden_size, mlp_size]
    up: Tensor  # [hidden_size, mlp_size]
    down: Tensor  # [mlp_size, hidden_size]


class Decoder:
    """The decoder: embeddings, ``num_layers`` blocks, logits of the rows that are sampled."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        """Draw the weights on the CPU in float32, the same for every dtype and device."""
        self.config = config
        self.dtype = dtype
        self.device = device
        generator = torch.Generator().manual_seed(seed)

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(dtype).to(device)

        def weight(fan_in: int, fan_out: int, gain: float) -> Tensor:
            values = torch.randn(fan_in, fan_out, generator=generator)
            return move(values * (gain / math.sqrt(fan_in)))

        def ones() -> Tensor:
            return move(torch.ones(config.hidden_size))

        hidden, heads = config.hidden_size, config.num_heads * config.head_size
        qkv_size = heads + 2 * config.num_kv_heads * config.head_size
        self._embedding = move(torch.randn(config.vocab_size, hidden, generator=generator))
        self._layers = [
            _Layer(
                attention_norm=ones(),
                qkv=weight(hidden, qkv_size, gain=1.6),
                attention_out=weight(heads, hidden, gain=1.6),
                mlp_norm=ones(),
                gate=weight(hidden, config.mlp_size, gain=1.0),
                up=weight(hidden, config.mlp_size, gain=1.0),
                down=weight(config.mlp_size, hidden, gain=1.0),
            )
            for _ in range(config.num_layers)
        ]
        self._final_norm = ones()
        self._logits = weight(hidden, config.vocab_size, gain=5.0)
        # Untrained weights would mostly choose bytes that no terminal can show.
        printable = torch.tensor([32 <= token < 127 for token in range(config.vocab_size)])
        self._logit_bias = move(torch.where(printable, 0.0, -10000.0))

        cos, signed_sin = _rope_tables(config)
        self._cos, self._signed_sin = move(cos), move(signed_sin)
        positions = torch.arange(config.max_positions)
        future = positions[None, :] > positions[:, None]
        self._causal_mask = move(torch.zeros(future.shape).masked_fill(future, -math.inf))

    def forward(self, step: Step, cache: KVCache) -> Tensor:
        """Run one step; return the logits of its sampled rows, ``[num_sampled, vocab_size]``."""
        positions = self._indices(step.positions)
        cos = self._cos.index_select(0, positions)[:, None, :]
        signed_sin = self._signed_sin.index_select(0, positions)[:, None, :]
        cache.begin_step(step)

        x = F.embedding(self._indices(step.token_ids), self._embedding)
        for index, layer in enumerate(self._layers):
            normed = self._norm(x, layer.attention_norm)
            x = x + self._attention(index, layer, normed, cos, signed_sin, step, cache)
            x = x + self._mlp(layer, self._norm(x, layer.mlp_norm))

        sampled = x.index_select(0, self._indices(step.sampled_rows))
        return self._norm(sampled, self._final_norm) @ self._logits + self._logit_bias

    def _attention(
        self,
        index: int,
        layer: _Layer,
        x: Tensor,
        cos: Tensor,
        signed_sin: Tensor,
        step: Step,
        cache: KVCache,
    ) -> Tensor:
        config = self.config
        heads, kv_heads, head_size = config.num_heads, config.num_kv_heads, config.head_size
        # One matmul, three views of it: the value that reaches the cache is strided.
        qkv = (x @ layer.qkv).view(-1, heads + 2 * kv_heads, head_size)
        query = _rotate(qkv[:, :heads], cos, signed_sin)
        key = _rotate(qkv[:, heads : heads + kv_heads], cos, signed_sin)
        value = qkv[:, heads + kv_heads :]

        cache.write(index, key, value)
        context = iter(cache.read(index))
        outputs = []
        for chunk in step.chunks:
            rows = slice(chunk.row, chunk.row + chunk.count)
            keys, values = next(context) if chunk.has_context else (key[rows], value[rows])
            outputs.append(self._attend(query[rows], keys, values, chunk.start))
        return torch.cat(outputs) @ layer.attention_out

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        return (F.silu(x @ layer.gate) * (x @ layer.up)) @ layer.down

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """Attend ``[count, num_heads, head_size]`` to ``[length, num_kv_heads, head_size]``."""
        config = self.config
        count, length = query.size(0), keys.size(0)
        kv_heads, head_size = config.num_kv_heads, config.head_size
        group = config.num_heads // kv_heads
        # The query heads that share a KV head are stacked along the rows of one matmul.
        stacked = query.reshape(count, kv_heads, group, head_size).permute(1, 2, 0, 3)
        stacked = stacked.reshape(kv_heads, group * count, head_size) * head_size**-0.5
        scores = (stacked @ keys.permute(1, 2, 0)).view(kv_heads, group, count, length)
        if count > 1:
            scores = scores + self._causal_mask[start : start + count, :length]
        weights = scores.softmax(-1).view(kv_heads, group * count, length)
        mixed: Tensor = weights @ values.permute(1, 0, 2)
        mixed = mixed.view(kv_heads, group, count, head_size)
        return mixed.permute(2, 0, 1, 3).reshape(count, config.num_heads * head_size)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        mean_square = (x * x).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.config.norm_epsilon) * weight

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)


def _rope_tables(config: DecoderConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sign-carrying sin, ``[max_positions, head_size]``, for `_rotate`."""
    half = config.head_size // 2
    frequencies = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(config.max_positions, dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)
    return x * cos + swapped * signed_sin
