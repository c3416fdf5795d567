"""torch_npu's names do what torch_npu documents, with its signatures, and stand in for it where it is missing.

Signatures are compared with the schemas that torch_npu 2.13.0 registers (a record; the wheel itself is asked on the
simulated CANN), results with the reference: whole storages, strided inputs, int64 indices.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # its disk cache replays code for an old schema

import pytest
import torch
from strategies import Call
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch_npu_calls import ATB, NAMES, calls, covered, expected, makes_outputs, named, names, only, outcome, schemas

from pacache_torch import _library, reference

CALLS = calls(dense=False)


def test_the_names_are_those_that_are_listed() -> None:
    assert set(NAMES) == {name for name in names.__all__ if name not in ("atb", "provide")} | {ATB}
    assert {call.op for call in CALLS.values()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_signature_is_the_schema(name: str) -> None:
    """Names, order, what is by keyword only, defaults, number of results; outputs of an overload default to None."""
    plain, *overloads = schemas(name)
    wanted = {
        a.name: (a.kwarg_only, a.default_value if a.has_default_value() else inspect._empty) for a in plain.arguments
    }
    for overload in overloads:
        wanted |= {a.name: (True, None) for a in overload.arguments if a.name not in wanted}
    signature = inspect.signature(named(names, name))
    found = {p.name: (p.kind is p.KEYWORD_ONLY, p.default) for p in signature.parameters.values()}
    assert list(found.items()) == list(wanted.items())
    results = {0: "None", 2: "tuple[Tensor, Tensor]"}[len(plain.returns)]
    assert signature.return_annotation == results


@pytest.mark.parametrize("case", CALLS)
def test_results_are_those_of_the_reference(case: str) -> None:
    call = CALLS[case]
    wanted, ours = expected(call), call.clone()
    result = named(names, call.op)(*ours.positional.values(), **ours.keyword)
    for name, tensor in outcome(ours, result).items():
        assert torch.equal(covered(call, tensor), covered(call, wanted.tensors()[name])), name
    written = {a.name for a in schemas(call.op)[-1].arguments if a.alias_info and a.alias_info.is_write}
    if makes_outputs(call):
        written = set()
    assert only(ours, written).differences(only(wanted, written)) == []
    assert len(only(ours, written).differences(only(call, written))) == len(written), "nothing was written"
    others = set(call.tensors()) - written
    assert only(ours, others).differences(only(call, others)) == [], "not to be written"
    if result is not None and not makes_outputs(call):
        assert result[0] is ours.keyword["key"] and result[1] is ours.keyword["value"]


def test_a_4d_key_is_scenario_3_and_a_3d_key_has_no_window() -> None:
    """Padded sequences with a window per head; for packed tokens torch_npu calls the three arguments optional."""
    key, value = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8)
    slots = torch.tensor([[0, 7, 14], [21, 28, 35]])
    window = dict(compress_lens=torch.tensor([[2, 3, 1], [0, 2, 4]]), seq_lens=torch.tensor([5, 4]))
    for offsets in (None, torch.tensor([1, 0, -1, 2, 1, 0])):
        mine, theirs = torch.zeros(2, 6, 7, 1, 8).unbind(), torch.zeros(2, 6, 7, 1, 8).unbind()
        names.npu_scatter_pa_kv_cache(
            key, value, *mine, slots, **window, compress_seq_offsets=offsets, cache_mode="Norm"
        )
        reference.scatter_pa_kv_cache(key, value, *theirs, slots, **window, compress_seq_offsets=offsets)
        assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1]) and mine[0].any()

    tokens, cache = torch.randn(3, 2, 8), torch.zeros(4, 5, 2, 8)
    names.npu_scatter_pa_kv_cache(
        tokens, tokens, cache, cache.clone(), torch.tensor([0, 6, 19]), **window, cache_mode=None
    )
    assert torch.equal(cache.flatten(0, 1)[[0, 6, 19]], tokens)


def test_one_output_alone_is_refused() -> None:
    call = CALLS[f"{ATB} lengths out"].clone()
    for one in ("key", "value"):
        keyword = {name: t for name, t in call.keyword.items() if name not in ("key", "value")} | {
            one: call.keyword[one]
        }
        with pytest.raises(ValueError, match=f"key and value must be given together, got only {one}"):
            names.atb.npu_paged_cache_load(*call.positional.values(), **keyword)


def test_a_bad_call_is_refused_and_nothing_is_written() -> None:
    """As by the operators underneath, in their words."""
    call = CALLS["_npu_reshape_and_cache"].clone()
    call.positional["slot_indices"] = torch.tensor([0, 35, 2])
    before = call.clone()
    with pytest.raises(IndexError, match=r"slot_mapping\[1\] must be less than num_blocks \* block_size = 35, got 35"):
        names._npu_reshape_and_cache(**call.positional)
    assert call.differences(before) == []
    with pytest.raises(ValueError, match="cache_mode must be 'Norm' or 'PA_NZ', got 'NZ'"):
        names.npu_scatter_pa_kv_cache(*call.positional.values(), cache_mode="NZ")


# ---------------------------------------------------------------------------------------------------------------------
# Without data


def on_meta(argument: Any) -> Any:
    return argument.to("meta") if isinstance(argument, torch.Tensor) else argument


def without_data(call: Call, convert: Any) -> Any:
    positional = [convert(argument) for argument in call.positional.values()]
    keyword = {name: convert(argument) for name, argument in call.keyword.items()}
    return named(names, call.op)(*positional, **keyword)


@pytest.mark.parametrize("kind", ("meta", "fake"))
def test_meta_and_fake_tensors(kind: str) -> None:
    """Shapes come out right, and rules hold."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)
    convert = on_meta if kind == "meta" else lambda a: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a
    for call in CALLS.values():
        if makes_outputs(call) and call.op == ATB:
            continue  # the number of rows is data: below
        result = without_data(call, convert)
        if result is not None:
            shapes = [outcome_of.shape for outcome_of in expected(call).tensors().values()]
            assert all(tensor.shape in shapes for tensor in result)
        if makes_outputs(call):
            assert all(tensor.device.type == ("meta" if kind == "meta" else "cpu") for tensor in result)
    short = CALLS["npu_scatter_pa_kv_cache Norm"].clone()
    short.positional["key"] = short.positional["key"][:, :2]
    with pytest.raises(ValueError, match="value must be"):
        without_data(short, convert)


