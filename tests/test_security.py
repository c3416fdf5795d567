"""Nothing is loaded from the current directory, and variables do no more than docs/reliability.md says.

Decoys lie wherever a careless search could look; `tests/npu/test_security.py` does the same on the simulated CANN. That
no content of a tensor makes a call read or write outside a tensor is what test_bad_arguments.py, test_random_calls.py
and the sanitizers show.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import decoys
import pytest

ROOT = Path(__file__).resolve().parent.parent
PROBE = """
import os, sys, torch
import pacache_torch
from pacache_torch.__main__ import main

cache, key = torch.zeros(2, 3, 1, 5), torch.arange(10.).view(2, 1, 5) + 1
pacache_torch.scatter_pa_kv_cache(key, None, cache, None, torch.tensor([4, -1]))
out, _ = pacache_torch.paged_cache_load(cache, cache, torch.tensor([[1]]), torch.tensor([2]))
assert out[1].equal(key[0]) and not out[0].any()
try:
    pacache_torch.warmup("npu")
except pacache_torch.LibraryNotLoadedError as error:
    assert "torch_npu is not installed" in str(error)
assert main(["doctor"]) == 0
"""
# Formats, a command, a path upwards, and longer than a buffer.
HOSTILE = "%n%s%p$(touch executed)`touch executed`;../../planted/" + "A" * 70_000


def run(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PACACHE_", "ASCEND_", "ATB_"))}
    return subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=folder,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_nothing_is_loaded_from_the_current_directory(tmp_path: Path) -> None:
    """Nor from relative paths in variables. The last lines show that a decoy that is loaded would be seen."""
    marker = decoys.plant(tmp_path)
    relative = {"ASCEND_HOME_PATH": "planted", "ASCEND_TOOLKIT_HOME": "planted", "ATB_HOME_PATH": "planted",
                "ASCEND_OPP_PATH": "planted", "ASCEND_CUSTOM_OPP_PATH": "planted"}  # fmt: skip
    ran = run(tmp_path, DECOY_MARKER=str(marker), LD_LIBRARY_PATH="::lib:planted/lib64", **relative)
    assert ran.returncode == 0, ran.stderr
    assert decoys.loaded(marker) == []
    seen = subprocess.run(
        [sys.executable, "-c", "import ctypes; ctypes.CDLL('libatb.so')"],
        cwd=tmp_path,
        env={**os.environ, "DECOY_MARKER": str(marker), "LD_LIBRARY_PATH": "::lib"},
        check=False,
    )
    assert seen.returncode == 0 and decoys.loaded(marker) == ["libatb.so"]


def read_by_the_package() -> set[str]:
    """The variables of its own that the package reads."""
    texts = [path.read_text() for path in (ROOT / "csrc").rglob("*.cpp")]
    texts += [path.read_text() for path in (*(ROOT / "csrc").rglob("*.h"), *(ROOT / "pacache_torch").rglob("*.py"))]
    return set(re.findall(r'"(PACACHE_\w+)"', "".join(texts)))


def test_every_variable_is_on_the_page() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    _, _, security = page.partition("## Security")
    assert set(re.findall(r"^\| `(PACACHE_\w+)`", security, re.MULTILINE)) == read_by_the_package() != set()


def test_no_value_of_a_variable_does_harm(tmp_path: Path) -> None:
    """A value that is none of those documented is as if it were not set, or refused; PACACHE_FORCE_REFERENCE too."""
    ran = run(tmp_path, **dict.fromkeys(read_by_the_package(), HOSTILE))
    assert ran.returncode == 0, ran.stderr
    assert "run by the kernels of _C" in ran.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="not ours: ELF")
def test_the_library_names_no_relative_path() -> None:
    """What the loader looks for on its behalf is found where torch is."""
    from pacache_torch import _library

    path = _library.status()[0].path
    assert path is not None
    dynamic = subprocess.run(["readelf", "-d", "-W", path], capture_output=True, text=True, check=True).stdout
    assert "NEEDED" in dynamic
    for needed in re.findall(r"NEEDED\).*\[(.*)\]", dynamic):
        assert "/" not in needed
    for folders in re.findall(r"R(?:UN)?PATH\).*\[(.*)\]", dynamic):
        assert all(folder.startswith(("/", "$ORIGIN")) for folder in folders.split(":"))
