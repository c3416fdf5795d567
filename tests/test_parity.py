"""The operators on the CPU give what the reference gives, bit for bit and nowhere else, on any number of threads."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from strategies import FORMS, LARGE, PACKED_FORMS, Call, any_calls, packed_shape

import pacache_torch
from pacache_torch import reference

THREADS = (1, 2, 5, 16)
EMPTY = torch.zeros(0, dtype=torch.int32)
INDICES = (
    "slot_mapping",
    "compress_lens",
    "compress_seq_offsets",
    "seq_lens",
    "block_tables",
    "context_lens",
    "seq_starts",
)

pytestmark = pytest.mark.skipif(
    os.environ.get("PACACHE_FORCE_REFERENCE") == "1",
    reason="PACACHE_FORCE_REFERENCE=1: it would be held against itself",
)

# Reading values out of a drawn seed makes examples cheap to draw and shrinks them by their structure.
COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _examples(op: str, count: int) -> int:
    """The packed operators add where a half lies; how it is copied is held by the others' examples."""
    return count // 6 if op.endswith("_packed") else count


def _check(call: Call) -> None:
    expected = call.clone()
    expected.run(getattr(reference, call.op))
    for threads, module in zip(THREADS, itertools.cycle((torch.ops.pacache, pacache_torch)), strict=False):
        actual = call.clone()
        with _threads(threads):
            actual.run(getattr(module, call.op))
        assert actual.differences(expected) == [], f"on {threads} threads"


@pytest.mark.parametrize(("op", "form"), FORMS, ids=["-".join(form) for form in FORMS])
def test_parity(op: str, form: str) -> None:
    """Every form of a call, small: every dtype, layout, stride pattern, index dtype and length."""

    @settings(COMMON, max_examples=_examples(op, 300))
    @given(any_calls(op, form))
    def check(call: Call) -> None:
        _check(call)

    check()


@pytest.mark.parametrize(("op", "form"), FORMS, ids=["-".join(form) for form in FORMS])
def test_parity_when_split(op: str, form: str) -> None:
    """Every form of a call with enough bytes that the work is split between threads."""

    @settings(COMMON, max_examples=_examples(op, 12))
    @given(any_calls(op, form, sizes=LARGE))
    def check(call: Call) -> None:
        _check(call)

    check()


def _outcome(call: Call, function: Callable[..., None]) -> tuple[type[Exception], str] | None:
    try:
        call.run(function)
    except (ValueError, IndexError) as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize(("op", "form"), FORMS, ids=["-".join(form) for form in FORMS])
def test_a_wrong_value_is_refused_alike(op: str, form: str) -> None:
    """With one value of one index tensor changed, both refuse with the same words and write nothing, or both accept."""

    @settings(COMMON, max_examples=_examples(op, 150))
    @given(any_calls(op, form), st.randoms(use_true_random=False))
    def check(call: Call, rng: Random) -> None:
        indices = [t for name, t in call.tensors().items() if name in INDICES and t.numel() > 0]
        if not indices:
            return
        index = rng.choice(indices)
        where = tuple(rng.randrange(size) for size in index.shape)
        near = int(index[where]) + rng.choice((-1, 1, 2, 5))
        limits = torch.iinfo(index.dtype)
        index[where] = min(max(rng.choice((near, near, near, limits.min, limits.max)), limits.min), limits.max)
        # A changed slot may be a duplicate now. A changed window may be a mean in a row that the call does not know of.
        call = replace(call, duplicates=True)
        expected, actual = call.clone(), call.clone()
        outcome = _outcome(expected, getattr(reference, op))
        event("refused" if outcome else "accepted")
        assert _outcome(actual, getattr(torch.ops.pacache, op)) == outcome
        if outcome:
            assert expected.differences(call) == [] and actual.differences(call) == []
        elif not form.startswith("rope"):
            assert actual.differences(expected) == []

    check()


