"""One process of the tensor-parallel tests: ``tensor_parallel.py RANK WORLD_SIZE FOLDER``.

Every process builds the same whole tensors from a seed, runs the operator on its shards, and compares them with its
share of a single-process run. It writes ``{check: "" or what went wrong}`` to ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import pacache_torch
from pacache_torch import layouts
from pacache_torch.blocks import BlockAllocator
from pacache_torch.demo.model import Decoder, DecoderConfig
from pacache_torch.demo.paged_cache import PagedCache
from pacache_torch.demo.scheduler import Request, Scheduler, Step
from pacache_torch.demo.serve import serve
from pacache_torch.integrations import dtensor

HEADS, BLOCKS, BLOCK_SIZE, TOKENS = 8, 11, 5, 23
KEY_SIZE, VALUE_SIZE = 16, 24
R = Replicate()
CHECKS: list[Callable[[DeviceMesh], None]] = []


def check(function: Callable[[DeviceMesh], None]) -> Callable[[DeviceMesh], None]:
    CHECKS.append(function)
    return function


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def spread(tensor: Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    """The DTensor of a tensor that every process has: its own part of it, no communication."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def slots(count: int = TOKENS) -> Tensor:
    chosen = torch.randperm(BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(9))[:count]
    chosen[4::7] = -1
    return chosen


@contextmanager
def no_collectives() -> Iterator[None]:
    with CommDebugMode() as watch:
        yield
    assert watch.get_total_counts() == 0, watch.get_comm_counts()


def share(whole: Tensor, like: DTensor) -> Tensor:
    """What of ``whole`` this process has, by hand: DTensor cuts as torch.chunk does."""
    for dim, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            mesh = like.device_mesh
            parts = torch.chunk(whole, mesh.size(dim), placement.dim)
            coordinate = mesh.get_local_rank(dim)
            whole = parts[coordinate] if coordinate < len(parts) else whole.narrow(placement.dim, 0, 0)
    return whole


def compare(actual: DTensor, whole: Tensor, storage: int | None = None) -> None:
    local = actual.to_local()
    wanted = share(whole, actual)
    assert local.shape == wanted.shape and torch.equal(local, wanted), "another result than in one process"
    assert storage is None or local.data_ptr() == storage, "another memory than before"


# (cache_mode, scatter_mode, layout of the caches, dimension of heads in them)
MODES = (
    ("Norm", "None", "ND", 2),
    ("Norm", "NHSD", "NHSD", 1),
    ("PA_NZ", "None", "NZ", 1),
    ("PA_NZ", "None", "NZ_5D", 1),
)


def caches(layout: str, heads: int = HEADS) -> tuple[Tensor, Tensor]:
    pair = layouts.allocate_kv_cache(
        BLOCKS, BLOCK_SIZE, heads, KEY_SIZE, layout=layout, dtype=torch.float32, value_head_size=VALUE_SIZE
    )
    for seed, cache in enumerate(pair):
        cache.copy_(random(*cache.shape, seed=seed))
    return pair


def scatter(mesh: DeviceMesh, mode: tuple[str, str, str, int], heads: int, sharded: bool, value: bool = True) -> None:
    cache_mode, scatter_mode, layout, dim = mode
    new = [random(TOKENS + 2, heads, size, seed=7)[2:] for size in (KEY_SIZE, VALUE_SIZE)]
    whole = list(caches(layout, heads))
    rows, cache_placement = (Shard(1), Shard(dim)) if sharded else (R, R)
    before = [cache.clone() for cache in whole]
    parts = [spread(cache, mesh, cache_placement) for cache in whole]
    storages = [part.to_local().data_ptr() for part in parts]
    options = {"cache_mode": cache_mode, "scatter_mode": scatter_mode}
    arguments = [spread(tensor, mesh, rows) for tensor in new]
    index = spread(slots(), mesh, R)
    if not value:
        new[1] = arguments[1] = whole[1] = parts[1] = None  # type: ignore[call-overload]
    with no_collectives():
        torch.ops.pacache.scatter_pa_kv_cache(arguments[0], arguments[1], parts[0], parts[1], index, **options)
    torch.ops.pacache.scatter_pa_kv_cache(new[0], new[1], whole[0], whole[1], slots(), **options)
    assert not torch.equal(whole[0], before[0])
    for part, cache, storage in zip(parts, whole, storages, strict=True):
        if cache is not None:
            compare(part, cache, storage)


