"""The operators on a simulated NPU give what the reference gives, bit for bit and nowhere else, and run on the device.

Calls are those of the CPU tests. What the product cannot do must be refused before CANN is called; which calls that
are is said a second time here, from the specification (support.refusal).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from cann_sim import control
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from strategies import LOAD_FORMS, PACKED_FORMS, SCATTER_FORMS, SMALL, Call, Sizes, any_calls
from support import (
    CANN,
    COPIES,
    INDEX_DTYPES,
    LOAD,
    LOAD_PACKED,
    MEANS,
    NPU,
    PHASE_TWO,
    PRODUCT,
    SCATTER,
    SCATTER_PACKED,
    SOC,
    calls,
    cann_at_least,
    does_nothing,
    launched,
    operator,
    refusal,
    with_dense_caches,
)
from vectors import Vector, load_vectors, scatter_vectors

from pacache_torch import reference

FORMS = [(SCATTER, form) for form in SCATTER_FORMS] + [(LOAD, form) for form in LOAD_FORMS]
PACKED = [(op, form) for op in (SCATTER_PACKED, LOAD_PACKED) for form in PACKED_FORMS]
IDS = ["-".join(form) for form in FORMS]
COMMON = settings(
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

# Sizes that the device takes, still coprime where it leaves a choice.
ALIGNED = replace(SMALL, head_sizes=(32, 96), heads=(1, 2, 3), block_sizes=(1, 2, 3, 5, 8))
SIZES: dict[str, Sizes] = {
    "norm": SMALL,
    "norm_key_only": replace(SMALL, head_sizes=(32, 96) if not cann_at_least(9, 0) else SMALL.head_sizes),
    "nct": SMALL,
    "nct_key_only": replace(SMALL, head_sizes=(32, 96) if not cann_at_least(9, 0) else SMALL.head_sizes),
    "nz": SMALL,
    "nhsd": ALIGNED,
    "alibi": ALIGNED,
    "rope": ALIGNED,
    "omni": ALIGNED,
    "alibi_padded": SMALL,
    "rope_padded": SMALL,
}
LOAD_SIZES: dict[str, Sizes] = {
    "norm": replace(SMALL, head_sizes=(32, 64, 96)),
    "norm_cumsum": replace(SMALL, head_sizes=(32, 64, 96)),
    "nz": replace(SMALL, block_sizes=(16, 48), tokens=35),
}
LARGE = Sizes(tokens=131, batch=5, heads=(3, 7), head_sizes=(64, 160), units=(3, 5), block_sizes=(16, 48))


def check(call: Call) -> str:
    """Hold the operator to the reference or to the refusal; says which it was."""
    why = refusal(call)
    actual = call.clone(NPU)
    if why is not None:
        with calls() as made, pytest.raises(NotImplementedError) as caught:
            actual.run(operator(call.op))
        assert made == {}, f"refused ({why}), and yet called"
        text = str(caught.value)
        assert text.startswith(f"{call.op}: ") and f"{PRODUCT} ({SOC}) with CANN {CANN}" in text
        assert ("scenario" if call.op.startswith(SCATTER) else "cache_mode") in text
        assert actual.clone("cpu").differences(call) == []
        return why
    expected = call.clone()
    expected.run(getattr(reference, call.op))
    with calls() as made:
        actual.run(operator(call.op))
    assert launched(made) == ({} if does_nothing(call) else {PHASE_TWO[call.op]: 1})
    assert control.violations() == []
    assert made["hidden_dense_copy"] == made["int64_read_as_int32"] == 0
    assert actual.clone("cpu").differences(expected) == []
    return "nothing to do" if does_nothing(call) else "launched"


def sent(call: Call) -> bool:
    """Negative slots of Rope and NHSD are never sent: the device does not skip them (a documented precondition)."""
    slots = call.positional.get("slot_mapping")
    unskipped = call.op == SCATTER and call.keyword["scatter_mode"] in ("Rope", "NHSD")
    return not (unskipped and slots is not None and bool((slots < 0).any()))


def drawn(op: str, form: str, sizes: Sizes, dtypes: tuple[torch.dtype, ...] = COPIES) -> st.SearchStrategy[Call]:
    return any_calls(op, form, dtypes=dtypes, sizes=sizes, duplicates=False).filter(sent)


def drawn_to_run(op: str, form: str, sizes: Sizes) -> st.SearchStrategy[Call]:
    """Calls in dtypes that run; key and value may differ in NZ, where most pairs do not."""
    if form == "nz":
        pairs = st.sampled_from([(torch.float16,), (torch.bfloat16,), (torch.int8,), COPIES])
        return pairs.flatmap(lambda dtypes: drawn(op, form, sizes, dtypes))
    return drawn(op, form, sizes, MEANS if form in ("rope", "omni") else COPIES)


def never(op: str, form: str) -> bool:
    """Can no call of this form run here?"""
    return form.endswith("_padded") or (form == "nhsd" and not cann_at_least(9, 1))


@pytest.mark.parametrize(("op", "form"), FORMS, ids=IDS)
def test_device_sizes(op: str, form: str) -> None:
    """Sizes and dense caches that the device takes; key, value and index tensors lie as they like."""
    sizes = LOAD_SIZES[form] if op == LOAD else SIZES[form]
    seen: Counter[str] = Counter()

    @settings(COMMON, max_examples=35)
    @given(drawn_to_run(op, form, sizes).filter(lambda call: not does_nothing(call)), st.booleans())
    def examples(call: Call, together: bool) -> None:
        found = check(with_dense_caches(call, together=together))
        event(found)
        seen[found] += 1

    examples()
    assert seen["launched"] == 0 if never(op, form) else seen["launched"] >= 10, seen


@pytest.mark.parametrize(("op", "form"), PACKED, ids=["-".join(form) for form in PACKED])
def test_packed_device_sizes(op: str, form: str) -> None:
    """One cache for keys and values: it runs where both halves are dense for the device, and else is refused."""
    seen: Counter[str] = Counter()

    @settings(COMMON, max_examples=6)
    @given(drawn(op, form, LOAD_SIZES["norm"]).filter(lambda call: not does_nothing(call)))
    def examples(call: Call) -> None:
        for together in (False, True):
            seen[check(with_dense_caches(call, together=together))] += 1

    examples()
    if form in ("BHNC", "BNHC"):  # a single slot is dense in any layout
        assert seen["strided cache"] + seen["strided tensor"] >= 2, seen
    else:
        assert seen["launched"] >= (6 if form == "2BNHD" else 3), seen


@pytest.mark.parametrize("op", (SCATTER_PACKED, LOAD_PACKED))
def test_a_packed_cache_that_the_device_does_not_take(op: str) -> None:
    """The sentence names the argument that was given, its layout and what was found."""
    kv_cache = torch.zeros(5, 2, 4, 64, dtype=torch.float16, device=NPU)
    rows = [torch.zeros(3, 2, 32, dtype=torch.float16, device=NPU) for _ in range(2)]
    index = torch.tensor([2, 3, 9], dtype=torch.int32, device=NPU)
    with calls() as made, pytest.raises(NotImplementedError) as caught:
        if op == SCATTER_PACKED:
            operator(op)(*rows, kv_cache, index, kv_layout="BHNC")
        else:
            operator(op)(kv_cache, index[None, :1], index[1:2], *rows, kv_layout="BHNC")
    assert made == {}
    what = "scenario 2 (scatter_mode 'None')" if op == SCATTER_PACKED else "cache_mode 'Norm'"
    assert str(caught.value) == (
        f"{op}: kv_cache must hold a contiguous key cache and a contiguous value cache in {what} on {PRODUCT} ({SOC}) "
        f"with CANN {CANN} (the device reads and writes them as such, and they are never copied), got kv_layout 'BHNC' "
        "with caches of shape [5, 4, 2, 32] and strides [512, 64, 256, 1]"
    )


@pytest.mark.parametrize(("op", "form"), FORMS, ids=IDS)
def test_any_call(op: str, form: str) -> None:
    """Any call of the CPU tests, in any memory and of any size: it runs or it is refused, and nothing in between."""

    @settings(COMMON, max_examples=25)
    @given(drawn(op, form, SMALL), st.sampled_from((False, True, None)))
    def examples(call: Call, together: bool | None) -> None:
        event(check(call if together is None else with_dense_caches(call, together=together)))

    examples()


@pytest.mark.parametrize(("op", "form"), PACKED, ids=["-".join(form) for form in PACKED])
def test_any_packed_call(op: str, form: str) -> None:
    """As test_any_call."""

    @settings(COMMON, max_examples=3)
    @given(drawn(op, form, SMALL), st.sampled_from((False, True, None)))
    def examples(call: Call, together: bool | None) -> None:
        event(check(call if together is None else with_dense_caches(call, together=together)))

    examples()


@pytest.mark.parametrize(("op", "form"), [form for form in FORMS if not never(*form)], ids=str)
def test_large(op: str, form: str) -> None:
    """More tokens and blocks than anything that is handled at once."""
    seen: Counter[str] = Counter()

    @settings(COMMON, max_examples=4)
    @given(drawn_to_run(op, form, LARGE).filter(lambda call: not does_nothing(call)))
    def examples(call: Call) -> None:
        seen[check(with_dense_caches(call))] += 1

    examples()
    assert seen["launched"] >= 1, seen


# ---------------------------------------------------------------------------------------------------------------------
# The worked examples


def as_call(op: str, vector: Vector) -> Call:
    names = (
        ("key", "value", "key_cache", "value_cache", "slot_mapping")
        if op == SCATTER
        else ("key_cache", "value_cache", "block_tables", "context_lens", "key", "value")
    )
    return Call(op, dict(zip(names, vector.positional, strict=True)), vector.keyword, tuple(vector.written))


def vectors_of(op: str, index_dtype: torch.dtype) -> list[Vector]:
    return scatter_vectors(index_dtype) if op == SCATTER else load_vectors(index_dtype)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("op", (SCATTER, LOAD))
def test_vectors(op: str, index_dtype: torch.dtype) -> None:
    """Every worked example that the device can run, against its own result; the others are refused."""
    seen: Counter[str] = Counter()
    for vector in vectors_of(op, index_dtype):
        call = as_call(op, vector)
        if not sent(call):
            continue
        found = check(call)
        seen[found] += 1
        if found in ("launched", "nothing to do"):
            on_device = call.clone(NPU)
            on_device.run(operator(op))
            for name, expected in vector.expected.items():
                assert torch.equal(on_device.tensors()[name].cpu(), expected), f"{vector.name}: {name}"
    assert seen["launched"] >= 5, seen
