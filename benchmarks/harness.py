"""Timing, results and tables, the same for every benchmark.

Peers of one row are timed in turn, round after round, in one process. Each sample is preceded by an untimed call of
the same peer, so that none finds memory that another has warmed or evicted, and repeats its call until it lasts long
enough for the clock. A row has enough rounds when the medians are steady, or its time is up.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import machine
from tqdm import tqdm

SCHEMA = 1
RESULTS = machine.HERE / "results"
OURS = "pacache"


@dataclass
class Peer:
    """One way to do the work of a row."""

    name: str
    call: Callable[[], object]
    before: Callable[[], object] | None = None  # untimed, before the untimed call of each sample


@dataclass(frozen=True)
class Check:
    """What a row must reach.

    ``speed``: time of ``against`` / our time, at least ``target``. ``time``: our time / time of ``against``, at most.
    ``extra_us``: our time - time of ``against`` in microseconds, at most. ``time`` takes ``allowance_us`` off our time
    first. With several names in ``against`` the fastest of them counts.
    """

    kind: Literal["speed", "time", "extra_us"]
    against: tuple[str, ...]
    target: float | None = None
    label: str = ""
    allowance_us: float = 0.0
    ours: str = OURS

    @property
    def name(self) -> str:
        """What the peers are called in a table."""
        return self.label or self.against[0]


def speed(against: str | Sequence[str], target: float | None = None, label: str = "") -> Check:
    """At least ``target`` times as fast as ``against`` (None: for information)."""
    return Check("speed", (against,) if isinstance(against, str) else tuple(against), target, label)


@dataclass
class Row:
    """One line of a benchmark: its samples and what they are held against."""

    id: str
    work: str
    group: str
    threads: int | None = None
    tokens: int | None = None
    bytes_moved: int | None = None  # read and written by one call
    samples: dict[str, list[float]] = field(default_factory=dict)  # seconds per call
    checks: list[dict[str, Any]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)  # peer: why it is not here
    facts: dict[str, Any] = field(default_factory=dict)
    simulated: bool = False

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file, with the summary of every peer."""
        return {
            "id": self.id,
            "work": self.work,
            "group": self.group,
            "threads": self.threads,
            "tokens": self.tokens,
            "bytes_moved": self.bytes_moved,
            "simulated": self.simulated,
            "summary": {name: summarize(values) for name, values in self.samples.items()},
            "checks": self.checks,
            "absent": self.absent,
            "facts": self.facts,
            "samples": {name: [float(f"{value:.6g}") for value in values] for name, values in self.samples.items()},
        }


@dataclass(frozen=True)
class Budget:
    """How long a row may take and how sure it must be."""

    seconds: float = 0.7
    min_rounds: int = 7
    max_rounds: int = 200
    sample_seconds: float = 200e-6
    steady: float = 0.004  # standard error of a median, as a part of it

    @staticmethod
    def quick() -> Budget:
        """Enough to see that it runs."""
        return Budget(seconds=0.02, min_rounds=2, max_rounds=10, sample_seconds=50e-6)


def summarize(values: Sequence[float]) -> dict[str, float | int]:
    """Median, quartiles, extremes and number of samples, in seconds."""
    low, middle, high = quartiles(values)
    return {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values), "n": len(values)}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The quartiles, also of very few values."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _steady(values: Sequence[float], budget: Budget) -> bool:
    low, middle, high = quartiles(values)
    return (high - low) / 1.35 * 1.25 / math.sqrt(len(values)) <= budget.steady * middle


def _sample(peer: Peer, repeats: int) -> float:
    call = peer.call
    if peer.before is not None:
        peer.before()
    call()
    begin = time.perf_counter_ns()
    for _ in range(repeats):
        call()
    return (time.perf_counter_ns() - begin) / repeats * 1e-9


def measure(peers: Sequence[Peer], budget: Budget) -> dict[str, list[float]]:
    """Time the peers in turn.

    Args:
        peers: what to time, in the order in which they take turns.
        budget: how long and how often.

    Returns:
        Seconds per call, one value a round, by name.
    """
    repeats = {}
    for peer in peers:
        once = _sample(peer, 1)
        if once < budget.sample_seconds:  # then a first, cold value says nothing about the number of repeats
            once = min(once, *(_sample(peer, 1) for _ in range(3)))
        repeats[peer.name] = max(1, min(10_000, math.ceil(budget.sample_seconds / max(once, 1e-9))))
    samples: dict[str, list[float]] = {peer.name: [] for peer in peers}
    collecting = gc.isenabled()
    gc.disable()
    try:
        end = time.perf_counter() + budget.seconds
        for number in range(1, budget.max_rounds + 1):
            for peer in peers:
                samples[peer.name].append(_sample(peer, repeats[peer.name]))
            if number < budget.min_rounds:
                continue
            enough = number >= 3 * budget.min_rounds and all(_steady(values, budget) for values in samples.values())
            if enough or time.perf_counter() > end:
                break
    finally:
        if collecting:
            gc.enable()
    return samples


