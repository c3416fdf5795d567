"""The operators on the CPU give what the reference gives, bit for bit and nowhere else, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

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

    @settings(COMMON, max_examples=300)
    @given(_calls(op, form, SMALL))
    def check(call: Call) -> None:
        _check(call)

    check()


@pytest.mark.parametrize(("op", "form"), FORMS, ids=["-".join(form) for form in FORMS])
def test_parity_when_split(op: str, form: str) -> None:
    """Every form of a call with enough bytes that the work is split between threads."""

    @settings(COMMON, max_examples=12)
    @given(_calls(op, form, LARGE))
    def check(call: Call) -> None:
        _check(call)

    check()


@pytest.mark.parametrize(("op", "form"), [form for form in FORMS if "rope" not in form[1]], ids=str)
def test_a_wrong_bit_is_seen(op: str, form: str) -> None:
    """The comparison notices any bit of any storage, of what is read and of what lies around the tensors too."""

    @settings(COMMON, max_examples=20)
    @given(_calls(op, form, SMALL), st.randoms(use_true_random=False))
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
