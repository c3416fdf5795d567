"""``import pacache_torch`` works whatever has become of its library, and the first call says what has.

Each case runs in a process of its own on a copy of the package, so that nothing in the tree is touched. A library that
is missing, broken or built for another torch leaves the reference, the layouts and the doctor in working order; the
first call of an operator, by either name, raises the whole cause. ``PACACHE_FORCE_REFERENCE=1`` puts the reference in
the operators' place, with and without the library. With the library, kernels stand at the dispatch keys that they
should and at no others.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pacache_torch
from pacache_torch import _library

OPERATORS = ("scatter_pa_kv_cache", "paged_cache_load", "scatter_pa_kv_cache_packed", "paged_cache_load_packed")

# Shared by the scripts below: a call of each operator by either name, with what must come of it.
CALLS = """
import sys
import torch

def calls(namespace):
    cache = torch.zeros(2, 3, 1, 5)
    key = torch.arange(10.).view(2, 1, 5) + 1
    yield "scatter_pa_kv_cache", lambda: namespace.scatter_pa_kv_cache(key, None, cache, None, torch.tensor([4, -1]))
    out = torch.zeros(2, 1, 5), torch.zeros(2, 1, 5)
    tables, lens = torch.tensor([[1]]), torch.tensor([2])
    yield "paged_cache_load", lambda: namespace.paged_cache_load(cache, cache, tables, lens, *out)
    assert out[0].flatten().tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4, 5], out

def frames_of_reference(call):
    "How many calls of functions of reference.py a call makes."
    found = []
    sys.setprofile(lambda frame, event, _: event == "call" and frame.f_code.co_filename.endswith(
        "pacache_torch/reference.py") and found.append(frame.f_code.co_name))
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(found)
"""

# Every part of the package that needs no library is in order, and every call says why there is none.
UNUSABLE = (
    CALLS
    + """
import pacache_torch
from pacache_torch import LibraryNotLoadedError, __version__, _library, layouts, reference

assert __version__ and not _library.status()[0].loaded
for namespace in (pacache_torch, pacache_torch.ops, torch.ops.pacache):
    for name, call in calls(namespace):
        try:
            call()
        except LibraryNotLoadedError as error:
            assert isinstance(error, RuntimeError)
            message = str(error)
        else:
            raise AssertionError(f"{name} has been run")
        assert message.startswith(f"{name}: pacache_torch._C is not loaded: "), message
        assert _library.status()[0].cause in message
        if name == "scatter_pa_kv_cache":
            print(message)
        else:
            break
try:
    torch.ops.pacache.paged_cache_load.default(None)
except LibraryNotLoadedError as error:
    assert str(error).startswith("paged_cache_load: ")
for name, call in calls(reference):
    call()
for name in ("scatter_pa_kv_cache", "paged_cache_load"):
    assert not torch._C._dispatch_has_kernel(f"pacache::{name}")
assert layouts.__name__ == "pacache_torch.layouts"

import contextlib, io, json
from pacache_torch.__main__ import main
with contextlib.redirect_stdout(io.StringIO()) as printed:
    assert main(["doctor", "--json"]) == 1
