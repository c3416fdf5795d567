"""The operators as typed Python functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pacache_torch import _library
from pacache_torch._rules import PACKED_LAYOUTS

# How to allocate an output beside a cache that is no plain tensor, by its type.
new_output_for: dict[type, Callable[[Any, Sequence[int]], Tensor]] = {}

_scatter_pa_kv_cache = _library.operator("scatter_pa_kv_cache")
_paged_cache_load = _library.operator("paged_cache_load")
_scatter_pa_kv_cache_packed = _library.operator("scatter_pa_kv_cache_packed")
_paged_cache_load_packed = _library.operator("paged_cache_load_packed")
# The same for eager calls with plain arguments; they answer whether they have made the call.
_call_scatter_pa_kv_cache = _library.eager_call("scatter_pa_kv_cache")
_call_paged_cache_load = _library.eager_call("paged_cache_load")
_call_scatter_pa_kv_cache_packed = _library.eager_call("scatter_pa_kv_cache_packed")
_call_paged_cache_load_packed = _library.eager_call("paged_cache_load_packed")


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
    """Write tokens into a paged KV cache, in place.

    A slot is ``block * block_size + position``. A negative slot is skipped in every mode (it marks padding).

    ======== ========== ============ ============================== =============================================
    scenario cache_mode scatter_mode key (value alike)              key_cache (value_cache alike)
    ======== ========== ============ ============================== =============================================
    1        PA_NZ      None         [T, num_heads, head_size]      [num_blocks, H*D/L, block_size, L] or
                                                                    [num_blocks, H, D/L, block_size, L]
    2        Norm       None, Nct    [T, num_heads, head_size]      [num_blocks, block_size, num_heads, head_size]
    3        Norm       None         [batch, seq_len, num_heads,    [num_blocks, block_size, 1, head_size]
                                     head_size]
    4        Norm       Alibi        [T, num_heads, head_size]      [num_blocks, block_size, 1, head_size]
    5        Norm       Rope, Omni   [T, num_heads, head_size]      [num_blocks, block_size, 1, head_size]
    6        Norm       None, Nct    as 2, value None               as 2, value_cache None
    7        Norm       NHSD         [T, num_heads, head_size]      [num_blocks, num_heads, block_size, head_size]
    ======== ========== ============ ============================== =============================================

    ``H`` is num_heads, ``D`` head_size, ``L`` 32 bytes worth of elements: 32, 16 or 8 for 1-, 2- and 4-byte dtypes.
    Scenarios are numbered as in CANN.

    What is written (``s = slot_mapping[i]``, flat rows of the cache by slot):

    * 1, 2, 6, 7: row ``s`` of every head gets ``key[i]``.
    * 4 (and 3 without offsets), per sequence and head: the last ``w = compress_lens`` tokens go to rows ``s..s+w-1``.
    * 5 Rope (and 3 with offsets), per sequence and head, window ``[o, o+w)``: the tokens before it, then one row that
      is the window's mean (float32 sum in token order, one division, ties to even), then the tokens behind it.
      ``o == -1``, ``w == 0`` or ``o == len`` copies the whole sequence.
    * 5 Omni: as Rope, without the mean row.

    Args:
        key: New keys. In scenarios 1, 2, 6, 7 the number of tokens ``T`` is ``slot_mapping.numel()``; more rows are
            padding and are ignored. Any token and head stride; the last dimension must be dense. Any 1-, 2- or
            4-byte dtype (float16, bfloat16, float32, int8, uint8, int16, uint16, int32, uint32, float8); the
            window mean takes float16, bfloat16 and float32.
        value: New values, or None together with ``value_cache`` (scenario 6). The head size may differ from key's in
            scenarios 1, 2, 3 and 7; the dtype may differ in scenario 1 only.
        key_cache: Written in place. Any block, token and head stride; the last dimension must be dense.
        value_cache: Written in place. ``num_blocks`` and ``block_size`` as ``key_cache``.
        slot_mapping: ``[T]``; scenario 3 ``[batch, num_heads]``, scenarios 4 and 5 ``[batch * num_heads]``: the
            first row of each head. int32 or int64, as every index tensor.
        compress_lens: Scenarios 3 to 5: the window ``w`` per sequence and head, shaped as ``slot_mapping``.
        compress_seq_offsets: Scenario 5, optional in 3: the first token ``o`` of the window, ``[batch * num_heads]``.
        seq_lens: Scenarios 3 to 5: tokens per sequence, ``[batch]``; their sum is ``T`` in 4 and 5.
        cache_mode: ``"Norm"`` or ``"PA_NZ"``. Never guessed from a shape.
        scatter_mode: ``"None"``, ``"Nct"``, ``"Alibi"``, ``"Rope"``, ``"Omni"`` or ``"NHSD"``.
        strides: Nct only: ``[key, value]`` elements between two tokens, in place of the tensors' own strides; the
            ``num_heads * head_size`` elements of a token are contiguous. Checked against the storage.
        offsets: Nct only: ``[key, value]`` elements from the data pointer to the first token; default ``[0, 0]``.

    Mutates:
        ``key_cache`` and ``value_cache``. Nothing is returned, nothing is ever copied to make it contiguous. On an
        error nothing has been written.

    Raises:
        ValueError: a shape, mode, stride, length or memory rule does not hold.
        TypeError: a dtype rule does not hold.
        IndexError: a slot lies behind the end of the cache.
        NotImplementedError: the device has no kernel for the call.
        RuntimeError: an input requires grad while grad mode is on (the operator has no backward).

    Note:
        Duplicate slots: on the CPU the last token wins under ``torch.use_deterministic_algorithms(True)`` and when the
        call runs on one thread; otherwise, and on the NPU, it is unspecified which one does. Everything else that is
        left open stands in docs/reliability.md, "Determinism".

        Values of index tensors are checked on the CPU always, on the NPU with ``PACACHE_CHECK=1`` (it waits for the
        device). The device kernels of Rope and NHSD do not skip negative slots: do not pass any there (with
        ``PACACHE_CHECK=1`` they are refused). On the NPU caches must be dense; see ``pacache_torch.capabilities``.

        A window mean that is not a number is some NaN; every other result is the same bits everywhere. Source of the
        semantics: CANN's ``aclnnScatterPaKvCache`` and its A2/A3 kernels.

    Example:
        >>> key_cache = torch.zeros(4, 2, 1, 3)              # 4 blocks of 2 tokens, 1 head of size 3
        >>> value_cache = torch.zeros(4, 2, 1, 3)
        >>> key = torch.tensor([[[1., 2., 3.]], [[4., 5., 6.]], [[7., 8., 9.]]])
        >>> slots = torch.tensor([5, -1, 0])                 # block 2 position 1; skipped; block 0 position 0
        >>> scatter_pa_kv_cache(key, key * 10, key_cache, value_cache, slots)
        >>> key_cache[2, 1, 0], value_cache[0, 0, 0]
        (tensor([1., 2., 3.]), tensor([70., 80., 90.]))
    """
    if not torch.compiler.is_dynamo_compiling() and _call_scatter_pa_kv_cache(
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
    ):
        return
    # torch.ops parses for about 0.2 us per argument by name: only what differs from the schema's defaults.
    given: dict[str, Any] = {}
    if cache_mode != "Norm":
        given["cache_mode"] = cache_mode
    if scatter_mode != "None":
        given["scatter_mode"] = scatter_mode
    if compress_lens is not None:
        given["compress_lens"] = compress_lens
    if compress_seq_offsets is not None:
        given["compress_seq_offsets"] = compress_seq_offsets
    if seq_lens is not None:
        given["seq_lens"] = seq_lens
    if strides is not None:
        given["strides"] = strides
    if offsets is not None:
        given["offsets"] = offsets
    _scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_mapping, **given)


def paged_cache_load(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    seq_starts: Tensor | None = None,
    cache_mode: str = "Norm",
    is_seq_lens_cumsum: bool = False,
    num_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Read the contexts of a batch out of a paged KV cache into dense rows.

    Sequence ``b`` has ``n[b]`` tokens; token ``j`` lies in block ``block_tables[b, c0[b] + j // block_size]`` at
    position ``j % block_size`` and goes to output row ``r[b] + j``::

        n[b] = context_lens[b]                        r[b] = context_lens[:b].sum()
        n[b] = context_lens[b+1] - context_lens[b]    r[b] = context_lens[b]          with is_seq_lens_cumsum
        c0[b] = seq_starts[b] // block_size           0 without seq_starts

    Rows that no sequence covers keep their contents.

    Args:
        key_cache: Norm ``[num_blocks, block_size, num_heads, key_head_size]``; PA_NZ
            ``[num_blocks, num_heads*key_head_size/L, block_size, L]`` or
            ``[num_blocks, num_heads, key_head_size/L, block_size, L]`` with ``L`` = 32 bytes worth of elements. Any
            1-, 2- or 4-byte dtype; any block, token and head stride with a dense last dimension.
        value_cache: As ``key_cache``; head size may differ, in PA_NZ dtype and number of heads too.
        block_tables: ``[batch, max_num_blocks]``, int32 or int64. Only the entries in use are read.
        context_lens: ``[batch]`` token counts, or ``[batch + 1]`` row boundaries with ``is_seq_lens_cumsum``; int32 or
            int64. The first boundary need not be 0.
        key: Output, Norm ``[num_tokens, num_heads, key_head_size]``, PA_NZ ``[num_tokens, num_heads * key_head_size]``
            or the same memory as 3-D; dtype of ``key_cache``. Allocated when both outputs are None.
        value: Output, alike.
        seq_starts: Norm only: ``[batch]`` first token of each sequence, in tokens. Only whole blocks are skipped:
            the part below a multiple of ``block_size`` is dropped, as on the device.
        cache_mode: ``"Norm"`` or ``"PA_NZ"``.
        is_seq_lens_cumsum: Norm only: ``context_lens`` holds row boundaries.
        num_tokens: Rows to allocate when no outputs are given. Without it they are counted from ``context_lens``,
            which off the CPU is a device synchronisation and under torch.compile a graph break. Rows that no
            sequence covers are uninitialised in outputs allocated here.

    Mutates:
        ``key`` and ``value``, when given. On an error nothing has been written.

    Returns:
        ``(key, value)``: the outputs given, or new ones (PA_NZ: 2-D).

    Raises:
        ValueError: a shape, mode, stride, length or memory rule does not hold; too few output rows or table columns.
        TypeError: a dtype rule does not hold.
        IndexError: a block id in use is outside ``[0, num_blocks)``.
        NotImplementedError: the device has no kernel for the call.
        RuntimeError: an input requires grad while grad mode is on (the operator has no backward).

    Note:
        An output allocated per call costs page faults; a serving loop gives its own. Source of the semantics: ATB's
        ``AtbPagedCacheLoad`` and its A2/A3 kernels.

    Example:
        >>> cache = torch.arange(8.).reshape(4, 2, 1, 1)     # 4 blocks of 2 tokens, 1 head of size 1
        >>> tables = torch.tensor([[2, 0], [1, 3]])
        >>> lens = torch.tensor([3, 1])                      # 3 tokens from blocks 2, 0; 1 token from block 1
        >>> key, value = paged_cache_load(cache, cache + 100, tables, lens)
        >>> key.flatten(), value.flatten()
        (tensor([4., 5., 0., 2.]), tensor([104., 105., 100., 102.]))
    """
    if key is None or value is None:
        if key is not None or value is not None:
            only = "value" if key is None else "key"
            raise ValueError(f"paged_cache_load: key and value must be given together, got only {only}")
        num_tokens = _rows_to_allocate("paged_cache_load", context_lens, is_seq_lens_cumsum, num_tokens)
        key, value = _allocate_outputs(key_cache, value_cache, cache_mode, num_tokens)
    elif num_tokens is not None:
        raise ValueError(f"paged_cache_load: num_tokens must be None when key and value are given, got {num_tokens}")
    if not torch.compiler.is_dynamo_compiling() and _call_paged_cache_load(
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        key,
        value,
        seq_starts,
        cache_mode,
        is_seq_lens_cumsum,
    ):
        return key, value
    given: dict[str, Any] = {}
    if seq_starts is not None:
        given["seq_starts"] = seq_starts
    if cache_mode != "Norm":
        given["cache_mode"] = cache_mode
    if is_seq_lens_cumsum:
        given["is_seq_lens_cumsum"] = is_seq_lens_cumsum
    _paged_cache_load(key_cache, value_cache, block_tables, context_lens, key, value, **given)
    return key, value


