"""The simulated CANN itself: it computes, and it notices what it must.

Each case runs in a process of its own, because LD_LIBRARY_PATH counts only
when a process starts, and because what is left alive shows at its exit. A
case must end without violations; one that provokes some takes them with
`expect`. `python test_cann_sim.py NAME` runs one case inside such a process.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from cann_sim import build, control, raw  # noqa: E402

DATA = HERE.parents[1] / "pacache_torch/verify/data"
FAILED_BY_VIOLATION = 86

Case = Callable[[], None]
CASES: dict[str, tuple[Case, dict[str, Any]]] = {}


def case(**options: Any) -> Callable[[Case], Case]:
    """Register a case; `variables` are set, other options go to `build.environment`."""

    def register(function: Case) -> Case:
        CASES[function.__name__] = (function, options)
        return function

    return register


def expect(*kinds: str) -> None:
    """Violations of exactly these kinds happened; forget them."""
    found = control.violations()
    assert {v["kind"] for v in found} == set(kinds), found
    control.clear()


def run(name: str, tmp_path: Path) -> None:
    """Run a case in a process of its own."""
    report = tmp_path / "report.json"
    options = dict(CASES[name][1])
    variables = options.pop("variables", {})
    env = build.environment(report=report, **options)
    env.update(variables)
    env["CANN_SIM_EXIT_CODE"] = str(FAILED_BY_VIOLATION)
    env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    done = subprocess.run(
        [sys.executable, __file__, name],
        env=env,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    violations = json.loads(report.read_text())["violations"] if report.exists() else []
    assert done.returncode == 0, f"{violations}\n{done.stdout}\n{done.stderr}"
    assert violations == []


def pytest_generate_tests(metafunc: Any) -> None:
    """One test per case."""
    if "case_name" in metafunc.fixturenames:
        metafunc.parametrize("case_name", sorted(CASES))


def test_case(case_name: str, tmp_path: Path) -> None:
    """The case passes and leaves no violation, not even at its exit."""
    run(case_name, tmp_path)


def test_a_leak_fails_the_process(tmp_path: Path) -> None:
    """A handle that is alive at exit is a violation and the exit code."""
    report = tmp_path / "report.json"
    env = build.environment(report=report)
    env["CANN_SIM_EXIT_CODE"] = str(FAILED_BY_VIOLATION)
    code = "from cann_sim import raw; raw.Device().zeros([4], raw.INT8)"
    done = subprocess.run([sys.executable, "-c", code], env=env, check=False)
    assert done.returncode == FAILED_BY_VIOLATION
    (leak,) = json.loads(report.read_text())["violations"]
    assert leak["kind"] == "leak" and "aclTensor" in leak["text"]


def noise(count: int, seed: int = 0) -> bytes:
    """Reproducible bytes."""
    return random.Random(seed).randbytes(count)


class Scatter:
    """A small valid ND scatter with its tensors: 3 blocks of 4, 2 heads."""

    def __init__(self, slots: list[int] | None = None, head: int = 16) -> None:
        """Upload everything; `slots` default to valid ones and one negative."""
        self.device = raw.Device()
        self.slot_list = [5, -1, 0, 11] if slots is None else slots
        tokens = len(self.slot_list)
        self.row = 2 * head * 2
        self.key_bytes = noise(tokens * self.row, 1)
        self.value_bytes = noise(tokens * self.row, 2)
        d = self.device
        self.key = d.tensor(self.key_bytes, [tokens, 2, head], raw.FLOAT16)
        self.value = d.tensor(self.value_bytes, [tokens, 2, head], raw.FLOAT16)
        self.key_cache = d.zeros([3, 4, 2, head], raw.FLOAT16)
        self.value_cache = d.zeros([3, 4, 2, head], raw.FLOAT16)
        self.slots = d.int32(self.slot_list)

    def tensors(self) -> list[raw.Tensor]:
        """In the order of `raw.Device.scatter`."""
        return [self.key, self.value, self.key_cache, self.value_cache, self.slots]

    def arguments(self) -> list[object]:
        """In the order of the C function."""
        return self.device.scatter_arguments(*self.tensors())

    def expected(self, data: bytes) -> bytes:
        """The cache after the call."""
        cache = bytearray(12 * self.row)
        for token, slot in enumerate(self.slot_list):
            if slot >= 0:
                source = data[token * self.row : (token + 1) * self.row]
                cache[slot * self.row : (slot + 1) * self.row] = source
        return bytes(cache)

    def check(self) -> None:
        """Both caches hold what they must."""
        assert self.device.read(self.key_cache) == self.expected(self.key_bytes)
        assert self.device.read(self.value_cache) == self.expected(self.value_bytes)


# ---- operators through the C API ----------------------------------------------


@case()
def scatter_norm() -> None:
    """Scenario 2, and the trace shows every descriptor."""
    s = Scatter()
    assert s.device.scatter(*s.tensors()) == 0
    s.check()
    (call,) = control.trace("aclnnScatterPaKvCacheGetWorkspaceSize")
    assert call["key_cache"]["dims"] == [3, 4, 2, 16]
    assert call["key"]["dtype"] == "float16" and call["key"]["format"] == raw.ND
    assert call["compress_lens"] is None and call["cache_mode"] == "Norm"
    assert call["strides"] is None and call["code"] == 0
    s.device.close()


def _vector_bytes(tensor: dict[str, Any], key: str = "data") -> bytes:
    import torch

    dtype = getattr(torch, tensor["dtype"])
    data = torch.tensor(tensor[key]).to(dtype)
    return bytes(data.reshape(-1).view(torch.uint8).tolist())


_CODES = {
    "float16": raw.FLOAT16,
    "bfloat16": raw.BFLOAT16,
    "int8": raw.INT8,
    "int32": raw.INT32,
    "int64": raw.INT64,
}

_SINCE = {
    "8.5.0": ["A2/A3 8.5.0+"],
    "9.0.0": ["A2/A3 8.5.0+", "A2/A3 9.0.0-beta.2+"],
    "9.1.0": [
        "A2/A3 8.5.0+",
        "A2/A3 9.0.0-beta.2+",
        "A2/A3 9.1.0-beta.1+",
        "A2/A3 9.1.0.pre+ (no-op)",
    ],
}


def _scatter_vectors() -> None:
    document = json.loads((DATA / "scatter_pa_kv_cache.json").read_text())
    here = _SINCE[control.version()]
    done = 0
    for vector in document["vectors"]:
        if not any(runs in here for runs in vector["runs_on"]):
            continue
        device = raw.Device()
        tensors: dict[str, raw.Tensor | None] = {}
        for name, tensor in vector["inputs"].items():
            if tensor is None:
                tensors[name] = None
                continue
            key = "storage" if "storage" in tensor else "data"
            pointer = device.upload(_vector_bytes(tensor, key))
            tensors[name] = device.describe(pointer, tensor["shape"], _CODES[tensor["dtype"]])
        attrs = vector["attrs"]
        arrays = [device.int_array(attrs[n]) for n in ("strides", "offsets")]
        code = device.scatter(
            tensors["key"],
            tensors["value"],
            tensors["key_cache"],
            tensors["value_cache"],
            tensors["slot_mapping"],
            compress_lens=tensors["compress_lens"],
            compress_offsets=tensors["compress_seq_offset"],
            seq_lens=tensors["seq_lens"],
            cache_mode=attrs["cache_mode"],
            scatter_mode=attrs["scatter_mode"],
            strides=arrays[0],
            offsets=arrays[1],
        )
        assert code == 0, (vector["name"], code)
        for name in ("key_cache", "value_cache"):
            expected = vector["expected"][name]
            if expected is None or not expected["shape"]:
                continue
            assert device.read(tensors[name]) == _vector_bytes(expected), vector["name"]
        for array in arrays:
            device.nn.aclDestroyIntArray(array)
        device.close()
        assert control.violations() == [], vector["name"]
        done += 1
    assert done >= 4, done


@case(version="8.5.0")
def scatter_vectors_850() -> None:
    """The published vectors that 8.5.0 can run."""
    _scatter_vectors()


@case(version="9.0.0", soc="A3")
def scatter_vectors_900() -> None:
    """The published vectors that 9.0.0 can run."""
    _scatter_vectors()


@case()
def scatter_vectors_910() -> None:
    """The published vectors that 9.1.0 can run."""
    _scatter_vectors()


def _load_bytes(tensor: dict[str, Any], dtype: str) -> bytes:
    if "fill" in tensor:
        import torch

        filled = torch.full(tensor["shape"], tensor["fill"], dtype=getattr(torch, dtype))
        return bytes(filled.reshape(-1).view(torch.uint8).tolist())
    return _vector_bytes({"dtype": dtype, "data": tensor["data"]})


class LoadVector:
    """One published vector of paged_cache_load on a device."""

    FIELDS = (
        "keyCache",
        "valueCache",
        "blockTables",
        "contextLens",
        "key_before",
        "value_before",
        "seqStarts",
    )

    def __init__(self, device: raw.Device, vector: dict[str, Any]) -> None:
        self.device = device
        self.vector = vector
        key, value = vector["dtype_key"], vector["dtype_value"]
        self.types = [key, value, "int32", "int32", key, value, "int32"]
        self.nz = vector["kvCacheCfg"] == 0

    def upload(self) -> list[raw.Tensor | None]:
        """The seven tensors, outputs as they are before the call."""
        out: list[raw.Tensor | None] = []
        for i, (name, dtype) in enumerate(zip(self.FIELDS, self.types, strict=True)):
            tensor = self.vector[name]
            if tensor is None:
                out.append(None)
                continue
            fmt = raw.FRACTAL_NZ if i < 2 and self.nz else raw.ND
            data = _load_bytes(tensor, dtype)
            out.append(self.device.tensor(data, tensor["shape"], _CODES[dtype], fmt=fmt))
        return out

    def check(self, tensors: list[raw.Tensor | None]) -> None:
        """The outputs hold what the vector says."""
        for index, name in ((4, "expected_key"), (5, "expected_value")):
            expected = _load_bytes(self.vector[name], self.types[index])
            assert self.device.read(tensors[index]) == expected, self.vector["name"]


@case()
def paged_load_vectors() -> None:
    """All published vectors: ATB's status and data, and the aclnn sibling."""
    document = json.loads((DATA / "paged_cache_load.json").read_text())
    for vector in document["cases"]:
        device = raw.Device(atb=True)
        context = device.atb_context()
        load = LoadVector(device, vector)
        tensors = load.upload()
        cumsum, starts = vector["isSeqLensCumsumType"], vector["hasSeqStarts"]
        cfg = vector["kvCacheCfg"]
        status, _, operation = device.load_setup(tensors, cfg, cumsum, starts, context)
        assert status == vector["c_api_status"], (vector["name"], status)
        if status == 0:
            assert device.load_execute(operation, context) == 0
            load.check(tensors)
        assert device.destroy_atb_operation(operation) == 0
        if vector["dtype_key"] == vector["dtype_value"]:
            tensors = load.upload()
            mode = ctypes.c_char_p(b"PA_NZ" if load.nz else b"Norm")
            assert device.call("aclnnGatherPaKvCache", *tensors, mode, cumsum) == 0
            load.check(tensors)
        assert device.destroy_atb_context(context) == 0
        device.close()
        assert control.violations() == [], vector["name"]


