"""How the operators live with torch_npu: queue modes, streams, devices, threads, memory, on the simulated CANN.

Each case runs in a process of its own, ``python test_runtime.py NAME``, and must end without a violation: no use of
freed memory, no race between streams, no ATB context used by another thread or device than its own, no leak at exit.
"""

from __future__ import annotations

import os
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
sys.path.insert(0, str(HERE.parent))

from cann_sim import control  # noqa: E402
from cann_sim.run import Result, run, side_by_side  # noqa: E402
from forked import in_child  # noqa: E402
from reliability import record  # noqa: E402
from soak import SOAK, short_or_long  # noqa: E402

SCATTER, LOAD = "scatter_pa_kv_cache", "paged_cache_load"
LAUNCHES = {SCATTER: "aclnnScatterPaKvCache", LOAD: "AtbPagedCacheLoad"}
PTA_FUNCTIONS = ("CanUsePTACache", "PTAFindExecCache", "PTAGetExecCache", "SetPTACacheHashKey", "SetPTAHashKey")

Case = Callable[[], None]
CASES: dict[str, tuple[Case, dict[str, Any], dict[str, str]]] = {}


def case(
    variables: dict[str, str] | None = None, *, suffix: str = "", imports: bool = True, **options: Any
) -> Callable[[Case], Case]:
    """Register what runs in a process of its own, with variables and options of the simulated CANN."""

    def register(function: Case) -> Case:
        def run_it() -> None:
            if imports:
                import torch_npu  # noqa: F401

                import pacache_torch  # noqa: F401
            function()

        CASES[function.__name__ + suffix] = (run_it, options, variables or {})
        return function

    return register


def in_process(name: str) -> Result:
    """Run a case."""
    _, options, variables = CASES[name]
    return run([sys.executable, __file__, name], variables=variables, timeout=short_or_long(300, 3600), **options)


class Call:
    """One call with everything that a binding has to prepare, and what it must leave behind.

    Key and value are views into a fused buffer that no Nct describes, index tensors are int64: the device gets dense
    copies and int32. Padding tokens and negative slots for scatter, a table with unused columns for load.
    """

    def __init__(self, op: str, device: str = "npu:0", *, seed: int = 0, size: int = 0, nz: bool = False) -> None:
        """Make a call; ``size`` is part of its signature, ``seed`` is not."""
        import torch

        from pacache_torch import reference

        self.op = op
        self._wide: Any = None
        generator = torch.Generator().manual_seed(1000 * size + seed)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(torch.float16)

        blocks, block_size, heads, head_size = size + 7, 16 if nz else 5, 3, 32
        units = heads * head_size // 16
        shape = (blocks, units, block_size, 16) if nz else (blocks, block_size, heads, head_size)
        caches = [noise(*shape), noise(*shape)]
        self.keyword = {"cache_mode": "PA_NZ" if nz else "Norm"}
        if op == SCATTER:
            order = torch.randperm(blocks * block_size, generator=generator)
            slots = torch.where(torch.arange(11) == 4, -1, order[:11])
            fused = noise(13, heads, 3 * head_size)
            self._wide = fused
            arguments = [fused[..., :head_size], fused[..., 40 : 40 + head_size], *caches, slots]
            self.written: tuple[int, ...] = (2, 3)
        else:
            tables = torch.randint(0, blocks, (3, 4), generator=generator)
            lens = torch.tensor([9, 0, 2 * block_size + 3])
            rows = (12 + 2 * block_size + 2, heads, head_size)
            arguments = [*caches, tables, lens, noise(*rows), noise(*rows)]
            self.written = (4, 5)
        expected = [argument.clone() for argument in arguments]
        getattr(reference, op)(*expected, **self.keyword)
        self.wanted = [expected[i] for i in self.written]
        self.arguments = [argument.to(device) for argument in arguments]
        if op == SCATTER:
            self._wide = self._wide.to(device)
            self.arguments[0] = self._wide[..., :head_size]
            self.arguments[1] = self._wide[..., 40 : 40 + head_size]

    def make(self) -> None:
        """Make the call."""
        import torch

        getattr(torch.ops.pacache, self.op)(*self.arguments, **self.keyword)

    def free_inputs(self) -> None:
        """Let go of everything that is only read."""
        self._wide = None
        for i in range(len(self.arguments)):
            if i not in self.written:
                self.arguments[i] = None  # type: ignore[call-overload]

    def check(self) -> None:
        """Whole written tensors are as the reference leaves them."""
        import torch

        for i, wanted in zip(self.written, self.wanted, strict=True):
            got = self.arguments[i].cpu()
            assert torch.equal(got.view(torch.int16), wanted.view(torch.int16)), f"{self.op}: argument {i} is wrong"


