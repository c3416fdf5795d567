"""The proof: every row that is loaded and every token must equal those of the dense run."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from pacache_torch.demo.dense_cache import DenseCache
from pacache_torch.demo.model import KVCache
from pacache_torch.demo.scheduler import Step

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class CheckedCache:
    """A cache whose every read is compared, bit for bit, with a dense run that came before.

    Both runs follow the same schedule, so each matmul sees the same numbers in the same shape
    and the two must agree exactly, in any dtype. Tokens alone would not do: attention gives the
    same when the rows of two whole blocks change places. Differences are counted, not raised: the
    run goes on, as a server would, and the tokens show what became of it.
    """

    def __init__(self, cache: KVCache, reference: DenseCache) -> None:
        """Check what is read from ``cache`` against ``reference``."""
        self._cache = cache
        self._reference = reference
        self.rows_checked = 0
        self.rows_different = 0
        self.first_difference: str | None = None
        self.seconds = 0.0

    def begin_step(self, step: Step) -> None:
        """Pass on."""
        self._chunks = [chunk for chunk in step.chunks if chunk.has_context]
        self._cache.begin_step(step)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Pass on."""
        self._cache.write(layer, key, value)

    def read(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Read, then compare."""
        loaded = self._cache.read(layer)
        if loaded and loaded[0][0].device.type != "cpu":
            # What is still running belongs to the run, not to the time of this check.
            torch.get_device_module(loaded[0][0].device).synchronize()
        started = time.perf_counter()
        for chunk, got in zip(self._chunks, loaded, strict=True):
            request = chunk.sequence.request.id
            wanted = self._reference.rows(layer, request, chunk.length)
            for name, got_rows, wanted_rows in zip(("key", "value"), got, wanted, strict=True):
                self._compare(got_rows, wanted_rows, f"{name}, layer {layer}, request {request}")
        self.seconds += time.perf_counter() - started
        return loaded

    def _compare(self, got: Tensor, wanted: Tensor, where: str) -> None:
        self.rows_checked += wanted.size(0)
        got_bits, wanted_bits = _bits(got), _bits(wanted)
        if torch.equal(got_bits, wanted_bits):
            return
        different = (got_bits != wanted_bits).flatten(1).any(1).nonzero().flatten()
        self.rows_different += different.numel()
        if self.first_difference is None:
            self.first_difference = f"{where}, position {int(different[0])} of {wanted.size(0)}"


@dataclass(frozen=True)
class TokenDifference:
    """Where the generated tokens of one request first differ."""

    request: int
    index: int
    got: int | None
    wanted: int | None


def compare_tokens(got: dict[int, list[int]], wanted: dict[int, list[int]]) -> tuple[int, TokenDifference | None]:
    """Return how many generated tokens differ, and the first that does."""
    count = 0
    first = None
    for request in sorted(got.keys() | wanted.keys()):
        ours, theirs = got.get(request, []), wanted.get(request, [])
        for index in range(max(len(ours), len(theirs))):
            a = ours[index] if index < len(ours) else None
            b = theirs[index] if index < len(theirs) else None
            if a != b:
                count += 1
                first = first or TokenDifference(request, index, a, b)
    return count, first


def _bits(rows: Tensor) -> Tensor:
    return rows.cpu().view(_BITS[rows.element_size()])