# ---- codes and their order ------------------------------------------------------


def _codes(tiling: int, null: int) -> None:
    s = Scatter()
    d = s.device
    wide = d.zeros([4, 2, 16], raw.INT32)
    flat = d.zeros([4, 32], raw.FLOAT16)
    assert d.scatter(None, *s.tensors()[1:]) == null
    assert d.scatter(wide, *s.tensors()[1:]) == 161002
    ranks = 161002 if control.version() == "9.1.0" else tiling
    assert d.scatter(flat, *s.tensors()[1:]) == ranks
    few = d.zeros([1, 3, 2, 16], raw.FLOAT16)
    assert d.scatter(s.key, s.value, few, few, s.slots) == tiling
    message = d.acl.aclGetRecentErrMsg().decode()
    assert "more tokens than slots" in message
    assert control.live_objects("aclOpExecutor") == []
    unknown = d.scatter(*s.tensors(), scatter_mode="Sideways")
    assert unknown == (0 if control.version() == "8.5.0" else tiling)
    d.close()


@case(version="8.5.0")
def codes_850() -> None:
    """Generated layer: 161001, 161002, then tiling's 561002."""
    _codes(561002, 161001)


@case(version="9.0.0")
def codes_900() -> None:
    """As 8.5.0, with strict mode strings."""
    _codes(561002, 161001)


