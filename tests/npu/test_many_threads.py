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

THREADS, STREAMS = 8, 3
CALLS = short_or_long(200, 10_000)  # of each operator, by each thread
BETWEEN_WAITS = 97  # calls after which a thread waits for its streams: in lazy mode nothing has run until then
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


class Worker:
    """What one thread does: the same on any device, with streams or without."""

    def __init__(self, number: int, device: str) -> None:
        import torch

        self.number = number
        self.on_npu = device != "cpu"
        self.nz = number % 4 >= 2
        generator = torch.Generator().manual_seed(number)
        blocks, block_size, heads, size = 7, 16, 3, 32

        def noise(*shape: int) -> Any:
            bits = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
            return bits.view(torch.float16).to(device)

        cache = (blocks, heads * size // 16, block_size, 16) if self.nz else (blocks, block_size, heads, size)
        self.mode = {"cache_mode": "PA_NZ" if self.nz else "Norm"}
        self.caches = [[noise(*cache), noise(*cache)] for _ in range(STREAMS)]
        self.rows = [[noise(50, heads, size), noise(50, heads, size)] for _ in range(2 * STREAMS)]
        self.tokens = []
        for i in range(7):
            slots = torch.randperm(blocks * block_size, generator=generator)[: 5 + i]
            slots[i] = -1
            fused = noise(5 + i, heads, 3 * size)  # views: dense copies are made, and freed at once
            self.tokens.append((fused[..., :size], fused[..., size : 2 * size], slots.to(torch.int32).to(device)))
        self.tables = []
        for i in range(5):
            table = torch.stack([torch.randperm(blocks, generator=generator)[:3] for _ in range(2)])
            lens = torch.tensor([40 - i, 3 + i])
            dtype = torch.int64 if i == 4 else torch.int32
            self.tables.append((table.to(dtype).to(device), lens.to(dtype).to(device)))
        if self.on_npu:
            self.streams = [torch.npu.Stream(device) for _ in range(STREAMS)]

    def work(self) -> None:
        """Make the calls."""
        import torch

        for i in range(CALLS):
            stream = i % STREAMS
            # The cache of another stream, once it has written what it has to.
            other = (stream + 1) % STREAMS if i % 11 == 0 else stream
            if self.on_npu:
                with torch.npu.stream(self.streams[stream]):
                    if other != stream:
                        self.streams[stream].wait_stream(self.streams[other])
                    self.calls(i, stream, other)
                if other != stream:
                    self.streams[other].wait_stream(self.streams[stream])
                if i % BETWEEN_WAITS == 0:
                    self.wait()
            else:
                self.calls(i, stream, other)

    def calls(self, i: int, stream: int, other: int) -> None:
        """One of each operator."""
        import torch

        ops = torch.ops.pacache
        key, value, slots = self.tokens[(5 * i + self.number) % 7]
        ops.scatter_pa_kv_cache(key, value, *self.caches[stream], slots, **self.mode)
        rows = self.rows[stream + STREAMS * (other != stream)]
        ops.paged_cache_load(*self.caches[other], *self.tables[i % 5], *rows, **self.mode)

    def wait(self) -> None:
        """Wait for the streams."""
        for stream in self.streams:
            stream.synchronize()

    def results(self) -> list[Any]:
        """Everything that is written."""
        return [t.cpu() for pair in (*self.caches, *self.rows) for t in pair]


def many_threads(name: str) -> None:
    """Run all threads, and compare with one after the other."""
    import torch
    import torch_npu  # noqa: F401

    import pacache_torch  # noqa: F401

    control.set_trace(False)
    workers = [Worker(number, f"npu:{number % 2}") for number in range(THREADS)]
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
        serial = Worker(worker.number, "cpu")
        serial.work()
        for got, wanted in zip(worker.results(), serial.results(), strict=True):
            assert torch.equal(got.view(torch.int16), wanted.view(torch.int16)), f"thread {worker.number}"
    if SOAK:
        head = ["on the simulated CANN", "threads", "streams", "devices", "calls", "seconds", "wrong bits, violations"]
        record("threads", name, head, [[name, "8", str(THREADS * STREAMS), "2", f"{2 * THREADS * CALLS:,}",
                                        f"{seconds:.0f}", "0"]])  # fmt: skip


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
