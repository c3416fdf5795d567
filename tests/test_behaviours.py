"""What has broken for other paged caches does not break here: a test for each behaviour, with a small input for it.

The behaviours come from public reports about other implementations; where it helps, the report is named. Whole storages
are compared, mostly with the reference; memory around the tensors is compared or made inaccessible. Caches beyond 2**31
elements lie on sparse memory, of which only the pages that are written exist.
"""

from __future__ import annotations

import inspect
import itertools
import mmap
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_arguments import BASES, LOAD, SCATTER, WRITTEN, Arguments, Build
from torch import Tensor

import pacache_torch
from pacache_torch import reference

ops = torch.ops.pacache
THREADS = (1, 2, 5, 16)

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is mapped as on Linux")


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def memory(t: Tensor) -> Tensor:
    """The whole storage as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())


def by_slot(cache: Tensor, layout: str) -> Tensor:
    """A cache as [blocks, block_size, ...], in the order of a token's elements."""
    order = {"Norm": (0, 1, 2, 3), "NHSD": (0, 2, 1, 3), "PA_NZ": (0, 2, 1, 3), "PA_NZ 5-D": (0, 3, 1, 2, 4)}
    return cache.permute(order[layout])


def agree(op: str, build: Callable[[], Arguments]) -> Arguments:
    """Run kernel and reference on arguments of their own: every storage is the same, bit for bit. Give the kernel's."""
    mine, theirs = build(), build()
    getattr(ops, op)(**mine)
    getattr(reference, op)(**theirs)
    for name, t in mine.items():
        if isinstance(t, Tensor):
            different = (memory(t) != memory(theirs[name])).nonzero().flatten()
            assert not len(different), f"{name}: bytes {different[:5].tolist()} differ"
    return mine


