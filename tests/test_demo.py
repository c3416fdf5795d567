"""Contract of ``python -m pacache_torch demo``.

It serves real prompts through the two operators with prefill, chunked prefill and decode mixed,
agrees with a dense run bit for bit, and exits with something else than 0 as soon as the operators
lose, misplace or mix up a single row.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pacache_torch.ops as ops
from pacache_torch import __main__ as command_line
from pacache_torch.blocks import BlockAllocator, BlockTable
from pacache_torch.demo import cli
from pacache_torch.demo.check import compare_tokens
from pacache_torch.demo.dense_cache import DenseCache
from pacache_torch.demo.model import Decoder, DecoderConfig
from pacache_torch.demo.scheduler import Chunk, Request, Scheduler, Sequence, Step
from pacache_torch.demo.serve import serve
from pacache_torch.demo.text import load_prompts, to_text

QUICK = ["demo", "--quick", "--device", "cpu"]
LAYOUTS = ("Norm", "PA_NZ")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep the many small matmuls from waiting for a second core that someone else has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_demo(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the quick demo in this process; return its exit code and what it wrote as JSON."""
    path = tmp_path / "demo.json"
    code = command_line.main([*QUICK, "--json", str(path), *options])
    return code, json.loads(path.read_text())


# What it promises


def test_all_layouts_and_dtypes_equal_the_dense_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = run_demo(tmp_path)
    assert code == 0 and facts["ok"]
    ran = {(r["layout"], r["dtype"]) for r in facts["runs"]}
    assert ran == {(layout, dtype) for layout in LAYOUTS for dtype in ("bfloat16", "float32")}
    for r in facts["runs"]:
        assert r["ok"] and r["tokens_different"] == r["rows_different"] == 0
        assert r["new_tokens"] == 5 * 12
        assert r["rows_checked"] > 0
    out = capsys.readouterr().out
    assert "tokens/s" in out and "GB/s" in out and "bit for bit" in out


def test_traffic_mixes_prefill_chunked_prefill_and_decode(tmp_path: Path) -> None:
    _, facts = run_demo(tmp_path, "--layout", "Norm", "--dtype", "float32")
    (r,) = facts["runs"]
    assert 0 < r["mixed_steps"] < r["steps"]
    assert r["continued_chunks"] > 0
    # Blocks were reused: more were handed out than the pool holds.
    assert r["blocks_handed_out"] > r["blocks_in_pool"] >= r["blocks_peak"] > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_counts_are_those_of_the_traffic(tmp_path: Path, layout: str) -> None:
    _, facts = run_demo(tmp_path, "--layout", layout, "--dtype", "bfloat16")
    (r,) = facts["runs"]
    layers = facts["decoder"]["num_layers"]
    bytes_per_row = facts["decoder"]["num_kv_heads"] * facts["decoder"]["head_size"] * 2
    # Every token but the last of each request is cached once per layer: K and V, read and write.
    cached = r["prompt_tokens"] + r["new_tokens"] - 5
    scatter, load = r["ops"]["scatter_pa_kv_cache"], r["ops"]["paged_cache_load"]
    assert scatter["calls"] == r["steps"] * layers
    assert scatter["bytes"] == cached * layers * bytes_per_row * 4
    # Every loaded row was checked, keys and values.
    assert load["bytes"] == r["rows_checked"] * bytes_per_row * 2
    assert scatter["seconds"] > 0 and load["seconds"] > 0


def test_greedy_tokens_mean_something(tmp_path: Path) -> None:
    _, facts = run_demo(tmp_path, "--layout", "Norm", "--dtype", "float32")
    (r,) = facts["runs"]
    assert r["median_top2_gap"] > 0.1
    assert r["smallest_top2_gap"] > 1e-4
    assert len(set(r["sample_text"])) > 3


def test_the_reads_and_writes_go_through_the_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[dict[str, Any]]] = {"scatter_pa_kv_cache": [], "paged_cache_load": []}
    for name, calls in seen.items():
        real = getattr(ops, name)

        def spy(
            *args: Any,
            real: Callable[..., Any] = real,
            calls: list[dict[str, Any]] = calls,
            **kwargs: Any,
        ) -> Any:
            calls.append({"second": args[1], **kwargs})
            return real(*args, **kwargs)

        monkeypatch.setattr(ops, name, spy)
    _, facts = run_demo(tmp_path, "--layout", "PA_NZ", "--dtype", "bfloat16")
    (r,) = facts["runs"]
    for name, calls in seen.items():
        assert len(calls) == r["ops"][name]["calls"] > 0
        assert all(call["cache_mode"] == "PA_NZ" for call in calls)
    # The value is a slice of the fused projection, as in a real decoder.
    values = [call["second"] for call in seen["scatter_pa_kv_cache"]]
    assert not any(value.is_contiguous() for value in values if value.size(0) > 1)


