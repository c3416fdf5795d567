"""Every guard of the binding, shown to matter: what the simulated CANN makes of a call without it, and of ours.

Each test sends the same tensors twice. Once through CANN's C API as a binding without the guard would send them: the
simulated device, which has the faults that the specification lists for a version, then computes something wrong,
commits a violation or answers with a code. And once through the operator, which must give what the reference gives, or
refuse.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_npu
from cann_sim import control, raw
from strategies import Call
from support import CANN, LOAD, NPU, PHASE_TWO, SCATTER, calls, cann_at_least, launched, noise, numbers, operator
from torch import Tensor

from pacache_torch import reference

CODES = {torch.float16: raw.FLOAT16, torch.bfloat16: raw.BFLOAT16, torch.int8: raw.INT8,
         torch.int32: raw.INT32, torch.int64: raw.INT64}  # fmt: skip
OLD = not cann_at_least(9, 0)
# A failure of tiling: 9.1.0's hand-written first phase has another code for it.
TILING = 561103 if cann_at_least(9, 1) else 561002


class Unguarded:
    """CANN's C API on torch's own memory, given what the caller gave."""

    def __init__(self) -> None:
        torch.npu.synchronize()
        self.device = raw.Device(atb=True)
        self.context = self.device.atb_context()

    def close(self) -> None:
        assert self.device.destroy_atb_context(self.context) == 0
        self.device.close()

    def describe(self, t: Tensor | None, fmt: int = raw.ND) -> raw.Tensor | None:
        if t is None:
            return None
        extent = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        return self.device.describe(
            t.data_ptr(), t.shape, CODES[t.dtype], strides=t.stride(), fmt=fmt, storage=[extent]
        )

    def scatter(
        self,
        key: Tensor,
        value: Tensor | None,
        key_cache: Tensor,
        value_cache: Tensor | None,
        slot_mapping: Tensor,
        *,
        compress_lens: Tensor | None = None,
        compress_seq_offsets: Tensor | None = None,
        seq_lens: Tensor | None = None,
        cache_mode: str = "Norm",
        scatter_mode: str = "None",
        strides: tuple[int, int] = (1, 1),
        offsets: tuple[int, int] = (0, 0),
    ) -> int:
        """Call aclnnScatterPaKvCache with these and nothing else; waits, and returns the code."""
        arrays = [self.device.int_array(strides), self.device.int_array(offsets)]
        code = self.device.scatter(
            *[self.describe(t) for t in (key, value, key_cache, value_cache, slot_mapping)],
            compress_lens=self.describe(compress_lens),
            compress_offsets=self.describe(compress_seq_offsets),
            seq_lens=self.describe(seq_lens),
            cache_mode=cache_mode,
            scatter_mode=scatter_mode,
            strides=arrays[0],
            offsets=arrays[1],
        )
        self.device.sync()
        for array in arrays:
            self.device.nn.aclDestroyIntArray(ctypes.c_void_p(array))
        return code

    def load(self, t: dict[str, Any], *, cfg: int | None = None, has_starts: bool | None = None,
             cache_format: int | None = None) -> int:  # fmt: skip
        """Call AtbPagedCacheLoad with these and nothing else; waits, and returns the status."""
        nz = t.get("cache_mode") == "PA_NZ"
        fmt = (raw.FRACTAL_NZ if nz else raw.ND) if cache_format is None else cache_format
        names = ("key_cache", "value_cache", "block_tables", "context_lens", "key", "value", "seq_starts")
        tensors = [self.describe(t.get(name), fmt if name.endswith("_cache") else raw.ND) for name in names]
        starts = t.get("seq_starts") is not None if has_starts is None else has_starts
        status, _, operation = self.device.load_setup(
            tensors, (0 if nz else 1) if cfg is None else cfg, t.get("is_seq_lens_cumsum", False), starts, self.context
        )
        if status == 0:
            status = self.device.load_execute(operation, self.context)
            self.device.sync()
        if operation:
            assert self.device.destroy_atb_operation(operation) == 0
        return status


@pytest.fixture()
def cann() -> Iterator[Unguarded]:
    unguarded = Unguarded()
    yield unguarded
    unguarded.close()


def happened(*kinds: str) -> None:
    """Violations of exactly these kinds; forget them."""
    torch.npu.synchronize()
    assert {v["kind"] for v in control.violations()} == set(kinds)
    control.clear()


def npu(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(NPU)


def scatter_call(**keyword: Any) -> Call:
    """A call of scatter_pa_kv_cache on the host."""
    names = ("key", "value", "key_cache", "value_cache", "slot_mapping")
    positional = {name: keyword.pop(name) for name in names}
    keyword = {"cache_mode": "Norm", "scatter_mode": "None"} | keyword
    written = tuple(name for name in ("key_cache", "value_cache") if positional[name] is not None)
    return Call(SCATTER, positional, keyword, written)


def load_call(**keyword: Any) -> Call:
    """A call of paged_cache_load on the host."""
    names = ("key_cache", "value_cache", "block_tables", "context_lens", "key", "value")
    return Call(LOAD, {name: keyword.pop(name) for name in names}, {"cache_mode": "Norm"} | keyword, ("key", "value"))


def reference_of(call: Call) -> Call:
    expected = call.clone()
    expected.run(getattr(reference, call.op))
    return expected


def is_right(call: Call, on_device: Call) -> bool:
    return on_device.clone("cpu").differences(reference_of(call)) == []


def ours_is_right(call: Call) -> None:
    """The operator gives what the reference gives, on the device."""
    mine = call.clone(NPU)
    with calls() as made:
        mine.run(operator(call.op))
    assert launched(made) == {PHASE_TWO[call.op]: 1}
    assert control.violations() == []
    assert mine.clone("cpu").differences(reference_of(call)) == []


def ours_refuses(call: Call, error: type[Exception], text: str) -> None:
    """The operator refuses before CANN is called."""
    mine = call.clone(NPU)
    with calls() as made, pytest.raises(error, match=text):
        mine.run(operator(call.op))
    assert made == {}


def unguarded_scatter(cann: Unguarded, call: Call, **changes: Any) -> tuple[int, Call]:
    """Send a call as it is, but for changes; the code, and the call on the device after it."""
    sent = call.clone(NPU)
    torch.npu.synchronize()
    return cann.scatter(**(sent.positional | sent.keyword | changes)), sent


def norm(tokens: int = 3, size: int = 32, dtype: torch.dtype = torch.float16, **changes: Any) -> Call:
    t: dict[str, Any] = {
        "key": noise(tokens, 2, size, dtype=dtype, seed=1),
        "value": noise(tokens, 2, size, dtype=dtype, seed=2),
        "key_cache": noise(5, 7, 2, size, dtype=dtype, seed=3),
        "value_cache": noise(5, 7, 2, size, dtype=dtype, seed=4),
        "slot_mapping": torch.tensor([33, 4, 19, 0, 8][:tokens], dtype=torch.int32),
    }
    return scatter_call(**t | changes)


def compressed(mode: str, index: torch.dtype = torch.int32, size: int = 32, dtype: torch.dtype = torch.float16,
               **changes: Any) -> Call:  # fmt: skip
    # Numbers and no bits: the payload of a NaN that is a mean is left open.
    t: dict[str, Any] = {
        "key": numbers(7, 2, size, dtype=dtype, seed=1),
        "value": numbers(7, 2, size, dtype=dtype, seed=2),
        "key_cache": noise(6, 3, 1, size, dtype=dtype, seed=3),
        "value_cache": noise(6, 3, 1, size, dtype=dtype, seed=4),
        "slot_mapping": torch.tensor([1, 5, 9, 13], dtype=index),
        "compress_lens": torch.tensor([2, 1, 1, 2], dtype=index),
        "seq_lens": torch.tensor([4, 3], dtype=index),
        "scatter_mode": mode,
    }
    if mode != "Alibi":
        t["compress_seq_offsets"] = torch.tensor([1, -1, 1, 1], dtype=index)
    return scatter_call(**t | changes)


# ---------------------------------------------------------------------------------------------------------------------
# Index tensors


def test_int64_slots(cann: Unguarded) -> None:
    """8.5.0 reads them as int32 words: s0, 0, s1, 0, ..."""
    call = norm(slot_mapping=torch.tensor([33, 4, 19]))
    code, sent = unguarded_scatter(cann, call)
    assert code == 0
    assert is_right(call, sent) == (not OLD)
    assert control.counters().get("int64_read_as_int32", 0) == (2 if OLD else 0)
    control.clear()
    ours_is_right(call)


@pytest.mark.parametrize("mode", ("Alibi", "Rope", "Omni"))
def test_int64_indices_in_a_compressed_mode(cann: Unguarded, mode: str) -> None:
    """Every version reads them as int32 words."""
    call = compressed(mode, torch.int64)
    code, sent = unguarded_scatter(cann, call)
    assert code == 0
    assert not is_right(call, sent)
    assert control.counters()["int64_read_as_int32"] > 0
    control.clear()
    ours_is_right(call)


@pytest.mark.parametrize("mode", ("Alibi", "Omni"))
def test_negative_slots_in_a_compressed_mode(cann: Unguarded, mode: str) -> None:
    """A negative slot is a huge unsigned one to the kernels; it must never get there."""
    call = compressed(mode, slot_mapping=torch.tensor([1, -1, 9, 13], dtype=torch.int32))
    code, _ = unguarded_scatter(cann, call)
    assert code == 0
    happened("out_of_bounds")
    ours_is_right(call)


def test_slots_below_int32(cann: Unguarded) -> None:
    """A cast keeps the lower half, which of -2^63 is slot 0."""
    call = norm(slot_mapping=torch.tensor([33, -(2**63), 19]))
    code, sent = unguarded_scatter(cann, call, slot_mapping=call.positional["slot_mapping"].to(NPU).int())
    assert code == 0 and not is_right(call, sent)
    ours_is_right(call)


def test_strided_slots(cann: Unguarded) -> None:
    """Index tensors with gaps are read as if they had none."""
    call = norm(slot_mapping=torch.tensor([33, 6, 4, 6, 19, 6], dtype=torch.int32)[::2])
    code, sent = unguarded_scatter(cann, call)
    if code == 0 and not is_right(call, sent):
        happened("non_contiguous")
    else:  # 9.1.0 makes them dense in secret
        assert cann_at_least(9, 1) and control.counters()["hidden_dense_copy"] > 0
        control.clear()
    ours_is_right(call)


def test_no_tokens(cann: Unguarded) -> None:
    """8.5.0 refuses them, and what 9.0.0 does is not known."""
    call = norm(tokens=0)
    code, _ = unguarded_scatter(cann, call)
    assert code == {"8.5.0": TILING}.get(CANN, 0)
    happened(*(["undefined"] if CANN == "9.0.0" else []))
    mine = call.clone(NPU)
    with calls() as made:
        mine.run(operator(SCATTER))
    assert made == {} and is_right(call, mine)


def test_more_tokens_than_slots_in_the_cache(cann: Unguarded) -> None:
    """A compressed call may have fewer rows to write than tokens, and is refused by every version."""
    call = compressed(
        "Alibi",
        compress_lens=torch.tensor([1, 1, 0, 0], dtype=torch.int32),
        slot_mapping=torch.tensor([0, 1, 2, 2], dtype=torch.int32),
        key_cache=noise(2, 3, 1, 32),
        value_cache=noise(2, 3, 1, 32),
    )
    code, _ = unguarded_scatter(cann, call)
    assert code == TILING
    ours_refuses(call, NotImplementedError, "key_cache must have as many slots as key has tokens")


# ---------------------------------------------------------------------------------------------------------------------
# Key and value


@pytest.mark.parametrize("empty", ("key", "value"))
def test_only_one_of_key_and_value_has_elements(empty: str) -> None:
    """The other one would be left unwritten without a word."""
    call = norm(**{empty: noise(3, 2, 0), f"{empty}_cache": noise(5, 7, 2, 0)})
    ours_refuses(call, NotImplementedError, f"{empty} must have elements as .* got a head_size of 0")


def test_padding_tokens(cann: Unguarded) -> None:
    """torch_npu's own operator hands padded key and value on, and the device reads slots behind the last one."""
    call = norm(slot_mapping=torch.tensor([33, 4], dtype=torch.int32))
    sent = call.clone(NPU)
    torch_npu.npu_scatter_pa_kv_cache(*sent.positional.values(), cache_mode="Norm")
    torch.npu.synchronize()
    assert {v["kind"] for v in control.violations()} == {"out_of_bounds"}
    control.clear()
    ours_is_right(call)