def scatter(slots: list[int]) -> Arguments:
    """Scenario 2 with 3 heads and 105 slots in blocks of 7."""
    b = Build("cpu")
    tokens = len(slots)
    return {
        "key": b.tensor(tokens, 3, 7),
        "value": b.tensor(tokens, 3, 5),
        "key_cache": b.tensor(15, 7, 3, 7),
        "value_cache": b.tensor(15, 7, 3, 5),
        "slot_mapping": b.index(slots),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Index dtype and range


@pytest.mark.parametrize("base", BASES)
def test_index_dtype_does_not_change_the_result(base: str) -> None:
    """int32 and int64 indices, all of them, give the same bits [vllm-project/vllm-ascend#706]."""
    op, build = BASES[base]
    results = []
    for dtype in (torch.int32, torch.int64):

        def arguments(dtype: torch.dtype = dtype) -> Arguments:
            a = build(Build("cpu"))
            for name, t in a.items():
                if isinstance(t, Tensor) and t.dtype in (torch.int32, torch.int64):
                    a[name] = Build("cpu").index(t.tolist(), dtype)
            return a

        results.append(agree(op, arguments))
    for name in WRITTEN[op]:
        if results[0][name] is not None:
            assert torch.equal(memory(results[0][name]), memory(results[1][name]))


GUARDED = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import torch
from bad_arguments import BASES, Build
from pacache_torch import reference

PAGE = 4096
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def guarded(t, at_end):
    "A tensor whose first byte follows, or whose last byte precedes, a page that nobody may touch."
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1 if t.numel() else 0
    size = last * t.element_size()
    pages = -(-max(size, 1) // PAGE)
    where = libc.mmap(None, (pages + 2) * PAGE, 0, 0x22, -1, 0)  # PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS
    assert libc.mprotect(where + PAGE, pages * PAGE, 3) == 0
    start = where + PAGE + (pages * PAGE - size if at_end else 0)
    buffer = (ctypes.c_char * max(size, 1)).from_address(start)
    memory = torch.frombuffer(buffer, dtype=torch.uint8)[:size]
    view = torch.empty(0, dtype=t.dtype).set_(memory.untyped_storage(), 0, t.shape, t.stride())
    view.copy_(t)
    return view

threads = int(sys.argv[2])
torch.set_num_threads(threads)
for base, (op, build) in BASES.items():
    for at_end in (True, False):
        def arguments():
            a = build(Build("cpu"))
            if base == "nct":  # reach of the strides given is the tensor's
                for name, stride in (("key", 21), ("value", 15)):
                    a[name] = a[name].contiguous()
                a["strides"], a["offsets"] = [21, 15], None
            return a
        mine = {k: guarded(v, at_end) if isinstance(v, torch.Tensor) else v for k, v in arguments().items()}
        theirs = arguments()
        getattr(torch.ops.pacache, op)(**mine)
        getattr(reference, op)(**theirs)
        for name, t in theirs.items():
            if isinstance(t, torch.Tensor):
                assert torch.equal(mine[name], t), (base, name)
        print(base, at_end)
"""


@needs_linux
@pytest.mark.parametrize("count", (1, 5))
def test_nothing_outside_the_tensors_is_touched(count: int) -> None:
    """Every tensor of every scenario ends, or begins, at a page whose access kills the process.

    So no int32 index is read as int64 past the end [ROCm/aiter#4697], and no padding slot is written before the cache
    [vllm-project/vllm-ascend#17214].
    """
    run = subprocess.run(
        [sys.executable, "-c", GUARDED, str(Path(__file__).parent), str(count)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, f"exit code {run.returncode} behind {run.stdout.splitlines()[-1:]}: {run.stderr}"
    assert len(run.stdout.splitlines()) == 2 * len(BASES)


# ---------------------------------------------------------------------------------------------------------------------
# Beyond 2**31


def sparse(elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros of which only the pages exist that are written."""
    size = elements * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


BIG_BLOCKS, BIG_SIZE = 2**20, 192  # times 16 positions: 3 * 2**30 elements


@needs_linux
@pytest.mark.parametrize("layout", ("Norm", "PA_NZ", "PA_NZ 5-D", "NHSD"))
def test_slots_beyond_two_to_the_31_elements(layout: str) -> None:
    """The last slots of a cache of 3 GiB of int8 are written and read back [vllm-project/vllm#1486]."""
    before = resident()
    flat = sparse(BIG_BLOCKS * 16 * BIG_SIZE, torch.int8)
    shape = {
        "Norm": (BIG_BLOCKS, 16, 1, BIG_SIZE),
        "PA_NZ": (BIG_BLOCKS, BIG_SIZE // 32, 16, 32),
        "PA_NZ 5-D": (BIG_BLOCKS, 1, BIG_SIZE // 32, 16, 32),
        "NHSD": (BIG_BLOCKS, 1, 16, BIG_SIZE),
    }[layout]
    cache = flat.view(shape)
    modes = {"cache_mode": "PA_NZ"} if "NZ" in layout else {}
    last = BIG_BLOCKS * 16 - 1
    beyond = 2**31 // BIG_SIZE + 1  # its first element is the first with an index that no int32 holds
    slots = torch.tensor([last, 0, beyond, 2**31 // BIG_SIZE, last - 16], dtype=torch.int32)
    key = (torch.arange(5 * BIG_SIZE) % 101 + 1).to(torch.int8).view(5, 1, BIG_SIZE)
    ops.scatter_pa_kv_cache(
        key,
        key if layout != "Norm" else None,
        cache,
        sparse(flat.numel(), torch.int8).view(shape) if layout != "Norm" else None,
        slots,
        scatter_mode="NHSD" if layout == "NHSD" else "None",
        **modes,
    )
    for token, slot in enumerate(slots.tolist()):
        block, position = divmod(slot, 16)
        if layout in ("Norm", "NHSD"):
            row = flat[slot * BIG_SIZE :][:BIG_SIZE]
        else:
            row = flat[block * 16 * BIG_SIZE :][: 16 * BIG_SIZE].view(-1, 16, 32)[:, position].flatten()
        assert torch.equal(row, key[token, 0]), slot
    # Where an offset modulo 2**32, or modulo 2**31, would have gone, nothing is.
    if layout in ("Norm", "NHSD"):
        written = {slot * BIG_SIZE for slot in slots.tolist()}
        for slot in slots.tolist():
            for wrap in (2**31, 2**32):
                place = slot * BIG_SIZE % wrap
                if all(abs(place - start) >= BIG_SIZE for start in written):
                    assert not flat[place:][:BIG_SIZE].any()
    if layout != "NHSD":
        table = torch.tensor([[slot // 16 for slot in slots.tolist()]], dtype=torch.int64)
        rows = 16 * table.numel()
        out = torch.zeros(rows, BIG_SIZE, dtype=torch.int8), torch.zeros(rows, BIG_SIZE, dtype=torch.int8)
        shaped = [o.view(rows, 1, BIG_SIZE) for o in out] if layout == "Norm" else out
        ops.paged_cache_load(cache, cache, table, torch.tensor([rows]), *shaped, **modes)
        for token, slot in enumerate(slots.tolist()):
            assert torch.equal(out[0][16 * token + slot % 16], key[token, 0])
            assert torch.equal(out[1][16 * token + slot % 16], key[token, 0])
    assert resident() - before < 2**28, "memory that nobody wrote has been touched"


@needs_linux
def test_block_strides_beyond_two_to_the_31_elements() -> None:
    """Blocks of a packed allocation of many layers lie 1039680 elements apart [vllm-project/vllm#50427]."""
    stride, block = 1_039_680, 3000
    flat = sparse(stride * (block + 1), torch.float16)
    caches = [flat.as_strided((block + 1, 16, 3, 40), (stride, 240, 80, 1), 40 * i) for i in range(2)]
    key = torch.arange(2 * 3 * 40, dtype=torch.float16).view(2, 3, 40) + 1
    slots = torch.tensor([block * 16 + 5, 2066 * 16])  # the first block whose offset is too large for int32
    ops.scatter_pa_kv_cache(key, -key, *caches, slots)
    for token, (at, position) in enumerate(((block, 5), (2066, 0))):
        page = flat[at * stride :][: 16 * 240].view(16, 3, 2, 40)
        assert torch.equal(page[position, :, 0], key[token]) and torch.equal(page[position, :, 1], -key[token])
        page[position] = 0
        assert not page.any()
        page[position, :, 0], page[position, :, 1] = key[token], -key[token]
    assert not flat[(2066 * stride) % 2**31 - 2**11 :][: 2**12].any()
    out = torch.zeros(17, 3, 40, dtype=torch.float16), torch.zeros(17, 3, 40, dtype=torch.float16)
    ops.paged_cache_load(*caches, torch.tensor([[block, 2066]]), torch.tensor([17]), *out)
    assert torch.equal(out[0][[5, 16]], key) and torch.equal(out[1][[5, 16]], -key)
    assert not out[0][[i for i in range(16) if i != 5]].any()


@needs_linux
def test_tokens_and_rows_beyond_two_to_the_31_elements() -> None:
    """Key and value, Nct's strides and offsets, and the rows of a load may lie that far apart too."""
    far = 2**31 + 17
    flat = sparse(2 * far + 64, torch.int8)
    key = flat.as_strided((3, 2, 5), (far, 7, 1), 3)
    key.copy_(torch.arange(30, dtype=torch.int8).view(3, 2, 5) + 1)
    slots = torch.tensor([4, 1, 5])
    cache = torch.zeros(2, 3, 2, 5, dtype=torch.int8)
    ops.scatter_pa_kv_cache(key, None, cache, None, slots)
    assert torch.equal(cache.flatten(0, 1)[slots], key)

    nct = torch.zeros(2, 3, 2, 5, dtype=torch.int8)
    token = flat.as_strided((2, 2, 5), (0, 0, 0), 0)
    flat[far : far + 40] = torch.arange(40, dtype=torch.int8) + 50
    ops.scatter_pa_kv_cache(
        token, None, nct, None, slots[:2], scatter_mode="Nct", strides=[far, 1], offsets=[far + 3, 0]
    )
    assert nct.flatten(0, 1)[4].flatten().tolist() == list(range(53, 63))
    assert torch.equal(nct.flatten(0, 1)[1].flatten(), flat[2 * far + 3 :][:10])

    out = sparse(2 * far + 64, torch.int8).as_strided((3, 2, 5), (far, 5, 1), 1)
    ops.paged_cache_load(
        cache, cache, torch.tensor([[0, 1]]), torch.tensor([3, 3])[:1], out, torch.zeros(3, 2, 5, dtype=torch.int8)
    )
    assert torch.equal(out, cache[0]) and out[1].any()


# ---------------------------------------------------------------------------------------------------------------------
# Padding, counts, nothing to do


@pytest.mark.parametrize("base", ("norm", "key_only", "nz", "nz_5d", "nhsd"))
def test_tokens_are_counted_by_slots(base: str) -> None:
    """Rows of key and value beyond slot_mapping are padding [vllm-project/vllm#13922]."""
    op, build = BASES[base]

    def padded() -> Arguments:
        a = build(Build("cpu"))
        for name in ("key", "value"):
            if a[name] is not None:
                a[name] = Build("cpu").tensor(8, *a[name].shape[1:])
        return a

    mine = agree(op, padded)
    shorter = padded()
    for name in ("key", "value"):
        if shorter[name] is not None:
            shorter[name] = shorter[name][:5].clone()
    getattr(ops, op)(**shorter)
    assert torch.equal(mine["key_cache"], shorter["key_cache"])


@pytest.mark.parametrize("slots", ([-1] * 5, [-1, 0, -1, 3, -1], [-(2**31), 2, -7, -1, -2]), ids=str)
@pytest.mark.parametrize("base", [base for base, (op, _) in BASES.items() if op == SCATTER])
def test_negative_slots_are_skipped_in_every_mode(base: str, slots: list[int]) -> None:
    """Padding of a fixed-shape graph: nothing is written for it, least of all before the cache."""
    op, build = BASES[base]
    for dtype in (torch.int32, torch.int64):

        def arguments(dtype: torch.dtype = dtype) -> Arguments:
            a = build(Build("cpu"))
            shape = a["slot_mapping"].shape
            few = torch.tensor(slots[: shape.numel()]).view(shape)
            return a | {"slot_mapping": Build("cpu").index(few.tolist(), dtype)}

        before = memory(arguments()["key_cache"])
        mine = agree(op, arguments)
        unchanged = torch.equal(memory(mine["key_cache"]), before)
        assert unchanged == all(slot < 0 for slot in mine["slot_mapping"].flatten().tolist())


def test_a_skipped_head_is_not_looked_at() -> None:
    """Nothing of a head with a negative slot is checked: padding need not be valid."""

    def arguments() -> Arguments:
        b = Build("cpu")
        return BASES["rope"][1](b) | {
            "slot_mapping": b.index([0, -1, -9, 12]),
            "compress_lens": b.index([2, 2**62, -5, 2]),
            "compress_seq_offsets": b.index([1, -(2**63), 99, 1]),
        }

    agree(SCATTER, arguments)


@pytest.mark.parametrize("slots", ([10, 11, 100, 13], [3, 2, 1, 0], [20, 21, 22, 23], [6, 7, 8, 5]), ids=str)
def test_a_run_of_slots_is_one_only_if_every_slot_is(slots: list[int]) -> None:
    """First and last slot may look like a run [vllm-project/vllm-ascend#10292]."""
    agree(SCATTER, lambda: scatter(slots))


def test_equal_slots_are_no_run() -> None:
    with threads(1):
        mine = agree(SCATTER, lambda: scatter([5, 5, 5]))
    assert torch.equal(mine["key_cache"][0, 5], mine["key"][2])


def nothing_to_do() -> Iterator[tuple[str, str, Callable[[], Arguments]]]:
    b = Build("cpu")

    def cut(base: str, **lengths: int) -> Callable[[], Arguments]:
        """A valid call with its arguments cut to so many elements of their first dimension."""

        def build() -> Arguments:
            a = BASES[base][1](b)
            return a | {name: a[name][:length] for name, length in lengths.items()}

        return build

    for base in ("norm", "nz", "nz_5d", "nhsd", "nct"):
        yield f"{base}: no tokens", SCATTER, cut(base, slot_mapping=0)
        yield f"{base}: no tokens and no rows", SCATTER, cut(base, slot_mapping=0, key=0, value=0)
        yield (
            f"{base}: no tokens, rows or blocks",
            SCATTER,
            cut(base, slot_mapping=0, key=0, value=0, key_cache=0, value_cache=0),
        )
    compressed = {"key": 0, "value": 0, "slot_mapping": 0, "compress_lens": 0, "seq_lens": 0}
    yield "alibi: no sequences", SCATTER, cut("alibi", **compressed)
    for base in ("rope", "omni", "padded_rope"):
        yield f"{base}: no sequences", SCATTER, cut(base, **compressed, compress_seq_offsets=0)
    yield (
        "omni: sequences of no tokens",
        SCATTER,
        lambda: (
            cut("omni", key=0, value=0)()
            | {
                "seq_lens": b.index([0, 0]),
                "compress_lens": b.index([0] * 4),
                "compress_seq_offsets": b.index([0, -1, 0, 0]),
            }
        ),
    )
    for base in ("load", "load_nz", "load_nz_5d"):
        yield f"{base}: no sequences", LOAD, cut(base, block_tables=0, context_lens=0)
        yield f"{base}: no tokens", LOAD, lambda base=base: BASES[base][1](b) | {"context_lens": b.index([0, 0])}
        yield (
            f"{base}: no tokens, rows or columns",
            LOAD,
            lambda base=base: (
                cut(base, key=0, value=0)()
                | {
                    "context_lens": b.index([0, 0]),
                    "block_tables": torch.zeros(2, 0, dtype=torch.int32),
                }
            ),
        )
    yield "load_cumsum: no sequences", LOAD, cut("load_cumsum", block_tables=0, context_lens=1)


NOTHING = list(nothing_to_do())


@pytest.mark.parametrize(("op", "build"), [case[1:] for case in NOTHING], ids=[case[0] for case in NOTHING])
def test_nothing_to_do_is_done(op: str, build: Callable[[], Arguments]) -> None:
    """No tokens, no sequences, no lengths: the call returns and changes nothing [sgl-project/sglang#24252]."""
    before = build()
    mine = agree(op, build)
    for name, t in mine.items():
        if isinstance(t, Tensor):
            assert torch.equal(memory(t), memory(before[name]))
    assert getattr(ops, op)(**{k: v.to("meta") if isinstance(v, Tensor) else v for k, v in build().items()}) is None


# ---------------------------------------------------------------------------------------------------------------------
# Layout and strides


def test_the_layout_is_never_guessed() -> None:
    """A shape that is legal as ND and as NZ is taken as the mode says, and as ND by default [vllm-ascend#8845]."""
    results = {}
    for mode in (None, "Norm", "PA_NZ"):

        def arguments(mode: str | None = mode) -> Arguments:
            b = Build("cpu")
            # ND: [blocks, block_size 3, heads 3, size 16]; NZ: [blocks, 3 * 16 / 16, block_size 3, 16].
            return {
                "key": b.tensor(4, 3, 16),
                "value": b.tensor(4, 3, 16),
                "key_cache": b.tensor(5, 3, 3, 16),
                "value_cache": b.tensor(5, 3, 3, 16),
                "slot_mapping": b.index([1, 14, 5, 6]),
            } | ({} if mode is None else {"cache_mode": mode})

        results[mode] = agree(SCATTER, arguments)["key_cache"]
    assert torch.equal(results[None], results["Norm"])
    assert not torch.equal(results["Norm"], results["PA_NZ"])
    schemas = {op: getattr(ops, op).default._schema for op in (SCATTER, LOAD)}
    for schema in schemas.values():
        assert {a.name: a.default_value for a in schema.arguments}["cache_mode"] == "Norm"


def test_key_and_value_are_never_told_apart_by_shape() -> None:
    """[blocks, block_size, 2, x] may hold key and value, or two heads of both: the caller slices it [LMCache#4467]."""
    for slice_it in (lambda t: t.split(1, 2), lambda t: t.split(6, 3)):

        def arguments(slice_it: Callable[[Tensor], Any] = slice_it) -> Arguments:
            b = Build("cpu")
            key_cache, value_cache = slice_it(b.tensor(5, 3, 2, 12))
            heads, size = key_cache.shape[2:]
            return {
                "key": b.tensor(4, heads, size),
                "value": b.tensor(4, heads, size) + 1,
                "key_cache": key_cache,
                "value_cache": value_cache,
                "slot_mapping": b.index([1, 14, 5, 6]),
            }

        mine = agree(SCATTER, arguments)
        assert torch.equal(mine["key_cache"].flatten(0, 1)[[1, 14, 5, 6]], mine["key"])
        assert torch.equal(mine["value_cache"].flatten(0, 1)[[1, 14, 5, 6]], mine["value"])


@pytest.mark.parametrize(
    "layout", ("unbind(0)", "unbind(1)", "unbind(2)", "transpose and split", "halves", "heads outermost")
)
def test_cache_strides_are_honoured(layout: str) -> None:
    """The layouts of vLLM give what contiguous caches give, and touch nothing else [ROCm/aiter#4531]."""
    blocks, size, heads, dim = 5, 3, 3, 7

    def caches() -> tuple[Tensor, Tensor]:
        b = Build("cpu")
        both = {
            "unbind(0)": lambda: b.tensor(2, blocks, size, heads, dim).unbind(0),
            "unbind(1)": lambda: b.tensor(blocks, 2, size, heads, dim).unbind(1),
            "unbind(2)": lambda: b.tensor(blocks, size, 2, heads, dim).unbind(2),
            "transpose and split": lambda: b.tensor(blocks, heads, size, 2 * dim).transpose(1, 2).split(dim, -1),
            "halves": lambda: b.tensor(blocks, size, heads, 2 * dim).chunk(2, -1),
            "heads outermost": lambda: b.tensor(heads, 2, size, blocks, dim).permute(1, 3, 2, 0, 4).unbind(0),
        }[layout]()
        return both

    def arguments() -> Arguments:
        b = Build("cpu")
        key_cache, value_cache = caches()
        return {
            "key": b.tensor(6, heads, dim),
            "value": b.tensor(6, heads, dim) + 1,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "slot_mapping": b.index([1, 14, -1, 5, 6, 0]),
        }

    mine = agree(SCATTER, arguments)
    plain = arguments()
    plain |= {name: plain[name].contiguous() for name in ("key_cache", "value_cache")}
    ops.scatter_pa_kv_cache(**plain)
    for name in ("key_cache", "value_cache"):
        assert torch.equal(mine[name], plain[name])

    def load() -> Arguments:
        b = Build("cpu")
        key_cache, value_cache = caches()
        return {
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_tables": b.index([[4, 0], [2, 2]]),
            "context_lens": b.index([4, 5]),
            "key": b.tensor(10, heads, dim),
            "value": b.tensor(10, heads, dim),
        }

    mine = agree(LOAD, load)
    key_cache, _ = caches()
    assert torch.equal(mine["key"][:3], key_cache[4]) and torch.equal(mine["key"][7:9], key_cache[2, :2])


def test_a_cache_that_outgrows_its_storage_is_refused_with_numbers() -> None:
    """A page stride of one unit with a block size of another [vllm-project/vllm#54877]."""
    storage = torch.zeros(4 * 96, dtype=torch.float16)
    cache = storage.as_strided((4, 16, 1, 6), (96, 6, 6, 1))
    storage.untyped_storage().resize_(2 * 383)
    with pytest.raises(ValueError) as caught:
        ops.scatter_pa_kv_cache(torch.ones(1, 1, 6).half(), None, cache, None, torch.tensor([0]))
    assert str(caught.value) == (
        "scatter_pa_kv_cache: key_cache must stay within its storage of 383 elements, "
        "got shape [4, 16, 1, 6] and strides [96, 6, 6, 1] at offset 0"
    )


def test_the_callers_own_memory_is_written() -> None:
    """A cache with heads outermost is written where it lies, not in a copy [XPU-Forces/mojo_opset#351]."""
    storage = torch.zeros(2, 5, 3, 3, 7)
    cache = storage[1].transpose(1, 2)  # [blocks, block_size, heads, size] of [blocks, heads, block_size, size]
    assert not cache.is_contiguous()
    pointer, key = cache.data_ptr(), torch.arange(2 * 3 * 7.0).view(2, 3, 7) + 1
    ops.scatter_pa_kv_cache(key, None, cache, None, torch.tensor([4, 13]))
    assert cache.data_ptr() == pointer
    assert torch.equal(storage[1, 1, :, 1], key[0]) and torch.equal(storage[1, 4, :, 1], key[1])
    assert storage.count_nonzero() == key.numel()

    rows = torch.zeros(7, 4, 3)  # [size, rows, heads], in no order that the kernel would choose
    out = rows.permute(1, 2, 0).contiguous().transpose(0, 1).contiguous().transpose(0, 1)
    assert not out.is_contiguous()
    pointer = out.data_ptr()
    ops.paged_cache_load(cache, cache, torch.tensor([[1, 4]]), torch.tensor([4]), out, torch.zeros(4, 3, 7))
    assert out.data_ptr() == pointer and torch.equal(out[1], key[0])


@pytest.mark.parametrize("heads", (1, 3, 8))
def test_every_split_of_the_work_is_complete(heads: int) -> None:
    """1 to 67 tokens on 1 to 16 threads: no row is lost or misplaced between two shares [tt-metal#54413]."""
    size, blocks, block_size = 516, 11, 7
    generator = torch.Generator().manual_seed(heads)
    for tokens in range(1, 68):
        qkv = torch.randint(-(2**31), 2**31 - 1, (tokens, 2 * heads * size), generator=generator, dtype=torch.int32)
        key, value = (x.unflatten(1, (heads, size)) for x in qkv.chunk(2, 1))
        slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
        expected = torch.zeros(2, blocks * block_size, heads, size, dtype=torch.int32)
        expected[0, slots], expected[1, slots] = key, value
        lens = torch.tensor([tokens // 3, 0, tokens - tokens // 3])
        table = torch.randint(0, blocks, (3, -(-tokens // block_size)), generator=generator)
        rows = torch.cat(
            [
                (table[b, :, None] * block_size + torch.arange(block_size)).flatten()[: int(lens[b])]
                for b in range(len(lens))
            ]
        )
        for count in THREADS:
            with threads(count):
                caches = torch.zeros(2, blocks, block_size, heads, size, dtype=torch.int32)
                ops.scatter_pa_kv_cache(key, value, caches[0], caches[1], slots)
                assert torch.equal(caches.flatten(1, 2), expected), (tokens, count)
                out = torch.zeros(2, tokens, heads, size, dtype=torch.int32)
                ops.paged_cache_load(caches[0], caches[1], table, lens, out[0], out[1])
                assert torch.equal(out, expected[:, rows]), (tokens, count)


@pytest.mark.parametrize(
    ("size", "dtype"), ((132, torch.int8), (80, torch.float16), (1, torch.int8), (1, torch.float32))
)
def test_head_sizes_need_no_alignment(size: int, dtype: torch.dtype) -> None:
    """132 columns of int8 with a scale inside, 80, 1 [ovg-project/kvcached#434]."""
    b = Build("cpu")
    for mode in ("None", "NHSD", "Nct"):

        def arguments(mode: str = mode) -> Arguments:
            shape = (5, 3, 11, size) if mode == "NHSD" else (5, 11, 3, size)
            more = {"strides": [3 * size + 1, 3 * size], "offsets": [1, 0]} if mode == "Nct" else {}
            tensors = {"key": b.tensor(19, 3, size, dtype=dtype), "value": b.tensor(19, 3, size, dtype=dtype)}
            if mode == "Nct":
                memory = {name: b.memory(2 + 19 * (3 * size + 1), dtype) for name in tensors}
                tensors = {n: m.as_strided((19, 3, size), (3 * size, size, 1), 1) for n, m in memory.items()}
            return (
                tensors
                | more
                | {
                    "key_cache": b.tensor(*shape, dtype=dtype),
                    "value_cache": b.tensor(*shape, dtype=dtype),
                    "slot_mapping": b.index([(7 * i + 3) % 55 for i in range(19)]),
                    "scatter_mode": mode,
                }
            )

        agree(SCATTER, arguments)
    agree(
        LOAD,
        lambda: {
            "key_cache": b.tensor(5, 11, 3, size, dtype=dtype),
            "value_cache": b.tensor(5, 11, 3, size, dtype=dtype),
            "block_tables": b.index([[4, 0, 3], [1, 2, 0]]),
            "context_lens": b.index([13, 23]),
            "key": b.tensor(37, 3, size, dtype=dtype),
            "value": b.tensor(37, 3, size, dtype=dtype),
        },
    )


# ---------------------------------------------------------------------------------------------------------------------
# The window's mean


@pytest.mark.parametrize("size", (3, 8, 21, 40))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=str)
def test_a_mean_is_one_sum_in_token_order(dtype: torch.dtype, size: int) -> None:
    """Windows of 1 to 67 tokens of every magnitude: another order of additions, or of roundings, gives other bits."""
    windows = [1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 31, 64, 67]
    lens = [window + 4 for window in windows]
    heads, total = 2, sum(lens)
    slots = [h * 300 + sum(lens[:b]) for b in range(len(lens)) for h in range(heads)]
    generator = torch.Generator().manual_seed(size)
    numbers = (
        torch.randn(2, total, heads, size, generator=generator)
        * 2 ** torch.arange(-6.0, 7.0)[torch.randint(13, (2, total, heads, size), generator=generator)]
    )

    def arguments() -> Arguments:
        b = Build("cpu")
        key, value = b.tensor(total, heads, size, dtype=dtype), b.tensor(total, heads, size, dtype=dtype)
        key.copy_(numbers[0]), value.copy_(numbers[1])
        return {
            "key": key,
            "value": value,
            "key_cache": b.tensor(90, 7, 1, size, dtype=dtype),
            "value_cache": b.tensor(90, 7, 1, size, dtype=dtype),
            "slot_mapping": b.index(slots),
            "compress_lens": b.index([window for window in windows for _ in range(heads)]),
            "compress_seq_offsets": b.index([offset for _ in windows for offset in (1, 3)]),
            "seq_lens": b.index(lens),
            "scatter_mode": "Rope",
        }

    assert total == 278 and max(slots) + lens[-1] <= 90 * 7
    assert agree(SCATTER, arguments)["key_cache"].isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# Loads


def paged(starts: list[int] | None, lens: list[int], table: list[list[int]], **more: Any) -> Callable[[], Arguments]:
    b = Build("cpu")
    rows = lens[-1] if more.get("is_seq_lens_cumsum") else sum(lens)

    def build() -> Arguments:
        return {
            "key_cache": b.tensor(4, 64, 1, 3),
            "value_cache": b.tensor(4, 64, 1, 5),
            "block_tables": b.index(table),
            "context_lens": b.index(lens),
            "key": b.tensor(rows + 1, 1, 3),
            "value": b.tensor(rows + 1, 1, 5),
            "seq_starts": None if starts is None else b.index(starts),
        } | more

    return build


def test_a_start_may_not_lead_past_the_row_of_the_table() -> None:
    """Not even into the next row, where ids that look good are [vllm-project/vllm#49427]."""
    for starts, lens, table in (
        ([128], [65], [[1, 2]]),
        ([128], [1], [[1, 2]]),
        ([64], [65], [[1, 2]]),
        ([0], [129], [[1, 2]]),
        ([64, 0], [65, 1], [[1, 2], [3, 0]]),
    ):
        with pytest.raises(ValueError, match=r"^paged_cache_load: block_tables must have the columns for context_lens"):
            ops.paged_cache_load(**paged(starts, lens, table)())
    mine = agree(LOAD, paged([64], [64], [[1, 2]]))
    assert torch.equal(mine["key"][:64], mine["key_cache"][2])
    agree(LOAD, paged([128], [0], [[1, 2]]))


def test_starts_skip_whole_blocks_only() -> None:
    """What is below a multiple of the block size is dropped, as on the device [vllm-project/vllm-ascend#2943]."""
    aligned = agree(LOAD, paged([64, 0], [70, 3], [[1, 2, 3], [0, 1, 2]]))
    for start in (65, 127):
        mine = agree(LOAD, paged([start, 63], [70, 3], [[1, 2, 3], [0, 1, 2]]))
        for name in ("key", "value"):
            assert torch.equal(memory(mine[name]), memory(aligned[name]))
    assert torch.equal(aligned["key"][:64], aligned["key_cache"][2])
    assert torch.equal(aligned["value"][64:70], aligned["value_cache"][3, :6])


def test_lengths_per_sequence_are_no_row_boundaries() -> None:
    """Which of the two it is, is said and not guessed; the wrong one does not fit [sgl-project/sglang#22020]."""
    with pytest.raises(ValueError) as caught:
        ops.paged_cache_load(**paged(None, [70, 3], [[1, 2], [0, 3]], is_seq_lens_cumsum=True)())
    assert str(caught.value) == (
        "paged_cache_load: context_lens must be [batch + 1] = [3] with is_seq_lens_cumsum, got [2]"
    )
    boundaries = agree(LOAD, paged(None, [0, 70, 73], [[1, 2], [0, 3]], is_seq_lens_cumsum=True))
    lengths = agree(LOAD, paged(None, [70, 3], [[1, 2], [0, 3]]))
    assert torch.equal(boundaries["key"], lengths["key"])


def test_rows_begin_at_the_first_boundary() -> None:
    """It need not be 0: rows before it are somebody else's."""
    mine = agree(LOAD, paged(None, [2, 5], [[3]], is_seq_lens_cumsum=True))
    assert torch.equal(mine["key"][2:5], mine["key_cache"][3, :3])
    assert torch.equal(mine["key"][:2], Build("cpu").tensor(6, 1, 3)[:2])


def test_unused_entries_of_a_table_are_not_looked_at() -> None:
    agree(LOAD, paged([0, 64], [64, 5], [[2, -1, 2**62], [-(2**63), 1, 99]]))


# ---------------------------------------------------------------------------------------------------------------------
# Duplicate slots and threads


@pytest.mark.parametrize("layout", ("Norm", "NHSD", "PA_NZ", "PA_NZ 5-D"))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("count", THREADS)
def test_the_last_of_equal_slots_wins_in_deterministic_mode(count: int, dtype: torch.dtype, layout: str) -> None:
    """On any number of threads; and on one thread without being asked."""
    tokens, size, blocks, block_size = 2500, 96, 361, 7
    generator = torch.Generator().manual_seed(count)
    slots = torch.randint(-2, 30, (tokens,), generator=generator)
    slots[::50] = torch.arange(50) + 20  # some are in order, and written again
    key = torch.randint(-128, 127, (tokens, 1, size), generator=generator, dtype=torch.int8)
    expected = torch.zeros(blocks * block_size, size, dtype=torch.int8)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot] = key[token, 0]
    shape = {
        "Norm": (blocks, block_size, 1, size),
        "NHSD": (blocks, 1, block_size, size),
        "PA_NZ": (blocks, size // 32, block_size, 32),
        "PA_NZ 5-D": (blocks, 1, size // 32, block_size, 32),
    }[layout]
    more = {"NHSD": {"scatter_mode": "NHSD"}, "Norm": {}}.get(layout, {"cache_mode": "PA_NZ"})

    def store() -> list[Tensor]:
        caches = torch.zeros(2, *shape, dtype=torch.int8)
        ops.scatter_pa_kv_cache(key, key, caches[0], caches[1], slots.to(dtype), **more)
        return [by_slot(cache, layout).reshape(-1, size) for cache in caches]

    with threads(count), deterministic():
        for cache in store():
            assert torch.equal(cache, expected)
    if count == 1:
        with threads(1):
            for cache in store():
                assert torch.equal(cache, expected)


def test_one_of_equal_slots_wins_whole() -> None:
    """Without deterministic mode it is open which token wins, but it is one of those that were given."""
    tokens, size = 4000, 96
    key = torch.arange(tokens, dtype=torch.int32).view(-1, 1, 1).repeat(1, 1, size)
    slots = torch.arange(tokens) % 3
    cache = torch.full((tokens, 1, 1, size), -1, dtype=torch.int32)
    with threads(16):
        ops.scatter_pa_kv_cache(key, None, cache, None, slots)
    for slot in range(3):
        assert set(cache[slot].flatten().tolist()) <= set(range(slot, tokens, 3))
    assert (cache[3:] == -1).all()


def test_calls_from_several_python_threads_do_not_meet() -> None:
    """Kernels keep nothing between calls: eight threads work on caches of their own, over and over."""
    failures: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            key = torch.randn(300, 3, 64, generator=generator)
            cache = torch.zeros(19, 16, 3, 64)
            slots = torch.randperm(19 * 16, generator=generator)[:300]
            ops.scatter_pa_kv_cache(key, None, cache, None, slots)
            out = torch.zeros(2, 304, 3, 64)
            ops.paged_cache_load(cache, cache, torch.arange(19)[None], torch.tensor([304]), out[0], out[1])
            if not torch.equal(out[0, slots], key):
                failures.append(f"thread {seed}")

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


# ---------------------------------------------------------------------------------------------------------------------
# Calls so large that they go past the processor's cache


def placed(*shape: int, lead: int, gap: int, seed: int) -> Tensor:
    """Random int16 with so many elements before it, and between its outermost entries."""
    inner = 1
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape))):
        strides[dim] = inner + (gap if dim == 0 else 0)
        inner *= shape[dim]
    elements = lead + strides[0] * shape[0] + 1
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randint(-(2**15), 2**15, (elements,), generator=generator, dtype=torch.int16)
    return memory.as_strided(shape, strides, lead)


def mixed_slots(tokens: int, total: int) -> list[int]:
    """Runs of every length, strangers, padding, a run backwards: each slot once."""
    runs, first, length = [], 0, 1
    while first < tokens:
        runs.append(list(range(first, min(first + length, tokens))))
        first += length
        length = length * 2 % 67
    order = torch.randperm(len(runs), generator=torch.Generator().manual_seed(3)).tolist()
    slots = [slot + total - tokens for run in (runs[i] for i in order) for slot in run]
    slots[100:140] = reversed(slots[100:140])
    slots[7::97] = [-1] * len(slots[7::97])
    return slots


@pytest.mark.parametrize(("lead", "gap"), ((0, 0), (8, 16), (1, 0), (3, 5)), ids=str)
@pytest.mark.parametrize("layout", ("Norm", "PA_NZ", "PA_NZ 5-D", "NHSD"))
def test_calls_past_the_cache(layout: str, lead: int, gap: int) -> None:
    """More than 16 MiB, aligned to lines, to units, and to nothing: no byte is lost at any end, none beside written."""
    tokens, heads, blocks, block_size = 1237, 2, 120, 11
    nz = layout.startswith("PA_NZ")
    sizes = (2032, 1488) if nz else (2035, 1491)
    modes = {"cache_mode": "PA_NZ"} if nz else {}
    keys = ("key", "value")

    def cache(size: int, seed: int) -> Tensor:
        shape = {
            "Norm": (blocks, block_size, heads, size),
            "PA_NZ": (blocks, heads * size // 16, block_size, 16),
            "PA_NZ 5-D": (blocks, heads, size // 16, block_size, 16),
            "NHSD": (blocks, heads, block_size, size),
        }[layout]
        return placed(*shape, lead=lead, gap=gap, seed=seed)

    slots = torch.tensor(mixed_slots(tokens, blocks * block_size))
    written = (slots >= 0).nonzero().flatten()
    at = slots[written] // block_size, slots[written] % block_size
    source = {k: placed(tokens, heads, d, lead=gap, gap=lead, seed=d) for k, d in zip(keys, sizes, strict=True)}
    expected = {k: cache(d, d) for k, d in zip(keys, sizes, strict=True)}
    for k in keys:
        target = by_slot(expected[k], layout)
        target[at] = source[k][written].view(-1, *target.shape[2:]) if nz else source[k][written]
    lens = [0, 500, 1, tokens - 501]
    table = torch.randint(0, blocks, (4, 1 + max(lens) // block_size), generator=torch.Generator().manual_seed(5))
    row_of = [(b, j) for b, length in enumerate(lens) for j in range(length)]
    ids = torch.tensor([int(table[b, j // block_size]) for b, j in row_of])
    positions = torch.tensor([j % block_size for _, j in row_of])

    for count in (1, 5):
        with threads(count):
            caches = [cache(d, d) for d in sizes]
            more = modes | ({"scatter_mode": "NHSD"} if layout == "NHSD" else {})
            ops.scatter_pa_kv_cache(*source.values(), *caches, slots.to(torch.int32), **more)
            for k, mine in zip(keys, caches, strict=True):
                assert torch.equal(memory(mine), memory(expected[k])), (k, count)
            if layout == "NHSD":
                continue
            rows = [
                placed(tokens + 1, *((heads * d,) if nz else (heads, d)), lead=lead, gap=gap, seed=d) for d in sizes
            ]
            right = [memory(r).clone().view(torch.int16).as_strided(r.shape, r.stride(), lead) for r in rows]
            ops.paged_cache_load(*caches, table, torch.tensor(lens), *rows, **modes)
            for k, mine, it in zip(keys, rows, right, strict=True):
                it[:tokens] = by_slot(expected[k], layout)[ids, positions].reshape(tokens, *it.shape[1:])
                assert torch.equal(memory(mine), memory(it)), (k, count)


# ---------------------------------------------------------------------------------------------------------------------
# Registration


def test_nothing_is_returned() -> None:
    """A returned alias cannot be compiled without a copy [pytorch/pytorch#91249]."""
    for op, build in (BASES["norm"], BASES["load"]):
        schema = getattr(ops, op).default._schema
        assert schema.returns == []
        assert getattr(ops, op)(**build(Build("cpu"))) is None


def test_what_is_written_is_declared() -> None:
    """Each written argument is an alias set of its own; nothing else is [pytorch/pytorch#99744]."""
    for op, written in WRITTEN.items():
        schema = getattr(ops, op).default._schema
        mutable = {a.name: a.alias_info.before_set for a in schema.arguments if a.alias_info is not None}
        assert set(mutable) == set(written)
        assert len(set(itertools.chain(*mutable.values()))) == len(written)
        assert all(a.alias_info.is_write for a in schema.arguments if a.alias_info is not None)
        assert not [tag for tag in getattr(ops, op).default.tags if tag == torch.Tag.out]
        assert torch.Tag.pt2_compliant_tag in getattr(ops, op).default.tags
        assert getattr(ops, op).overloads() == ["default"]


def test_the_wrappers_take_what_the_operators_take() -> None:
    """pacache_torch.<op> and torch.ops.pacache.<op> have the same arguments, in order, with the same defaults."""
    for op in WRITTEN:
        mine = inspect.signature(getattr(pacache_torch, op)).parameters
        schema = getattr(ops, op).default._schema.arguments
        names = [name for name in mine if name != "num_tokens"]
        assert names == [a.name for a in schema]
        for argument in schema:
            parameter = mine[argument.name]
            assert (parameter.kind == parameter.KEYWORD_ONLY) == argument.kwarg_only
            if argument.name == "kv_layout":
                assert parameter.default is parameter.empty
            elif argument.kwarg_only:
                assert parameter.default == argument.default_value