def test_a_number_of_rows_that_only_the_data_tell() -> None:
    """Meta tensors have no answer; a compiled graph may read it. torch_npu has neither meta nor fake kernel here."""
    call = CALLS[f"{ATB} lengths"]
    with pytest.raises(RuntimeError, match="meta"):
        without_data(call, on_meta)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = torch.compile(names.atb.npu_paged_cache_load, fullgraph=True, backend="aot_eager")
        result = run(*call.positional.values(), **call.keyword)
    for tensor, wanted in zip(
        result, names.atb.npu_paged_cache_load(*call.positional.values(), **call.keyword), strict=True
    ):
        assert torch.equal(tensor.view(torch.int16), wanted.view(torch.int16))


# ---------------------------------------------------------------------------------------------------------------------
# In graphs

# In place, with outputs given; several at once in one graph.
IN_PLACE = (
    "npu_scatter_pa_kv_cache default",
    "npu_scatter_pa_kv_cache None",
    "_npu_reshape_and_cache",
    "_npu_reshape_and_cache_siso",
    "npu_gather_pa_kv_cache lengths starts",
    f"{ATB} cumsum out",
)
FUNCTIONAL = ("npu_scatter_pa_kv_cache_functional default", "npu_gather_pa_kv_cache_functional lengths starts")


def run_all(cases: dict[str, Call]) -> dict[str, Any]:
    return {case: named(names, call.op)(*call.positional.values(), **call.keyword) for case, call in cases.items()}


def allocations(code: list[str]) -> list[str]:
    """Lines of generated code that make a tensor of any shape: Inductor flattens the clones that it makes."""
    return [line for text in code for line in text.splitlines() if re.search(r"= empty_strided\w*\(", line)]


@pytest.mark.parametrize(("cases", "dynamic"), ((IN_PLACE, False), (IN_PLACE, True), (FUNCTIONAL, False)))
def test_compiled(cases: tuple[str, ...], dynamic: bool) -> None:
    """As in eager mode. What writes in place allocates nothing; the functional forms do, and that is seen."""
    mine, theirs = ({case: calls(dense=True)[case].clone() for case in cases} for _ in "12")
    wanted = run_all(theirs)
    torch._dynamo.reset()
    result, code = run_and_get_code(torch.compile(run_all, fullgraph=True, dynamic=dynamic), mine)
    for case in cases:
        assert mine[case].differences(theirs[case]) == [], case
        for tensor, other in zip(result[case] or (), wanted[case] or (), strict=True):
            assert torch.equal(tensor.view(torch.int16), other.view(torch.int16)), case
    assert len(allocations(code)) == (4 if cases is FUNCTIONAL else 0)