def nct(key_stride: int, value_stride: int, dtype: torch.dtype = torch.float16) -> Call:
    memory = noise(2, 6 * max(key_stride, value_stride), dtype=dtype)
    key = memory[0].as_strided((3, 2, 16), (key_stride, 16, 1), 0)
    value = memory[1].as_strided((3, 2, 16), (value_stride, 16, 1), memory.size(1))
    caches = [noise(5, 7, 2, 16, dtype=dtype, seed=seed) for seed in (3, 4)]
    return norm(key=key, value=value, key_cache=caches[0], value_cache=caches[1], size=16, dtype=dtype)


def dense(t: Tensor) -> Tensor:
    """The same address, described as if it were dense, as Nct wants it."""
    return t.as_strided(t.shape, (t.size(1) * t.size(2), t.size(2), 1))


def test_unequal_nct_strides(cann: Unguarded) -> None:
    """8.5.0 uses the stride of key for value too."""
    call = nct(40, 48)
    sent = call.clone(NPU)
    torch.npu.synchronize()
    views = {name: dense(sent.positional[name]) for name in ("key", "value")}
    code = cann.scatter(**(sent.positional | views | {"scatter_mode": "Nct", "strides": (40, 48)}))
    assert code == 0
    assert is_right(call, sent) == (not OLD)
    ours_is_right(call)


