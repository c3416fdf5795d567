"""Failures in the task queue, too little memory, libraries that are not there, on the simulated CANN.

Run at once (TASK_QUEUE_ENABLE=0, ASCEND_LAUNCH_BLOCKING=1) an error is raised where the call is made, and the next call
works: test_faults.py lets every call of CANN fail that way. Queued, torch_npu 2.13.0 keeps none of it: see
`queued_failure`. Each case runs in a process of its own, ``python test_failures.py NAME``.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from cann_sim import control  # noqa: E402
from cann_sim.run import Result, run, side_by_side  # noqa: E402
from soak import SOAK, short_or_long  # noqa: E402
from status_codes import ACLNN, ATB  # noqa: E402

SCATTER, LOAD = "scatter_pa_kv_cache", "paged_cache_load"
NULL = -1  # in place of a code: the function gives a null pointer


@dataclass(frozen=True)
class Backend:
    """An operator of ours by what runs it, and what it calls for that, with the codes."""

    op: str
    fails: dict[str, dict[int, tuple[str, str]]]


NO_TENSOR = {NULL: ("gave a null pointer", "out of host memory?")}
BACKENDS = {
    "scatter": Backend(
        SCATTER,
        {
            "aclCreateTensor": NO_TENSOR,
            "aclnnScatterPaKvCacheGetWorkspaceSize": ACLNN,
            "aclnnScatterPaKvCache": ACLNN,
        },
    ),
    "sibling": Backend(
        LOAD,
        {
            "aclCreateTensor": NO_TENSOR,
            "aclnnGatherPaKvCacheGetWorkspaceSize": ACLNN,
            "aclnnGatherPaKvCache": ACLNN,
        },
    ),
    "atb": Backend(
        LOAD,
        {
            "atb::CreateContext": ATB,
            "atb::Context::SetExecuteStream": ATB,
            "aclCreateTensor": NO_TENSOR,
            "AtbPagedCacheLoadGetWorkspaceSize": ATB,
            "AtbPagedCacheLoad": ATB,
        },
    ),
}

Case = Callable[[], None]
CASES: dict[str, tuple[Case, dict[str, Any], dict[str, str]]] = {}


def case(name: str, variables: dict[str, str], **options: Any) -> Callable[[Case], Case]:
    """Register what runs in a process of its own, with variables and options of the simulated CANN."""

    def register(function: Case) -> Case:
        CASES[name] = (function, options, variables)
        return function

    return register


def in_process(name: str) -> Result:
    """Run a case."""
    _, options, variables = CASES[name]
    return run([sys.executable, __file__, name], variables=variables, **options)


# ---------------------------------------------------------------------------------------------------------------------
# Calls


class Call:
    """A call on npu:0: its arguments there, and the caches before and after as they must be."""

    def __init__(self, op: str, size: int, *, seed: int = 0) -> None:
        """Make a call whose signature is that of ``size``."""
        import torch

        from pacache_torch import reference

        self.op = op
        generator = torch.Generator().manual_seed(size + 1000 * seed)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(torch.float16)

        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        blocks, heads = size + 3, 3
        caches = [noise(blocks, 5, heads, 32) for _ in range(2)]
        if op == SCATTER:
            slots = ints(11, 2, -1, 5 * blocks - 1)
            self.arguments = [noise(4, heads, 32), noise(4, heads, 32), *caches, slots]
            self.written = (2, 3)
        else:
            tables = ints(2, 1, 0, 3).view(2, 2)
            self.arguments = [*caches, tables, ints(7, 4), noise(size + 13, heads, 32), noise(size + 13, heads, 32)]
            self.written = (4, 5)
        expected = [argument.clone() for argument in self.arguments]
        getattr(reference, op)(*expected)
        self.before = [self.arguments[i].clone() for i in self.written]
        self.after = [expected[i] for i in self.written]
        assert not any(torch.equal(a, b) for a, b in zip(self.before, self.after, strict=True))
        self.arguments = [argument.to("npu:0") for argument in self.arguments]
        torch.npu.synchronize()

    def run(self) -> None:
        """Make the call, and wait."""
        import torch

        self.make()
        torch.npu.synchronize()

    def make(self) -> None:
        """Make the call."""
        import torch

        getattr(torch.ops.pacache, self.op)(*self.arguments)

    def holds(self, wanted: list[Any]) -> bool:
        """Whether both written tensors hold exactly this."""
        import torch

        return all(
            torch.equal(self.arguments[i].cpu().view(torch.int16), values.view(torch.int16))
            for i, values in zip(self.written, wanted, strict=True)
        )

    def check(self) -> None:
        """Run it and look at the result."""
        self.run()
        assert self.holds(self.after), "a wrong result"


def backend_of(name: str) -> Backend:
    """Import what is needed in this process, and warm up ordinary operators."""
    import torch
    import torch_npu  # noqa: F401

    import pacache_torch  # noqa: F401

    backend = BACKENDS[name]
    Call(backend.op, 0)
    if name == "atb":
        torch.zeros(256, dtype=torch.int32, device="npu:0")
    torch.npu.synchronize()
    return backend


def ours_alive() -> dict[str, int]:
    """Handles that our library made and has not given back."""
    alive: dict[str, int] = {}
    for item in control.live_objects(module="_C_npu"):
        alive[item["kind"]] = alive.get(item["kind"], 0) + 1
    return alive


def kept(alive: dict[str, int]) -> dict[str, int]:
    """Without what is kept for the process: one context and one operation."""
    return {kind: count for kind, count in alive.items() if kind not in ("atb::Context", "atb::Operation")}


def texts(op: str, api: str, code: int, codes: dict[int, tuple[str, str]]) -> Iterator[str]:
    """What an error must say."""
    name, cause = codes[code]
    yield f"{op}: {api}"
    yield name
    yield cause
    if code != NULL:
        yield f"failed with {code} ({name}"
    if api == "aclCreateIntArray":
        yield "called with ["
    elif api != "atb::CreateContext":
        yield "float16 [" if api != "aclCreateTensor" else "called with "
    yield f"CANN says: cann_sim: {api} was made to fail"


def failure(make: Callable[[], None]) -> str:
    """The text of the RuntimeError that a call must raise."""
    try:
        make()
    except NotImplementedError:
        raise
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was raised")


# ---------------------------------------------------------------------------------------------------------------------
# Run at once


def fail_once(call: Call, api: str, nth: int, code: int, codes: dict[int, tuple[str, str]]) -> None:
    """Make a call fail; it says what is wrong, nothing was written or leaked, and the same call works next."""
    control.fail_next(api, 1 if code == NULL else code, nth)
    text = failure(call.run)
    for wanted in texts(call.op, api, code, codes):
        assert wanted in text, f"{wanted!r} is not in {text!r}"
    assert call.holds(call.before), f"{api} failed with {code}, and a cache was written"
    assert kept(ours_alive()) == {}, f"{api} failed with {code}, and left {ours_alive()}"
    call.check()
    assert kept(ours_alive()) == {}
    assert control.violations() == []


def a_workspace_that_cannot_be_had() -> None:
    """Out of device memory is torch's own error; nothing was written, and the next call works."""
    import torch

    backend = backend_of("sibling")
    call = Call(backend.op, 3)
    filler = torch.empty(36 << 20, dtype=torch.uint8, device="npu:0")
    try:
        call.run()
    except torch.OutOfMemoryError as error:
        assert "out of memory" in str(error)
    else:
        raise AssertionError("nothing was raised")
    assert call.holds(call.before) and ours_alive() == {}
    del filler
    torch.npu.empty_cache()
    call.check()


