"""The README's Python runs as it stands, and its comments say what it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_examples_run_in_order_and_print_what_they_say() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3, "write, read, error"
    names: dict[str, object] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(compile(block, str(README), "exec"), names)
    said = [line.removeprefix("# ") for line in blocks[-1].splitlines() if line.startswith("# ")]
    assert printed.getvalue().splitlines() == said != []
