"""What does a call cost the host, before and besides the work?

    python benchmarks/host_cost.py [--quick]                 the CPU operators, against empty ones with the same schema
    python benchmarks/host_cost.py --npu [simulated|device]  the NPU path, against torch_npu's own operators

With ``--npu`` alone a device is used if CANN is installed (ASCEND_HOME_PATH is set), else the simulated CANN of
tests/cann_sim, on which phase one is made to take 20 us and phase two 5 us. Each setting of TASK_QUEUE_ENABLE runs in
processes of its own; processes that are compared take turns. Results of the simulated CANN are marked so: they show
what the host does, nothing about a device.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# torch_npu, where it is installed, is loaded by the processes that use it: without CANN it breaks `import torch`.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import harness
import machine
import torch
from harness import OURS, Check, Peer, Row

import pacache_torch

EMPTY = "empty op"
OPERATOR = "torch.ops call"
THEIRS = "torch_npu"
ANEW = "torch_npu, executors not reused"
NO_TOKENS = "pacache, no tokens"
PTA_FUNCTIONS = (
    "AddTensorAddrToCachedList",
    "CanUsePTACache",
    "InitPTACacheThreadLocal",
    "PTAFindExecCache",
    "PTAGetExecCache",
    "SetPTACacheHashKey",
    "SetPTAHashKey",
    "UnInitPTACacheThreadLocal",
)


# ---- the CPU operators -----------------------------------------------------------


def tiny_scatter() -> tuple[torch.Tensor, ...]:
    """key, value, key_cache, value_cache, slot_mapping of one token."""
    key, value = torch.randn(2, 1, 1, 16).unbind()
    return key, value, torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 16), torch.tensor([1])


def tiny_load() -> tuple[torch.Tensor, ...]:
    """key_cache, value_cache, block_tables, context_lens, key, value of one token."""
    outputs = torch.zeros(1, 1, 16), torch.zeros(1, 1, 16)
    caches = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16)
    return *caches, torch.tensor([[1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), *outputs


def cpu_rows(arguments: argparse.Namespace) -> Iterator[Callable[[], Row]]:
    """The rows of the CPU operators, each to be made when it is its turn."""
    budget = harness.budget_of(arguments)
    cases = {"scatter_pa_kv_cache": tiny_scatter(), "paged_cache_load": tiny_load()}

    def row(name: str, kind: str, work: str, peers: list[Peer], checks: list[Check]) -> Row:
        samples = harness.measure(peers, budget)
        found = Row(f"cpu/{name}/{kind}", work, "cpu", 1, 1, None, samples)
        found.checks = [judged for judged in (harness.judge(check, samples) for check in checks) if judged]
        return found

    for name, tensors in cases.items():
        operator = functools.partial(getattr(torch.ops.pacache, name), *tensors)
        empty = functools.partial(getattr(torch.ops.pacache_empty, name), *tensors)
        wrapper = functools.partial(getattr(pacache_torch, name), *tensors)
        if harness.selected(arguments, f"cpu/{name}/operator"):
            yield functools.partial(
                row,
                name,
                "operator",
                f"torch.ops.pacache.{name}, tiny",
                [Peer(OURS, operator), Peer(EMPTY, empty)],
                [Check("time", (EMPTY,), 1.2, allowance_us=0.5)],
            )
        if harness.selected(arguments, f"cpu/{name}/wrapper"):
            yield functools.partial(
                row,
                name,
                "wrapper",
                f"pacache_torch.{name}, tiny",
                [Peer(OURS, wrapper), Peer(OPERATOR, operator)],
                [Check("extra_us", (OPERATOR,), 1.0)],
            )
    if not arguments.quick and harness.selected(arguments, "cpu/scatter_pa_kv_cache/compiled"):
        yield functools.partial(compiled_row, budget)


def surroundings(code: Sequence[str]) -> tuple[int, int]:
    """Kernels and allocations that Inductor's wrapper code makes beside the operators it calls."""
    inside = [line.strip() for text in code for line in text.splitlines() if line.startswith("        ")]
    kernels = sum(re.match(r"(cpp_fused\w*|extern_kernels\.\w+)\(", line) is not None for line in inside)
    buffers = sum(re.match(r"\w+ = empty_strided\w*\(", line) is not None for line in inside)
    return kernels, buffers


