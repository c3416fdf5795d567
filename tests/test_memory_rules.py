"""What is written shares no byte with another argument, and no argument leaves its storage: exactly, not roughly.

Exactness of overlap is held against brute force over the sets of addresses of small random tensors: a call is refused
if and only if the sets meet, and the message names the first pair that does. The interleaved cache layouts that
serving engines really use (one allocation for key and value, or for all layers) must pass, shifted by one element they
must not. The last element of the storage may be used, the one behind it may not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from bad_arguments import BASES, LOAD, SCATTER, Arguments, Build, shrunk, unchecked_view
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pacache_torch import reference

BACKENDS = ("cpu", "reference")


def function(backend: str, op: str) -> Callable[..., None]:
    chosen: Callable[..., None] = getattr(torch.ops.pacache if backend == "cpu" else reference, op)
    return chosen


def refusal(backend: str, op: str, arguments: Arguments) -> str | None:
    """The message of a call that is refused for its memory, None for one that is taken."""
    try:
        function(backend, op)(**arguments)
    except ValueError as error:
        return str(error)
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Brute force

MEMORY = 2048  # bytes, every one 0xff: every index read from them is -1, every length is taken as none


def addresses(t: Tensor) -> set[int]:
    """Every byte of every element."""
    size = t.element_size()
    first = t.storage_offset() * size
    return {
        first + size * sum(i * stride for i, stride in zip(index, t.stride(), strict=True)) + byte
        for index in itertools.product(*(range(n) for n in t.shape))
        for byte in range(size)
    }


def first_overlap(op: str, written: Sequence[str], sets: dict[str, set[int]], offsets: dict[str, int]) -> str | None:
    """What the message should be: written against written, then everything else in order against the written."""
    pairs = [(b, a) for a, b in itertools.combinations(written, 2)]
    pairs += [(name, w) for name in sets if name not in written for w in written]
    for later, earlier in pairs:
        if sets[later] & sets[earlier]:
            return (
                f"{op}: {later} must not share memory with {earlier}, "
                f"got storage offsets {offsets[later]} and {offsets[earlier]}"
            )
    return None


@st.composite
def views(draw: st.DrawFn, memory: Tensor, shape: Sequence[int], *, expanded: bool) -> Tensor:
    """Any strides (0 only where the argument may be expanded), a dense last dimension, anywhere in the memory."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1):
        strides[dim] = draw(st.integers(0 if expanded or shape[dim] == 1 else 1, 17))
    # Often nested like a cache: each dimension beyond what lies inside it.
    if draw(st.booleans()):
        extent = shape[-1]
        for dim in draw(st.permutations(range(len(shape) - 1))):
            strides[dim] = extent + draw(st.integers(0, 3))
            extent = strides[dim] * shape[dim]
    offset = draw(st.integers(0, 60))
    return memory.as_strided(tuple(shape), tuple(strides), offset)


SIZES = st.integers(1, 3)
DTYPES = st.sampled_from((torch.int8, torch.int16, torch.int32))


def memory_of(dtype: torch.dtype, storages: list[Tensor], draw: st.DrawFn) -> Tensor:
    """One of the storages, as elements of a dtype."""
    return draw(st.sampled_from(storages)).view(dtype)


def storages() -> list[Tensor]:
    return [torch.full((MEMORY,), 255, dtype=torch.uint8) for _ in range(2)]


def sets_of(arguments: Arguments, names: Sequence[str]) -> tuple[dict[str, set[int]], dict[str, int]]:
    """Address sets, apart for storages that are apart, and storage offsets."""
    bases: dict[int, int] = {}
    sets, offsets = {}, {}
    for name in names:
        t = arguments[name]
        base = bases.setdefault(t.untyped_storage().data_ptr(), len(bases) * 10 * MEMORY)
        sets[name] = {base + address for address in addresses(t)}
        offsets[name] = int(t.storage_offset())
    return sets, offsets


@pytest.mark.parametrize("backend", BACKENDS)
def test_scatter_overlap_is_exact(backend: str) -> None:
    verdicts = set()

    @settings(max_examples=1500 if backend == "cpu" else 600, deadline=None, derandomize=True)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        draw: Any = data.draw
        memories = storages()
        dtype = draw(DTYPES)
        blocks, block_size, heads, key_size, value_size = (draw(SIZES) for _ in range(5))
        tokens = draw(st.integers(0, min(4, blocks * block_size)))

        def view(shape: Sequence[int], expanded: bool, of: torch.dtype = dtype) -> Tensor:
            result: Tensor = draw(views(memory_of(of, memories, draw), shape, expanded=expanded))
            return result

        slots = memory_of(draw(st.sampled_from((torch.int32, torch.int64))), memories, draw)
        arguments = {
            "key": view((tokens, heads, key_size), True),
            "value": view((tokens, heads, value_size), True),
            "key_cache": view((blocks, block_size, heads, key_size), False),
            "value_cache": view((blocks, block_size, heads, value_size), False),
            "slot_mapping": slots.as_strided((tokens,), (draw(st.integers(0, 3)),), draw(st.integers(0, 20))),
        }
        sets, offsets = sets_of(arguments, list(arguments))
        expected = first_overlap(SCATTER, ("key_cache", "value_cache"), sets, offsets)
        assert refusal(backend, SCATTER, arguments) == expected
        assert all((memory == 255).all() for memory in memories)
        verdicts.add(None if expected is None else expected.split(" got ")[0])

    check()
    assert len(verdicts) == 1 + 1 + 3 * 2, "taken, caches into each other, and every input into each cache"


