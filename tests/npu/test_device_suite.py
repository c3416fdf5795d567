"""The tests in device/, run on simulated NPUs: a process for each CANN version, product and way to run.

The runs cover every pair of version and product, of version and stream mode, and of product and stream mode. A lazy
stream does nothing until something waits for it, so what was freed or reordered too early shows.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from cann_sim import build  # noqa: E402
from soak import SOAK  # noqa: E402

PARITY = "test_device_parity.py"
NAMES = ("test_device_torch_npu_names.py", "test_device_vllm_names.py")
EVERYTHING = (
    PARITY,
    "test_device_descriptors.py",
    "test_device_guards.py",
    "test_device_bad_arguments.py",
    "test_device_peers.py",
    "test_device_capabilities.py",
    "test_device_compile.py",
)
BRIEF = ("-k", "device_sizes or vectors")
# Every call makes its phase one, and a key of the executor cache that stands for two signatures is a violation.
VERIFY_KEYS = {"CANN_SIM_PTA_VERIFY": "1"}


@dataclass(frozen=True)
class Run:
    """One process: what is simulated, which variables are set, what is run, and how many tests at least that is."""

    simulated: Mapping[str, Any]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = EVERYTHING
    arguments: tuple[str, ...] = ()
    at_least: int = 700


LIVES = ("test_device_stateful.py",)
LONG_LIVES = {
    "8.5.0 A2, lives": Run({"version": "8.5.0", "soc": "A2"}, {}, LIVES, at_least=5),
    "9.0.0 A3, lives, task queue 2": Run(
        {"version": "9.0.0", "soc": "A3"}, {"TASK_QUEUE_ENABLE": "2"}, LIVES, at_least=5
    ),
    "9.1.0 A2 lazy, lives, aclnn": Run(
        {"version": "9.1.0", "soc": "A2", "lazy": True}, {"PACACHE_LOAD_BACKEND": "aclnn"}, LIVES, at_least=8
    ),
    "9.1.0 A2 lazy, lives, checked": Run(
        {"version": "9.1.0", "soc": "A2", "lazy": True}, {"PACACHE_CHECK": "1"}, LIVES, at_least=8
    ),
}
RUNS = {
    "8.5.0 A2": Run({"version": "8.5.0", "soc": "A2"}),
    "8.5.0 A3 lazy": Run({"version": "8.5.0", "soc": "A3", "lazy": True}, VERIFY_KEYS),
    "9.0.0 A2 lazy": Run({"version": "9.0.0", "soc": "A2", "lazy": True}),
    "9.0.0 A3": Run({"version": "9.0.0", "soc": "A3"}, VERIFY_KEYS),
    "9.1.0 A2": Run({"version": "9.1.0", "soc": "A2"}, VERIFY_KEYS),
    "9.1.0 A3 lazy": Run({"version": "9.1.0", "soc": "A3", "lazy": True}),
    # The values of index tensors are checked.
    "8.5.0 A2 checked": Run(
        {"version": "8.5.0", "soc": "A2"},
        {"PACACHE_CHECK": "1"},
        ("test_checked_values.py", PARITY),
        ("-k", "checked_values or vectors or device_sizes"),
        60,
    ),
    "9.1.0 A3 lazy checked": Run(
        {"version": "9.1.0", "soc": "A3", "lazy": True},
        {"PACACHE_CHECK": "1"},
        ("test_checked_values.py", PARITY),
        ("-k", "checked_values or vectors or device_sizes"),
        60,
    ),
    # The aclnn sibling of ATB's operator, chosen, and because there is no ATB.
    "9.1.0 A2 aclnn": Run(
        {"version": "9.1.0", "soc": "A2", "lazy": True},
        {"PACACHE_LOAD_BACKEND": "aclnn"},
        tuple(name for name in EVERYTHING if "guards" not in name and "bad_arguments" not in name),
        ("-k", "not scatter"),
        60,
    ),
    # Both phases on the queue's thread; all on the caller's thread, with a CANN that has the older executor cache only.
    "9.1.0 A3 lazy, task queue 2": Run(
        {"version": "9.1.0", "soc": "A3", "lazy": True},
        {"TASK_QUEUE_ENABLE": "2", "PACACHE_LOAD_BACKEND": "aclnn"},  # which needs a workspace
        (PARITY,),
        BRIEF,
        18,
    ),
    "8.5.0 A2, no task queue, cache by hash": Run(
        {"version": "8.5.0", "soc": "A2", "hide": ("PTAFindExecCache", "SetPTACacheHashKey")},
        {"TASK_QUEUE_ENABLE": "0"},
        (PARITY,),
        BRIEF,
        18,
    ),
    # And with an ATB that wants a workspace.
    "9.0.0 A3, no executor cache": Run(
        {"version": "9.0.0", "soc": "A3"},
        {"PACACHE_EXECUTOR_CACHE": "0", "CANN_SIM_ATB_WORKSPACE": "5000"},
        (PARITY,),
        BRIEF,
        18,
    ),
    # Long lives of a cache.
    "9.1.0 A3 lazy, lives": Run({"version": "9.1.0", "soc": "A3", "lazy": True}, {}, LIVES, at_least=8),
    **(LONG_LIVES if SOAK else {}),
    # The names of torch_npu and vLLM.
    "8.5.0 A2, names": Run({"version": "8.5.0", "soc": "A2"}, files=NAMES, at_least=34),
    "9.1.0 A3 lazy, names": Run({"version": "9.1.0", "soc": "A3", "lazy": True}, files=NAMES, at_least=34),
    "9.1.0 A3 lazy, transformers": Run(
        {"version": "9.1.0", "soc": "A3", "lazy": True}, files=("test_device_transformers.py",), at_least=2
    ),
    # torch_npu's graph backend is slow to load, and the same everywhere.
    "9.1.0 A3 lazy, npugraph_ex": Run(
        {"version": "9.1.0", "soc": "A3", "lazy": True}, files=("test_graph_backend.py",), at_least=1
    ),
    # What has none of it.
    "9.1.0 310P": Run({"version": "9.1.0", "soc": "310P"}, files=("test_refused_products.py",), at_least=13),
    "8.3.RC1.alpha003 A2": Run(
        {"version": "8.3.RC1.alpha003", "soc": "A2"}, files=("test_refused_products.py",), at_least=13
    ),
}
STEERING = ("PACACHE_", "TASK_QUEUE_", "ASCEND_", "CANN_SIM_")
KEPT = ("PACACHE_REQUIRE_ALL", "PACACHE_SOAK")


def variables(run: Run, report: Path) -> dict[str, str]:
    """The environment of a run, in which nothing steers that the run does not say."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(STEERING) or k in KEPT}
    base.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)  # torch_npu is loaded with torch, as by a user
    return build.environment(report=report, base=base, **run.simulated) | {"CANN_SIM_QUIET": "1"} | run.variables


