"""A layer over the operators in every form that a cache takes in a model, and ways to see a copy of a cache.

A copy is looked for three times: in the generated code, in what is allocated while the graph runs, and by the address
that a kernel is given. Caches are larger than everything else in these graphs, so the size tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from bad_arguments import WRITTEN
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import pacache_torch
from pacache_torch import reference

HEADS, SIZE, BLOCKS, BLOCK_SIZE = 3, 16, 137, 7
CACHE = (BLOCKS, BLOCK_SIZE, HEADS, SIZE)
DTYPE = torch.bfloat16


def noise(*shape: int, seed: int = 1, dtype: torch.dtype = DTYPE) -> Tensor:
    """Numbers that are alike in every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens(count: int, seed: int = 2, blocks: int = BLOCKS) -> tuple[Tensor, Tensor]:
    """A projection and slots, some of them padding."""
    slots = torch.randperm(blocks * BLOCK_SIZE, generator=torch.Generator().manual_seed(seed))[:count]
    slots[3::5] = -1
    return noise(count, 5 * HEADS * SIZE, seed=seed), slots


def contexts(count: int, batch: int = 2, blocks: int = BLOCKS) -> tuple[Tensor, Tensor]:
    """Block tables and lengths that sum to ``count``."""
    columns = -(-count // BLOCK_SIZE)
    lens = torch.full((batch,), count // batch)
    lens[-1] += count - int(lens.sum())
    return (torch.arange(batch * columns).view(batch, columns) * 5 + 2) % blocks, lens


def split(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value as slices of a projection."""
    key, value = qkv[:, 3 * HEADS * SIZE :].unflatten(1, (2, HEADS, SIZE)).unbind(1)
    return key, value


def step(
    qkv: Tensor, slots: Tensor, tables: Tensor, lens: Tensor, caches: Sequence[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """A store into each layer's cache and then a load from it; what was read. Needs no generated kernel."""
    rows: list[Tensor] = []
    for key_cache, value_cache in caches:
        pacache_torch.scatter_pa_kv_cache(*split(qkv), key_cache, value_cache, slots)
        rows += pacache_torch.paged_cache_load(key_cache, value_cache, tables, lens, num_tokens=qkv.size(0))
    return rows


class Form(nn.Module):
    """Caches as a model holds them or is given them."""

    def given(self) -> tuple[Any, ...]:
        """What the model is called with beside the tokens."""
        return ()

    def caches(self, *given: Any) -> list[tuple[Tensor, ...]]:
        """Each layer's caches, as they are passed to the operators."""
        raise NotImplementedError

    def forward(self, qkv: Tensor, slots: Tensor, tables: Tensor, lens: Tensor, *given: Any) -> list[Tensor]:
        """Store and load."""
        return step(qkv, slots, tables, lens, self.caches(*given))


class Inputs(Form):
    """Two arguments of the model."""

    def given(self) -> tuple[Tensor, ...]:
        return noise(*CACHE, seed=3), noise(*CACHE, seed=4)

    def caches(self, *given: Any) -> list[tuple[Tensor, ...]]:
        return [given]


class Buffers(Form):
    """Buffers of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("key_cache", noise(*CACHE, seed=3))
        self.register_buffer("value_cache", noise(*CACHE, seed=4))

    def caches(self, *given: Any) -> list[tuple[Tensor, ...]]:
        return [(self.key_cache, self.value_cache)]


class Attributes(Form):
    """Plain attributes of the module, a pair for each of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [(noise(*CACHE, seed=3 + i), noise(*CACHE, seed=13 + i)) for i in range(3)]

    def caches(self, *given: Any) -> list[tuple[Tensor, ...]]:
        return self.layers


class PerLayer(Form):
    """A list of caches, one tensor per layer, as an argument."""

    def given(self) -> tuple[Any, ...]:
        return [noise(*CACHE, seed=3 + i) for i in range(2)], [noise(*CACHE, seed=13 + i) for i in range(2)]

    def caches(self, *given: Any) -> list[tuple[Tensor, ...]]:
        return list(zip(*given, strict=True))


class Pool(Form):
    """One allocation for all layers, indexed by layer inside the graph."""

    def given(self) -> tuple[Tensor, ...]:
        return noise(2, *CACHE, seed=3), noise(2, *CACHE, seed=4)

    def caches(self, *given: Any) -> list[tuple[Tensor, ...]]:
        return [(given[0][layer], given[1][layer]) for layer in range(2)]


class Stacked(Form):
    """``[2, num_blocks, ...]``, indexed inside the graph."""

    def given(self) -> tuple[Tensor, ...]:
        return (noise(2, *CACHE, seed=3),)

    def caches(self, *given: Any) -> list[tuple[Tensor, ...]]:
        return [(given[0][0], given[0][1])]


class Unbound(Stacked):
    """``[2, num_blocks, ...]``, unbound inside the graph."""

    def caches(self, *given: Any) -> list[tuple[Tensor, ...]]:
        return [given[0].unbind(0)]


class Interleaved(Form):
    """``[num_blocks, 2, ...]``."""

    def given(self) -> tuple[Tensor, ...]:
        return (noise(BLOCKS, 2, *CACHE[1:], seed=3),)

    def caches(self, *given: Any) -> list[tuple[Tensor, ...]]:
        return [(given[0][:, 0], given[0][:, 1])]


class PackedLast(Form):
    """``[num_blocks, num_heads, block_size, 2 * head_size]``, sliced inside the graph."""

    def given(self) -> tuple[Tensor, ...]:
        return (noise(BLOCKS, HEADS, BLOCK_SIZE, 2 * SIZE, seed=3),)

    def caches(self, *given: Any) -> list[tuple[Tensor, ...]]:
        return [given[0].transpose(1, 2).split(SIZE, -1)]


PACKED_SHAPES = {
    "2BNHD": lambda blocks: (2, blocks, BLOCK_SIZE, HEADS, SIZE),
    "B2NHD": lambda blocks: (blocks, 2, BLOCK_SIZE, HEADS, SIZE),
    "BHNC": lambda blocks: (blocks, HEADS, BLOCK_SIZE, 2 * SIZE),
    "BNHC": lambda blocks: (blocks, BLOCK_SIZE, HEADS, 2 * SIZE),
}


class Packed(Form):
    """The packed operators on a cache of each layout."""

    def given(self) -> tuple[Tensor, ...]:
        return tuple(noise(*shape(BLOCKS)) for shape in PACKED_SHAPES.values())

    def caches(self, *given: Any) -> list[tuple[Tensor, ...]]:
        return [(cache,) for cache in given]

    def forward(self, qkv: Tensor, slots: Tensor, tables: Tensor, lens: Tensor, *given: Any) -> list[Tensor]:
        rows: list[Tensor] = []
        for layout, cache in zip(PACKED_SHAPES, given, strict=True):
            pacache_torch.scatter_pa_kv_cache_packed(*split(qkv), cache, slots, kv_layout=layout)
            rows += pacache_torch.paged_cache_load_packed(cache, tables, lens, kv_layout=layout, num_tokens=qkv.size(0))
        return rows


FORMS: tuple[type[Form], ...] = (
    Inputs,
    Buffers,
    Attributes,
    PerLayer,
    Pool,
    Stacked,
    Unbound,
    Interleaved,
    PackedLast,
    Packed,
)


# ---------------------------------------------------------------------------------------------------------------------
# Copies


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Inductor, one graph."""
    result: Callable[..., Any] = torch.compile(function, fullgraph=True, backend="inductor", **options)
    return result


@contextmanager
def kernel_arguments() -> Iterator[list[dict[str, int]]]:
    """The addresses of the tensors that reach the CPU kernels, for which the reference stands in."""
    seen: list[dict[str, int]] = []
    library = torch.library.Library("pacache", "IMPL")

    def watched(name: str) -> Callable[..., None]:
        arguments = [argument.name for argument in getattr(torch.ops.pacache, name).default._schema.arguments]

        def kernel(*args: Any, **kwargs: Any) -> None:
            given = dict(zip(arguments, args, strict=False)) | kwargs
            seen.append({name: t.data_ptr() for name, t in given.items() if isinstance(t, Tensor)})
            getattr(reference, name)(*args, **kwargs)

        return kernel

    try:
        for name in WRITTEN:
            library.impl(name, watched(name), "CPU", allow_override=True)
        yield seen
    finally:
        library._destroy()


CACHE_NAMES = ("key_cache", "value_cache", "kv_cache")


def cache_addresses(seen: list[dict[str, int]]) -> list[tuple[int, ...]]:
    """Of what the kernels were given, the caches."""
    return [tuple(call[name] for name in CACHE_NAMES if name in call) for call in seen]


def copies_in(code: Sequence[str], elements: int) -> list[str]:
    """Lines of generated code that allocate so many elements, or loop over them."""

    def allocates(line: str) -> bool:
        _, found, rest = line.partition("empty_strided_cpu(")
        shape = rest.partition(")")[0].strip("( ")
        sizes = [int(size) for size in shape.split(",") if size.strip()] if found else []
        return bool(sizes) and torch.Size(sizes).numel() >= elements

    return [line for text in code for line in text.splitlines() if allocates(line) or f"({elements}L)" in line]


def largest_allocation(function: Callable[[], object]) -> int:
    """Bytes of the largest block that a call allocates, as torch's allocator reports it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = record.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max((event.nbytes() for event in events if event.name() == "[memory]"), default=0)