def scatter_pa_kv_cache_packed(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, kv_layout: str
) -> None:
    """Write tokens into a paged cache that holds keys and values in one tensor, in place.

    The same as :func:`scatter_pa_kv_cache` (scenario 2) into the two halves of ``kv_cache``. Inside a compiled graph it
    is the safe form: the halves would be two views of one storage, and a view whose storage offset depends on a
    dynamic size is written at the wrong place by some releases of torch (``docs/torch_compile.md``).

    ========= ================================================== ==========================================
    kv_layout kv_cache                                           key at ``(block, position)``
    ========= ================================================== ==========================================
    2BNHD     [2, num_blocks, block_size, num_heads, head_size]  ``kv_cache[0, block, position]``
    B2NHD     [num_blocks, 2, block_size, num_heads, head_size]  ``kv_cache[block, 0, position]``
    BHNC      [num_blocks, num_heads, block_size, C]             ``kv_cache[block, :, position, :key_size]``
    BNHC      [num_blocks, block_size, num_heads, C]             ``kv_cache[block, position, :, :key_size]``
    ========= ================================================== ==========================================

    ``C`` is key's and value's head_size together, key's elements first. BHNC is vLLM's present form. The layout names
    the dimensions, not the memory: any strides will do as long as the last dimension is dense.

    Args:
        key: ``[T, num_heads, head_size]``; the first ``slot_mapping.numel()`` rows are written. Any token and head
            stride; the last dimension must be dense. Any 1-, 2- or 4-byte dtype.
        value: ``[T, num_heads, head_size]``, dtype of ``key``. In BHNC and BNHC its head_size may differ.
        kv_cache: Written in place; dtype of ``key``.
        slot_mapping: ``[T]``, ``block * block_size + position``; negative: skip. int32 or int64.
        kv_layout: ``"2BNHD"``, ``"B2NHD"``, ``"BHNC"`` or ``"BNHC"``. Never guessed from a shape.

    Mutates:
        ``kv_cache``. Nothing is returned. On an error nothing has been written.

    Raises:
        ValueError: a shape, layout, stride or memory rule does not hold.
        TypeError: a dtype rule does not hold.
        IndexError: a slot lies behind the end of the cache.
        NotImplementedError: the device has no kernel for the call.
        RuntimeError: an input requires grad while grad mode is on (the operator has no backward).

    Note:
        The NPU takes dense key and value caches, so there a contiguous ``kv_cache`` must be 2BNHD, or B2NHD from CANN
        9.1 on; other layouts are refused, not copied, unless their strides make both halves dense. Slots and duplicates
        as in :func:`scatter_pa_kv_cache`.

    Example:
        >>> kv_cache = torch.zeros(4, 1, 2, 6)               # BHNC: 4 blocks of 2 tokens, 1 head, 3 + 3 elements
        >>> key = torch.tensor([[[1., 2., 3.]], [[4., 5., 6.]]])
        >>> scatter_pa_kv_cache_packed(key, key * 10, kv_cache, torch.tensor([5, 0]), kv_layout="BHNC")
        >>> kv_cache[2, 0, 1]                                # slot 5: block 2, position 1
        tensor([ 1.,  2.,  3., 10., 20., 30.])
    """
    if not torch.compiler.is_dynamo_compiling() and _call_scatter_pa_kv_cache_packed(
        key, value, kv_cache, slot_mapping, kv_layout
    ):
        return
    _scatter_pa_kv_cache_packed(key, value, kv_cache, slot_mapping, kv_layout=kv_layout)


