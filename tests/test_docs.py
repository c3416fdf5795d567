"""The Python in README.md and in docs/*.md runs as it stands.

The blocks of a page run in order and share their names. A block that needs what is not here (another package, a device)
says so in the line before it, ``<!-- not run: why -->``; it must still be Python. README.md's comments also say what it
prints.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # its disk cache replays code for an old schema

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>.+?) -->\n+)?```python\n(?P<code>.*?)```", flags=re.DOTALL)

pytestmark = [
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(page: Path) -> tuple[list[str], str]:
    """Run the blocks of a page; gives their texts and what they printed."""
    names: dict[str, object] = {}
    printed = io.StringIO()
    blocks = list(BLOCK.finditer(page.read_text()))
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            code = compile(block["code"], f"{page.name}, in the block {block['code'].splitlines()[0]!r}", "exec")
            if block["why"] is None:
                exec(code, names)
    return [block["code"] for block in blocks], printed.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_run(page: Path) -> None:
    run(page)


def test_the_readme_prints_what_it_says() -> None:
    blocks, printed = run(ROOT / "README.md")
    assert len(blocks) == 3, "write, read, error"
    said = [line.removeprefix("# ") for line in blocks[-1].splitlines() if line.startswith("# ")]
    assert printed.splitlines() == said != []


def test_pages_with_examples_are_found() -> None:
    assert {page.name for page in PAGES} >= {"README.md", "torch_compile.md"}
    assert all(len(BLOCK.findall(page.read_text())) == page.read_text().count("```python") for page in PAGES)
    assert len(BLOCK.findall((ROOT / "docs" / "torch_compile.md").read_text())) == 3


def test_an_example_that_fails_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run(page)
    page.write_text("Text.\n\n<!-- not run: needs a device -->\n```python\nimport nothing_of_that_name\n```\n")
    run(page)