@check
def scatter_of_sharded_heads(mesh: DeviceMesh) -> None:
    for mode in MODES:
        scatter(mesh, mode, HEADS, sharded=True)
    scatter(mesh, MODES[0], HEADS, sharded=True, value=False)


@check
def scatter_of_heads_that_the_devices_do_not_divide(mesh: DeviceMesh) -> None:
    for heads in (3, 5):  # with 4 devices and 3 heads, one has none
        for mode in MODES:
            if mode[2] != "NZ":
                scatter(mesh, mode, heads, sharded=True)
            else:
                text = "dimension 1 of key must be a multiple of the"
                refuse(ValueError, text, lambda mode=mode, heads=heads: scatter(mesh, mode, heads, True))


@check
def scatter_of_replicated_arguments(mesh: DeviceMesh) -> None:
    for mode in MODES:
        scatter(mesh, mode, HEADS, sharded=False)
    lens = torch.tensor([7, 5])
    key = random(12, 2, KEY_SIZE)
    whole = random(BLOCKS, BLOCK_SIZE, 1, KEY_SIZE, seed=1), random(BLOCKS, BLOCK_SIZE, 1, KEY_SIZE, seed=2)
    parts = [spread(cache, mesh, R) for cache in whole]
    starts, window, offsets = torch.tensor([0, 10, 20, 30]), torch.tensor([2, 3, 1, 2]), torch.tensor([1, 0, 2, -1])
    for mode, options in (
        ("Alibi", {"compress_lens": window, "seq_lens": lens}),
        ("Rope", {"compress_lens": window, "compress_seq_offsets": offsets, "seq_lens": lens}),
    ):
        torch.ops.pacache.scatter_pa_kv_cache(key, key, *whole, starts, scatter_mode=mode, **options)
        torch.ops.pacache.scatter_pa_kv_cache(
            spread(key, mesh, R), spread(key, mesh, R), *parts, spread(starts, mesh, R), scatter_mode=mode,
            **{name: spread(tensor, mesh, R) for name, tensor in options.items()},
        )  # fmt: skip
        for part, cache in zip(parts, whole, strict=True):
            compare(part, cache)


TABLES = torch.tensor([[3, 10, 0, 6], [1, 7, 9, 0], [5, 2, 0, 0]])
LENS = torch.tensor([17, 12, 6])
STARTS = torch.tensor([5, 0, 0])


@check
def load_of_sharded_and_of_replicated_heads(mesh: DeviceMesh) -> None:
    for cache_mode, _, layout, dim in MODES:
        if layout == "NHSD":
            continue
        whole = caches(layout)
        starts = STARTS if cache_mode == "Norm" else None
        lens = LENS - 5 if cache_mode == "Norm" else LENS
        total = int(lens.sum())
        shape = (total + 3, HEADS)
        wanted = [torch.full((*shape, size), 7.0) for size in (KEY_SIZE, VALUE_SIZE)]
        pacache_torch.paged_cache_load(*whole, TABLES, lens, *wanted, cache_mode=cache_mode, seq_starts=starts)
        for cache_placement, rows in ((Shard(dim), Shard(1)), (R, R)):
            parts = [spread(cache, mesh, cache_placement) for cache in whole]
            tables, counts = spread(TABLES, mesh, R), spread(lens, mesh, R)
            begin = None if starts is None else spread(starts, mesh, R)
            out = [spread(torch.full((*shape, size), 7.0), mesh, rows) for size in (KEY_SIZE, VALUE_SIZE)]
            options = {"cache_mode": cache_mode, "seq_starts": begin}
            with no_collectives():
                pacache_torch.paged_cache_load(*parts, tables, counts, *out, **options)
                # And into outputs that the wrapper makes, whose number of rows is given or is counted.
                made = pacache_torch.paged_cache_load(*parts, tables, counts, num_tokens=total, **options)
                counted = pacache_torch.paged_cache_load(*parts, tables, counts, **options)
            for ours, theirs in zip(out, wanted, strict=True):
                compare(ours, theirs)
            for pair in (made, counted):
                for ours, theirs in zip(pair, wanted, strict=True):
                    flat = theirs[:total].flatten(1) if cache_mode == "PA_NZ" else theirs[:total]
                    assert isinstance(ours, DTensor) and ours.placements == (rows,)
                    compare(ours, flat)