def test_int8_nct(cann: Unguarded) -> None:
    """8.5.0 has no kernel for it, which shows only at the launch."""
    call = nct(64, 64, torch.int8)
    sent = call.clone(NPU)
    torch.npu.synchronize()
    views = {name: dense(sent.positional[name]) for name in ("key", "value")}
    code = cann.scatter(**(sent.positional | views | {"scatter_mode": "Nct", "strides": (64, 64)}))
    assert code == (561003 if OLD else 0)
    ours_is_right(call)


def test_strided_views_without_nct(cann: Unguarded) -> None:
    """A strided key with scatter_mode None is read as if it were dense."""
    call = nct(40, 40)
    code, sent = unguarded_scatter(cann, call)
    assert code == 0 and not is_right(call, sent)
    happened("non_contiguous")
    ours_is_right(call)


def test_strided_views_with_nct(cann: Unguarded) -> None:
    """With Nct a view must be described as dense: 9.1.0 makes a strided one dense and then applies the stride."""
    call = nct(40, 40)
    code, sent = unguarded_scatter(cann, call, scatter_mode="Nct", strides=(40, 40))
    assert code == 0
    if cann_at_least(9, 1):
        assert not is_right(call, sent)
        assert control.counters()["hidden_dense_copy"] > 0 or control.violations()
    control.clear()
    ours_is_right(call)


