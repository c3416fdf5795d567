"""What changed between two runs?

    python benchmarks/compare.py BEFORE.json AFTER.json [--rows REGEX] [--peers REGEX]

For each row and peer that both files have: the medians, their ratio (after / before, so below 1 is faster), and how far
each run's own samples spread. A change is called one only where the quartiles of the two runs do not overlap.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness


@dataclass(frozen=True)
class Change:
    """One peer of one row in both files."""

    row: str
    peer: str
    before: dict[str, float]
    after: dict[str, float]

    @property
    def ratio(self) -> float:
        """Time after / time before."""
        return self.after["median"] / self.before["median"]

    @property
    def verdict(self) -> str:
        """Whether the quartiles lie apart."""
        if self.after["q3"] < self.before["q1"]:
            return "faster"
        if self.after["q1"] > self.before["q3"]:
            return "SLOWER"
        return ""


def spread(summary: dict[str, float]) -> float:
    """Distance of the quartiles as a part of the median."""
    return (summary["q3"] - summary["q1"]) / summary["median"]


def changes(
    before: dict[str, Any], after: dict[str, Any], rows: re.Pattern[str], peers: re.Pattern[str]
) -> list[Change]:
    """What both files have, in the order of the second."""
    old = {row["id"]: row["summary"] for row in before["rows"]}
    return [
        Change(row["id"], peer, old[row["id"]][peer], summary)
        for row in after["rows"]
        if row["id"] in old and rows.search(row["id"])
        for peer, summary in row["summary"].items()
        if peer in old[row["id"]] and peers.search(peer)
    ]


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """In what the runs differ besides the figures."""
    found = []
    for name in ("cpu", "usable_cores", "versions", "built_with", "openmp_variables", "cpu_capability"):
        one, other = before["machine"].get(name), after["machine"].get(name)
        if one != other:
            found.append(f"{name}: {one} -> {other}")
    for label, document in (("before", before), ("after", after)):
        load = document["machine"]["load_average"]
        if load > harness.machine.QUIET_LOAD:
            found.append(f"{label} was measured at a load average of {load}")
        if document["quick"]:
            found.append(f"{label} is a --quick run")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 2 when the files have nothing in common."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rows", type=re.compile, default=re.compile(""), metavar="REGEX")
    parser.add_argument("--peers", type=re.compile, default=re.compile(f"^{harness.OURS}$"), metavar="REGEX")
    arguments = parser.parse_args(argv)
    before, after = harness.read(arguments.before), harness.read(arguments.after)
    found = changes(before, after, arguments.rows, arguments.peers)
    if not found:
        print("compare: the files have no row in common")
        return 2
    for line in differences(before, after):
        print(f"note: {line}")
    print(f"{'row':<46}  {'peer':<20}  {'before':>9}  {'after':>9}  {'ratio':>6}  {'spread':>13}")
    for change in found:
        times = [harness.format_time(summary["median"]) for summary in (change.before, change.after)]
        spreads = f"{100 * spread(change.before):.0f} % {100 * spread(change.after):.0f} %"
        print(
            f"{change.row:<46}  {change.peer:<20}  {times[0]:>9}  {times[1]:>9}  {change.ratio:>5.2f}x  {spreads:>13}"
            f"  {change.verdict}".rstrip()
        )
    slower = sum(change.verdict == "SLOWER" for change in found)
    faster = sum(change.verdict == "faster" for change in found)
    print(
        f"\n{len(found)} compared: {faster} faster, {slower} slower, {len(found) - faster - slower} within the spread"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