@case(version="9.1.0")
def codes_910() -> None:
    """Hand-written layer: everything inside surfaces as 561103."""
    _codes(561103, 561103)


def _newer_layouts() -> tuple[int, int]:
    """Codes of a 5-D NZ cache and of NHSD."""
    d = raw.Device()
    key = d.zeros([2, 2, 32], raw.FLOAT16)
    nz = d.zeros([1, 2, 2, 4, 16], raw.FLOAT16)
    nhsd = d.zeros([1, 2, 4, 32], raw.FLOAT16)
    slots = d.int32([0, 3])
    first = d.scatter(key, key, nz, nz, slots, cache_mode="PA_NZ")
    second = d.scatter(key, key, nhsd, nhsd, slots, scatter_mode="NHSD")
    d.close()
    return first, second


@case(version="8.5.0")
def layouts_850() -> None:
    """No 5-D NZ; NHSD is an unknown mode string, hence Norm."""
    assert _newer_layouts() == (561002, 0)


@case(version="9.0.0")
def layouts_900() -> None:
    """5-D NZ, no NHSD."""
    assert _newer_layouts() == (0, 561002)


@case(version="9.1.0")
def layouts_910() -> None:
    """Both."""
    assert _newer_layouts() == (0, 0)


@case(soc="310P", atb=True)
def unsupported_soc() -> None:
    """No kernel for aclnn, status 1 from ATB, and no operation made."""
    s = Scatter()
    assert s.device.scatter(*s.tensors()) == 561003
    s.device.close()
    device = raw.Device(atb=True)
    context = device.atb_context()
    status, _, operation = device.load_setup([None] * 7, 1, False, True, context)
    assert (status, operation) == (1, 0)
    device.destroy_atb_context(context)
    device.close()


@case()
def load_status_order() -> None:
    """ATB's statuses, each reached with all earlier checks passing."""
    device = raw.Device(atb=True)
    context = device.atb_context()
    cache = device.zeros([2, 4, 2, 16], raw.FLOAT16)
    tables = device.int32([0, 1], [1, 2])
    lens = device.int32([3])
    out = device.zeros([3, 2, 16], raw.FLOAT16)
    starts = device.int32([0])
    good: list[raw.Tensor | None] = [cache, cache, tables, lens, out, out, starts]

    def status(change: dict[int, raw.Tensor | None] | None = None, **flags: Any) -> int:
        tensors = list(good)
        for index, tensor in (change or {}).items():
            tensors[index] = tensor
        code, _, operation = device.load_setup(
            tensors,
            flags.get("cfg", 1),
            flags.get("cumsum", False),
            flags.get("starts", True),
            flags.get("context", context),
        )
        if operation:
            assert device.destroy_atb_operation(operation) == 0
        return code

    assert status() == 0
    assert status(cfg=2) == 1
    assert status(cfg=0, cumsum=True, starts=False) == 1
    assert status(context=None) == 1
    assert status(starts=False) == 5
    assert status({2: None}) == 8
    assert status({4: device.zeros([0, 2, 16], raw.FLOAT16)}) == 9
    assert status({3: device.int64([3])}) == 13
    nz = device.describe(cache.pointer, [2, 4, 2, 16], raw.FLOAT16, fmt=raw.FRACTAL_NZ)
    assert status({0: nz}) == 13
    assert status({4: device.zeros([3, 2, 8], raw.FLOAT16)}) == 8
    assert status({3: device.int32([3, 3])}) == 8
    assert status({6: device.int32([0], [1, 1])}) == 16
    assert status({6: device.int32([0, 0])}) == 8
    assert status({6: None}) == 16
    device.destroy_atb_context(context)
    device.close()


# ---- deviations of versions ------------------------------------------------------


@case(version="8.5.0")
def int64_slots_are_misread_by_850() -> None:
    """Token i gets 32-bit word i of the buffer: s0, 0, s1, 0."""
    s = Scatter([5, 2])
    wide = s.device.int64([5, 2])
    assert s.device.scatter(*s.tensors()[:4], wide) == 0
    s.slot_list = [5, 0]
    s.check()
    assert control.counters()["int64_read_as_int32"] == 2
    s.device.close()


@case(version="9.0.0")
def int64_slots_are_fine_in_900() -> None:
    """The rewritten Norm kernel reads int64."""
    s = Scatter([5, 2])
    wide = s.device.int64([5, 2])
    assert s.device.scatter(*s.tensors()[:4], wide) == 0
    s.check()
    s.device.close()


def _nct(strides: list[int]) -> tuple[bytes, bytes]:
    """Tokens 0, 1 of 16 elements to slots 0, 1; returns the value rows."""
    d = raw.Device()
    memory = noise(4096, 3)
    base = d.upload(memory)
    key = d.describe(base, [2, 1, 16], raw.FLOAT16, storage=[2048])
    caches = [d.zeros([1, 2, 1, 16], raw.FLOAT16) for _ in range(2)]
    arrays = [d.int_array(strides), d.int_array([0, 0])]
    code = d.scatter(
        key,
        key,
        *caches,
        d.int32([0, 1]),
        scatter_mode="Nct",
        strides=arrays[0],
        offsets=arrays[1],
    )
    assert code == 0
    found = d.read(caches[1])
    for array in arrays:
        d.nn.aclDestroyIntArray(array)
    d.close()
    return memory, found


