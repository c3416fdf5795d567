"""What the plugin's backends are compared with: faulty ones, which must be noticed, and one that writes by indexing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pacache_torch.integrations.vllm_backend import PacacheMetadata, PacacheMetadataBuilder, PackedBackend, PackedImpl


class WritesOneSlotOn(PackedImpl):
    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping + 1)


class FaultyWrite(PackedBackend):
    @staticmethod
    def get_impl_cls() -> type[PackedImpl]:
        return WritesOneSlotOn


class SwapsTwoBlocks(PacacheMetadataBuilder):
    """Reads the first two blocks of every sequence in the wrong order."""

    def build(self, *args: Any, **kwargs: Any) -> PacacheMetadata:
        planned = super().build(*args, **kwargs)
        order = [1, 0, *range(2, planned.reads[0].block_tables.size(1))]
        return PacacheMetadata([replace(read, block_tables=read.block_tables[:, order]) for read in planned.reads])


class FaultyRead(PackedBackend):
    @staticmethod
    def get_builder_cls() -> type[PacacheMetadataBuilder]:
        return SwapsTwoBlocks


class WritesByIndexing(PackedImpl):
    """Torch's own indexing; the reference of the package writes element by element, too slowly for an engine."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        tokens = (slot_mapping >= 0).nonzero().flatten()
        for rows, cache in zip((key, value), self.split(kv_cache), strict=True):
            slots = slot_mapping[tokens]
            cache[slots // cache.size(1), slots % cache.size(1)] = rows[tokens]


class PlainWrite(PackedBackend):
    @staticmethod
    def get_impl_cls() -> type[PackedImpl]:
        return WritesByIndexing
