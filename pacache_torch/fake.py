"""Fake kernels: what torch.compile and torch.export run in place of the operators.

They hold a call to the same rules with the same words as the kernels, on symbolic sizes, and read no data. Rules on
memory (storage bounds, overlap) and on values (slots, block ids, lengths) are left to the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pacache_torch import _rules


def _scatter_pa_kv_cache(
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
    _rules.check_scatter(
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


def _paged_cache_load(
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
    _rules.check_load(
        key_cache, value_cache, block_tables, context_lens, key, value, seq_starts, cache_mode, is_seq_lens_cumsum
    )


def _scatter_pa_kv_cache_packed(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, kv_layout: str
) -> None:
    _rules.check_scatter_packed(key, value, kv_cache, slot_mapping, kv_layout)


def _paged_cache_load_packed(
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
    _rules.check_load_packed(
        kv_cache, block_tables, context_lens, key, value, kv_layout, seq_starts, is_seq_lens_cumsum
    )


KERNELS: dict[str, Callable[..., None]] = {
    "scatter_pa_kv_cache": _scatter_pa_kv_cache,
    "paged_cache_load": _paged_cache_load,
    "scatter_pa_kv_cache_packed": _scatter_pa_kv_cache_packed,
    "paged_cache_load_packed": _paged_cache_load_packed,
}


def register() -> None:
    """Register the fake kernels; the schemas must have been loaded."""
    for name, kernel in KERNELS.items():
        torch.library.register_fake(f"pacache::{name}", kernel)
