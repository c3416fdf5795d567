"""Which tokens of which sequence run in the next step (continuous batching).

Every step first gives one token to each sequence that is decoding, then fills what is left of the
token budget with prefill. A prompt longer than that is cut: its chunks run in later steps, next
to the decode tokens of the others. Requests join when they arrive and when the cache can hold
them to their last token, and leave, with their blocks, as soon as they are complete.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pacache_torch.blocks import BlockAllocator, BlockTable, blocks_for


@dataclass(frozen=True)
class Request:
    """A prompt that asks for ``new_tokens`` more tokens, from step ``arrival`` on."""

    id: int
    prompt: tuple[int, ...]
    new_tokens: int
    arrival: int = 0

    @property
    def max_cached(self) -> int:
        """Tokens in the cache at the end; the last generated token is never fed back."""
        return len(self.prompt) + self.new_tokens - 1


@dataclass
class Sequence:
    """A request that is running: its tokens, how many are cached, and in which blocks."""

    request: Request
    tokens: list[int]
    block_table: BlockTable
    num_cached: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether every token that was asked for has been generated."""
        return len(self.tokens) == len(self.request.prompt) + self.request.new_tokens


@dataclass(frozen=True)
class Chunk:
    """``count`` tokens of one sequence, at positions ``start`` and up, in rows ``row`` and up."""

    sequence: Sequence
    start: int
    count: int
    row: int

    @property
    def length(self) -> int:
        """Tokens of the sequence in the cache once this chunk is written."""
        return self.start + self.count

    @property
    def has_context(self) -> bool:
        """Whether earlier tokens have to be read back from the cache."""
        return self.start > 0

    @property
    def is_prefill(self) -> bool:
        """Whether the chunk is part of the prompt rather than one generated token."""
        return self.start < len(self.sequence.request.prompt)

    @property
    def samples(self) -> bool:
        """Whether the chunk ends at the newest token, so that its last row gives the next."""
        return self.length == len(self.sequence.tokens)


@dataclass(frozen=True)
class Step:
    """What one forward pass works on: chunks whose rows lie one after the other."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return sum(chunk.count for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        """Token of each row."""
        return [token for chunk in self.chunks for token in chunk.sequence.tokens[chunk.start : chunk.length]]

    @property
    def positions(self) -> list[int]:
        """Position of each row in its sequence."""
        return [p for chunk in self.chunks for p in range(chunk.start, chunk.length)]

    @property
    def sampled_rows(self) -> list[int]:
        """Rows whose logits choose a next token, in the order of the chunks."""
        return [chunk.row + chunk.count - 1 for chunk in self.chunks if chunk.samples]


class Scheduler:
    """Turns requests into steps and owns the block tables while it does."""

    def __init__(
        self,
        requests: list[Request],
        allocator: BlockAllocator,
        *,
        block_size: int,
        token_budget: int,
    ) -> None:
        """Serve ``requests`` in the order of their arrival, ``token_budget`` tokens a step."""
        self._waiting = deque(sorted(requests, key=lambda request: request.arrival))
        self._running: list[Sequence] = []
        self._allocator = allocator
        self._block_size = block_size
        self._token_budget = token_budget
        self._promised_blocks = 0
        self._clock = 0
        for request in requests:
            if self._blocks_for(request.max_cached) > allocator.capacity:
                raise ValueError(
                    f"request {request.id} needs {self._blocks_for(request.max_cached)} blocks, "
                    f"the cache has {allocator.capacity}"
                )
        if token_budget < len(requests):
            raise ValueError(f"token_budget must be at least 1 per request ({len(requests)}), got {token_budget}")

    def next_step(self) -> Step | None:
        """Choose the next step and give its tokens a place in the cache; None when all is done."""
        while self._waiting or self._running:
            self._admit()
            chunks = self._choose_chunks()
            self._clock += 1
            if chunks:
                return Step(tuple(chunks))
        return None

    def finish_step(self, step: Step, sampled: list[int]) -> list[Sequence]:
        """Take the sampled tokens in, free what is complete, and return it."""
        new_tokens = iter(sampled)
        complete = []
        for chunk in step.chunks:
            sequence = chunk.sequence
            samples = chunk.samples
            sequence.num_cached = chunk.length
            if samples:
                sequence.tokens.append(next(new_tokens))
            if sequence.is_complete:
                complete.append(sequence)
        for sequence in complete:
            self._running.remove(sequence)
            sequence.block_table.free()
            self._promised_blocks -= self._blocks_for(sequence.request.max_cached)
        return complete

    def _admit(self) -> None:
        # First come, first served. Blocks are promised here and handed out only when they are
        # needed, so a running sequence can never find the cache full.
        while self._waiting and self._waiting[0].arrival <= self._clock:
            needed = self._blocks_for(self._waiting[0].max_cached)
            if self._promised_blocks + needed > self._allocator.capacity:
                return
            request = self._waiting.popleft()
            self._promised_blocks += needed
            table = BlockTable(self._allocator, self._block_size)
            self._running.append(Sequence(request, list(request.prompt), table))

    def _choose_chunks(self) -> list[Chunk]:
        def pending(sequence: Sequence) -> int:
            return len(sequence.tokens) - sequence.num_cached

        budget = self._token_budget
        row = 0
        chunks = []
        decoding_first = sorted(self._running, key=lambda sequence: pending(sequence) > 1)
        for sequence in decoding_first:
            count = min(pending(sequence), budget)
            if count == 0:
                continue
            chunk = Chunk(sequence, sequence.num_cached, count, row)
            # A table of one's own: no block is shared, so there is nothing to copy first.
            sequence.block_table.reserve(chunk.start, chunk.length)
            chunks.append(chunk)
            budget -= count
            row += count
        return chunks

    def _blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self._block_size)
