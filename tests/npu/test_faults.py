"""Every call that an operator makes, of CANN, of ATB and of the runtime, made to fail, on the simulated CANN.

What is made to fail is not listed: a call of each kind is made, and every function that the simulator has counted
fails, at each of its calls, with every code it documents, at the first, second and fourth use of the signature by a
thread. `CONSEQUENCES` says what must come of it; a function that it does not know fails the test, so that a new call of
CANN cannot be forgotten. Always: the caches are as they were unless the call has done its work, nothing of ours is
left, the simulator has no objection, and the same call works next.

Calls run at once (TASK_QUEUE_ENABLE=0), so that a process outlives its faults; test_failures.py has the task queue.
Each case runs in a process of its own, ``python test_faults.py NAME``.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import Counter
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
from soak import SOAK  # noqa: E402
from status_codes import ACLNN, ATB  # noqa: E402

NULL = {1: ("gave a null pointer", "out of host memory?")}  # the function gives a null pointer, whatever the code
RUNTIME = {code: text for code, text in ACLNN.items() if code // 1000 in (107, 207, 507)}
HARMLESS = {1: ("", "")}

# What must come of a function that fails: who raises (or "nobody": the call does its work all the same; or "perhaps":
# it is tried again), and its codes. The first pattern counts.
CONSEQUENCES: tuple[tuple[str, str, dict[int, tuple[str, str]]], ...] = (
    (r"aclnn(Scatter|Gather)PaKvCache(GetWorkspaceSize)?", "ours", ACLNN),
    (r"AtbPagedCacheLoad(GetWorkspaceSize)?|atb::CreateContext|atb::Context::SetExecuteStream", "ours", ATB),
    (r"aclCreateIntArray", "ours", NULL),
    # torch_npu makes some itself where an argument has to be converted.
    (r"aclCreateTensor", "either", NULL),
    (r"aclCreateScalar", "torch_npu", NULL),
    (r"aclnn(InplaceCopy|InplaceMaskedFillScalar|InplaceZero|ClampMin|LtScalar|SWhere)(GetWorkspaceSize)?",
     "torch_npu", ACLNN),
    (r"aclmdlRICaptureGetInfo|aclrtMemcpy|aclrtSynchronizeStream(WithTimeout)?", "torch_npu", RUNTIME),
    (r"aclrtMalloc(Align32)?", "perhaps", {207001: RUNTIME[207001]}),
    (r"aclrt(Ctx)?(Get|Set)SysParamOpt", "perhaps", RUNTIME),
    (r"CanUsePTACache|PTAFindExecCache|PTAGetExecCache|SetPTACacheHashKey|SetPTAHashKey|AddTensorAddrToCachedList",
     "nobody", HARMLESS),
    (r"(UnInit|Init)(PTACache|HugeMem)ThreadLocal|ReleaseHugeMem|aclDestroy(Tensor|Scalar|IntArray)",
     "nobody", HARMLESS),
)  # fmt: skip
NO_CALLS = ("pta_hit", "pta_miss", "sync", "violation")  # counted by the simulator of itself
USES = {"first": 0, "second": 1, "fourth": 3}  # calls of the same signature by the thread before

Case = Callable[[], None]
CASES: dict[str, tuple[Case, dict[str, Any], dict[str, str]]] = {}


def consequence(api: str) -> tuple[str, dict[int, tuple[str, str]]]:
    """Who must raise, and the codes."""
    for pattern, who, codes in CONSEQUENCES:
        if re.fullmatch(pattern, api):
            return who, codes
    raise AssertionError(f"{api} is called, and nothing here says what must come of its failure")


def in_thread(work: Callable[[], None]) -> None:
    """Do it in a thread of its own: CANN's executor cache, ATB's context and operations are a thread's."""
    errors: list[BaseException] = []

    number = 0

    def guarded() -> None:
        nonlocal number
        number = threading.get_native_id()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    # join() is back before the thread has given back what it holds.
    deadline = time.monotonic() + 60
    while Path(f"/proc/self/task/{number}").exists():
        assert time.monotonic() < deadline, "the thread does not end"
        time.sleep(0.0001)
    for error in errors:
        raise error


