"""Write the figures into the README, from the JSON files and nothing else.

    python benchmarks/readme.py [--results benchmarks/results] [--readme README.md]

Draws the plots and fills the block between ``<!-- benchmarks:begin -->`` and ``<!-- benchmarks:end -->``. A --quick run
is refused. Without --results files the block says how to make them (``--empty`` writes that on purpose).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import harness
import machine
import plot

BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
EMPTY = "No figures yet: `make bench` measures, and `python benchmarks/readme.py` then writes tables and plots here."
HEADLINES = (
    "scatter/norm/64/random",
    "scatter/norm/4096/pages",
    "scatter/norm/16384/random",
    "scatter/norm/65536/pages",
    "scatter/nz/4096/pages",
    "scatter/nz/4096/random",
    "load/norm/8x1024",
    "load/norm/8x4096",
    "load/nz/8x1024",
)

Table = list[Sequence[str]]


def render(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def value(check: dict[str, Any]) -> str:
    """What was measured, and whether that is less than was asked for."""
    return harness.format_value(check) + (" (missed)" if check["met"] is False else "")


def by_threads(document: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    """Rows of cpu_copy by id without threads, then by threads."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in document["rows"]:
        found.setdefault(row["id"].rpartition("@")[0], {})[row["threads"]] = row
    return found


def same_check(row: dict[str, Any] | None, check: dict[str, Any]) -> dict[str, Any] | None:
    """The check of another row that is held against the same."""
    wanted = (check["kind"], check["against"])
    return next((c for c in (row or {}).get("checks", ()) if (c["kind"], c["against"]) == wanted), None)


def check_lines(rows: dict[int, dict[str, Any]], threads: Sequence[int], *, all_checks: bool) -> Table:
    """One line for each check of a row: work, against, a value for each number of threads, target."""
    first = next(iter(rows.values()))
    lines: Table = []
    for check in first["checks"]:
        if check["target"] is None and not all_checks:
            continue
        found = [same_check(rows.get(number), check) for number in threads]
        cells = [value(c) if c else "" for c in found]
        lines.append([first["work"] if not lines else "", check["against"], *cells, harness.format_target(check)])
    return lines


def thread_heads(threads: Sequence[int]) -> list[str]:
    """Column heads."""
    return [f"{number} thread{'s' if number > 1 else ''}" for number in threads]


def cpu_section(document: dict[str, Any]) -> list[str]:
    """Headline table, models, and everything else folded away."""
    threads = document["threads"]
    rows = by_threads(document)
    head = ["work", "against", *thread_heads(threads), "target"]
    headline = [
        line for name in HEADLINES if name in rows for line in check_lines(rows[name], threads, all_checks=False)
    ]
    rest = [
        line
        for name in rows
        if name.split("/")[0] != "model"
        for line in check_lines(rows[name], threads, all_checks=True)
    ]
    checks = [check for row in document["rows"] for check in row["checks"] if check["met"] is not None]
    met = sum(check["met"] for check in checks)
    parts = [
        "**CPU kernels.** How many times as fast as `copy_` of the same bytes into a contiguous tensor, as torch's "
        "indexing, or as the best plain copy that the machine can do (memcpy or non-temporal stores). *Pages*: tokens "
        "fill scattered blocks in order; *random*: every token anywhere. 8 heads of 128, bfloat16, blocks of 128.",
        render(head, headline),
        f"{met} of {len(checks)} targets met on this machine.",
    ]
    models = model_lines(rows, max(threads))
    if models:
        parts += [
            f"Scatter at the shapes of served models, {thread_heads(threads)[-1]}: GB/s read and written, and times as "
            "fast as `copy_`. Keys and values are slices of the fused projection, or MLA rows.",
            render(["model", *models.pop(0)], models),
        ]
    parts.append(f"<details><summary>All rows</summary>\n\n{render(head, rest)}\n\n</details>")
    if document["absent"]:
        absent = "; ".join(f"{peer} ({why})" for peer, why in document["absent"].items())
        parts.append(f"Not here to be measured: {absent}.")
    return parts


def model_lines(rows: dict[str, dict[int, dict[str, Any]]], threads: int) -> Table:
    """First the column heads, then a line for each model; empty when there are none."""
    models: dict[str, dict[str, str]] = {}
    for name, by_number in rows.items():
        if name.startswith("model/") and threads in by_number:
            row = by_number[threads]
            model, phase = row["work"].rsplit(", ", 1)
            copy = same_check(row, {"kind": "speed", "against": "copy_"})
            rate = harness.gigabytes_per_second(row)
            models.setdefault(model, {})[phase] = f"{rate:.1f}, {copy['value']:.2f}x" if rate and copy else ""
    phases = list(dict.fromkeys(phase for found in models.values() for phase in found))
    if not models:
        return []
    return [phases, *([model, *(found.get(phase, "") for phase in phases)] for model, found in models.items())]


def cost_lines(rows: Iterable[dict[str, Any]]) -> Table:
    """One line for each check: call, cost, against, measured, target."""
    lines: Table = []
    for row in rows:
        work, cost = row["work"], harness.format_time(row["summary"]["pacache"]["median"]) if row["summary"] else ""
        for check in row["checks"]:
            lines.append([work, cost, check["against"], value(check), harness.format_target(check)])
            work = cost = ""
    return lines


COST_HEAD = ("call", "costs", "against", "measured", "target")


