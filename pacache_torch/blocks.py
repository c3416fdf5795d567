"""Who owns which block of a paged cache, and which blocks hold a sequence.

Plain Python bookkeeping, in front of the operators: it chooses blocks, it moves no data. Slots and rectangular block
tables come from `pacache_torch.layouts`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["BlockAllocator", "BlockCopy", "BlockTable", "OutOfBlocks", "blocks_for"]


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free."""


class BlockCopy(NamedTuple):
    """The first ``num_tokens`` tokens of block ``source`` have to be copied to block ``target``."""

    source: int
    target: int
    num_tokens: int


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Give the number of blocks that hold ``num_tokens`` tokens.

    Example:
        >>> blocks_for(33, 16)
        3
    """
    return -(-num_tokens // block_size)


class BlockAllocator:
    """Hands out the blocks of one cache, counts who holds them, and takes them back.

    Block 0 is never handed out: the unused columns of a padded block table point at it.
    """

    def __init__(self, num_blocks: int, *, shuffle_seed: int | None = None) -> None:
        """Own blocks 1 to ``num_blocks - 1``.

        Args:
            num_blocks: blocks of the cache, 2 or more.
            shuffle_seed: hand blocks out in random order, so that no two neighbours in a block table are neighbours in
                memory: what a server sees after an hour of traffic, from the first request on. Without it, the block
                that was freed last comes first, and of those never used the lowest.
        """
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is kept), got {num_blocks}")
        self._free = list(range(num_blocks - 1, 0, -1))
        self._holders: Counter[int] = Counter()
        self._random = None if shuffle_seed is None else random.Random(shuffle_seed)
        self.capacity = num_blocks - 1
        self.peak_used = 0
        self.total_handed_out = 0

    @property
    def num_used(self) -> int:
        """Blocks that are handed out now."""
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Blocks that are left to hand out."""
        return len(self._free)

    def holders(self, block: int) -> int:
        """Say how many hold ``block``: 0 if it is free, more than 1 if it is shared."""
        return self._holders[block]

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks, or raise `OutOfBlocks` and hand out none."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} of {self.capacity} free")
        blocks = []
        for _ in range(count):
            if self._random is not None:
                index = self._random.randrange(len(self._free))
                self._free[index], self._free[-1] = self._free[-1], self._free[index]
            blocks.append(self._free.pop())
        self._holders.update(blocks)
        self.total_handed_out += count
        self.peak_used = max(self.peak_used, self.num_used)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more holder of each of ``blocks``; each has to be freed once more."""
        blocks = list(blocks)
        for block in blocks:
            if block not in self._holders:
                raise ValueError(f"block {block} is not in use, so it cannot be shared")
        self._holders.update(blocks)

    def free(self, blocks: Iterable[int]) -> None:
        """Count one holder less; a block that has none is free, its contents stay until the next owner writes."""
        for block in blocks:
            if block not in self._holders:
                raise ValueError(f"block {block} is not in use, so it cannot be freed")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                del self._holders[block]
                self._free.append(block)


class BlockTable:
    """The blocks of one sequence, in the order of its tokens.

    Tables that were forked from one another share blocks. A table that is about to write into a shared block gets one
    of its own first (`reserve`), so what the others hold never changes.

    Example:
        >>> allocator = BlockAllocator(8)
        >>> table = BlockTable(allocator, block_size=4)
        >>> table.reserve(0, 6)                  # tokens 0 to 5
        []
        >>> other = table.fork(6)
        >>> table.blocks, other.blocks
        ([1, 2], [1, 2])
        >>> table.reserve(6, 7)                  # token 6 goes into block 2, which `other` holds too
        [BlockCopy(source=2, target=3, num_tokens=2)]
        >>> table.blocks, other.reserve(6, 7)    # now nobody else holds block 2
        ([1, 3], [])
    """

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        """Begin with no blocks."""
        self._allocator = allocator
        self._block_size = block_size
        self.blocks: list[int] = []

    def reserve(self, start: int, end: int) -> list[BlockCopy]:
        """Make tokens ``start`` to ``end - 1`` writable; the tokens before ``start`` are kept.

        Returns:
            What has to be copied, in every layer, before anything is written: at most the block that token ``start``
            lies in.

        Raises:
            OutOfBlocks: the table is as it was.
        """
        first, last = start // self._block_size, blocks_for(end, self._block_size)
        shared = [index for index in range(first, min(last, len(self.blocks))) if self._is_shared(index)]
        missing = max(last - len(self.blocks), 0)
        new = self._allocator.allocate(len(shared) + missing)
        copies = []
        for index, target in zip(shared, new, strict=False):
            source = self.blocks[index]
            kept = start - index * self._block_size
            if kept > 0:
                copies.append(BlockCopy(source, target, kept))
            self.blocks[index] = target
            self._allocator.free([source])
        self.blocks += new[len(shared) :]
        return copies

    def fork(self, num_tokens: int) -> BlockTable:
        """Give a table that shares the blocks of the first ``num_tokens`` tokens."""
        fork = BlockTable(self._allocator, self._block_size)
        fork.blocks = self.blocks[: blocks_for(num_tokens, self._block_size)]
        self._allocator.share(fork.blocks)
        return fork

    def crop(self, num_tokens: int) -> None:
        """Give back the blocks behind the first ``num_tokens`` tokens."""
        keep = blocks_for(num_tokens, self._block_size)
        self._allocator.free(self.blocks[keep:])
        del self.blocks[keep:]

    def free(self) -> None:
        """Give every block back."""
        self.crop(0)

    def _is_shared(self, index: int) -> bool:
        return self._allocator.holders(self.blocks[index]) > 1