@pytest.mark.parametrize("block_size", [1, 7, 128])
def test_block_sizes(tmp_path: Path, block_size: int) -> None:
    code, _ = run_demo(tmp_path, "--block-size", str(block_size), "--dtype", "bfloat16")
    assert code == 0


def test_options_override_quick(tmp_path: Path) -> None:
    code, facts = run_demo(tmp_path, "--layers", "1", "--new-tokens", "3", "--layout", "PA_NZ", "--dtype", "float16")
    assert code == 0
    assert facts["decoder"]["num_layers"] == 1
    assert [(r["layout"], r["dtype"], r["new_tokens"]) for r in facts["runs"]] == [("PA_NZ", "float16", 15)]


def test_more_threads_change_nothing_and_do_not_stay(tmp_path: Path) -> None:
    code, facts = run_demo(tmp_path, "--threads", "2", "--new-tokens", "2", "--layers", "1", "--layout", "Norm")
    assert code == 0 and facts["threads"] == 2
    assert torch.get_num_threads() == 1


def test_npu_is_refused_with_the_reason_when_there_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pacache_torch.demo.device._npu_obstacle", lambda: "it is on holiday")
    assert command_line.main(["demo", "--quick", "--device", "npu"]) == 2
    assert "it is on holiday" in capsys.readouterr().err


# Planted faults: each must be seen


class FaultyOps:
    """Stand-ins for the two operators with one thing wrong."""

    def __init__(self) -> None:
        self.scatter = ops.scatter_pa_kv_cache
        self.load = ops.paged_cache_load
        self.calls = 0

    def drop_one_token(self, key: Any, value: Any, kc: Any, vc: Any, slots: Any, **kw: Any) -> None:
        """Lose the first token of one single call of the whole run."""
        self.calls += 1
        if self.calls == 10:
            slots = slots.clone()
            slots[0] = -1
        self.scatter(key, value, kc, vc, slots, **kw)

    def wrong_slot(self, key: Any, value: Any, kc: Any, vc: Any, slots: Any, **kw: Any) -> None:
        """Write the neighbouring slot when decoding."""
        self.scatter(key, value, kc, vc, slots ^ 1 if slots.numel() <= 5 else slots, **kw)

    def value_not_written(self, key: Any, value: Any, kc: Any, vc: Any, slots: Any, **kw: Any) -> None:
        """Write the key only."""
        self.scatter(key, value, kc, vc.clone(), slots, **kw)

    def value_stride_ignored(self, key: Any, value: Any, kc: Any, vc: Any, slots: Any, **kw: Any) -> None:
        """Read the value as if its rows were dense."""
        _, heads, head_size = value.shape
        dense = value.as_strided(value.shape, (heads * head_size, head_size, 1))
        self.scatter(key, dense, kc, vc, slots, **kw)

    def swapped_blocks(self, kc: Any, vc: Any, tables: Any, lens: Any, *out: Any, **kw: Any) -> Any:
        """Read the first two blocks of each sequence in the wrong order."""
        tables = tables.clone()
        if tables.size(1) > 1:
            tables[:, :2] = tables[:, :2].flip(1)
        return self.load(kc, vc, tables, lens, *out, **kw)

    def swapped_sequences(self, kc: Any, vc: Any, tables: Any, lens: Any, *out: Any, **kw: Any) -> Any:
        """Give each sequence the table of another."""
        return self.load(kc, vc, tables.roll(1, 0).contiguous(), lens, *out, **kw)

    def last_row_missing(self, kc: Any, vc: Any, tables: Any, lens: Any, *out: Any, **kw: Any) -> Any:
        """Leave the last row of the batch as it was."""
        lens = lens.clone()
        lens[-1] -= 1
        return self.load(kc, vc, tables, lens, *out, **kw)

    def swapped_key_and_value(self, kc: Any, vc: Any, tables: Any, lens: Any, *out: Any, **kw: Any) -> Any:
        """Read keys from the value cache and values from the key cache."""
        return self.load(vc, kc, tables, lens, *out, **kw)


