"""How fast are the operators on a real NPU?

    python benchmarks/npu_device.py [--quick] [--hbm-gbps 1600] [--rows REGEX]

Times are the device's own (torch.npu events), eager and as the replay of a captured graph, beside torch_npu's operator
and ``copy_`` of the same bytes. GB/s counts bytes read and bytes written and is held against the bandwidth of the HBM.
On the simulated CANN it refuses: a time taken there says nothing about a device.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import harness
import torch
from harness import OURS, Row, speed
from torch import Tensor

REFUSED = 2
HEADS, HEAD_SIZE, BLOCK = 8, 128, 128
DEVICE = "npu:0"
COPY = "copy_"
THEIRS = "torch_npu"
GRAPH_CALLS = 10  # calls in one captured graph

# Nominal GB/s by the beginning of the chip's name, as published for the products; not confirmed here. What is not
# listed is given by --hbm-gbps. An A3 shows each of its two dies as a device.
HBM_GBPS = {"Ascend910B1": 1600, "Ascend910B2": 1600, "Ascend910B3": 1600, "Ascend910_93": 1600}

Calls = dict[str, Callable[[], object]]


def is_simulated() -> bool:
    """Whether the CANN that this process would load is the simulated one."""
    try:
        return hasattr(ctypes.CDLL("libascendcl.so"), "cann_sim_set_phase_cost")
    except OSError:
        return False


def refusal() -> str | None:
    """Why nothing can be measured here, or None."""
    if is_simulated():
        return (
            "this is the simulated CANN, whose times say nothing about a device; host_cost.py --npu measures the host"
        )
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError) as error:
        return f"torch_npu does not load ({str(error).splitlines()[0]})"
    if not torch.npu.is_available():
        return "torch_npu finds no NPU"
    return None


def hbm_gbps(name: str, given: float | None) -> float | None:
    """The bandwidth to hold results against."""
    if given is not None:
        return given
    return next((float(rate) for start, rate in HBM_GBPS.items() if name.startswith(start)), None)


@dataclass
class Spec:
    """One row before its tensors exist."""

    id: str
    work: str
    tokens: int
    build: Callable[[], Calls]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


def _slots(tokens: int, pattern: str, num_blocks: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if pattern == "random":
        slots = torch.randperm(num_blocks * BLOCK, generator=generator)[:tokens]
    else:
        position = torch.arange(tokens)
        slots = torch.randperm(num_blocks, generator=generator)[position // BLOCK] * BLOCK + position % BLOCK
    return slots.to(torch.int32).to(DEVICE)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    def call() -> None:
        for destination, source in pairs:
            destination.copy_(source)

    return call


def build_scatter(tokens: int, pattern: str, cache_mode: str) -> Calls:
    """Our scatter, torch_npu's, and a copy of the same bytes."""
    num_blocks = -(-tokens // BLOCK) + 64
    shape = (num_blocks, BLOCK, HEADS, HEAD_SIZE)
    if cache_mode == "PA_NZ":
        shape = (num_blocks, HEADS * HEAD_SIZE // 16, BLOCK, 16)
    key, value = _random(tokens, HEADS, HEAD_SIZE), _random(tokens, HEADS, HEAD_SIZE)
    caches = [torch.zeros(*shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    slots = _slots(tokens, pattern, num_blocks)
    arguments = (key, value, *caches, slots)
    return {
        OURS: functools.partial(torch.ops.pacache.scatter_pa_kv_cache, *arguments, cache_mode=cache_mode),
        THEIRS: functools.partial(torch.ops.npu.npu_scatter_pa_kv_cache, *arguments, cache_mode=cache_mode),
        COPY: _copy([(torch.empty_like(key), key), (torch.empty_like(value), value)]),
    }


def build_load(batch: int, length: int) -> Calls:
    """Our load, torch_npu's where ATB is there, and a copy of the same bytes."""
    tokens = batch * length
    num_blocks = -(-tokens // BLOCK) + 64
    columns = -(-length // BLOCK)
    caches = [_random(num_blocks, BLOCK, HEADS, HEAD_SIZE) for _ in range(2)]
    tables = torch.randperm(num_blocks)[: batch * columns].view(batch, columns).to(torch.int32).to(DEVICE)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    starts = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    outputs = [torch.empty(tokens, HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    arguments = (*caches, tables, lengths)
    calls: Calls = {
        OURS: functools.partial(torch.ops.pacache.paged_cache_load, *arguments, *outputs),
        COPY: _copy([(o, c.view(-1, HEADS, HEAD_SIZE)[:tokens]) for o, c in zip(outputs, caches, strict=True)]),
    }
    try:
        import torch_npu.atb  # noqa: F401

        calls[THEIRS] = functools.partial(
            torch.ops.atb.npu_paged_cache_load.out, *arguments, seq_starts=starts, key=outputs[0], value=outputs[1]
        )
        calls[THEIRS]()
    except (ImportError, OSError, RuntimeError, AttributeError):
        calls.pop(THEIRS, None)  # no ATB here; the row names it as absent
    return calls


def specs() -> Iterator[Spec]:
    """Every row."""
    for tokens, pattern in ((32, "random"), (256, "random"), (4096, "random"), (1024, "pages"), (8192, "pages")):
        for mode in ("Norm", "PA_NZ"):
            build = functools.partial(build_scatter, tokens, pattern, mode)
            yield Spec(f"scatter/{mode}/{tokens}/{pattern}", f"scatter {mode}, {tokens} {pattern}", tokens, build)
    yield Spec(
        "scatter/Norm/65536/pages",
        "scatter Norm, 65536 pages",
        65536,
        functools.partial(build_scatter, 65536, "pages", "Norm"),
    )
    for batch, length in ((8, 1024), (1, 8192), (64, 1024)):
        build = functools.partial(build_load, batch, length)
        yield Spec(f"load/Norm/{batch}x{length}", f"load Norm, {batch} x {length}", batch * length, build)


def timed(run: Callable[[], object], repeats: int) -> float:
    """Seconds of one run on the device, the mean of so many in a row."""
    begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats * 1e-3


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The replay of a graph of GRAPH_CALLS calls; after one call outside, for what is made at first use."""
    call()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        for _ in range(GRAPH_CALLS):
            call()
    return graph.replay


def measure(calls: Calls, *, graph: bool, rounds: int, repeats: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time the peers in turn; seconds per call, and who could not be captured."""
    absent: dict[str, str] = {}
    runs: dict[str, Callable[[], object]] = {}
    for name, call in calls.items():
        try:
            runs[name] = captured(call) if graph else call
        except RuntimeError as error:
            if name == OURS:
                raise
            absent[name] = str(error).splitlines()[0]
    per_run = GRAPH_CALLS if graph else 1
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        timed(run, repeats)
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(timed(run, repeats) / per_run)
    return samples, absent


def main(argv: Sequence[str] | None = None) -> int:
    """Time every selected row, or refuse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_arguments(parser)
    parser.add_argument("--hbm-gbps", type=float, default=None, help="bandwidth of the HBM, if the chip is not known")
    arguments = parser.parse_args(argv)
    if (why := refusal()) is not None:
        print(f"npu_device: not measured: {why}.", file=sys.stderr)
        return REFUSED
    import pacache_torch

    torch.npu.set_device(DEVICE)
    pacache_torch.warmup(DEVICE)
    name = torch.npu.get_device_name(0)
    peak = hbm_gbps(name, arguments.hbm_gbps)
    chosen = [spec for spec in specs() if harness.selected(arguments, spec.id)]
    rounds, repeats = (3, 5) if arguments.quick else (30, 20)
    report = harness.Report("npu_device", arguments)
    with torch.inference_mode(), harness.progress(len(chosen), arguments, "npu_device") as bar:
        for spec in chosen:
            calls = spec.build()
            for graph in (False, True):
                samples, absent = measure(calls, graph=graph, rounds=rounds, repeats=repeats)
                row = Row(
                    f"{spec.id}/{'graph' if graph else 'eager'}",
                    f"{spec.work}, {'graph replay' if graph else 'eager'}",
                    "device",
                    tokens=spec.tokens,
                    bytes_moved=2 * 2 * spec.tokens * HEADS * HEAD_SIZE * 2,
                    samples=samples,
                    absent=absent,
                )
                if THEIRS not in calls:
                    row.absent[THEIRS] = "no ATB here"
                found = (harness.judge(speed(peer), samples) for peer in (THEIRS, COPY))
                row.checks = [judged for judged in found if judged]
                rate = harness.gigabytes_per_second(row.to_json()) or 0.0
                row.facts["of the HBM's bandwidth"] = f"{100 * rate / peak:.0f} %" if peak else "not known (--hbm-gbps)"
                report.add(row)
            bar.update()
    report.finish(device={"name": name, **_found()}, hbm_gbps=peak)
    return 0


def _found() -> dict[str, str]:
    """Versions of what was found, without its paths."""
    import pacache_torch._C_npu

    found = pacache_torch._C_npu.found()
    return {name: found[name] for name in ("soc", "product", "cann", "atb", "load_backend")}


if __name__ == "__main__":
    raise SystemExit(main())