def ours_alive() -> Counter[str]:
    """Handles that our library made and has not given back."""
    return Counter(item["kind"] for item in control.live_objects(module="_C_npu"))


def objections(api: str, what: str) -> None:
    """The simulator has none, but for one that is torch_npu's: where it could not wait, it copies before it raises."""
    found = control.violations()
    if api.startswith("aclrtSynchronize"):
        found = [v for v in found if not (v["kind"] == "race" and "aclrtMemcpy" in v["op"] + v["text"])]
    assert found == [], f"{what}: {found}"


class Kind:
    """Calls of one kind: what they are on the host, and what they must give."""

    def __init__(self, name: str) -> None:
        import torch
        from call_kinds import KINDS, Maker

        from pacache_torch import reference

        self.name = name
        self.before = KINDS[name](Maker(5, 0))
        self.after = self.before.clone()
        self.op = self.before.op
        self.after.run(getattr(reference, self.op))
        assert self.before.differences(self.after)
        self.function = getattr(torch.ops.pacache, self.op)

    def on_device(self, uses: int) -> Any:
        """A call that is about to be made in this thread, so many others having been made."""
        import torch
        from call_kinds import NPU

        for _ in range(uses):
            self.before.clone(NPU).run(self.function)
        call = self.before.clone(NPU)
        torch.npu.synchronize()
        torch.npu.empty_cache()  # what a call allocates comes from the device
        control.clear()
        return call

    def calls(self, uses: int) -> dict[str, int]:
        """The functions that a call calls, how often."""
        made: dict[str, int] = {}

        def work() -> None:
            call = self.on_device(uses)
            call.run(self.function)
            made.update(control.counters())

        in_thread(work)
        return {api: count for api, count in made.items() if api not in NO_CALLS}

    def fail(self, uses: int, api: str, nth: int, code: int, text: tuple[str, str], who: str) -> str:
        """Let the nth call of a function fail; says who raised."""
        raised: list[str] = []

        def work() -> None:
            import torch

            call = self.on_device(uses)
            control.fail_next(api, code, nth)
            what = f"{self.name}, {uses} uses before, call {nth} of {api} gives {code}"
            message = None
            try:
                call.run(self.function)
            except NotImplementedError:
                raise
            except RuntimeError as error:
                message = str(error)
            assert control.counters().get(api, 0) >= nth, f"{what}: it was not called"
            objections(api, what)
            control.clear()  # a failure that is still planned
            torch.npu.synchronize()
            raised.append(self.judge(message, api, code, text, who, what))
            wanted = self.after if message is None else self.before
            assert call.clone("cpu").differences(wanted) == [], f"{what}: {message or 'returned'}"
            call.run(self.function)
            torch.npu.synchronize()
            assert call.clone("cpu").differences(self.after) == [], f"{what}, and the next call was wrong"
            objections(api, what)
            control.clear()

        in_thread(work)
        assert ours_alive() == {}, (self.name, api, nth, code)
        return raised[0]

    def judge(self, message: str | None, api: str, code: int, text: tuple[str, str], who: str, what: str) -> str:
        """Is it the right one who raises, and the right text?"""
        if message is None:
            assert who in ("nobody", "perhaps"), f"{what}: nothing was raised"
            return "nobody"
        assert who != "nobody", f"{what}: {message}"
        if not message.startswith(f"{self.op}: "):
            assert who in ("torch_npu", "either", "perhaps") and message.strip(), f"{what}: {message}"
            return "torch_npu"
        assert who in ("ours", "either"), f"{what}: {message}"
        for part in (f"{self.op}: {api} ", *text, f"CANN says: cann_sim: {api} was made to fail"):
            assert part in message, f"{what}: {part!r} is not in {message!r}"
        if not api.startswith("aclCreate"):
            assert f"failed with {code} (" in message
        if api != "atb::CreateContext":  # which is called with a device
            assert re.search(r"called with .*(float16|int32|\[)", message), message
        return "ours"


