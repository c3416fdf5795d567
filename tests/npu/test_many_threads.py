"""Eight threads, both operators, several streams each, two devices, at full speed, on the simulated CANN.

Every thread writes and reads caches of its own on streams of its own; now and then a stream reads what another has
written, behind an event. At the end every cache and every row that was read is what the same calls give one after the
other on the CPU. Each case runs in a process of its own, ``python test_many_threads.py NAME``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from cann_sim import control  # noqa: E402
from cann_sim.run import Result, run, side_by_side  # noqa: E402
from reliability import record  # noqa: E402
from soak import SOAK, short_or_long  # noqa: E402

THREADS = 8
CALLS = short_or_long(200, 10_000)  # of each operator, by each thread
CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "queued, lazy streams": ({"lazy": True}, {"TASK_QUEUE_ENABLE": "1"}),
    "at once, eager streams": ({}, {"TASK_QUEUE_ENABLE": "0"}),
}
if SOAK:
    CASES |= {
        "queued, eager streams": ({}, {"TASK_QUEUE_ENABLE": "1"}),
        "both phases queued, lazy streams": ({"lazy": True}, {"TASK_QUEUE_ENABLE": "2"}),
        "aclnn loads, lazy streams": ({"lazy": True}, {"PACACHE_LOAD_BACKEND": "aclnn"}),
        "A3, no executor cache, lazy streams": ({"lazy": True, "soc": "A3"}, {"PACACHE_EXECUTOR_CACHE": "0"}),
    }


def many_threads(name: str) -> None:
    """Run all threads, and compare with one after the other."""
    import torch
    import torch_npu  # noqa: F401
    from thread_work import STREAMS, Worker

    control.set_trace(False)
    workers = [Worker(number, CALLS, f"npu:{number % 2}") for number in range(THREADS)]
    for device in (0, 1):
        torch.npu.synchronize(device)
    errors: list[BaseException] = []
    barrier = threading.Barrier(THREADS)

    def work(worker: Worker) -> None:
        try:
            torch.npu.set_device(f"npu:{worker.number % 2}")
            barrier.wait()
            worker.work()
            worker.wait()
        except BaseException as error:
            errors.append(error)

    control.clear()
    began = time.monotonic()
    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    assert errors == []
    assert control.violations() == []
    made = control.counters()
    loads = made.get("AtbPagedCacheLoad", 0) + made.get("aclnnGatherPaKvCache", 0)
    assert made["aclnnScatterPaKvCache"] == loads == THREADS * CALLS
    for worker in workers:
        serial = Worker(worker.number, CALLS)
        serial.work()
        for got, wanted in zip(worker.results(), serial.results(), strict=True):
            assert torch.equal(got.view(torch.int16), wanted.view(torch.int16)), f"thread {worker.number}"
    if SOAK:
        streams, calls = str(THREADS * STREAMS), f"{2 * THREADS * CALLS:,}"
        head = ["on", "threads", "streams", "devices", "calls", "seconds", "wrong bits, violations"]
        row = [f"simulated CANN, {name}", str(THREADS), streams, "2", calls, f"{seconds:.0f}", "0"]
        record("threads", f"2-{name}", head, [row])


def in_process(name: str) -> Result:
    """Run a case."""
    options, variables = CASES[name]
    return run([sys.executable, __file__, name], variables=variables, timeout=short_or_long(300, 3600), **options)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Result]]]:
    """The cases that were selected, two at a time."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    jobs: dict[str, Callable[[], Result]] = {
        name: partial(in_process, name) for name in (item.callspec.params["name"] for item in here)
    }
    with side_by_side(jobs) as running:
        yield running


@pytest.mark.parametrize("name", CASES)
def test_many_threads(name: str, results: dict[str, Future[Result]]) -> None:
    """The case passes, without a violation up to the exit of its process."""
    result = results[name].result()
    assert result.code == 0, result
    assert result.violations == [], result


if __name__ == "__main__":
    many_threads(sys.argv[1])
