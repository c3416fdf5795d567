"""vLLM's and vllm-ascend's functions on a paged KV cache: the same signatures, on every device.

They take the place of ``vllm._custom_ops.*`` (vLLM 0.32) and of vllm-ascend's ``DeviceOperator``. Caches are read and
written where they are, whatever their strides: NHD and HND views, K and V packed into one allocation. Nothing here
quantises: ``kv_cache_dtype`` is ``"auto"`` or the dtype that keys and cache have, and the scales are not looked at.

The functions call ``torch.ops.pacache.scatter_pa_kv_cache`` and ``torch.ops.pacache.paged_cache_load``, whose rules
hold and whose names stand in the errors. vLLM itself is not needed. ``docs/vllm.md`` has the examples together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pacache_torch import layouts, ops
from pacache_torch._rules import dtype_name

__all__ = ["DeviceOperator", "concat_and_cache_mla", "cp_gather_cache", "reshape_and_cache", "reshape_and_cache_flash"]

# What vLLM calls a cache that holds what it is given; None is the dtype of the keys.
_UNQUANTISED: dict[str, torch.dtype | None] = {
    "auto": None,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float": torch.float32,
}


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Write tokens into a paged KV cache, in place.

    Args:
        key: ``[num_tokens, num_heads, head_size]``, any token and head stride. Rows beyond ``slot_mapping`` are
            padding.
        value: As ``key``; the head size may differ.
        key_cache: Written. ``[num_blocks, block_size, num_heads, head_size]``, any strides with a dense last
            dimension.
        value_cache: Written, alike.
        slot_mapping: ``[T]``, int64 or int32: block * block_size + position; a negative slot is skipped.
        kv_cache_dtype: ``"auto"``, or ``"float16"``, ``"bfloat16"``, ``"float32"`` as the caches are.
        k_scale: Not looked at.
        v_scale: Not looked at.

    Raises:
        NotImplementedError: a cache that needs quantising; on the NPU a cache that is not dense.
        ValueError: a shape or memory rule does not hold.
        TypeError: a dtype rule does not hold.
        IndexError: a slot lies behind the end of the cache.

    Example:
        >>> kv_cache = torch.zeros(4, 2, 16, 2 * 8)  # as vLLM hands it over: blocks, heads, tokens, K beside V
        >>> key_cache, value_cache = kv_cache.transpose(1, 2).split(8, dim=-1)
        >>> key, scale = torch.ones(3, 2, 8), torch.ones(1)
        >>> slots = torch.tensor([17, -1, 63])  # block 1 position 1; padding; block 3 position 15
        >>> reshape_and_cache_flash(key, key * 2, key_cache, value_cache, slots, "auto", scale, scale)
        >>> int(kv_cache[1, :, 1].sum()), int(kv_cache.sum())  # 2 heads of 8 times 1 + 2; twice that in all
        (48, 96)
    """
    op = "reshape_and_cache_flash"
    _check_unquantised(
        op, kv_cache_dtype, ("key", key, "key_cache", key_cache), ("value", value, "value_cache", value_cache)
    )
    ops.scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_mapping)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Write tokens into a paged KV cache whose heads are cut into units, in place.

    vLLM's own form of this cache cuts the keys into units of 16 bytes and lays the values out across the tokens,
    ``[num_blocks, num_heads, head_size, block_size]``: no layout of these operators. What they have is both caches in
    units of 32 bytes, CANN's NZ.

    Args:
        key: ``[num_tokens, num_heads, head_size]``, any token and head stride. Rows beyond ``slot_mapping`` are
            padding.
        value: As ``key``; the head size may differ.
        key_cache: Written. ``[num_blocks, num_heads, head_size / x, block_size, x]`` with ``x`` = 32 bytes of
            elements.
        value_cache: Written, alike.
        slot_mapping: ``[T]``, int64 or int32: block * block_size + position; a negative slot is skipped.
        kv_cache_dtype: ``"auto"``, or ``"float16"``, ``"bfloat16"``, ``"float32"`` as the caches are.
        k_scale: Not looked at.
        v_scale: Not looked at.

    Raises:
        NotImplementedError: a cache of another layout, or one that needs quantising.
        ValueError: a shape or memory rule does not hold.
        TypeError: a dtype rule does not hold.
        IndexError: a slot lies behind the end of the cache.

    Example:
        >>> key_cache, value_cache = torch.zeros(4, 2, 3, 16, 8), torch.zeros(4, 2, 3, 16, 8)  # 2 float32 heads of 24
        >>> key, scale = torch.ones(1, 2, 24), torch.ones(1)
        >>> reshape_and_cache(key, key, key_cache, value_cache, torch.tensor([17]), "auto", scale, scale)
        >>> int(key_cache[1, :, :, 1].sum()), int(key_cache.sum())
        (48, 48)
    """
    op = "reshape_and_cache"
    _check_unquantised(
        op, kv_cache_dtype, ("key", key, "key_cache", key_cache), ("value", value, "value_cache", value_cache)
    )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        unit = layouts.nz_unit(cache.dtype)
        if cache.dim() != 5 or cache.size(4) != unit:
            raise NotImplementedError(
                f"{op}: {name} must be [num_blocks, num_heads, head_size / {unit}, block_size, {unit}] (no other "
                f"layout is written; reshape_and_cache_flash takes [num_blocks, block_size, num_heads, head_size]), "
                f"got {list(cache.shape)}"
            )
    ops.scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_mapping, cache_mode="PA_NZ")


def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor,
) -> None:
    """Write the latent and the rotated part of MLA's tokens beside each other into one cache, in place.

    The two parts of a token are joined first (a copy of the tokens, not of the cache).

    Args:
        kv_c: ``[num_tokens, kv_lora_rank]``. Rows beyond ``slot_mapping`` are padding.
        k_pe: ``[num_tokens, pe_dim]``, dtype of ``kv_c``.
        kv_cache: Written. ``[num_blocks, block_size, kv_lora_rank + pe_dim]``, any strides with a dense last dimension.
        slot_mapping: ``[T]``, int64 or int32: block * block_size + position; a negative slot is skipped.
        kv_cache_dtype: ``"auto"``, or ``"float16"``, ``"bfloat16"``, ``"float32"`` as the cache is.
        scale: Not looked at.

    Raises:
        NotImplementedError: a cache that needs quantising; on the NPU a cache that is not dense.
        ValueError: a shape or memory rule does not hold.
        TypeError: a dtype rule does not hold.
        IndexError: a slot lies behind the end of the cache.

    Example:
        >>> kv_cache = torch.zeros(4, 16, 6)  # a latent of 4 and a rotated part of 2
        >>> kv_c, k_pe = torch.tensor([[1., 2., 3., 4.]]), torch.tensor([[5., 6.]])
        >>> concat_and_cache_mla(kv_c, k_pe, kv_cache, torch.tensor([17]), "auto", torch.ones(1))
        >>> kv_cache[1, 1]
        tensor([1., 2., 3., 4., 5., 6.])
    """
    op = "concat_and_cache_mla"
    _check_unquantised(op, kv_cache_dtype, ("kv_c", kv_c, "kv_cache", kv_cache), ("k_pe", k_pe, "kv_cache", kv_cache))
    for name, part, shape in (("kv_c", kv_c, "kv_lora_rank"), ("k_pe", k_pe, "pe_dim")):
        if part.dim() != 2:
            raise ValueError(f"{op}: {name} must be [num_tokens, {shape}], got {list(part.shape)}")
    if kv_c.dtype != k_pe.dtype:
        raise TypeError(f"{op}: k_pe must have dtype {dtype_name(kv_c.dtype)} as kv_c, got {dtype_name(k_pe.dtype)}")
    width = kv_c.size(1) + k_pe.size(1)
    if kv_cache.dim() != 3 or kv_cache.size(2) != width:
        raise ValueError(
            f"{op}: kv_cache must be [num_blocks, block_size, kv_lora_rank + pe_dim] with kv_lora_rank + pe_dim "
            f"{width}, got {list(kv_cache.shape)}"
        )
    tokens = slot_mapping.numel()
    for name, part in (("kv_c", kv_c), ("k_pe", k_pe)):
        if part.size(0) < tokens:
            raise ValueError(
                f"{op}: {name} must have at least the {tokens} tokens of slot_mapping, got {list(part.shape)}"
            )
    joined = torch.cat((kv_c[:tokens], k_pe[:tokens]), dim=1)
    ops.scatter_pa_kv_cache(joined.unsqueeze(1), None, kv_cache.unsqueeze(2), None, slot_mapping)


def cp_gather_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
) -> None:
    """Read the contexts of a batch out of one paged cache into dense rows.

    Args:
        src_cache: ``[num_blocks, block_size, entry_size]`` or ``[num_blocks, block_size, num_heads, head_size]``, any
            strides with a dense last dimension.
        dst: Written. ``[num_tokens, entry_size]`` or ``[num_tokens, num_heads, head_size]``, dtype of ``src_cache``.
            Rows that no sequence covers keep their contents.
        block_table: ``[batch, max_num_blocks]``, int32 or int64; the first ``batch_size`` rows are read.
        cu_seq_lens: ``[batch + 1]`` row boundaries, int32 or int64: sequence ``b`` goes to rows
            ``cu_seq_lens[b]`` to ``cu_seq_lens[b + 1]``.
        batch_size: Sequences to read.
        seq_starts: ``[batch]`` first token of each sequence, int32 or int64. Unlike that of ``paged_cache_load`` it
            need not be a multiple of ``block_size``. With it the cache is read token by token, and an error counts
            slots where it says blocks.

    Raises:
        NotImplementedError: ``seq_starts`` with a cache that has gaps between its blocks; on the NPU ``seq_starts``, or
            a cache that is not dense.
        ValueError: a shape or memory rule does not hold; too few output rows.
        TypeError: a dtype rule does not hold.
        IndexError: a block id in use is outside ``[0, num_blocks)``; too few table columns.

    Example:
        >>> cache = torch.arange(8.).view(4, 2, 1)  # 4 blocks of 2 tokens, entries of 1
        >>> table, boundaries = torch.tensor([[2, 0], [1, 3]]), torch.tensor([0, 3, 4])
        >>> dst = torch.zeros(5, 1)
        >>> cp_gather_cache(cache, dst, table, boundaries, 2)  # 3 tokens from blocks 2 and 0, 1 from block 1
        >>> dst.flatten()
        tensor([4., 5., 0., 2., 0.])
        >>> cp_gather_cache(cache, dst, table, boundaries, 2, torch.tensor([1, 2]))  # from token 1, and from token 2
        >>> dst.flatten()
        tensor([5., 0., 1., 6., 0.])
    """
    op = "cp_gather_cache"
    if src_cache.dim() not in (3, 4):
        raise ValueError(
            f"{op}: src_cache must be [num_blocks, block_size, entry_size] or "
            f"[num_blocks, block_size, num_heads, head_size], got {list(src_cache.shape)}"
        )
    if dst.dim() != src_cache.dim() - 1:
        entry = ", ".join(str(size) for size in src_cache.shape[2:])
        raise ValueError(f"{op}: dst must be [num_tokens, {entry}] as src_cache, got {list(dst.shape)}")
    for name, t, rows in (
        ("block_table", block_table, batch_size),
        ("cu_seq_lens", cu_seq_lens, batch_size + 1),
        ("seq_starts", seq_starts, batch_size),
    ):
        if t is not None and (t.dim() == 0 or t.size(0) < rows):
            raise ValueError(
                f"{op}: {name} must have at least {rows} rows for batch_size {batch_size}, got {list(t.shape)}"
            )
    block_table, cu_seq_lens = block_table[:batch_size], cu_seq_lens[: batch_size + 1]
    if src_cache.dim() == 3:
        src_cache, dst = src_cache.unsqueeze(2), dst.unsqueeze(1)
    on_npu = src_cache.device.type == "npu"
    if seq_starts is not None and batch_size == 0:
        seq_starts = None
    if seq_starts is not None:
        if on_npu:
            raise NotImplementedError(
                f"{op}: seq_starts must be None on the NPU, which begins at whole blocks only (paged_cache_load and "
                f"DeviceOperator.kv_cache_load take such), got a tensor of shape {list(seq_starts.shape)}"
            )
        # Every token a block: then any token may be the first. Sequence b has its slots from column cu_seq_lens[b] on.
        slots = _slots_of_rows(dst.size(0), block_table, cu_seq_lens, seq_starts[:batch_size], src_cache.size(1))
        src_cache = _blocks_of_one_token(op, src_cache)
        block_table, seq_starts = slots.expand(batch_size, -1), cu_seq_lens[:-1]
    # paged_cache_load always moves two caches. On the CPU the second has no elements; CANN refuses such.
    second, rest = (src_cache, torch.empty_like(dst)) if on_npu else (src_cache[..., :0], dst[..., :0])
    ops.paged_cache_load(
        src_cache, second, block_table, cu_seq_lens, dst, rest, seq_starts=seq_starts, is_seq_lens_cumsum=True
    )


class DeviceOperator:
    """vllm-ascend's ``vllm_ascend.device.device_op.DeviceOperator``, of which these two touch the paged KV cache."""

    @staticmethod
    def reshape_and_cache(
        key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write tokens into a paged KV cache, in place.

        Args:
            key: ``[num_tokens, num_heads, head_size]``, any token and head stride.
            value: As ``key``; the head size may differ (MLA: the latent as key, the rotated part as value).
            key_cache: Written. ``[num_blocks, block_size, num_heads, head_size]``.
            value_cache: Written, alike.
            slot_mapping: ``[T]``, int32 or int64: block * block_size + position; a negative slot is skipped.

        Raises:
            As ``scatter_pa_kv_cache``.

        Example:
            >>> key_cache, value_cache = torch.zeros(4, 16, 1, 4), torch.zeros(4, 16, 1, 2)
            >>> kv_c, k_pe = torch.ones(1, 1, 4), torch.ones(1, 1, 2)
            >>> DeviceOperator.reshape_and_cache(kv_c, k_pe, key_cache, value_cache, torch.tensor([17]))
            >>> value_cache[1, 1]
            tensor([[1., 1.]])
        """
        ops.scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_mapping)

    @staticmethod
    def kv_cache_load(
        cache_kv_c: Tensor,
        cache_k_pe: Tensor,
        block_table: Tensor,
        context_seq_len_npu: Tensor,
        seq_starts: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> None:
        """Read the contexts of a batch out of a paged KV cache into dense rows.

        Args:
            cache_kv_c: ``[num_blocks, block_size, num_heads, head_size]``.
            cache_k_pe: As ``cache_kv_c``; the head size may differ.
            block_table: ``[batch, max_num_blocks]``, int32 or int64.
            context_seq_len_npu: ``[batch]`` token counts, int32 or int64, on the device of the caches.
            seq_starts: ``[batch]`` first token of each sequence, in tokens; the part below a multiple of ``block_size``
                is dropped.
            key: Written. ``[num_tokens, num_heads, head_size]`` of ``cache_kv_c``.
            value: Written, as ``cache_k_pe``.

        Raises:
            As ``paged_cache_load``.

        Example:
            >>> cache = torch.arange(8.).view(4, 2, 1, 1)
            >>> key, value = torch.zeros(3, 1, 1), torch.zeros(3, 1, 1)
            >>> table, lens, starts = torch.tensor([[2, 0, 3]]), torch.tensor([3]), torch.tensor([2])
            >>> DeviceOperator.kv_cache_load(cache, cache + 100, table, lens, starts, key=key, value=value)
            >>> key.flatten()  # the 3 tokens behind the first block: of blocks 0 and 3
            tensor([0., 1., 6.])
        """
        ops.paged_cache_load(
            cache_kv_c, cache_k_pe, block_table, context_seq_len_npu, key, value, seq_starts=seq_starts
        )


def _check_unquantised(op: str, kv_cache_dtype: str, *pairs: tuple[str, Tensor, str, Tensor]) -> None:
    """Refuse a cache that cannot hold the tokens as they are; any other mismatch is left for the operator to refuse."""
    if kv_cache_dtype not in _UNQUANTISED:
        raise NotImplementedError(
            f"{op}: kv_cache_dtype must be 'auto', 'float16', 'bfloat16' or 'float32' (tokens are stored as they are, "
            f"never quantised), got '{kv_cache_dtype}'"
        )
    named = _UNQUANTISED[kv_cache_dtype]
    for name, tokens, cache_name, cache in pairs:
        if cache.dtype != tokens.dtype and cache.dtype.itemsize == 1:
            raise NotImplementedError(
                f"{op}: {cache_name} must have dtype {dtype_name(tokens.dtype)} as {name} (tokens are stored as they "
                f"are, never quantised), got {dtype_name(cache.dtype)}"
            )
        if named is not None and cache.dtype != named:
            raise TypeError(
                f"{op}: {cache_name} must have dtype {dtype_name(named)} as kv_cache_dtype '{kv_cache_dtype}' says, "
                f"got {dtype_name(cache.dtype)}"
            )


def _slots_of_rows(
    num_rows: int, block_table: Tensor, cu_seq_lens: Tensor, seq_starts: Tensor, block_size: int
) -> Tensor:
    """The slot that each output row is read from, ``[num_rows]``; -1 for rows that no sequence covers."""
    rows = torch.arange(num_rows, dtype=cu_seq_lens.dtype, device=cu_seq_lens.device)
    sequences = torch.searchsorted(cu_seq_lens, rows, right=True) - 1
    covered = (sequences >= 0) & (sequences < seq_starts.numel())
    known = torch.where(covered, sequences, 0)
    positions = torch.where(covered, rows - cu_seq_lens[known] + seq_starts[known], -1)
    return layouts.slot_mapping(block_table, known, positions, block_size)


def _blocks_of_one_token(op: str, cache: Tensor) -> Tensor:
    """The same memory with every token a block of its own, so that a block id is a slot."""
    num_blocks, block_size = cache.shape[:2]
    if num_blocks > 1 and block_size > 1 and cache.stride(0) != block_size * cache.stride(1):
        raise NotImplementedError(
            f"{op}: src_cache must have stride(0) == block_size * stride(1) with seq_starts (no gaps between blocks), "
            f"got shape {list(cache.shape)} and strides {list(cache.stride())}"
        )
    return cache.flatten(0, 1).unsqueeze(1)
