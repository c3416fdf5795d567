"""Draw the plots of the README from the JSON files.

    python benchmarks/plot.py [--results benchmarks/results] [--output benchmarks/plots]

``bandwidth`` (cpu_copy.json): GB/s over tokens, under the best copy that the machine can do. ``host_cost``
(host_cost.json, host_cost_npu.json): what a call costs the host. Each as SVG and PNG; a file that is missing leaves its
plot, or its part of it, out. Colours are Okabe and Ito's, told apart by everybody; markers and dashes tell them too.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import machine
import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

BLUE, ORANGE, GREEN, SKY, GREY, BLACK = "#0072B2", "#D55E00", "#009E73", "#56B4E9", "#8A8A8A", "#222222"
PLAIN = ("memcpy", "non-temporal copy")
INDEXING = "index_copy_ or index_select"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "legend.frameon": False,
    "svg.hashsalt": "pacache",  # the same file for the same data
    "svg.fonttype": "path",
}


def caption(document: dict[str, Any]) -> str:
    """Machine, versions and date in one line."""
    found = document["machine"]
    parts = [found["cpu"], f"{found['usable_cores']} cores"]
    parts += [f"{level} {machine.format_size(size)}" for level, size in found["caches"].items()]
    parts += [f"torch {found['versions']['torch']}", document["created"][:10]]
    if document["quick"]:
        parts.append("--quick: not a measurement")
    if found["load_average"] > machine.QUIET_LOAD:
        parts.append("other work was running")
    return ", ".join(parts)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write SVG and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=160, metadata={"Software": None})
    plt.close(figure)
    return paths


# ---- bandwidth -------------------------------------------------------------------


def sweep(document: dict[str, Any], op: str, threads: int) -> list[dict[str, Any]]:
    """The rows of one curve, by tokens; one row for each number of tokens."""
    pattern = re.compile(
        rf"scatter/norm/\d+/pages@{threads}" if op == "scatter" else rf"load/norm/\d+x\d+@{threads}",
    )
    found: dict[int, dict[str, Any]] = {}
    for row in document["rows"]:
        if pattern.fullmatch(row["id"]):
            known = found.get(row["tokens"])
            if known is None or "/1x" in row["id"]:
                found[row["tokens"]] = row
    return [found[tokens] for tokens in sorted(found)]


def rate(row: dict[str, Any], peer: str, which: str = "median") -> float | None:
    """GB/s of a peer."""
    summary = row["summary"].get(peer)
    return None if summary is None else row["bytes_moved"] / summary[which] / 1e9


def best_plain(row: dict[str, Any]) -> float | None:
    """GB/s of the machine's best copy."""
    rates = [found for peer in PLAIN if (found := rate(row, peer)) is not None]
    return max(rates, default=None)


def cache_bytes(document: dict[str, Any]) -> int:
    """Size of the last level of cache."""
    return max((machine.parse_size(size) for size in document["machine"]["caches"].values()), default=0)