def test_unaligned_tokens_key_only(cann: Unguarded) -> None:
    """8.5.0 moves whole lines of 32 bytes and loses the rest of a token."""
    call = norm(size=20, value=None, value_cache=None)
    sent = call.clone(NPU)
    torch.npu.synchronize()
    nothing = sent.positional["key"].reshape(-1)[0]
    code = cann.scatter(**(sent.positional | {"value": nothing, "value_cache": nothing}))
    assert code == 0
    assert is_right(call, sent) == (not OLD)
    if OLD:
        ours_refuses(call, NotImplementedError, "must have tokens of a multiple of 32 bytes")
    else:
        ours_is_right(call)


def test_key_only_without_tensors_for_value(cann: Unguarded) -> None:
    """Null is not how CANN says that there is no value."""
    call = norm(value=None, value_cache=None)
    code, _ = unguarded_scatter(cann, call)
    assert code == (161001 if not cann_at_least(9, 1) else code) and (code != 0 or control.violations())
    control.clear()
    ours_is_right(call)


def test_head_sizes_in_a_compressed_mode(cann: Unguarded) -> None:
    """The kernels move lines of 32 bytes and nothing of what is left."""
    call = compressed("Alibi", size=20)
    code, sent = unguarded_scatter(cann, call)
    assert code == 0 and not is_right(call, sent)
    happened("undefined")
    ours_refuses(call, NotImplementedError, "key must have a head_size that is a multiple of 32")