@st.composite
def _views_of_one_storage(draw: st.DrawFn) -> list[torch.Tensor]:
    """Draw key, value, key_cache and value_cache as views of one storage, of which some share bytes and some do not."""
    storage = torch.zeros(draw(st.sampled_from((90, 200, 600))), dtype=torch.float16)
    heads, head_size = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2, 5)))
    num_blocks, block_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    # Strides as engines have them: nested, in any order, with gaps that another view may fill.
    sizes = (num_blocks, block_size, heads)
    views = []
    for shape in [(2, heads, head_size)] * 2 + [(*sizes, head_size)] * 2:
        strides = [1] * len(shape)
        extent = head_size * draw(st.sampled_from((1, 2, 2, 3)))
        for dim in draw(st.permutations(range(len(shape) - 1))):
            strides[dim] = extent
            extent *= shape[dim] * draw(st.sampled_from((1, 1, 2)))
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        offset = draw(st.integers(0, storage.numel() - 1))
        view = torch.zeros(last + 1, dtype=torch.float16) if last + offset >= storage.numel() else storage[offset:]
        views.append(view.as_strided(shape, strides))
    return views


def test_shared_memory_is_refused_alike() -> None:
    """Views of one storage are refused if they share a byte, with the same words, and else accepted."""

    @settings(COMMON, max_examples=600)
    @given(_views_of_one_storage())
    def check(views: list[torch.Tensor]) -> None:
        names = ("key", "value", "key_cache", "value_cache")
        tensors: dict[str, torch.Tensor | None] = {**dict(zip(names, views, strict=True)), "slot_mapping": EMPTY}
        call = Call("scatter_pa_kv_cache", tensors, {}, names[2:])
        outcome = _outcome(call, reference.scatter_pa_kv_cache)
        assert _outcome(call, torch.ops.pacache.scatter_pa_kv_cache) == outcome

    check()


