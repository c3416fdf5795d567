"""torch_npu's names on a simulated NPU: its wheel has the schemas on record, its operators give what ours give."""

from __future__ import annotations

import sys

import pytest
import torch
import torch_npu
from strategies import Call
from support import LOAD, NPU, PHASE_TWO, SCATTER, calls, launched
from torch_npu_calls import ATB, NAMES, RECORD, covered, expected, makes_outputs, named, names, only, outcome
from torch_npu_calls import calls as named_calls

CALLS = named_calls(dense=True)
# The device operators behind torch_npu's own.
THEIRS = {
    "npu_scatter_pa_kv_cache": "aclnnScatterPaKvCache",
    "npu_scatter_pa_kv_cache_functional": "aclnnScatterPaKvCache",
    "_npu_reshape_and_cache": "AtbReshapeAndCache",
    "_npu_reshape_and_cache_siso": "AtbReshapeAndCache",
    "npu_gather_pa_kv_cache": "aclnnGatherPaKvCache",
    "npu_gather_pa_kv_cache_functional": "aclnnGatherPaKvCache",
    ATB: "AtbPagedCacheLoad",
}


def run(module: object, call: Call) -> dict[str, torch.Tensor]:
    """Results of a clone on the device, on the host."""
    on_device = call.clone(NPU)
    result = named(module, call.op)(*on_device.positional.values(), **on_device.keyword)
    found = {name: tensor.cpu() for name, tensor in outcome(on_device, result).items()}
    if makes_outputs(call):
        given = call.tensors()
        assert only(on_device.clone("cpu"), given).differences(only(call, given)) == [], "not to be written"
    return found


def test_the_wheel_has_the_schemas_on_record() -> None:
    """Every overload of every name, and no other."""
    assert torch_npu.__version__.split("+")[0] == RECORD["torch_npu"]
    found = {
        str(schema)
        for name in NAMES
        for space in ("npu", "atb")
        for schema in torch._C._jit_get_schemas_for_operator(f"{space}::{name.rsplit('.')[-1]}")
    }
    assert found == set(RECORD["schemas"])


@pytest.mark.parametrize("case", CALLS)
def test_results_are_those_of_torch_npu(case: str) -> None:
    """Ours by one launch of the device operator; torch_npu's own on the same inputs; and the reference."""
    call = CALLS[case]
    op = SCATTER if "key_cache" in call.written else LOAD
    with calls() as made:
        ours = run(names, call)
    assert launched(made) == {PHASE_TWO[op]: 1}
    wanted = expected(call).tensors()
    for name, tensor in ours.items():
        assert torch.equal(covered(call, tensor), covered(call, wanted[name])), name
    starts = call.keyword.get("seq_starts", call.keyword.get("seq_offset"))
    if call.op == ATB and starts is None:
        return  # ATB refuses this from torch_npu: it wants starts
    with calls() as made:
        theirs = run(torch_npu, call)
    assert made[THEIRS[call.op]] == 1
    for name, tensor in ours.items():
        assert torch.equal(covered(call, tensor), covered(call, theirs[name])), name


def test_the_real_torch_npu_is_never_shadowed() -> None:
    with names.provide() as module:
        assert module is None
        assert sys.modules["torch_npu"] is torch_npu
        assert torch_npu.npu_scatter_pa_kv_cache is not names.npu_scatter_pa_kv_cache
    assert sys.modules["torch_npu"] is torch_npu