def test_head_sizes_that_differ_in_a_compressed_mode(cann: Unguarded) -> None:
    """The kernels use the head size of key for value too."""
    call = compressed("Omni", value=noise(7, 2, 64, seed=2), value_cache=noise(6, 3, 1, 64, seed=4))
    code, _ = unguarded_scatter(cann, call)
    assert code == 0
    happened("undefined")
    ours_refuses(call, ValueError, "value must be")


def test_int8_omni(cann: Unguarded) -> None:
    """No version has a kernel; 8.5.0 says so only at the launch."""
    call = compressed("Omni", dtype=torch.int8)
    code, _ = unguarded_scatter(cann, call)
    assert code == (561003 if OLD else TILING)
    ours_refuses(
        call, NotImplementedError, r"key must be one of float16, bfloat16 in scenario 5 \(scatter_mode 'Omni'\)"
    )


def test_int8_value_beside_a_float_key(cann: Unguarded) -> None:
    """Only the other way round is registered."""
    call = scatter_call(
        key=noise(3, 1, 32),
        value=noise(3, 1, 32, dtype=torch.int8),
        key_cache=noise(5, 2, 7, 16),
        value_cache=noise(5, 1, 7, 32, dtype=torch.int8),
        slot_mapping=torch.tensor([33, 4, 19], dtype=torch.int32),
        cache_mode="PA_NZ",
    )
    code, _ = unguarded_scatter(cann, call)
    assert code in (161002, TILING)
    ours_refuses(call, NotImplementedError, "value may be int8 only when key is")


# ---------------------------------------------------------------------------------------------------------------------
# Caches and modes


def test_strided_caches(cann: Unguarded) -> None:
    """A cache with gaps between its tokens is written as if it had none."""
    wide = [noise(5, 7, 3, 32, seed=seed) for seed in (3, 4)]
    call = norm(key_cache=wide[0][:, :, :2], value_cache=wide[1][:, :, :2])
    code, sent = unguarded_scatter(cann, call)
    assert code == 0 and not is_right(call, sent)
    happened("non_contiguous")
    ours_refuses(call, NotImplementedError, "key_cache must be contiguous in scenario 2")


def test_padded_blocks(cann: Unguarded) -> None:
    """Caches interleaved block by block: 9.1.0 takes them, older versions write them as if dense."""
    caches = noise(5, 2, 7, 2, 32)
    call = norm(key_cache=caches[:, 0], value_cache=caches[:, 1])
    code, sent = unguarded_scatter(cann, call)
    assert code == 0
    assert is_right(call, sent) == cann_at_least(9, 1)
    if cann_at_least(9, 1):
        ours_is_right(call)
        return
    happened("non_contiguous")
    ours_refuses(call, NotImplementedError, "key_cache must be contiguous in scenario 2")


