"""Every state of an installation that has no torch_npu gives what `import_matrix.py` says, word for word."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from import_matrix import WITHOUT_TORCH_NPU, side_by_side


@pytest.fixture(scope="module")
def checked() -> Iterator[dict[str, Future[str]]]:
    with side_by_side() as jobs:
        yield jobs


@pytest.mark.parametrize("name", [state.name for state in WITHOUT_TORCH_NPU])
def test_state(name: str, checked: dict[str, Future[str]]) -> None:
    assert checked[name].result()
