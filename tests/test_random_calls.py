"""A part of the long run (`make fuzz`), the same calls each time."""

from __future__ import annotations

import os

import pytest
from random_calls import THREADS, check_spoiled_calls, check_valid_calls
from strategies import FORMS

pytestmark = pytest.mark.skipif(
    os.environ.get("PACACHE_FORCE_REFERENCE") == "1",
    reason="PACACHE_FORCE_REFERENCE=1: it would be held against itself",
)


def test_valid_calls_do_what_the_reference_does() -> None:
    counted = check_valid_calls(1500)
    assert counted["calls"] >= 1500
    assert all(counted[f"{threads} threads"] > 50 for threads in THREADS)
    assert all(counted[op] > 100 for op, _ in FORMS)


def test_spoiled_calls_are_refused_and_nothing_is_written() -> None:
    counted = check_spoiled_calls(3000)
    assert counted["refused"] >= 1800
    assert all(counted[error] for error in ("ValueError", "TypeError", "IndexError", "RuntimeError"))
