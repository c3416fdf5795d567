"""What CANN is told: the simulated device writes down every argument of a first phase, in the function's order.

Sizes differ from tensor to tensor, so that no argument can pass for another.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cann_sim import control
from support import (
    ACLNN_LOAD,
    LOAD,
    NPU,
    PHASE_TWO,
    SCATTER,
    Calls,
    calls,
    cann_at_least,
    noise,
    operator,
    short,
)
from torch import Tensor

pytestmark = pytest.mark.usefixtures("without_executor_cache")

ND, FRACTAL_NZ = 2, 29
SCATTER_ORDER = [
    *("key", "key_cache", "slot_mapping", "value", "value_cache"),
    *("compress_lens", "compress_seq_offset", "seq_lens", "cache_mode", "scatter_mode", "strides", "offsets"),
]
LOAD_ORDER = ["key_cache", "value_cache", "block_tables", "context_lens", "key", "value", "seq_starts"]
WIDE_SLOTS = cann_at_least(9, 0)  # the ND kernels read int64 slots as such
GATHER_NAMES = {"context_lens": "seq_lens", "seq_starts": "seq_offset"}

Traced = dict[str, Any]


def traced(op: str, *arguments: Any, **keyword: Any) -> tuple[Traced, Calls]:
    """Call, and give the one first phase of it and what else was called."""
    control.clear_trace()
    with calls() as made:
        operator(op)(*arguments, **keyword)
    (call,) = control.trace(f"{PHASE_TWO[op]}GetWorkspaceSize")
    assert call["code"] == 0
    assert call["module"].startswith("_C_npu."), "another library than ours made the call"
    if op == LOAD and ACLNN_LOAD:
        call = {{theirs: ours for ours, theirs in GATHER_NAMES.items()}.get(k, k): v for k, v in call.items()}
    return call, made


def device_operators(made: Calls) -> set[str]:
    """The aclnn and ATB operators that were launched."""
    return {name for name in made if name.startswith(("aclnn", "Atb")) and not name.endswith("WorkspaceSize")}


def extent(shape: torch.Size | tuple[int, ...], strides: tuple[int, ...]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def check(
    described: Traced,
    t: Tensor,
    *,
    shape: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
    fmt: int = ND,
    storage: int | None = None,
    same_memory: bool = True,
) -> None:
    """A descriptor says what a tensor is. Its address is the view's own, with offset 0."""
    shape = tuple(t.shape) if shape is None else shape
    strides = t.stride() if strides is None else strides
    dtype = t.dtype if dtype is None else dtype
    assert described["dims"] == list(shape)
    assert described["strides"] == list(strides)
    assert described["offset"] == 0
    assert described["dtype"] == short(dtype)
    assert described["format"] == fmt
    assert described["storage_dims"] == [extent(shape, strides) if storage is None else storage]
    assert (int(described["data"], 16) == t.data_ptr()) == same_memory


def dense(*shape: int) -> tuple[int, ...]:
    """Strides of a dense tensor."""
    return torch.empty(shape, device="meta").stride()