def _scatter_of_size(form: str, tokens: int, heads: int, size: int, num_blocks: int, block_size: int) -> Call:
    """Make a call of scatter_pa_kv_cache of these sizes, valid or not; one sequence in the compressed modes."""
    key_only = form.endswith("_key_only")
    form = form.removesuffix("_key_only")
    mode = {"nct": "Nct", "nhsd": "NHSD", "alibi": "Alibi", "rope": "Rope", "omni": "Omni"}.get(form, "None")
    keyword: dict[str, Any] = {"scatter_mode": mode}
    source: tuple[int, ...] = (tokens, heads, size)
    cache: tuple[int, ...] = (num_blocks, block_size, heads, size)
    slots = torch.arange(tokens) - 1
    if form == "nz":
        keyword["cache_mode"] = "PA_NZ"
        cache = (num_blocks, heads, size // 8, block_size, 8)
    elif form == "nhsd":
        cache = (num_blocks, heads, block_size, size)
    elif form == "nct":
        keyword["strides"] = [2**62, heads * size + 1]
    elif form in ("alibi", "rope", "omni", "alibi_padded", "rope_padded"):
        padded = form.endswith("_padded")
        task_shape: tuple[int, ...] = (1, heads) if padded else (heads,)
        source = (1, *source) if padded else source
        cache = (num_blocks, block_size, 1, size)
        slots = torch.zeros(task_shape, dtype=torch.int32)
        keyword["compress_lens"] = torch.full(task_shape, tokens // 2, dtype=torch.int32)
        keyword["seq_lens"] = torch.tensor([tokens])
        if not form.startswith("alibi"):
            keyword["compress_seq_offsets"] = torch.zeros(heads, dtype=torch.int64)
    tensors: dict[str, torch.Tensor | None] = {
        "key": torch.randn(source),
        "value": None if key_only else torch.randn(source),
        "key_cache": torch.zeros(cache),
        "value_cache": None if key_only else torch.zeros(cache),
        "slot_mapping": slots,
    }
    if form in PACKED_FORMS:
        kv_cache = torch.zeros(packed_shape(form, num_blocks, block_size, heads, (size, size)))
        tensors = {"key": tensors["key"], "value": tensors["value"], "kv_cache": kv_cache, "slot_mapping": slots}
        return Call("scatter_pa_kv_cache_packed", tensors, {"kv_layout": form}, ("kv_cache",), duplicates=True)
    written = ("key_cache",) if key_only else ("key_cache", "value_cache")
    return Call("scatter_pa_kv_cache", tensors, keyword, written, duplicates=True)


def _load_of_size(form: str, rows: int, heads: int, size: int, num_blocks: int, block_size: int) -> Call:
    """Make a call of paged_cache_load of these sizes, valid or not; one sequence that fills the rows."""
    nz = form == "nz"
    cache = (num_blocks, heads, size // 8, block_size, 8) if nz else (num_blocks, block_size, heads, size)
    lens = [0, rows] if form == "norm_cumsum" else [rows]
    tensors: dict[str, torch.Tensor | None] = {
        "key_cache": torch.randn(cache),
        "value_cache": torch.randn(cache),
        "block_tables": torch.zeros(1, rows, dtype=torch.int64),
        "context_lens": torch.tensor(lens, dtype=torch.int32),
        "key": torch.zeros(rows, heads * size) if nz else torch.zeros(rows, heads, size),
        "value": torch.zeros(rows, heads * size) if nz else torch.zeros(rows, heads, size),
    }
    if form in PACKED_FORMS:
        del tensors["key_cache"], tensors["value_cache"]
        kv_cache = torch.randn(packed_shape(form, num_blocks, block_size, heads, (size, size)))
        return Call("paged_cache_load_packed", {"kv_cache": kv_cache, **tensors}, {"kv_layout": form}, ("key", "value"))
    keyword = {"cache_mode": "PA_NZ" if nz else "Norm", "is_seq_lens_cumsum": form == "norm_cumsum"}
    return Call("paged_cache_load", tensors, keyword, ("key", "value"))


@pytest.mark.parametrize(("op", "form"), FORMS, ids=["-".join(form) for form in FORMS])
def test_sizes_of_zero_and_one(op: str, form: str) -> None:
    """No tokens, heads, elements, blocks or slots: both do nothing and return, or refuse with the same words."""
    make = _load_of_size if op.startswith("paged_cache_load") else _scatter_of_size
    accepted = 0
    for sizes in itertools.product((0, 1, 3), (0, 1, 2), (0, 1, 8), (0, 1, 3), (0, 1, 2)):
        expected = make(form, *sizes)
        actual = expected.clone()
        outcome = _outcome(expected, getattr(reference, op))
        assert _outcome(actual, getattr(torch.ops.pacache, op)) == outcome, sizes
        assert actual.differences(expected) == [], sizes
        accepted += outcome is None
    assert accepted >= 27


@pytest.mark.parametrize(("op", "form"), [form for form in FORMS if "rope" not in form[1]], ids=str)
def test_a_wrong_bit_is_seen(op: str, form: str) -> None:
    """The comparison notices any bit of any storage, of what is read and of what lies around the tensors too."""

    @settings(COMMON, max_examples=_examples(op, 20))
    @given(any_calls(op, form), st.randoms(use_true_random=False))
    def check(call: Call, rng: Random) -> None:
        changed = call.clone()
        assert call.differences(changed) == []
        for name, tensor in changed.tensors().items():
            memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            if memory.numel() == 0:
                continue
            where = rng.randrange(memory.numel())
            memory[where] ^= 1
            assert any(line.startswith(f"{name}:") for line in call.differences(changed))
            memory[where] ^= 1

    check()


def test_only_the_payload_of_a_mean_is_left_open() -> None:
    """A mean that is NaN equals any NaN; a copied NaN keeps its payload, and a NaN is no number."""

    def call(mean_bits: int, copied_bits: int) -> Call:
        bits = torch.tensor([copied_bits, mean_bits], dtype=torch.int16)
        cache = bits.view(torch.float16).view(1, 2, 1, 1)
        return Call("scatter_pa_kv_cache", {"key_cache": cache}, {}, ("key_cache",), mean_slots=(1,))

    quiet, other, one = 0x7E00, 0x7E55, 0x3C00
    assert call(quiet, other).differences(call(other, other)) == []
    assert call(quiet, other).differences(call(quiet, quiet)) != []
    assert call(quiet, one).differences(call(one, one)) != []
