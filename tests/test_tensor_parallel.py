"""Contract of ``pacache_torch.integrations.dtensor``.

With heads sharded over 2 and over 4 processes (gloo, on the CPU), or everything replicated, each operator leaves in
every process its share of what one process computes, bit for bit, in the shard's own memory and without a collective.
Every other placement is refused by every process and nothing is written. The demo's decoder, divided among the
processes, generates the tokens that one process generates. ``tests/tensor_parallel.py`` is what each process runs.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORLDS = (2, 4)
TESTS = Path(__file__).parent
CHECKS = re.findall(r"^@check\ndef (\w+)\(", (TESTS / "tensor_parallel.py").read_text(), re.MULTILINE)
DOCUMENT = TESTS.parent / "docs" / "tensor_parallel.md"


def run(commands: list[list[str]], environments: list[dict[str, str]]) -> list[str]:
    """Run processes at the same time; give what each has printed. None outlives a failure of another."""
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        printed = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, printed, strict=True):
        assert process.returncode == 0, text
    return printed


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, str]]]:
    """What each process says of each check, by the number of processes."""
    found = {}
    for world in WORLDS:
        folder = tmp_path_factory.mktemp(f"world{world}")
        script = str(TESTS / "tensor_parallel.py")
        run([[script, str(rank), str(world), str(folder)] for rank in range(world)], [{} for _ in range(world)])
        found[world] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("check", ["before register", *CHECKS])
def test_in_every_process(results: dict[int, list[dict[str, str]]], check: str, world: int) -> None:
    assert len(CHECKS) > 10 and len(results[world]) == world
    for rank, said in enumerate(results[world]):
        assert said[check] == "", f"process {rank} of {world}: {said[check]}"


def test_the_example_of_the_document_runs_in_two_processes(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(# tensor_parallel\.py.*?)```", DOCUMENT.read_text(), re.DOTALL)
    script = tmp_path / "tensor_parallel.py"
    script.write_text(code)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environments: list[dict[str, Any]] = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(2)
    ]
    printed = run([[str(script)]] * 2, environments)
    assert all("4 of 8 heads" in text for text in printed)


def test_importing_the_package_does_not_import_dtensor() -> None:
    code = "import sys, pacache_torch; print('torch.distributed.tensor' in sys.modules)"
    assert run([["-c", code]], [{}]) == ["False\n"]
