"""Nothing here is collected where vLLM is not installed; `make test-vllm` has an environment with it."""

from __future__ import annotations

import time
from importlib.util import find_spec

import pytest

collect_ignore_glob: list[str] = [] if find_spec("vllm") else ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the table of docs/vllm.md")


if find_spec("vllm"):
    import record

    STARTED = time.monotonic()

    def pytest_configure(config: pytest.Config) -> None:
        config.stash[record.DONE] = {}

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        if terminalreporter.config.getoption("--record", default=False) and exitstatus == 0:
            passed = len(terminalreporter.stats["passed"])
            record.write(terminalreporter.config.stash[record.DONE], time.monotonic() - STARTED, passed)