def test_five_dimensions(cann: Unguarded) -> None:
    """8.5.0 knows no 5-D NZ cache."""
    call = scatter_call(
        key=noise(3, 2, 48),
        value=noise(3, 2, 16),
        key_cache=noise(5, 2, 3, 7, 16),
        value_cache=noise(5, 2, 1, 7, 16),
        slot_mapping=torch.tensor([33, 4, 19], dtype=torch.int32),
        cache_mode="PA_NZ",
    )
    code, sent = unguarded_scatter(cann, call)
    assert code == (561002 if OLD else 0)
    assert is_right(call, sent) == (not OLD)
    ours_is_right(call)


def test_nz_blocks_of_65537(cann: Unguarded) -> None:
    """The distance between two lines of a token is a 16-bit number."""
    call = scatter_call(
        key=noise(1, 1, 32),
        value=noise(1, 1, 32),
        key_cache=torch.zeros(1, 2, 65537, 16, dtype=torch.float16),
        value_cache=torch.zeros(1, 2, 65537, 16, dtype=torch.float16),
        slot_mapping=torch.tensor([3], dtype=torch.int32),
        cache_mode="PA_NZ",
    )
    code, sent = unguarded_scatter(cann, call)
    assert code == (0 if OLD else TILING)
    if OLD:  # the second line lies right behind the first one, and not 65537 lines further
        keys = call.positional["key"], sent.positional["key_cache"].cpu()
        assert torch.equal(keys[1][0, 0, 3:5].flatten().view(torch.int16), keys[0].flatten().view(torch.int16))
        control.clear()
    ours_refuses(call, ValueError, "key_cache must have a block_size of at most 65535")


def test_nhsd_before_there_was_one(cann: Unguarded) -> None:
    """8.5.0 takes any mode that it does not know for None, and writes another layout."""
    call = norm(scatter_mode="NHSD", key_cache=noise(5, 2, 7, 32, seed=3), value_cache=noise(5, 2, 7, 32, seed=4))
    code, sent = unguarded_scatter(cann, call)
    assert code == (0 if OLD or cann_at_least(9, 1) else TILING)
    if cann_at_least(9, 1):
        ours_is_right(call)
        return
    assert not is_right(call, sent)
    ours_refuses(call, NotImplementedError, r"scenario 7 \(scatter_mode 'NHSD'\) is not available on")


def test_negative_slots_of_rope_and_nhsd_are_a_precondition(cann: Unguarded) -> None:
    """What PACACHE_CHECK=1 is for: Rope would write the mean even of an empty window."""
    code, _ = unguarded_scatter(cann, compressed("Rope", slot_mapping=npu([1, -1, 9, 13]).cpu()))
    assert code == 0
    happened("out_of_bounds")


# ---------------------------------------------------------------------------------------------------------------------
# paged_cache_load


def load(**changes: Any) -> Call:
    t: dict[str, Any] = {
        "key_cache": noise(5, 3, 2, 48, seed=1),
        "value_cache": noise(5, 3, 2, 16, seed=2),
        "block_tables": torch.tensor([[4, 0, 3], [1, 2, 0]], dtype=torch.int32),
        "context_lens": torch.tensor([5, 2], dtype=torch.int32),
        "key": noise(9, 2, 48, seed=3),
        "value": noise(9, 2, 16, seed=4),
    }
    return load_call(**t | changes)


def load_nz(**changes: Any) -> Call:
    return load(
        **{
            "key_cache": noise(5, 6, 16, 16, seed=1),
            "value_cache": noise(5, 2, 16, 16, seed=2),
            "key": noise(9, 96, seed=3),
            "value": noise(9, 32, seed=4),
            "cache_mode": "PA_NZ",
        }
        | changes
    )