def test_nct_overlap_is_exact() -> None:
    """With strides and offsets of its own: what is read decides, not what the tensor covers."""
    verdicts = set()

    @settings(max_examples=1000, deadline=None, derandomize=True)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        draw: Any = data.draw
        memory = storages()[0].view(draw(DTYPES))
        blocks, block_size, heads, head_size = (draw(SIZES) for _ in range(4))
        tokens = draw(st.integers(0, min(4, blocks * block_size)))
        stride, offset = draw(st.integers(1, 19)), draw(st.integers(0, 30))
        key = memory.as_strided((tokens, heads, head_size), (0, 0, 0), draw(st.integers(0, 60)))
        cache: Tensor = draw(views(memory, (blocks, block_size, heads, head_size), expanded=False))
        arguments = {
            "key": key,
            "value": None,
            "key_cache": cache,
            "value_cache": None,
            "slot_mapping": torch.full((tokens,), -1),
            "scatter_mode": "Nct",
            "strides": [stride, 1],
            "offsets": [offset, 0],
        }
        read = memory.as_strided((tokens, heads * head_size), (stride, 1), int(key.storage_offset()) + offset)
        sets = {"key_cache": addresses(cache), "key": addresses(read)}
        offsets = {"key_cache": int(cache.storage_offset()), "key": int(key.storage_offset())}
        expected = first_overlap(SCATTER, ("key_cache",), sets, offsets)
        for backend in BACKENDS:
            assert refusal(backend, SCATTER, arguments) == expected
        verdicts.add(expected is None)

    check()
    assert verdicts == {True, False}


def test_load_overlap_is_exact() -> None:
    verdicts = set()

    @settings(max_examples=1000, deadline=None, derandomize=True)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        draw: Any = data.draw
        memories = storages()
        dtype = draw(DTYPES)
        blocks, block_size, heads, key_size, value_size, rows = (draw(SIZES) for _ in range(6))
        batch, columns = draw(st.integers(0, 2)), draw(SIZES)

        def view(shape: Sequence[int], expanded: bool) -> Tensor:
            result: Tensor = draw(views(memory_of(dtype, memories, draw), shape, expanded=expanded))
            return result

        def index(*shape: int) -> Tensor:
            result: Tensor = draw(views(memory_of(torch.int32, memories, draw), shape, expanded=True))
            return result

        arguments = {
            "key_cache": view((blocks, block_size, heads, key_size), True),
            "value_cache": view((blocks, block_size, heads, value_size), True),
            "block_tables": index(batch, columns),
            "context_lens": index(batch),
            "key": view((rows, heads, key_size), False),
            "value": view((rows, heads, value_size), False),
            "seq_starts": index(batch),
        }
        for t in (arguments["context_lens"], arguments["seq_starts"]):
            t.zero_()  # no sequence has a token; their bytes are 0 wherever they lie
        sets, offsets = sets_of(arguments, list(arguments))
        expected = first_overlap(LOAD, ("key", "value"), sets, offsets)
        before = [memory.clone() for memory in memories]
        assert refusal("cpu", LOAD, arguments) == expected
        assert all(torch.equal(memory, old) for memory, old in zip(memories, before, strict=True))
        verdicts.add(None if expected is None else expected.split(" got ")[0])

    check()
    assert len(verdicts) == 1 + 1 + 5 * 2


# ---------------------------------------------------------------------------------------------------------------------
# Layouts of serving engines

BLOCKS, BLOCK_SIZE, HEADS, SIZE = 37, 16, 5, 24


