"""The same call gives the same bits, on any number of threads; what is left open is closed in deterministic mode.

Held against the reference on many threads, call by call, by test_parity.py and test_random_calls.py; here is what they
cannot see: the same call again and again, and the switches of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from random_calls import use_threads
from strategies import FORMS, LARGE, Call, any_calls

import pacache_torch
from pacache_torch import reference


@contextmanager
def deterministic(*, warn_only: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("op", "form"), FORMS, ids=["-".join(form) for form in FORMS])
def test_again_and_again(op: str, form: str) -> None:
    """Every bit of every storage, means that are no number too: one machine has one order of work for them."""

    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
    @given(any_calls(op, form, sizes=LARGE))
    def check(call: Call) -> None:
        first = call.clone()
        first.run(getattr(torch.ops.pacache, op))
        for threads in (1, 2, 5, 16, 5):
            again = call.clone()
            with use_threads(threads):
                again.run(getattr(torch.ops.pacache, op))
            assert again.differences(first) == [], f"on {threads} threads"

    check()


@pytest.mark.parametrize("warn_only", (False, True))
@pytest.mark.parametrize("mode", ("None", "Alibi", "Rope", "Omni"))
def test_the_last_writer_wins_in_deterministic_mode(mode: str, warn_only: bool) -> None:
    """Of tokens with one slot, and of heads whose rows lie on those of others; on sixteen threads."""
    batch, heads, length, size = 37, 3, 19, 33
    tokens = batch * length
    generator = torch.Generator().manual_seed(5)
    key, value = torch.randn(2, tokens, heads, size, generator=generator)
    tasks = batch * heads
    if mode == "None":
        arguments = {"slot_mapping": torch.randint(-3, 40, (tokens,), generator=generator)}
        shape = (tokens, 1, heads, size)
    else:
        arguments = {
            "slot_mapping": torch.randint(-3, 40, (tasks,), generator=generator),
            "seq_lens": torch.full((batch,), length),
            "compress_lens": torch.randint(0, 9, (tasks,), generator=generator),
        }
        if mode != "Alibi":
            arguments["compress_seq_offsets"] = torch.randint(-1, 10, (tasks,), generator=generator)
        shape = (19, 7, 1, size)
    found, expected = torch.zeros(2, 2, *shape)
    reference.scatter_pa_kv_cache(key, value, expected[0], expected[1], scatter_mode=mode, **arguments)
    for _ in range(5):
        with deterministic(warn_only=warn_only), use_threads(16):
            torch.ops.pacache.scatter_pa_kv_cache(key, value, found[0], found[1], scatter_mode=mode, **arguments)
        assert torch.equal(found, expected)


def test_rows_that_no_sequence_fills() -> None:
    """They keep what the output held; of one that is allocated, torch's switch for uninitialised memory decides."""
    cache = torch.randn(3, 4, 2, 5)
    tables, lens = torch.tensor([[1], [2]]), torch.tensor([3, 4])
    rows = torch.full((2, 9, 2, 5), 7.0)
    pacache_torch.paged_cache_load(cache, cache, tables, lens, rows[0], rows[1])
    assert torch.equal(rows[0, :3], cache[1, :3]) and (rows[:, 7:] == 7).all()
    with deterministic(warn_only=False):
        key, value = pacache_torch.paged_cache_load(cache, cache, tables, lens, num_tokens=9)
    assert torch.equal(key[:7], rows[0, :7])
    assert key[7:].isnan().all() and value[7:].isnan().all()
