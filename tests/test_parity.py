"""The operators on the CPU give what the reference gives, bit for bit and nowhere else, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import LARGE, LOAD_FORMS, SCATTER_FORMS, SMALL, Call, Sizes, load_calls, scatter_calls

from pacache_torch import reference

THREADS = (1, 2, 5, 16)
FORMS = [("scatter_pa_kv_cache", form) for form in SCATTER_FORMS] + [("paged_cache_load", form) for form in LOAD_FORMS]

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


def _calls(op: str, form: str, sizes: Sizes) -> st.SearchStrategy[Call]:
    return load_calls(form, sizes=sizes) if op == "paged_cache_load" else scatter_calls(form, sizes=sizes)


def _check(call: Call) -> None:
    expected = call.clone()
    expected.run(getattr(reference, call.op))
    for threads in THREADS:
        actual = call.clone()
        with _threads(threads):
            actual.run(getattr(torch.ops.pacache, call.op))
        assert actual.differences(expected) == [], f"on {threads} threads"


@pytest.mark.parametrize(("op", "form"), FORMS, ids=["-".join(form) for form in FORMS])
def test_parity(op: str, form: str) -> None:
    """Every form of a call, small: every dtype, layout, stride pattern, index dtype and length."""

    @settings(COMMON, max_examples=150)
    @given(_calls(op, form, SMALL))
    def check(call: Call) -> None:
        _check(call)

    check()


@pytest.mark.parametrize(("op", "form"), FORMS, ids=["-".join(form) for form in FORMS])
def test_parity_when_split(op: str, form: str) -> None:
    """Every form of a call with enough bytes that the work is split between threads."""

    @settings(COMMON, max_examples=6)
    @given(_calls(op, form, LARGE))
    def check(call: Call) -> None:
        _check(call)

    check()


@pytest.mark.parametrize("form", ["rope", "rope_padded", "nz"])
def test_a_difference_is_seen(form: str) -> None:
    """The comparison notices one wrong bit in a result and one next to it."""

    @settings(COMMON, max_examples=20)
    @given(scatter_calls(form), st.randoms(use_true_random=False))
    def check(call: Call, rng: object) -> None:
        changed = call.clone()
        assert call.differences(changed) == []
        for name, tensor in changed.tensors().items():
            memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            if memory.numel() == 0:
                continue
            where = rng.randrange(memory.numel())  # type: ignore[attr-defined]
            memory[where] ^= 1
            found = call.differences(changed)
            memory[where] ^= 1
            assert found == [] if call.mean_slots else any(line.startswith(f"{name}:") for line in found)

    check()