_LITTLE_MEMORY = {"CANN_SIM_MEMORY_MB": "52", "PACACHE_LOAD_BACKEND": "aclnn"}  # the sibling asks for 16 MiB
case("a_workspace_that_cannot_be_had", _LITTLE_MEMORY)(a_workspace_that_cannot_be_had)


@case("a_copy_that_cannot_be_had", {"CANN_SIM_MEMORY_MB": "52"})
def a_copy_that_cannot_be_had() -> None:
    """So is it where a dense copy of key would not fit: nothing was called or written, and the next call works."""
    import torch

    backend_of("scatter")
    wide = torch.ones(300, 64, 3 * 64, dtype=torch.float16, device="npu:0")  # 7 MiB, a third of it in a copy
    cache = torch.zeros(100, 4, 64, 64, dtype=torch.float16, device="npu:0")
    slots = torch.arange(300, dtype=torch.int32, device="npu:0")
    arguments = (wide[..., :64], None, cache, None, slots)
    filler: list[torch.Tensor] = []
    while True:
        try:
            filler.append(torch.empty(1 << 20, dtype=torch.uint8, device="npu:0"))
        except torch.OutOfMemoryError:
            break
    control.clear()
    try:
        torch.ops.pacache.scatter_pa_kv_cache(*arguments)
    except torch.OutOfMemoryError as error:
        assert "out of memory" in str(error)
    else:
        raise AssertionError("nothing was raised")
    assert "aclnnScatterPaKvCache" not in control.counters()
    filler.clear()
    torch.npu.empty_cache()
    assert not cache.cpu().any() and ours_alive() == {}
    torch.ops.pacache.scatter_pa_kv_cache(*arguments)
    assert bool((cache.cpu().flatten(0, 1)[:300] == 1).all())