def npu_section(document: dict[str, Any]) -> list[str]:
    """The default task queue in sight, the others folded away."""
    if document["simulated"]:
        one, two = document["phase_us"]
        where = (
            f"**Simulated**: the real torch_npu {document['device']['torch_npu']} on the simulated CANN, phase one "
            f"made to take {one} us and phase two {two} us. This shows what the host does; no device was used."
        )
    else:
        where = f"On {document['device']['name']}, CANN {document['device']['cann']}."
    rows = [row for row in document["rows"] if row["checks"]]
    default = [row for row in rows if "/tq1/" in row["id"]]
    others = [row for row in rows if row not in default]
    parts = [f"**Host cost on the NPU path.** {where}", render(COST_HEAD, cost_lines(default))]
    if others:
        table = render(COST_HEAD, cost_lines(others))
        parts.append(f"<details><summary>Other settings of TASK_QUEUE_ENABLE</summary>\n\n{table}\n\n</details>")
    return parts


def device_section(document: dict[str, Any]) -> list[str]:
    """What a real device did."""
    lines = [
        [
            row["work"],
            f"{harness.gigabytes_per_second(row) or 0:.0f}",
            str(row["facts"].get("of the HBM's bandwidth", "")),
            *(value(check) if (check := same_check(row, {"kind": "speed", "against": peer})) else "absent"
              for peer in ("torch_npu", "copy_")),
        ]
        for row in document["rows"]
    ]  # fmt: skip
    head = ["work", "GB/s", "of HBM", "against torch_npu", "against copy_"]
    return [f"**On {document['device']['name']}**, CANN {document['device']['cann']}.", render(head, lines)]


def provenance(document: dict[str, Any]) -> str:
    """Machine, date, threads, versions and load."""
    found = document["machine"]
    caches = ", ".join(f"{level} {machine.format_size(size)}" for level, size in found["caches"].items())
    threads = document.get("threads")
    count = f"{' and '.join(thread_heads(threads))}, " if threads else ""
    load = found["load_average"]
    busy = "" if load <= machine.QUIET_LOAD else " **Something else was running: do not trust these figures.**"
    changed = " with changes" if found["sources_changed"] else ""
    return (
        f"{document['created'][:10]}, {found['cpu']}, {found['usable_cores']} cores ({caches}), {count}"
        f"{found['system']}, torch {found['versions']['torch']}, "
        f"revision {found['revision'][:10] or 'unknown'}{changed}, load average {load} at the start.{busy}"
    )


def images(paths: Sequence[Path], readme: Path) -> dict[str, str]:
    """Markdown links of the plots, relative to the README."""
    texts = {
        "bandwidth": "Bandwidth over tokens, below the best plain copy",
        "host_cost": "What a call costs the host",
    }
    return {
        path.stem: f"![{texts[path.stem]}]({Path(os.path.relpath(path, readme.parent)).as_posix()})"
        for path in paths
        if path.suffix == ".svg"
    }


def make_block(results: dict[str, dict[str, Any]], links: dict[str, str]) -> str:
    """The whole block, without its markers."""
    parts: list[str] = []
    if "cpu_copy" in results:
        document = results["cpu_copy"]
        parts += [*cpu_section(document), links.get("bandwidth", ""), f"Measured {provenance(document)}"]
    if "host_cost" in results:
        document = results["host_cost"]
        parts += [
            "**Call overhead on the CPU**, one token.",
            render(COST_HEAD, cost_lines(document["rows"])),
            f"Measured {provenance(document)}",
        ]
    if "host_cost_npu" in results:
        parts += [*npu_section(results["host_cost_npu"]), f"Measured {provenance(results['host_cost_npu'])}"]
    if "host_cost" in results or "host_cost_npu" in results:
        parts.append(links.get("host_cost", ""))
    if "npu_device" in results:
        parts += [*device_section(results["npu_device"]), f"Measured {provenance(results['npu_device'])}"]
    if not parts:
        return EMPTY
    parts.append(
        "Written by `python benchmarks/readme.py` from the JSON of `make bench`; medians, peers timed in turn."
    )
    return "\n\n".join(part for part in parts if part)


def replace_block(text: str, block: str) -> str:
    """The text with another block between the markers.

    Raises:
        ValueError: the markers are not there exactly once.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"readme: {BEGIN} and {END} must be there once, in this order")
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n{block}\n{END}", text, flags=re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the plots and write the block; 2 when a file may not be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder of the JSON files")
    parser.add_argument("--plots", type=Path, default=machine.HERE / "plots", help="folder of the plots")
    parser.add_argument("--readme", type=Path, default=machine.ROOT / "README.md", help="file to write into")
    parser.add_argument("--empty", action="store_true", help="write only how figures are made")
    parser.add_argument("--allow-quick", action="store_true", help="take --quick runs too (to test this script)")
    arguments = parser.parse_args(argv)
    results = {} if arguments.empty else plot.read_results(arguments.results)
    quick = [name for name, document in results.items() if document["quick"]]
    if quick and not arguments.allow_quick:
        print(f"readme: not written: {', '.join(quick)} from a --quick run, which measures nothing", file=sys.stderr)
        return 2
    links = images(plot.draw(results, arguments.plots), arguments.readme)
    text = replace_block(arguments.readme.read_text(), make_block(results, links))
    arguments.readme.write_text(text)
    print(f"written: {arguments.readme}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
