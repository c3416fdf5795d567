"""The figures of docs/reliability.md: runs record them, this writes them into the page.

    python tests/reliability.py [--results build/reliability] [--page docs/reliability.md]

A long run calls :func:`record` with the rows of a table; the command puts each table between the two markers of its
name, ``<!-- name:begin -->`` and ``<!-- name:end -->``. A block whose run has left no record stays as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "reliability"
PAGE = ROOT / "docs" / "reliability.md"


def record(
    block: str, part: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, results: Path = RESULTS
) -> None:
    """Keep a table for the page.

    Args:
        block: name of the pair of markers.
        part: name of the table among those of this block; it takes the place of an older one of that name.
        head: column heads.
        rows: cells, as they are to be read.
        results: folder of the records.
    """
    results.mkdir(parents=True, exist_ok=True)
    table = {"date": time.strftime("%Y-%m-%d"), "head": list(head), "rows": [list(row) for row in rows]}
    (results / f"{block}.{part}.json").write_text(json.dumps(table, indent=1) + "\n")


def _render(tables: Sequence[dict[str, Any]]) -> str:
    merged: list[dict[str, Any]] = []  # tables of the same day and columns are one
    for table in tables:
        if merged and all(table[key] == merged[-1][key] for key in ("head", "date")):
            merged[-1]["rows"] += table["rows"]
        else:
            merged.append(table)
    parts = []
    for table in merged:
        head = table["head"]
        lines = [head, ["---"] * len(head), *table["rows"]]
        text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        parts.append(f"{text}\n\nRecorded {table['date']}.")
    return "\n\n".join(parts)


def fill(page: str, results: Path) -> str:
    """Give the page with every block that has records written anew."""

    def block(match: re.Match[str]) -> str:
        records = sorted(results.glob(f"{match['name']}.*.json"))
        if not records:
            return match[0]
        body = _render([json.loads(path.read_text()) for path in records])
        return f"<!-- {match['name']}:begin -->\n{body}\n<!-- {match['name']}:end -->"

    return re.sub(r"<!-- (?P<name>\w+):begin -->\n(?:.*?\n)?<!-- (?P=name):end -->", block, page, flags=re.DOTALL)


def main() -> None:
    """Fill the page."""
    parser = argparse.ArgumentParser(description="Write the recorded figures into docs/reliability.md.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    arguments.page.write_text(fill(arguments.page.read_text(), arguments.results))


if __name__ == "__main__":
    main()
