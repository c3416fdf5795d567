"""Packed by AOTInductor, a model with caches as buffers runs from Python and from a C++ program that is compiled here.

The model is that of test_export.py, with a dynamic number of tokens; what each call returns is compared with eager
mode, and depends on what the calls before it have left in the buffers.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_export import CALLS, export, run_eagerly, same

from pacache_torch import _library

pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning")]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("aoti")
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    try:
        path = torch._inductor.aoti_compile_and_package(
            export(),
            package_path=str(folder / "model.pt2"),
            inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
        )
        yield Path(path)
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def test_a_package_runs_from_python(package: Path) -> None:
    model = torch._inductor.aoti_load_package(str(package))
    assert same([tuple(model(*call)) for call in CALLS], run_eagerly()[0])


def link_options() -> list[str]:
    """What a program needs that loads a Python extension module: torch, and libpython, shared or not."""
    torch_folder = Path(torch.__file__).parent
    config = {
        name: str(sysconfig.get_config_var(name) or "") for name in ("LIBDIR", "LDVERSION", "LIBPL", "LIBS", "SYSLIBS")
    }
    shared = bool(sysconfig.get_config_var("Py_ENABLE_SHARED"))
    python = [f"-L{config['LIBDIR'] if shared else config['LIBPL']}", f"-lpython{config['LDVERSION']}"]
    if shared:
        python.append(f"-Wl,-rpath,{config['LIBDIR']}")
    else:  # every symbol, since the library is not there when the program is linked
        python = ["-Wl,--export-dynamic", python[0], "-Wl,--whole-archive", python[1], "-Wl,--no-whole-archive"]
        python += [*config["LIBS"].split(), *config["SYSLIBS"].split(), "-lutil"]
    return [
        *(f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}", "-Wl,--no-as-needed"),
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-ldl"),
        *python,
    ]


def test_a_package_runs_from_cpp(package: Path, tmp_path: Path) -> None:
    """In a program of its own, which loads the operators' library and no Python code."""
    source = Path(__file__).with_name("aoti") / "run_package.cpp"
    library = _library.status()[0].path
    assert library is not None
    options = link_options()
    binary = tmp_path / "run_package"
    built = subprocess.run(
        ["g++", "-std=c++20", "-O0", str(source), "-o", str(binary), *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    torch.save([list(call) for call in CALLS], tmp_path / "calls.pt")
    ran = subprocess.run(
        [str(binary), library, str(package), str(tmp_path / "calls.pt"), str(tmp_path / "results.pt")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    found = [tuple(results) for results in torch.load(tmp_path / "results.pt", weights_only=False)]
    assert same(found, run_eagerly()[0])
