"""What an installation gives that is not whole, or not of one piece: every state of it in a process of its own.

    python tests/import_matrix.py

Runs the states that this environment can be put into, on copies of the package, and records the table of
docs/reliability.md. With torch_npu installed these are the states of the NPU path, on the simulated CANN; without it,
those of the CPU path. Each gives the full function, or exactly one sentence that says what to do: the whole sentence
stands here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from cann_sim import run as simulated  # noqa: E402
from reliability import record  # noqa: E402

HAS_TORCH_NPU = importlib.util.find_spec("torch_npu") is not None
WORKS = "works"
REBUILD = "rebuild it with: pip install --no-build-isolation --force-reinstall --no-deps <where it came from>"

# Calls both operators on a device, looks at the result, and says what happened: "works", or the text of the error.
PROBE = """
import json, sys
try:
    import torch
except Exception as error:
    print(json.dumps({"import": str(error)}))
    raise SystemExit
import pacache_torch

def call(device):
    key = (torch.arange(64.) + 1).view(2, 1, 32).half()
    cache, out = torch.zeros(2, 3, 1, 32).half().to(device), torch.zeros(2, 1, 32).half().to(device)
    ints = [torch.tensor(values, dtype=torch.int32).to(device) for values in ([4, -1], [[1]], [2])]
    pacache_torch.scatter_pa_kv_cache(key.to(device), None, cache, None, ints[0])
    pacache_torch.paged_cache_load(cache, cache.clone(), *ints[1:], out, out.clone())
    assert out.cpu()[1].equal(key[0]) and not out.cpu()[0].any(), out

def outcome(function, *arguments):
    try:
        function(*arguments)
    except (RuntimeError, ImportError) as error:
        return str(error)
    return "works"

found = {"cpu": outcome(call, "cpu"), "torch": torch.__version__, "file": pacache_torch.__file__}
found["npu"] = outcome(call, "npu:0") if "torch_npu" in sys.modules else outcome(pacache_torch.warmup, "npu")
if "torch_npu" in sys.modules:
    found["torch_npu"] = torch_npu.__version__ if (torch_npu := sys.modules["torch_npu"]) else ""
    from cann_sim import control
    found["launched"] = control.counters().get("aclnnScatterPaKvCache", 0)
print(json.dumps(found))
"""


# How a copy of the package is put into a state ------------------------------------------------------------------------


def _library(package: Path, name: str) -> Path:
    (path,) = package.glob(f"{name}.*.so")
    return path


def as_it_is(package: Path) -> None:
    """Leave it."""


def without(*names: str) -> Callable[[Path], None]:
    """Take libraries away."""

    def prepare(package: Path) -> None:
        for name in names:
            _library(package, name).unlink()

    return prepare


def stale(name: str) -> Callable[[Path], None]:
    """Put a module in a library's place that lacks what was added last, as a build lacks it that was not repeated."""

    def prepare(package: Path) -> None:
        _library(package, name).unlink()
        (package / f"{name}.py").write_text("def set_npu_loader(loader): pass\ndef build_info(): return {}\n")

    return prepare


def built_with(**versions: str) -> Callable[[Path], None]:
    """Say that it was built against other versions."""

    def prepare(package: Path) -> None:
        path = package / "_built_with.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **versions}))

    return prepare


def for_another_python(package: Path) -> None:
    """Give the libraries the names that they have for another Python."""
    for path in package.glob("*.so"):
        path.rename(path.with_name(path.name.replace(f"cpython-3{sys.version_info.minor}", "cpython-39")))
    built_with(python="3.9.18")(package)


# The states -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A state of an installation, and what it gives; in a sentence, ``...`` is anything."""

    name: str
    cpu: str
    npu: str
    prepare: Callable[[Path], None] = as_it_is
    variables: Mapping[str, str] = field(default_factory=dict)
    cann: Mapping[str, Any] | None = field(default_factory=dict)  # options of the simulated CANN; None: there is none