@case(version="8.5.0")
def value_stride_is_ignored_by_850() -> None:
    """The stride of key is used for value too."""
    memory, found = _nct([20, 40])
    assert found == memory[:32] + memory[40:72]


@case(version="9.0.0")
def value_stride_is_used_by_900() -> None:
    """The stride of value is used for value."""
    memory, found = _nct([20, 40])
    assert found == memory[:32] + memory[80:112]


def _key_only(head: int) -> tuple[bytes, bytes]:
    d = raw.Device()
    data = noise(2 * head * 2, 4)
    key = d.tensor(data, [2, 1, head], raw.FLOAT16)
    cache = d.zeros([1, 2, 1, head], raw.FLOAT16)
    nothing = d.zeros([], raw.FLOAT16)
    assert d.scatter(key, nothing, cache, nothing, d.int32([0, 1])) == 0
    found = d.read(cache)
    d.close()
    return data, found


@case(version="8.5.0")
def key_only_tail_is_lost_by_850() -> None:
    """Only whole lines of 32 bytes of a token are moved."""
    data, found = _key_only(20)
    assert found == data[:32] + bytes(8) + data[40:72] + bytes(8)
    data, found = _key_only(32)
    assert found == data


@case(version="9.0.0")
def key_only_tail_is_kept_by_900() -> None:
    """The fault is gone."""
    data, found = _key_only(20)
    assert found == data


def _compressed(slots: list[int], mode: str = "Alibi") -> tuple[raw.Device, list[raw.Tensor]]:
    d = raw.Device()
    key = d.tensor(noise(3 * 64, 5), [3, 1, 32], raw.FLOAT16)
    caches = [d.zeros([2, 2, 1, 32], raw.FLOAT16) for _ in range(2)]
    code = d.scatter(
        key,
        key,
        *caches,
        d.int32(slots),
        compress_lens=d.int32([2]),
        compress_offsets=d.int32([1]),
        seq_lens=d.int32([3]),
        scatter_mode=mode,
    )
    assert code == 0
    d.sync()
    return d, caches


@case()
def negative_slot_in_a_compressed_mode() -> None:
    """It is a huge unsigned row: recorded, and nothing is written."""
    for mode in ("Alibi", "Rope", "Omni"):
        d, caches = _compressed([-1], mode)
        assert d.read(caches[0]) == bytes(256)
        expect("out_of_bounds")
        d.close()


@case(version="8.5.0")
def int8_nct_has_no_kernel_in_850() -> None:
    """Tiling lets it through, the launch fails, the executor is gone."""
    d = raw.Device()
    key = d.zeros([2, 1, 32], raw.INT8)
    cache = d.zeros([1, 2, 1, 32], raw.INT8)
    code = d.scatter(key, key, cache, cache, d.int32([0, 1]), scatter_mode="Nct")
    assert code == 561003
    d.close()


@case(version="8.3.RC1.alpha003")
def eleven_arguments() -> None:
    """The old edition takes 11 arguments and notices a caller with 14."""
    s = Scatter()
    assert s.device.scatter(*s.tensors()) == 161002
    expect("abi")
    arguments = s.arguments()[:9]
    assert s.device.call("aclnnScatterPaKvCache", *arguments) == 0
    s.check()
    s.device.close()


# ---- violations ----------------------------------------------------------------


@case()
def host_pointer() -> None:
    """A host address described as a device tensor."""
    s = Scatter()
    memory = ctypes.create_string_buffer(4 * 2 * 16 * 2)
    key = s.device.describe(ctypes.addressof(memory), [4, 2, 16], raw.FLOAT16)
    assert s.device.scatter(key, *s.tensors()[1:]) == 0
    s.device.sync()
    expect("host_pointer")
    s.device.close()


@case()
def slot_out_of_bounds() -> None:
    """A slot behind the cache; the memory behind it stays as it was."""
    s = Scatter([12])
    assert s.device.scatter(*s.tensors()) == 0
    s.device.sync()
    expect("out_of_bounds")
    s.device.close()


@case()
def too_few_slots() -> None:
    """slot_mapping shorter than key: the device reads past its end."""
    s = Scatter([0, 1])
    assert s.device.scatter(*s.tensors()[:4], s.device.int32([0])) == 0
    s.device.sync()
    expect("out_of_bounds")
    s.device.close()


@case()
def block_id_and_rows_out_of_bounds() -> None:
    """ATB's kernel looks at nothing: ids, table columns, output rows."""
    device = raw.Device(atb=True)
    context = device.atb_context()
    cache = device.zeros([2, 4, 2, 16], raw.FLOAT16)
    starts = device.int32([0])
    rows = [3, 1, 9]
    for ids, length, row in zip(([-1], [0], [0]), (3, 3, 9), rows, strict=True):
        out = device.zeros([row, 2, 16], raw.FLOAT16)
        tensors = [cache, cache, device.int32(ids, [1, 1]), device.int32([length])]
        status, _, op = device.load_setup([*tensors, out, out, starts], 1, False, True, context)
        assert status == 0 and device.load_execute(op, context) == 0
        device.sync()
        expect("out_of_bounds")
        device.destroy_atb_operation(op)
    device.destroy_atb_context(context)
    device.close()


@case(lazy=True)
def freed_too_early() -> None:
    """Lazy mode: the cache is freed before the queued kernel runs."""
    s = Scatter()
    assert s.device.scatter(*s.tensors()) == 0
    assert control.pending() == 1
    s.device.free(s.key_cache.pointer)
    s.device.sync()
    assert control.pending() == 0
    expect("use_after_free")
    s.device.close()


