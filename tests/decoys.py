"""Libraries that must not be loaded: each writes its name into a file when it is."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void loaded(void) {
  Dl_info here;
  const char* name = getenv("DECOY_MARKER");
  FILE* marker = name == NULL ? NULL : fopen(name, "a");
  if (marker == NULL || dladdr((void*)&loaded, &here) == 0) abort();
  fprintf(marker, "%s\\n", here.dli_fname);
  fclose(marker);
}
"""
FOLDERS = (".", "lib", "lib64", "op_api/lib", "vendors/planted/op_api/lib")
CANN = ("libopapi.so", "libopapi_math.so", "libcust_opapi.so", "libatb.so", "libascendcl.so", "libhccl.so")
OURS = tuple(
    f"{name}{suffix}" for name in ("_C", "_C_npu") for suffix in (".so", sysconfig.get_config_var("EXT_SUFFIX"))
)


def build(file: Path) -> Path:
    """Compile one."""
    source = file.with_suffix(".c")
    source.write_text(SOURCE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(file), str(source)], check=True)
    return file


def plant(folder: Path) -> Path:
    """Lay decoys in a folder and in ``planted`` below it, wherever a search could look; give the file of the names."""
    decoy = build(folder / "decoy.so")
    for root in (folder, folder / "planted"):
        for below in FOLDERS:
            (root / below).mkdir(parents=True, exist_ok=True)
            for name in (*CANN, *OURS):
                shutil.copy(decoy, root / below / name)
        (root / "vendors" / "config.ini").write_text("load_priority=planted\n")
        (root / "_built_with.json").write_text('{"torch": "1.0", "torch_npu": "1.0"}')
    return folder / "loaded"


def loaded(marker: Path) -> list[str]:
    """Those that have been."""
    return marker.read_text().splitlines() if marker.exists() else []