def inject(name: str, kinds: tuple[str, ...], every_code: tuple[str, ...]) -> None:
    """Let every call of these kinds fail; with every code for some, else with one of them in turn."""
    import torch

    failed, functions, raised = 0, set(), Counter[str]()
    turn = 0
    for kind in (Kind(kind) for kind in kinds):
        in_thread(lambda kind=kind: kind.on_device(2).run(kind.function))  # what is made once per process
        allocated = torch.npu.memory_allocated()
        for use, uses in USES.items():
            for api, count in kind.calls(uses).items():
                who, codes = consequence(api)
                functions.add(api)
                if not (SOAK or (kind.name in every_code and use != "fourth")):
                    turn += 1
                    codes = dict([list(codes.items())[turn % len(codes)]])
                for code, text in codes.items():
                    for nth in range(1, count + 1):
                        raised[kind.fail(uses, api, nth, code, text, who)] += 1
                        failed += 1
        torch.npu.synchronize()
        assert torch.npu.memory_allocated() == allocated, kind.name
    assert raised["ours"] > 0 and failed == sum(raised.values())
    print(f"{name}: {failed} faults of {len(functions)} functions, {dict(raised)}")
    if SOAK:
        head = ["on the simulated CANN", "kinds of calls", "functions", "faults", "raised by the operator",
                "raised by torch_npu", "call did its work", "violations, leaks, wrong bits"]  # fmt: skip
        counts = (len(kinds), len(functions), failed, raised["ours"], raised["torch_npu"], raised["nobody"], 0)
        record("faults", name, head, [[name, *(f"{count:,}" for count in counts)]])


SCATTERS = ("norm", "key_only", "nct", "copied", "nz", "nhsd", "alibi", "omni", "rope", "packed")
LOADS = ("load", "load_starts", "load_cumsum", "load_nz", "load_converted", "load_packed")
AT_ONCE = {"TASK_QUEUE_ENABLE": "0"}


def case(name: str, kinds: tuple[str, ...], every_code: tuple[str, ...] = (), variables: dict[str, str] | None = None,
         **options: Any) -> None:  # fmt: skip
    """Register what runs in a process of its own."""
    CASES[name] = partial(inject, name, kinds, every_code), options, AT_ONCE | (variables or {})


case("scatter", SCATTERS, ("norm", "copied"))
case("load by ATB", LOADS, ("load",))
case("load by aclnn", LOADS, ("load",), {"PACACHE_LOAD_BACKEND": "aclnn"})
case("values checked", ("norm", "omni", "load_converted"), variables={"PACACHE_CHECK": "1"})
case(
    "cache by hash",
    ("norm", "load"),
    variables={"PACACHE_LOAD_BACKEND": "aclnn"},
    hide=("PTAFindExecCache", "SetPTACacheHashKey"),
)
if SOAK:
    case(
        "no executor cache",
        ("norm", "load"),
        variables={"PACACHE_LOAD_BACKEND": "aclnn", "PACACHE_EXECUTOR_CACHE": "0"},
    )
    case("scatter, CANN 8.5.0, A3", tuple(set(SCATTERS) - {"nhsd"}), version="8.5.0", soc="A3")
    case("load by ATB, CANN 9.0.0, lazy", LOADS, version="9.0.0", lazy=True)


def in_process(name: str) -> Result:
    """Run a case."""
    _, options, variables = CASES[name]
    return run([sys.executable, __file__, name], variables=variables, timeout=3600 if SOAK else 300, **options)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Result]]]:
    """The cases that were selected, two at a time."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    jobs = {name: partial(in_process, name) for name in (item.callspec.params["name"] for item in here)}
    with side_by_side(jobs) as running:
        yield running


@pytest.mark.parametrize("name", CASES)
def test_faults(name: str, results: dict[str, Future[Result]]) -> None:
    """The case passes; nothing is left at its exit but what torch_npu does not give back when a call of its fails."""
    result = results[name].result()
    assert result.code == 0, result
    assert result.violations is not None, result
    assert [v for v in result.violations if not (v["kind"] == "leak" and "libtorch_npu.so" in v["text"])] == [], result


def test_every_code_of_the_table_has_its_text() -> None:
    """The codes that the operators document are all in the tables."""
    assert {161001, 161002, 361001, 561002, 561003, 561101, 561103} <= set(ACLNN)
    assert set(range(1, 30)) <= set(ATB)


if __name__ == "__main__":
    CASES[sys.argv[1]][0]()
