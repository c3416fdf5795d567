"""A KV cache for Hugging Face transformers whose keys and values lie in blocks.

`PagedCache` goes where transformers takes a ``Cache``: ``model.generate(**inputs, past_key_values=PagedCache(...))``.
Every write is one `scatter_pa_kv_cache` per layer, every read one `paged_cache_load`. See docs/transformers.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pacache_torch import layouts, ops
from pacache_torch.blocks import BlockAllocator, BlockCopy, BlockTable, OutOfBlocks

try:
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise ImportError(
        f"pacache_torch.integrations.transformers needs transformers 5.16 or later ({error}): pip install transformers"
    ) from error

__all__ = ["PagedCache"]

_ALLOCATION_LAYOUT: dict[str, layouts.Layout] = {"Norm": "ND", "PA_NZ": "NZ"}
# A layer that attends to a window only keeps all its tokens: the model's mask hides those outside.
_LAYER_TYPES = ("full_attention", "sliding_attention")


class PagedCache(Cache):  # type: ignore[misc]
    """The keys and values of a batch, in blocks of a pool that is allocated once.

    Each layer has a key cache and a value cache ``[num_blocks, block_size, num_kv_heads, head_size]`` (PA_NZ:
    ``[num_blocks, num_kv_heads * head_size / L, block_size, L]``), made by the first forward pass from the keys and
    values it brings, so that dtype, device, number of heads and head sizes (which may differ between key and value) are
    the model's. Sequence ``b`` holds the same block ids in every layer. Reordering beams, cropping and forking change
    block tables and copy no data; a sequence that goes on in a block which others hold copies that one block first.

    Without ``max_length`` sequences grow block by block and attention sees exactly their tokens. With it, all blocks
    for ``max_length`` tokens are reserved at once and every shape is fixed, as in transformers' ``StaticCache``: the
    form for ``torch.compile(model.forward, fullgraph=True)`` and for generate's own compilation.

    Args:
        config: the model's configuration; tells the number of layers.
        num_blocks: blocks in each layer's caches, 2 or more; block 0 is never used. ``batch * ceil(tokens /
            block_size) + 1`` are always enough; forks and beams that share a prefix need fewer.
        block_size: tokens in a block.
        max_length: tokens to reserve for each sequence, or None to grow.
        cache_mode: ``"Norm"`` or ``"PA_NZ"`` (head sizes of whole 32-byte units).

    Raises:
        ValueError: a size or mode that is none.
        NotImplementedError: a model with layers that are no attention layers of its own (linear attention, shared
            keys and values, an encoder).

    Note:
        Keys and values are returned in buffers that the next layer's update overwrites, in the shape
        ``[batch, num_kv_heads, tokens, head_size]`` and, unlike with transformers' own caches, strided. Inference only:
        run the model under ``torch.no_grad()`` or ``torch.inference_mode()``, as generate does.

    Example:
        >>> cache = PagedCache(model.config, num_blocks=64, block_size=16)
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=20)
        >>> cache.num_free_blocks, cache.block_tables[0]  # 63 less those of one sequence of 39 tokens
        (60, [1, 2, 3])
    """

    def __init__(
        self,
        config: Any,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_length: int | None = None,
        cache_mode: str = "Norm",
    ) -> None:
        if block_size < 1:
            raise ValueError(f"PagedCache: block_size must be at least 1, got {block_size}")
        if max_length is not None and max_length < 1:
            raise ValueError(f"PagedCache: max_length must be at least 1 or None, got {max_length}")
        if cache_mode not in _ALLOCATION_LAYOUT:
            raise ValueError(f"PagedCache: cache_mode must be 'Norm' or 'PA_NZ', got {cache_mode!r}")
        self._adopt(_Batch(_Pool(_num_layers(config), num_blocks, block_size, cache_mode), max_length))

    def _adopt(self, batch: _Batch) -> None:
        super().__init__(layers=[_PagedLayer(batch, index) for index in range(len(batch.pool.layers))])
        self._batch = batch
        # The blocks of a cache that nobody holds any more go back to the pool that its forks still use.
        weakref.finalize(self, batch.free)

    # What the pool holds

    @property
    def key_caches(self) -> list[Tensor]:
        """Each layer's key cache; empty before the first forward pass."""
        return [blocks.key_cache for blocks in self._batch.pool.layers if blocks is not None]

    @property
    def value_caches(self) -> list[Tensor]:
        """Each layer's value cache; empty before the first forward pass."""
        return [blocks.value_cache for blocks in self._batch.pool.layers if blocks is not None]

    @property
    def block_tables(self) -> list[list[int]]:
        """The block ids of each sequence, the same in every layer."""
        return [list(table.blocks) for table in self._batch.tables]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence of this cache or its forks holds."""
        return self._batch.pool.allocator.num_free

    @property
    def batch_size(self) -> int:
        """Sequences in the cache, -1 before the first forward pass (as transformers has it)."""
        return len(self._batch.tables) or -1

    # Which sequences there are, and how much of them

    def fork(self) -> PagedCache:
        """Give a cache that goes on from the same tokens, in the same pool.

        Both caches may be written from now on; neither sees what the other writes. Only block tables are copied.
        ``copy.deepcopy(cache)``, transformers' way to reuse a prefix, does the same.
        """
        length = self._length()
        fork = object.__new__(type(self))
        fork._adopt(self._batch.fork(length))
        for layer, mine in zip(fork.layers, self.layers, strict=True):
            layer.continue_from(mine)
        return fork

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        fork = self.fork()
        memo[id(self)] = fork
        return fork

    def reset(self) -> None:
        """Forget every token; the caches stay allocated.

        Without ``max_length`` all blocks are given back and any batch may follow. With it the batch keeps its size and
        its reservation, and what was compiled stays valid.
        """
        self._batch.reset()
        for layer in self.layers:
            layer.set_length(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end of every sequence and give the blocks behind them back.

        Args:
            tokens_to_remove: minus the number of tokens to remove. Above 0 it is the number of tokens to keep, the form
                that transformers is about to drop.
        """
        length = self._length()
        keep = length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, length)
        if keep < 0:
            raise ValueError(
                f"PagedCache.crop: must remove at most the {length} tokens there are, got {tokens_to_remove}"
            )
        if keep == length:
            return
        self._batch.crop(keep)
        for layer in self.layers:
            layer.set_length(keep)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence ``b`` go on from what was sequence ``beam_idx[b]``."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put ``repeats`` sequences in the place of each, with its tokens."""
        self._select([row for row in range(len(self._batch.tables)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices``, in this order."""
        rows = torch.arange(len(self._batch.tables))
        self._select(rows[indices.cpu()].tolist())

    def _select(self, rows: Sequence[int]) -> None:
        if self._batch.tables:
            self._batch.select(rows, self._length())

    def _length(self) -> int:
        return int(self.layers[0].get_seq_length())


class _PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: how far it is, and the calls of the two operators."""

    is_sliding = False
    is_croppable = True

    def __init__(self, batch: _Batch, index: int) -> None:
        super().__init__()
        self.is_compileable = batch.max_length is not None
        self._batch = batch
        self._index = index
        # A tensor where shapes are fixed: a graph adds to it, while each value of a number would be a graph of its own.
        self._length: Any = torch.tensor(0) if self.is_compileable else 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the layer's blocks for keys and values like these, and begin the batch if no other layer has."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._batch.pool.allocate(self._index, key_states, value_states)
        if self.is_compileable:
            self._length = self._length.to(self.device)
        self._batch.begin(key_states.size(0), self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new tokens, ``[batch, num_kv_heads, count, head_size]``, and return all tokens so far."""
        max_length = self._batch.max_length
        if max_length is None:
            rows: tuple[Tensor, Tensor] = self._update_growing(key_states, value_states)
            return rows
        return self._update_reserved(key_states, value_states, max_length)

    @torch.compiler.disable(reason="a PagedCache without max_length chooses blocks in Python")  # type: ignore[untyped-decorator]
    def _update_growing(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, start, count = self._batch, self._length, key_states.size(2)
        self._begin(key_states, value_states)
        batch.step(start, count)
        self._scatter(key_states, value_states, batch.slots)
        self._length = start + count
        if start == 0:
            return key_states, value_states
        key, value = batch.pool.rows(self._index, key_states.size(0) * self._length)
        return self._load(key, value, key_states.size(0))

    def _update_reserved(self, key_states: Tensor, value_states: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
        self._begin(key_states, value_states)
        batch, count = self._batch, key_states.size(2)
        self._scatter(key_states, value_states, batch.slots_from(self._length, count))
        self._length.add_(count)
        key, value = batch.pool.new_rows(self._index, key_states.size(0) * max_length)
        return self._load(key, value, key_states.size(0))

    def _begin(self, key_states: Tensor, value_states: Tensor) -> None:
        num_sequences = len(self._batch.tables)
        if not self.is_initialized or num_sequences == 0:
            self._begin_now(key_states, value_states)
        elif num_sequences != key_states.size(0):
            raise ValueError(
                f"PagedCache: key must have the {num_sequences} sequences that the cache holds (reset() forgets them), "
                f"got {list(key_states.shape)}"
            )

    @torch.compiler.disable(reason="a PagedCache is allocated by its first, eager pass")  # type: ignore[untyped-decorator]
    def _begin_now(self, key_states: Tensor, value_states: Tensor) -> None:
        self.lazy_initialization(key_states, value_states)

    def _scatter(self, key_states: Tensor, value_states: Tensor, slots: Tensor) -> None:
        # A view where a projection made them, [batch, count, num_kv_heads, head_size]; else the new tokens are copied.
        key, value = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
        self._batch.pool.scatter(self._index, key, value, slots)

    def _load(self, key: Tensor, value: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
        batch = self._batch
        batch.pool.load(self._index, batch.block_tables, batch.context_lens, key, value)
        # [batch * tokens, num_kv_heads, head_size] to [batch, num_kv_heads, tokens, head_size]
        key, value = (rows.unflatten(0, (num_sequences, -1)).transpose(1, 2) for rows in (key, value))
        return key, value

    def get_seq_length(self) -> int | Tensor:
        """Tokens of each sequence; a tensor on the device with ``max_length``."""
        return self._length  # type: ignore[no-any-return]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of the mask, and the token of the first."""
        if self._batch.max_length is not None:
            return self._batch.max_length, 0
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        """``max_length``, or -1."""
        return -1 if self._batch.max_length is None else self._batch.max_length

    def set_length(self, length: int) -> None:
        """Take the first ``length`` tokens for all there are."""
        if isinstance(self._length, Tensor):
            self._length.fill_(length)
        else:
            self._length = length

    def continue_from(self, other: _PagedLayer) -> None:
        """Be as far as ``other``, in the same pool."""
        if other.is_initialized:
            self.dtype, self.device = other.dtype, other.device
            self.is_initialized = True
        self._length = other._length.clone() if isinstance(other._length, Tensor) else other._length

    def _all_layers_at_once(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "PagedCache: the layers share their block tables; call it on the cache, not on a layer"
        )

    reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _all_layers_at_once
    offload = prefetch = _all_layers_at_once


class _Batch:
    """The sequences of one cache: their block tables, and the index tensors that every layer uses."""

    def __init__(self, pool: _Pool, max_length: int | None) -> None:
        self.pool = pool
        self.max_length = max_length
        self.tables: list[BlockTable] = []
        self.slots: Tensor
        self.block_tables: Tensor  # [batch, columns], int32
        self.context_lens: Tensor  # [batch], int32
        self._device = torch.device("cpu")
        self._stepped: tuple[int, int] | None = None

    def begin(self, num_sequences: int, device: torch.device) -> None:
        """Make room for sequences with no tokens, unless they are there."""
        if not self.tables:
            self._device = device
            self.tables = [BlockTable(self.pool.allocator, self.pool.block_size) for _ in range(num_sequences)]
            self._reserve_all(0)

    def step(self, start: int, count: int) -> None:
        """Give tokens ``start`` to ``start + count - 1`` of each sequence a place; the step's first layer does it."""
        if self._stepped == (start, count):
            return
        end = start + count
        self._reserve(start, end)
        tables = layouts.pad_block_tables([table.blocks for table in self.tables])
        self.slots = _slots(tables, torch.arange(start, end), self.pool.block_size).to(torch.int32).to(self._device)
        self.block_tables = tables.to(self._device)
        self.context_lens = torch.full((len(self.tables),), end, dtype=torch.int32).to(self._device)
        self._stepped = (start, count)

    def slots_from(self, start: Tensor, count: int) -> Tensor:
        """The slots of ``count`` tokens of each sequence from ``start`` on; with ``max_length``, inside a graph."""
        assert self.max_length is not None
        if not torch.compiler.is_compiling() and start.device.type == "cpu" and int(start) + count > self.max_length:
            raise ValueError(
                f"PagedCache: max_length must be at least the {int(start) + count} tokens of each sequence, "
                f"got {self.max_length}"
            )
        positions = torch.arange(count, device=start.device) + start
        return _slots(self.block_tables, positions, self.pool.block_size)

    def select(self, rows: Sequence[int], length: int) -> None:
        """Let the sequences be copies of the sequences ``rows``."""
        old = self.tables
        self.tables = [old[row].fork(length) for row in rows]
        for table in old:
            table.free()
        self._reserve_all(length)

    def crop(self, length: int) -> None:
        """Give back what lies behind the first ``length`` tokens."""
        for table in self.tables:
            table.crop(length)
        self._reserve_all(length)

    def fork(self, length: int) -> _Batch:
        """Give a batch that shares the blocks of this one's first ``length`` tokens."""
        fork = _Batch(self.pool, self.max_length)
        fork._device = self._device
        fork.tables = [table.fork(length) for table in self.tables]
        fork._reserve_all(length)
        return fork

    def reset(self) -> None:
        """Forget every token."""
        if self.max_length is None:
            self.free()
        else:
            self.crop(0)

    def free(self) -> None:
        """Give every block back."""
        for table in self.tables:
            table.free()
        self.tables = []
        self._stepped = None

    def _reserve_all(self, length: int) -> None:
        """With ``max_length``, have every block that can be needed, none shared behind token ``length``."""
        self._stepped = None
        if self.max_length is None or not self.tables:
            return
        self._reserve(length, self.max_length)
        tables = layouts.pad_block_tables([table.blocks for table in self.tables])
        if hasattr(self, "block_tables") and self.block_tables.shape == tables.shape:
            self.block_tables.copy_(tables)  # a graph holds on to its address
            return
        self.block_tables = tables.to(self._device)
        self.context_lens = torch.full((len(self.tables),), self.max_length, dtype=torch.int32).to(self._device)

    def _reserve(self, start: int, end: int) -> None:
        copies: list[BlockCopy] = []
        try:
            for table in self.tables:
                copies += table.reserve(start, end)
        except OutOfBlocks as error:
            pool = self.pool
            raise OutOfBlocks(
                f"PagedCache: num_blocks must have room for {len(self.tables)} sequences of {end} tokens in blocks of "
                f"{pool.block_size} beside what other caches of the pool hold, got {pool.num_blocks}: {error}"
            ) from error
        finally:
            # Whatever happens: a table that has changed its block must find its tokens there.
            self.pool.copy(copies, self._device)


class _LayerBlocks(NamedTuple):
    """The caches of one layer, and the shapes of a row of theirs, ``[num_kv_heads, head_size]``."""

    key_cache: Tensor
    value_cache: Tensor
    key_row: tuple[int, int]
    value_row: tuple[int, int]


class _Pool:
    """The blocks of every layer, shared by a cache and its forks."""

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, cache_mode: str) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache_mode = cache_mode
        self.layers: list[_LayerBlocks | None] = [None] * num_layers
        self._rows: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def allocate(self, layer: int, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate a layer's caches for states ``[batch, num_kv_heads, count, head_size]``, unless they are there."""
        if self.layers[layer] is not None:
            return
        key_row, value_row = ((states.size(1), states.size(3)) for states in (key_states, value_states))
        key_cache, value_cache = layouts.allocate_kv_cache(
            self.num_blocks,
            self.block_size,
            *key_row,
            layout=_ALLOCATION_LAYOUT[self.cache_mode],
            dtype=key_states.dtype,
            device=key_states.device,
            value_head_size=value_row[1],
        )
        self.layers[layer] = _LayerBlocks(key_cache, value_cache, key_row, value_row)

    def rows(self, layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Room to read tokens into, shared by all layers alike: fresh memory would cost more than the reading."""
        blocks = self._layer(layer)
        kind = (blocks.key_row, blocks.value_row, blocks.key_cache.dtype, blocks.key_cache.device)
        pair = self._rows.get(kind)
        if pair is None or pair[0].size(0) < num_tokens:
            pair = self._rows[kind] = self.new_rows(layer, 2 * num_tokens)
        return pair[0][:num_tokens], pair[1][:num_tokens]

    def new_rows(self, layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Memory of one's own to read tokens into."""
        key_cache, value_cache, key_row, value_row = self._layer(layer)
        return key_cache.new_empty(num_tokens, *key_row), value_cache.new_empty(num_tokens, *value_row)

    def scatter(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write rows ``[num_tokens, num_kv_heads, head_size]``."""
        blocks = self._layer(layer)
        ops.scatter_pa_kv_cache(key, value, blocks.key_cache, blocks.value_cache, slots, cache_mode=self.cache_mode)

    def load(self, layer: int, block_tables: Tensor, context_lens: Tensor, key: Tensor, value: Tensor) -> None:
        """Read contexts into rows ``[num_tokens, num_kv_heads, head_size]``."""
        blocks = self._layer(layer)
        ops.paged_cache_load(
            blocks.key_cache,
            blocks.value_cache,
            block_tables,
            context_lens,
            key,
            value,
            cache_mode=self.cache_mode,
        )

    def copy(self, copies: Sequence[BlockCopy], device: torch.device) -> None:
        """Copy the beginnings of blocks in every layer, with the operators themselves."""
        if not copies:
            return
        lens = torch.tensor([copy.num_tokens for copy in copies])
        positions = torch.cat([torch.arange(copy.num_tokens) for copy in copies])
        targets = torch.tensor([[copy.target] for copy in copies])
        slots = layouts.slot_mapping(targets, torch.repeat_interleave(lens), positions, self.block_size)
        sources = torch.tensor([[copy.source] for copy in copies])
        slots, sources, lens = (index.to(torch.int32).to(device) for index in (slots, sources, lens))
        for layer, blocks in enumerate(self.layers):
            if blocks is not None:
                key, value = self.new_rows(layer, len(positions))
                self.load(layer, sources, lens, key, value)
                self.scatter(layer, key, value, slots)

    def _layer(self, layer: int) -> _LayerBlocks:
        blocks = self.layers[layer]
        assert blocks is not None, "a layer is allocated by its first update"
        return blocks


def _slots(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The slots of the same ``positions`` in every sequence, sequence by sequence."""
    num_sequences, count = block_tables.size(0), positions.size(0)
    sequences = torch.arange(num_sequences, device=positions.device).repeat_interleave(count)
    return layouts.slot_mapping(block_tables, sequences, positions.repeat(num_sequences), block_size)


def _num_layers(config: Any) -> int:
    """The layers of a decoder whose every layer attends to keys and values of its own."""
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(f"PagedCache: the model must be a decoder, got {type(config).__name__}")
    config = config.get_text_config(decoder=True)
    num_layers: int = config.num_hidden_layers
    others = {str(kind) for kind in getattr(config, "layer_types", None) or ()} - set(_LAYER_TYPES)
    if others:
        raise NotImplementedError(f"PagedCache: layers must be attention layers, got {', '.join(sorted(others))}")
    if getattr(config, "num_kv_shared_layers", None):
        raise NotImplementedError(
            f"PagedCache: each layer must have keys and values of its own, got {config.num_kv_shared_layers} that share"
        )
    return num_layers
