"""Run a command on the simulated CANN, and say what it did wrong.

``python tests/cann_sim/run.py [--version 9.1.0 --soc A2 --no-atb --lazy --hide NAME] -- command ...``

Builds the simulator if needed. The exit code is the command's; if that is 0 and there was a violation, 86.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cann_sim import build

EXIT_CODE = 86  # of a process that did well but for violations
SHOWN = 20


@dataclass(frozen=True)
class Result:
    """What a command did. Violations are None when it never loaded the simulator, or was killed."""

    code: int
    violations: list[dict[str, str]] | None
    stdout: str
    stderr: str

    def __str__(self) -> str:
        """Everything, for a failing test."""
        return f"exit code {self.code}\n{self.violations}\n{self.stdout}\n{self.stderr}"


def run(
    command: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    capture: bool = True,
    timeout: float | None = 300,
    **options: Any,
) -> Result:
    """Run a command in `build.environment`.

    Args:
        command: program and arguments.
        variables: added to the environment.
        capture: keep what it prints; otherwise it goes to this process's output.
        timeout: seconds.
        options: of `build.environment`.
    """
    with tempfile.TemporaryDirectory(prefix="cann_sim_") as folder:
        report = Path(folder) / "report.json"
        env = build.environment(report=report, **options) | dict(variables or {})
        # They are in the result; the simulator would print each as it happens.
        env["CANN_SIM_QUIET"] = "1"
        done = subprocess.run(command, env=env, text=True, capture_output=capture, timeout=timeout, check=False)
        violations = json.loads(report.read_text())["violations"] if report.exists() else None
    return Result(done.returncode, violations, done.stdout or "", done.stderr or "")


@contextmanager
def side_by_side(jobs: Mapping[str, Callable[[], Result]], workers: int = 2) -> Iterator[dict[str, Future[Result]]]:
    """Start all jobs, a few at a time; what is not needed at the end is not started any more."""
    pool = ThreadPoolExecutor(workers)
    try:
        yield {name: pool.submit(job) for name, job in jobs.items()}
    finally:
        pool.shutdown(cancel_futures=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run.py", description="Run a command on the simulated CANN and list its violations."
    )
    parser.add_argument("--version", default="9.1.0", choices=build.VERSIONS)
    parser.add_argument("--soc", default="A2", help=f"{', '.join(build.SOCS)}, or a full SoC name")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--no-atb", action="store_true", help="without libatb.so")
    parser.add_argument("--lazy", action="store_true", help="run queued work only at a synchronisation")
    parser.add_argument("--hide", action="append", default=[], metavar="NAME", help="a symbol that this CANN lacks")
    parser.add_argument("command", nargs="+", metavar="-- command", help="what to run")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code, or 86 when only the simulator objects."""
    arguments = _parser().parse_args(argv)
    result = run(
        arguments.command,
        capture=False,
        timeout=None,
        version=arguments.version,
        soc=arguments.soc,
        atb=not arguments.no_atb,
        hide=arguments.hide,
        lazy=arguments.lazy,
        devices=arguments.devices,
    )
    what = f"simulated CANN {arguments.version}, {build.SOCS.get(arguments.soc, arguments.soc)}"
    if result.violations is None:
        print(f"{what}: no report (the command did not load it, or was killed)", file=sys.stderr)
        return result.code or 1
    if not result.violations:
        print(f"{what}: no violations", file=sys.stderr)
        return result.code
    kinds = Counter(violation["kind"] for violation in result.violations)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    print(f"{what}: {len(result.violations)} violations ({counts})", file=sys.stderr)
    for violation in result.violations[:SHOWN]:
        print(f"  {violation['kind']}: {violation['op']}: {violation['text']}", file=sys.stderr)
    if len(result.violations) > SHOWN:
        print(f"  ... and {len(result.violations) - SHOWN} more", file=sys.stderr)
    return result.code or EXIT_CODE


if __name__ == "__main__":
    raise SystemExit(main())
