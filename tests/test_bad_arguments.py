"""A bad call is refused alike by the kernels, the reference and the fake kernels, and nothing has been written.

The table of such calls stands in bad_arguments.py. For each of its rows: the exception's type, the same whole message
from every executor that can notice, and every storage bit for bit as before. The table itself is held to be complete:
every rule of _rules.py and reference.py refuses some row, and every argument of both schemas is named by one.
"""

from __future__ import annotations

import ast
import inspect
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from bad_arguments import BASES, LOAD, LOAD_PACKED, ROWS, WRITTEN, Arguments, Build, Row
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import pacache_torch
from pacache_torch import _rules, reference

BY_NAME = {row.name: row for row in ROWS}
EVERYONE = [row.name for row in ROWS if row.needs == "nothing"]
REAL_ONLY = [row.name for row in ROWS if row.needs != "nothing"]


def operator(op: str) -> Callable[..., None]:
    function: Callable[..., None] = getattr(torch.ops.pacache, op).default
    return function


def executor(name: str, op: str) -> Callable[..., None]:
    modules = {"reference": reference, "eager": pacache_torch}
    if name in modules:
        function: Callable[..., None] = getattr(modules[name], op)
        return function
    return operator(op)


def contents(arguments: Arguments) -> dict[str, bytes]:
    """Every byte of every storage."""
    found = {}
    for name, t in arguments.items():
        if isinstance(t, Tensor) and t.layout == torch.strided and t.device.type != "meta":
            memory = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
            found[name] = memory.cpu().numpy().tobytes()
    return found


def refuse(row: Row, function: Callable[..., None], arguments: Arguments, device: str) -> Exception:
    """Call and hold the exception to what the row says."""
    with pytest.raises(Exception) as caught:
        function(**arguments)
    error = caught.value
    assert (type(error), str(error)) == (row.error, row.message(device))
    return error


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("backend", ("cpu", "eager", "reference"))
def test_refused_and_nothing_written(backend: str, name: str) -> None:
    row = BY_NAME[name]
    arguments = row.build("cpu")
    before = contents(arguments)
    refuse(row, executor(backend, row.op), arguments, "cpu")
    assert contents(arguments) == before


@pytest.mark.parametrize("name", EVERYONE)
def test_fake_tensors_are_refused_alike(name: str) -> None:
    row = BY_NAME[name]
    with FakeTensorMode():
        refuse(row, operator(row.op), row.build("cpu"), "cpu")


@pytest.mark.parametrize("name", EVERYONE)
def test_meta_tensors_are_refused_alike(name: str) -> None:
    row = BY_NAME[name]
    refuse(row, operator(row.op), row.build("meta"), "meta")


NOT_SYMBOLIC = (" sparse", " elsewhere", " of absurd sizes")  # what symbols cannot say


@pytest.mark.parametrize("name", [name for name in EVERYONE if not name.endswith(NOT_SYMBOLIC)])
def test_symbolic_sizes_are_refused(name: str) -> None:
    """Under torch.compile with dynamic sizes: the same exception and argument; sizes may be printed as symbols."""
    row = BY_NAME[name]
    real = row.build("cpu")
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = {
        name: mode.from_tensor(t) if isinstance(t, Tensor) else t  # every size from 2 on becomes a symbol
        for name, t in real.items()
    }
    with mode, pytest.raises(row.error) as caught:
        operator(row.op)(**fake)
    assert str(caught.value).startswith(f"{row.op}: {row.argument}")


@pytest.mark.parametrize("name", REAL_ONLY)
def test_fake_tensors_leave_memory_and_values_to_the_kernel(name: str) -> None:
    """What a row says to need is needed: shapes, dtypes and modes alone are in order."""
    row = BY_NAME[name]
    operator(row.op)(**row.build("meta"))


@pytest.mark.parametrize("name", BASES)
def test_the_calls_that_are_spoiled_are_valid(name: str) -> None:
    """Both executors take them, agree, and write; so "nothing was written" above says something."""
    op, build = BASES[name]
    arguments, expected = build(Build("cpu")), build(Build("cpu"))
    for tensors in (arguments, expected):
        for written in WRITTEN[op]:
            if tensors[written] is not None:
                memory = torch.empty(0, dtype=torch.uint8).set_(tensors[written].untyped_storage())
                memory.fill_(0x5A)
    before = contents(arguments)
    operator(op)(**arguments)
    executor("reference", op)(**expected)
    after = contents(arguments)
    assert after == contents(expected)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {name for name in WRITTEN[op] if arguments[name] is not None}
    operator(op)(**build(Build("meta")))
    with FakeTensorMode():
        operator(op)(**build(Build("cpu")))