def paged_cache_load_packed(
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    kv_layout: str,
    seq_starts: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
    num_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Read the contexts of a batch out of a paged cache that holds keys and values in one tensor.

    The same as :func:`paged_cache_load` with ``cache_mode="Norm"`` from the two halves of ``kv_cache``, which is laid
    out as :func:`scatter_pa_kv_cache_packed` says.

    Args:
        kv_cache: As ``kv_layout`` has it. Any strides with a dense last dimension; any 1-, 2- or 4-byte dtype.
        block_tables: ``[batch, max_num_blocks]``, int32 or int64. Only the entries in use are read.
        context_lens: ``[batch]`` token counts, or ``[batch + 1]`` row boundaries with ``is_seq_lens_cumsum``.
        key: Output ``[num_tokens, num_heads, head_size]``, dtype of ``kv_cache``. Allocated when both outputs are
            None, in BHNC and BNHC with half of ``C``; where key and value differ in head size, give them.
        value: Output, alike; in BHNC and BNHC the head sizes of key and value sum to ``C``.
        kv_layout: ``"2BNHD"``, ``"B2NHD"``, ``"BHNC"`` or ``"BNHC"``.
        seq_starts: ``[batch]`` first token of each sequence; the part below a multiple of ``block_size`` is dropped.
        is_seq_lens_cumsum: ``context_lens`` holds row boundaries.
        num_tokens: Rows to allocate when no outputs are given; see :func:`paged_cache_load`.

    Mutates:
        ``key`` and ``value``, when given. On an error nothing has been written.

    Returns:
        ``(key, value)``: the outputs given, or new ones.

    Raises:
        ValueError: a shape, layout, stride, length or memory rule does not hold; too few output rows or table columns.
        TypeError: a dtype rule does not hold.
        IndexError: a block id in use is outside ``[0, num_blocks)``.
        NotImplementedError: the device has no kernel for the call. The NPU reads dense key and value caches: a
            contiguous ``kv_cache`` must be 2BNHD there.
        RuntimeError: an input requires grad while grad mode is on (the operator has no backward).

    Example:
        >>> kv_cache = torch.arange(16.).reshape(2, 4, 2, 1, 1)  # 2BNHD: 4 blocks of 2 tokens, 1 head of size 1
        >>> tables, lens = torch.tensor([[2, 0], [1, 3]]), torch.tensor([3, 1])
        >>> key, value = paged_cache_load_packed(kv_cache, tables, lens, kv_layout="2BNHD")
        >>> key.flatten(), value.flatten()
        (tensor([4., 5., 0., 2.]), tensor([12., 13.,  8., 10.]))
    """
    if key is None or value is None:
        if key is not None or value is not None:
            only = "value" if key is None else "key"
            raise ValueError(f"paged_cache_load_packed: key and value must be given together, got only {only}")
        num_tokens = _rows_to_allocate("paged_cache_load_packed", context_lens, is_seq_lens_cumsum, num_tokens)
        key, value = _allocate_packed_outputs(kv_cache, kv_layout, num_tokens)
    elif num_tokens is not None:
        raise ValueError(
            f"paged_cache_load_packed: num_tokens must be None when key and value are given, got {num_tokens}"
        )
    if not torch.compiler.is_dynamo_compiling() and _call_paged_cache_load_packed(
        kv_cache, block_tables, context_lens, key, value, kv_layout, seq_starts, is_seq_lens_cumsum
    ):
        return key, value
    given: dict[str, Any] = {"kv_layout": kv_layout}
    if seq_starts is not None:
        given["seq_starts"] = seq_starts
    if is_seq_lens_cumsum:
        given["is_seq_lens_cumsum"] = is_seq_lens_cumsum
    _paged_cache_load_packed(kv_cache, block_tables, context_lens, key, value, **given)
    return key, value


def _rows_to_allocate(op: str, context_lens: Tensor, is_seq_lens_cumsum: bool, num_tokens: int | None) -> int:
    """The caller's number, or as many rows as the lengths say."""
    if num_tokens is None:
        if context_lens.dim() != 1 or context_lens.numel() == 0:
            return 0
        return max(int(context_lens[-1] if is_seq_lens_cumsum else context_lens.sum()), 0)
    if num_tokens < 0:
        raise ValueError(f"{op}: num_tokens must not be negative, got {num_tokens}")
    return num_tokens


def _allocate_outputs(
    key_cache: Tensor, value_cache: Tensor, cache_mode: str, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Outputs of the shapes that the caches ask for; a cache of a wrong rank is left for the operator to refuse."""

    def allocate(cache: Tensor) -> Tensor:
        if cache_mode == "PA_NZ":
            width = (
                cache.size(1) * cache.size(-1) * (cache.size(2) if cache.dim() == 5 else 1) if cache.dim() > 1 else 0
            )
            return _new_output(cache, (num_tokens, width))
        return _new_output(cache, (num_tokens, *cache.shape[2:]))

    return allocate(key_cache), allocate(value_cache)


def _allocate_packed_outputs(kv_cache: Tensor, kv_layout: str, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Outputs of the shapes that the cache asks for; one of a wrong rank is left for the operator to refuse."""
    layout = PACKED_LAYOUTS.get(kv_layout)
    if layout is None or kv_cache.dim() != layout.rank:
        heads = head_size = 0
    else:
        heads, head_size = kv_cache.size(layout.head), kv_cache.size(-1)
        if layout.half is None:
            head_size //= 2
    shape = (num_tokens, heads, head_size)
    return _new_output(kv_cache, shape), _new_output(kv_cache, shape)


def _new_output(cache: Tensor, shape: Sequence[int]) -> Tensor:
    """Uninitialised memory for what is read from ``cache``."""
    if new_output_for and type(cache) in new_output_for:
        return new_output_for[type(cache)](cache, shape)
    return torch.empty(shape, dtype=cache.dtype, device=cache.device)
