"""What users install is complete: sdist and wheel build without isolation, and the wheel works where only torch is.

One build serves all tests: ``python -m build`` makes the sdist from a copy of the repository and the wheel from that
sdist, so that what is missing from the sdist is missing from the wheel too. Nothing is fetched. Where a build cannot
begin, one readable sentence says why.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import pacache_torch

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="the repository is not there")


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PACACHE_", "PYTHONPATH"))}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**inherited, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def copy_of_the_repository(folder: Path) -> Path:
    """Without what builds, tools and environments leave behind."""
    left_behind = shutil.ignore_patterns(
        ".git",
        ".*cache*",
        ".hypothesis",
        ".venv*",
        "build",
        "dist",
        "*.egg-info",
        "__pycache__",
        "*.so",
        "_built_with.json",
    )
    copy = folder / "repository"
    shutil.copytree(ROOT, copy, ignore=left_behind)
    return copy


@dataclass(frozen=True)
class Built:
    """What came of the one build."""

    sdist: Path
    wheel: Path
    output: str

    def sdist_names(self) -> set[str]:
        with tarfile.open(self.sdist) as archive:
            return {name.partition("/")[2] for name in archive.getnames()}

    def wheel_names(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("packaging")
    ran = run(sys.executable, "-m", "build", "--no-isolation", cwd=copy_of_the_repository(folder), PACACHE_WITH_NPU="0")
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    dist = folder / "repository" / "dist"
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return Built(sdist, wheel, ran.stdout + ran.stderr)


def files(folder: str, *patterns: str) -> set[str]:
    found = {str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / folder).rglob(pattern)}
    assert found
    return {name for name in found if "__pycache__" not in name}


def test_names_carry_the_version(built: Built) -> None:
    assert built.sdist.name == f"pacache_torch-{pacache_torch.__version__}.tar.gz"
    assert built.wheel.name.startswith(f"pacache_torch-{pacache_torch.__version__}-cp")


def test_the_sdist_holds_every_source(built: Built) -> None:
    """Also headers, which setuptools does not add by itself, and the tests, so that it can be checked."""
    names = built.sdist_names()
    needed = files("csrc", "*.cpp", "*.h") | files("pacache_torch", "*.py", "*.txt", "py.typed")
    assert not needed - names
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md"} <= names


def test_the_wheel_holds_the_package_and_no_sources(built: Built) -> None:
    names = built.wheel_names()
    needed = files("pacache_torch", "*.py", "*.txt", "py.typed")
    assert len([name for name in needed if name.endswith(".txt")]) > 1, "the prompts of the demo"
    assert not needed - names
    assert [name for name in names if name.startswith("pacache_torch/_C.") and name.endswith(".so")]
    assert "pacache_torch/_built_with.json" in names
    foreign = {
        name for name in names if name.endswith((".cpp", ".h", ".o", ".pyc")) or name.split("/")[0] in ("csrc", "tests")
    }
    assert not foreign
    assert {name.split("/")[0].split("-")[0] for name in names} == {"pacache_torch"}


def test_no_path_of_the_build_is_in_the_library(built: Built) -> None:
    """Error texts name source files as they stand in the repository, wherever it was built."""
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.startswith("pacache_torch/_C."))
        library = archive.read(name)
    assert b"scatter_pa_kv_cache" in library
    assert str(built.wheel.parents[2]).encode() not in library


def test_the_build_gives_no_warnings_of_ours(built: Built) -> None:
    warnings = [line for line in built.output.splitlines() if "warning:" in line and "csrc/" in line]
    assert not warnings
    assert "SetuptoolsDeprecationWarning" not in built.output


INSTALLED = """
import importlib.metadata, sys
import pacache_torch, torch
assert pacache_torch.__file__.startswith(sys.prefix), pacache_torch.__file__
assert importlib.metadata.version("pacache_torch") == pacache_torch.__version__
cache = torch.zeros(2, 2, 3, 1, 5).unbind(1)
key = torch.arange(10.).view(2, 1, 5) + 1
torch.ops.pacache.scatter_pa_kv_cache(key, -key, *cache, torch.tensor([4, -1], dtype=torch.int32))
out = pacache_torch.paged_cache_load(*cache, torch.tensor([[1]]), torch.tensor([2]))
assert out[0][1].tolist() == [[1, 2, 3, 4, 5]] and out[1][1].tolist() == [[-1, -2, -3, -4, -5]]
assert pacache_torch._library.status()[0].loaded
print("works")
"""


def test_the_wheel_works_in_an_environment_of_its_own(built: Built, tmp_path: Path) -> None:
    """A fresh environment with the wheel, and torch from where it is."""
    venv = tmp_path / "venv"
    assert run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path).returncode == 0
    python = venv / "bin" / "python"
    install = run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", built.wheel, cwd=tmp_path)
    assert install.returncode == 0, install.stderr
    (site,) = venv.glob("lib/python*/site-packages")
    elsewhere = {str(Path(torch.__file__).parents[1]), *(path for path in sys.path if path.endswith("-packages"))}
    (site / "torch_from_elsewhere.pth").write_text("\n".join(sorted(elsewhere)) + "\n")

    ran = run(python, "-c", INSTALLED, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "works\n"), ran.stderr
    doctor = run(venv / "bin" / "pacache-torch", "doctor", cwd=tmp_path)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert f"{pacache_torch.__version__}" in doctor.stdout
    (library,) = site.glob("pacache_torch/_C.*")
    library.unlink()
    ran = run(python, "-c", INSTALLED, cwd=tmp_path)
    assert ran.returncode == 1 and "LibraryNotLoadedError" in ran.stderr


def test_metadata(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        distribution = importlib.metadata.PathDistribution(zipfile.Path(archive, name.removesuffix("METADATA")))
        metadata = distribution.metadata
        needed = [requirement.split(">")[0] for requirement in metadata.get_all("Requires-Dist") or ()]
    assert metadata["Name"] == "pacache_torch" and metadata["Version"] == pacache_torch.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause" and metadata["Requires-Python"] == ">=3.10"
    assert "torch" in needed and "torch_npu" not in needed


# A build that cannot begin --------------------------------------------------------------------------------------------


def stub(folder: Path, package: str, code: str) -> Path:
    """A folder for PYTHONPATH that hides an installed package."""
    path = folder / f"without_{package}"
    (path / package).mkdir(parents=True)
    (path / package / "__init__.py").write_text(code)
    return path


def the_sentence(ran: subprocess.CompletedProcess[str]) -> str:
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    (line,) = (line for line in ran.stderr.splitlines() if line)
    return line


def test_without_torch_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    path = stub(tmp_path, "torch", "raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    line = the_sentence(run(sys.executable, "setup.py", "--version", cwd=ROOT, PYTHONPATH=str(path)))
    assert "No module named 'torch'" in line and "pip install --no-build-isolation" in line


def test_a_torch_that_does_not_load_is_not_taken_for_a_missing_one(tmp_path: Path) -> None:
    path = stub(tmp_path, "torch", "raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    line = the_sentence(run(sys.executable, "setup.py", "--version", cwd=ROOT, PYTHONPATH=str(path)))
    assert "libtorch_cpu.so: cannot open shared object file" in line


def test_with_an_old_setuptools_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    path = stub(tmp_path, "setuptools", "__version__ = '59.6.0'\n")
    line = the_sentence(run(sys.executable, "setup.py", "--version", cwd=ROOT, PYTHONPATH=str(path)))
    assert "setuptools >= 77" in line and "59.6.0" in line and "pip install -U setuptools" in line


def other_pythons() -> dict[str, Path]:
    """Interpreters of other minor versions on this machine: those on PATH and pyenv's."""
    found = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for minor in range(8, 20):
        on_path = shutil.which(f"python3.{minor}")
        candidates = [*pyenv.glob(f"versions/3.{minor}.*/bin/python"), *([Path(on_path)] if on_path else [])]
        for python in candidates:
            # A shim of pyenv's is on PATH also where its version is not chosen.
            asked = run(python, "-c", "import sys; print(sys.version_info[1])", cwd=ROOT)
            if asked.stdout == f"{minor}\n" and minor != sys.version_info.minor:
                found[f"3.{minor}"] = python
                break
    return found