@case()
def executor_used_twice() -> None:
    """An executor is consumed by phase two unless it is repeatable."""
    s = Scatter()
    op = "aclnnScatterPaKvCache"
    code, size, executor = s.device.phase_one(op, *s.arguments())
    assert (code, size) == (0, 0)
    assert s.device.phase_two(op, 0, 0, executor) == 0
    assert s.device.phase_two(op, 0, 0, executor) != 0
    expect("executor_reuse")
    code, size, executor = s.device.phase_one(op, *s.arguments())
    assert s.device.nn.aclSetAclOpExecutorRepeatable(executor) == 0
    for _ in range(3):
        assert s.device.phase_two(op, 0, 0, executor) == 0
    assert s.device.nn.aclDestroyAclOpExecutor(executor) == 0
    s.check()
    s.device.close()


@case()
def executor_of_another_operator() -> None:
    """Phase two of one operator with the executor of another."""
    s = Scatter()
    code, _, executor = s.device.phase_one("aclnnScatterPaKvCache", *s.arguments())
    assert code == 0
    assert s.device.phase_two("aclnnGatherPaKvCache", 0, 0, executor) != 0
    expect("bad_handle")
    s.device.nn.aclDestroyAclOpExecutor(executor)
    s.device.close()


@case()
def destroyed_tensor() -> None:
    """A tensor destroyed before phase one, and between the phases."""
    s = Scatter()
    arguments = s.arguments()
    op = "aclnnScatterPaKvCache"
    code, _, executor = s.device.phase_one(op, *arguments)
    s.device.destroy(s.key)
    assert s.device.phase_two(op, 0, 0, executor) != 0
    expect("destroyed_handle")
    code, _, executor = s.device.phase_one(op, *arguments)
    assert code != 0 and executor == 0
    expect("destroyed_handle")
    s.device.close()


def _gather(device: raw.Device) -> tuple[int, int]:
    cache = device.zeros([2, 4, 2, 16], raw.FLOAT16)
    out = device.zeros([3, 2, 16], raw.FLOAT16)
    code, size, executor = device.phase_one(
        "aclnnGatherPaKvCache",
        cache,
        cache,
        device.int32([1], [1, 1]),
        device.int32([3]),
        out,
        out,
        None,
        ctypes.c_char_p(b"Norm"),
        False,
    )
    assert code == 0 and size > 0
    return size, executor


@case()
def workspace_too_small() -> None:
    """Fewer bytes than phase one asked for."""
    device = raw.Device()
    size, executor = _gather(device)
    workspace = device.malloc(size)
    op = "aclnnGatherPaKvCache"
    assert device.phase_two(op, workspace, size - 1, executor) != 0
    expect("workspace_small")
    device.close()


@case(lazy=True)
def workspace_freed_too_early() -> None:
    """The workspace is gone when the kernel runs."""
    device = raw.Device()
    size, executor = _gather(device)
    workspace = device.malloc(size)
    assert device.phase_two("aclnnGatherPaKvCache", workspace, size, executor) == 0
    device.free(workspace)
    device.sync()
    expect("use_after_free")
    device.close()


@case()
def context_and_operation_threads() -> None:
    """A context and an operation belong to the thread that made them."""
    device = raw.Device(atb=True)
    context = device.atb_context()
    cache = device.zeros([1, 4, 2, 16], raw.FLOAT16)
    out = device.zeros([3, 2, 16], raw.FLOAT16)
    tensors = [cache, cache, device.int32([0], [1, 1]), device.int32([3]), out, out]
    tensors.append(device.int32([0]))
    _, _, op = device.load_setup(tensors, 1, False, True, context)
    control.clear()

    def other() -> None:
        device.use()
        assert device.load_execute(op, context) == 0

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    device.sync()
    expect("context_thread", "operation_thread")
    device.destroy_atb_operation(op)
    raw.Device(1).close()  # now the current device of this thread
    device.set_atb_stream(context, device.stream)
    expect("context_device")
    device.use()
    device.destroy_atb_context(context)
    device.close()


@case()
def context_that_was_destroyed() -> None:
    """ATB handles after their end."""
    device = raw.Device(atb=True)
    context = device.atb_context()
    assert device.destroy_atb_context(context) == 0
    assert device.load_setup([None] * 7, 1, False, True, context)[0] == 1
    kinds = {v["kind"] for v in control.violations()}
    assert kinds == {"destroyed_handle"}
    for item in control.live_objects("atb::Operation"):
        device.destroy_atb_operation(int(item["handle"], 16))
    control.clear()
    device.close()


@case()
def memory_of_another_device() -> None:
    """A kernel on device 0 touches memory of device 1."""
    s = Scatter()
    other = raw.Device(1)
    cache = other.zeros([3, 4, 2, 16], raw.FLOAT16)
    s.device.use()
    assert s.device.scatter(s.key, s.value, cache, s.value_cache, s.slots) == 0
    s.device.sync()
    expect("wrong_device")
    other.close()
    s.device.close()


@case()
def two_streams_without_order() -> None:
    """Two kernels write one cache and nothing orders them."""
    s = Scatter()
    first, second = s.device.stream, s.device.new_stream()
    assert s.device.scatter(*s.tensors()) == 0
    s.device.stream = second
    assert s.device.scatter(*s.tensors()) == 0
    s.device.sync()
    s.device.stream = first
    s.device.sync()
    expect("race")
    # The same with an event between them is fine.
    event = ctypes.c_void_p()
    acl = s.device.acl
    acl.aclrtCreateEventWithFlag(ctypes.byref(event), 0)
    assert s.device.scatter(*s.tensors()) == 0
    acl.aclrtRecordEvent(event, ctypes.c_void_p(first))
    acl.aclrtStreamWaitEvent(ctypes.c_void_p(second), event)
    s.device.stream = second
    assert s.device.scatter(*s.tensors()) == 0
    s.check()
    acl.aclrtDestroyEvent(event)
    acl.aclrtDestroyStream(second)
    s.device.stream = first
    s.device.close()


@case()
def strided_tensors_are_misread() -> None:
    """A strided cache is used as if it were dense, and that is said."""
    s = Scatter()
    key = s.device.describe(s.key.pointer, [2, 2, 16], raw.FLOAT16, strides=[64, 16, 1], storage=[128])
    value = s.device.describe(s.value.pointer, [2, 2, 16], raw.FLOAT16)
    assert s.device.scatter(key, value, *s.tensors()[2:4], s.device.int32([0, 1])) == 0
    s.device.sync()
    expect("non_contiguous")
    s.device.close()