_NO_C = f"scatter_pa_kv_cache: pacache_torch._C is not loaded: pacache_torch._C was not built; {REBUILD}"
_NO_TORCH_NPU = "pacache_torch._C_npu is not loaded: torch_npu is not installed; install torch_npu, then " + REBUILD
_ANOTHER_TORCH = (
    "scatter_pa_kv_cache: pacache_torch._C is not loaded: "
    f"pacache_torch was built against torch {{built}} and is running with torch {{torch}}; {REBUILD}"
)
_ANOTHER_PATCH = ".".join(version("torch").split(".")[:2]) + ".99"
_ON_NPU = (
    "scatter_pa_kv_cache: key must be on a device that has a kernel (cpu, npu), got npu:0; "
    "the npu kernels are not loaded: "
)

WITHOUT_TORCH_NPU = (
    State("no torch_npu", WORKS, _NO_TORCH_NPU),
    State("no `_C` at all", _NO_C, _NO_TORCH_NPU, without("_C")),
    State(
        "`_C` of another Python",
        "scatter_pa_kv_cache: pacache_torch._C is not loaded: "
        f"pacache_torch was built for Python 3.9.18 and is running with Python {{python}}; {REBUILD}",
        _NO_TORCH_NPU,
        for_another_python,
    ),
    State(
        "stale editable build",
        "scatter_pa_kv_cache: pacache_torch._C is not loaded: "
        f"pacache_torch._C is older than the Python files beside it; {REBUILD}",
        _NO_TORCH_NPU,
        stale("_C"),
    ),
    State(
        "a torch that is older than the one it was built against",
        _ANOTHER_TORCH.replace("{built}", "2.999.0+cu126"),
        _NO_TORCH_NPU,
        built_with(torch="2.999.0+cu126"),
    ),
    State(
        "a torch that is newer",
        _ANOTHER_TORCH.replace("{built}", "2.9.1"),
        _NO_TORCH_NPU,
        built_with(torch="2.9.1"),
    ),
    State(
        "another patch release of torch",
        WORKS,
        _NO_TORCH_NPU,
        built_with(torch=_ANOTHER_PATCH),
    ),
)

