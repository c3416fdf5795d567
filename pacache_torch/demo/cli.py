"""``python -m pacache_torch demo``: options, the four runs, the exit code."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from pacache_torch import LibraryNotLoadedError
from pacache_torch.blocks import BlockAllocator, blocks_for
from pacache_torch.demo import report as reporting
from pacache_torch.demo.check import CheckedCache, compare_tokens
from pacache_torch.demo.dense_cache import DenseCache
from pacache_torch.demo.device import DeviceUnavailable, choose_device, simulated_note
from pacache_torch.demo.model import Decoder, DecoderConfig
from pacache_torch.demo.paged_cache import PagedCache
from pacache_torch.demo.report import RunReport
from pacache_torch.demo.scheduler import Request, Scheduler
from pacache_torch.demo.serve import ServeResult, serve
from pacache_torch.demo.text import load_prompts, to_text

_LAYOUTS = ("Norm", "PA_NZ")
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# A2 and A3 move 16-bit and int8 caches; float32 is for the CPU.
_DEFAULT_DTYPES = {"cpu": ("bfloat16", "float32"), "npu": ("bfloat16", "float16")}


@dataclass(frozen=True)
class DemoConfig:
    """One demo: the model, the traffic and what to run it on."""

    decoder: DecoderConfig
    num_prompts: int
    new_tokens: int
    block_size: int
    token_budget: int
    arrival_interval: int
    layouts: tuple[str, ...]
    dtypes: tuple[str, ...]
    device: torch.device


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when every token and every loaded row equals the dense run, 1 when not."""
    arguments = _parser().parse_args(argv)
    try:
        device, reason = choose_device(arguments.device)
    except DeviceUnavailable as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    config = _config(arguments, device)
    prompts = load_prompts()[: config.num_prompts]
    print(
        f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} bytes, "
        f"{config.new_tokens} new tokens each; {config.decoder.num_layers} layers, random "
        f"weights, blocks of {config.block_size} tokens; device {device} ({reason}), "
        f"CPU threads: {arguments.threads}"
    )
    note = simulated_note(device)
    if note:
        print(note)
    started = time.perf_counter()
    try:
        with _cpu_threads(arguments.threads):
            reports = run(config, prompts, show_progress=True)
    except LibraryNotLoadedError as error:
        print(f"demo: {error}\nsee: python -m pacache_torch doctor", file=sys.stderr)
        return 1
    except NotImplementedError as error:  # of a chip or a CANN version that does not have the operators
        print(f"demo: {error}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - started

    print(reporting.table(reports))
    first = reports[0]
    print(
        "tokens/s: prompt and new tokens through the decoder, without the time of the comparison;"
        "\nms and GB/s: inside the operator over the whole run, bytes read and written."
    )
    print(
        f"\nEach run: {first.mixed_steps} of {first.steps} steps mix prefill and decode, "
        f"{first.continued_chunks} prompt chunks read earlier ones back, "
        f"{first.blocks_handed_out} blocks handed out."
    )
    print(f"Sample ({first.layout} {first.dtype}; the weights are random, so is the text):")
    print(f"  {first.sample_prompt!r} -> {first.sample_text!r}")

    failures = reporting.differences(reports)
    for line in failures:
        print(line, file=sys.stderr)
    ok = not failures
    if ok:
        tokens = sum(report.new_tokens for report in reports)
        rows = sum(report.rows_checked for report in reports)
        print(
            f"\nAll {tokens} generated tokens and all {rows} loaded key and value rows equal "
            f"the dense cache, bit for bit ({seconds:.1f} s){', on a SIMULATED device' if note else ''}."
        )
    if arguments.json is not None:
        _write_json(arguments, config, reports, ok, seconds)
    return 0 if ok else 1


def run(config: DemoConfig, prompts: list[bytes], *, show_progress: bool = False) -> list[RunReport]:
    """Serve ``prompts`` in every layout and dtype and compare each with a dense run."""
    requests = [
        Request(id, tuple(prompt), config.new_tokens, arrival=id * config.arrival_interval)
        for id, prompt in enumerate(prompts)
    ]
    per_run = len(requests) * config.new_tokens
    num_runs = len(config.dtypes) * (1 + len(config.layouts))
    reports = []
    with _progress(per_run * num_runs, show_progress) as (describe, advance):
        for dtype_name in config.dtypes:
            dtype = _DTYPES[dtype_name]
            decoder = Decoder(config.decoder, dtype=dtype, device=config.device)
            dense_cache = DenseCache(
                requests,
                num_layers=config.decoder.num_layers,
                num_kv_heads=config.decoder.num_kv_heads,
                head_size=config.decoder.head_size,
                dtype=dtype,
                device=config.device,
            )
            describe(f"dense {dtype_name}")
            scheduler, _ = _scheduler(config, requests)
            dense = serve(decoder, dense_cache, scheduler, advance)
            for layout in config.layouts:
                describe(f"{layout} {dtype_name}")
                reports.append(_run_paged(config, requests, decoder, dense_cache, dense, layout, advance))
    return sorted(reports, key=lambda report: config.layouts.index(report.layout))


def _run_paged(
    config: DemoConfig,
    requests: list[Request],
    decoder: Decoder,
    dense_cache: DenseCache,
    dense: ServeResult,
    layout: str,
    advance: Callable[[int], object],
) -> RunReport:
    scheduler, allocator = _scheduler(config, requests)
    paged = PagedCache(
        num_layers=config.decoder.num_layers,
        num_blocks=allocator.capacity + 1,
        block_size=config.block_size,
        num_kv_heads=config.decoder.num_kv_heads,
        head_size=config.decoder.head_size,
        max_context_tokens=sum(request.max_cached for request in requests),
        cache_mode=layout,
        dtype=decoder.dtype,
        device=config.device,
    )
    checked = CheckedCache(paged, dense_cache)
    result = serve(decoder, checked, scheduler, advance)
    tokens_different, first_difference = compare_tokens(result.generated, dense.generated)
    seconds = result.seconds - checked.seconds
    sample = requests[min(1, len(requests) - 1)]
    return RunReport(
        layout=layout,
        dtype=str(decoder.dtype).removeprefix("torch."),
        prompt_tokens=sum(len(request.prompt) for request in requests),
        new_tokens=sum(map(len, result.generated.values())),
        steps=result.steps,
        mixed_steps=result.mixed_steps,
        continued_chunks=result.continued_chunks,
        seconds=seconds,
        tokens_per_second=result.tokens / seconds,
        ops=paged.clock.totals(),
        blocks_in_pool=allocator.capacity,
        blocks_peak=allocator.peak_used,
        blocks_handed_out=allocator.total_handed_out,
        rows_checked=checked.rows_checked,
        rows_different=checked.rows_different,
        first_row_difference=checked.first_difference,
        tokens_different=tokens_different,
        first_token_difference=first_difference,
        smallest_top2_gap=min(dense.top2_gaps),
        median_top2_gap=statistics.median(dense.top2_gaps),
        sample_prompt=to_text(sample.prompt[-40:]),
        sample_text=to_text(result.generated[sample.id]),
    )


def _scheduler(config: DemoConfig, requests: list[Request]) -> tuple[Scheduler, BlockAllocator]:
    # The pool holds two thirds of the traffic, so that late requests wait for blocks and get
    # those of others, with the others' rows still in them.
    blocks = [blocks_for(request.max_cached, config.block_size) for request in requests]
    allocator = BlockAllocator(1 + max(max(blocks), sum(blocks) * 2 // 3), shuffle_seed=1)
    scheduler = Scheduler(requests, allocator, block_size=config.block_size, token_budget=config.token_budget)
    return scheduler, allocator


def _config(arguments: argparse.Namespace, device: torch.device) -> DemoConfig:
    prompts = load_prompts()
    config = DemoConfig(
        decoder=DecoderConfig(),
        num_prompts=len(prompts),
        new_tokens=64,
        block_size=16,
        token_budget=128,
        arrival_interval=3,
        layouts=_LAYOUTS,
        dtypes=_DEFAULT_DTYPES[device.type],
        device=device,
    )
    if arguments.quick:
        config = replace(
            config,
            decoder=DecoderConfig(
                num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=2, head_size=32,
                mlp_size=256,
            ),
            num_prompts=5,
            new_tokens=12,
            token_budget=64,
            arrival_interval=2,
        )  # fmt: skip
    if arguments.layers is not None:
        config = replace(config, decoder=replace(config.decoder, num_layers=arguments.layers))
    if arguments.new_tokens is not None:
        config = replace(config, new_tokens=arguments.new_tokens)
    if arguments.block_size is not None:
        config = replace(config, block_size=arguments.block_size)
    if arguments.layout != "all":
        config = replace(config, layouts=(arguments.layout,))
    if arguments.dtype != "all":
        config = replace(config, dtypes=(arguments.dtype,))
    longest = max(len(prompt) for prompt in prompts[: config.num_prompts]) + config.new_tokens
    # The tables of the model are as long as the longest sequence needs.
    return replace(config, decoder=replace(config.decoder, max_positions=longest))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pacache_torch demo",
        description="Serve a batch of prompts through a paged KV cache and compare every "
        "generated token, and every key and value row that is read back, with a dense cache.",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "npu"), default="auto")
    parser.add_argument("--layout", choices=(*_LAYOUTS, "all"), default="all")
    parser.add_argument(
        "--dtype",
        choices=(*_DTYPES, "all"),
        default="all",
        help="default: bfloat16 and float32 on the CPU, bfloat16 and float16 on the NPU",
    )
    parser.add_argument("--layers", type=_positive, metavar="N", help="decoder layers")
    parser.add_argument("--new-tokens", type=_positive, metavar="N", help="per prompt")
    parser.add_argument("--block-size", type=_positive, metavar="N", help="tokens per block")
    parser.add_argument(
        "--threads",
        type=_positive,
        default=1,
        metavar="N",
        help="CPU threads, default 1: matmuls this small lose more to a core that is busy than "
        "they gain from a second one",
    )
    parser.add_argument("--quick", action="store_true", help="a small model and fewer tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _write_json(
    arguments: argparse.Namespace,
    config: DemoConfig,
    reports: list[RunReport],
    ok: bool,
    seconds: float,
) -> None:
    values: dict[str, Any] = {
        "ok": ok,
        "seconds": seconds,
        "torch": str(torch.__version__),
        "device": str(config.device),
        "simulated": simulated_note(config.device),
        "threads": arguments.threads,
        "decoder": asdict(config.decoder),
        "block_size": config.block_size,
        "token_budget": config.token_budget,
        "runs": [report.as_dict() for report in reports],
    }
    arguments.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _cpu_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _progress(total: int, show: bool) -> Iterator[tuple[Callable[[str], object], Callable[[int], object]]]:
    """Yield ``describe(text)`` and ``advance(new_tokens)`` of a progress bar."""
    # A log file gets a line now and then, a terminal a bar that moves.
    interval = 0.1 if sys.stderr.isatty() else 5.0
    with tqdm(total=total, unit="tok", disable=not show, mininterval=interval) as bar:
        yield bar.set_description, bar.update