@case("blocking", {"ASCEND_LAUNCH_BLOCKING": "1"})
def blocking() -> None:
    """ASCEND_LAUNCH_BLOCKING=1 raises where the call is made, as TASK_QUEUE_ENABLE=0 does, and the next call works."""
    backend_of("scatter")
    fail_once(Call(SCATTER, 3), "aclnnScatterPaKvCache", 1, 507015, ACLNN)
    Call(LOAD, 4).check()
    for code, api in ((8, "AtbPagedCacheLoadGetWorkspaceSize"), (3, "AtbPagedCacheLoad")):
        fail_once(Call(LOAD, 4), api, 1, code, ATB)


# ---------------------------------------------------------------------------------------------------------------------
# Queued


@case("phase_one_is_the_callers", {"TASK_QUEUE_ENABLE": "1"})
def phase_one_is_the_callers() -> None:
    """Phase one of scatter runs on the calling thread: its errors are raised there, and the queue goes on."""
    backend_of("scatter")
    for size, code in enumerate((161001, 161002, 361001, 561002, 561003, 561101, 561103), start=2):
        fail_once(Call(SCATTER, size), "aclnnScatterPaKvCacheGetWorkspaceSize", 1, code, ACLNN)
    fail_once(Call(SCATTER, 20), "aclCreateTensor", 4, NULL, NO_TENSOR)


def queue_threads() -> set[str]:
    """The threads that torch_npu gave the name of a queue's (a stream's worker may have inherited it)."""
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        try:
            if (thread / "comm").read_text() == "acl_thread\n":
                found.add(thread.name)
        except OSError:  # it has just ended
            continue
    return found


def wait_for_the_end_of_one_of(threads: set[str]) -> None:
    """A queue's thread ends when it has thrown away what was queued."""
    deadline = time.monotonic() + 60
    while threads <= queue_threads():
        assert time.monotonic() < deadline, "the queue goes on"
        time.sleep(0.01)


def queued_failure(name: str, api: str, code: int, second_use: bool) -> None:
    """What becomes of an error on the queue's thread, with torch_npu 2.13.0.

    * torch_npu writes its text to stderr and throws away what is queued behind it.
    * The next operator or synchronisation raises one RuntimeError, which names phase two only; where that is a call of
      ours, our text is in it.
    * From then on torch_npu drops every operator without a word. Ours raise, with the text again.
    * (Not tested, since it is a race of torch_npu's: an operator that is queued while the queue's thread gives up stays
      in the queue, and the next synchronisation waits for it forever.)
    """
    import torch

    backend = backend_of(name)
    codes = backend.fails[api]
    if second_use:
        Call(backend.op, 3).check()
    call, behind = Call(backend.op, 3, seed=1), Call(backend.op, 3, seed=2)
    other = torch.zeros(5, device="npu:0")
    torch.npu.synchronize()
    control.clear()
    control.fail_next(api, code)
    queues = queue_threads()
    call.make()
    wanted = list(texts(backend.op, api, code, codes))
    if second_use:  # found by a synchronisation, which says "as above"
        text = failure(torch.npu.synchronize)
        assert "The Inner error is reported as above" in text and wanted[0] not in text
        assert f"the current working operator name is {list(backend.fails)[-1]}" in text
    else:  # found by a call of ours
        wait_for_the_end_of_one_of(queues)
        text = failure(behind.make)
        wanted.append("torch_npu says: The Inner error is reported as above")
        for part in wanted:
            assert part in text, f"{part!r} is not in {text!r}"
        wanted.pop()
    for again in (behind, call):
        text = failure(again.make)
        for part in (*wanted, f"{backend.op}: {list(backend.fails)[-1]} was not run: the task queue of npu:0 stopped"):
            assert part in text, f"{part!r} is not in {text!r}"
    launched = control.counters().get("aclnnAdds", 0)
    other + 1  # torch_npu's own operators return as if they had run
    torch.npu.synchronize()
    assert control.counters().get("aclnnAdds", 0) == launched == 0
    assert call.holds(call.before) and behind.holds(behind.before)
    assert kept(ours_alive()) == {}