def compiled(step: Callable[..., None], tensors: Sequence[torch.Tensor]) -> tuple[Callable[..., None], list[str]]:
    """A function compiled by Inductor, and the code that it wrote."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    with config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a cache that is off, which is what was asked for
        function = torch.compile(step, fullgraph=True)
        _, code = run_and_get_code(function, *tensors)
    return function, code


def compiled_row(budget: harness.Budget) -> Row:
    """The scatter in a graph of Inductor: what surrounds it, and what a call costs."""
    tensors = tiny_scatter()

    def step(*inputs: torch.Tensor) -> None:
        torch.ops.pacache.scatter_pa_kv_cache(*inputs)

    function, code = compiled(step, tensors)
    kernels, buffers = surroundings(code)
    samples = harness.measure(
        [
            Peer(OURS, functools.partial(function, *tensors)),
            Peer(OPERATOR, functools.partial(torch.ops.pacache.scatter_pa_kv_cache, *tensors)),
        ],
        budget,
    )
    row = Row("cpu/scatter_pa_kv_cache/compiled", "scatter_pa_kv_cache compiled, tiny", "cpu", 1, 1, None, samples)
    row.checks = [
        harness.given("at_most", "kernels beside the operator", kernels, 0),
        harness.given("at_most", "buffers allocated by the graph", buffers, 0),
    ]
    return row


def run_cpu(arguments: argparse.Namespace) -> int:
    """The CPU part."""
    torch.ops.load_library(str(machine.compile_library(machine.HERE / "empty_ops.cpp", torch_headers=True)))
    torch.set_num_threads(1)
    rows = list(cpu_rows(arguments))
    report = harness.Report("host_cost", arguments)
    with torch.inference_mode(), harness.progress(len(rows), arguments, "host_cost") as bar:
        for make in rows:
            report.add(make())
            bar.update()
    report.finish()
    return 0


# ---- the NPU path ----------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What a process of npu_host.py runs in."""

    name: str
    cases: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    hide: tuple[str, ...] = ()


REUSED = Setting(
    "reused",
    ("scatter/same", "scatter/new", "scatter/int64", "scatter/layers", "load"),
    {"PACACHE_LOAD_BACKEND": "atb"},
)
SIBLING = Setting("sibling", ("load",), {"PACACHE_LOAD_BACKEND": "aclnn"})
HIDDEN = Setting("hidden", ("scatter/same", "scatter/new"), {}, PTA_FUNCTIONS)


def simulated_environment(hide: Sequence[str]) -> dict[str, str]:
    """The variables of a process on the simulated CANN; builds it if needed."""
    sys.path.insert(0, str(machine.ROOT / "tests"))
    from cann_sim import build

    env = build.environment(hide=hide)
    env.update({"CANN_SIM_QUIET": "1", "CANN_SIM_TRACE": "0", "CANN_SIM_NO_LEAK_CHECK": "1"})
    return env