def both(device: str = "npu:0", **options: Any) -> list[Call]:
    """A call of each operator in each layout."""
    return [Call(op, device, nz=nz, **options) for op in (SCATTER, LOAD) for nz in (False, True)]


def launched(op: str) -> int:
    """How often the device operator was launched since the last clear."""
    return control.counters().get(LAUNCHES[op], 0)


# ---------------------------------------------------------------------------------------------------------------------
# Queue modes, streams, devices, threads


def many_calls() -> None:
    """Calls of both operators, hundreds deep in the queue, checked at the end, and launched on the device."""
    import torch

    calls = [call for seed in range(20) for call in both(seed=seed, size=seed % 3)]
    torch.npu.synchronize()
    control.clear()
    for call in calls:
        call.make()
    torch.npu.synchronize()
    assert launched(SCATTER) == launched(LOAD) == len(calls) // 2
    for call in calls:
        call.check()


for _variables, _suffix in (
    ({"TASK_QUEUE_ENABLE": "0"}, "-0"),
    ({"TASK_QUEUE_ENABLE": "1"}, "-1"),
    ({"TASK_QUEUE_ENABLE": "2"}, "-2"),
    ({"ASCEND_LAUNCH_BLOCKING": "1"}, "-blocking"),
):
    case(_variables, suffix=_suffix, lazy=_suffix != "-blocking")(many_calls)