def token_label(value: float, _: object = None) -> str:
    """1024 as 1k."""
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def draw_bandwidth(axes: Axes, rows: Sequence[dict[str, Any]], op: str, last_cache: int) -> None:
    """One panel: an operator with a number of threads."""
    other = "index_copy_ pair" if op == "scatter" else "index_select pair"
    tokens = [row["tokens"] for row in rows]
    curves = (
        ("copy_", "copy_ of the same bytes", ORANGE, "s", "-"),
        (other, INDEXING, GREEN, "^", "-"),
        ("pacache", "pacache", BLUE, "o", "-"),
    )
    roof = [(row["tokens"], value) for row in rows if (value := best_plain(row)) is not None]
    top = max((value for _, value in roof), default=0.0)
    if roof:
        places, heights = zip(*roof, strict=True)
        axes.plot(places, heights, color=BLACK, linestyle=(0, (4, 2)), linewidth=1.4, label="best plain copy")
        axes.fill_between(places, heights, color="#F4F4F4", zorder=0, linewidth=0)
    for peer, label, colour, marker, line in curves:
        there = [row for row in rows if peer in row["summary"]]
        values = [rate(row, peer) or 0.0 for row in there]
        top = max([top, *values])
        ours = peer == "pacache"
        axes.plot(
            [row["tokens"] for row in there],
            values,
            color=colour,
            marker=marker,
            markersize=5.5 if ours else 4.5,
            linestyle=line,
            linewidth=2.4 if ours else 1.5,
            label=label,
            zorder=4 if ours else 3,
        )
        if ours and there:
            low = [rate(row, peer, "q3") or 0.0 for row in there]
            high = [rate(row, peer, "q1") or 0.0 for row in there]
            axes.fill_between([row["tokens"] for row in there], low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, top * 1.12)
    axes.xaxis.set_major_formatter(FuncFormatter(token_label))
    step = 2 if len(tokens) > 7 else 1
    axes.set_xticks([2**power for power in range(0, 17, step) if tokens[0] <= 2**power <= tokens[-1]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MaxNLocator(6))
    per_token = rows[0]["bytes_moved"] / rows[0]["tokens"]
    edge = last_cache / per_token
    if last_cache and tokens[0] < edge < tokens[-1]:
        axes.axvline(edge, color=GREY, linewidth=1, linestyle=":")
        axes.annotate(
            "past the cache", (edge, top * 1.1), xytext=(4, 0), textcoords="offset points", va="top", color="#666666",
            fontsize=8.5,
        )  # fmt: skip


def plot_bandwidth(document: dict[str, Any], folder: Path) -> list[Path]:
    """Scatter and load, by threads."""
    panels = [(op, threads) for op in ("scatter", "load") for threads in document["threads"]]
    panels = [panel for panel in panels if len(sweep(document, *panel)) > 1]
    if not panels:
        return []
    columns = len({threads for _, threads in panels})
    lines = -(-len(panels) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(4.9 * columns, 3.4 * lines + 0.9), squeeze=False, sharex="row")
    names = {"scatter": "scatter_pa_kv_cache", "load": "paged_cache_load"}
    last_cache = cache_bytes(document)
    for axes, (op, threads) in zip(grid.flat, panels, strict=False):
        draw_bandwidth(axes, sweep(document, op, threads), op, last_cache)
        axes.set_title(f"{names[op]}, {threads} thread{'s' if threads > 1 else ''}")
    for axes in grid[:, 0]:
        axes.set_ylabel("GB/s, read and written")
    for axes in grid[-1, :]:
        axes.set_xlabel("tokens in one call")
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    shown: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    order = ["pacache", "copy_ of the same bytes", INDEXING, "best plain copy"]
    labels = [label for label in order if label in shown]
    figure.legend(
        [shown[label] for label in labels],
        labels,
        loc="upper center",
        ncols=len(labels),
        bbox_to_anchor=(0.5, 1.0),
        columnspacing=1.6,
    )
    figure.text(0.5, 0.012, f"8 heads of 128, bfloat16, blocks of 128. {caption(document)}", ha="center", fontsize=7.5,
                color="#666666")  # fmt: skip
    figure.tight_layout(rect=(0, 0.03, 1, 1 - 0.32 / figure.get_figheight()))
    return save(figure, folder, "bandwidth")


# ---- host cost -------------------------------------------------------------------

Bar = tuple[str, float, float | None, str]  # label, microseconds, until idle, colour


def microseconds(row: dict[str, Any] | None, peer: str) -> float | None:
    """Median of a peer."""
    summary = None if row is None else row["summary"].get(peer)
    return None if summary is None else summary["median"] * 1e6


def cpu_groups(document: dict[str, Any]) -> list[tuple[str, list[Bar]]]:
    """Bars of the CPU operators."""
    rows = {row["id"]: row for row in document["rows"]}
    groups = []
    for name in ("scatter_pa_kv_cache", "paged_cache_load"):
        operator, wrapper = rows.get(f"cpu/{name}/operator"), rows.get(f"cpu/{name}/wrapper")
        values = (
            ("torch.ops.pacache", microseconds(operator, "pacache"), BLUE),
            ("pacache_torch", microseconds(wrapper, "pacache"), SKY),
            ("an empty C++ op", microseconds(operator, "empty op"), GREY),
        )
        groups.append((name, [(label, value, None, colour) for label, value, colour in values if value is not None]))
    return [group for group in groups if group[1]]


def npu_groups(document: dict[str, Any], queue: int) -> list[tuple[str, list[Bar]]]:
    """Bars of the NPU path with one setting of the task queue."""
    rows = {row["id"]: row for row in document["rows"]}
    cases = (
        ("scatter, same tensors", "scatter/same", ("pacache", "torch_npu", "torch_npu, executors not reused")),
        ("scatter, new tensors", "scatter/new", ("pacache", "torch_npu", "torch_npu, executors not reused")),
        ("load by ATB", "load/atb", ("pacache", "torch_npu.atb")),
        ("load by aclnn", "load/aclnn", ("pacache", "torch_npu.atb", "torch_npu gather")),
    )
    colours = (BLUE, ORANGE, GREY)
    groups = []
    for title, path, peers in cases:
        calling, idle = (rows.get(f"npu/{path}/tq{queue}/{metric}") for metric in ("calling", "idle"))
        bars = []
        for peer, colour in zip(peers, colours, strict=False):
            value = microseconds(calling, peer)
            if value is not None:
                bars.append((peer, value, microseconds(idle, peer), colour))
        if bars:
            groups.append((title, bars))
    return groups


def bars_height(groups: Sequence[tuple[str, list[Bar]]]) -> float:
    """Bars, titles and gaps, in bars."""
    return sum(len(bars) + 1.3 for _, bars in groups)


def draw_bars(axes: Axes, groups: Sequence[tuple[str, list[Bar]]], height: float) -> None:
    """Horizontal bars in groups, on a panel that has room for ``height``; a pale one shows the time until idle."""
    at, ticks, labels = 0.0, [], []
    widest = max(max(value, idle or 0.0) for _, bars in groups for _, value, idle, _ in bars)
    for title, bars in groups:
        axes.text(0, at - 0.15, title, fontweight="bold", fontsize=9.5, va="bottom")
        at += 0.55
        for label, value, idle, colour in bars:
            if idle is not None:
                axes.barh(at, idle, height=0.78, color=colour, alpha=0.28, linewidth=0)
            axes.barh(at, value, height=0.78, color=colour, linewidth=0)
            text = f"{value:.1f}" if idle is None else f"{value:.0f} / {idle:.0f}"
            axes.text(max(value, idle or 0.0) + widest * 0.015, at, text, va="center", fontsize=8.5)
            ticks.append(at)
            labels.append(label)
            at += 1
        at += 0.75
    axes.set_yticks(ticks, labels, fontsize=9)
    axes.set_ylim(height - 1.1, -0.75)
    axes.set_xlim(0, widest * 1.2)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def plot_host_cost(cpu: dict[str, Any] | None, npu: dict[str, Any] | None, folder: Path) -> list[Path]:
    """CPU operators on the left, the NPU path by task queue on the right."""
    panels: list[tuple[str, str, list[tuple[str, list[Bar]]]]] = []
    if cpu is not None and (groups := cpu_groups(cpu)):
        panels.append(("CPU operators, one token", "us per call", groups))
    if npu is not None:
        queues = sorted({int(found.group(1)) for row in npu["rows"] if (found := re.search(r"/tq(\d)/", row["id"]))})
        where = "Simulated NPU path" if npu["simulated"] else npu["device"]["name"]
        for queue in queues:
            if groups := npu_groups(npu, queue):
                title = f"{where}, task queue {queue}"
                panels.append((title, "us per call: calling thread / until idle", groups))
    if not panels:
        return []
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    heights = [
        max(
            sum(len(bars) + 1.3 for _, bars in groups) for _, _, groups in panels[line * columns : (line + 1) * columns]
        )
        for line in range(lines)
    ]
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(6.1 * columns, 0.27 * sum(heights) + 1.0 * lines + 0.4),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    for number, (axes, (title, unit, groups)) in enumerate(zip(grid.flat, panels, strict=False)):
        draw_bars(axes, groups, heights[number // columns])
        axes.set_title(title, pad=8)
        axes.set_xlabel(unit)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    document = cpu if cpu is not None else npu
    assert document is not None
    note = caption(document)
    if npu is not None and npu["simulated"] and npu.get("phase_us"):
        one, two = npu["phase_us"]
        note = f"Simulated: phase one made to take {one} us, phase two {two} us; no device was used. {note}"
    figure.text(0.5, 0.008, note, ha="center", fontsize=7.5, color="#666666")
    figure.tight_layout(rect=(0, 0.25 / figure.get_figheight(), 1, 1))
    return save(figure, folder, "host_cost")


# ---- command line ----------------------------------------------------------------


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of a folder by benchmark; those that are missing are left out."""
    names = ("cpu_copy", "host_cost", "host_cost_npu", "npu_device")
    return {name: harness.read(path) for name in names if (path := folder / f"{name}.json").exists()}


def draw(results: dict[str, dict[str, Any]], folder: Path) -> list[Path]:
    """Every plot that the results are enough for."""
    paths: list[Path] = []
    with plt.rc_context(STYLE):
        if "cpu_copy" in results:
            paths += plot_bandwidth(results["cpu_copy"], folder)
        paths += plot_host_cost(results.get("host_cost"), results.get("host_cost_npu"), folder)
    return paths


def main(argv: Sequence[str] | None = None) -> int:
    """Draw and name the files; 2 when there was nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder of the JSON files")
    parser.add_argument("--output", type=Path, default=machine.HERE / "plots", help="folder of the plots")
    arguments = parser.parse_args(argv)
    paths = draw(read_results(arguments.results), arguments.output)
    for path in paths:
        print(f"written: {path}")
    return 0 if paths else 2


if __name__ == "__main__":
    raise SystemExit(main())
