"""torch_npu's names for the two operators: the same signatures, on every device.

Model code changes one import, ``from pacache_torch.integrations import torch_npu``, or none at all::

    with pacache_torch.integrations.torch_npu.provide():
        import model  # which says "import torch_npu"; without one this module's functions stand there

Signatures, defaults and argument names are those of torch_npu 2.13.0. The functions call
``torch.ops.pacache.scatter_pa_kv_cache`` and ``torch.ops.pacache.paged_cache_load``, whose rules hold and whose names
stand in the errors. ``docs/torch_npu.md`` lists what differs from torch_npu on an NPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

from torch import Tensor

from pacache_torch import _library, ops

__all__ = [
    "_npu_reshape_and_cache",
    "_npu_reshape_and_cache_siso",
    "atb",
    "npu_gather_pa_kv_cache",
    "npu_gather_pa_kv_cache_functional",
    "npu_scatter_pa_kv_cache",
    "npu_scatter_pa_kv_cache_functional",
    "provide",
]


def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Write tokens into a paged KV cache, in place.

    Args:
        key: ``[T, num_heads, head_size]``, or ``[batch, seq_len, num_heads, head_size]`` with ``compress_lens``.
        value: As ``key``; the head size may differ.
        key_cache: Written. ``"PA_NZ"``: ``[num_blocks, num_heads * head_size / L, block_size, L]``, ``L`` being 32
            bytes of elements; otherwise ``[num_blocks, block_size, num_heads, head_size]``. Any 1-, 2- or 4-byte dtype.
        value_cache: Written, alike.
        slot_mapping: ``[T]``, int32 or int64: block * block_size + position; a negative slot is skipped. With a 4-D key
            ``[batch, num_heads]``: the first row of each head.
        compress_lens: ``[batch, num_heads]`` with a 4-D key. Has no meaning with a 3-D key, as the two below.
        compress_seq_offsets: ``[batch * num_heads]`` with a 4-D key, or None.
        seq_lens: ``[batch]`` with a 4-D key.
        cache_mode: ``"PA_NZ"`` (torch_npu's default, and not that of ``scatter_pa_kv_cache``) or ``"Norm"``; None is
            ``"Norm"``.

    Raises:
        ValueError: a shape, mode or memory rule does not hold.
        TypeError: a dtype rule does not hold.
        IndexError: a slot lies behind the end of the cache.

    Example:
        >>> key_cache, value_cache = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 3, 8)  # float32: L = 8
        >>> key, value = torch.ones(2, 2, 16), torch.ones(2, 2, 8)  # 2 tokens, 2 heads of 16 and of 8
        >>> npu_scatter_pa_kv_cache(key, value, key_cache, value_cache, torch.tensor([4, -1]))
        >>> int(key_cache[1, :, 1].sum()), int(key_cache.sum())  # block 1, position 1, and nowhere else
        (32, 32)
    """
    if key.dim() == 3:
        compress_lens = compress_seq_offsets = seq_lens = None
    ops.scatter_pa_kv_cache(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        compress_lens=compress_lens,
        compress_seq_offsets=compress_seq_offsets,
        seq_lens=seq_lens,
        cache_mode="Norm" if cache_mode is None else cache_mode,
    )


def npu_scatter_pa_kv_cache_functional(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> tuple[Tensor, Tensor]:
    """Write tokens into copies of both caches.

    Args:
        key: As :func:`npu_scatter_pa_kv_cache`, which all arguments are like.
        value: Alike.
        key_cache: Copied, not written.
        value_cache: Copied, not written.
        slot_mapping: Alike.
        compress_lens: Alike.
        compress_seq_offsets: Alike.
        seq_lens: Alike.
        cache_mode: Alike.

    Returns:
        ``(key_cache, value_cache)``: new caches with the tokens in them.

    Raises:
        As :func:`npu_scatter_pa_kv_cache`.

    Example:
        >>> cache = torch.zeros(2, 3, 1, 1)
        >>> one = torch.ones(1, 1, 1)
        >>> new, _ = npu_scatter_pa_kv_cache_functional(one, one, cache, cache, torch.tensor([4]), cache_mode="Norm")
        >>> new.flatten(), int(cache.sum())
        (tensor([0., 0., 0., 0., 1., 0.]), 0)
    """
    new_key_cache, new_value_cache = key_cache.clone(), value_cache.clone()
    npu_scatter_pa_kv_cache(
        key,
        value,
        new_key_cache,
        new_value_cache,
        slot_mapping,
        compress_lens=compress_lens,
        compress_seq_offsets=compress_seq_offsets,
        seq_lens=seq_lens,
        cache_mode=cache_mode,
    )
    return new_key_cache, new_value_cache


def _npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """Write tokens into a paged KV cache of the ND layout, in place.

    Args:
        key: ``[T, num_heads, head_size]``.
        value: As ``key``; the head size may differ.
        key_cache: Written. ``[num_blocks, block_size, num_heads, head_size]``.
        value_cache: Written, alike.
        slot_indices: ``[T]``, int32 or int64: block * block_size + position; a negative slot is skipped.

    Raises:
        As :func:`npu_scatter_pa_kv_cache`.

    Example:
        >>> key_cache, value_cache = torch.zeros(2, 3, 1, 1), torch.zeros(2, 3, 1, 1)
        >>> one = torch.ones(1, 1, 1)
        >>> _npu_reshape_and_cache(one, one * 2, key_cache, value_cache, slot_indices=torch.tensor([4]))
        >>> value_cache[1, 1]
        tensor([[2.]])
    """
    ops.scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_indices)