def judge(check: Check, samples: dict[str, list[float]]) -> dict[str, Any] | None:
    """Hold samples against a check: ratio of medians, quartiles of the rounds' ratios, target, met or not.

    None when no peer of the check was measured.
    """
    there = [name for name in check.against if samples.get(name)]
    if not there or not samples.get(check.ours):
        return None
    best = min(there, key=lambda name: statistics.median(samples[name]))
    allowance = check.allowance_us * 1e-6

    def value(ours: float, theirs: float) -> float:
        if check.kind == "speed":
            return theirs / ours
        if check.kind == "time":
            return (ours - allowance) / theirs
        return (ours - theirs) * 1e6

    middle = value(statistics.median(samples[check.ours]), statistics.median(samples[best]))
    rounds = [value(a, b) for a, b in zip(samples[check.ours], samples[best], strict=False)]
    low, _, high = quartiles(rounds)
    met = None
    if check.target is not None:
        met = middle >= check.target if check.kind == "speed" else middle <= check.target
    return {
        "kind": check.kind,
        "against": check.name,
        "fastest": best if len(check.against) > 1 else None,
        "target": check.target,
        "value": middle,
        "low": low,
        "high": high,
        "met": met,
        "allowance_us": check.allowance_us,
    }


def given(kind: str, against: str, value: float, target: float | None) -> dict[str, Any]:
    """A check whose value was found otherwise: ``at_least``, or ``at_most``."""
    met = None if target is None else (value >= target if kind == "at_least" else value <= target)
    return {
        "kind": kind,
        "against": against,
        "fastest": None,
        "target": target,
        "value": value,
        "low": value,
        "high": value,
        "met": met,
        "allowance_us": 0.0,
    }


# ---- words -----------------------------------------------------------------------