FAULTS = [
    ("scatter_pa_kv_cache", "drop_one_token"),
    ("scatter_pa_kv_cache", "wrong_slot"),
    ("scatter_pa_kv_cache", "value_not_written"),
    ("scatter_pa_kv_cache", "value_stride_ignored"),
    ("paged_cache_load", "swapped_blocks"),
    ("paged_cache_load", "swapped_sequences"),
    ("paged_cache_load", "last_row_missing"),
    ("paged_cache_load", "swapped_key_and_value"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("op", "fault"), FAULTS, ids=[fault for _, fault in FAULTS])
def test_a_fault_in_an_operator_is_caught(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    op: str,
    fault: str,
    layout: str,
) -> None:
    monkeypatch.setattr(ops, op, getattr(FaultyOps(), fault))
    code, facts = run_demo(tmp_path, "--layout", layout, "--dtype", "bfloat16")
    (r,) = facts["runs"]
    assert code == 1 and not facts["ok"]
    assert r["rows_different"] > 0
    # Attention does not mind the order of whole blocks, and one row of one layer need not change
    # a choice: these two are what the comparison of rows is for.
    if fault not in ("swapped_blocks", "drop_one_token"):
        assert r["tokens_different"] > 0
    captured = capsys.readouterr()
    assert f"{layout} bfloat16: {r['rows_different']} of" in captured.err
    assert r["first_row_difference"] in captured.err
    assert "bit for bit" not in captured.out


def test_a_block_with_two_owners_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = BlockAllocator.allocate
    monkeypatch.setattr(BlockAllocator, "allocate", lambda self, count: [1] * len(real(self, count)))
    monkeypatch.setattr(BlockAllocator, "free", lambda self, blocks: None)
    monkeypatch.setattr(BlockAllocator, "__init__", _roomy(BlockAllocator.__init__))
    code, facts = run_demo(tmp_path, "--layout", "Norm", "--dtype", "float32")
    assert code == 1 and facts["runs"][0]["rows_different"] > 0


def _roomy(real: Callable[..., None]) -> Callable[..., None]:
    def init(self: BlockAllocator, num_blocks: int, **kwargs: Any) -> None:
        real(self, 10 * num_blocks, **kwargs)

    return init


def test_a_token_that_differs_is_enough_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_wrong_token(decoder: Any, cache: Any, *args: Any) -> Any:
        result = serve(decoder, cache, *args)
        if not isinstance(cache, DenseCache):
            result.generated[3][-1] ^= 1
        return result

    monkeypatch.setattr(cli, "serve", one_wrong_token)
    code, facts = run_demo(tmp_path, "--layout", "Norm", "--dtype", "float32")
    (r,) = facts["runs"]
    assert code == 1 and r["rows_different"] == 0 and r["tokens_different"] == 1
    assert "in request 3 at token 11" in capsys.readouterr().err


def test_a_run_that_compared_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [prompt[:8] for prompt in load_prompts()]
    monkeypatch.setattr(cli, "load_prompts", lambda: prompts)
    # One new token each: nothing is ever read back.
    code, _ = run_demo(tmp_path, "--new-tokens", "1", "--layout", "Norm", "--dtype", "float32")
    assert code == 1
    assert "nothing was compared" in capsys.readouterr().err


def test_compare_tokens_finds_missing_and_extra_tokens() -> None:
    assert compare_tokens({0: [1, 2]}, {0: [1, 2]}) == (0, None)
    count, first = compare_tokens({0: [1, 2]}, {0: [1, 2, 3], 1: [4]})
    assert count == 2
    assert first is not None and dataclasses.astuple(first) == (0, 2, None, 3)


# The parts


def test_prompts_are_real_text_of_different_lengths() -> None:
    prompts = load_prompts()
    lengths = [len(prompt) for prompt in prompts]
    assert len(prompts) >= 6 and len(set(lengths)) == len(lengths)
    assert min(lengths) < 64 and 800 < max(lengths) <= 900
    for prompt in prompts:
        prompt.decode("utf-8")


def test_to_text_is_one_printable_line() -> None:
    assert to_text([72, 105, 10, 0xFF, 33]) == "Hi \N{REPLACEMENT CHARACTER}!"


def all_steps(scheduler: Scheduler) -> Iterator[Step]:
    """Run a schedule to its end, sampling token 7 everywhere; yield each step as it is chosen."""
    for _ in range(1000):
        step = scheduler.next_step()
        if step is None:
            return
        yield step
        scheduler.finish_step(step, [7] * len(step.sampled_rows))
    raise AssertionError("the schedule does not end")


def test_scheduler_feeds_every_token_once_in_order_within_the_budget() -> None:
    requests = [Request(id, tuple(range(n)), 5, id) for id, n in enumerate([3, 40, 1, 17])]
    allocator = BlockAllocator(16)
    scheduler = Scheduler(requests, allocator, block_size=4, token_budget=12)
    fed: dict[int, list[int]] = {request.id: [] for request in requests}
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    for step in all_steps(scheduler):
        assert 0 < step.num_tokens <= 12
        row = 0
        owners: list[int] = []
        for chunk in step.chunks:
            assert chunk.row == row and chunk.start == len(fed[chunk.sequence.request.id])
            row += chunk.count
            fed[chunk.sequence.request.id] += range(chunk.start, chunk.length)
            assert len(chunk.sequence.block_table.blocks) == -(-chunk.length // 4)
            owners += chunk.sequence.block_table.blocks
            tokens[chunk.sequence.request.id] = chunk.sequence.tokens
        assert len(set(owners)) == len(owners), "a block has two owners"
        assert step.positions == [p for c in step.chunks for p in range(c.start, c.length)]
    for request in requests:
        assert fed[request.id] == list(range(request.max_cached))
        assert tokens[request.id] == [*request.prompt, 7, 7, 7, 7, 7]
    assert allocator.num_used == 0


def test_scheduler_gives_decode_its_token_before_prefill() -> None:
    requests = [Request(0, (1, 2), 8), Request(1, tuple(range(50)), 2, arrival=1)]
    scheduler = Scheduler(requests, BlockAllocator(40), block_size=4, token_budget=10)
    steps = [[(c.sequence.request.id, c.count) for c in step.chunks] for step in
             all_steps(scheduler)]  # fmt: skip
    assert steps[0] == [(0, 2)]
    assert steps[1] == [(0, 1), (1, 9)]


def test_scheduler_waits_for_blocks_instead_of_running_out() -> None:
    requests = [Request(id, tuple(range(16)), 4) for id in range(5)]
    allocator = BlockAllocator(1 + 2 * 5)  # two requests of five blocks
    scheduler = Scheduler(requests, allocator, block_size=4, token_budget=64)
    most = max(len(step.chunks) for step in all_steps(scheduler))
    assert most == 2 and allocator.peak_used == 10


def test_scheduler_refuses_a_request_that_can_never_fit() -> None:
    with pytest.raises(ValueError, match="request 3 needs 5 blocks, the cache has 4"):
        Scheduler([Request(3, tuple(range(16)), 4)], BlockAllocator(5), block_size=4, token_budget=8)


class NoCache:
    """For a decoder that is given the whole sequence every time."""

    def begin_step(self, step: Step) -> None:
        pass

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        pass

    def read(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return []


def test_serving_equals_the_decoder_with_no_cache_and_no_batch() -> None:
    """The dense run is the demo's oracle; this is what holds the oracle itself."""
    config = DecoderConfig(
        num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_size=16, mlp_size=64,
        max_positions=128,
    )  # fmt: skip
    decoder = Decoder(config, dtype=torch.float32, device=CPU)
    requests = [Request(id, tuple(p[:n]), 8, id) for id, (p, n) in
                enumerate(zip(load_prompts(), (5, 60, 23), strict=False))]  # fmt: skip
    cache = DenseCache(requests, num_layers=2, num_kv_heads=2, head_size=16, dtype=torch.float32, device=CPU)
    scheduler = Scheduler(requests, BlockAllocator(64), block_size=4, token_budget=16)
    result = serve(decoder, cache, scheduler)
    assert result.mixed_steps > 0 and result.continued_chunks > 0
    for request in requests:
        sequence = Sequence(request, list(request.prompt), BlockTable(BlockAllocator(2), 4))
        while not sequence.is_complete:
            chunk = Chunk(sequence, start=0, count=len(sequence.tokens), row=0)
            logits = decoder.forward(Step((chunk,)), NoCache())
            sequence.tokens.append(int(logits.argmax(-1)))
        assert result.generated[request.id] == sequence.tokens[len(request.prompt) :]


class RecordOps(TorchDispatchMode):
    """Collect the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoder_keeps_to_the_operators_that_every_device_has(dtype: torch.dtype) -> None:
    config = DecoderConfig(num_layers=1, hidden_size=64, mlp_size=64, max_positions=64)
    decoder = Decoder(config, dtype=dtype, device=CPU)
    requests = [Request(0, tuple(range(40)), 3), Request(1, (1, 2, 3), 3)]
    cache = DenseCache(requests, num_layers=1, num_kv_heads=4, head_size=64, dtype=dtype, device=CPU)
    scheduler = Scheduler(requests, BlockAllocator(32), block_size=4, token_budget=16)
    recorder = RecordOps()
    for step in all_steps(scheduler):
        with torch.no_grad(), recorder:
            decoder.forward(step, cache)
    compute = {"mm", "bmm", "add", "mul", "_softmax", "mean", "rsqrt", "silu"}
    rows = {"cat", "index_select", "embedding"}
    copies = {"_to_copy", "clone", "copy_", "detach", "lift_fresh"}
    views = {
        "_unsafe_view", "alias", "expand", "permute", "reshape", "slice", "t", "transpose",
        "unsqueeze", "view",
    }  # fmt: skip
    assert compute <= recorder.names
    assert recorder.names <= compute | rows | copies | views


# The command line


def test_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command_line.main(["dmo"])
    assert stopped.value.code == 2
    assert "demo" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--threads", "--layers", "--new-tokens", "--block-size"])
def test_sizes_must_be_positive(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command_line.main([*QUICK, option, "0"])
    assert stopped.value.code == 2
    assert "must be at least 1, got 0" in capsys.readouterr().err