@check
def packed_caches(mesh: DeviceMesh) -> None:
    shapes = {
        "2BNHD": ((2, BLOCKS, BLOCK_SIZE, HEADS, KEY_SIZE), 3),
        "B2NHD": ((BLOCKS, 2, BLOCK_SIZE, HEADS, KEY_SIZE), 3),
        "BHNC": ((BLOCKS, HEADS, BLOCK_SIZE, 2 * KEY_SIZE), 1),
        "BNHC": ((BLOCKS, BLOCK_SIZE, HEADS, 2 * KEY_SIZE), 2),
    }
    for kv_layout, (shape, dim) in shapes.items():
        for placement, rows in ((Shard(dim), Shard(1)), (R, R)):
            whole = random(*shape)
            key, value = (random(TOKENS, HEADS, KEY_SIZE, seed=seed) for seed in (3, 4))
            part = spread(whole, mesh, placement)
            with no_collectives():
                pacache_torch.scatter_pa_kv_cache_packed(
                    spread(key, mesh, rows),
                    spread(value, mesh, rows),
                    part,
                    spread(slots(), mesh, R),
                    kv_layout=kv_layout,
                )
                got = pacache_torch.paged_cache_load_packed(
                    part, spread(TABLES, mesh, R), spread(LENS, mesh, R), kv_layout=kv_layout, num_tokens=35
                )
            pacache_torch.scatter_pa_kv_cache_packed(key, value, whole, slots(), kv_layout=kv_layout)
            wanted = pacache_torch.paged_cache_load_packed(whole, TABLES, LENS, kv_layout=kv_layout, num_tokens=35)
            compare(part, whole)
            for ours, theirs in zip(got, wanted, strict=True):
                compare(ours, theirs)


@check
def a_mesh_of_two_dimensions(mesh: DeviceMesh) -> None:
    """Replicated in one and sharded in the other, in either order, and sharded in both."""
    world = mesh.size()
    square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
    for choose in (lambda s: (R, s), lambda s: (s, R), lambda s: (s, s)):
        key = random(TOKENS, HEADS, KEY_SIZE)
        whole = caches("ND")[0]
        part = spread(whole, square, *choose(Shard(2)))
        before = part.full_tensor()
        assert torch.equal(before, whole)
        index = spread(slots(), square, R, R)
        pacache_torch.scatter_pa_kv_cache(spread(key, square, *choose(Shard(1))), None, part, None, index)
        pacache_torch.scatter_pa_kv_cache(key, None, whole, None, slots())
        assert torch.equal(part.full_tensor(), whole)


# What is refused ------------------------------------------------------------------------------------------------------