ZEROS = torch.zeros(2, dtype=torch.int32)


def unguarded_load(
    cann: Unguarded, call: Call, *, changes: dict[str, Any] | None = None, **how: Any
) -> tuple[int, Call]:
    """Send a call as it is, but for changes; the status, and the call on the device after it."""
    sent = call.clone(NPU)
    more = {name: t.to(NPU) if isinstance(t, Tensor) else t for name, t in (changes or {}).items()}
    torch.npu.synchronize()
    return cann.load(sent.positional | sent.keyword | more, **how), sent


def test_load_without_starts(cann: Unguarded) -> None:
    """ATB answers 5 (ERROR_INVALID_IN_TENSOR_NUM) in ND."""
    assert unguarded_load(cann, load())[0] == 5
    ours_is_right(load())


@pytest.mark.parametrize("name", ("block_tables", "context_lens", "seq_starts"))
def test_load_int64_indices(cann: Unguarded, name: str) -> None:
    """ATB answers 13 (ERROR_INVALID_TENSOR_INI_MATCH)."""
    call = load(seq_starts=ZEROS)
    wide = (call.positional | call.keyword)[name].long()
    spoiled = load(**{"seq_starts": ZEROS} | {name: wide})
    assert unguarded_load(cann, spoiled)[0] == 13
    ours_is_right(spoiled)


def test_load_nothing(cann: Unguarded) -> None:
    """ATB refuses tensors without elements with 9 (ERROR_INVALID_TENSOR_SIZE)."""
    for call in (
        load(seq_starts=ZEROS, key=noise(0, 2, 48), value=noise(0, 2, 16), context_lens=ZEROS),
        load(seq_starts=ZEROS, block_tables=torch.zeros(2, 0, dtype=torch.int32), context_lens=ZEROS),
        load(seq_starts=ZEROS[:0], block_tables=torch.zeros(0, 3, dtype=torch.int32), context_lens=ZEROS[:0]),
    ):
        assert unguarded_load(cann, call)[0] == 9
        mine = call.clone(NPU)
        with calls() as made:
            mine.run(operator(LOAD))
        assert made == {} and is_right(call, mine)


@pytest.mark.parametrize("name", ("key_cache", "value_cache", "key", "value"))
def test_load_strided(cann: Unguarded, name: str) -> None:
    """ATB does not look at strides: what is between the elements is read, or written, with them."""
    call = load(seq_starts=ZEROS)
    t = call.positional[name]
    wide = torch.cat((t, t), -1)[..., : t.size(-1)]
    spoiled = load(**{"seq_starts": ZEROS, name: wide})
    status, sent = unguarded_load(cann, spoiled)
    assert status == 0 and not is_right(spoiled, sent)
    happened("non_contiguous")
    ours_refuses(spoiled, NotImplementedError, rf"{name} must be contiguous in cache_mode 'Norm' on")


def test_load_unaligned_tokens(cann: Unguarded) -> None:
    """ATB answers 8 (ERROR_INVALID_TENSOR_DIM)."""
    call = load(seq_starts=ZEROS, key_cache=noise(5, 3, 2, 20), key=noise(9, 2, 20))
    assert unguarded_load(cann, call)[0] == 8
    ours_refuses(call, NotImplementedError, "key_cache must have tokens of a multiple of 32 bytes")


def test_load_unaligned_addresses(cann: Unguarded) -> None:
    """A cache, an output and index tensors that do not begin on 32 bytes."""
    output = noise(9 * 96 + 4)[4:].view(9, 2, 48)
    call = load(seq_starts=ZEROS, key=output)
    assert unguarded_load(cann, call)[0] == 0
    happened("misaligned")
    ours_refuses(call, NotImplementedError, "key_cache and its output must begin at a multiple of 32 bytes")
    tables = torch.tensor([[0, 0, 0], [4, 0, 3], [1, 2, 0]], dtype=torch.int32)[1:]
    lens = torch.tensor([0, 5, 2], dtype=torch.int32)[1:]
    call = load(seq_starts=torch.zeros(3, dtype=torch.int32)[1:], block_tables=tables, context_lens=lens)
    assert unguarded_load(cann, call)[0] == 0
    happened("misaligned")
    ours_is_right(call)