@pytest.mark.parametrize("backend", ("cpu", "reference"))
def test_as_many_windows_as_no_number_holds(backend: str) -> None:
    """2**32 sequences of 2**32 heads are 2**64 windows, which in 64 bits would be none."""
    heads = 2**32
    arguments = BASES["rope"][1](Build("cpu")) | {
        "key": torch.empty(1, dtype=torch.float16).as_strided((0, heads, 4), (0, 0, 1)),
        "value": torch.empty(1, dtype=torch.float16).as_strided((0, heads, 4), (0, 0, 1)),
        "seq_lens": torch.zeros(1, dtype=torch.int32).expand(2**32),
        "slot_mapping": torch.empty(0, dtype=torch.int32),
    }
    before = contents(arguments)
    with pytest.raises(ValueError, match=r"^scatter_pa_kv_cache: slot_mapping must be \[batch \* num_heads\] = "):
        executor(backend, "scatter_pa_kv_cache")(**arguments)
    assert contents(arguments) == before


# The table ------------------------------------------------------------------------------------------------------------


def test_the_table_is_a_table() -> None:
    assert len(ROWS) == len(BY_NAME) >= 60, "rows have names of their own"
    for op in WRITTEN:
        assert {row.needs for row in ROWS if row.op == op} == {"nothing", "memory", "values"}


def test_messages_name_argument_rule_and_value() -> None:
    for row in ROWS:
        schema = operator(row.op)._schema  # type: ignore[attr-defined]
        assert row.argument in {argument.name for argument in schema.arguments}, row.name
        assert " must " in row.text and ", got " in row.text, row.name
        assert row.message("cpu").startswith(f"{row.op}: {row.argument}")


def test_a_message_belongs_to_one_mistake() -> None:
    """Rows with one text spoil the same argument: nobody looks at the wrong tensor."""
    culprits: dict[str, set[str]] = {}
    for row in ROWS:
        culprits.setdefault(row.message("cpu"), set()).add(row.argument)
    assert all(len(arguments) == 1 for arguments in culprits.values())
    # And what was spoiled is what is named: the argument, or the one that it was held against.
    for row in ROWS:
        b = Build("meta")
        changed = set(row.change(b, BASES[row.base][1](b)))
        named = {word.strip("[],0123456789:'") for word in row.text.replace("[", " [").split()}
        if "num_blocks" in named:
            named |= {"key_cache", "value_cache", "kv_cache"}
        if "sequence" in named:  # its rows are its length
            named.add("context_lens")
        if changed in ({"cache_mode"}, {"kv_layout"}):
            continue  # it says what every shape means
        assert changed & named, f"{row.name}: {changed} is spoiled, none of it is in: {row.text}"


def test_every_argument_is_named() -> None:
    for op in WRITTEN:
        schema = operator(op)._schema  # type: ignore[attr-defined]
        named = {row.argument for row in ROWS if row.op == op}
        if op == LOAD_PACKED:
            named.add("is_seq_lens_cumsum")  # both of its values go with everything
        assert {a.name for a in schema.arguments} == named


def rules(module: ModuleType) -> dict[int, tuple[int, str]]:
    """Where a module states a rule: the last line of every call of fail() or require(), by its first line."""
    tree = ast.parse(inspect.getsource(module))
    return {
        node.lineno: (node.end_lineno or node.lineno, ast.unparse(node)[:100])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("fail", "require")
    }


@pytest.mark.parametrize("module", (_rules, reference), ids=lambda m: m.__name__)
def test_every_rule_refuses_a_row(module: ModuleType) -> None:
    unused = rules(module)
    assert len(unused) > 10
    for row in ROWS:
        with pytest.raises(row.error) as caught:
            executor("reference", row.op)(**row.build("cpu"))
        for frame in traceback.extract_tb(caught.value.__traceback__):
            if frame.filename == module.__file__ and frame.lineno is not None:
                for first, (last, _) in list(unused.items()):
                    if first <= frame.lineno <= last:
                        del unused[first]
    assert not unused, f"no row is refused by: {unused}"


