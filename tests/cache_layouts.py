"""Every way in which a paged cache lies in memory that the operators take, for tests that drive whole caches.

A layout says how many bytes its allocations need, which views of them the operators are given, and where in such a view
a token lies. Around and between the caches are bytes of nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LEAD, TAIL = 64, 36  # bytes before and behind a cache; the first keeps it on 32 bytes, as ATB wants it


@dataclass(frozen=True)
class Geometry:
    """Sizes of a cache; value's head size and dtype are key's unless the layout lets them differ."""

    blocks: int
    block_size: int
    heads: int
    size: int
    value_size: int
    dtype: torch.dtype

    @property
    def slots(self) -> int:
        """Places for a token."""
        return self.blocks * self.block_size


@dataclass(frozen=True)
class Layout:
    """How key and value cache lie in memory."""

    elements: Callable[[Geometry], Sequence[int]]  # of each allocation
    views: Callable[[Sequence[Tensor], Geometry], tuple[Tensor, Tensor | None]]  # what the operators take
    by_token: Callable[[Tensor], Tensor]  # a cache as [blocks, block_size, ...]
    cache_mode: str = "Norm"
    scatter_mode: str = "None"
    equal_sizes: bool = False  # key and value share an allocation
    dense: bool = True  # what a load on the device insists on

    def allocate(self, g: Geometry, generator: torch.Generator) -> list[Tensor]:
        """Allocations full of noise, as bytes on the host."""
        return [
            torch.randint(0, 256, (LEAD + count * g.dtype.itemsize + TAIL,), dtype=torch.uint8, generator=generator)
            for count in self.elements(g)
        ]

    def caches(self, memories: Sequence[Tensor], g: Geometry) -> tuple[Tensor, Tensor | None]:
        """The caches that lie in the allocations, which may be on any device."""
        flat = [m[LEAD : m.numel() - TAIL].view(g.dtype) for m in memories]
        return self.views(flat, g)


def _two(
    shape: Callable[[Geometry, int], tuple[int, ...]], by_token: Callable[[Tensor], Tensor], **options: str
) -> Layout:
    """Key and value cache as two allocations."""

    def elements(g: Geometry) -> list[int]:
        return [torch.Size(shape(g, size)).numel() for size in (g.size, g.value_size)]

    def views(flat: Sequence[Tensor], g: Geometry) -> tuple[Tensor, Tensor]:
        return flat[0].view(shape(g, g.size)), flat[1].view(shape(g, g.value_size))

    return Layout(elements, views, by_token, **options)  # type: ignore[arg-type]


def _one(
    shape: Callable[[Geometry], tuple[int, ...]],
    views: Callable[[Tensor], tuple[Tensor, Tensor | None]],
    *,
    dense: bool = False,
    equal_sizes: bool = True,
) -> Layout:
    """Both as views of one allocation."""
    return Layout(
        lambda g: [torch.Size(shape(g)).numel()],
        lambda flat, g: views(flat[0].view(shape(g))),
        lambda cache: cache,
        equal_sizes=equal_sizes,
        dense=dense,
    )


def _halves(memory: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    key_cache, value_cache = memory.unbind(dim)
    return key_cache, value_cache


def _split_heads(memory: Tensor) -> tuple[Tensor, Tensor]:
    key_cache, value_cache = memory.transpose(1, 2).chunk(2, dim=-1)
    return key_cache, value_cache


def _nz_unit(g: Geometry) -> int:
    return 32 // g.dtype.itemsize


LAYOUTS = {
    "Norm": _two(lambda g, d: (g.blocks, g.block_size, g.heads, d), lambda c: c),
    "NZ": _two(
        lambda g, d: (g.blocks, g.heads * d // _nz_unit(g), g.block_size, _nz_unit(g)),
        lambda c: c.permute(0, 2, 1, 3),
        cache_mode="PA_NZ",
    ),
    "NZ 5-D": _two(
        lambda g, d: (g.blocks, g.heads, d // _nz_unit(g), g.block_size, _nz_unit(g)),
        lambda c: c.permute(0, 3, 1, 2, 4),
        cache_mode="PA_NZ",
    ),
    "NHSD": _two(
        lambda g, d: (g.blocks, g.heads, g.block_size, d), lambda c: c.transpose(1, 2), scatter_mode="NHSD"
    ),
    "key only": _one(
        lambda g: (g.blocks, g.block_size, g.heads, g.size), lambda m: (m, None), dense=True
    ),
    # vLLM's: two halves; key and value of a block side by side; heads before tokens; key and value of a head side by
    # side; one block of every layer side by side, of which this cache is the middle one.
    "halves": _one(
        lambda g: (2, g.blocks, g.block_size, g.heads, g.size), lambda m: _halves(m, 0), dense=True
    ),
    "interleaved": _one(lambda g: (g.blocks, 2, g.block_size, g.heads, g.size), lambda m: _halves(m, 1)),
    "heads first": _one(
        lambda g: (2, g.blocks, g.heads, g.block_size, g.size), lambda m: _halves(m.transpose(2, 3), 0)
    ),
    "packed heads": _one(lambda g: (g.blocks, g.heads, g.block_size, 2 * g.size), _split_heads),
    "packed layers": _one(
        lambda g: (g.blocks, 3, 2, g.block_size, g.heads, g.size), lambda m: _halves(m[:, 1], 1)
    ),
}  # fmt: skip
ONLY_BLOCKS_PADDED = ("interleaved", "packed layers")  # strided, and scatter takes them from CANN 9.1 on