_QUEUED = (
    ("scatter", "aclnnScatterPaKvCacheGetWorkspaceSize", 561002),
    ("scatter", "aclnnScatterPaKvCache", 507015),
    ("sibling", "aclnnGatherPaKvCacheGetWorkspaceSize", 561103),
    ("atb", "atb::CreateContext", 26),
    ("atb", "AtbPagedCacheLoadGetWorkspaceSize", 8),
    ("atb", "AtbPagedCacheLoad", 3),
)
# All that runs on the queue's thread, with every tenth code.
_LONG_QUEUED = tuple(
    (name, api, code)
    for name, backend in BACKENDS.items()
    for api, codes in backend.fails.items()
    if name == "atb" or api.endswith(("PaKvCache", "PaKvCacheGetWorkspaceSize"))
    for code in list(codes)[::10]
)
for _mode in ("1", "2"):
    for _name, _api, _code in dict.fromkeys(short_or_long(_QUEUED, _QUEUED + _LONG_QUEUED)):
        # A context is made alike in both modes; the first phase of aclnn is queued in mode 2 only, and done once.
        _first_phase = _api.endswith("PaKvCacheGetWorkspaceSize")
        if (_first_phase and _mode == "1") or (_api == "atb::CreateContext" and _mode == "2"):
            continue
        _second = _mode == "2" and not _first_phase
        _variables = {"TASK_QUEUE_ENABLE": _mode, "PACACHE_LOAD_BACKEND": "aclnn" if _name == "sibling" else "auto"}
        case(f"queued-{_mode}-{_api}-{_code}", _variables)(
            lambda n=_name, a=_api, c=_code, s=_second: queued_failure(n, a, c, s)
        )


@case("another_operator_stopped_the_queue", {"TASK_QUEUE_ENABLE": "1"})
def another_operator_stopped_the_queue() -> None:
    """Where another operator's error stopped the queue, a call of ours says that it was not run."""
    import torch

    backend_of("scatter")
    call = Call(SCATTER, 3)
    control.fail_next("aclnnAdds", 507015)
    torch.zeros(3, device="npu:0") + 1
    text = failure(torch.npu.synchronize)
    assert "the current working operator name is aclnnAdds" in text
    text = failure(call.make)
    assert "scatter_pa_kv_cache: aclnnScatterPaKvCache was not run: the task queue of npu:0 stopped" in text
    assert "of another operator, see the log" in text
    assert call.holds(call.before) and ours_alive() == {}


# ---------------------------------------------------------------------------------------------------------------------
# Not there


def missing_text(text: str, symbol: str, since: str) -> None:
    """The one error: symbol, libraries with paths, environment, versions, the oldest version that has it."""
    assert f"the function {symbol} was not found; the oldest version that has it is {since}" in text, text
    for name in ("ASCEND_CUSTOM_OPP_PATH=", "ASCEND_OPP_PATH=/", "ASCEND_HOME_PATH=/", "ATB_HOME_PATH=",
                 "LD_LIBRARY_PATH=/"):  # fmt: skip
        assert f" {name}" in text, text
    assert re.search(r"CANN 9\.1\.0, ATB (9\.1\.0|of unknown version)", text), text


