"""Nothing is loaded from the current directory or by a relative path in a variable, on the simulated CANN.

Decoys (`decoys.py`) lie in the current directory, and each process is given one way to them. Real on the way: torch_npu
2.13.0 and the dynamic loader. What these two load by themselves is theirs: see docs/reliability.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import decoys  # noqa: E402
from cann_sim import build  # noqa: E402
from cann_sim.run import Result, run, side_by_side  # noqa: E402

Case = Callable[[], None]
CASES: dict[str, tuple[Case, dict[str, str], dict[str, Any]]] = {}


def case(variables: dict[str, str], **options: Any) -> Callable[[Case], Case]:
    """Register what runs in a process of its own; LD_LIBRARY_PATH is put behind the simulator's."""

    def register(function: Case) -> Case:
        CASES[function.__name__] = (function, variables, options)
        return function

    return register


def in_process(name: str, folder: Path) -> Result:
    """Run a case with the decoys in its current directory."""
    _, variables, options = CASES[name]
    marker = decoys.plant(folder)
    variables = {**variables, "DECOY_MARKER": str(marker), "CASE_FOLDER": str(folder)}
    if "LD_LIBRARY_PATH" in variables:
        variables["LD_LIBRARY_PATH"] = build.environment(**options)["LD_LIBRARY_PATH"] + variables["LD_LIBRARY_PATH"]
    return run([sys.executable, __file__, name], variables=variables, **options)


def loaded() -> list[str]:
    """The decoys that this process has loaded."""
    return decoys.loaded(Path(os.environ["DECOY_MARKER"]))


def calls() -> tuple[Callable[[], None], Callable[[], None]]:
    """Both operators, with their results looked at."""
    import torch

    import pacache_torch

    key = (torch.arange(64.0) + 1).view(2, 1, 32).half()
    filled = torch.zeros(2, 3, 1, 32).half()
    filled[1, 1] = key[0]
    ints = [torch.tensor(values, dtype=torch.int32).to("npu:0") for values in ([4, -1], [[1]], [2])]

    def scatter() -> None:
        cache = torch.zeros(2, 3, 1, 32).half().to("npu:0")
        pacache_torch.scatter_pa_kv_cache(key.to("npu:0"), None, cache, None, ints[0])
        assert cache.cpu().equal(filled)

    def load() -> None:
        caches = [filled.to("npu:0"), filled.to("npu:0")]
        out = [torch.zeros(2, 1, 32).half().to("npu:0") for _ in caches]
        pacache_torch.paged_cache_load(*caches, *ints[1:], *out)
        assert out[1].cpu()[1].equal(key[0]) and not out[1].cpu()[0].any()

    return scatter, load


def both_work(backend: str) -> None:
    """Both operators work, the libraries that the doctor prints are real files elsewhere, and no decoy was loaded."""
    import pacache_torch
    from pacache_torch.doctor import examine

    for call in calls():
        call()
    facts = examine(self_check=False)["torch_npu"]
    assert facts["load_backend"] == backend
    found = pacache_torch._library.npu_module().found()
    files = {name: path for name, path in (*found["op_api"], *found["atb_libraries"]) if path}
    assert "libopapi.so" in files and ("libatb.so" in files) == (backend == "AtbPagedCacheLoad")
    for name, path in files.items():
        assert path == os.path.realpath(path) and not path.startswith(os.getcwd()), (name, path)
        assert f"{name} ({path})" in (*facts["op_api_libraries"], *facts["atb_libraries"])
    assert facts["cann"] == os.path.realpath(facts["cann"])
    assert loaded() == []


@case({"LD_LIBRARY_PATH": "::lib:planted/lib", "ATB_HOME_PATH": "planted"}, atb=False)
def atb_is_nowhere_but_here() -> None:
    """An empty entry of LD_LIBRARY_PATH is the current directory to the loader; set_env scripts leave such."""
    both_work("aclnnGatherPaKvCache")


@case({"LD_LIBRARY_PATH": "::lib"})
def atb_is_elsewhere_too() -> None:
    """With such entries the ATB of the others is found."""
    both_work("AtbPagedCacheLoad")


def refused(variable: str) -> None:
    """torch_npu would search it from the current directory: the operators say so and look nothing up.

    The tensors are not filled: torch_npu's own copies do look things up.
    """
    import torch

    import pacache_torch

    def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="npu:0")

    rows, ints, tables = empty(2, 1, 32), empty(2, dtype=torch.int32), empty(2, 1, dtype=torch.int32)
    caches = [empty(2, 3, 1, 32), empty(2, 3, 1, 32)]
    assert "a relative path" in pacache_torch._library.npu_module().found()["op_api"][0][0]
    for _ in range(2):
        for name, arguments in (
            ("scatter_pa_kv_cache", (rows, None, caches[0], None, ints)),
            ("paged_cache_load", (*caches, tables, ints, rows, empty(2, 1, 32))),
        ):
            try:
                getattr(pacache_torch, name)(*arguments)
            except RuntimeError as error:
                assert str(error).splitlines()[0] == (
                    f"{name}: {variable}={os.environ[variable]} must be an absolute path: "
                    "nothing is loaded from a path that depends on the current directory"
                ), error
            else:
                raise AssertionError("nothing was raised")
    torch.npu.synchronize()
    assert loaded() == []
    rows.cpu()
    assert loaded(), "torch_npu does load it: that a decoy is seen"


@case({"ASCEND_OPP_PATH": "planted"}, atb=False)
def a_relative_opp_path() -> None:
    """As named."""
    refused("ASCEND_OPP_PATH")


@case({"ASCEND_CUSTOM_OPP_PATH": "/nowhere:planted"})
def a_relative_custom_opp_path() -> None:
    """As named, in a list."""
    refused("ASCEND_CUSTOM_OPP_PATH")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Result]]]:
    """All cases, two at a time."""
    with side_by_side({name: partial(in_process, name, tmp_path_factory.mktemp(name)) for name in CASES}) as running:
        yield running


@pytest.mark.parametrize("name", CASES)
def test_security(name: str, results: dict[str, Future[Result]]) -> None:
    """The case passes."""
    result = results[name].result()
    assert result.code == 0 and not result.violations, result


if __name__ == "__main__":
    os.chdir(os.environ["CASE_FOLDER"])
    CASES[sys.argv[1]][0]()
    sys.stdout.flush()
