"""Forked and spawned processes use the operators on the CPU: a right answer in time, never a hang.

After fork() a child has one thread, and OpenMP may believe in the parent's others. Each case runs in an interpreter of
its own, ``python test_processes.py NAME``, which is killed if it takes too long. What children compute is compared by
the parent or with torch's operators on one thread, since torch's own may hang where ours must not.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from forked import SECONDS, in_child
from torch import Tensor

CASES: dict[str, Callable[[], None]] = {}
Case = Callable[[], None]


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Work:
    """A scatter and a load that are large enough for several threads, in shared memory, and what they must give."""

    def __init__(self, seed: int = 0) -> None:
        import pacache_torch  # noqa: F401

        generator = torch.Generator().manual_seed(seed)
        self.key = torch.randint(-100, 100, (5003, 3, 160), generator=generator, dtype=torch.int16)
        self.cache = torch.zeros(331, 16, 3, 160, dtype=torch.int16)
        self.slots = torch.randperm(331 * 16, generator=generator)[:5003]
        self.table = torch.arange(331)[None]
        self.lens = torch.tensor([5296])
        self.rows = [torch.zeros(5296, 3, 160, dtype=torch.int16) for _ in range(2)]
        self.expected = torch.zeros_like(self.rows[0])
        self.expected[self.slots] = self.key
        for written in (self.cache, *self.rows):
            written.share_memory_()

    def do(self) -> None:
        """Call both operators."""
        torch.ops.pacache.scatter_pa_kv_cache(self.key, None, self.cache, None, self.slots)
        torch.ops.pacache.paged_cache_load(self.cache, self.cache, self.table, self.lens, *self.rows)

    def check(self) -> None:
        """The rows are right; then forget them."""
        assert torch.equal(self.cache.flatten(0, 1), self.expected)
        for rows in self.rows:
            assert torch.equal(rows, self.expected)
            rows.zero_()
        self.cache.zero_()


@case
def after_openmp_was_used() -> None:
    """The parent's OpenMP threads are gone in the child."""
    torch.set_num_threads(4)
    work = Work()
    work.do()  # on four threads
    work.check()
    for _ in range(3):
        in_child(work.do)
        work.check()
    work.do()  # the parent goes on
    work.check()


@case
def before_openmp_was_used() -> None:
    """A child of a parent that never used several threads, as of a fork server."""
    torch.set_num_threads(1)
    work = Work()
    torch.set_num_threads(4)
    in_child(work.do)
    torch.set_num_threads(1)
    work.check()


@case
def in_a_grandchild() -> None:
    """A child uses the operators, forks, and its child does."""
    torch.set_num_threads(4)
    work = Work()
    work.do()
    work.check()
    again = Work(1)

    def child() -> None:
        work.do()
        in_child(again.do)

    in_child(child)
    work.check()
    again.check()


@case
def in_a_new_thread_of_a_child() -> None:
    """A child starts threads, which OpenMP knows nothing of, and all of them work."""
    torch.set_num_threads(4)
    works = [Work(seed) for seed in range(3)]
    works[0].do()
    works[0].check()

    def child() -> None:
        workers = [threading.Thread(target=work.do) for work in works[1:]]
        for worker in workers:
            worker.start()
        works[0].do()
        for worker in workers:
            worker.join()

    in_child(child)
    for work in works:
        work.check()


@case
def with_one_thread_and_in_order() -> None:
    """A child that was told to use one thread, and one that must keep the order."""
    torch.set_num_threads(4)
    work = Work()
    work.do()
    work.check()

    def one() -> None:
        torch.set_num_threads(1)
        work.do()

    def in_order() -> None:
        torch.use_deterministic_algorithms(True)
        work.do()

    for child in (one, in_order):
        in_child(child)
        work.check()


@case
def without_new_threads() -> None:
    """A child that may not start a thread does all of it in its own."""
    import resource

    torch.set_num_threads(4)
    work = Work()
    work.do()
    work.check()

    def child() -> None:
        # A thread needs room for its stack; the stacks of the parent's threads are there to be used again.
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + (1 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        end = threading.Event()
        try:
            for _ in range(100):
                threading.Thread(target=end.wait).start()
        except RuntimeError:
            work.do()
        else:
            raise AssertionError("the child could start a hundred threads")
        finally:
            end.set()

    in_child(child)
    work.check()


@case
def errors_in_a_child() -> None:
    """A wrong argument raises in a child as elsewhere."""
    torch.set_num_threads(4)
    work = Work()
    work.do()
    work.check()
    work.slots[4000] = 331 * 16

    def child() -> None:
        try:
            work.do()
        except IndexError as error:
            assert "slot_mapping[4000] must be less than" in str(error)
        else:
            raise AssertionError("nothing was raised")

    in_child(child)
    assert not work.cache.any()


class Contexts(torch.utils.data.Dataset[Tensor]):
    """A dataset that keeps its rows in a paged cache, as one that replays conversations would."""

    def __init__(self) -> None:
        self.work = Work()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        """Write everything, read a part."""
        import pacache_torch  # noqa: F401

        work = self.work
        cache = torch.zeros_like(work.cache)
        torch.ops.pacache.scatter_pa_kv_cache(work.key, None, cache, None, work.slots)
        rows = [torch.zeros(700, 3, 160, dtype=torch.int16) for _ in range(2)]
        torch.ops.pacache.paged_cache_load(cache, cache, work.table[:, index * 20 :], torch.tensor([700]), *rows)
        return torch.stack(rows)


def _loader(method: str) -> None:
    torch.set_num_threads(4)
    contexts = Contexts()
    contexts.work.do()
    contexts.work.check()
    loader = torch.utils.data.DataLoader(
        contexts, num_workers=2, batch_size=None, multiprocessing_context=method, timeout=SECONDS
    )
    for epoch in range(2):
        for index, rows in enumerate(loader):
            expected = contexts.work.expected[index * 320 :][:700]
            assert torch.equal(rows[0], expected) and torch.equal(rows[1], expected), (epoch, index)
    contexts.work.do()
    contexts.work.check()


@case
def data_loader_fork() -> None:
    """Workers of a DataLoader, forked."""
    _loader("fork")


@case
def data_loader_spawn() -> None:
    """Workers of a DataLoader, spawned: nothing is inherited, the package is imported there."""
    _loader("spawn")


def _pool_job(seed: int) -> bool:
    work = Work(seed)
    work.do()
    work.check()
    return True


def _pool(method: str) -> None:
    _pool_job(9)
    torch.set_num_threads(1)  # of torch's own operators, which hang in a forked child with more
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map_async(_pool_job, range(6)).get(SECONDS) == [True] * 6


@case
def pool_fork() -> None:
    """A pool of forked processes, each with caches of its own."""
    _pool("fork")


@case
def pool_spawn() -> None:
    """A pool of spawned processes."""
    _pool("spawn")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="not ours: this system has no fork()")
@pytest.mark.parametrize("name", CASES)
def test_process(name: str) -> None:
    """The case passes, in time."""
    done = subprocess.run(
        [sys.executable, __file__, name], capture_output=True, text=True, timeout=4 * SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr


def _main() -> None:
    CASES[sys.argv[1]]()


if __name__ == "__main__":
    _main()