def _npu_reshape_and_cache_siso(key: Tensor, key_cache: Tensor, slot_indices: Tensor) -> None:
    """Write tokens into the one cache of a model that has no other (MLA), in place.

    Args:
        key: ``[T, num_heads, head_size]``.
        key_cache: Written. ``[num_blocks, block_size, num_heads, head_size]``.
        slot_indices: ``[T]``, int32 or int64: block * block_size + position; a negative slot is skipped.

    Raises:
        As :func:`npu_scatter_pa_kv_cache`.

    Example:
        >>> cache = torch.zeros(2, 3, 1, 1)
        >>> _npu_reshape_and_cache_siso(torch.ones(1, 1, 1), cache, torch.tensor([5]))
        >>> cache[1, 2]
        tensor([[1.]])
    """
    ops.scatter_pa_kv_cache(key, None, key_cache, None, slot_indices)


def npu_gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Read the contexts of a batch out of a paged KV cache of the ND layout into dense rows.

    Args:
        key_cache: ``[num_blocks, block_size, num_heads, head_size]``.
        value_cache: As ``key_cache``; the head size may differ.
        block_tables: ``[batch, max_num_blocks]``, int32 or int64.
        seq_lens: ``[batch]`` token counts, or ``[batch + 1]`` row boundaries with ``is_seq_lens_cumsum``.
        key: Written. ``[num_tokens, num_heads, head_size]``; rows that no sequence covers keep their contents.
        value: Written, alike.
        seq_offset: ``[batch]`` first token of each sequence, in tokens; the part below a multiple of ``block_size`` is
            dropped.
        is_seq_lens_cumsum: ``seq_lens`` holds row boundaries.

    Raises:
        ValueError: a shape or memory rule does not hold; too few output rows or table columns.
        TypeError: a dtype rule does not hold.
        IndexError: a block id in use is outside ``[0, num_blocks)``.

    Example:
        >>> cache = torch.arange(8.).reshape(4, 2, 1, 1)
        >>> key, value = torch.zeros(3, 1, 1), torch.zeros(3, 1, 1)
        >>> npu_gather_pa_kv_cache(cache, cache + 100, torch.tensor([[2, 0]]), torch.tensor([3]), key, value)
        >>> key.flatten(), value.flatten()
        (tensor([4., 5., 0.]), tensor([104., 105., 100.]))
    """
    ops.paged_cache_load(
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        key,
        value,
        seq_starts=seq_offset,
        is_seq_lens_cumsum=is_seq_lens_cumsum,
    )


def npu_gather_pa_kv_cache_functional(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> tuple[Tensor, Tensor]:
    """Read the contexts of a batch into copies of ``key`` and ``value``.

    Args:
        key_cache: As :func:`npu_gather_pa_kv_cache`, which all arguments are like.
        value_cache: Alike.
        block_tables: Alike.
        seq_lens: Alike.
        key: Copied, not written.
        value: Copied, not written.
        seq_offset: Alike.
        is_seq_lens_cumsum: Alike.

    Returns:
        ``(key, value)``: new tensors; rows that no sequence covers are those of the arguments.

    Raises:
        As :func:`npu_gather_pa_kv_cache`.

    Example:
        >>> cache, rows = torch.arange(8.).reshape(4, 2, 1, 1), torch.zeros(3, 1, 1)
        >>> key, _ = npu_gather_pa_kv_cache_functional(
        ...     cache, cache, torch.tensor([[2]]), torch.tensor([2]), rows, rows
        ... )
        >>> key.flatten(), int(rows.sum())
        (tensor([4., 5., 0.]), 0)
    """
    new_key, new_value = key.clone(), value.clone()
    npu_gather_pa_kv_cache(
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        new_key,
        new_value,
        seq_offset=seq_offset,
        is_seq_lens_cumsum=is_seq_lens_cumsum,
    )
    return new_key, new_value


def npu_paged_cache_load(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    seq_starts: Tensor | None = None,
    cumsum: bool = False,
    key: Tensor | None = None,
    value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Read the contexts of a batch out of a paged KV cache of the ND layout; torch_npu has it in ``torch_npu.atb``.

    Args:
        key_cache: ``[num_blocks, block_size, num_heads, head_size]``.
        value_cache: As ``key_cache``; the head size may differ.
        block_table: ``[batch, max_num_blocks]``, int32 or int64.
        context_lens: ``[batch]`` token counts, or ``[batch + 1]`` row boundaries with ``cumsum``.
        seq_starts: ``[batch]`` first token of each sequence, in tokens; the part below a multiple of ``block_size`` is
            dropped.
        cumsum: ``context_lens`` holds row boundaries.
        key: Written when given, with ``value`` (torch's ``.out`` overload): ``[num_tokens, num_heads, head_size]``.
            Without them both are allocated, which reads their number of rows from ``context_lens``: off the CPU a
            device synchronisation, and in ``torch.compile(fullgraph=True)`` it needs
            ``torch._dynamo.config.capture_scalar_outputs``.
        value: Written when given, with ``key``.

    Returns:
        ``(key, value)``: those given, or new ones.

    Raises:
        As :func:`npu_gather_pa_kv_cache`.

    Example:
        >>> cache = torch.arange(8.).reshape(4, 2, 1, 1)
        >>> key, value = atb.npu_paged_cache_load(cache, cache + 100, torch.tensor([[2, 0]]), torch.tensor([3]))
        >>> key.flatten(), value.flatten()
        (tensor([4., 5., 0.]), tensor([104., 105., 100.]))
    """
    return ops.paged_cache_load(
        key_cache,
        value_cache,
        block_table,
        context_lens,
        key,
        value,
        seq_starts=seq_starts,
        is_seq_lens_cumsum=cumsum,
    )