def inputs_freed_at_once() -> None:
    """Inputs and temporaries (int32 slots, dense copies) may be freed and reused as soon as a call returns."""
    import torch

    calls = [call for seed in range(12) for call in both(seed=seed)]
    torch.npu.synchronize()
    for call in calls:
        call.make()
        call.free_inputs()
        # The allocator hands the freed blocks on; what is written into them comes later on the stream.
        for size in (11 * 8, 13 * 3 * 96 * 2, 11 * 3 * 32 * 2, 3 * 4 * 8, 12):
            torch.full((size // 4,), 0x7F7F7F7F, dtype=torch.int32, device="npu:0")
    torch.npu.synchronize()
    for call in calls:
        call.check()


for _mode in ("0", "1", "2"):
    case({"TASK_QUEUE_ENABLE": _mode}, suffix=f"-{_mode}", lazy=True)(inputs_freed_at_once)
# Every tensor has a block of its own, and it is unmapped when it is freed.
case({"PYTORCH_NO_NPU_MEMORY_CACHING": "1"}, suffix="-uncached", lazy=True)(inputs_freed_at_once)


@case(lazy=True)
def side_streams() -> None:
    """Calls on side streams, ordered by events only: each runs on its stream, and the reader sees what was written."""
    import torch

    streams = [torch.npu.Stream() for _ in range(3)]
    torch.npu.synchronize()
    for round_number in range(5):
        scatters = [Call(SCATTER, seed=round_number * 10 + i) for i in range(3)]
        loads = [Call(LOAD, seed=round_number * 10 + i) for i in range(3)]
        ready = torch.npu.Event()
        ready.record()
        control.clear_trace()
        for i, stream in enumerate(streams):
            with torch.npu.stream(stream):
                stream.wait_event(ready)
                scatters[i].make()
                loads[i].make()
        done = []
        for stream in streams:
            event = torch.npu.Event()
            event.record(stream)
            done.append(event)
        for event in done:
            torch.npu.current_stream().wait_event(event)
        torch.npu.synchronize()
        used = {entry["stream"] for entry in control.trace("aclnnScatterPaKvCache")}
        assert len(used) == 3, used
        for call in (*scatters, *loads):
            call.check()


@case(lazy=True)
def written_on_one_stream_and_read_on_another() -> None:
    """A scatter on one stream, a load of the same cache on another behind an event: the load reads the new rows."""
    import torch

    from pacache_torch import reference

    scatter = Call(SCATTER, seed=1)
    key_cache, value_cache = scatter.arguments[2:4]
    tables = torch.tensor([[2, 0, 6]], device="npu:0", dtype=torch.int32)
    lens = torch.tensor([13], device="npu:0", dtype=torch.int32)
    rows = [torch.zeros(13, 3, 32, dtype=torch.float16, device="npu:0") for _ in range(2)]
    wanted = [torch.zeros(13, 3, 32, dtype=torch.float16) for _ in range(2)]
    reference.paged_cache_load(*scatter.wanted, tables.cpu(), lens.cpu(), *wanted)
    writer, reader = torch.npu.Stream(), torch.npu.Stream()
    torch.npu.synchronize()
    with torch.npu.stream(writer):
        scatter.make()
        written = torch.npu.Event()
        written.record()
    with torch.npu.stream(reader):
        reader.wait_event(written)
        torch.ops.pacache.paged_cache_load(key_cache, value_cache, tables, lens, *rows)
    torch.npu.synchronize()
    scatter.check()
    assert all(torch.equal(got.cpu(), want) for got, want in zip(rows, wanted, strict=True))


@case(lazy=True)
def two_devices() -> None:
    """Calls on two devices in turn, whatever the current device is; a context for each."""
    import torch

    for current in (0, 1):
        torch.npu.set_device(current)
        calls = [call for seed in range(4) for device in ("npu:0", "npu:1") for call in both(device, seed=seed)]
        for device in (0, 1):
            torch.npu.synchronize(device)
        control.clear()
        for call in calls:
            call.make()
        assert torch.npu.current_device() == current
        for device in (0, 1):
            torch.npu.synchronize(device)
        assert {entry["device"] for entry in control.trace("AtbPagedCacheLoad")} == {0, 1}
        for call in calls:
            call.check()
    assert len(control.live_objects("atb::Context", "_C_npu")) == 2


def wait_for_threads(but: list[int]) -> None:
    """Wait until no other thread holds anything of ATB's: join() is back a moment before a thread's end."""
    deadline = time.monotonic() + 60
    while len(control.live_objects("atb::Context", "_C_npu")) > len(but):
        assert time.monotonic() < deadline, control.live_objects("atb::Context", "_C_npu")
        time.sleep(0.001)


def threads() -> None:
    """Eight threads, both operators, both devices: right results, a context for each thread that launches."""
    import torch

    torch.npu.synchronize()
    errors: list[BaseException] = []
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            device = f"npu:{number % 2}"
            torch.npu.set_device(device)
            barrier.wait()
            with torch.npu.stream(torch.npu.Stream(device)):
                for seed in range(3):
                    calls = both(device, seed=100 * number + seed)
                    for call in calls:
                        call.make()
                    torch.npu.current_stream().synchronize()
                    for call in calls:
                        call.check()
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    launchers = {(call["thread"], call["device"]) for call in control.trace("AtbPagedCacheLoad")}
    assert {device for _, device in launchers} == {0, 1}
    assert control.counters()["atb::CreateContext"] == len(launchers)
    # The queue's threads live on, and so do their contexts; a caller's end with it.
    own = os.environ["TASK_QUEUE_ENABLE"] == "0"
    wait_for_threads([] if own else [thread for thread, _ in launchers])
    assert len(control.live_objects("atb::Context", "_C_npu")) == (0 if own else len(launchers))


# Contexts are the queue's threads', one per device; run at once, they are the callers'.
case({"TASK_QUEUE_ENABLE": "0"}, suffix="-0")(threads)
case({"TASK_QUEUE_ENABLE": "1"}, suffix="-1")(threads)
case({"TASK_QUEUE_ENABLE": "2"}, suffix="-2")(threads)


# ---------------------------------------------------------------------------------------------------------------------
# What a call costs


@case()
def nothing_waits() -> None:
    """No call waits for the device or copies to or from the host, also the first of a signature and of the process."""
    calls = both()
    control.clear()
    for call in calls:
        call.make()
    first = control.counters()
    for call in calls:
        call.make()
    made = control.counters()
    for counters in (first, made):
        # Blocking copies and memsets count as "sync" too.
        assert counters.get("sync", 0) == 0
        assert [name for name in counters if "Synchronize" in name or "Memcpy" in name] == []
    import torch

    torch.npu.synchronize()
    assert control.counters()["sync"] >= 1  # the counter counts
    assert launched(SCATTER) == launched(LOAD) == 4
    for call in calls:
        call.check()


@case({"PACACHE_CHECK": "1"})
def checking_waits() -> None:
    """PACACHE_CHECK=1 does wait: the counter above would have seen it."""
    call = Call(SCATTER)
    control.clear()
    call.make()
    assert control.counters()["sync"] >= 1
    call.check()


def phase_ones(op: str, count: int = 7) -> int:
    """Phase ones of many calls of one signature with new tensors each."""
    import torch

    calls = [Call(op, seed=seed) for seed in range(count)]
    torch.npu.synchronize()
    control.clear()
    for call in calls:
        call.make()
        if call is calls[0]:  # an executor can be found from when its phase two has run
            torch.npu.synchronize()
    torch.npu.synchronize()
    for call in calls:
        call.check()
    assert control.counters()["aclnnScatterPaKvCache" if op == SCATTER else "aclnnGatherPaKvCache"] == count
    name = "aclnnScatterPaKvCache" if op == SCATTER else "aclnnGatherPaKvCache"
    return control.counters()[f"{name}GetWorkspaceSize"]


def once_per_signature() -> None:
    """One phase one for all calls of a signature, one more for another signature, with both aclnn operators."""
    import torch

    assert phase_ones(SCATTER) == 1
    assert phase_ones(LOAD) == 1
    other = [Call(SCATTER, seed=50), Call(SCATTER, size=1)]
    torch.npu.synchronize()
    control.clear()
    for call in other:
        call.make()
    torch.npu.synchronize()
    assert control.counters()["aclnnScatterPaKvCacheGetWorkspaceSize"] == 1
    for call in other:
        call.check()


for _mode in ("0", "1", "2"):
    case({"TASK_QUEUE_ENABLE": _mode, "PACACHE_LOAD_BACKEND": "aclnn"}, suffix=f"-{_mode}")(once_per_signature)
# Older releases have the keys by a hash only.
case({"PACACHE_LOAD_BACKEND": "aclnn"}, suffix="-by_hash", hide=["SetPTACacheHashKey", "PTAFindExecCache"])(
    once_per_signature
)


def every_call() -> None:
    """Without a cache every call makes phase one."""
    assert phase_ones(SCATTER) == 7
    assert phase_ones(LOAD) == 7


case({"PACACHE_LOAD_BACKEND": "aclnn", "PACACHE_EXECUTOR_CACHE": "0"}, suffix="-switched_off")(every_call)
case({"PACACHE_LOAD_BACKEND": "aclnn"}, suffix="-not_there", hide=PTA_FUNCTIONS)(every_call)
case({"PACACHE_LOAD_BACKEND": "aclnn"}, suffix="-refused", pta=False)(every_call)


@case({"PACACHE_LOAD_BACKEND": "aclnn"})
def keys_tell_signatures_apart() -> None:
    """No two signatures have one key: compared by the simulator for every call of many shapes, views and modes."""
    import torch

    control.set_pta_verify(True)
    calls = [call for size in range(4) for seed in range(2) for call in both(seed=seed, size=size)]
    for call in calls:
        call.make()
    base = torch.zeros(13, 7, 32, dtype=torch.float16, device="npu:0")
    caches = [torch.zeros(6, 5, 3, 32, dtype=torch.float16, device="npu:0") for _ in range(2)]
    slots = torch.arange(11, dtype=torch.int32, device="npu:0")
    views = [base[:11, :3], base[:11, 2:5], base[1:12, :3], base[:11, :3].contiguous()]
    for key in views:
        for value in views:
            torch.ops.pacache.scatter_pa_kv_cache(key, value, *caches, slots)
            torch.ops.pacache.scatter_pa_kv_cache(key, None, caches[0], None, slots)
    torch.npu.synchronize()
    for call in calls:
        call.check()


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@case({"PACACHE_LOAD_BACKEND": "auto"}, suffix="-atb")
def memory_over_many_calls() -> None:
    """10,000 calls of each operator, or 100,000, leave torch's and the device's memory as after the first ones.

    So does the process's own in the long form: it begins when the simulator has as many dead handles as it keeps.
    """
    import gc

    import torch

    calls = both()

    def make(rounds: int) -> None:
        for i in range(rounds):
            for call in calls:
                call.make()
            if i % 100 == 99:  # temporaries of queued calls are alive until they ran
                torch.npu.synchronize()
        torch.npu.synchronize()

    make(2)
    control.set_trace(False)
    each = short_or_long(10_000, 100_000)
    make(short_or_long(0, 20_000))
    gc.collect()

    def now() -> tuple[int, ...]:
        device = control.device_memory()
        handles = len(control.live_objects(module="_C_npu"))
        memory = torch.npu.memory_allocated(), torch.npu.memory_reserved()
        return (*memory, device["live_bytes"], device["live_blocks"], device["mallocs"], handles)

    before, in_memory = now(), resident()
    control.clear()
    make(each // 2)
    after, grown = now(), resident() - in_memory
    assert after == before, (before, after)
    assert control.counters()["aclnnScatterPaKvCache"] == each
    name = "AtbPagedCacheLoad" if os.environ["PACACHE_LOAD_BACKEND"] == "auto" else "aclnnGatherPaKvCache"
    assert control.counters()[name] == each
    for call in calls:
        call.check()
    if SOAK:
        assert grown < 4 << 20, f"{grown} bytes more in memory"
        head = ["calls of each operator", "on", "allocator's bytes and blocks", "handles of CANN", "resident memory"]
        where = f"simulated CANN, {'ATB' if name.startswith('Atb') else 'aclnn'} loads"
        record("memory", f"2-{name}", head, [[f"{each:,}", where, "+0", "+0", f"{grown / 1024:+,.0f} KiB"]])


case({"PACACHE_LOAD_BACKEND": "aclnn"}, suffix="-sibling")(memory_over_many_calls)


def threads_come_and_go() -> None:
    """A thread takes with it what was made for it: workspaces and ATB's contexts are as many as before it came."""
    import torch

    def now() -> tuple[int, ...]:
        return (
            torch.npu.memory_allocated(),
            control.device_memory()["live_bytes"],
            len(control.live_objects(module="_C_npu")),
        )

    def work(calls: list[Call]) -> None:
        for call in calls:
            call.make()  # on a lazy stream: none has run when the thread ends

    counts = []
    for seed in range(short_or_long(30, 3000)):
        calls = both(seed=seed)
        thread = threading.Thread(target=work, args=(calls,))
        thread.start()
        thread.join()
        wait_for_threads([])
        torch.npu.synchronize()
        for call in calls:
            call.check()
        del calls, call, thread
        counts.append(now())
    assert counts[-1] == counts[2], (counts[2], counts[-1])


# Run at once, a context is the caller's; the sibling has a workspace of 16 MiB.
case({"TASK_QUEUE_ENABLE": "0"}, suffix="-atb", lazy=True)(threads_come_and_go)
case({"TASK_QUEUE_ENABLE": "0", "PACACHE_LOAD_BACKEND": "aclnn"}, suffix="-sibling", lazy=True)(threads_come_and_go)
case({"PACACHE_LOAD_BACKEND": "aclnn"}, suffix="-queued", lazy=True)(threads_come_and_go)


@case({"PACACHE_CHECK": "1"})
def caches_beyond_two_to_the_33() -> None:
    """Caches of 2**33 bytes and more: ids around 2**16 and 2**22, offsets around 2**31, 2**32 and 2**33."""
    import torch

    blocks, before = 2**22 + 2**10, resident()  # of 2**11 bytes
    ids = [0, 2**16 - 1, 2**16, 2**16 + 1, 2**20 - 1, 2**20, 2**21 - 1, 2**21, 2**22 - 1, 2**22, blocks - 1]
    slots = torch.tensor([16 * block + (5 * i) % 16 for i, block in enumerate(ids)])
    key, value = torch.arange(2 * len(ids) * 128).remainder(99).add(1).to(torch.int8).view(2, len(ids), 2, 64)
    # The memory of a new block of this device is zeros, and exists when it is written.
    for nz in (False, True):
        shape = (blocks, 4, 16, 32) if nz else (blocks, 16, 2, 64)
        mode = {"cache_mode": "PA_NZ"} if nz else {}
        caches = [torch.empty(shape, dtype=torch.int8, device="npu:0") for _ in range(2)]
        torch.ops.pacache.scatter_pa_kv_cache(key.npu(), value.npu(), *caches, slots.npu(), **mode)
        for cache, tokens in zip(caches, (key, value), strict=True):
            for i, block in enumerate(ids):
                page = cache[block].cpu()
                page = page.permute(1, 0, 2).reshape(16, 128) if nz else page.view(16, 128)
                assert torch.equal(page[int(slots[i]) % 16], tokens[i].flatten()), block
                assert int((page != 0).sum()) == 128, f"block {block} holds more than its token"
                for near in {max(block - 1, 0), min(block + 1, blocks - 1)} - set(ids):
                    assert not cache[near].any(), f"block {near} was written"
        lens = torch.tensor([16 * len(ids), 16 * len(ids) - 3])
        out = [torch.zeros(int(lens.sum()), 128 if nz else 2, *(() if nz else (64,)), dtype=torch.int8) for _ in caches]
        out = [rows.npu() for rows in out]
        table = torch.tensor([ids, ids[::-1]])
        torch.ops.pacache.paged_cache_load(*caches, table.npu(), lens.npu(), *out, **mode)
        for rows, tokens in zip(out, (key, value), strict=True):
            pages = torch.zeros(len(ids), 16, 128, dtype=torch.int8)
            pages[torch.arange(len(ids)), slots % 16] = tokens.flatten(1)
            wanted = torch.cat((pages.flatten(0, 1), pages.flip(0).flatten(0, 1)[:-3]))
            assert torch.equal(rows.cpu().flatten(1), wanted)
        del caches, cache
        torch.npu.empty_cache()
    assert resident() - before < 2**28, "memory that nobody wrote has been touched"


# ---------------------------------------------------------------------------------------------------------------------
# First uses


@case()
def after_a_warmup() -> None:
    """After warmup() the first call of each operator makes no context and loads no library."""
    import torch

    import pacache_torch

    def libraries() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[-1] for line in lines if ".so" in line}

    calls = both()
    torch.npu.synchronize()
    control.clear()
    pacache_torch.warmup("npu")
    assert control.counters()["atb::CreateContext"] == 1
    assert not any("PagedCacheLoad" in name or "Scatter" in name for name in control.counters())
    loaded = libraries()
    control.clear()
    for call in calls:
        call.make()
    torch.npu.synchronize()
    assert "atb::CreateContext" not in control.counters()
    assert launched(SCATTER) == launched(LOAD) == 2
    assert libraries() == loaded
    for call in calls:
        call.check()


@case()
def a_warmup_of_each_device() -> None:
    """warmup(device) is for that device, and leaves the current one as it is."""
    import torch

    import pacache_torch

    def contexts() -> int:
        return control.counters()["atb::CreateContext"]

    pacache_torch.warmup("npu:1")
    assert torch.npu.current_device() == 0 and contexts() == 1
    for call in both("npu:1"):
        call.make()
        torch.npu.synchronize(1)
        call.check()
    assert contexts() == 1
    pacache_torch.warmup("npu:0")
    pacache_torch.warmup(torch.device("npu", 0))
    assert contexts() == 2
    for call in both("npu:0"):
        call.make()
        call.check()
    assert contexts() == 2


@case({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, imports=False)
def torch_npu_is_imported_later() -> None:
    """pacache_torch before torch_npu: the first npu tensor loads the kernels."""
    import torch

    import pacache_torch
    from pacache_torch import _library

    assert "torch_npu" not in sys.modules
    status = {s.name: s for s in _library.status()}["_C_npu"]
    assert not status.loaded and "installed and not imported" in str(status.cause)
    try:
        pacache_torch.warmup("privateuseone")  # torch knows no npu yet
    except pacache_torch.LibraryNotLoadedError as error:
        assert "torch_npu is installed and not imported" in str(error)
    else:
        raise AssertionError("nothing was raised")
    import torch_npu  # noqa: F401

    assert "pacache_torch._C_npu" not in sys.modules
    for call in both():
        call.make()
        call.check()
    assert "pacache_torch._C_npu" in sys.modules
    torch.npu.synchronize()
    assert launched(SCATTER) == launched(LOAD) == 2


@case()
def the_doctor_sees_it_all() -> None:
    """The doctor names libraries by their real files, versions, and what loads the cache; and that it is simulated."""
    import os

    from pacache_torch import doctor

    facts = doctor.examine()
    npu = facts["torch_npu"]
    home = Path(os.environ["ASCEND_HOME_PATH"])
    op_api = (home / "lib64/libopapi.so").resolve()
    assert f"libopapi.so ({op_api})" in npu["op_api_libraries"], npu
    assert any(str(Path(os.environ["ATB_HOME_PATH"]) / "lib/libatb.so") in text for text in npu["atb_libraries"])
    assert npu["soc"] == "Ascend910B3 (Atlas A2)" and npu["cann_version"] == npu["atb_version"] == "9.1.0"
    assert npu["load_backend"] == "AtbPagedCacheLoad" and npu["devices"] == 2
    assert npu["simulated"] == "yes, CANN 9.1.0: this is no NPU"
    assert {(c["device"], c["cache_mode"]) for c in facts["self_checks"] if c["ok"]} == {
        (device, mode) for device in ("cpu", "npu:0") for mode in ("Norm", "PA_NZ")
    }
    text = doctor.as_text(facts)
    assert f"libopapi.so ({op_api})" in text and "simulated: yes" in text


@case(atb=False)
def the_doctor_without_atb() -> None:
    """Without libatb the doctor says what loads instead."""
    from pacache_torch import doctor

    npu = doctor.examine()["torch_npu"]
    assert npu["load_backend"] == "aclnnGatherPaKvCache" and npu["atb_libraries"] == ["libatb.so (not found)"]
    assert "of unknown version" in npu["atb_version"]


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def forked_in_use() -> None:
    """In a child that was forked with the NPU in use, all that would never end raises, and says what to do."""
    import torch

    import pacache_torch
    from pacache_torch import _library

    calls = both()
    for call in calls:
        call.make()
    torch.npu.synchronize()

    def child() -> None:
        for make in (*(call.make for call in calls), lambda: pacache_torch.warmup("npu:0")):
            try:
                make()
            except RuntimeError as error:
                assert "npu tensors cannot be used in a process that was forked when the NPU was already in" in str(
                    error
                )
                assert "spawn" in str(error)
            else:
                raise AssertionError("nothing was raised")
        _library.npu_module().release()  # as at an exit: what it would destroy is the parent's

    in_child(child)
    for call in calls:
        call.make()
        torch.npu.synchronize()
        call.check()


for _mode in ("0", "1"):
    case({"TASK_QUEUE_ENABLE": _mode}, suffix=f"-{_mode}")(forked_in_use)


def _use_both(seed: int) -> bool:
    import torch_npu  # noqa: F401

    import pacache_torch  # noqa: F401

    for call in both(seed=seed):
        call.make()
        call.check()
    return True


@case()
def forked_before() -> None:
    """A child that was forked before the NPU was used may use it."""
    in_child(lambda: _use_both(1))


@case()
def spawned() -> None:
    """Spawned workers have an NPU of their own; here they use it next to the parent."""
    import multiprocessing

    _use_both(0)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map_async(_use_both, range(4)).get(120) == [True] * 4


# ---------------------------------------------------------------------------------------------------------------------
# Graphs


def captured() -> None:
    """Both operators captured into a graph and replayed with new contents; nothing waits during the capture."""
    import torch

    import pacache_torch

    pacache_torch.warmup("npu")
    static = [Call(SCATTER, seed=1), Call(LOAD, seed=2)]
    new = [Call(SCATTER, seed=3), Call(LOAD, seed=4)]
    for call in static:
        call.make()  # phase one and workspaces ahead of the capture are not needed, but usual
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    control.clear()
    with torch.npu.graph(graph):
        for call in static:
            call.make()
    assert control.violations() == []
    for old, fresh in zip(static, new, strict=True):
        for i, argument in enumerate(old.arguments):
            if i > 1 or old.op == LOAD:
                argument.copy_(fresh.arguments[i])
        if old.op == SCATTER:
            old._wide.copy_(fresh._wide)
    torch.npu.synchronize()
    control.clear()
    graph.replay()
    torch.npu.synchronize()
    for old, fresh in zip(static, new, strict=True):
        old.wanted = fresh.wanted
        old.check()


case({"TASK_QUEUE_ENABLE": "1"}, suffix="-1")(captured)
case({"TASK_QUEUE_ENABLE": "1", "PACACHE_LOAD_BACKEND": "aclnn"}, suffix="-sibling")(captured)


@case({"TASK_QUEUE_ENABLE": "1"})
def captured_before_more_sequences_came() -> None:
    """A graph goes on reading the zeros that stand for seq_starts, though a larger batch has been given others."""
    import torch

    cache = torch.arange(7 * 3 * 16, dtype=torch.float16).view(7, 3, 1, 16).npu()

    def batch_of(size: int) -> tuple[torch.Tensor, ...]:
        tables, lens = torch.full((size, 1), 5, dtype=torch.int32), torch.ones(size, dtype=torch.int32)
        outputs = (torch.zeros(size, 1, 16, dtype=torch.float16, device="npu:0") for _ in range(2))
        return cache, cache, tables.npu(), lens.npu(), *outputs

    few, many = batch_of(3), batch_of(300)
    torch.npu.synchronize()
    stream, graph = torch.npu.Stream(), torch.npu.NPUGraph()
    with torch.npu.stream(stream):
        torch.ops.pacache.paged_cache_load(*few)
    torch.npu.synchronize()
    with torch.npu.graph(graph, stream=stream):
        torch.ops.pacache.paged_cache_load(*few)
    with torch.npu.stream(stream):
        torch.ops.pacache.paged_cache_load(*many)
        torch.npu.synchronize()
        taken = [torch.full((256,), 3, dtype=torch.int32, device="npu:0") for _ in range(100)]  # what would be free
    few[4].zero_()
    torch.npu.synchronize()
    graph.replay()
    torch.npu.synchronize()
    for batch in few, many:
        assert torch.equal(batch[4].cpu(), cache[5, 0].cpu().expand(batch[4].shape))
    assert bool((torch.stack(taken) == 3).all())


# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Result]]]:
    """The cases that were selected, two at a time."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    jobs = {name: partial(in_process, name) for name in (item.callspec.params["name"] for item in here)}
    with side_by_side(jobs) as running:
        yield running


@pytest.mark.parametrize("name", CASES)
def test_runtime(name: str, results: dict[str, Future[Result]]) -> None:
    """The case passes, and no violation is on record at the exit of its process."""
    result = results[name].result()
    assert result.code == 0, result
    assert result.violations == [], result


if __name__ == "__main__":
    CASES[sys.argv[1]][0]()