def refuse(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except error as raised:
        assert text in str(raised), str(raised)
    else:
        raise AssertionError(f"not refused: {text}")


@check
def other_placements_are_refused_and_nothing_is_written(mesh: DeviceMesh) -> None:
    key, index = random(TOKENS, HEADS, KEY_SIZE), slots(TOKENS)
    whole = random(BLOCKS, BLOCK_SIZE, HEADS, KEY_SIZE, seed=5)

    def call(rows: Any, cache: Any, slot: Any, value_rows: Any = None, value_cache: Any = None) -> None:
        parts = [spread(whole, mesh, cache), spread(whole, mesh, value_cache or cache)]
        before = [part.to_local().clone() for part in parts]
        try:
            with no_collectives():
                pacache_torch.scatter_pa_kv_cache(
                    DTensor.from_local(key, mesh, [rows]) if isinstance(rows, Partial) else spread(key, mesh, rows),
                    spread(key, mesh, value_rows or (R if isinstance(rows, Partial) else rows)),
                    *parts,
                    spread(index, mesh, slot),
                )
        finally:
            for part, old in zip(parts, before, strict=True):
                assert torch.equal(part.to_local(), old)

    wanted = "scatter_pa_kv_cache: placements must be Replicate() for every argument, or key Shard(dim=1)"
    for arguments in (
        (R, Shard(2), R),
        (Shard(1), R, R),
        (Shard(1), Shard(0), R),  # blocks
        (Shard(1), Shard(1), R),  # positions
        (Shard(1), Shard(3), R),
        (Shard(0), Shard(2), R),  # tokens
        (Shard(2), Shard(2), R),
        (Shard(1), Shard(2), Shard(0)),  # slots
        (Partial(), R, R),
        (Shard(1), Shard(2), R, R),
        (Shard(1), Shard(2), R, Shard(1), R),
    ):
        refuse(ValueError, wanted, lambda arguments=arguments: call(*arguments))
    refuse(ValueError, "got key Replicate(), value Replicate(), key_cache Shard(dim=2)", lambda: call(R, Shard(2), R))


@check
def the_mode_decides_what_the_heads_are(mesh: DeviceMesh) -> None:
    """The same placements, allowed in one mode, are refused in the next: no verdict is remembered for another call."""
    width = 8  # a cache [BLOCKS, 8, 8, 8] is legal in Norm, NHSD and PA_NZ
    whole = torch.zeros(BLOCKS, width, width, width)
    key = random(TOKENS, width, width)
    index = spread(slots().clamp(max=BLOCKS * width - 1), mesh, R)

    def call(dim: int, **mode: str) -> None:
        cache = spread(whole, mesh, Shard(dim))
        pacache_torch.scatter_pa_kv_cache(spread(key, mesh, Shard(1)), None, cache, None, index, **mode)

    call(2)
    refuse(ValueError, "key_cache Shard(dim=2)", lambda: call(1))
    cache = [spread(whole, mesh, Shard(dim)) for dim in (1, 1)]
    both = spread(key, mesh, Shard(1))
    pacache_torch.scatter_pa_kv_cache(both, both, *cache, index, scatter_mode="NHSD")
    pacache_torch.scatter_pa_kv_cache(both, both, *cache, index, cache_mode="PA_NZ")
    cache = [spread(whole, mesh, Shard(dim)) for dim in (2, 2)]
    for mode in ({"scatter_mode": "NHSD"}, {"cache_mode": "PA_NZ"}):
        refuse(
            ValueError,
            "key_cache Shard(dim=1), value_cache Shard(dim=1)",
            lambda mode=mode: pacache_torch.scatter_pa_kv_cache(both, both, *cache, index, **mode),
        )


@check
def scenarios_whose_heads_are_in_slots_are_refused(mesh: DeviceMesh) -> None:
    key, lens = random(12, HEADS, KEY_SIZE), torch.tensor([7, 5])
    starts = torch.zeros(2 * HEADS, dtype=torch.int64)
    cache = spread(random(BLOCKS, BLOCK_SIZE, 1, KEY_SIZE), mesh, R)
    index = [spread(tensor, mesh, R) for tensor in (starts, torch.ones_like(starts), lens)]
    rows = spread(key, mesh, Shard(1))
    text = "placements must be Replicate() for every argument in this scenario, got key Shard(dim=1)"
    refuse(
        ValueError,
        text,
        lambda: pacache_torch.scatter_pa_kv_cache(
            rows, rows, cache, spread(random(BLOCKS, BLOCK_SIZE, 1, KEY_SIZE), mesh, R), index[0],
            compress_lens=index[1], seq_lens=index[2], scatter_mode="Alibi",
        ),
    )  # fmt: skip


@check
def plain_tensors_and_other_meshes_are_refused(mesh: DeviceMesh) -> None:
    key, cache = (spread(random(*shape), mesh, R) for shape in ((TOKENS, 2, 4), (BLOCKS, BLOCK_SIZE, 2, 4)))
    refuse(
        TypeError,
        "scatter_pa_kv_cache: slot_mapping must be a DTensor as key, got Tensor",
        lambda: pacache_torch.scatter_pa_kv_cache(key, None, cache, None, slots()),
    )
    refuse(
        TypeError,
        "scatter_pa_kv_cache: key must be a DTensor as key_cache, got Tensor",
        lambda: pacache_torch.scatter_pa_kv_cache(key.to_local(), None, cache, None, slots()),
    )
    other = init_device_mesh("cpu", (1, mesh.size()))
    refuse(
        ValueError,
        "slot_mapping must be on the device mesh of key",
        lambda: pacache_torch.scatter_pa_kv_cache(key, None, cache, None, spread(slots(), other, R, R)),
    )


@check
def whole_shapes_are_checked_on_every_device(mesh: DeviceMesh) -> None:
    """Cut unevenly, 4 and 3 heads give the first device two of each: it alone would see nothing wrong."""
    key = spread(random(TOKENS, 4, KEY_SIZE), mesh, Shard(1))
    cache = spread(random(BLOCKS, BLOCK_SIZE, 3, KEY_SIZE), mesh, Shard(2))
    refuse(
        ValueError,
        "scatter_pa_kv_cache: key_cache must be [num_blocks, block_size, num_heads, head_size] with",
        lambda: pacache_torch.scatter_pa_kv_cache(key, None, cache, None, spread(slots(), mesh, R)),
    )
    good = spread(random(TOKENS, 3, KEY_SIZE), mesh, Shard(1))
    before = cache.to_local().clone()
    refuse(
        IndexError,
        "slot_mapping[0] must be less than num_blocks * block_size = 55, got 55",
        lambda: pacache_torch.scatter_pa_kv_cache(good, None, cache, None, spread(slots() * 0 + 55, mesh, R)),
    )
    assert torch.equal(cache.to_local(), before)


# Compiled -------------------------------------------------------------------------------------------------------------


@check
def compiled(mesh: DeviceMesh) -> None:
    def step(key: DTensor, cache: DTensor, index: DTensor) -> DTensor:
        pacache_torch.scatter_pa_kv_cache(key * 2, None, cache, None, index)
        return key + 1

    key, whole = random(TOKENS, HEADS, KEY_SIZE), caches("ND")[0]
    part = spread(whole, mesh, Shard(2))
    storage = part.to_local().data_ptr()
    fast = torch.compile(step, fullgraph=True, backend="aot_eager")
    result = fast(spread(key, mesh, Shard(1)), part, spread(slots(), mesh, R))
    pacache_torch.scatter_pa_kv_cache(key * 2, None, whole, None, slots())
    compare(part, whole, storage)
    compare(result, key + 1)


# The demo's decoder ---------------------------------------------------------------------------------------------------


class TensorParallelDecoder(Decoder):
    """The demo's decoder with its heads and its MLP divided among the processes."""

    def __init__(self, config: DecoderConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, dtype=torch.float32, device=torch.device("cpu"))
        world, rank = mesh.size(), mesh.get_local_rank()
        kv = config.num_kv_heads

        def columns(weight: Tensor) -> Tensor:
            return weight.chunk(world, 1)[rank]

        def rows(weight: Tensor) -> Tensor:
            return weight.chunk(world, 0)[rank]

        def heads(qkv: Tensor) -> Tensor:
            parts = qkv.split([n * config.head_size for n in (config.num_heads, kv, kv)], 1)
            return torch.cat([columns(part) for part in parts], 1)

        self._layers = [
            dataclasses.replace(
                layer, qkv=heads(layer.qkv), attention_out=rows(layer.attention_out),
                gate=columns(layer.gate), up=columns(layer.up), down=rows(layer.down),
            )
            for layer in self._layers
        ]  # fmt: skip
        self.config = dataclasses.replace(config, num_heads=config.num_heads // world, num_kv_heads=kv // world)

    def _attention(self, *args: Any) -> Tensor:
        return _sum(super()._attention(*args))

    def _mlp(self, *args: Any) -> Tensor:
        return _sum(super()._mlp(*args))


def _sum(partial: Tensor) -> Tensor:
    dist.all_reduce(partial)
    return partial


class ShardedCache(PagedCache):
    """The demo's cache as DTensors of all heads, of which each process has its own."""

    def __init__(self, mesh: DeviceMesh, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.mesh = mesh
        dim = 2 if self.cache_mode == "Norm" else 1
        self.caches = [tuple(spread(cache, mesh, Shard(dim)) for cache in pair) for pair in self.caches]  # type: ignore
        self._key_rows, self._value_rows = (spread(t, mesh, Shard(1)) for t in (self._key_rows, self._value_rows))

    def begin_step(self, step: Step) -> None:
        super().begin_step(step)
        self._slots, self._context_lens, self._block_tables = (
            spread(index, self.mesh, R) for index in (self._slots, self._context_lens, self._block_tables)
        )

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        super().write(
            layer, *(DTensor.from_local(rows, self.mesh, [Shard(1)], run_check=False) for rows in (key, value))
        )

    def read(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        return [(key.to_local(), value.to_local()) for key, value in super().read(layer)]


@check
def the_demo_generates_what_one_process_generates(mesh: DeviceMesh) -> None:
    config = DecoderConfig(
        num_layers=2, hidden_size=64, num_heads=8, num_kv_heads=4, head_size=16, mlp_size=64, max_positions=128
    )
    requests = [Request(i, tuple(range(40 + i, 40 + i + n)), 9, i) for i, n in enumerate((5, 33, 18))]
    for cache_mode in ("Norm", "PA_NZ"):
        sizes = {
            "num_layers": 2, "num_blocks": 40, "block_size": 5, "num_kv_heads": 4, "head_size": 16,
            "max_context_tokens": 300, "cache_mode": cache_mode, "dtype": torch.float32, "device": torch.device("cpu"),
        }  # fmt: skip

        def run(decoder: Decoder, cache: PagedCache) -> Any:
            allocator = BlockAllocator(40, shuffle_seed=2)
            return serve(decoder, cache, Scheduler(requests, allocator, block_size=5, token_budget=16))

        whole = PagedCache(**sizes)
        wanted = run(Decoder(config, dtype=torch.float32, device=torch.device("cpu")), whole)
        with torch.inference_mode():  # as serve is: torch cannot take a view of an ordinary DTensor there
            parts = ShardedCache(mesh, **sizes)
        got = run(TensorParallelDecoder(config, mesh), parts)
        assert got.generated == wanted.generated and wanted.continued_chunks > 0
        assert min(wanted.top2_gaps) > 1e-3, "the tokens are not a matter of rounding"
        for pair, whole_pair in zip(parts.caches, whole.caches, strict=True):
            for part, cache in zip(pair, whole_pair, strict=True):
                ours, theirs = part.to_local(), share(cache, part)
                assert torch.equal(ours == 0, theirs == 0) and theirs.any(), "the same slots are written"
                assert torch.allclose(ours, theirs, atol=1e-4)


# A fault that must be seen --------------------------------------------------------------------------------------------


@check
def a_write_into_a_copy_of_the_shard_is_seen(mesh: DeviceMesh) -> None:
    with patch.object(
        dtensor, "_local", lambda value: value.to_local().clone() if isinstance(value, DTensor) else value
    ):
        refuse(AssertionError, "another result than in one process", lambda: scatter(mesh, MODES[0], HEADS, True))


@check
def a_wrong_slot_is_seen(mesh: DeviceMesh) -> None:
    local = dtensor._local

    def shifted(value: Any) -> Any:
        value = local(value)
        return (value + 1) % (BLOCKS * BLOCK_SIZE) if getattr(value, "dtype", None) == torch.int64 else value

    with patch.object(dtensor, "_local", shifted):
        refuse(AssertionError, "another result than in one process", lambda: scatter(mesh, MODES[0], HEADS, True))


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    key, cache = spread(random(2, 4, 8), mesh, R), spread(random(2, 3, 4, 8), mesh, R)
    results = {}
    try:
        torch.ops.pacache.scatter_pa_kv_cache(key, None, cache, None, spread(torch.tensor([0, 1]), mesh, R))
    except NotImplementedError as error:
        results["before register"] = "" if "does not have a sharding strategy registered" in str(error) else str(error)
    dtensor.register()
    dtensor.register()
    for function in CHECKS:
        try:
            function(mesh)
            results[function.__name__] = ""
        except Exception:
            results[function.__name__] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