def test_on_another_python_one_sentence_says_what_to_do() -> None:
    """Also where it has no setuptools or is too old; with a torch of its own it would build."""
    pythons = other_pythons()
    if not pythons:
        pytest.skip("not ours: there is no other Python on this machine")
    for name, python in pythons.items():
        ran = run(python, "setup.py", "--version", cwd=ROOT)
        if ran.returncode == 0:
            assert ran.stdout.splitlines()[-1] == pacache_torch.__version__
        elif int(name.split(".")[1]) < 10:
            assert the_sentence(ran).startswith(f"pacache_torch needs Python >= 3.10, this is Python {name}.")
        else:
            line = the_sentence(ran)
            assert line.endswith((": pip install -U setuptools", "then: pip install --no-build-isolation .")), line


def test_an_extension_that_does_not_build_is_never_left_out(tmp_path: Path) -> None:
    """A package without its kernels must not come of a failed build. [AutoGPTQ/AutoGPTQ#128]."""
    copy = copy_of_the_repository(tmp_path)
    (copy / "csrc" / "ops.cpp").write_text("#error broken\n")
    sources = [path for path in (copy / "csrc").rglob("*.cpp") if path.name != "ops.cpp"]
    for path in sources:
        path.write_text("")  # compiles at once
    ran = run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=copy, PACACHE_WITH_NPU="0")
    assert ran.returncode != 0 and "#error broken" in ran.stdout + ran.stderr
    assert not list((copy / "pacache_torch").glob("*.so"))


def test_pip_shows_the_sentence(tmp_path: Path) -> None:
    """Through pip too, which wraps the output of a build."""
    path = stub(tmp_path, "torch", "raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    ran = run(
        sys.executable,
        *("-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path / "dist"),
        copy_of_the_repository(tmp_path),
        cwd=tmp_path,
        PYTHONPATH=str(path),
    )
    assert ran.returncode != 0
    assert "torch cannot be imported (No module named 'torch')" in ran.stdout + ran.stderr
