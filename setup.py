"""Builds the extensions of pacache_torch. Metadata and tool settings stand in pyproject.toml."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import setuptools

ROOT = Path(__file__).resolve().parent
SETUPTOOLS_NEEDED = 77  # the first that reads the licence expression in pyproject.toml

if int(setuptools.__version__.split(".")[0]) < SETUPTOOLS_NEEDED:
    sys.exit(
        f"pacache_torch needs setuptools >= {SETUPTOOLS_NEEDED} to build, found {setuptools.__version__}: "
        "pip install -U setuptools"
    )
try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, is_ninja_available
except ImportError as error:
    sys.exit(
        f"pacache_torch is built against the torch that it will run with, and torch cannot be imported ({error}). "
        "Install torch >= 2.10, then: pip install --no-build-isolation ."
    )


def sources(*folders: str) -> list[str]:
    """The .cpp files of these folders below csrc/, relative as setuptools wants them."""
    return [
        str(path.relative_to(ROOT)) for folder in folders for path in sorted((ROOT / "csrc" / folder).glob("*.cpp"))
    ]


def extensions() -> list[setuptools.Extension]:
    """Every extension module. A second library is one more entry of the list."""
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
    return [
        CppExtension(
            "pacache_torch._C",
            sources(".", "cpu"),
            extra_compile_args=flags,
            extra_link_args=["-fopenmp", "-Wl,--no-as-needed"] if sys.platform == "linux" else [],
        ),
    ]


class BuildAndRecord(BuildExtension):
    """Writes what was built against beside the libraries: it must be readable when they do not load."""

    def build_extensions(self) -> None:
        """Build, then leave the record beside every library."""
        super().build_extensions()
        for extension in self.extensions:
            record = Path(self.get_ext_fullpath(extension.name)).parent / "_built_with.json"
            record.write_text(json.dumps({"torch": torch.__version__, "python": sys.version.split()[0]}) + "\n")


setuptools.setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildAndRecord.with_options(use_ninja=is_ninja_available())},
)