@pytest.mark.parametrize("name", RUNS)
def test_on_simulated_npu(name: str, tmp_path: Path) -> None:
    """All pass, nothing is skipped, and the process leaves no violation, not even at its exit."""
    run = RUNS[name]
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *(str(HERE / "device" / file) for file in run.files),
            *run.arguments,
        ],
        env=variables(run, report),
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=6000 if SOAK else 600,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"on {name}:\n{done.stdout}", pytrace=False)
    summary = done.stdout.strip().splitlines()[-1]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= run.at_least, summary
    assert not re.search(r"\d+ (skipped|xfailed|xpassed)", done.stdout), done.stdout
    assert json.loads(report.read_text())["violations"] == []


def test_the_runs_cover_all_pairs() -> None:
    """Every version with every product and stream mode, and every product with every stream mode."""
    whole = [run.simulated for run in RUNS.values() if run.files == EVERYTHING]
    found = [(s["version"], s["soc"], s.get("lazy", False)) for s in whole]
    versions, socs, lazies = ("8.5.0", "9.0.0", "9.1.0"), ("A2", "A3"), (False, True)
    assert {(v, s) for v, s, _ in found} == {(v, s) for v in versions for s in socs}
    assert {(v, lazy) for v, _, lazy in found} == {(v, lazy) for v in versions for lazy in lazies}
    assert {(s, lazy) for _, s, lazy in found} == {(s, lazy) for s in socs for lazy in lazies}


def test_every_file_is_run() -> None:
    """Nothing in device/ is forgotten."""
    run = {file for run in RUNS.values() for file in run.files}
    assert run == {path.name for path in (HERE / "device").glob("test_*.py")}