def slots(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(NPU)


def norm(tokens: int = 3, padding: tuple[int, int] = (0, 0), **keyword: Any) -> dict[str, Tensor]:
    """Tensors of a call with scatter_mode None; key and value have sizes of their own."""
    return {
        "key": noise(tokens + padding[0], 2, 48).to(NPU),
        "value": noise(tokens + padding[1], 2, 16).to(NPU),
        "key_cache": noise(5, 7, 2, 48).to(NPU),
        "value_cache": noise(5, 7, 2, 16).to(NPU),
        "slot_mapping": slots(*range(tokens)),
    } | keyword


def fused(
    tokens: int, widths: tuple[int, int, int], heads: int = 2, dtype: torch.dtype = torch.float16
) -> list[Tensor]:
    """Query, key and value as slices of the rows of one buffer."""
    rows = noise(tokens, sum(widths), dtype=dtype).to(NPU)
    return [part.unflatten(1, (2, -1)) for part in rows.split(widths, 1)]


# ---------------------------------------------------------------------------------------------------------------------
# scatter_pa_kv_cache


def test_scatter_argument_order() -> None:
    """Every argument of the C function is what its name says."""
    t = norm()
    call, made = traced(SCATTER, **t)
    assert [name for name in call if name in SCATTER_ORDER] == SCATTER_ORDER
    for name, tensor in t.items():
        check(call[name], tensor)
    assert call["compress_lens"] is call["compress_seq_offset"] is call["seq_lens"] is None
    assert (call["cache_mode"], call["scatter_mode"]) == ("Norm", "None")
    assert (call["strides"], call["offsets"]) == ([1, 1], [0, 0])
    assert device_operators(made) == {PHASE_TWO[SCATTER]}, "no cast and no copy when nothing needs one"
    (launch,) = control.trace(PHASE_TWO[SCATTER])
    assert (launch["code"], launch["workspace_bytes"], launch["cached"]) == (0, 0, False)


def test_views_are_described_at_their_own_address() -> None:
    """Views with an offset: caches as halves of one allocation, later rows of key and value."""
    caches = noise(2, 5, 7, 2, 32).to(NPU)
    key, value = noise(6, 2, 32).to(NPU)[3:], noise(8, 2, 32).to(NPU)[5:]
    t = {
        "key": key,
        "value": value,
        "key_cache": caches[1],
        "value_cache": caches[0],
        "slot_mapping": slots(0, 1, 2, 3, 4)[2:],
    }
    call, made = traced(SCATTER, **t)
    for name, tensor in t.items():
        check(call[name], tensor)
    assert device_operators(made) == {PHASE_TWO[SCATTER]}


def lying(values: list[int], lie: str) -> Tensor:
    """An index tensor that is int64, strided or both."""
    index = slots(*values, dtype=torch.int64 if lie.endswith("64") else torch.int32)
    if lie.startswith("strided"):
        index = torch.stack((index, index + 10**6), -1)[..., 0]
        assert index.stride() == (2,)
    return index


LIES = pytest.mark.parametrize(
    "lie", ("int64", "strided int32", "strided int64"), ids=lambda lie: lie.replace(" ", "-")
)


def sent(described: Traced, dtype: torch.dtype, count: int) -> list[int]:
    """The values of an index tensor as the kernel reads them."""
    data = control.peek(int(described["data"], 16), dtype.itemsize * count)
    return torch.frombuffer(bytearray(data), dtype=dtype).tolist()


@LIES
def test_slots_become_dense(lie: str) -> None:
    """On the device; int32 before the kernels read int64 slots, and what they were from then on."""
    values = [4, -1, 9]
    index = lying(values, lie)
    call, made = traced(SCATTER, **norm(slot_mapping=index))
    dtype = index.dtype if WIDE_SLOTS else torch.int32
    same = lie == "int64" and WIDE_SLOTS
    check(call["slot_mapping"], index, strides=(1,), dtype=dtype, same_memory=same)
    assert (device_operators(made) == {PHASE_TWO[SCATTER]}) == same
    assert sent(call["slot_mapping"], dtype, 3) == values


@LIES
def test_indices_of_compressed_modes_become_dense_int32(lie: str) -> None:
    """Their kernels take every index for int32 words."""
    values = {"slot_mapping": [12, 0, 8, 4], "compress_lens": [2, 1, 0, 2], "compress_seq_offsets": [1, -1, 1, 1]}
    t = compressed("Rope") | {name: lying(v, lie) for name, v in values.items()}
    call, _ = traced(SCATTER, **t)
    for name, theirs in zip(values, ("slot_mapping", "compress_lens", "compress_seq_offset"), strict=True):
        check(call[theirs], t[name], strides=(1,), dtype=torch.int32, same_memory=False)
        assert sent(call[theirs], torch.int32, 4) == values[name]


def test_indices_far_below_zero_stay_negative() -> None:
    """Neither a cast to int32 nor the kernel makes a slot of what was to be skipped."""
    index = slots(-(2**63), -(2**32), 6, dtype=torch.int64)
    call, _ = traced(SCATTER, **norm(slot_mapping=index))
    first, second, third = sent(call["slot_mapping"], torch.int64 if WIDE_SLOTS else torch.int32, 3)
    assert first < 0 and second < 0 and third == 6


@pytest.mark.parametrize("padding", ((4, 0), (0, 3), (2, 5)))
def test_padding_tokens_are_narrowed_away(padding: tuple[int, int]) -> None:
    """Key and value are described with as many tokens as there are slots; nothing is copied for it."""
    t = norm(padding=padding)
    call, made = traced(SCATTER, **t)
    check(call["key"], t["key"][:3])
    check(call["value"], t["value"][:3])
    assert device_operators(made) == {PHASE_TWO[SCATTER]}


def test_key_only() -> None:
    """Value and value_cache are tensors without dimensions, in key's dtype and with a live address."""
    t = norm() | {"value": None, "value_cache": None}
    call, _ = traced(SCATTER, **t)
    for name in ("key", "key_cache", "slot_mapping"):
        check(call[name], t[name])
    for name in ("value", "value_cache"):
        described = call[name]
        assert (described["dims"], described["strides"], described["dtype"]) == ([], [], "float16")
        assert (described["format"], described["offset"]) == (ND, 0)
        assert int(described["data"], 16) in (t["key"].data_ptr(), t["key_cache"].data_ptr())
    assert call["scatter_mode"] == "None"


def test_fused_rows_are_passed_as_nct() -> None:
    """Key and value out of one projection: dense descriptors, the stride of the rows beside them, no copy."""
    _, key, value = fused(3, (12, 32, 32))
    t = norm(key=key, value=value, key_cache=noise(5, 7, 2, 16).to(NPU))
    call, made = traced(SCATTER, **t)
    for name in ("key", "value"):
        check(call[name], t[name], strides=dense(3, 2, 16), storage=2 * 76 + 32)
    assert (call["scatter_mode"], call["strides"], call["offsets"]) == ("Nct", [76, 76], [0, 0])
    assert device_operators(made) == {PHASE_TWO[SCATTER]}


def test_fused_rows_key_only() -> None:
    _, key, _ = fused(3, (12, 32, 32))
    call, made = traced(SCATTER, key, None, noise(5, 7, 2, 16).to(NPU), None, slots(3, 1, 2))
    check(call["key"], key, strides=dense(3, 2, 16), storage=2 * 76 + 32)
    assert (call["scatter_mode"], call["strides"], call["offsets"]) == ("Nct", [76, 76], [0, 0])
    assert call["value"]["dims"] == []
    assert device_operators(made) == {PHASE_TWO[SCATTER]}


@pytest.mark.parametrize("which", ("unequal strides", "value dense", "key dense", "int8"))
def test_views_that_old_cann_gets_wrong(which: str) -> None:
    """Nct from 9.0.0 on; before that its kernel has one stride for both and none for int8, so inputs are made dense."""
    dtype = torch.int8 if which == "int8" else torch.float16
    _, key, value = fused(3, (12, 32, 64), dtype=dtype)
    if which == "unequal strides":
        value = fused(3, (20, 20, 64))[2]
    if which == "value dense":
        value = value.contiguous()
    if which == "key dense":
        key = key.contiguous()
    caches = [noise(5, 7, 2, t.size(2), dtype=dtype).to(NPU) for t in (key, value)]
    call, made = traced(SCATTER, key, value, *caches, slots(3, 1, 2))
    if cann_at_least(9, 0):
        expected = [t.stride(0) for t in (key, value)]
        assert (call["scatter_mode"], call["strides"]) == ("Nct", expected)
        for name, t in (("key", key), ("value", value)):
            check(call[name], t, strides=dense(*t.shape), storage=2 * t.stride(0) + t.size(1) * t.size(2))
        assert device_operators(made) == {PHASE_TWO[SCATTER]}
    else:
        assert (call["scatter_mode"], call["strides"]) == ("None", [1, 1])
        for name, t in (("key", key), ("value", value)):
            check(call[name], t, strides=dense(*t.shape), same_memory=t.is_contiguous())
        assert len(device_operators(made)) > 1


def test_strided_heads_are_made_dense() -> None:
    """No version can express them."""
    key = noise(2, 3, 48).to(NPU).transpose(0, 1)
    call, _ = traced(SCATTER, **norm(key=key))
    check(call["key"], key, strides=dense(3, 2, 48), same_memory=False)
    assert (call["scatter_mode"], call["strides"]) == ("None", [1, 1])


def test_explicit_nct() -> None:
    """The offsets of the caller are in the address; the strides are passed on."""
    memory = noise(400).to(NPU)
    key, value = memory[8 : 8 + 3 * 32].view(3, 2, 16), memory[200 : 200 + 3 * 32].view(3, 2, 16)
    t = norm(key=key, value=value, key_cache=noise(5, 7, 2, 16).to(NPU))
    call, made = traced(SCATTER, **t, scatter_mode="Nct", strides=[40, 40], offsets=[2, 5])
    check(call["key"], memory[10 : 10 + 3 * 32].view(3, 2, 16), storage=2 * 40 + 32)
    check(call["value"], memory[205 : 205 + 3 * 32].view(3, 2, 16), storage=2 * 40 + 32)
    assert (call["scatter_mode"], call["strides"], call["offsets"]) == ("Nct", [40, 40], [0, 0])
    assert device_operators(made) == {PHASE_TWO[SCATTER]}


def nz(rank: int) -> dict[str, Tensor]:
    """int8 keys beside float16 values."""
    key_cache = noise(5, 2, 3, 7, 32, dtype=torch.int8).to(NPU)
    value_cache = noise(5, 2, 1, 7, 16).to(NPU)
    return {
        "key": noise(3, 2, 96, dtype=torch.int8).to(NPU),
        "value": noise(4, 2, 16).to(NPU),
        "key_cache": key_cache if rank == 5 else key_cache.flatten(1, 2),
        "value_cache": value_cache if rank == 5 else value_cache.flatten(1, 2),
        "slot_mapping": slots(30, 0, 6),
    }


@pytest.mark.parametrize("rank", (4, 5))
def test_nz(rank: int) -> None:
    """Logical NZ caches are ordinary dense tensors with format ND, 4-D to every version; int8 beside float16."""
    t = nz(rank)
    call, made = traced(SCATTER, **t, cache_mode="PA_NZ")
    check(call["key"], t["key"])
    check(call["value"], t["value"][:3])
    check(call["key_cache"], t["key_cache"], shape=(5, 6, 7, 32), strides=dense(5, 6, 7, 32))
    check(call["value_cache"], t["value_cache"], shape=(5, 2, 7, 16), strides=dense(5, 2, 7, 16))
    assert (call["cache_mode"], call["scatter_mode"]) == ("PA_NZ", "None")
    assert device_operators(made) == {PHASE_TWO[SCATTER]}


def test_int64_slots_of_nz() -> None:
    """Its kernels read them in every version, so that they go down as they are."""
    t = nz(4) | {"slot_mapping": slots(30, -(2**63), 6, dtype=torch.int64)}
    call, made = traced(SCATTER, **t, cache_mode="PA_NZ")
    check(call["slot_mapping"], t["slot_mapping"])
    assert device_operators(made) == {PHASE_TWO[SCATTER]}


def compressed(mode: str) -> dict[str, Any]:
    """Two sequences of 4 and 3 tokens, two heads."""
    t: dict[str, Any] = {
        "key": noise(7, 2, 32, seed=1).to(NPU),
        "value": noise(7, 2, 32, seed=2).to(NPU),
        "key_cache": noise(6, 3, 1, 32, seed=3).to(NPU),
        "value_cache": noise(6, 3, 1, 32, seed=4).to(NPU),
        "slot_mapping": slots(0, 4, 8, 12),
        "compress_lens": slots(2, 1, 0, 2),
        "seq_lens": slots(4, 3),
        "scatter_mode": mode,
    }
    if mode != "Alibi":
        t["compress_seq_offsets"] = slots(1, -1, 1, 1)
    return t


@pytest.mark.parametrize("mode", ("Alibi", "Rope", "Omni"))
def test_compressed_modes(mode: str) -> None:
    """All eight tensors; Rope's index tensors as they are, since nothing has to be masked."""
    t = compressed(mode)
    call, made = traced(SCATTER, **t)
    for name in ("key", "value", "key_cache", "value_cache", "seq_lens"):
        check(call[name], t[name])
    for name, theirs in (
        ("slot_mapping", "slot_mapping"),
        ("compress_lens", "compress_lens"),
        ("compress_seq_offsets", "compress_seq_offset"),
    ):
        if name not in t:
            assert call[theirs] is None
            continue
        assert call[theirs]["dims"] == [4] and call[theirs]["dtype"] == "int32"
        if mode == "Rope":
            check(call[theirs], t[name])
    assert (call["cache_mode"], call["scatter_mode"]) == ("Norm", mode)
    assert (call["strides"], call["offsets"]) == ([1, 1], [0, 0])
    if mode == "Rope":
        assert device_operators(made) == {PHASE_TWO[SCATTER]}


@pytest.mark.parametrize("mode", ("Alibi", "Omni"))
def test_skipped_heads_are_sent_as_windows_that_write_nothing(mode: str) -> None:
    """The kernels do not know negative slots. What the masking leaves is inside the cache and inside the sequence."""
    t = compressed(mode)
    t["slot_mapping"] = slots(0, -1, 8, -(2**31))
    t["compress_lens"] = slots(2, 99, 0, -5)
    call, _ = traced(SCATTER, **t)

    def sent(name: str) -> list[int]:
        return torch.frombuffer(bytearray(control.peek(int(call[name]["data"], 16), 16)), dtype=torch.int32).tolist()

    windows = sent("compress_lens")
    assert sent("slot_mapping")[::2] == [0, 8] and min(sent("slot_mapping")) >= 0
    assert windows[::2] == [2, 0]
    assert windows[1::2] == ([0, 0] if mode == "Alibi" else [4, 3])
    if mode == "Omni":
        assert sent("compress_seq_offset") == [1, 0, 1, 0]


def test_caches_with_padded_blocks() -> None:
    """From 9.1.0 on a cache is described with its block stride; the inputs are dense beside it."""
    caches = noise(5, 2, 7, 2, 32).to(NPU)
    key = fused(3, (12, 64, 64))[1]
    t = {
        "key": key,
        "value": noise(3, 2, 32).to(NPU),
        "key_cache": caches[:, 0],
        "value_cache": caches[:, 1],
        "slot_mapping": slots(30, 0, 6),
    }
    if not cann_at_least(9, 1):
        with calls() as made, pytest.raises(NotImplementedError, match="key_cache must be contiguous"):
            operator(SCATTER)(**t)
        assert made == {}
        return
    call, _ = traced(SCATTER, **t)
    check(call["key_cache"], t["key_cache"])
    check(call["value_cache"], t["value_cache"])
    check(call["key"], key, strides=dense(3, 2, 32), same_memory=False)
    assert call["scatter_mode"] == "None"


# ---------------------------------------------------------------------------------------------------------------------
# paged_cache_load


def load(*, nz: bool = False, **keyword: Any) -> dict[str, Any]:
    """Two sequences of 5 and 2 tokens; key and value have sizes of their own."""
    caches = [(5, 6, 16, 16), (5, 2, 16, 16)] if nz else [(5, 3, 2, 48), (5, 3, 2, 16)]
    outputs = [(9, 96), (9, 32)] if nz else [(9, 2, 48), (9, 2, 16)]
    return {
        "key_cache": noise(*caches[0]).to(NPU),
        "value_cache": noise(*caches[1]).to(NPU),
        "block_tables": torch.tensor([[4, 0, 3], [1, 2, 0]], dtype=torch.int32).to(NPU),
        "context_lens": slots(5, 2),
        "key": noise(*outputs[0]).to(NPU),
        "value": noise(*outputs[1]).to(NPU),
        "cache_mode": "PA_NZ" if nz else "Norm",
    } | keyword


def check_flags(call: Traced, *, nz: bool, cumsum: bool, starts: bool) -> None:
    if ACLNN_LOAD:
        assert (call["cache_mode"], call["is_seq_lens_cumsum"]) == ("PA_NZ" if nz else "Norm", cumsum)
    else:
        assert (call["kv_cache_cfg"], call["cumsum"], call["has_seq_starts"]) == (0 if nz else 1, cumsum, starts)


def test_load_argument_order() -> None:
    """Every argument of the C function is what its name says; nothing is cast or copied."""
    t = load(seq_starts=slots(3, 7))
    call, made = traced(LOAD, **t)
    assert [name for name in call if name in LOAD_ORDER] == LOAD_ORDER
    for name in LOAD_ORDER:
        check(call[name], t[name])
    check_flags(call, nz=False, cumsum=False, starts=True)
    assert device_operators(made) == {PHASE_TWO[LOAD]}


def test_load_without_starts() -> None:
    """ATB must be given starts in ND, and gets zeros; its sibling takes none."""
    call, _ = traced(LOAD, **load())
    if ACLNN_LOAD:
        assert call["seq_starts"] is None
        return
    starts = call["seq_starts"]
    assert (starts["dims"], starts["dtype"], starts["format"]) == ([2], "int32", ND)
    assert control.peek(int(starts["data"], 16), 8) == bytes(8)
    check_flags(call, nz=False, cumsum=False, starts=True)


def test_load_cumsum() -> None:
    t = load(context_lens=slots(1, 6, 8), is_seq_lens_cumsum=True)
    call, _ = traced(LOAD, **t)
    check(call["context_lens"], t["context_lens"])
    check_flags(call, nz=False, cumsum=True, starts=True)


@pytest.mark.parametrize("form", ("4-D and 2-D", "5-D and 3-D"))
def test_load_nz(form: str) -> None:
    """FRACTAL_NZ for ATB, over a dense buffer; 4-D caches and 2-D outputs whatever the caller's view of them is."""
    t = load(nz=True)
    views = dict(t)
    if form.startswith("5-D"):
        views["key_cache"] = t["key_cache"].unflatten(1, (2, 3))
        views["value_cache"] = t["value_cache"].unflatten(1, (2, 1))
        views["key"] = t["key"].unflatten(1, (2, 48))
        views["value"] = t["value"].unflatten(1, (4, 8))
    call, made = traced(LOAD, **views)
    for name in LOAD_ORDER[:-1]:
        check(call[name], t[name], fmt=FRACTAL_NZ if name.endswith("_cache") and not ACLNN_LOAD else ND)
    assert call["seq_starts"] is None
    check_flags(call, nz=True, cumsum=False, starts=False)
    assert device_operators(made) == {PHASE_TWO[LOAD]}


def test_load_indices_become_dense_int32() -> None:
    """int64, strided or not on 32 bytes: all three index tensors are made what ATB reads."""
    tables = torch.tensor([[9, 9, 9], [4, 0, 3], [1, 2, 0]], dtype=torch.int32).to(NPU)[1:]  # begins at byte 12
    lens = torch.tensor([[5, 77], [2, 77]], dtype=torch.int32).to(NPU)[:, 0]
    starts = slots(3, 7, dtype=torch.int64)
    t = load(block_tables=tables, context_lens=lens, seq_starts=starts)
    call, _ = traced(LOAD, **t)
    for name in ("block_tables", "context_lens", "seq_starts"):
        shape = tuple(t[name].shape)
        check(call[name], t[name], strides=dense(*shape), dtype=torch.int32, same_memory=False)
        address = int(call[name]["data"], 16)
        assert address % 32 == 0
        sent = torch.frombuffer(bytearray(control.peek(address, 4 * t[name].numel())), dtype=torch.int32)
        assert sent.tolist() == t[name].flatten().tolist()


def test_load_into_parts_of_one_allocation() -> None:
    """Outputs that follow each other, caches as halves of one allocation."""
    outputs, caches = noise(2, 9, 2, 48).to(NPU), noise(2, 5, 3, 2, 48).to(NPU)
    t = load(key_cache=caches[1], value_cache=caches[0], key=outputs[0, 1:], value=outputs[1, 1:])
    call, _ = traced(LOAD, **t)
    for name in ("key_cache", "value_cache", "key", "value"):
        check(call[name], t[name])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.int8))
def test_dtypes_are_described(dtype: torch.dtype) -> None:
    """The numbers of the dtypes, in both operators."""
    number = {torch.bfloat16: 27, torch.int8: 2}[dtype]
    t = norm()
    call, _ = traced(SCATTER, **{k: v if v.dtype == torch.int32 else noise(*v.shape, dtype=dtype).to(NPU)
                                 for k, v in t.items()})  # fmt: skip
    assert [call[name]["dtype_code"] for name in ("key", "value", "key_cache", "value_cache")] == [number] * 4
    assert call["slot_mapping"]["dtype_code"] == 3
    t = load()
    floats = ("key_cache", "value_cache", "key", "value")
    call, _ = traced(LOAD, **t | {name: noise(*t[name].shape, dtype=dtype).to(NPU) for name in floats})
    assert [call[name]["dtype_code"] for name in floats] == [number] * 4
    assert [call[name]["dtype_code"] for name in ("block_tables", "context_lens")] == [3] * 2
