"""Does the CPU side build for aarch64, and do its copy kernels work there?

    make cross

Compiles every file of ``_C`` with a cross compiler against torch's headers, and runs the copy kernels under qemu. Needs
``g++-aarch64-linux-gnu`` and ``qemu-user-static`` (Debian's names). Whether the whole library runs on such a processor
is not shown by this: torch for aarch64 is not at hand.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).resolve().parents[2]
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"
FLAGS = ["-std=c++20", "-O3", "-fopenmp", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]


def main() -> int:
    """Compile all, run the kernels."""
    for program, package in ((COMPILER, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user-static")):
        if shutil.which(program) is None:
            print(f"make cross needs {program}: apt-get install {package}", file=sys.stderr)
            return 1
    includes = [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    files = sorted((ROOT / "csrc").glob("*.cpp")) + sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            built = f"{folder}/{file.stem}.o"
            subprocess.run(
                [COMPILER, *FLAGS, *includes, "-DTORCH_EXTENSION_NAME=_C", "-c", str(file), "-o", built], check=True
            )
            print(f"built {file.relative_to(ROOT)}")
        kernels = [f"{folder}/copy_kernels.o", f"{folder}/copy_portable.o"]
        check = [str(ROOT / "tests/cross/check_copy_kernels.cpp"), f"-I{ROOT}/csrc", *kernels, "-static"]
        subprocess.run([COMPILER, *FLAGS, *check, "-o", f"{folder}/check"], check=True)
        return subprocess.run([EMULATOR, f"{folder}/check"], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