def interleaved() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Key and value caches out of one allocation, [num_blocks, block_size, num_heads, head_size] each."""

    def storage(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    yield "halves of one tensor", *storage(2, BLOCKS, BLOCK_SIZE, HEADS, SIZE).unbind(0)
    yield "key and value of a block", *storage(BLOCKS, 2, BLOCK_SIZE, HEADS, SIZE).unbind(1)
    yield "key and value of a token", *storage(BLOCKS, BLOCK_SIZE, 2, HEADS, SIZE).unbind(2)
    yield "packed heads, split", *storage(BLOCKS, HEADS, BLOCK_SIZE, 2 * SIZE).transpose(1, 2).split(SIZE, -1)
    yield "packed heads, halves", *storage(BLOCKS, BLOCK_SIZE, HEADS, 2 * SIZE).chunk(2, -1)
    yield "heads first", *storage(BLOCKS, 2, HEADS, BLOCK_SIZE, SIZE).transpose(2, 3).unbind(1)
    yield "one layer of all", *storage(BLOCKS, 3, 2, BLOCK_SIZE, HEADS, SIZE)[:, 1].unbind(1)
    yield "two layers of all", *storage(3, BLOCKS, BLOCK_SIZE, HEADS, SIZE)[1:].unbind(0)


INTERLEAVED = list(interleaved())
IDS = [name.replace(" ", "-") for name, _, _ in INTERLEAVED]


def packed_layout(key: Tensor, value: Tensor) -> Callable[[Build], Arguments]:
    def build(b: Build) -> Arguments:
        return {
            "key": torch.ones(7, HEADS, SIZE, dtype=key.dtype),
            "value": torch.full((7, HEADS, SIZE), 2.0, dtype=key.dtype),
            "key_cache": key,
            "value_cache": value,
            "slot_mapping": torch.tensor([0, 591, 17, -1, 16, 15, 300]),
        }

    return build


@pytest.mark.parametrize(("key", "value"), [caches for _, *caches in INTERLEAVED], ids=IDS)
def test_interleaved_caches_are_taken(key: Tensor, value: Tensor) -> None:
    arguments = packed_layout(key, value)(Build("cpu"))
    for backend in BACKENDS:
        key.zero_(), value.zero_()
        assert refusal(backend, SCATTER, arguments) is None
        assert key.sum() == 6 * HEADS * SIZE and value.sum() == 2 * 6 * HEADS * SIZE
        out = torch.zeros(17, HEADS, SIZE, dtype=key.dtype), torch.zeros(17, HEADS, SIZE, dtype=key.dtype)
        tables, lens = torch.tensor([[0, 1]]), torch.tensor([17])
        function(backend, LOAD)(key, value, tables, lens, *out)
        rows = torch.zeros(17).index_fill(0, torch.tensor([0, 15, 16]), 1)[:, None, None].expand(17, HEADS, SIZE)
        assert torch.equal(out[0].float(), rows) and torch.equal(out[1].float(), 2 * rows)


@pytest.mark.parametrize(("key", "value"), [caches for _, *caches in INTERLEAVED], ids=IDS)
def test_interleaved_caches_one_element_off_are_refused(key: Tensor, value: Tensor) -> None:
    """One element towards key, value begins inside it."""
    shifted = value.as_strided(value.shape, value.stride(), value.storage_offset() - 1)
    arguments = packed_layout(key, shifted)(Build("cpu"))
    assert refusal("cpu", SCATTER, arguments) == (
        "scatter_pa_kv_cache: value_cache must not share memory with key_cache, got storage offsets "
        f"{shifted.storage_offset()} and {key.storage_offset()}"
    )


def test_a_key_inside_the_gaps_of_a_cache_is_taken() -> None:
    """The bytes between the rows of a strided cache are not the cache's."""
    memory = torch.arange(4 * 3 * 16, dtype=torch.int16)
    cache = memory.as_strided((4, 3, 2, 5), (48, 16, 8, 1), 0)
    key = memory.as_strided((5, 2, 3), (16, 8, 1), 5)
    with_key_size = cache[..., :3]
    expected = memory.clone()
    for token, slot in enumerate((7, 0, 11, 3, 5)):
        for h in range(2):
            expected[slot * 16 + h * 8 :][:3] = memory[token * 16 + h * 8 + 5 :][:3]
    slots = torch.tensor([7, 0, 11, 3, 5])
    torch.ops.pacache.scatter_pa_kv_cache(key, None, with_key_size, None, slots)
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_only_read_may_be_shared(backend: str) -> None:
    shared = torch.arange(5 * 3 * 2 * 4, dtype=torch.float32).view(5, 3, 2, 4)
    out = torch.zeros(4, 2, 4), torch.zeros(4, 2, 4)
    lens = torch.tensor([2, 2])
    function(backend, LOAD)(shared, shared, lens.expand(2, 2), lens, *out, seq_starts=lens)
    assert torch.equal(out[0], shared[2, [0, 1, 0, 1]]) and torch.equal(out[1], out[0])

    key = torch.ones(1, 2, 4).expand(3, 2, 4)
    caches = torch.zeros(2, 3, 2, 4), torch.zeros(2, 3, 2, 4)
    function(backend, SCATTER)(key, key, *caches, torch.tensor([3]).expand(3))
    assert caches[0].sum() == caches[1].sum() == 8


