"""Builds the extensions of pacache_torch. Metadata and tool settings stand in pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path

PYTHON_NEEDED = (3, 10)
SETUPTOOLS_NEEDED = 77  # the first that reads the licence expression in pyproject.toml

if sys.version_info < PYTHON_NEEDED:
    sys.exit(
        f"pacache_torch needs Python >= 3.{PYTHON_NEEDED[1]}, this is Python {sys.version.split()[0]}: use a newer one"
    )
try:
    import setuptools
except ImportError as error:
    sys.exit(
        f"pacache_torch needs setuptools >= {SETUPTOOLS_NEEDED} to build, and it cannot be imported ({error}): "
        "pip install -U setuptools"
    )

ROOT = Path(__file__).resolve().parent

if int(setuptools.__version__.split(".")[0]) < SETUPTOOLS_NEEDED:
    sys.exit(
        f"pacache_torch needs setuptools >= {SETUPTOOLS_NEEDED} to build, found {setuptools.__version__}: "
        "pip install -U setuptools"
    )
# torch_npu, where it is installed, is compiled against but never loaded: it needs CANN, which a build does not.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, is_ninja_available
except ImportError as error:
    sys.exit(
        f"pacache_torch is built against the torch that it will run with, and torch cannot be imported ({error}). "
        "Install torch >= 2.10, then: pip install --no-build-isolation ."
    )
# The argument rules, which both libraries hold.
SHARED_RULES = ("load_args", "memory_rules", "packed_layout", "scatter_args", "tensor_rules")


def sources(*folders: str) -> list[str]:
    """The .cpp files of these folders below csrc/, relative as setuptools wants them."""
    return [
        str(path.relative_to(ROOT)) for folder in folders for path in sorted((ROOT / "csrc" / folder).glob("*.cpp"))
    ]


def torch_npu_folder() -> Path | None:
    """Where torch_npu is installed, or None. ``PACACHE_WITH_NPU=0`` says not to look, ``=1`` that it must be there."""
    wanted = os.environ.get("PACACHE_WITH_NPU", "")
    if wanted not in ("", "0", "1"):
        sys.exit(f"PACACHE_WITH_NPU must be 0 or 1, got {wanted!r}")
    if wanted == "0":
        return None
    spec = importlib.util.find_spec("torch_npu")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    if wanted == "1":
        sys.exit("PACACHE_WITH_NPU=1 asks for the NPU kernels, and torch_npu is not installed: pip install torch_npu")
    return None


def extensions() -> list[setuptools.Extension]:
    """Every extension module: ``_C`` always, ``_C_npu`` where torch_npu is installed."""
    flags = [
        "-O3",
        "-fopenmp",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",  # in torch's headers
        f"-ffile-prefix-map={ROOT}/=",  # no build path in an error text
    ]
    if os.environ.get("PACACHE_DEBUG") == "1":
        flags += ["-O0", "-g"]
    modules = [
        CppExtension(
            "pacache_torch._C",
            sources(".", "cpu"),
            extra_compile_args=flags,
            extra_link_args=["-fopenmp"],
        ),
    ]
    torch_npu = torch_npu_folder()
    if torch_npu is not None:
        modules.append(
            CppExtension(
                "pacache_torch._C_npu",
                sources("npu") + [f"csrc/{name}.cpp" for name in SHARED_RULES],
                include_dirs=[
                    str(torch_npu / "include"),
                    str(torch_npu / "include/third_party/acl/inc"),
                    str(torch_npu / "include/third_party/hccl/inc"),
                ],
                library_dirs=[str(torch_npu / "lib")],
                libraries=["torch_npu"],
                extra_compile_args=[*flags, "-Wno-ignored-qualifiers", "-Wno-unused-function", "-Wno-comment"],
                # torch_npu's own needs (CANN) are met when it is loaded, before this library.
                extra_link_args=["-Wl,--allow-shlib-undefined"],
            )
        )
    return modules


class BuildAndRecord(BuildExtension):
    """Writes what was built against beside the libraries: it must be readable when they do not load."""

    def run(self) -> None:
        """Build, then leave the record beside every library (in the source tree for an in-place build)."""
        super().run()
        for extension in self.extensions:
            record = Path(self.get_ext_fullpath(extension.name)).parent / "_built_with.json"
            built_with = {"torch": torch.__version__, "python": sys.version.split()[0]}
            if torch_npu_folder() is not None:
                built_with["torch_npu"] = importlib.metadata.version("torch_npu")
            record.write_text(json.dumps(built_with) + "\n")


setuptools.setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildAndRecord.with_options(use_ninja=is_ninja_available())},
)