# Beside the table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guard", (torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("name", ("rope", "load_starts"))
def test_tensors_that_require_grad_are_taken_without_grad_mode(name: str, guard: Callable[[], Any]) -> None:
    op, build = BASES[name]
    for backend in ("cpu", "reference"):
        arguments, plain = build(Build("cpu")), build(Build("cpu"))
        executor(backend, op)(**plain)
        for argument in ("key", "value", "key_cache", "value_cache"):
            arguments[argument] = arguments[argument].detach().requires_grad_()
        with guard():
            executor(backend, op)(**arguments)
        assert contents(arguments) == contents(plain)


def test_requires_grad_of_integers_cannot_be_asked_for() -> None:
    """The rule is about floats only because torch itself refuses the others."""
    with pytest.raises(RuntimeError, match="floating point"):
        torch.zeros(3, dtype=torch.int8).requires_grad_()


@pytest.mark.parametrize("backend", ("cpu", "reference"))
def test_values_are_looked_at_last(backend: str) -> None:
    """No rule on values is tried, and so no index is read, before all others hold."""
    rows = [row for row in ROWS if row.base == "norm" and row.needs != "values"]
    assert len(rows) > 30
    for first in rows:
        b = Build("cpu")
        arguments = BASES["norm"][1](b)
        arguments["slot_mapping"] = b.index([99, 0, 0, 0, 0])
        spoiled = arguments | first.change(b, arguments)
        refuse(first, executor(backend, first.op), spoiled, "cpu")


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta")
def test_sparse_tensors_of_other_layouts() -> None:
    caches = BASES["load"][1](Build("cpu"))
    for layout in ("csr", "csc"):
        tables = getattr(caches["block_tables"].contiguous(), f"to_sparse_{layout}")()
        for backend in ("cpu", "reference"):
            with pytest.raises(ValueError) as caught:
                executor(backend, LOAD)(**caches | {"block_tables": tables})
            assert str(caught.value) == (
                f"paged_cache_load: block_tables must be a strided tensor, got layout sparse_{layout}"
            )


# The wrappers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_NAME)
def test_wrappers_add_nothing(name: str) -> None:
    """pacache_torch.<op> refuses what the operator refuses, with its words."""
    row = BY_NAME[name]
    refuse(row, getattr(pacache_torch, row.op), row.build("cpu"), "cpu")


@pytest.mark.parametrize("name", ("load", "load_bhnc"))
def test_outputs_of_a_load_come_together(name: str) -> None:
    op, build = BASES[name]
    load, arguments = getattr(pacache_torch, op), build(Build("cpu"))
    for output, other in (("key", "value"), ("value", "key")):
        with pytest.raises(ValueError) as caught:
            load(**arguments | {output: None})
        assert str(caught.value) == f"{op}: key and value must be given together, got only {other}"
    with pytest.raises(ValueError) as caught:
        load(**arguments, num_tokens=3)
    assert str(caught.value) == f"{op}: num_tokens must be None when key and value are given, got 3"
    with pytest.raises(ValueError) as caught:
        load(**arguments | {"key": None, "value": None}, num_tokens=-1)
    assert str(caught.value) == f"{op}: num_tokens must not be negative, got -1"


def test_a_load_without_outputs_of_a_bad_cache_has_the_operators_words() -> None:
    arguments = BASES["load_bhnc"][1](Build("cpu")) | {"key": None, "value": None}
    for changed, text in (
        ({"kv_layout": "HND"}, "kv_layout must be '2BNHD', 'B2NHD', 'BHNC' or 'BNHC', got 'HND'"),
        ({"kv_layout": "2BNHD"}, "kv_cache must be [2, num_blocks, block_size, num_heads, head_size] with num_heads 0"),
        ({"kv_cache": torch.zeros(5, 2, 3, 13)}, "kv_cache must be [num_blocks, num_heads, block_size, C] with"),
    ):
        with pytest.raises(ValueError) as caught:
            pacache_torch.paged_cache_load_packed(**arguments | changed)
        assert str(caught.value).startswith(f"{LOAD_PACKED}: {text}")
