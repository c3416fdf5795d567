"""The serving loop: schedule, run the decoder, sample, until every request is complete."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pacache_torch.demo.model import Decoder, KVCache
from pacache_torch.demo.scheduler import Scheduler


@dataclass
class ServeResult:
    """What came out of `serve`."""

    generated: dict[int, list[int]] = field(default_factory=dict)  # request id -> new tokens
    steps: int = 0
    mixed_steps: int = 0  # prefill and decode in one step
    continued_chunks: int = 0  # chunks of a prompt that read an earlier chunk back
    tokens: int = 0  # rows that went through the decoder
    seconds: float = 0.0
    top2_gaps: list[float] = field(default_factory=list)


@torch.inference_mode()
def serve(
    decoder: Decoder,
    cache: KVCache,
    scheduler: Scheduler,
    on_progress: Callable[[int], object] = lambda new_tokens: None,
) -> ServeResult:
    """Generate greedily until ``scheduler`` has nothing left to run."""
    result = ServeResult()
    started = time.perf_counter()
    while (step := scheduler.next_step()) is not None:
        logits = decoder.forward(step, cache)
        sampled: list[int] = logits.argmax(-1).tolist()
        for sequence in scheduler.finish_step(step, sampled):
            prompt_length = len(sequence.request.prompt)
            result.generated[sequence.request.id] = sequence.tokens[prompt_length:]

        result.steps += 1
        result.mixed_steps += len({chunk.is_prefill for chunk in step.chunks}) == 2
        result.continued_chunks += sum(c.is_prefill and c.has_context for c in step.chunks)
        result.tokens += step.num_tokens
        if sampled:
            best = logits.float().cpu().topk(2).values
            result.top2_gaps += (best[:, 0] - best[:, 1]).tolist()
        on_progress(len(sampled))
    result.seconds = time.perf_counter() - started
    return result