@case()
def misaligned_tensor_for_atb() -> None:
    """An output that does not start on 32 bytes."""
    device = raw.Device(atb=True)
    context = device.atb_context()
    cache = device.zeros([1, 4, 2, 16], raw.FLOAT16)
    memory = device.zeros([4, 2, 16], raw.FLOAT16)
    out = device.describe(memory.pointer + 2, [3, 2, 16], raw.FLOAT16)
    tensors = [cache, cache, device.int32([0], [1, 1]), device.int32([3]), out, out]
    status, _, op = device.load_setup([*tensors, device.int32([0])], 1, False, True, context)
    assert status == 0
    expect("misaligned")
    device.destroy_atb_operation(op)
    device.destroy_atb_context(context)
    device.close()


@case()
def frees() -> None:
    """A block freed twice, and a copy against its direction."""
    device = raw.Device()
    pointer = device.malloc(64)
    device.free(pointer)
    assert device.acl.aclrtFree(pointer) != 0
    expect("use_after_free")
    host = ctypes.create_string_buffer(8)
    assert device.acl.aclrtMemcpy(host, 8, host, 8, 1) != 0
    expect("host_pointer")
    pointer = device.malloc(8)
    assert device.acl.aclrtMemcpy(pointer, 8, pointer, 8, 1) != 0
    expect("device_pointer")
    device.close()


@case()
def waiting_under_capture() -> None:
    """A synchronisation and a blocking copy while a stream is captured."""
    s = Scatter()
    acl, stream = s.device.acl, ctypes.c_void_p(s.device.stream)
    assert acl.aclmdlRICaptureBegin(stream, 0) == 0
    assert s.device.scatter(*s.tensors()) == 0
    assert acl.aclrtSynchronizeStream(stream) != 0
    expect("capture")
    assert acl.aclrtSynchronizeDevice() != 0
    expect("capture")
    graph = ctypes.c_void_p()
    assert acl.aclmdlRICaptureEnd(stream, ctypes.byref(graph)) == 0
    assert s.device.read(s.key_cache) == bytes(12 * s.row)
    assert acl.aclmdlRIExecuteAsync(graph, stream) == 0
    s.check()
    assert acl.aclmdlRIDestroy(graph) == 0
    s.device.close()


@case()
def windows_beyond_their_sequence() -> None:
    """compress_lens longer than the sequence reads another's tokens."""
    d = raw.Device()
    key = d.zeros([4, 1, 32], raw.FLOAT16)
    caches = [d.zeros([4, 2, 1, 32], raw.FLOAT16) for _ in range(2)]
    code = d.scatter(
        key,
        key,
        *caches,
        d.int32([0, 2]),
        compress_lens=d.int32([1, 3]),
        seq_lens=d.int32([2, 2]),
        scatter_mode="Alibi",
    )
    assert code == 0
    d.sync()
    expect("undefined")
    d.close()


@case()
def null_pointers_that_are_followed() -> None:
    """A missing offset tensor is noticed by nobody but the kernel."""
    d = raw.Device()
    key = d.zeros([4, 1, 32], raw.FLOAT16)
    caches = [d.zeros([4, 2, 1, 32], raw.FLOAT16) for _ in range(2)]
    code = d.scatter(
        key,
        key,
        *caches,
        d.int32([0]),
        compress_lens=d.int32([1]),
        seq_lens=d.int32([4]),
        scatter_mode="Rope",
    )
    assert code == 0
    d.sync()
    expect("null_dereference")
    d.close()


# ---- the executor cache ----------------------------------------------------------


def _cached_call(s: Scatter, key: int, addresses: list[int]) -> tuple[int, bool]:
    """One call the way torch_npu makes it; returns (code, was it a hit)."""
    nn, op = s.device.nn, "aclnnScatterPaKvCache"
    nn.PTAGetExecCache.restype = ctypes.c_void_p
    nn.CanUsePTACache.restype = ctypes.c_bool
    assert nn.CanUsePTACache(op.encode())
    nn.InitPTACacheThreadLocal()
    for address in addresses:
        nn.AddTensorAddrToCachedList(ctypes.c_void_p(address))
    nn.SetPTAHashKey(ctypes.c_uint64(key))
    size = ctypes.c_uint64()
    executor = nn.PTAGetExecCache(ctypes.c_uint64(key), ctypes.byref(size))
    hit = executor is not None
    if hit:
        code = s.device.phase_two(op, 0, size.value, executor)
    else:
        code = s.device.call(op, *s.arguments())
    nn.UnInitPTACacheThreadLocal()
    return code, hit


@case()
def executor_cache() -> None:
    """One phase one per key; a hit works on the addresses of its own call."""
    s = Scatter()
    order = [s.key, s.key_cache, s.slots, s.value, s.value_cache]
    addresses = [t.pointer for t in order]
    assert _cached_call(s, 7, addresses) == (0, False)
    assert _cached_call(s, 7, addresses) == (0, True)
    other = Scatter()
    order = [other.key, other.key_cache, other.slots, other.value, other.value_cache]
    assert _cached_call(s, 7, [t.pointer for t in order]) == (0, True)
    s.device.sync()
    other.check()
    counters = control.counters()
    assert counters["aclnnScatterPaKvCacheGetWorkspaceSize"] == 1
    assert counters["pta_hit"] == 2
    assert _cached_call(s, 0, addresses) == (0, False)  # 0 is "do not cache"
    assert _cached_call(s, 0, addresses) == (0, False)
    s.device.close()
    other.device.close()


@case()
def executor_cache_mistakes() -> None:
    """Too few addresses, one key for two signatures, no beginning."""
    s = Scatter()
    order = [s.key, s.key_cache, s.slots, s.value, s.value_cache]
    addresses = [t.pointer for t in order]
    assert _cached_call(s, 7, addresses) == (0, False)
    assert _cached_call(s, 7, addresses[:-1]) == (0, False)
    expect("pta_addresses")
    other = Scatter([1, 2])
    control.set_pta_verify(True)
    assert _cached_call(other, 7, addresses) == (0, False)
    expect("pta_collision")
    s.device.nn.SetPTAHashKey(ctypes.c_uint64(3))
    expect("pta_protocol")
    s.device.close()
    other.device.close()


