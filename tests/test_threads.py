"""Eight threads with both operators at full speed on the CPU get what the same calls give one after the other."""

from __future__ import annotations

import threading
import time

import torch
from reliability import record
from soak import SOAK, short_or_long
from thread_work import Worker

THREADS = 8
CALLS = short_or_long(500, 10_000)  # of each operator, by each thread


def test_threads_get_what_one_gets() -> None:
    """Caches and rows of every thread, bit for bit."""
    workers = [Worker(number, CALLS) for number in range(THREADS)]
    errors: list[BaseException] = []
    barrier = threading.Barrier(THREADS)

    def work(worker: Worker) -> None:
        try:
            barrier.wait()
            worker.work()
        except BaseException as error:
            errors.append(error)

    began = time.monotonic()
    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    assert errors == []
    for worker in workers:
        serial = Worker(worker.number, CALLS)
        serial.work()
        for got, wanted in zip(worker.results(), serial.results(), strict=True):
            assert torch.equal(got.view(torch.int16), wanted.view(torch.int16)), f"thread {worker.number}"
    if SOAK:
        head = ["on", "threads", "streams", "devices", "calls", "seconds", "wrong bits, violations"]
        record("threads", "1-CPU", head, [["CPU", "8", "", "", f"{2 * THREADS * CALLS:,}", f"{seconds:.0f}", "0"]])