# ---------------------------------------------------------------------------------------------------------------------
# Within the storage


def reach(t: Tensor) -> int:
    """Elements of the storage up to the last one of a tensor."""
    return int(t.storage_offset()) + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("base", BASES)
def test_the_last_element_of_the_storage_may_be_used(backend: str, base: str) -> None:
    """Every tensor of every scenario: a storage that ends with its last element is enough, one less is not."""
    op, build = BASES[base]
    arguments = build(Build("cpu"))
    tried = 0
    for name, t in arguments.items():
        if not isinstance(t, Tensor) or (base == "nct" and name in ("key", "value")):
            continue
        needed = reach(t)
        assert refusal(backend, op, arguments | {name: shrunk(build(Build("cpu"))[name], needed)}) is None
        message = refusal(backend, op, arguments | {name: shrunk(build(Build("cpu"))[name], needed - 1)})
        assert message is not None
        assert message.startswith(f"{op}: {name} must stay within its storage of {needed - 1} elements, got shape")
        tried += 1
    assert tried >= 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_nct_may_use_the_last_element_of_the_storage(backend: str) -> None:
    build = BASES["nct"][1]
    for name, needed in (("key", 3 + 2 + 4 * 23 + 21), ("value", 1 + 1 + 4 * 17 + 15)):
        arguments = build(Build("cpu"))
        assert refusal(backend, SCATTER, arguments | {name: shrunk(arguments[name], needed)}) is None
        message = refusal(backend, SCATTER, arguments | {name: shrunk(arguments[name], needed - 1)})
        assert message is not None and message.startswith(f"scatter_pa_kv_cache: strides must keep {name} within the")


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_of_single_elements_are_not_limited(backend: str) -> None:
    """A stride that is never taken may be anything, also one whose bytes overflow."""
    huge = 2**62
    cache = unchecked_view(torch.zeros(20), [1, 4, 1, 5], [huge, 5, huge, 1])
    key = unchecked_view(torch.arange(1.0, 6.0), [1, 1, 5], [huge, huge, 1])
    slots = torch.tensor([2]).as_strided((1,), (huge,))
    function(backend, SCATTER)(key, None, cache, None, slots)
    assert cache[0, :, 0].sum(1).tolist() == [0, 0, 15, 0]

    out = unchecked_view(torch.zeros(5), [1, 1, 5], [huge, huge, 1])
    tables = torch.tensor([0]).as_strided((1, 1), (huge, huge))
    value = torch.zeros(1, 1, 5)
    function(backend, LOAD)(cache[:, 2:3], cache[:, 2:3], tables, torch.tensor([1]), out, value)
    assert out.flatten().tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nct_with_one_token_takes_any_stride(backend: str) -> None:
    """Key and cache come out of one allocation, so that the overlap search would meet the stride, and divide by it.

    2**62 elements of 4 bytes are 0 bytes in 64 bits.
    """
    memory = torch.arange(64, dtype=torch.float32)
    cache = memory.as_strided((4, 1, 1, 2), (16, 2, 2, 1), 0)
    for stride in (2**61, 2**62, 2**63 - 1):
        key = memory.as_strided((1, 1, 2), (2, 2, 1), 18)  # in a gap of the cache
        slots = torch.tensor([1])
        function(backend, SCATTER)(key, None, cache, None, slots, scatter_mode="Nct", strides=[stride, 1])
        assert memory[16:18].tolist() == [18, 19]
        memory[16:18] = torch.tensor([16.0, 17.0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_without_elements_have_no_place(backend: str) -> None:
    """No token, or no head, or no channel: nothing is read or written, wherever the tensors are said to be."""
    cache = torch.full((2, 3, 2, 4), 7.0)
    empty = cache.flatten().as_strided((0, 2, 4), (8, 4, 1), 40)
    function(backend, SCATTER)(empty, empty, cache, cache.clone(), torch.empty(0, dtype=torch.int64))
    assert (cache == 7).all()
    nothing = torch.empty(2, 3, 0, 4), torch.empty(2, 3, 0, 4)
    key = torch.empty(2, 0, 4)
    function(backend, SCATTER)(key, key, *nothing, torch.tensor([5, 0]))
    with pytest.raises(IndexError, match=r"slot_mapping\[0\] must be less than"):
        function(backend, SCATTER)(key, key, *nothing, torch.tensor([6, 0]))
    no_channel = torch.empty(2, 3, 2, 0)
    function(backend, SCATTER)(torch.empty(2, 2, 0), None, no_channel, None, torch.tensor([5, 0]))
    rows = torch.empty(0, 2, 4)
    function(backend, LOAD)(cache, cache, torch.tensor([[0]]), torch.tensor([0]), rows, rows)