# ---------------------------------------------------------------------------------------------------------------------
# Standing in for torch_npu

MODEL = """
import torch
import torch_npu
import torch_npu.atb
from torch_npu import npu_gather_pa_kv_cache


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("key_cache", "value_cache"):
            self.register_buffer(name, torch.zeros(5, 7, 3, 16))

    def forward(self, key, value, slots, tables, lens):
        torch_npu._npu_reshape_and_cache(
            key=key * 2, value=value, key_cache=self.key_cache, value_cache=self.value_cache, slot_indices=slots
        )
        rows = [torch.zeros(4, 3, 16) for _ in range(4)]
        npu_gather_pa_kv_cache(self.key_cache, self.value_cache, tables, lens, *rows[:2])
        torch_npu.atb.npu_paged_cache_load(
            self.key_cache, self.value_cache, tables, lens, key=rows[2], value=rows[3]
        )
        return sum(rows)
"""


@pytest.fixture()
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Model code as written for an NPU, imported under the stand-in, which is gone again."""
    (tmp_path / "model_for_npu.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    with names.provide():
        module = importlib.import_module("model_for_npu")
    del sys.modules["model_for_npu"]
    return module


@pytest.mark.parametrize("compiled", (False, True))
def test_model_code_runs_unchanged(model: ModuleType, compiled: bool) -> None:
    key, value = torch.randn(4, 3, 16), torch.randn(4, 3, 16)
    slots, tables, lens = torch.tensor([7, 8, 28, 29]), torch.tensor([[1, 0], [4, 0]]), torch.tensor([2, 2])
    layer = model.Layer()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    torch.testing.assert_close(run(key, value, slots, tables, lens), 2 * (key * 2 + value))
    assert torch.equal(layer.key_cache.flatten(0, 1)[slots], key * 2)


def test_the_stand_in_has_just_these_names() -> None:
    with names.provide() as module:
        import torch_npu

        assert torch_npu is module
        assert {name for name in vars(torch_npu) if not name.startswith("__")} == set(NAMES) - {ATB} | {"atb"}
        assert {name for name in vars(torch_npu.atb) if not name.startswith("__")} == {"npu_paged_cache_load"}
        for name in NAMES:
            assert named(torch_npu, name) is named(names, name)
        assert not hasattr(torch_npu, "npu_rms_norm")
        with pytest.raises(
            AttributeError, match="torch_npu has no npu_rms_norm: it stands in for a torch_npu that is n"
        ):
            torch_npu.npu_rms_norm  # noqa: B018


def test_afterwards_everything_is_as_before() -> None:
    """Also after an error, and inside another one; and meanwhile nothing here takes it for a torch_npu."""
    before = dict(sys.modules)
    with pytest.raises(ZeroDivisionError), names.provide() as outer:
        with names.provide() as inner:
            assert inner is outer
        assert importlib.import_module("torch_npu.atb") is names.atb
        assert not _library.torch_npu_installed()
        assert str(_library.status()[1].cause).startswith("torch_npu is not installed")
        1 / 0  # noqa: B018
    assert {name for name in sys.modules if name.startswith("torch_npu")} == {
        name for name in before if name.startswith("torch_npu")
    }
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torch_npu")
    assert importlib.util.find_spec("torch_npu") is None


def test_a_torch_npu_that_is_there_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed or in sys.modules already: it is what an import gives."""
    already = ModuleType("torch_npu")
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "torch_npu", already)
        with names.provide() as module:
            assert module is None
            assert importlib.import_module("torch_npu") is already
        assert sys.modules["torch_npu"] is already
    with monkeypatch.context() as context:
        (tmp_path / "torch_npu").mkdir()
        (tmp_path / "torch_npu" / "__init__.py").write_text("real = True\n")
        context.syspath_prepend(tmp_path)
        with names.provide() as module:
            assert module is None
            assert importlib.import_module("torch_npu").real
        del sys.modules["torch_npu"]


def test_the_examples_hold() -> None:
    result = doctest.testmod(names, extraglobs={"torch": torch})
    assert result.attempted and not result.failed