assert json.loads(printed.getvalue())["extensions"][0]["cause"] == _library.status()[0].cause
"""
)


def copy_package(folder: Path, *, library: bool) -> Path:
    """Copy the package; its library is linked, not copied, and the record of its build left out."""
    source = Path(pacache_torch.__file__).parent
    copy = folder / "pacache_torch"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.so", "_built_with.json", "__pycache__"))
    if library:
        built = library_file()
        (copy / built.name).symlink_to(built)
    return copy


def library_file() -> Path:
    path = _library.status()[0].path
    assert path is not None
    return Path(path)


def run(folder: Path, script: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the copy in ``folder``, out of reach of the package under test."""
    # -S, because the import hook of an editable install would find its own library for the copy.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PACACHE_")}
    path = [str(folder), *(entry for entry in sys.path if entry)]
    return subprocess.run(
        [sys.executable, "-S", *options, "-c", script],
        cwd=folder,
        env={**inherited, "PYTHONPATH": os.pathsep.join(path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def causes(folder: Path) -> str:
    """Run the script for a library that cannot be used; give the message of the first call."""
    ran = run(folder, UNUSABLE)
    assert ran.returncode == 0, ran.stderr
    messages = set(ran.stdout.splitlines())
    assert len(messages) == 1, f"every name gives the same message: {messages}"
    return messages.pop()


# A library that cannot be used ---------------------------------------------------------------------------------------


def test_without_a_library(tmp_path: Path) -> None:
    copy_package(tmp_path, library=False)
    assert "pacache_torch._C was not built; rebuild it with: pip install" in causes(tmp_path)


def test_with_a_truncated_library(tmp_path: Path) -> None:
    """The loader's own words come through, with the file that they are about."""
    copy = copy_package(tmp_path, library=False)
    broken = copy / library_file().name
    broken.write_bytes(library_file().read_bytes()[:60])  # less than its header: the loader maps no more than there is
    message = causes(tmp_path)
    assert f"ImportError: {broken}: " in message


def test_with_a_library_that_is_not_ours(tmp_path: Path) -> None:
    """It loads, but is no module of this name."""
    import math

    if not getattr(math, "__file__", None):
        pytest.skip("not ours: this interpreter has its extension modules built in")
    copy = copy_package(tmp_path, library=False)
    shutil.copy(str(math.__file__), copy / library_file().name)
    assert "ImportError: dynamic module does not define module export function (PyInit__C)" in causes(tmp_path)


def test_with_a_library_of_another_version(tmp_path: Path) -> None:
    """An in-place build that was not repeated after an update: it loads, and lacks what the Python half expects."""
    copy = copy_package(tmp_path, library=False)
    (copy / "_C.py").write_text("def build_info(): return {}\n")
    assert "pacache_torch._C is older than the Python files beside it; rebuild it with: pip" in causes(tmp_path)


@pytest.mark.parametrize("built", ("1.2.3", "2.999.0+cu126"))
def test_a_library_for_another_torch_is_not_opened(tmp_path: Path, built: str) -> None:
    copy = copy_package(tmp_path, library=True)
    (copy / "_built_with.json").write_text(f'{{"torch": "{built}"}}')
    message = causes(tmp_path)
    assert f"pacache_torch was built against torch {built} and is running with torch {torch.__version__}; " in message


def test_a_library_for_another_patch_release_is_loaded(tmp_path: Path) -> None:
    """Torch's C++ interface is kept within a minor release."""
    copy = copy_package(tmp_path, library=True)
    minor = ".".join(torch.__version__.split(".")[:2])
    (copy / "_built_with.json").write_text(f'{{"torch": "{minor}.99+other"}}')
    ran = run(
        tmp_path,
        CALLS
        + """
import pacache_torch
for namespace in (pacache_torch, torch.ops.pacache):
    for name, call in calls(namespace):
        assert frames_of_reference(call) == 0, "the kernels run"
print(pacache_torch._library.status()[0])
""",
    )
    assert ran.returncode == 0, ran.stderr
    assert "loaded=True, cause=None" in ran.stdout


# The reference in the operators' place -------------------------------------------------------------------------------

FORCED = (
    CALLS
    + """
import pacache_torch
for namespace in (pacache_torch, torch.ops.pacache):
    for name, call in calls(namespace):
        assert frames_of_reference(call) > 0, f"{name} was not run by the reference"
        if name == "paged_cache_load":
            assert frames_of_reference(call) > 0
for name in ("scatter_pa_kv_cache", "paged_cache_load"):
    getattr(torch.ops.pacache, name).default  # stands there, library or not
try:
    torch.ops.pacache.scatter_pa_kv_cache(torch.ones(1, 2), None, torch.ones(1, 1, 1, 1), None, torch.tensor([0]))
except ValueError as error:
    print(error)
print(pacache_torch._library.status()[0].loaded)
"""
)


@pytest.mark.parametrize("library", (True, False), ids=("with-library", "without-library"))
def test_the_reference_can_be_forced(tmp_path: Path, library: bool) -> None:
    copy_package(tmp_path, library=library)
    ran = run(tmp_path, FORCED, PACACHE_FORCE_REFERENCE="1")
    assert ran.returncode == 0, ran.stderr
    message, loaded = ran.stdout.splitlines()
    assert message == (
        "scatter_pa_kv_cache: key must be [num_tokens, num_heads, head_size] or "
        "[batch, seq_len, num_heads, head_size], got [1, 2]"
    )
    assert loaded == str(library)


def test_the_reference_is_not_forced_by_another_value(tmp_path: Path) -> None:
    copy_package(tmp_path, library=True)
    ran = run(tmp_path, FORCED, PACACHE_FORCE_REFERENCE="0")
    assert ran.returncode == 1 and "was not run by the reference" in ran.stderr


# What an import does, and does not -----------------------------------------------------------------------------------


def test_torch_npu_is_never_imported(tmp_path: Path) -> None:
    """It needs CANN: importing it for a user of the CPU would break their process. Warnings are errors here."""
    copy_package(tmp_path, library=True)
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object')")
    ran = run(
        tmp_path,
        CALLS
        + """
import pacache_torch
assert "torch_npu" not in sys.modules
for name, call in calls(pacache_torch):
    call()
assert "torch_npu" not in sys.modules
print(sorted(name for name in sys.modules if name.startswith(("torch_npu", "hypothesis", "pytest"))))
""",
        "-W",
        "error::UserWarning:pacache_torch",
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[]\n" and ran.stderr == ""


def test_public_names_are_there() -> None:
    for name in pacache_torch.__all__:
        assert getattr(pacache_torch, name) is not None
    assert {*OPERATORS, "LibraryNotLoadedError", "__version__", "layouts", "reference"} <= set(pacache_torch.__all__)


def test_the_library_says_what_it_was_built_with() -> None:
    info = _library.build_info()
    assert info is not None
    assert info["torch"].split("+")[0].split(".")[:2] == torch.__version__.split(".")[:2]
    assert info["openmp"].isdecimal(), "at::parallel_for would run on one thread"
    assert info["package"] == pacache_torch.__version__


# Dispatch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATORS)
def test_kernels_stand_where_they_should(name: str) -> None:
    """CPU kernel, fake kernel, and a refusal by name for every device without one. [vllm-project/vllm-ascend#1895]."""
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    for key in ("CPU", "Meta", "CompositeExplicitAutograd"):
        assert registered(f"pacache::{name}", key), key
    # Autograd kernels break torch.compile [pytorch/pytorch#139707]; Functionalize turns re-inplacing off; an implicit
    # composite would hide missing kernels.
    for key in (
        "Autograd",
        "AutogradCPU",
        "AutogradPrivateUse1",
        "AutogradOther",
        "Functionalize",
        "CompositeImplicitAutograd",
        "ADInplaceOrView",
        "BackendSelect",
    ):
        assert not registered(f"pacache::{name}", key), key


@pytest.mark.parametrize("name", OPERATORS)
def test_the_fake_kernel_is_found_by_name(name: str) -> None:
    """A tracer that misses the fake kernels can say what to import."""
    op = getattr(torch.ops.pacache, name).default
    assert torch._C._dispatch_pystub(op._schema.name, op._schema.overload_name) == ("pacache_torch.fake", "")
    assert op._defined_in_python is False


# conftest.py ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("required", ("1", "0", ""))
def test_skips_fail_where_everything_is_required(tmp_path: Path, required: str) -> None:
    """PACACHE_REQUIRE_ALL=1: a skip of ours is a failure, in a test, by a mark and of a whole file."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_a.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_inside(): pytest.skip('no reason')\n"
        "@pytest.mark.skipif(True, reason='a mark')\n"
        "def test_mark(): pass\n"
        "@pytest.mark.skipif(True, reason='not ours: a device')\n"
        "def test_not_ours(): pass\n"
        "@pytest.mark.xfail\n"
        "def test_expected(): assert False\n"
    )
    (tmp_path / "test_b.py").write_text("import pytest\npytest.skip('a file', allow_module_level=True)\n")
    (tmp_path / "test_c.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PACACHE_REQUIRE_ALL": required},
        capture_output=True,
        text=True,
        timeout=120,
    )
    summary = ran.stdout.splitlines()[-1]
    if required == "1":
        assert ran.returncode == 1
        assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 3 errors" in summary
        for reason in ("no reason", "a mark", "a file", "could not import 'no_such_module'"):
            assert f"PACACHE_REQUIRE_ALL=1 and this was skipped: {reason}" in ran.stdout
    else:
        assert ran.returncode == 0
        assert "1 passed, 5 skipped, 1 xfailed" in summary
