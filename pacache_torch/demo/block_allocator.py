"""Who owns which block of the paged cache."""

from __future__ import annotations

import random


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free."""


class BlockAllocator:
    """Hands out the blocks of one cache and takes them back.

    Blocks come out in random order, so that no two neighbours in a block table are neighbours in
    memory: what a server sees after an hour of traffic, from the first request on. Block 0 is
    never handed out: the unused columns of a padded block table point at it.
    """

    def __init__(self, num_blocks: int, *, seed: int = 0) -> None:
        """Own blocks 1 to ``num_blocks - 1``."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is kept), got {num_blocks}")
        self._free = list(range(1, num_blocks))
        self._used: set[int] = set()
        self._random = random.Random(seed)
        self.capacity = num_blocks - 1
        self.peak_used = 0
        self.total_handed_out = 0

    @property
    def num_used(self) -> int:
        """Blocks that are handed out now."""
        return len(self._used)

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks, or raise `OutOfBlocks` and hand out none."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} free")
        blocks = []
        for _ in range(count):
            index = self._random.randrange(len(self._free))
            self._free[index], self._free[-1] = self._free[-1], self._free[index]
            blocks.append(self._free.pop())
        self._used.update(blocks)
        self.total_handed_out += count
        self.peak_used = max(self.peak_used, self.num_used)
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Take ``blocks`` back; their contents stay until the next owner overwrites them."""
        for block in blocks:
            if block not in self._used:
                raise ValueError(f"block {block} is not in use, so it cannot be freed")
            self._used.remove(block)
            self._free.append(block)
