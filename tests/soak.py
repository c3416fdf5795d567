"""Long forms: `make soak` sets PACACHE_SOAK=1, and tests that have one do more of the same."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

SOAK = os.environ.get("PACACHE_SOAK") == "1"


def short_or_long(short: T, long: T) -> T:
    """The first in `make test`, the second in `make soak`."""
    return long if SOAK else short
