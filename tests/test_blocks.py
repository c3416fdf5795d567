"""Contract of ``pacache_torch.blocks``.

A block has as many holders as tables that list it and is free when it has none; a table never writes into a block that
another one holds; when the blocks run out nothing has changed.
"""

from __future__ import annotations

import doctest
import random
from collections import Counter
from itertools import pairwise

import pytest

from pacache_torch import blocks
from pacache_torch.blocks import BlockAllocator, BlockCopy, BlockTable, OutOfBlocks, blocks_for


def test_the_examples() -> None:
    result = doctest.testmod(blocks)
    assert result.failed == 0 and result.attempted > 5


def test_allocator_hands_out_each_block_once_and_never_block_0() -> None:
    allocator = BlockAllocator(40, shuffle_seed=0)
    blocks = allocator.allocate(20) + allocator.allocate(19)
    assert sorted(blocks) == list(range(1, 40))
    neighbours = sum(abs(a - b) == 1 for a, b in pairwise(blocks))
    assert neighbours < 8, "blocks should come out scattered"
    with pytest.raises(OutOfBlocks, match="1 blocks asked for, 0 of 39 free"):
        allocator.allocate(1)
    allocator.free(blocks[:5])
    assert sorted(allocator.allocate(5)) == sorted(blocks[:5])
    assert allocator.peak_used == 39 and allocator.total_handed_out == 44


def test_allocator_without_a_seed_hands_out_runs() -> None:
    assert BlockAllocator(6).allocate(5) == [1, 2, 3, 4, 5]


def test_allocator_hands_out_nothing_when_it_cannot_hand_out_all() -> None:
    allocator = BlockAllocator(4)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(4)
    assert allocator.num_used == 0 and len(allocator.allocate(3)) == 3


def test_allocator_refuses_a_block_that_is_not_in_use() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(2)
    allocator.free(blocks)
    with pytest.raises(ValueError, match=f"block {blocks[0]} is not in use, so it cannot be freed"):
        allocator.free(blocks)
    with pytest.raises(ValueError, match=f"block {blocks[1]} is not in use, so it cannot be shared"):
        allocator.share([blocks[1]])
    with pytest.raises(ValueError, match="num_blocks must be at least 2"):
        BlockAllocator(1)


def test_a_shared_block_is_free_when_its_last_holder_frees_it() -> None:
    allocator = BlockAllocator(3)
    (block,) = allocator.allocate(1)
    allocator.share([block])
    assert allocator.holders(block) == 2 and allocator.num_used == 1
    allocator.free([block])
    assert allocator.holders(block) == 1 and allocator.num_free == 1
    allocator.free([block])
    assert allocator.holders(block) == 0 and allocator.num_free == 2


def test_a_table_that_finds_no_block_is_as_it_was() -> None:
    allocator = BlockAllocator(4)
    table = BlockTable(allocator, 4)
    table.reserve(0, 6)
    other = table.fork(6)
    with pytest.raises(OutOfBlocks):
        table.reserve(6, 9)  # one for the copy, one more for token 8
    assert table.blocks == other.blocks and allocator.num_free == 1
    assert table.reserve(6, 8) == [BlockCopy(2, 3, 2)]


def test_a_shared_block_is_replaced_without_a_copy_when_nothing_of_it_is_kept() -> None:
    allocator = BlockAllocator(8)
    table = BlockTable(allocator, 4)
    table.reserve(0, 8)
    other = table.fork(8)
    assert table.reserve(4, 6) == [] and table.blocks == [1, 3] and other.blocks == [1, 2]


@pytest.mark.parametrize("block_size", (1, 3, 4))
def test_tables_hold_what_was_written_whatever_they_share(block_size: int) -> None:
    """Random forks, writes, crops and frees against one list per sequence."""
    choose = random.Random(block_size)
    allocator = BlockAllocator(24, shuffle_seed=block_size)
    memory: dict[tuple[int, int], int] = {}  # (block, position) -> token
    tables: list[tuple[BlockTable, list[int]]] = [(BlockTable(allocator, block_size), [])]
    token = copied = ran_out = 0
    for _ in range(2000):
        index = choose.randrange(len(tables))
        table, tokens = tables[index]
        action = choose.choice(("write", "write", "write", "fork", "crop", "free"))
        if action == "write":
            count = choose.randrange(1, 2 * block_size + 2)
            try:
                copies = table.reserve(len(tokens), len(tokens) + count)
            except OutOfBlocks:
                ran_out += 1
                table.free()
                tables[index] = (table, [])
                continue
            for source, target, kept in copies:
                copied += 1
                memory.update({(target, position): memory[source, position] for position in range(kept)})
            for _ in range(count):
                memory[table.blocks[len(tokens) // block_size], len(tokens) % block_size] = token
                tokens.append(token)
                token += 1
        elif action == "fork" and len(tables) < 6:
            length = choose.randint(0, len(tokens))
            tables.append((table.fork(length), tokens[:length]))
        elif action == "crop":
            del tokens[choose.randint(0, len(tokens)) :]
            table.crop(len(tokens))
        elif action == "free" and len(tables) > 1:
            table.free()
            del tables[index]
        listed = Counter(block for held, _ in tables for block in held.blocks)
        assert all(allocator.holders(block) == listed[block] for block in range(24))
        assert allocator.num_free == 23 - len(listed)
        for held, wanted in tables:
            assert len(held.blocks) == blocks_for(len(wanted), block_size)
            assert [memory[held.blocks[p // block_size], p % block_size] for p in range(len(wanted))] == wanted
    assert ran_out > 0 and (copied > 0 or block_size == 1)