@case("scatter_is_missing", {}, hide=["aclnnScatterPaKvCache"])
def scatter_is_missing() -> None:
    """Without scatter's phase two: one error, at every call, before anything was called; the other operator works."""
    backend_of("scatter")
    call = Call(SCATTER, 3)
    control.clear()
    for _ in range(2):
        text = failure(call.run)
        assert text.startswith("scatter_pa_kv_cache: ")
        missing_text(text, "aclnnScatterPaKvCache", "8.3.RC1")
        assert re.search(r"Searched:.* libopapi\.so \(/[^;]*libopapi\.so\);", text), text
    assert "aclnnScatterPaKvCacheGetWorkspaceSize" not in control.counters()
    assert call.holds(call.before)
    Call(LOAD, 3).check()


@case("atb_is_missing", {}, atb=False)
def atb_is_missing() -> None:
    """Without libatb scatter works, and the aclnn sibling loads."""
    from pacache_torch import _library

    backend_of("sibling")
    assert _library.npu_module().found()["load_backend"] == "aclnn"
    Call(SCATTER, 3).check()
    control.clear()
    Call(LOAD, 3).check()
    made = control.counters()
    assert made["aclnnGatherPaKvCache"] == 1 and "AtbPagedCacheLoad" not in made


@case("atb_is_missing_and_asked_for", {"PACACHE_LOAD_BACKEND": "atb"}, atb=False)
def atb_is_missing_and_asked_for() -> None:
    """Asked for ATB where there is none, a load says what was looked for and where; scatter works."""
    backend_of("scatter")
    call = Call(LOAD, 3)
    for _ in range(2):
        text = failure(call.run)
        assert text.startswith("paged_cache_load: ")
        missing_text(text, "AtbPagedCacheLoadGetWorkspaceSize", "8.3.RC1")
        assert "Searched: libatb.so (not found);" in text and "ATB_HOME_PATH=(not set)" in text
    assert call.holds(call.before)
    Call(SCATTER, 3).check()


@case("an_older_atb", {}, hide=["AtbPagedCacheLoad", "aclnnGatherPaKvCache"])
def an_older_atb() -> None:
    """A libatb without the function, and no sibling: the error names the file that was found."""
    backend_of("scatter")
    text = failure(Call(LOAD, 3).run)
    missing_text(text, "AtbPagedCacheLoad", "8.3.RC1")
    assert re.search(r"Searched: libatb\.so \(/[^;]*libatb\.so\);", text), text


@case("a_half_atb", {}, hide=["AtbPagedCacheLoad"])
def a_half_atb() -> None:
    """A libatb without the function: the sibling loads."""
    backend_of("sibling")
    Call(LOAD, 3).check()
    assert control.counters()["aclnnGatherPaKvCache"] == 1


# What the operators look up, but for what torch_npu itself does not start without, or works wrongly: its own operators
# raise without AddTensorAddrToCachedList, and leave their key set for the next first phase without UnInitPTACache...
TORCH_NPU_NEEDS = (
    "aclCreateTensor", "aclDestroyTensor", "aclGetRecentErrMsg", "aclrtGetSocName", "aclrtSynchronizeDevice",
    "AddTensorAddrToCachedList", "UnInitPTACacheThreadLocal",
)  # fmt: skip
LOOKED_UP = (
    "aclCreateIntArray", "aclDestroyIntArray", "aclDestroyAclOpExecutor",
    "InitHugeMemThreadLocal", "UnInitHugeMemThreadLocal", "ReleaseHugeMem",
    "CanUsePTACache", "InitPTACacheThreadLocal",
    "SetPTACacheHashKey", "PTAFindExecCache", "SetPTAHashKey", "PTAGetExecCache",
    "aclnnScatterPaKvCacheGetWorkspaceSize", "aclnnScatterPaKvCache",
    "aclnnGatherPaKvCacheGetWorkspaceSize", "aclnnGatherPaKvCache",
    "AtbPagedCacheLoadGetWorkspaceSize", "AtbPagedCacheLoad",
    "_ZN3atb13CreateContextEPPNS_7ContextE", "_ZN3atb14DestroyContextEPNS_7ContextE",
    "_ZN3atb16DestroyOperationEPNS_9OperationE",
)  # fmt: skip


def gone(symbol: str) -> None:
    """Without one function each operator either names it, having done nothing, or does its work."""
    backend_of("scatter")
    for op in (SCATTER, LOAD, SCATTER, LOAD):
        call = Call(op, 3)
        try:
            call.run()
        except RuntimeError as error:
            assert str(error).startswith(f"{op}: the function {symbol} was not found"), error
            assert call.holds(call.before)
        else:
            assert call.holds(call.after), op
    assert kept(ours_alive()) == {}