_AT_TOP = (
    npu_scatter_pa_kv_cache,
    npu_scatter_pa_kv_cache_functional,
    _npu_reshape_and_cache,
    _npu_reshape_and_cache_siso,
    npu_gather_pa_kv_cache,
    npu_gather_pa_kv_cache_functional,
)
_IN_ATB = (npu_paged_cache_load,)


def _module(name: str, contents: dict[str, object], *, is_package: bool) -> ModuleType:
    """Make a module that has these names and says so when it is asked for another."""
    module = ModuleType(name, f"Stands in for {name}; made by {__name__}.")
    module.__spec__ = ModuleSpec(name, None, origin=__name__, is_package=is_package)
    if is_package:
        module.__path__ = []

    def missing(attribute: str) -> NoReturn:
        raise AttributeError(
            f"{name} has no {attribute}: it stands in for a torch_npu that is not installed, "
            f"and has {', '.join(contents)}"
        )

    module.__dict__.update(contents, __getattr__=missing)
    return module


atb = _module("torch_npu.atb", {function.__name__: function for function in _IN_ATB}, is_package=False)
_STAND_IN = _module("torch_npu", {function.__name__: function for function in _AT_TOP} | {"atb": atb}, is_package=True)


@contextmanager
def provide() -> Iterator[ModuleType | None]:
    """Let ``import torch_npu`` find these functions on a machine that has no torch_npu.

    Inside the block ``import torch_npu``, ``from torch_npu import ...`` and ``import torch_npu.atb`` give a module with
    the names of this one and nothing else. A module that was imported inside keeps it; outside, ``import torch_npu``
    fails as before. Where a torch_npu is installed, or has been put into ``sys.modules``, nothing is done: that one is
    what ``import`` gives. ``sys.modules`` belongs to the process: other threads see the stand-in too, meanwhile.

    Yields:
        The module, or None where there is another torch_npu.

    Example:
        >>> with provide():
        ...     import torch_npu
        >>> torch_npu.npu_scatter_pa_kv_cache is npu_scatter_pa_kv_cache
        True
    """
    there = sys.modules.get("torch_npu")
    if there is _STAND_IN:
        yield _STAND_IN
        return
    if there is not None or _library.torch_npu_installed():
        yield None
        return
    modules = {module.__name__: module for module in (_STAND_IN, atb)}
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield _STAND_IN
    finally:
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)
