"""What a call needs it gives back, and caches may be as large as a machine can address, on the CPU.

The first part counts resident memory over many calls, right ones and wrong ones, in a process of its own
(``python test_memory_use.py``); the second works on sparse memory, of which only the pages exist that are written.
"""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bad_arguments import BASES, ROWS, Build
from reliability import record
from soak import SOAK, short_or_long
from torch import Tensor

import pacache_torch  # noqa: F401

ops = torch.ops.pacache
ON_LINUX = sys.platform.startswith("linux")
CALLS = short_or_long(4_000, 100_000)  # of each kind
ALLOWED = 1 << 20  # bytes; a leak of as little as a tensor a call would be 100 times as much


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def growth(work: Callable[[], None], count: int) -> int:
    """Resident bytes that so many calls add, behind the first ones."""
    for _ in range(count // 10):
        work()
    gc.collect()
    before = resident()
    for _ in range(count):
        work()
    gc.collect()
    return resident() - before


def many_calls() -> None:
    """Every kind of call of both operators, and a refused one of each kind of reason."""
    torch.set_num_threads(2)
    total, most = 0, 0
    for op, build in BASES.values():
        arguments, function = build(Build("cpu")), getattr(ops, op)

        def right(function: Callable[..., None] = function, arguments: dict[str, object] = arguments) -> None:
            function(**arguments)

        most = max(most, growth(right, CALLS))
        total += CALLS
    refused = {}
    for row in ROWS:
        refused.setdefault((row.op, row.needs, row.error), row)
    for row in refused.values():
        arguments, function = row.build("cpu"), getattr(ops, row.op)

        def wrong(
            function: Callable[..., None] = function,
            arguments: dict[str, object] = arguments,
            error: type[Exception] = row.error,
        ) -> None:
            try:
                function(**arguments)
            except error:
                return
            raise AssertionError("nothing was raised")

        most = max(most, growth(wrong, CALLS // 10))
        total += CALLS // 10
    # Large enough for several threads.
    key, cache = torch.randn(3000, 8, 64), torch.zeros(200, 16, 8, 64)
    slots = torch.randperm(3200)[:3000]
    rows = [torch.zeros(3200, 8, 64) for _ in range(2)]
    table, lens = torch.arange(200)[None], torch.tensor([3200])

    def large() -> None:
        ops.scatter_pa_kv_cache(key, None, cache, None, slots)
        ops.paged_cache_load(cache, cache, table, lens, *rows)

    most = max(most, growth(large, CALLS // 100))
    total += CALLS // 50
    print(f"{total} calls, at most {most} bytes more")
    assert most < ALLOWED, f"{most} bytes more in memory"
    if SOAK:
        head = ["calls of each operator", "on", "allocator's bytes and blocks", "handles of CANN", "resident memory"]
        where = f"CPU, {len(BASES)} kinds of right and {len(refused)} of wrong calls, {total:,} together"
        record(
            "memory", "1-CPU", head, [[f"{CALLS:,} of each kind", where, "", "", f"{most / 1024:+,.0f} KiB at most"]]
        )


@pytest.mark.skipif(not ON_LINUX, reason="not ours: resident memory is read as on Linux")
def test_memory_over_many_calls() -> None:
    """Resident memory stays what it was."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


def sparse(elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros of which only the pages exist that are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)


def shapes(layout: str, blocks: int) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor]]:
    """A cache of 16 tokens of 2 heads of 64 bytes in a block, and its rows by token."""
    if layout == "Norm":
        return (blocks, 16, 2, 64), lambda c: c
    if layout == "NHSD":
        return (blocks, 2, 16, 64), lambda c: c.transpose(1, 2)
    if layout == "PA_NZ":
        return (blocks, 4, 16, 32), lambda c: c.permute(0, 2, 1, 3)
    return (blocks, 2, 2, 16, 32), lambda c: c.permute(0, 3, 1, 2, 4)


@pytest.mark.skipif(not ON_LINUX, reason="not ours: memory is mapped as on Linux")
@pytest.mark.parametrize("index", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("layout", ("Norm", "PA_NZ", "PA_NZ 5-D", "NHSD"))
def test_more_than_two_to_the_33_elements(layout: str, index: torch.dtype) -> None:
    """Caches of 2**33 bytes and more; ids around 2**16 and 2**22, offsets around 2**31, 2**32 and 2**33."""
    blocks = 2**22 + 2**10  # of 2**11 elements
    shape, by_token = shapes(layout, blocks)
    before = resident()
    caches = [sparse(blocks * 2**11, torch.int8).view(shape) for _ in range(2)]
    ids = [0, 2**16 - 1, 2**16, 2**16 + 1, 2**20 - 1, 2**20, 2**21 - 1, 2**21, 2**22 - 1, 2**22, blocks - 1]
    slots = torch.tensor([16 * block + (5 * i) % 16 for i, block in enumerate(ids)])
    generator = torch.Generator().manual_seed(len(layout))
    key, value = torch.randint(1, 100, (2, len(ids), 2, 64), generator=generator, dtype=torch.int8)
    modes = {"cache_mode": "PA_NZ"} if "NZ" in layout else {}
    ops.scatter_pa_kv_cache(
        key, value, *caches, slots.to(index), scatter_mode="NHSD" if layout == "NHSD" else "None", **modes
    )
    for cache, tokens in zip(caches, (key, value), strict=True):
        rows = by_token(cache)
        for i, block in enumerate(ids):
            page = rows[block]
            place = int(slots[i]) % 16
            assert torch.equal(page[place].flatten(), tokens[i].flatten()), block
            assert int((page != 0).sum()) == 128, f"block {block} holds more than its token"
            for near in (block - 1, block + 1):
                if 0 <= near < blocks and near not in ids:
                    assert not rows[near].any(), f"block {near} was written"
    as_norm = [cache.transpose(1, 2) if layout == "NHSD" else cache for cache in caches]
    table = torch.tensor([ids, ids[::-1]]).to(index)
    lens = torch.tensor([16 * len(ids), 16 * len(ids) - 3]).to(index)
    total = int(lens.sum())
    out = [torch.zeros((total, 128) if "NZ" in layout else (total, 2, 64), dtype=torch.int8) for _ in range(2)]
    ops.paged_cache_load(*as_norm, table, lens, *out, **modes)
    for rows, tokens in zip(out, (key, value), strict=True):
        expected = torch.zeros(len(ids), 16, 128, dtype=torch.int8)
        for i in range(len(ids)):
            expected[i, int(slots[i]) % 16] = tokens[i].flatten()
        wanted = torch.cat((expected.flatten(0, 1), expected.flip(0).flatten(0, 1)[: total - 16 * len(ids)]))
        assert torch.equal(rows.flatten(1), wanted)
    assert resident() - before < 2**26, "memory that nobody wrote has been touched"


@pytest.mark.skipif(not ON_LINUX, reason="not ours: memory is mapped as on Linux")
@pytest.mark.parametrize("stride", (2**31 + 2**11, 2**32 + 2**11), ids=("2**31", "2**32"))
def test_blocks_so_far_apart(stride: int) -> None:
    """The distance of two blocks, of key and of value, is more than an int32 or an uint32 holds."""
    flat = sparse(3 * stride, torch.int8)
    caches = [flat.as_strided((3, 4, 2, 5), (stride, 20, 10, 1), lead) for lead in (3, 8)]
    key, value = torch.arange(1, 61, dtype=torch.int8).view(2, 3, 2, 5)
    slots = torch.tensor([11, 2, 5])
    ops.scatter_pa_kv_cache(key, value, *caches, slots)
    for token, slot in enumerate(slots.tolist()):
        start = slot // 4 * stride + slot % 4 * 20 + 3
        assert torch.equal(flat[start:][:20].view(2, 2, 5)[:, 0], key[token])
        assert torch.equal(flat[start:][:20].view(2, 2, 5)[:, 1], value[token])
    assert int(sum((flat[block * stride :][: 2**12] != 0).sum() for block in range(3))) == 60
    out = [torch.zeros(12, 2, 5, dtype=torch.int8) for _ in range(2)]
    ops.paged_cache_load(*caches, torch.tensor([[2, 0, 1]]), torch.tensor([12]), *out)
    places = [3, 6, 9]  # slots 11, 2, 5 are in blocks 2, 0, 1
    assert torch.equal(out[0][places], key) and torch.equal(out[1][places], value)
    assert int((out[0] != 0).any(-1).any(-1).sum()) == 3


if __name__ == "__main__":
    many_calls()