def run_process(setting: Setting, queue: int, arguments: argparse.Namespace, simulated: bool) -> dict[str, Any]:
    """Run npu_host.py once; what it found.

    Raises:
        RuntimeError: it failed, with what it said.
    """
    env = simulated_environment(setting.hide) if simulated else dict(os.environ)
    env.update(setting.variables)
    env.update({"TASK_QUEUE_ENABLE": str(queue), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    config = {
        "simulated": simulated,
        "cases": [case for case in setting.cases if harness.selected(arguments, f"npu/{case}")],
        "rounds": 3 if arguments.quick else 40,
        "calls": 10 if arguments.quick else 50,
        "phase_us": arguments.phase_us,
    }
    with tempfile.TemporaryDirectory(prefix="pacache_host_cost_") as folder:
        paths = [Path(folder) / "config.json", Path(folder) / "result.json"]
        paths[0].write_text(json.dumps(config))
        done = subprocess.run(
            [sys.executable, str(machine.HERE / "npu_host.py"), *map(str, paths)],
            env=env,
            cwd=folder,
            text=True,
            capture_output=True,
            check=False,
        )
        if done.returncode != 0 or not paths[1].exists():
            raise RuntimeError(f"host_cost: {setting.name}, TASK_QUEUE_ENABLE={queue}:\n{done.stdout}\n{done.stderr}")
        return json.loads(paths[1].read_text())


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several turns of one setting as one."""
    cases: dict[str, Any] = {}
    for result in results:
        for name, found in result["cases"].items():
            case = cases.setdefault(name, {"calling": {}, "idle": {}, "counts": found["counts"]})
            for metric in ("calling", "idle"):
                for peer, values in found[metric].items():
                    case[metric].setdefault(peer, []).extend(values)
    return {**results[-1], "cases": cases}


def breakdown(queue: int, reused: dict[str, list[float]], hidden: dict[str, list[float]], simulated: bool) -> Row:
    """What a scatter costs the calling thread, by differences between calls that do and do not do a part."""

    def microseconds(values: Sequence[float]) -> float:
        return statistics.median(values) * 1e6

    checks, whole, anew = microseconds(reused[NO_TOKENS]), microseconds(reused[OURS]), microseconds(hidden[OURS])
    parts = {
        "Python, dispatcher, argument rules (a call without tokens)": checks,
        "executor found again, workspace, queue or phase two": whole - checks,
        "saved by the executor cache: descriptors and phase one": anew - whole,
    }
    row = Row(f"npu/breakdown/tq{queue}", f"a scatter in parts, queue {queue}", "npu", simulated=simulated)
    row.facts = {part: f"{cost:.1f} us" for part, cost in parts.items()}
    return row


METRICS = {"calling": "calling thread", "idle": "until idle"}


def npu_rows(queue: int, found: dict[str, dict[str, Any]], simulated: bool) -> Iterator[Row]:
    """The rows of one setting of the task queue."""

    def case(setting: str, name: str) -> dict[str, Any] | None:
        return found[setting]["cases"].get(name) if setting in found else None

    def row(path: str, work: str, metric: str, samples: dict[str, list[float]], checks: Sequence[Check]) -> Row:
        made = Row(
            f"npu/{path}/tq{queue}/{metric}",
            f"{work}, queue {queue}, {METRICS[metric]}",
            "npu",
            samples=samples,
            simulated=simulated,
        )
        made.checks = [judged for judged in (harness.judge(check, samples) for check in checks) if judged]
        return made

    def phase_ones(made: Row, counts: dict[str, dict[str, int]]) -> Row:
        if OURS in counts and made.id.endswith("calling"):
            for what, key in (("first phases", "phase_one"), ("handles made", "handles"), ("waits", "waits")):
                made.facts[f"{what} in 100 calls"] = ", ".join(f"{peer} {n[key]}" for peer, n in counts.items())
        return made

    for name, tensors in (("scatter/same", "same tensors"), ("scatter/new", "new tensors")):
        reused, hidden = case("reused", name), case("hidden", name)
        if reused and hidden and NO_TOKENS in reused["calling"]:
            yield breakdown(queue, reused["calling"], hidden["calling"], simulated)
        for metric in METRICS:
            if reused:
                samples = dict(reused[metric])
                checks = [Check("time", (THEIRS,), 0.9), Check("time", (ANEW,), 0.4)]
                if hidden:
                    samples[ANEW] = hidden[metric][THEIRS]
                made = row(name, f"scatter, {tensors}", metric, samples, checks)
                if not hidden:
                    made.absent[ANEW] = "its executor cache can only be hidden where CANN is simulated"
                counts = reused["counts"]
                if counts and metric == "calling":
                    made.checks.append(
                        harness.given("at_most", "first phases in 100 calls", counts[OURS]["phase_one"], 0)
                    )
                yield phase_ones(made, counts)
            if hidden:
                checks = [Check("time", (THEIRS,), 1.0)]
                made = row(f"{name}/hidden", f"scatter, {tensors}, no executor cache", metric, hidden[metric], checks)
                yield phase_ones(made, hidden["counts"])
    for setting, work, targets in (
        ("reused", "load by ATB", {"calling": 0.95, "idle": 1.0}),
        ("sibling", "load by aclnn", {"calling": None, "idle": 0.5}),
    ):
        loads = case(setting, "load")
        for metric in METRICS:
            if loads:
                checks = [Check("time", ("torch_npu.atb",), targets[metric]), Check("time", ("torch_npu gather",))]
                name = "load/atb" if setting == "reused" else "load/aclnn"
                yield phase_ones(row(name, work, metric, loads[metric], checks), loads["counts"])
    for name, work, what, most in (
        ("scatter/int64", "scatter, int64 slots", "casts in 100 calls", 100),
        ("scatter/layers", "scatter, 64 layers, int64 slots", "casts in a step of 64 layers", 1),
    ):
        wide = case("reused", name)
        for metric in METRICS:
            if wide:
                checks = [Check("time", (f"{OURS}, int32 slots",)), Check("time", (THEIRS,))]
                made = row(name, work, metric, wide[metric], checks)
                if wide["counts"] and metric == "calling":
                    made.checks.append(harness.given("at_most", what, wide["counts"][OURS]["casts"], most))
                yield made


def wanted_settings(arguments: argparse.Namespace, simulated: bool) -> list[Setting]:
    """The processes to run; what cannot be had on a device is left out."""
    settings = [REUSED, *([HIDDEN] if simulated else []), SIBLING]
    return [s for s in settings if any(harness.selected(arguments, f"npu/{case}") for case in s.cases)]


def run_npu(arguments: argparse.Namespace) -> int:
    """The NPU part: processes in turn, then the rows."""
    where = arguments.npu
    if where == "auto":
        real = "ASCEND_HOME_PATH" in os.environ and "CANN_SIM_VERSION" not in os.environ
        where = "device" if real else "simulated"
    simulated = where == "simulated"
    settings = wanted_settings(arguments, simulated)
    queues = arguments.queues or ([1] if arguments.quick else [0, 1, 2])
    turns = 1 if arguments.quick else 2
    report = harness.Report("host_cost_npu", arguments, width=82)
    device: dict[str, Any] = {}
    with harness.progress(len(queues) * turns * len(settings), arguments, "host_cost --npu") as bar:
        for queue in queues:
            results: dict[str, list[dict[str, Any]]] = {setting.name: [] for setting in settings}
            for _ in range(turns):
                for setting in settings:
                    bar.set_postfix_str(f"queue {queue}, {setting.name}")
                    results[setting.name].append(run_process(setting, queue, arguments, simulated))
                    bar.update()
            found = {name: merged(runs) for name, runs in results.items() if runs}
            for row in npu_rows(queue, found, simulated):
                report.add(row)
            for result in found.values():
                device = result["device"]
    report.finish(device=device, phase_us=arguments.phase_us if simulated else None)
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_arguments(parser)
    parser.add_argument(
        "--npu", nargs="?", const="auto", choices=("auto", "simulated", "device"), help="measure the NPU path"
    )
    parser.add_argument(
        "--queues",
        type=lambda text: [int(part) for part in text.split(",")],
        default=None,
        help="settings of TASK_QUEUE_ENABLE (default: 0,1,2; with --quick: 1)",
    )
    parser.add_argument(
        "--phase-us",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[20, 5],
        help="what phase one and phase two take on the simulated CANN (default: 20,5)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the two parts."""
    arguments = parse(argv)
    return run_npu(arguments) if arguments.npu else run_cpu(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