for _symbol in LOOKED_UP if SOAK else ():
    case(f"gone-{_symbol}", {}, hide=[_symbol])(lambda s=_symbol: gone(s))


def refused(op: str) -> str:
    """The text of the refusal; nothing of CANN's operators was called or written."""
    call = Call(op, 3)
    control.clear()
    try:
        call.run()
    except NotImplementedError as error:
        assert not any("aclnn" in api or "Atb" in api or "Create" in api for api in control.counters())
        assert call.holds(call.before)
        return str(error)
    raise AssertionError("nothing was raised")


@case("eleven_arguments", {}, version="8.3.RC1.alpha003")
def eleven_arguments() -> None:
    """The alphas whose functions take other arguments are refused by their version."""
    backend_of("scatter")
    for op in (SCATTER, LOAD):
        assert f"{op}: needs CANN 8.3.RC1 or later" in (text := refused(op)), text
        assert "Atlas A2 (Ascend910B3) with CANN 8.3.RC1.alpha003" in text


@case("another_chip", {}, soc="310P")
def another_chip() -> None:
    """A chip that the operators do not know is refused by its name."""
    backend_of("scatter")
    assert "is not available on other (Ascend310P3) with CANN 9.1.0" in refused(SCATTER)
    assert "is not available on other (Ascend310P3) with CANN 9.1.0" in refused(LOAD)


@case("an_unknown_version", {"PACACHE_CANN_VERSION": "unreadable"})
def an_unknown_version() -> None:
    """Without a version the argument lists are not known: nothing is called, and the error says what helps."""
    backend_of("scatter")
    for op in (SCATTER, LOAD):
        call = Call(op, 3)
        text = failure(call.run)
        assert f"{op}: the CANN version must be known" in text and "torch_npu found 'unreadable'" in text
        assert "set PACACHE_CANN_VERSION, for example to 8.5.0" in text
        assert call.holds(call.before)


@case("a_version_that_is_said", {"PACACHE_CANN_VERSION": "8.5.0"})
def a_version_that_is_said() -> None:
    """PACACHE_CANN_VERSION is believed: with 8.5.0 there is no NHSD."""
    import pacache_torch

    backend_of("scatter")
    found = pacache_torch.capabilities("npu")
    assert found["cann"] == "8.5.0" and 7 not in {row.get("scenario") for row in found["rows"]}
    Call(SCATTER, 3).check()


# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Result]]]:
    """The cases that were selected, two at a time."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    jobs = {name: partial(in_process, name) for name in (item.callspec.params["name"] for item in here)}
    with side_by_side(jobs) as running:
        yield running


@pytest.mark.parametrize("name", CASES)
def test_failure(name: str, results: dict[str, Future[Result]]) -> None:
    """The case passes; nothing leaks but what torch_npu itself leaves behind when its queue stops."""
    result = results[name].result()
    assert result.code == 0, result
    violations = result.violations
    assert violations is not None, result
    stops_the_queue = name.startswith(("queued", "another_operator"))
    if stops_the_queue:
        violations = [v for v in violations if not (v["kind"] == "leak" and "libtorch_npu.so" in v["text"])]
    assert violations == [], result
    if name.startswith("queued"):  # "reported as above" is this
        api = name.split("-")[2]
        text = rf"(scatter_pa_kv_cache|paged_cache_load): {api} (failed with \d+ \(|gave a null pointer )"
        assert re.search(text, result.stderr), result


def test_every_function_that_is_looked_up_is_once_gone() -> None:
    """The names in the sources are those of `LOOKED_UP`."""
    text = "".join(path.read_text() for path in (HERE.parent.parent / "csrc" / "npu").glob("*.cpp"))
    named = r'"((?:acl(?:nn|rt)?[A-Z]|Atb|_ZN|[A-Z]\w*(?:PTA|HugeMem|CachedList)|PTA)\w*)"'
    assert set(re.findall(named, text)) == {*LOOKED_UP, *TORCH_NPU_NEEDS}


if __name__ == "__main__":
    CASES[sys.argv[1]][0]()
    sys.stdout.flush()