WITH_TORCH_NPU = (
    State(
        "torch_npu without CANN",
        "Failed to load the backend extension: torch_npu. You can disable extension auto-loading with "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0.",
        "...",
        cann=None,
    ),
    State(
        "torch_npu without CANN, `TORCH_DEVICE_BACKEND_AUTOLOAD=0`",
        WORKS,
        "pacache_torch._C_npu is not loaded: torch_npu is installed and not imported; import torch_npu first, "
        "which needs CANN (the first npu tensor then loads the npu kernels)",
        variables={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        cann=None,
    ),
    State("torch_npu, CANN and ATB", WORKS, WORKS),
    State("CANN without ATB", WORKS, WORKS, cann={"atb": False}),
    State(
        "CANN without ATB and without `aclnnGatherPaKvCache`",
        WORKS,
        "paged_cache_load: the function AtbPagedCacheLoadGetWorkspaceSize was not found; the oldest version that has "
        "it is 8.3.RC1. Searched: libatb.so (not found); environment: ... CANN 9.1.0, ATB of unknown version "
        "(ATB_HOME_PATH is not set)",
        cann={"atb": False, "hide": ["aclnnGatherPaKvCache"]},
    ),
    State(
        "`_C_npu` built against another torch_npu",
        WORKS,
        _ON_NPU
        + "pacache_torch was built against torch_npu 2.12.0 and is running with torch_npu {torch_npu}; "
        + REBUILD,
        built_with(torch_npu="2.12.0"),
    ),
    State(
        "built without torch_npu, which was installed later",
        WORKS,
        _ON_NPU + "pacache_torch was built without torch_npu; " + REBUILD,
        without("_C_npu"),
    ),
    State(
        "stale `_C_npu`",
        WORKS,
        _ON_NPU + "pacache_torch._C_npu is older than the Python files beside it; " + REBUILD,
        stale("_C_npu"),
    ),
    State("`_C_npu` and no `_C`", _NO_C, _NO_C, without("_C")),
)

STATES = {state.name: state for state in (WITH_TORCH_NPU if HAS_TORCH_NPU else WITHOUT_TORCH_NPU)}


# Running --------------------------------------------------------------------------------------------------------------


def copy_package(folder: Path) -> Path:
    """Copy the installed package; its libraries are linked, not copied."""
    spec = importlib.util.find_spec("pacache_torch")  # found, not imported: with torch_npu that would need CANN
    assert spec is not None and spec.origin is not None
    source, copy = Path(spec.origin).parent, folder / "pacache_torch"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    libraries = list(source.glob("_C*.so"))
    for library in libraries:
        if HAS_TORCH_NPU or not library.name.startswith("_C_npu"):
            (copy / library.name).symlink_to(library)
    return copy


def command(script: str, *arguments: str) -> list[str]:
    """A script in an interpreter that sees PYTHONPATH only: an editable install would find its own library."""
    return [sys.executable, "-S", "-c", script, *arguments]


def search_path(folder: Path) -> dict[str, str]:
    """PYTHONPATH with the copy in ``folder`` first, and the packages that this process sees."""
    path = [str(folder), str(HERE), *(entry for entry in sys.path if entry.endswith("-packages") or ".zip" in entry)]
    return {"PYTHONPATH": os.pathsep.join(path)}


def probe(state: State, folder: Path) -> dict[str, Any]:
    """Put a copy into the state, and call the operators."""
    package = copy_package(folder)
    state.prepare(package)
    variables = {**search_path(folder), **state.variables}
    if state.cann is not None and HAS_TORCH_NPU:
        result = simulated.run(command(PROBE), variables=variables, **state.cann)
        assert result.code == 0 and not result.violations, result
        output = result.stdout
    else:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PACACHE_", "ASCEND_", "ATB_"))}
        ran = subprocess.run(
            command(PROBE), env={**inherited, **variables}, cwd=folder, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, ran.stderr
        output = ran.stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def _matches(wanted: str, found: str) -> bool:
    return re.fullmatch(re.escape(wanted).replace(re.escape("..."), ".*"), found) is not None


def check(state: State, folder: Path) -> str:
    """Fail unless the state gives what is written here; give it in the words of the page."""
    found = probe(state, folder)
    if "import" in found:
        assert _matches(state.cpu, found["import"]), found
        return f"`import torch` says: “{state.cpu}”"
    versions = {**found, "python": sys.version.split()[0]}
    wanted = {}
    for device in ("cpu", "npu"):
        wanted[device] = re.sub(r"\{(\w+)\}", lambda match: versions[match[1]], getattr(state, device))
        assert _matches(wanted[device], found[device]), f"{device}: wanted {wanted[device]!r}, found {found[device]!r}"
    assert found["file"].startswith(str(folder)), found
    if found["npu"] == WORKS:
        assert found["launched"] == 1, "the operator of the device, not torch_npu's way round by the CPU"
    if wanted["cpu"] != WORKS:
        return f"“{wanted['cpu']}”"
    return "everything" if wanted["npu"] == WORKS else f"everything on the CPU; for an npu: “{wanted['npu']}”"


@contextmanager
def side_by_side() -> Iterator[dict[str, Future[str]]]:
    """Check the states of this environment, two at a time."""
    with tempfile.TemporaryDirectory(prefix="import_matrix_") as folder, ThreadPoolExecutor(2) as pool:
        jobs = {}
        for number, (name, state) in enumerate(STATES.items()):
            (own := Path(folder).resolve() / str(number)).mkdir()
            jobs[name] = pool.submit(check, state, own)
        yield jobs


def main() -> None:
    """Check the states and record what they give."""
    with side_by_side() as jobs:
        rows = [[name, job.result().replace("<", "&lt;")] for name, job in jobs.items()]
    for row in rows:
        print(": ".join(row))
    record("import_matrix", "2_npu" if HAS_TORCH_NPU else "1_cpu", ["the installation", "gives"], rows)


if __name__ == "__main__":
    main()
