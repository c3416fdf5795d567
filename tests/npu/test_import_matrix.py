"""Every state of an installation with torch_npu gives what `import_matrix.py` says, on the simulated CANN."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from import_matrix import WITH_TORCH_NPU, side_by_side


@pytest.fixture(scope="module")
def checked() -> Iterator[dict[str, Future[str]]]:
    """Start them all."""
    with side_by_side() as jobs:
        yield jobs


@pytest.mark.parametrize("name", [state.name for state in WITH_TORCH_NPU])
def test_state(name: str, checked: dict[str, Future[str]]) -> None:
    """The state gives what is written."""
    assert checked[name].result()
