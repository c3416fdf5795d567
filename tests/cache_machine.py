"""A paged cache as a server uses it, driven by hypothesis: sequences come, grow, fork, leave, and come back.

Blocks are shared by forks and copied when one of the owners writes, a full cache preempts. After every step

* the whole memory of both caches is, bit for bit, that of a model written by plain indexing, and
* every living sequence, read back in one call, equals the rows that were kept for it without any blocks.

A machine runs on the device that its class names. What a device refuses must raise, and change nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from cache_layouts import LAYOUTS, Geometry, Layout
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from reliability import record
from soak import SOAK, short_or_long
from torch import Tensor

from pacache_torch import layouts
from pacache_torch.blocks import BlockAllocator, BlockCopy, BlockTable, OutOfBlocks

ops = torch.ops.pacache
INDEX_DTYPES = st.sampled_from((torch.int32, torch.int64))
NOBODY = st.sampled_from((0, -1, 2**31 - 1))  # what stands in a table where a sequence has no block

COLUMNS = (
    *("layouts", "lives"),
    *("step", "prefill", "decode", "fork", "copy on write", "take back", "full", "preempt", "resume", "load"),
    "bad call",
)
LIVES, STEPS = short_or_long((25, 40), (200, 60))

steps = Counter[str]()  # what was done by all machines of this process
totals: dict[str, Counter[str]] = {}  # the same by place, for the page


@dataclass(eq=False)
class Sequence:
    """A sequence: its blocks, and its rows without any."""

    table: BlockTable
    key: Tensor
    value: Tensor

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self.key.size(0)

    def __repr__(self) -> str:
        return f"{self.length} tokens in blocks {self.table.blocks}"


class CacheMachine(RuleBasedStateMachine):
    """The rules; a subclass names layout, device, and what sizes the device can take."""

    layout_name = "Norm"
    device = "cpu"
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.int8, torch.float32)
    heads: tuple[int, ...] = (1, 3)
    sizes: tuple[int, ...] = (1, 5, 8)
    units: tuple[int, ...] = (1, 2)  # of 32 bytes, in the NZ layouts
    block_sizes: tuple[int, ...] = (1, 3, 7)
    loads = True  # whether the device can read this layout
    checks_values = True  # whether a slot past the end raises, which on a device it does not
    skips_negative = True  # whether this layout may be given negative slots

    @initialize(data=st.data(), seed=st.integers(0, 2**16))
    def allocate_caches(self, data: Any, seed: int) -> None:
        """Draw sizes, and make a cache full of noise."""
        self.layout: Layout = LAYOUTS[self.layout_name]
        self.nz = self.layout.cache_mode == "PA_NZ"
        self.generator = torch.Generator().manual_seed(seed)
        dtype = data.draw(st.sampled_from(self.dtypes), label="dtype")
        sizes = [units * (32 // dtype.itemsize) for units in self.units] if self.nz else self.sizes
        size = data.draw(st.sampled_from(sizes), label="head_size")
        value_size = size if self.layout.equal_sizes else data.draw(st.sampled_from(sizes), label="head_size of value")
        self.g = Geometry(
            blocks=data.draw(st.integers(6, 16), label="blocks"),
            block_size=data.draw(st.sampled_from(self.block_sizes), label="block_size"),
            heads=data.draw(st.sampled_from(self.heads), label="heads"),
            size=size,
            value_size=value_size,
            dtype=dtype,
        )
        self.model = self.layout.allocate(self.g, self.generator)
        self.memory = [m.to(self.device, copy=True) for m in self.model]
        self.caches = self.layout.caches(self.memory, self.g)
        in_model = self.layout.caches(self.model, self.g)
        self.places = [self.layout.by_token(cache) for cache in in_model if cache is not None]
        self.allocator = BlockAllocator(self.g.blocks, shuffle_seed=seed)
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []

    # -----------------------------------------------------------------------------------------------------------------
    # Rules

    @rule(data=st.data(), count=st.integers(1, 12))
    def prefill(self, data: Any, count: int) -> None:
        """A sequence begins with some tokens."""
        new = self._begin()
        if self._append(data, [(new, count)]):
            self.running.append(new)
            steps["prefill"] += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def decode(self, data: Any) -> None:
        """Some sequences get one token each, in one call."""
        if self._append(data, [(sequence, 1) for sequence in self._some(data)]):
            steps["decode"] += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(2, 9))
    def decode_beside_a_prefill(self, data: Any, count: int) -> None:
        """A chunk of a new sequence, a chunk of an old one, and one token for others, in one call."""
        new = self._begin()
        old = self._some(data)
        if self._append(data, [(new, count), (old[0], 3), *((sequence, 1) for sequence in old[1:])]):
            self.running.append(new)
            steps.update(("prefill", "decode"))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        """A sequence goes on twice: both share all blocks, until one of them writes."""
        parent = data.draw(st.sampled_from(self.running), label="parent")
        keep = data.draw(st.integers(1, parent.length), label="shared tokens")
        child = Sequence(parent.table.fork(keep), parent.key[:keep], parent.value[:keep])
        self.running.append(child)
        steps["fork"] += 1
        if data.draw(st.booleans(), label="both go on"):
            self._append(data, [(parent, 1), (child, 2)])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def take_back(self, data: Any) -> None:
        """The last tokens of a sequence are not wanted after all."""
        sequence = data.draw(st.sampled_from(self.running), label="sequence")
        keep = data.draw(st.integers(1, sequence.length), label="tokens kept")
        sequence.table.crop(keep)
        sequence.key, sequence.value = sequence.key[:keep], sequence.value[:keep]
        steps["take back"] += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        """A sequence ends."""
        self._give_up(data.draw(st.sampled_from(self.running), label="sequence"))
        steps["free"] += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: Any) -> None:
        """A sequence is read out, and loses its blocks."""
        sequence = data.draw(st.sampled_from(self.running), label="sequence")
        if self.loads:
            sequence.key, sequence.value = self._load(data, [sequence], whole=True)
        self._give_up(sequence)
        self.preempted.append(sequence)
        steps["preempt"] += 1

    @precondition(lambda self: self.preempted)
    @rule(data=st.data())
    def resume(self, data: Any) -> None:
        """A preempted sequence is written back, into other blocks."""
        sequence = data.draw(st.sampled_from(self.preempted), label="sequence")
        back = self._begin()
        if self._append(data, [(back, sequence.length)], rows=(sequence.key, sequence.value)):
            self.preempted.remove(sequence)
            self.running.append(back)
            steps["resume"] += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def load(self, data: Any) -> None:
        """Some sequences are read, one perhaps twice, from some block on, with rows to spare."""
        self._load(data, [*self._some(data), *self._some(data)])
        steps["load"] += 1

    @precondition(lambda self: self.running)
    @rule(what=st.sampled_from(("slot", "head_size", "rank", "dtype")))
    def a_bad_call(self, what: str) -> None:
        """A wrong argument raises; that nothing was written is seen after the step."""
        key, value = self._rows(3)
        slots = torch.tensor([0, 1, self.g.slots if what == "slot" else 2])
        error: type[Exception] = ValueError
        if what == "slot":
            if not self.checks_values:
                return
            error = IndexError
        elif what == "head_size":
            key = torch.cat((key, key), dim=2)
        elif what == "rank":
            key = key.flatten(1)
        else:
            error, slots = TypeError, slots.to(torch.int16)
        try:
            self._scatter(key, value, slots)
        except error:
            steps["bad call"] += 1
        else:
            raise AssertionError(f"a wrong {what} was taken")

    # -----------------------------------------------------------------------------------------------------------------
    # What holds after each

    @invariant()
    def every_bit_is_as_in_the_model(self) -> None:
        """Nothing but what was asked for has changed, in the whole memory."""
        if not hasattr(self, "memory"):
            return
        for mine, wanted in zip(self.memory, self.model, strict=True):
            assert torch.equal(mine.cpu(), wanted), "the memory of a cache is not as it must be"

    @invariant()
    def every_sequence_reads_back(self) -> None:
        """All living sequences, in one load."""
        if not hasattr(self, "memory"):
            return
        steps["step"] += 1
        held = Counter(block for sequence in self.running for block in sequence.table.blocks)
        assert all(self.allocator.holders(block) == count for block, count in held.items())
        assert self.allocator.num_used == len(held)
        if self.running:
            self._load(None, self.running)

    # -----------------------------------------------------------------------------------------------------------------

    def _rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Random bits for so many tokens of key and value."""
        rows = []
        for size in (self.g.size, self.g.value_size):
            shape = (count, self.g.heads, size)
            bits = torch.randint(
                0, 256, (*shape[:2], size * self.g.dtype.itemsize), dtype=torch.uint8, generator=self.generator
            )
            rows.append(bits.view(self.g.dtype).view(shape))
        return rows[0], rows[1]

    def _some(self, data: Any) -> list[Sequence]:
        chosen = data.draw(
            st.lists(st.integers(0, len(self.running) - 1), min_size=1, max_size=4, unique=True), label="sequences"
        )
        return [self.running[i] for i in chosen]

    def _begin(self) -> Sequence:
        """A sequence without tokens."""
        return Sequence(BlockTable(self.allocator, self.g.block_size), *self._rows(0))

    def _give_up(self, sequence: Sequence) -> None:
        """A sequence leaves."""
        self.running.remove(sequence)
        sequence.table.free()

    def _append(self, data: Any, chunks: list[tuple[Sequence, int]], rows: tuple[Tensor, Tensor] | None = None) -> bool:
        """Give each sequence so many tokens more, all in one call. False when the cache is full: then no token is."""
        try:
            for sequence, count in chunks:
                for copy in sequence.table.reserve(sequence.length, sequence.length + count):
                    self._copy(data, sequence, copy)
        except OutOfBlocks:
            for sequence, _ in chunks:
                sequence.table.crop(sequence.length)
            steps["full"] += 1
            return False
        key, value = self._rows(sum(count for _, count in chunks)) if rows is None else rows
        tokens = [(i, s.length + j) for i, (s, count) in enumerate(chunks) for j in range(count)]
        self._write(data, [sequence.table.blocks for sequence, _ in chunks], tokens, key, value)
        counts = [count for _, count in chunks]
        for (sequence, _), new_key, new_value in zip(chunks, key.split(counts), value.split(counts), strict=True):
            sequence.key = torch.cat((sequence.key, new_key))
            sequence.value = torch.cat((sequence.value, new_value))
        return True

    def _copy(self, data: Any, sequence: Sequence, copy: BlockCopy) -> None:
        """Copy the last tokens of a sequence into a block of its own, through the operators."""
        first = sequence.length - copy.num_tokens
        key, value = sequence.key[first:], sequence.value[first:]
        if self.loads:
            shared = BlockTable(self.allocator, self.g.block_size)
            shared.blocks = [copy.source]
            key, value = self._load(data, [Sequence(shared, key, value)], whole=True)
        self._write(data, [[copy.target]], [(0, j) for j in range(copy.num_tokens)], key, value)
        steps["copy on write"] += 1

    def _write(
        self, data: Any, tables: list[list[int]], tokens: list[tuple[int, int]], key: Tensor, value: Tensor
    ) -> None:
        """One scatter of (table, position) tokens, with padding in its slots and behind them, in any order."""
        most = min(2, self.g.slots - len(tokens)) if self.skips_negative else 0
        padding = data.draw(st.integers(0, most), label="negative slots")
        places = [*tokens, *[(0, -1)] * padding]
        order = torch.randperm(len(places), generator=self.generator)
        if data.draw(st.booleans(), label="in order"):
            order = torch.arange(len(places))
        ids, positions = torch.tensor(places).unbind(1)
        slots = layouts.slot_mapping(
            layouts.pad_block_tables(tables), ids[order], positions[order], self.g.block_size
        ).to(data.draw(INDEX_DTYPES, label="dtype of slots"))
        behind = data.draw(st.integers(0, 2), label="rows behind the slots")
        made = [torch.cat((rows, noise))[order] for rows, noise in zip((key, value), self._rows(padding), strict=True)]
        made = [torch.cat((rows, noise)) for rows, noise in zip(made, self._rows(behind), strict=True)]
        if data.draw(st.booleans(), label="out of a fused buffer"):
            fused = torch.cat((made[0], made[1]), dim=2).to(self.device)
            made = [fused[..., : self.g.size], fused[..., self.g.size :]]
        self._scatter(made[0], made[1], slots)
        for place, slot in zip(order.tolist(), slots.tolist(), strict=True):
            if slot >= 0:
                for cache, rows in zip(self.places, (key, value), strict=False):
                    cache[slot // self.g.block_size, slot % self.g.block_size] = rows[place].reshape(cache.shape[2:])

    def _scatter(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        key_cache, value_cache = self.caches
        ops.scatter_pa_kv_cache(
            key.to(self.device),
            None if value_cache is None else value.to(self.device),
            key_cache,
            value_cache,
            slots.to(self.device),
            cache_mode=self.layout.cache_mode,
            scatter_mode=self.layout.scatter_mode,
        )

    def _load(self, data: Any, sequences: list[Sequence], *, whole: bool = False) -> tuple[Tensor, Tensor]:
        """Read sequences in one call, into rows full of noise; compare, and give the rows that were read.

        Without data nothing is drawn; whole sequences are read from their first block on.
        """
        starts = [0] * len(sequences)
        cumsum, before, behind, fill = False, 0, 0, 0
        index = [torch.int32] * 3
        if data is not None:
            index = [data.draw(INDEX_DTYPES, label="dtype of an index") for _ in index]
            behind = data.draw(st.integers(0, 2), label="rows behind")
            fill = data.draw(NOBODY, label="fill")
            if not self.nz:
                cumsum = data.draw(st.booleans(), label="cumsum")
                before = data.draw(st.integers(0, 2), label="rows before") if cumsum else 0
                if not whole and data.draw(st.booleans(), label="with seq_starts"):
                    starts = [
                        self.g.block_size
                        * data.draw(st.integers(0, (s.length - 1) // self.g.block_size), label="start")
                        for s in sequences
                    ]
        lengths = [s.length - start for s, start in zip(sequences, starts, strict=True)]
        end = before + sum(lengths)
        kept = [
            torch.cat([rows[start:] for rows, start in zip(of_all, starts, strict=True)])
            for of_all in ([s.key for s in sequences], [s.value for s in sequences])
        ]
        key_cache, value_cache = self.caches
        expected = list(kept)
        if value_cache is None:  # both outputs out of the one cache
            value_cache, expected[1] = key_cache, kept[0]
        if self.layout.scatter_mode == "NHSD":
            key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
        noise = self._rows(before + sum(lengths) + behind)
        wanted = [torch.cat((n[:before], rows, n[end:])) for n, rows in zip(noise, expected, strict=True)]
        out = [n.to(self.device) for n in noise]
        lens = [before + sum(lengths[:i]) for i in range(len(lengths) + 1)] if cumsum else lengths
        tables = layouts.pad_block_tables([s.table.blocks for s in sequences], fill=fill, dtype=index[0])
        arguments = (
            key_cache,
            value_cache,
            tables.to(self.device),
            torch.tensor(lens, dtype=index[1]).to(self.device),
            *out,
        )
        keyword: dict[str, Any] = {"cache_mode": self.layout.cache_mode, "is_seq_lens_cumsum": cumsum}
        if any(starts):
            keyword["seq_starts"] = torch.tensor(starts, dtype=index[2]).to(self.device)
        if not self.loads:
            try:
                ops.paged_cache_load(*arguments, **keyword)
            except NotImplementedError:
                steps["refused load"] += 1
                wanted = list(noise)
            else:
                raise AssertionError("a load that the device cannot do was taken")
        else:
            ops.paged_cache_load(*arguments, **keyword)
        read = [rows.cpu() for rows in out]
        for got, want in zip(read, wanted, strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), "a sequence does not read back"
        if not self.loads:
            return kept[0], kept[1]
        return read[0][before:end], read[1][before:end] if self.caches[1] is not None else kept[1]


def live(machine: type[CacheMachine], *, place: str, lives: int = LIVES) -> Counter[str]:
    """Run many lives of a cache; give what was done in them, how often."""
    before = Counter(steps)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=lives,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    done = steps - before
    total = totals.setdefault(place, Counter())
    total.update(done)
    total.update({"layouts": 1, "lives": lives})
    if SOAK:
        head = ["on", *COLUMNS]
        record("stateful", re.sub(r"\W+", "-", place), head, [[place, *(f"{total[what]:,}" for what in COLUMNS)]])
    return done
