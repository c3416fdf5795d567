"""What do the operators mean? Plain loops over tokens, heads and elements: slow, and meant to be read.

The operators as their definition says them, one function per kind of copy, sharing nothing with the C++ kernels. Every
other backend is held against this one, bit for bit. Everything is checked before the first element is written: shapes,
dtypes and modes by :mod:`pacache_torch._rules`, memory and values here.

Copies move bits (a NaN keeps its payload, a zero its sign). The window mean of Rope is a float32 sum from 0 in token
order, one float32 division by the window's length, and one cast with ties to even; only the payload of a mean that
is NaN is left open.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _rules
from ._rules import (
    LOAD,
    LOAD_PACKED,
    SCATTER,
    SCATTER_PACKED,
    Kind,
    LoadArgs,
    PackedLayout,
    ScatterArgs,
    fail,
)

_NamedTensor = tuple[str, Tensor | None]


# ---------------------------------------------------------------------------------------------------------------------
# scatter_pa_kv_cache


def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str = "Norm",
    scatter_mode: str = "None",
    strides: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
) -> None:
    """Write tokens into a paged KV cache, one element after the other.

    Args, layouts and errors are those of :func:`pacache_torch.scatter_pa_kv_cache`. Duplicate slots are well defined
    here: the token with the highest index wins.

    Mutates:
        key_cache, value_cache.

    Raises:
        ValueError: a shape, a mode, a stride, shared memory, or a length that does not fit.
        TypeError: a dtype.
        IndexError: a slot past the end of the cache.
        RuntimeError: a tensor that requires grad while grad mode is on.

    Example:
        >>> key = torch.arange(4.0).view(2, 1, 2)  # 2 tokens, 1 head, head size 2
        >>> cache = torch.zeros(2, 3, 1, 2)  # 2 blocks of 3 slots
        >>> scatter_pa_kv_cache(key, None, cache, None, torch.tensor([4, -1]))  # token 1 is skipped
        >>> cache[1, 1, 0]  # slot 4 = block 1, offset 1
        tensor([0., 1.])
    """
    args = _rules.check_scatter(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        compress_lens,
        compress_seq_offsets,
        seq_lens,
        cache_mode,
        scatter_mode,
        strides,
        offsets,
    )
    key_stride, value_stride = (0, 0) if strides is None else strides
    key_offset, value_offset = (0, 0) if offsets is None else offsets
    _check_scatter_memory(
        args,
        _Source("key", key, key_stride, key_offset),
        None if value is None else _Source("value", value, value_stride, value_offset),
        (("key_cache", key_cache), ("value_cache", value_cache)),
        (
            ("slot_mapping", slot_mapping),
            ("compress_lens", compress_lens),
            ("compress_seq_offsets", compress_seq_offsets),
            ("seq_lens", seq_lens),
        ),
    )

    if compress_lens is None or seq_lens is None:
        slots: list[int] = slot_mapping.tolist()
        _check_slots(SCATTER, args, slots)
        _scatter_tokens(args, slots, _bits(key), _bits(key_cache), key_stride, key_offset)
        if value is not None and value_cache is not None:
            _scatter_tokens(args, slots, _bits(value), _bits(value_cache), value_stride, value_offset)
    else:
        lengths: list[int] = seq_lens.tolist()
        _check_lengths(args, lengths, key)
        tasks = _checked_tasks(args, lengths, slot_mapping, compress_lens, compress_seq_offsets)
        assert value is not None and value_cache is not None
        _scatter_heads(args, tasks, lengths, key, key_cache)
        _scatter_heads(args, tasks, lengths, value, value_cache)


def _scatter_tokens(args: ScatterArgs, slots: list[int], x: Tensor, cache: Tensor, stride: int, offset: int) -> None:
    """Scenarios 1, 2, 6 and 7: each token has a slot."""
    if args.kind == "norm":
        _scatter_norm(slots, x, cache)
    elif args.kind == "nct":
        _scatter_nct(slots, x, cache, stride, offset)
    elif args.kind == "nhsd":
        _scatter_nhsd(slots, x, cache)
    elif cache.dim() == 4:
        _scatter_nz_4d(slots, x, cache)
    else:
        _scatter_nz_5d(slots, x, cache)


def _scatter_norm(slots: list[int], x: Tensor, cache: Tensor) -> None:
    """Put x [T, N, D] into cache [num_blocks, block_size, N, D]."""
    block_size = cache.size(1)
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        for h in range(x.size(1)):
            cache[slot // block_size, slot % block_size, h, :] = x[i, h, :]


def _scatter_nct(slots: list[int], x: Tensor, cache: Tensor, stride: int, offset: int) -> None:
    """Put as Norm; element (i, h, d) of x stands ``offset + i * stride + h * D + d`` after its data pointer."""
    block_size = cache.size(1)
    num_heads, head_size = x.shape[1:]
    memory = torch.as_strided(x, (_storage_elements(x),), (1,), 0)
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        for h in range(num_heads):
            first = x.storage_offset() + offset + i * stride + h * head_size
            cache[slot // block_size, slot % block_size, h, :] = memory[first : first + head_size]


def _scatter_nhsd(slots: list[int], x: Tensor, cache: Tensor) -> None:
    """Put x [T, N, D] into cache [num_blocks, N, block_size, D]."""
    block_size = cache.size(2)
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        for h in range(x.size(1)):
            cache[slot // block_size, h, slot % block_size, :] = x[i, h, :]


def _scatter_nz_4d(slots: list[int], x: Tensor, cache: Tensor) -> None:
    """Put x [T, N, D] into cache [num_blocks, N * D / L, block_size, L], a unit of L elements at a time."""
    block_size, unit = cache.shape[2:]
    head_size = x.size(2)
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        for h in range(x.size(1)):
            for d in range(0, head_size, unit):
                c = h * head_size + d  # a multiple of L, as D is one
                cache[slot // block_size, c // unit, slot % block_size, :] = x[i, h, d : d + unit]


def _scatter_nz_5d(slots: list[int], x: Tensor, cache: Tensor) -> None:
    """Put x [T, N, D] into cache [num_blocks, N, D / L, block_size, L], a unit of L elements at a time."""
    block_size, unit = cache.shape[3:]
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        for h in range(x.size(1)):
            for d in range(0, x.size(2), unit):
                cache[slot // block_size, h, d // unit, slot % block_size, :] = x[i, h, d : d + unit]


@dataclass(frozen=True)
class _Task:
    """One head of one sequence in a compressed mode, with the values that were given for it."""

    sequence: int
    head: int
    slot: int
    length: int
    window: int
    offset: int  # of the window, Rope and Omni only

    @property
    def compressed(self) -> bool:
        """Tell whether the window of Rope or Omni takes effect; if not, the whole sequence is copied."""
        return self.window != 0 and self.offset not in (-1, self.length)

    def rows(self, kind: Kind) -> int:
        """Rows of the cache that are written from ``slot`` on."""
        if kind == "alibi":
            return self.window
        if not self.compressed:
            return self.length
        return self.length - self.window + (1 if kind == "rope" else 0)


def _scatter_heads(args: ScatterArgs, tasks: list[_Task], lengths: list[int], x: Tensor, cache: Tensor) -> None:
    """Scenarios 3, 4 and 5: each head of each sequence has a first slot; cache is [num_blocks, block_size, 1, D]."""
    for task in tasks:
        if args.scenario == 3:  # padded: x is [B, S, N, D]
            tokens = x[task.sequence, :, task.head, :]
        else:  # packed: x is [T, N, D]
            first = sum(lengths[: task.sequence])
            tokens = x[first : first + task.length, task.head, :]
        if args.kind == "alibi":
            _scatter_alibi(task, tokens, cache)
        elif args.kind == "rope":
            _scatter_rope(task, tokens, cache)
        else:
            _scatter_omni(task, tokens, cache)


def _scatter_alibi(task: _Task, tokens: Tensor, cache: Tensor) -> None:
    """Put the last ``window`` tokens of the sequence."""
    for j in range(task.window):
        _write_row(cache, task.slot + j, tokens[task.length - task.window + j])


def _scatter_rope(task: _Task, tokens: Tensor, cache: Tensor) -> None:
    """Put the tokens before the window, one row with the mean of the window, the tokens after it."""
    if not task.compressed:
        _scatter_whole(task, tokens, cache)
        return
    after = task.offset + task.window
    for j in range(task.offset):
        _write_row(cache, task.slot + j, tokens[j])
    _write_row(cache, task.slot + task.offset, _mean(tokens, task.offset, task.window))
    for j in range(task.length - after):
        _write_row(cache, task.slot + task.offset + 1 + j, tokens[after + j])


def _scatter_omni(task: _Task, tokens: Tensor, cache: Tensor) -> None:
    """Put the tokens before the window and the tokens after it."""
    if not task.compressed:
        _scatter_whole(task, tokens, cache)
        return
    after = task.offset + task.window
    for j in range(task.offset):
        _write_row(cache, task.slot + j, tokens[j])
    for j in range(task.length - after):
        _write_row(cache, task.slot + task.offset + j, tokens[after + j])


def _scatter_whole(task: _Task, tokens: Tensor, cache: Tensor) -> None:
    for j in range(task.length):
        _write_row(cache, task.slot + j, tokens[j])


def _write_row(cache: Tensor, slot: int, token: Tensor) -> None:
    """Put the D elements of a token into a slot of cache [num_blocks, block_size, 1, D]."""
    block_size = cache.size(1)
    _bits(cache)[slot // block_size, slot % block_size, 0, :] = _bits(token)


def _mean(tokens: Tensor, first: int, count: int) -> Tensor:
    """Give the mean of tokens[first : first + count], in their dtype."""
    total = torch.zeros(tokens.size(-1), dtype=torch.float32, device=tokens.device)
    for j in range(first, first + count):
        total = total + tokens[j].to(torch.float32)
    mean = total / torch.full_like(total, count)
    return mean.to(tokens.dtype)  # ties to even


# ---------------------------------------------------------------------------------------------------------------------
# paged_cache_load


def paged_cache_load(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_starts: Tensor | None = None,
    cache_mode: str = "Norm",
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Read the tokens of whole sequences out of a paged KV cache, one element after the other.

    Args, layouts and errors are those of the operator ``torch.ops.pacache.paged_cache_load``. Rows of key and value
    that no sequence covers keep their contents.

    Mutates:
        key, value.

    Raises:
        ValueError: a shape, a mode, a stride, shared memory, a length or a start that does not fit.
        TypeError: a dtype.
        IndexError: a block id that is used and outside the cache.
        RuntimeError: a tensor that requires grad while grad mode is on.

    Example:
        >>> cache = torch.arange(8.0).view(4, 2, 1, 1)  # 4 blocks of 2 slots, 1 head, head size 1
        >>> key, value = torch.zeros(3, 1, 1), torch.zeros(3, 1, 1)
        >>> paged_cache_load(cache, cache, torch.tensor([[3, 1]]), torch.tensor([3]), key, value)
        >>> key.flatten()  # block 3 holds 6 and 7, block 1 begins with 2
        tensor([6., 7., 2.])
    """
    args = _rules.check_load(
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        key,
        value,
        seq_starts,
        cache_mode,
        is_seq_lens_cumsum,
    )
    _check_load_memory(
        LOAD,
        (
            ("key_cache", key_cache),
            ("value_cache", value_cache),
            ("block_tables", block_tables),
            ("context_lens", context_lens),
            ("key", key),
            ("value", value),
            ("seq_starts", seq_starts),
        ),
    )
    starts: list[int] = [0] * args.batch if seq_starts is None else seq_starts.tolist()
    sequences = _checked_sequences(LOAD, args, block_tables, context_lens.tolist(), starts, is_seq_lens_cumsum)
    for sequence in sequences:
        for cache, out in ((_bits(key_cache), _bits(key)), (_bits(value_cache), _bits(value))):
            if not args.nz:
                _load_norm(sequence, cache, out)
            elif cache.dim() == 4:
                _load_nz_4d(sequence, cache, out)
            else:
                _load_nz_5d(sequence, cache, out)


