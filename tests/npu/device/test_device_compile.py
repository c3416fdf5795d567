"""The operators in graphs on a simulated NPU: torch.compile with no code generator, and torch_npu's captured graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from strategies import Call
from support import (
    LOAD,
    LOAD_PACKED,
    NPU,
    PHASE_TWO,
    SCATTER,
    SCATTER_PACKED,
    calls,
    launched,
    noise,
    operator,
)
from test_device_capabilities import load_call, scatter_call

import pacache_torch
from pacache_torch import reference

COMPILED = [
    (op, backend, dynamic) for op in (SCATTER, LOAD) for backend in ("eager", "aot_eager") for dynamic in (False, True)
]
COMPILED += [(SCATTER_PACKED, "aot_eager", True), (LOAD_PACKED, "aot_eager", True)]


def call_of(op: str) -> Call:
    """A call that every product and version takes."""
    plain = scatter_call("None", torch.float16) if op.startswith(SCATTER) else load_call("Norm", torch.float16)
    if not op.endswith("_packed"):
        return plain
    t = dict(plain.positional)
    halves = [t.pop(name) for name in ("key_cache", "value_cache")]
    kv_cache = torch.stack([half for half in halves if half is not None])
    order = ("key", "value", "kv_cache", "slot_mapping") if op == SCATTER_PACKED else ("kv_cache", *t)
    written = ("kv_cache",) if op == SCATTER_PACKED else plain.written
    positional = {name: kv_cache if name == "kv_cache" else t[name] for name in order}
    return Call(op, positional, {"kv_layout": "2BNHD"}, written)


def compiled(op: str, backend: str, dynamic: bool) -> Callable[..., None]:
    def function(*arguments: torch.Tensor, **keyword: object) -> None:
        operator(op)(*arguments, **keyword)

    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)


@pytest.mark.parametrize(("op", "backend", "dynamic"), COMPILED)
def test_compiled(op: str, backend: str, dynamic: bool) -> None:
    """The caller's caches and outputs are written, by one launch of the device operator."""
    call = call_of(op)
    expected, actual = call.clone(), call.clone(NPU)
    expected.run(getattr(reference, op))
    torch._dynamo.reset()
    function = compiled(op, backend, dynamic)
    with calls() as made:
        actual.run(function)
    assert launched(made) == {PHASE_TWO[op]: 1}
    assert actual.clone("cpu").differences(expected) == []


@pytest.mark.parametrize("op", (SCATTER_PACKED, LOAD))
def test_compiled_and_captured(op: str) -> None:
    """A compiled call is captured once and replayed on what is there then; neither waits for the device."""
    call = call_of(op)
    expected, actual = call.clone(), call.clone(NPU)
    torch._dynamo.reset()
    function = compiled(op, "eager", dynamic=False)
    pacache_torch.warmup(NPU)
    actual.run(function)  # compiles
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        actual.run(function)
    for name, t in actual.tensors().items():  # other contents, the same memory
        if t.dtype == torch.float16:
            new = noise(*t.shape, seed=91 + len(name))
            t.copy_(new)
            expected.tensors()[name].copy_(new)
    torch.npu.synchronize()
    expected.run(getattr(reference, op))
    with calls() as made:
        graph.replay()
    assert made["sync"] == 0
    assert actual.clone("cpu").differences(expected) == []


def test_graphed_callables() -> None:
    """torch_npu makes a graph of a store and a load; every call replays it on new inputs."""
    stored, loaded = call_of(SCATTER), call_of(LOAD)
    t: dict[str, Any] = stored.clone(NPU).tensors()
    r: dict[str, Any] = loaded.clone(NPU).tensors()

    def layer(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        caches = t["key_cache"], t["value_cache"]
        pacache_torch.scatter_pa_kv_cache(key, value, *caches, slots)
        pacache_torch.paged_cache_load(*caches, r["block_tables"], r["context_lens"], r["key"], r["value"])
        return r["key"]

    pacache_torch.warmup(NPU)
    inputs = t["key"], t["value"], t["slot_mapping"]
    graphed = torch.npu.make_graphed_callables(layer, inputs)
    host: dict[str, Any] = {name: x.cpu() for name, x in (r | t).items()}
    host |= {f"{name}_rows": r[name].cpu() for name in ("key", "value")}
    for seed in (5, 6):
        key, value = noise(*host["key"].shape, seed=seed), noise(*host["value"].shape, seed=seed + 10)
        found = graphed(key.to(NPU), value.to(NPU), inputs[2]).cpu()
        caches = host["key_cache"], host["value_cache"]
        reference.scatter_pa_kv_cache(key, value, *caches, host["slot_mapping"])
        rows = host["key_rows"], host["value_rows"]
        reference.paged_cache_load(*caches, host["block_tables"], host["context_lens"], *rows)
        assert torch.equal(found.view(torch.int16), rows[0].view(torch.int16))
        assert torch.equal(t["value_cache"].cpu().view(torch.int16), caches[1].view(torch.int16))
    del graphed  # its graph is held in a cycle
    gc.collect()