# ---- tools for tests -------------------------------------------------------------


@case()
def failures_on_demand() -> None:
    """The nth call of an API fails with the code that was asked for."""
    s = Scatter()
    op = "aclnnScatterPaKvCache"
    control.fail_next(f"{op}GetWorkspaceSize", 561101, nth=2)
    assert s.device.scatter(*s.tensors()) == 0
    assert s.device.scatter(*s.tensors()) == 561101
    control.fail_next(op, 361001)
    assert s.device.scatter(*s.tensors()) == 361001
    control.fail_next("aclrtSynchronizeStream", 507015)
    assert s.device.sync() == 507015
    control.fail_next("aclCreateTensor", 1)
    assert s.device.nn.aclCreateTensor(None, 0, 1, None, 0, 2, None, 0, None) is None
    assert s.device.scatter(*s.tensors()) == 0
    assert control.live_objects("aclOpExecutor") == []
    s.device.close()


@case()
def failures_leave_what_the_library_owns() -> None:
    """A failing destroy destroys; a failing ATB Setup leaves its operation."""
    device = raw.Device(atb=True)
    tensor = device.zeros([4], raw.INT8)
    control.fail_next("aclDestroyTensor", 561000)
    assert device.nn.aclDestroyTensor(tensor.handle) == 561000
    device.tensors.remove(tensor)
    assert control.live_objects("aclTensor") == []
    context = device.atb_context()
    control.fail_next("AtbPagedCacheLoadGetWorkspaceSize", 26)
    status, _, operation = device.load_setup([None] * 7, 1, False, True, context)
    assert status == 26 and operation
    control.fail_next("atb::Context::SetExecuteStream", 3)
    assert device.set_atb_stream(context, device.stream) == 3
    assert device.destroy_atb_operation(operation) == 0
    assert device.destroy_atb_context(context) == 0
    device.close()


@case()
def phase_costs() -> None:
    """The phases take the time that was set."""
    import time

    s = Scatter()
    control.set_phase_cost(20000, 30000)
    begin = time.perf_counter()
    assert s.device.scatter(*s.tensors()) == 0
    assert time.perf_counter() - begin >= 0.05
    s.device.close()


@case(hide=["PTAGetExecCache", "aclnnGatherPaKvCache"])
def hidden_symbols() -> None:
    """Hidden names cannot be found; others can."""
    device = raw.Device()
    for library, name in (
        (device.nn, "PTAGetExecCache"),
        (device.ops, "aclnnGatherPaKvCache"),
    ):
        try:
            getattr(library, name)
        except AttributeError:
            continue
        raise AssertionError(name)
    assert device.ops.aclnnScatterPaKvCache
    device.close()


# ---- with torch_npu --------------------------------------------------------------


def _torch() -> Any:
    import torch
    import torch_npu

    return torch, torch_npu


@case()
def torch_npu_round_trips() -> None:
    """Tensors of every layout go to the device and come back."""
    torch, _ = _torch()
    x = torch.arange(24.0).reshape(2, 3, 4)
    y = x.npu()
    assert y.device.type == "npu"
    for view in (
        lambda t: t,
        lambda t: t.transpose(0, 2),
        lambda t: t[:, 1:, ::2],
        lambda t: t.half(),
        lambda t: t.to(torch.int32) + 1,
        lambda t: torch.cat([t, t], 1),
        lambda t: t @ t.transpose(1, 2),
        lambda t: torch.softmax(t, -1),
    ):
        torch.testing.assert_close(view(y).cpu(), view(x), rtol=1e-6, atol=1e-6)
    assert torch.equal(y[1:].clone().cpu(), x[1:])
    torch.npu.synchronize()
    counters = control.counters()
    assert counters["aclnnSoftmax"] == 1 and counters["aclnnInplaceCopy"] > 0