@dataclass(frozen=True)
class _Sequence:
    """A sequence to load: its first row in the output, its length, and the blocks that hold its tokens, in order."""

    first_row: int
    length: int
    blocks: list[int]


def _load_norm(sequence: _Sequence, cache: Tensor, out: Tensor) -> None:
    """Put cache [num_blocks, block_size, N, D] into out [rows, N, D]."""
    block_size = cache.size(1)
    for j in range(sequence.length):
        block = sequence.blocks[j // block_size]
        for h in range(out.size(1)):
            out[sequence.first_row + j, h, :] = cache[block, j % block_size, h, :]


def _load_nz_4d(sequence: _Sequence, cache: Tensor, out: Tensor) -> None:
    """Put cache [num_blocks, W / L, block_size, L] into out [rows, W] or [rows, N, D] with W = N * D."""
    block_size, unit = cache.shape[2:]
    token = torch.empty(cache.size(1) * unit, dtype=cache.dtype, device=cache.device)
    for j in range(sequence.length):
        block = sequence.blocks[j // block_size]
        for u in range(cache.size(1)):
            token[u * unit : (u + 1) * unit] = cache[block, u, j % block_size, :]
        out[sequence.first_row + j] = token.view(out.shape[1:])


def _load_nz_5d(sequence: _Sequence, cache: Tensor, out: Tensor) -> None:
    """Put cache [num_blocks, N, D / L, block_size, L] into out [rows, W] or [rows, N, D] with W = N * D."""
    block_size, unit = cache.shape[3:]
    head_size = cache.size(2) * unit
    token = torch.empty(cache.size(1) * head_size, dtype=cache.dtype, device=cache.device)
    for j in range(sequence.length):
        block = sequence.blocks[j // block_size]
        for h in range(cache.size(1)):
            for d in range(0, head_size, unit):
                c = h * head_size + d
                token[c : c + unit] = cache[block, h, d // unit, j % block_size, :]
        out[sequence.first_row + j] = token.view(out.shape[1:])


# ---------------------------------------------------------------------------------------------------------------------
# Keys and values in one cache


def scatter_pa_kv_cache_packed(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, kv_layout: str
) -> None:
    """Write tokens into a paged cache that holds keys and values, one element after the other.

    Args, layouts and errors are those of :func:`pacache_torch.scatter_pa_kv_cache_packed`. Of duplicate slots the token
    with the highest index wins.

    Mutates:
        kv_cache.

    Raises:
        ValueError: a shape, a layout, a stride or shared memory.
        TypeError: a dtype.
        IndexError: a slot past the end of the cache.
        RuntimeError: a tensor that requires grad while grad mode is on.

    Example:
        >>> key = torch.arange(4.0).view(2, 1, 2)  # 2 tokens, 1 head, head size 2
        >>> cache = torch.zeros(2, 3, 1, 4)  # 2 blocks of 3 slots; 2 elements of key, then 2 of value
        >>> scatter_pa_kv_cache_packed(key, -key, cache, torch.tensor([4, -1]), kv_layout="BNHC")
        >>> cache[1, 1, 0]  # slot 4 = block 1, offset 1
        tensor([ 0.,  1., -0., -1.])
    """
    op = SCATTER_PACKED
    args, layout = _rules.check_scatter_packed(key, value, kv_cache, slot_mapping, kv_layout)
    inputs: list[_NamedTensor] = [("key", key), ("value", value), ("slot_mapping", slot_mapping)]
    for name, t in (inputs[0], inputs[1], ("kv_cache", kv_cache), inputs[2]):
        _check_bounds(op, name, t)
    halves = _halves(layout, kv_cache, key.size(2))
    _check_halves_apart(op, kv_cache, halves)
    _check_disjoint(op, [_extent("kv_cache", kv_cache)], _extents(inputs))
    slots: list[int] = slot_mapping.tolist()
    _check_slots(op, args, slots)
    for x, cache in zip((key, value), halves, strict=True):
        _scatter_norm(slots, _bits(x), _bits(cache))


def paged_cache_load_packed(
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kv_layout: str,
    seq_starts: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Read whole sequences out of a paged cache that holds keys and values, one element after the other.

    Args, layouts and errors are those of the operator ``torch.ops.pacache.paged_cache_load_packed``. Rows of key and
    value that no sequence covers keep their contents.

    Mutates:
        key, value.

    Raises:
        ValueError: a shape, a layout, a stride, shared memory, a length or a start that does not fit.
        TypeError: a dtype.
        IndexError: a block id that is used and outside the cache.
        RuntimeError: a tensor that requires grad while grad mode is on.

    Example:
        >>> cache = torch.arange(16.0).view(4, 2, 1, 2)  # 4 blocks of 2 slots, 1 head; 1 element of key, 1 of value
        >>> key, value = torch.zeros(3, 1, 1), torch.zeros(3, 1, 1)
        >>> tables, lens = torch.tensor([[3, 1]]), torch.tensor([3])
        >>> paged_cache_load_packed(cache, tables, lens, key, value, kv_layout="BNHC")
        >>> key.flatten(), value.flatten()  # block 3 holds 12, 13, 14, 15; block 1 begins with 4, 5
        (tensor([12., 14.,  4.]), tensor([13., 15.,  5.]))
    """
    op = LOAD_PACKED
    args, layout = _rules.check_load_packed(
        kv_cache, block_tables, context_lens, key, value, kv_layout, seq_starts, is_seq_lens_cumsum
    )
    _check_load_memory(
        op,
        (
            ("kv_cache", kv_cache),
            ("block_tables", block_tables),
            ("context_lens", context_lens),
            ("key", key),
            ("value", value),
            ("seq_starts", seq_starts),
        ),
    )
    starts: list[int] = [0] * args.batch if seq_starts is None else seq_starts.tolist()
    halves = _halves(layout, kv_cache, key.size(2))
    sequences = _checked_sequences(op, args, block_tables, context_lens.tolist(), starts, is_seq_lens_cumsum)
    for sequence in sequences:
        for cache, out in zip(halves, (key, value), strict=True):
            _load_norm(sequence, _bits(cache), _bits(out))


def _halves(layout: PackedLayout, kv_cache: Tensor, key_size: int) -> tuple[Tensor, Tensor]:
    """Give the keys and the values as views [num_blocks, block_size, N, D]."""
    if layout.name == "2BNHD":
        return kv_cache[0], kv_cache[1]
    if layout.name == "B2NHD":
        return kv_cache[:, 0], kv_cache[:, 1]
    tokens_first = kv_cache.transpose(1, 2) if layout.name == "BHNC" else kv_cache
    return tokens_first[..., :key_size], tokens_first[..., key_size:]


# ---------------------------------------------------------------------------------------------------------------------
# Rules on values


def _check_slots(op: str, args: ScatterArgs, slots: list[int]) -> None:
    total = args.num_blocks * args.block_size
    for i, slot in enumerate(slots):
        if slot >= total:
            fail(
                IndexError,
                op,
                f"slot_mapping[{i}]",
                f"must be less than num_blocks * block_size = {total}, got {slot}",
            )


def _check_lengths(args: ScatterArgs, lengths: list[int], key: Tensor) -> None:
    for b, length in enumerate(lengths):
        if args.scenario == 3:
            seq_len = key.size(1)
            if not 0 <= length <= seq_len:
                fail(ValueError, SCATTER, f"seq_lens[{b}]", f"must be between 0 and seq_len {seq_len}, got {length}")
        elif length < 0:
            fail(ValueError, SCATTER, f"seq_lens[{b}]", f"must not be negative, got {length}")
    if args.scenario != 3 and sum(lengths) != key.size(0):
        fail(ValueError, SCATTER, "seq_lens", f"must sum to the {key.size(0)} tokens of key, got {sum(lengths)}")


def _checked_tasks(
    args: ScatterArgs,
    lengths: list[int],
    slot_mapping: Tensor,
    compress_lens: Tensor,
    compress_seq_offsets: Tensor | None,
) -> list[_Task]:
    """Give the heads to write, in order; one with a negative slot is skipped and nothing else of it is looked at."""
    slots = slot_mapping.flatten().tolist()
    windows = compress_lens.flatten().tolist()
    offsets = None if compress_seq_offsets is None else compress_seq_offsets.tolist()
    total = args.num_blocks * args.block_size
    tasks = []
    for b, length in enumerate(lengths):
        for h in range(args.num_heads):
            i = b * args.num_heads + h
            slot, window = slots[i], windows[i]
            if slot < 0:
                continue
            index = f"[{b}, {h}]" if args.scenario == 3 else f"[{i}]"
            if not 0 <= window <= length:
                fail(
                    ValueError,
                    SCATTER,
                    f"compress_lens{index}",
                    f"must be between 0 and seq_lens[{b}] = {length}, got {window}",
                )
            offset = -1
            if args.kind in ("rope", "omni"):
                assert offsets is not None
                offset = offsets[i]
                if offset not in (-1, length) and not 0 <= offset <= length - window:
                    fail(
                        ValueError,
                        SCATTER,
                        f"compress_seq_offsets[{i}]",
                        f"must be -1, seq_lens[{b}] = {length} or between 0 and "
                        f"seq_lens[{b}] - compress_lens{index} = {length - window}, got {offset}",
                    )
            task = _Task(b, h, slot, length, window, offset)
            rows = task.rows(args.kind)
            if slot + rows > total:
                fail(
                    IndexError,
                    SCATTER,
                    f"slot_mapping{index}",
                    f"must leave room for its {rows} rows in num_blocks * block_size = {total} slots, got {slot}",
                )
            tasks.append(task)
    return tasks


def _checked_sequences(
    op: str, args: LoadArgs, block_tables: Tensor, lens: list[int], starts: list[int], cumsum: bool
) -> list[_Sequence]:
    """Give the sequences to load, in order."""
    num_columns = block_tables.size(1)
    sequences = []
    next_row = 0
    if cumsum and lens[0] < 0:
        fail(ValueError, op, "context_lens[0]", f"must not be negative, got {lens[0]}")
    for b in range(args.batch):
        if cumsum:
            first_row, length = lens[b], lens[b + 1] - lens[b]
            if length < 0:
                fail(
                    ValueError,
                    op,
                    f"context_lens[{b + 1}]",
                    f"must be at least context_lens[{b}] = {lens[b]}, got {lens[b + 1]}",
                )
        else:
            first_row, length = next_row, lens[b]
            if length < 0:
                fail(ValueError, op, f"context_lens[{b}]", f"must not be negative, got {length}")
        next_row = first_row + length
        if starts[b] < 0:
            fail(ValueError, op, f"seq_starts[{b}]", f"must not be negative, got {starts[b]}")
        if length == 0:
            continue
        if next_row > args.num_rows:
            fail(
                ValueError,
                op,
                "key",
                f"must have room for the {length} rows of sequence {b} from row {first_row}, got {args.num_rows} rows",
            )
        first_column = starts[b] // args.block_size
        num_used = -(-length // args.block_size)
        if first_column + num_used > num_columns:
            fail(
                ValueError,
                op,
                "block_tables",
                f"must have the columns for context_lens {length} from seq_starts {starts[b]} of sequence {b} "
                f"with block_size {args.block_size}, got {num_columns} columns",
            )
        blocks: list[int] = block_tables[b, first_column : first_column + num_used].tolist()
        for column, block in enumerate(blocks, first_column):
            if not 0 <= block < args.num_blocks:
                fail(
                    IndexError,
                    op,
                    f"block_tables[{b}, {column}]",
                    f"must be between 0 and num_blocks - 1 = {args.num_blocks - 1}, got {block}",
                )
        sequences.append(_Sequence(first_row, length, blocks))
    return sequences


# ---------------------------------------------------------------------------------------------------------------------
# Rules on memory


@dataclass(frozen=True)
class _Source:
    """Key or value with what ``strides`` and ``offsets`` say about it (Nct only)."""

    name: str
    tensor: Tensor
    stride: int
    offset: int


@dataclass(frozen=True)
class _Extent:
    """The bytes that a tensor covers: runs of ``run_bytes`` bytes that begin at ``starts``, all addresses."""

    name: str
    storage_offset: int
    starts: list[int]
    run_bytes: int


def _check_scatter_memory(
    args: ScatterArgs,
    key: _Source,
    value: _Source | None,
    caches: Sequence[_NamedTensor],
    indices: Sequence[_NamedTensor],
) -> None:
    sources = [key] if value is None else [key, value]
    if args.kind != "nct":
        for source in sources:
            _check_bounds(SCATTER, source.name, source.tensor)
    for name, t in itertools.chain(caches, indices):
        _check_bounds(SCATTER, name, t)
    if args.kind == "nct":
        for source in sources:
            _check_nct_bounds(args, source)
    for name, t in caches:
        _check_not_expanded(SCATTER, name, t)
    written = _extents(caches)
    if args.kind == "nct":
        read = [_nct_extent(args, source) for source in sources]
    else:
        read = _extents([(source.name, source.tensor) for source in sources])
    _check_disjoint(SCATTER, written, read + _extents(indices))


def _check_load_memory(op: str, tensors: Sequence[_NamedTensor]) -> None:
    for name, t in tensors:
        _check_bounds(op, name, t)
    written = [(name, t) for name, t in tensors if name in ("key", "value")]
    read = [(name, t) for name, t in tensors if name not in ("key", "value")]
    for name, t in written:
        _check_not_expanded(op, name, t)
    _check_disjoint(op, _extents(written), _extents(read))


def _check_halves_apart(op: str, kv_cache: Tensor, halves: tuple[Tensor, Tensor]) -> None:
    """For a packed cache that is written."""
    _check_not_expanded(op, "kv_cache", kv_cache)
    if _share_a_byte(*(_extent("kv_cache", half) for half in halves)):
        fail(
            ValueError,
            op,
            "kv_cache",
            f"must not overlap itself, got shape {list(kv_cache.shape)} and strides {list(kv_cache.stride())}",
        )


def _storage_elements(t: Tensor) -> int:
    return t.untyped_storage().nbytes() // t.element_size()


def _check_bounds(op: str, name: str, t: Tensor | None) -> None:
    if t is None or t.numel() == 0:
        return
    last = t.storage_offset() + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    if last >= _storage_elements(t):
        fail(
            ValueError,
            op,
            name,
            f"must stay within its storage of {_storage_elements(t)} elements, got shape {list(t.shape)} and "
            f"strides {list(t.stride())} at offset {t.storage_offset()}",
        )


def _check_nct_bounds(args: ScatterArgs, source: _Source) -> None:
    row = source.tensor.size(1) * source.tensor.size(2)
    if args.num_tokens == 0 or row == 0:
        return
    available = _storage_elements(source.tensor) - source.tensor.storage_offset()
    if source.offset + (args.num_tokens - 1) * source.stride + row > available:
        fail(
            ValueError,
            SCATTER,
            "strides",
            f"must keep {source.name} within the {available} elements of its storage from its data pointer, "
            f"got stride {source.stride} and offset {source.offset} for {args.num_tokens} tokens of {row} elements",
        )


def _check_not_expanded(op: str, name: str, t: Tensor | None) -> None:
    if t is None:
        return
    for size, stride in zip(t.shape, t.stride(), strict=True):
        if size > 1 and stride == 0:
            fail(
                ValueError,
                op,
                name,
                f"must not overlap itself, got shape {list(t.shape)} and strides {list(t.stride())}",
            )


def _extents(tensors: Sequence[_NamedTensor]) -> list[_Extent]:
    return [_extent(name, t) for name, t in tensors if t is not None]


def _extent(name: str, t: Tensor) -> _Extent:
    """Find the runs along the dense trailing dimensions, one for each index of the others."""
    if t.numel() == 0:
        return _Extent(name, int(t.storage_offset()), [], 0)
    run = 1
    outer = t.dim()
    while outer > 0 and (t.stride(outer - 1) == run or t.size(outer - 1) == 1):
        outer -= 1
        run *= t.size(outer)
    starts = []
    for index in itertools.product(*(range(size) for size in t.shape[:outer])):
        first = sum(i * stride for i, stride in zip(index, t.stride()[:outer], strict=True))
        starts.append(t.data_ptr() + first * t.element_size())
    return _Extent(name, int(t.storage_offset()), starts, run * t.element_size())


def _nct_extent(args: ScatterArgs, source: _Source) -> _Extent:
    """One run for each token that is read."""
    t = source.tensor
    row = t.size(1) * t.size(2)
    if args.num_tokens == 0 or row == 0:
        return _Extent(source.name, int(t.storage_offset()), [], 0)
    starts = [t.data_ptr() + (source.offset + i * source.stride) * t.element_size() for i in range(args.num_tokens)]
    return _Extent(source.name, int(t.storage_offset()), starts, row * t.element_size())


def _check_disjoint(op: str, written: list[_Extent], read: list[_Extent]) -> None:
    """No byte that is written is in another tensor: written against written, then each read one against the written."""
    pairs = list(itertools.combinations(written, 2)) + [(extent, other) for other in read for extent in written]
    for extent, other in pairs:
        if _share_a_byte(extent, other):
            fail(
                ValueError,
                op,
                other.name,
                f"must not share memory with {extent.name}, "
                f"got storage offsets {other.storage_offset} and {extent.storage_offset}",
            )


def _share_a_byte(a: _Extent, b: _Extent) -> bool:
    """Walk all runs of both by address: a run that begins before the other tensor's last run has ended meets it."""
    runs = [(start, 0, start + a.run_bytes) for start in a.starts]
    runs += [(start, 1, start + b.run_bytes) for start in b.starts]
    reached = [0, 0]  # how far the runs of each tensor have got
    for start, owner, end in sorted(runs):
        if start < reached[1 - owner]:
            return True
        reached[owner] = max(reached[owner], end)
    return False


# ---------------------------------------------------------------------------------------------------------------------


def _bits(t: Tensor) -> Tensor:
    """View the same memory as integers: nothing here should depend on how torch copies a NaN."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])