def format_time(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, size in (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * size or unit == "ms":
            return f"{seconds / size:.3g} {unit}"
    raise AssertionError


def format_value(check: dict[str, Any], value: float | None = None) -> str:
    """The value of a check with its unit."""
    value = check["value"] if value is None else value
    if check["kind"] == "extra_us":
        return f"{value:+.2f} us"
    if check["kind"].startswith("at_"):
        return f"{value:.0f}" if float(value).is_integer() else f"{value:.2f}"
    return f"{value:.2f}x"


def format_target(check: dict[str, Any]) -> str:
    """What was asked for; an empty text when nothing was."""
    if check["target"] is None:
        return ""
    sign = ">=" if check["kind"] in ("speed", "at_least") else "<="
    unit = {"extra_us": " us", "speed": "x", "time": "x"}.get(check["kind"], "")
    less = f" (after {check['allowance_us']:g} us)" if check["allowance_us"] else ""
    return f"{sign} {check['target']:g}{unit}{less}"


def format_met(check: dict[str, Any]) -> str:
    """Met, not met, or nothing asked."""
    return {True: "met", False: "NOT MET", None: ""}[check["met"]]


def gigabytes_per_second(row: dict[str, Any], peer: str = OURS) -> float | None:
    """Bytes read and written by one call, over its median time."""
    if not row["bytes_moved"] or peer not in row["summary"]:
        return None
    return row["bytes_moved"] / row["summary"][peer]["median"] / 1e9


_WIDTHS = (8, 6, 42, 9, 15, 15)  # of the columns behind the first


def _line(width: int, *cells: str) -> str:
    return "  ".join(f"{cell:<{wide}}" for cell, wide in zip(cells, (width, *_WIDTHS), strict=False)).rstrip()


def print_head(width: int) -> None:
    """The table's first lines."""
    print(_line(width, "work", "time", "GB/s", "against", "measured", "spread", "target"))
    print("-" * (width + sum(_WIDTHS) + 2 * len(_WIDTHS)), flush=True)


def print_row(row: dict[str, Any], width: int) -> None:
    """One line per check, above the progress bar."""
    threads = f", {row['threads']} thread{'s' if row['threads'] > 1 else ''}" if row["threads"] else ""
    simulated = " (simulated)" if row["simulated"] else ""
    ours = row["summary"].get(OURS)
    rate = gigabytes_per_second(row)
    work = row["work"] + threads + simulated
    cells = [work, format_time(ours["median"]) if ours else "", f"{rate:.1f}" if rate else ""]
    lines = [] if row["checks"] else [_line(width, *cells)]
    for check in row["checks"]:
        against = check["against"] + (f" ({check['fastest']})" if check["fastest"] else "")
        spread = f"{check['low']:.2f} - {check['high']:.2f}" if check["low"] != check["high"] else ""
        verdict = f"{format_target(check)}  {format_met(check)}"
        lines.append(_line(width, *cells, against, format_value(check), spread, verdict))
        cells = ["", "", ""]
    lines += [_line(width, "", "", "", f"{peer}: absent ({why})") for peer, why in row["absent"].items()]
    lines += [_line(width, "", "", "", f"{name}: {value}") for name, value in row["facts"].items()]
    tqdm.write("\n".join(lines), file=sys.stdout)
    sys.stdout.flush()


# ---- files and command lines -----------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every benchmark has."""
    parser.add_argument("--quick", action="store_true", help="a few samples each, to see that it runs")
    parser.add_argument("--rows", type=re.compile, default=None, metavar="REGEX", help="only rows whose id matches")
    parser.add_argument("--seconds", type=float, default=None, help="time for the samples of one row")
    parser.add_argument(
        "--output", type=Path, default=None, help="JSON file (default: in benchmarks/results, --quick: in its quick/)"
    )
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")


def budget_of(arguments: argparse.Namespace) -> Budget:
    """What the arguments say about time."""
    budget = Budget.quick() if arguments.quick else Budget()
    if arguments.seconds is not None:
        budget = Budget(arguments.seconds, budget.min_rounds, budget.max_rounds, budget.sample_seconds)
    return budget


def selected(arguments: argparse.Namespace, row_id: str) -> bool:
    """Whether ``--rows`` takes this row."""
    return arguments.rows is None or arguments.rows.search(row_id) is not None


def progress(total: int, arguments: argparse.Namespace, description: str) -> tqdm:
    """A progress bar on stderr, if that is a terminal."""
    return tqdm(
        total=total, desc=description, disable=True if arguments.no_progress else None, leave=False, file=sys.stderr
    )


class Report:
    """The rows of one run, its table as it grows, and its file."""

    def __init__(self, benchmark: str, arguments: argparse.Namespace, *, width: int = 62) -> None:
        self.benchmark = benchmark
        self.width = width  # of the table's first column
        self.arguments = arguments
        self.rows: list[dict[str, Any]] = []
        self.begin = time.time()
        self.machine = machine.describe()
        machine.warn_if_busy()
        if len(self.machine["openmp"]) > 1:
            print(f"warning: two OpenMP runtimes are loaded: {self.machine['openmp']}", file=sys.stderr)
        print_head(width)

    def add(self, row: Row) -> dict[str, Any]:
        """Keep a row and print it."""
        found = row.to_json()
        self.rows.append(found)
        print_row(found, self.width)
        return found

    def finish(self, **more: Any) -> Path:
        """Write the file and say how many targets were met."""
        judged = [check for row in self.rows for check in row["checks"] if check["met"] is not None]
        met = sum(check["met"] for check in judged)
        absent = {peer: why for row in self.rows for peer, why in row["absent"].items()}
        document = {
            "schema": SCHEMA,
            "benchmark": self.benchmark,
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "seconds": round(time.time() - self.begin, 1),
            "quick": self.arguments.quick,
            "simulated": any(row["simulated"] for row in self.rows),
            "machine": {**self.machine, "load_average_at_end": machine.load_average()},
            "absent": absent,
            **more,
            "rows": self.rows,
        }
        folder = RESULTS / "quick" if self.arguments.quick else RESULTS  # never over a measurement
        output: Path = self.arguments.output or folder / f"{self.benchmark}.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(document) + "\n")
        note = " (--quick: no verdict)" if self.arguments.quick else ""
        print(f"\n{len(self.rows)} rows, {met} of {len(judged)} targets met{note}, {document['seconds']:.0f} s")
        for peer, why in absent.items():
            print(f"absent: {peer}: {why}")
        print(f"written: {output}")
        return output


def read(path: Path) -> dict[str, Any]:
    """Read a file that a Report wrote.

    Raises:
        ValueError: another schema.
    """
    document = json.loads(path.read_text())
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{path.name}: schema must be {SCHEMA}, got {document.get('schema')}")
    return document
