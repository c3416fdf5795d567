"""Which native libraries are loaded, and if one is not, why?

A library that does not load never breaks ``import pacache_torch``: its cause is kept here, printed by the doctor, and
raised whole by the first call that needs it.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from pacache_torch import _version

OPERATORS = ("scatter_pa_kv_cache", "paged_cache_load", "scatter_pa_kv_cache_packed", "paged_cache_load_packed")
# What was added last to each library: without it, the library is of another version of the package.
_NEWEST_FUNCTION = {"_C": "call_paged_cache_load_packed", "_C_npu": "release"}
_REBUILD = "rebuild it with: pip install --no-build-isolation --force-reinstall --no-deps <where it came from>"


@dataclass(frozen=True)
class ExtensionStatus:
    """One native library: where it is, whether it is loaded, and the whole cause if it is not."""

    name: str
    path: str | None
    loaded: bool
    cause: str | None


class LibraryNotLoadedError(RuntimeError):
    """An operator was called whose native library is not loaded; the text holds the cause."""


def reference_forced() -> bool:
    """Whether ``PACACHE_FORCE_REFERENCE=1`` asks for the Python reference in place of the CPU kernels."""
    return os.environ.get("PACACHE_FORCE_REFERENCE") == "1"


class _Unavailable:
    """Stands at ``torch.ops.pacache.<operator>`` when the library is not loaded; every call raises the cause."""

    def __init__(self, name: str, cause: str) -> None:
        self._name = name
        self._cause = cause

    @property
    def default(self) -> _Unavailable:
        return self

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise LibraryNotLoadedError(f"{self._name}: pacache_torch._C is not loaded: {self._cause}")


class _Reference:
    """Stands at ``torch.ops.pacache.<operator>`` when the reference was asked for and there is no library."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    @property
    def default(self) -> _Reference:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._function(*args, **kwargs)


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _mismatch(built_with: dict[str, str], package: str, running: str) -> str | None:
    """Compare before anything is loaded: the C++ interface of torch and torch_npu changes with every minor release."""
    built = built_with.get(package, running)
    if _minor(built) == _minor(running):
        return None
    return f"pacache_torch was built against {package} {built} and is running with {package} {running}; {_REBUILD}"


def _built_with() -> dict[str, str]:
    record = Path(__file__).with_name("_built_with.json")
    return dict(json.loads(record.read_text())) if record.is_file() else {}


def _not_found(name: str) -> str:
    """The cause where Python finds no library of its own: none was built, or one for another Python."""
    if any(Path(__file__).parent.glob(f"{name}.*.so")):
        built, running = _built_with().get("python", "another version"), sys.version.split()[0]
        return f"pacache_torch was built for Python {built} and is running with Python {running}; {_REBUILD}"
    return f"pacache_torch.{name} was not built; {_REBUILD}"


def _load(name: str, unmet: str | None = None) -> ExtensionStatus:
    """Load one library; ``unmet`` is a cause that is known already."""
    spec = importlib.util.find_spec(f"pacache_torch.{name}")
    if spec is None:
        return ExtensionStatus(name, None, False, unmet or _not_found(name))
    cause = unmet or _mismatch(_built_with(), "torch", torch.__version__)
    if cause is None:
        try:
            module = importlib.import_module(f"pacache_torch.{name}")
            if not hasattr(module, _NEWEST_FUNCTION[name]):
                cause = f"pacache_torch.{name} is older than the Python files beside it; {_REBUILD}"
        except (ImportError, OSError, RuntimeError) as error:
            cause = f"{type(error).__name__}: {error}"
    return ExtensionStatus(name, spec.origin, cause is None, cause)


def torch_npu_installed() -> bool:
    """Whether torch_npu can be found on this machine. What only stands in ``sys.modules`` is a stand-in for it."""
    return any(
        finder.find_spec("torch_npu", None) is not None for finder in sys.meta_path if hasattr(finder, "find_spec")
    )


def _load_npu() -> ExtensionStatus:
    """Load the NPU kernels if torch_npu has been imported; it is never imported from here (it needs CANN)."""
    installed = torch_npu_installed()
    spec = importlib.util.find_spec("pacache_torch._C_npu")
    if not installed:
        return _load("_C_npu", f"torch_npu is not installed; install torch_npu, then {_REBUILD}")
    if spec is None:
        return _load("_C_npu", f"pacache_torch was built without torch_npu; {_REBUILD}")
    if "torch_npu" not in sys.modules:
        return _load(
            "_C_npu",
            "torch_npu is installed and not imported; import torch_npu first, which needs CANN "
            "(the first npu tensor then loads the npu kernels)",
        )
    if not _CPU.loaded:
        return _load("_C_npu", "pacache_torch._C, which holds the schemas, is not loaded")
    running = importlib.metadata.version("torch_npu")
    return _load("_C_npu", _mismatch(_built_with(), "torch_npu", running))


def _npu_cause() -> str:
    """Called by the library when an npu tensor finds no kernel: load them, or say why not."""
    global _NPU
    if not _NPU.loaded:
        _NPU = _load_npu()
        if _NPU.loaded:
            _register_release()
    return _NPU.cause or ""


def _register_release() -> None:
    """Give ATB's objects back while the device is still there: exit functions run last in, first out."""
    atexit.register(importlib.import_module("pacache_torch._C_npu").release)


def _install() -> None:
    """Put something callable at ``torch.ops.pacache.<operator>`` whatever has been loaded."""
    from pacache_torch import reference

    for name in OPERATORS:
        function: Callable[..., None] = getattr(reference, name)
        if _CPU.loaded:
            if reference_forced():
                _reference_library.impl(name, function, "CPU")
        elif reference_forced():
            setattr(torch.ops.pacache, name, _Reference(function))
        else:
            setattr(torch.ops.pacache, name, _Unavailable(name, str(_CPU.cause)))


_CPU = _load("_C")
_NPU = ExtensionStatus("_C_npu", None, False, None)
_reference_library = torch.library.Library("pacache", "IMPL")
if _CPU.loaded:
    importlib.import_module("pacache_torch._C").set_npu_loader(_npu_cause)
_npu_cause()
_install()


def status() -> list[ExtensionStatus]:
    """The libraries of the package, in the order in which they are loaded."""
    _npu_cause()
    return [_CPU, _NPU]


def npu_module() -> Any:
    """``pacache_torch._C_npu``, or LibraryNotLoadedError with the cause."""
    cause = _npu_cause()
    if cause:
        raise LibraryNotLoadedError(f"pacache_torch._C_npu is not loaded: {cause}")
    return importlib.import_module("pacache_torch._C_npu")


def build_info() -> dict[str, str] | None:
    """What ``_C`` was built with (torch, compiler, cxx_standard, openmp, architecture), or None without ``_C``."""
    if not _CPU.loaded:
        return None
    info: dict[str, str] = importlib.import_module("pacache_torch._C").build_info()
    return {**info, "package": _version.__version__}


def operator(name: str) -> Callable[..., None]:
    """The callable at ``torch.ops.pacache.<name>.default``: the operator, or what stands in its place."""
    function: Callable[..., None] = getattr(torch.ops.pacache, name).default
    return function


def eager_call(name: str) -> Callable[..., bool]:
    """The operator for eager calls with plain arguments (csrc/eager_call.cpp); without the library, never it."""
    if not _CPU.loaded:
        return lambda *arguments: False
    function: Callable[..., bool] = getattr(importlib.import_module("pacache_torch._C"), f"call_{name}")
    return function
