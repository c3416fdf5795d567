"""What is collected here depends on where pytest runs.

The tests of this folder start processes of their own in the environment of the simulated CANN. `device/` is what runs
inside such a process (test_device_suite.py starts it), so it is collected there only.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

collect_ignore: list[str] = []
collect_ignore_glob: list[str] = []

if "CANN_SIM_VERSION" not in os.environ:
    collect_ignore.append("device")
if find_spec("torch_npu") is None:  # the environment of the CPU tests; `make test-npu` has one with it
    collect_ignore_glob.append("test_*.py")
