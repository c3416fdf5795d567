"""What the engines are asked to generate."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from model_directory import VOCABULARY

NEW_TOKENS = 24
BLOCK_SIZE = 32


def _prompt(length: int, seed: int) -> list[int]:
    """Without the first two tokens of the vocabulary, which begin and end a text."""
    choose = random.Random(seed)
    return [choose.randrange(2, VOCABULARY) for _ in range(length)]


def _prompts(*lengths: int) -> list[list[int]]:
    return [_prompt(length, seed) for seed, length in enumerate(lengths)]


@dataclass(frozen=True)
class Scenario:
    """Rounds of prompts for one engine (a round begins when the one before it is done), and the engine's arguments."""

    rounds: list[list[list[int]]]
    arguments: dict[str, object] = field(default_factory=dict)


_SHARED = _prompt(200, 100)

SCENARIOS = {
    # Prompts around the block size: prefill, then steps that are all decode.
    "mixed": Scenario([_prompts(1, 5, 16, 33, 64, 100, 200, 31)]),
    # Prompts longer than a step takes: chunks beside the decode of requests that are further.
    "chunked": Scenario([_prompts(300, 7, 150, 90, 513)], {"max_num_batched_tokens": 64}),
    # Later rounds find the beginning of their prompts in the cache.
    "prefix": Scenario(
        [
            [[*_SHARED, *_prompt(11, 1)]],
            [[*_SHARED, *_prompt(11, 2)], [*_SHARED[:150], *_prompt(70, 3)], _prompt(40, 4)],
            [[*_SHARED, *_prompt(11, 1)], [*_SHARED, *_prompt(60, 5)]],
        ],
        {"enable_prefix_caching": True},
    ),
    # Fewer blocks than the requests need when they have grown.
    "preempt": Scenario([_prompts(40, 50, 60, 30, 45, 62)], {"num_gpu_blocks_override": 12, "max_model_len": 256}),
}
