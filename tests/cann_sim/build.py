"""Compile the simulated CANN and describe the environment it runs in."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
DEFAULT_OUT = SOURCE / "build"
VERSIONS = ("8.3.RC1.alpha003", "8.5.0", "9.0.0", "9.1.0")
SOCS = {"A2": "Ascend910B3", "A3": "Ascend910_9392", "310P": "Ascend310P3"}

_ATB = Path("nnal/atb/latest/atb/cxx_abi_1")


def _root(out_dir: Path, hide: Iterable[str]) -> Path:
    """Folder of the libraries: one of its own for each set of hidden names."""
    names = " ".join(sorted(hide))
    if not names:
        return out_dir
    digest = hashlib.sha256(names.encode()).hexdigest()[:12]
    return out_dir / "hidden" / digest


def build(
    out_dir: str | os.PathLike[str] = DEFAULT_OUT,
    *,
    hide: Iterable[str] = (),
    jobs: int = 2,
) -> Path:
    """Compile what is older than its sources; seconds, and safe in parallel.

    Args:
        out_dir: where objects and libraries go.
        hide: exported symbols to leave out, as if this CANN did not have
            them (for example ``PTAGetExecCache``). Only relinks.
        jobs: parallel compilations.

    Returns:
        The folder that holds ``lib64``.
    """
    return _build(Path(out_dir).resolve(), tuple(sorted(hide)), jobs)


@functools.cache  # once per process: the sources do not change under a test
def _build(out: Path, hide: tuple[str, ...], jobs: int) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    root = _root(out, hide)
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [
            "make",
            f"-j{jobs}",
            f"OUT={out}",
            f"LIB={root / 'lib64'}",
            f"ATBLIB={root / _ATB / 'lib'}",
            f"HIDE={' '.join(hide)}",
        ]
        done = subprocess.run(command, cwd=SOURCE, text=True, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"cann_sim: build failed\n{done.stdout}\n{done.stderr}")
    return root


def _write(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _tree(root: Path, version: str) -> Path:
    """Make the installation tree that torch_npu inspects; returns its home."""
    home = root / "cann" / version
    machine = f"{os.uname().machine}-linux"
    _write(
        home / machine / "ascend_toolkit_install.info",
        f"package_name=Ascend-cann-toolkit\nversion={version}\narch={os.uname().machine}\nos=linux\npath={home}\n",
    )
    for part in ("runtime", "compiler", "opp", "toolkit"):
        _write(home / part / "version.info", f"Version={version}\n")
    _write(
        home / "version.cfg",
        "# version: 1.0\n"
        f"runtime_running_version=[{version}:{version}]\n"
        f"toolkit_running_version=[{version}:{version}]\n",
    )
    _write(home / "opp/vendors/config.ini", "load_priority=\n")
    lib64 = home / "lib64"
    lib64.mkdir(exist_ok=True)
    for library in (root / "lib64").glob("*.so"):
        link = lib64 / library.name
        if not link.is_symlink():
            try:
                link.symlink_to(library)
            except FileExistsError:
                pass
    return home


def environment(
    out_dir: str | os.PathLike[str] = DEFAULT_OUT,
    *,
    version: str = "9.1.0",
    soc: str = "A2",
    atb: bool = True,
    hide: Iterable[str] = (),
    lazy: bool = False,
    devices: int = 2,
    pta: bool = True,
    trace: str | os.PathLike[str] | None = None,
    report: str | os.PathLike[str] | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Build if needed and return the variables for a process that uses it.

    Args:
        out_dir: as for `build`.
        version: CANN edition, one of `VERSIONS`.
        soc: key of `SOCS`, or a SoC name as aclrtGetSocName gives it.
        atb: whether libatb.so is found.
        hide: symbols that this CANN lacks; default those of CANN_SIM_HIDE,
            separated by commas.
        lazy: run queued work only at a synchronisation.
        devices: how many NPUs there are.
        pta: whether CanUsePTACache says yes.
        trace: file for the call trace as JSON lines.
        report: file for all violations and counters, written at exit.
        base: variables to start from; default those of this process.

    Returns:
        A whole environment, to be passed as ``subprocess.run(env=...)``:
        LD_LIBRARY_PATH takes effect only when a process starts.
    """
    if version not in VERSIONS:
        raise ValueError(f"cann_sim: version must be one of {VERSIONS}, got {version}")
    env = dict(os.environ if base is None else base)
    hide = list(hide) or env.get("CANN_SIM_HIDE", "").replace(",", " ").split()
    root = build(out_dir, hide=hide)
    home = _tree(root, version)
    for name in [n for n in env if n.startswith(("CANN_SIM_", "ATB_"))]:
        del env[name]
    paths = [str(root / "lib64")]
    if atb:
        paths.append(str(root / _ATB / "lib"))
        env["ATB_HOME_PATH"] = str(root / _ATB)
        _write(
            root / _ATB.parent.parent / "version.info",
            f"Ascend-cann-atb : {version}\nAscend-cann-atb Version : {version}\n",
        )
    if env.get("LD_LIBRARY_PATH"):
        paths.append(env["LD_LIBRARY_PATH"])
    env["LD_LIBRARY_PATH"] = ":".join(paths)
    env["ASCEND_HOME_PATH"] = str(home)
    env["ASCEND_TOOLKIT_HOME"] = str(home)
    env["ASCEND_OPP_PATH"] = str(home / "opp")
    env.pop("ASCEND_CUSTOM_OPP_PATH", None)
    env["CANN_SIM_VERSION"] = version
    env["CANN_SIM_SOC"] = SOCS.get(soc, soc)
    env["CANN_SIM_DEVICES"] = str(devices)
    env["CANN_SIM_LAZY"] = "1" if lazy else "0"
    if not pta:
        env["CANN_SIM_NO_PTA"] = "1"
    if trace is not None:
        env["CANN_SIM_TRACE"] = str(trace)
    if report is not None:
        env["CANN_SIM_REPORT"] = str(report)
    # Tests import `cann_sim` (this folder's package) in the subprocess.
    python_path = [str(SOURCE.parent)]
    if env.get("PYTHONPATH"):
        python_path.append(env["PYTHONPATH"])
    env["PYTHONPATH"] = ":".join(python_path)
    return env


def main() -> None:
    """Print ``export`` lines: ``eval "$(python tests/cann_sim/build.py)"``."""
    import argparse
    import shlex

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", default=str(DEFAULT_OUT))
    parser.add_argument("--version", default="9.1.0", choices=VERSIONS)
    parser.add_argument("--soc", default="A2")
    parser.add_argument("--no-atb", action="store_true")
    parser.add_argument("--lazy", action="store_true")
    args = parser.parse_args()
    env = environment(
        args.out,
        version=args.version,
        soc=args.soc,
        atb=not args.no_atb,
        lazy=args.lazy,
    )
    for name, value in sorted(env.items()):
        if os.environ.get(name) != value:
            sys.stdout.write(f"export {name}={shlex.quote(value)}\n")


if __name__ == "__main__":
    main()
