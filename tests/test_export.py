"""Exported, the operators are still there and still write in place, in this process and in another.

A module that holds its caches as buffers and stores before it loads, with a dynamic number of tokens, as an exported
program: decomposed, saved, loaded by a new process. Every call is compared with eager mode; a second call reads what
the first has left in the buffers.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from graphs import BLOCKS, CACHE, PACKED_SHAPES, contexts, noise, split, tokens
from torch import Tensor, nn

import pacache_torch

pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning")]

COUNTS = (29, 17, 40)
LOADED = 64  # rows that the model reads back, whatever it is given


class Model(nn.Module):
    """One layer with caches of its own, and one with a packed cache."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("key_cache", noise(*CACHE, seed=3))
        self.register_buffer("value_cache", noise(*CACHE, seed=4))
        self.register_buffer("kv_cache", noise(*PACKED_SHAPES["BHNC"](BLOCKS), seed=5))

    def forward(self, qkv: Tensor, slots: Tensor, tables: Tensor, lens: Tensor) -> tuple[Tensor, ...]:
        """Store, and load everything that the tables name."""
        key, value = split(qkv)
        pacache_torch.scatter_pa_kv_cache(key, value, self.key_cache, self.value_cache, slots)
        pacache_torch.scatter_pa_kv_cache_packed(value, key, self.kv_cache, slots, kv_layout="BHNC")
        rows = pacache_torch.paged_cache_load(self.key_cache, self.value_cache, tables, lens, num_tokens=LOADED)
        packed = pacache_torch.paged_cache_load_packed(self.kv_cache, tables, lens, kv_layout="BHNC", num_tokens=LOADED)
        return (*rows, *packed)


def inputs(count: int, seed: int) -> tuple[Tensor, ...]:
    return (*tokens(count, seed=seed), *contexts(LOADED))


CALLS = [inputs(count, seed) for seed, count in enumerate(COUNTS)]
BUFFERS = ("key_cache", "value_cache", "kv_cache")


def run_eagerly() -> tuple[list[tuple[Tensor, ...]], dict[str, Tensor]]:
    """What each call returns, one after the other, and the buffers at the end."""
    model = Model()
    return [model(*call) for call in CALLS], dict(model.named_buffers())


@pytest.fixture(scope="module")
def eager() -> tuple[list[tuple[Tensor, ...]], dict[str, Tensor]]:
    return run_eagerly()


def export() -> torch.export.ExportedProgram:
    """The model with a dynamic number of tokens."""
    count = torch.export.Dim("tokens", min=2, max=512)
    shapes = ({0: count}, {0: count}, None, None)
    return torch.export.export(Model(), CALLS[0], dynamic_shapes=shapes)


@pytest.fixture(scope="module")
def exported() -> torch.export.ExportedProgram:
    return export()


@pytest.fixture
def program(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """With the buffers as they were: modules of a program share them with it."""
    for name, t in Model().named_buffers():
        exported.state_dict[name].copy_(t)
    return exported


def same(found: list[tuple[Tensor, ...]], expected: list[tuple[Tensor, ...]]) -> bool:
    pairs = [pair for mine, theirs in zip(found, expected, strict=True) for pair in zip(mine, theirs, strict=True)]
    return len(pairs) == 4 * len(COUNTS) and all(torch.equal(*pair) for pair in pairs)


def operators(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if "pacache" in str(node.target)]


def test_a_module_that_is_called_differently_gives_something_else(
    eager: tuple[list[tuple[Tensor, ...]], object],
) -> None:
    """What is compared below depends on every call before it."""
    model = Model()
    assert not torch.equal(model(*CALLS[-1])[0], eager[0][-1][0])


def test_the_program_holds_the_operators(program: torch.export.ExportedProgram) -> None:
    assert operators(program) == [
        "pacache.scatter_pa_kv_cache.default",
        "pacache.scatter_pa_kv_cache_packed.default",
        "pacache.paged_cache_load.default",
        "pacache.paged_cache_load_packed.default",
    ]


def test_the_program_runs(
    program: torch.export.ExportedProgram, eager: tuple[list[tuple[Tensor, ...]], dict[str, Tensor]]
) -> None:
    module = program.module()
    assert same([module(*call) for call in CALLS], eager[0])
    buffers = dict(module.named_buffers())
    assert all(torch.equal(buffers[name], eager[1][name]) for name in BUFFERS)


def test_decomposed_it_says_which_buffers_it_writes(
    program: torch.export.ExportedProgram, eager: tuple[list[tuple[Tensor, ...]], dict[str, Tensor]]
) -> None:
    """Functional: the mutation is a result that is copied back into the buffer."""
    decomposed = program.run_decompositions()
    assert set(decomposed.graph_signature.buffers_to_mutate.values()) == set(BUFFERS)
    targets = [str(node.target) for node in decomposed.graph.nodes]
    assert targets.count("auto_functionalized_v2") == 4
    module = decomposed.module()
    assert same([module(*call) for call in CALLS], eager[0])


ELSEWHERE = """
import sys, torch
import pacache_torch
program, calls, results = sys.argv[1:]
module = torch.export.load(program).module()
found = [module(*call) for call in torch.load(calls)]
torch.save((found, dict(module.named_buffers())), results)
"""


def test_saved_and_loaded_by_another_process(
    program: torch.export.ExportedProgram, eager: tuple[list[tuple[Tensor, ...]], dict[str, Tensor]], tmp_path: Path
) -> None:
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save(CALLS, tmp_path / "calls.pt")
    subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *(str(tmp_path / name) for name in ("model.pt2", "calls.pt", "results.pt"))],
        check=True,
        timeout=300,
    )
    found, buffers = torch.load(tmp_path / "results.pt")
    assert same(found, eager[0])
    assert all(torch.equal(buffers[name], eager[1][name]) for name in BUFFERS)