def test_load_nz_format(cann: Unguarded) -> None:
    """Caches of NZ must say that they are FRACTAL_NZ, which no tensor of torch's does by itself: 13 else."""
    assert unguarded_load(cann, load_nz(), cache_format=raw.ND)[0] == 13
    ours_is_right(load_nz())


def test_load_nz_shapes(cann: Unguarded) -> None:
    """ATB takes 2-D outputs and 4-D caches only."""
    call = load_nz(key=noise(9, 2, 48, seed=3), value=noise(9, 2, 16, seed=4))
    assert unguarded_load(cann, call)[0] in (8, 16)
    ours_is_right(call)
    call = load_nz(key_cache=noise(5, 2, 3, 16, 16, seed=1), value_cache=noise(5, 2, 1, 16, 16, seed=2))
    assert unguarded_load(cann, call)[0] in (8, 16)
    ours_is_right(call)


def test_load_nz_block_size(cann: Unguarded) -> None:
    """A multiple of 16, or 8."""
    call = load_nz(key_cache=noise(5, 6, 3, 16), value_cache=noise(5, 2, 3, 16))
    assert unguarded_load(cann, call)[0] == 8
    ours_refuses(call, NotImplementedError, "key_cache must have a block_size that is a multiple of 16")


def test_load_nz_with_starts_or_cumsum(cann: Unguarded) -> None:
    """1 (ERROR_INVALID_PARAM), and the same words as on the CPU from us."""
    assert unguarded_load(cann, load_nz(seq_starts=ZEROS), has_starts=True)[0] == 1
    ours_refuses(load_nz(seq_starts=ZEROS), ValueError, "seq_starts must be None with cache_mode 'PA_NZ'")


@pytest.mark.parametrize("nz", (False, True))
def test_load_dtypes_that_differ(cann: Unguarded, nz: bool) -> None:
    """Not in ND, and in NZ only int8 keys with values of 16 bits."""
    if nz:
        call = load_nz(value_cache=noise(5, 2, 16, 32, dtype=torch.int8), value=noise(9, 64, dtype=torch.int8))
        assert unguarded_load(cann, call)[0] == 13
        ours_refuses(call, NotImplementedError, "value_cache may differ in dtype only from an int8 key")
        call = load_nz(key_cache=noise(5, 3, 16, 32, dtype=torch.int8), key=noise(9, 96, dtype=torch.int8))
        assert unguarded_load(cann, call)[0] == 0
        ours_is_right(call)
    else:
        call = load(seq_starts=ZEROS, value_cache=noise(5, 3, 2, 16, dtype=torch.bfloat16),
                    value=noise(9, 2, 16, dtype=torch.bfloat16))  # fmt: skip
        assert unguarded_load(cann, call)[0] == 13
        ours_refuses(call, TypeError, "value_cache must have dtype float16 as key_cache")


def test_load_nz_with_a_wide_table(cann: Unguarded) -> None:
    """More columns than fit on the chip; nothing reports it."""
    columns = 10224
    tables = torch.zeros(1, columns, dtype=torch.int32)
    call = load_nz(block_tables=tables, context_lens=torch.tensor([5], dtype=torch.int32))
    assert unguarded_load(cann, call)[0] == 0
    happened("undefined")
    ours_refuses(call, NotImplementedError, "block_tables must have at most 10223 columns")
    ours_is_right(load_nz(block_tables=tables[:, 1:], context_lens=torch.tensor([5], dtype=torch.int32)))
