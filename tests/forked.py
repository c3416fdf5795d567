"""How does a test do something in a forked child without ever waiting for a child that hangs?"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable

SECONDS = 60  # for one child; a right one needs less than one


def in_child(work: Callable[[], object]) -> None:
    """Fork, do the work in the child, and wait for its end; a child that fails or hangs is an AssertionError."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")
