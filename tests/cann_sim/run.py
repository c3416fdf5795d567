"""Run a command on the simulated CANN, and say what it did wrong.

``python tests/cann_sim/run.py [--version 9.1.0 --soc A2 --no-atb --lazy --hide NAME] -- command ...``

Builds the simulator if needed. The exit code is the command's; if that is 0 and there was a violation, 86.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cann_sim import build

EXIT_CODE = 86  # of a process that did well but for violations
SHOWN = 20


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


def _violations(report: Path) -> list[dict[str, str]] | None:
    """What the simulator wrote at exit; None when it was never loaded or the process was killed."""
    return json.loads(report.read_text())["violations"] if report.exists() else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code, or 86 when only the simulator objects."""
    arguments = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="cann_sim_") as folder:
        report = Path(folder) / "report.json"
        env = build.environment(
            version=arguments.version,
            soc=arguments.soc,
            atb=not arguments.no_atb,
            hide=arguments.hide,
            lazy=arguments.lazy,
            devices=arguments.devices,
            report=report,
        )
        # They are listed here, at the end; the simulator would print each as it happens.
        env["CANN_SIM_QUIET"] = "1"
        code = subprocess.run(arguments.command, env=env, check=False).returncode
        violations = _violations(report)
    sys.stdout.flush()
    what = f"simulated CANN {arguments.version}, {env['CANN_SIM_SOC']}"
    if violations is None:
        print(f"{what}: no report (the command did not load it, or was killed)", file=sys.stderr)
        return code or 1
    if not violations:
        print(f"{what}: no violations", file=sys.stderr)
        return code
    kinds = Counter(violation["kind"] for violation in violations)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    print(f"{what}: {len(violations)} violations ({counts})", file=sys.stderr)
    for violation in violations[:SHOWN]:
        print(f"  {violation['kind']}: {violation['op']}: {violation['text']}", file=sys.stderr)
    if len(violations) > SHOWN:
        print(f"  ... and {len(violations) - SHOWN} more", file=sys.stderr)
    return code or EXIT_CODE


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    raise SystemExit(main())