def _torch_operators() -> None:
    torch, torch_npu = _torch()
    torch.manual_seed(0)
    tokens, heads, size, blocks, block = 5, 2, 16, 4, 16
    key = torch.randn(tokens, heads, size).half()
    value = torch.randn(tokens, heads, size).half()
    slots = torch.tensor([3, 0, -1, 17, 40], dtype=torch.int32)
    cache = torch.zeros(blocks, block, heads, size).half()
    expected = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected.view(-1, heads, size)[slot] = key[token]
    caches = [cache.npu(), cache.npu()]
    arguments = (key.npu(), value.npu(), *caches, slots.npu())
    for _ in range(3):
        torch_npu.npu_scatter_pa_kv_cache(*arguments, cache_mode="Norm")
    assert torch.equal(caches[0].cpu(), expected)
    nz = [torch.zeros(blocks, heads * size // 16, block, 16).half().npu() for _ in "kv"]
    torch_npu.npu_scatter_pa_kv_cache(*arguments[:2], *nz, slots.npu())
    lanes = expected.view(blocks, block, heads * size // 16, 16).transpose(1, 2)
    assert torch.equal(nz[0].cpu(), lanes)
    both, alone = ([torch.zeros_like(cache).npu() for _ in "kv"] for _ in range(2))
    torch_npu._npu_reshape_and_cache(*arguments[:2], *both, slots.npu())
    torch_npu._npu_reshape_and_cache_siso(arguments[0], alone[0], slots.npu())
    assert torch.equal(both[0].cpu(), expected) and torch.equal(alone[0].cpu(), expected)
    tables = torch.tensor([[1, 0], [2, 3]], dtype=torch.int32).npu()
    lens = torch.tensor([18, 3], dtype=torch.int32).npu()
    starts = torch.zeros(2, dtype=torch.int32).npu()
    rows = torch.cat([expected[1], expected[0, :2], expected[2, :3]])
    out = [torch.zeros(21, heads, size).half().npu() for _ in "kv"]
    torch_npu.npu_gather_pa_kv_cache(*caches, tables, lens, *out, seq_offset=starts, is_seq_lens_cumsum=False)
    assert torch.equal(out[0].cpu(), rows)
    loaded, _ = torch_npu.atb.npu_paged_cache_load(*caches, tables, lens, seq_starts=starts)
    assert torch.equal(loaded.cpu(), rows)
    torch.npu.synchronize()


@case()
def torch_npu_operators() -> None:
    """The operators of torch_npu, through their real call sequences."""
    _torch_operators()
    assert control.counters()["AtbPagedCacheLoad"] == 1
    assert control.counters()["AtbReshapeAndCache"] == 2


@case()
def torch_npu_reshape_and_cache_looks() -> None:
    """A slot beyond the cache is a violation, and nothing is written there; int64 slots are refused."""
    torch, torch_npu = _torch()
    key = torch.ones(2, 1, 16).half().npu()
    cache = torch.zeros(4, 4, 1, 16).half().npu()
    torch_npu._npu_reshape_and_cache_siso(key, cache, torch.tensor([5, 16], dtype=torch.int32).npu())
    torch.npu.synchronize()
    expect("out_of_bounds")
    assert cache.cpu().view(16, 16).sum(1).nonzero().flatten().tolist() == [5]
    try:
        torch_npu._npu_reshape_and_cache_siso(key, cache, torch.tensor([5, 6]).npu())
        torch.npu.synchronize()
    except RuntimeError as error:
        assert "ReshapeCacheOperation" in str(error)
    else:
        raise AssertionError("int64 slots are taken")
    os._exit(0)  # torch_npu keeps the failure and reports it again at exit


@case(lazy=True)
def torch_npu_operators_lazily() -> None:
    """The same with work that runs only at a synchronisation."""
    _torch_operators()


@case(variables={"TASK_QUEUE_ENABLE": "2"})
def torch_npu_operators_with_both_phases_queued() -> None:
    """TASK_QUEUE_ENABLE=2: the cache goes by bytes instead of a hash."""
    _torch_operators()
    assert control.counters()["PTAFindExecCache"] > 0


@case(variables={"TASK_QUEUE_ENABLE": "0"})
def torch_npu_operators_without_a_queue() -> None:
    """TASK_QUEUE_ENABLE=0: everything on the calling thread."""
    _torch_operators()


@case(pta=False)
def torch_npu_operators_without_the_executor_cache() -> None:
    """CanUsePTACache says no: one phase one per call."""
    _torch_operators()
    counters = control.counters()
    assert "pta_hit" not in counters
    assert counters["aclnnScatterPaKvCacheGetWorkspaceSize"] == 4


def _torch_scatter() -> tuple[Any, Any, Any]:
    torch, torch_npu = _torch()
    key = torch.ones(2, 1, 16).half().npu()
    cache = torch.zeros(4, 4, 1, 16).half().npu()
    slots = torch.tensor([3, 7], dtype=torch.int32).npu()

    def call() -> None:
        torch_npu.npu_scatter_pa_kv_cache(key, key, cache, cache.clone(), slots, cache_mode="Norm")

    return torch, cache, call


@case()
def torch_npu_graph() -> None:
    """A captured scatter runs at every replay, on what is there then."""
    torch, cache, call = _torch_scatter()
    call()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        call()
    for _ in range(2):
        cache.zero_()
        graph.replay()
        torch.npu.synchronize()
        assert cache.cpu().sum().item() == 32
    del graph


@case()
def torch_npu_streams() -> None:
    """Side streams that wait are fine, one that does not wait is a race."""
    torch, cache, call = _torch_scatter()
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        side.wait_stream(torch.npu.default_stream())
        call()
    torch.npu.default_stream().wait_stream(side)
    call()
    torch.npu.synchronize()
    assert control.violations() == []
    with torch.npu.stream(side):
        call()
    cache.add_(1)
    torch.npu.synchronize()
    expect("race")


@case(lazy=True)
def torch_npu_memory_reused_too_early() -> None:
    """A block that goes back to the allocator while a side stream reads it."""
    torch, _ = _torch()
    side, main = torch.npu.Stream(), torch.npu.default_stream()

    def step(keep: bool) -> None:
        x = torch.ones(1000, device="npu")
        side.wait_stream(main)
        with torch.npu.stream(side):
            x * 2
            if keep:
                x.record_stream(side)
        del x
        torch.zeros(1000, device="npu")

    for keep in (True, False):
        for _ in range(10):
            step(keep)
        torch.npu.synchronize()
        if keep:
            assert control.violations() == []
    expect("race")


@case()
def torch_npu_second_device() -> None:
    """Tensors on npu:1, and copies between the devices."""
    torch, _ = _torch()
    x = torch.arange(8.0)
    one = x.to("npu:1")
    assert torch.equal((one + 1).cpu(), x + 1)
    assert torch.equal(one.to("npu:0").cpu(), x)
    assert torch.npu.device_count() == 2


@case(atb=False)
def torch_npu_without_atb() -> None:
    """Without libatb.so only torch_npu.atb is missing."""
    torch, torch_npu = _torch()
    assert torch.equal(torch.ones(3).npu().cpu(), torch.ones(3))
    try:
        torch_npu.atb.npu_paged_cache_load(None, None, None, None)
    except OSError:
        return
    raise AssertionError("torch_npu.atb works without libatb.so")


@case()
def torch_npu_says_what_is_missing() -> None:
    """An operator that is not simulated fails with its name."""
    torch, _ = _torch()
    x = torch.ones(4, 4).npu()
    try:
        torch.roll(x, 1, 0).cpu()
    except RuntimeError as error:
        assert "Roll" in str(error)
    else:
        raise AssertionError("roll is simulated now: pick another operator")
    expect("missing_operator")
    os._exit(0)  # torch_npu keeps the failure and reports it again at exit


if __name__ == "__main__":
    CASES[sys.argv[1]][0]()
