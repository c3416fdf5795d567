"""Is the suite worth anything? Break the kernels and the rules, one thing at a time, and see that it fails each time.

    python tests/mutate.py [--only REGEX] [--keep]

Works in a temporary copy of the repository: builds it, sees that the fast part of the suite passes, then for each
breakage edits one file, builds again what depends on it, and runs the tests until one fails. Prints a table, and exits
with 1 if a breakage was not noticed. Run by hand; it takes about a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# In the order of how soon they tell.
TESTS = (
    "tests/test_vectors.py",
    "tests/test_bad_arguments.py",
    "tests/test_behaviours.py",
    "tests/test_memory_rules.py",
    "tests/test_parity.py::test_parity",
    "tests/test_import.py::test_kernels_stand_where_they_should",
    "tests/test_opcheck.py",
    "tests/test_processes.py",
    "tests/test_cpu_kernels.py",
    "tests/test_eager_call.py",
)


@dataclass(frozen=True)
class Breakage:
    """One edit: ``old`` stands in the file exactly once."""

    what: str
    file: str
    old: str
    new: str


SCATTER = "csrc/cpu/scatter_pa_kv_cache.cpp"
LOAD = "csrc/cpu/paged_cache_load.cpp"
ROW = "csrc/cpu/row_copy.h"
PARALLEL = "csrc/cpu/parallel.h"
MEAN = "csrc/cpu/window_mean.cpp"
LOOPS = "csrc/cpu/copy_loops.inc"
AVX512 = "csrc/cpu/copy_avx512.cpp"  # breakages of it are noticed where the processor has it
SCATTER_ARGS = "csrc/scatter_args.cpp"
LOAD_ARGS = "csrc/load_args.cpp"
MEMORY = "csrc/memory_rules.cpp"

BREAKAGES = (
    # Where a row goes
    Breakage("block off by one", SCATTER, "plane.dst + slot / block_size *", "plane.dst + (slot + 1) / block_size *"),
    Breakage("block offset in 32 bits", SCATTER, "plane.dst + slot / block_size * plane.dst_block_stride",
             "plane.dst + static_cast<int32_t>(slot / block_size * plane.dst_block_stride)"),
    Breakage("key's stride for value", SCATTER, "plane.src + i * plane.src_token_stride, count",
             "plane.src + i * args.key.src_token_stride, count"),
    Breakage("int32 slots read as int64", SCATTER, "} else if (args.slot_mapping.is_int64) {",
             "} else if (args.slot_mapping.size > 0) {"),
    Breakage("negative slots not skipped", SCATTER, "if (slot < 0) {", "if (slot < -1) {"),
    Breakage("negative slots of heads not skipped", SCATTER, "if (head.slot < 0) {", "if (head.slot < -1) {"),
    Breakage("rows of a head run past their block", SCATTER,
             "std::min(count, block_size - position)", "count"),
    Breakage("a run of slots is not looked at", SCATTER, "while (count < most &&",
             "while ((count < most && args.num_heads > 0) ||"),
    Breakage("a run of slots goes past its block", SCATTER,
             "std::min(end - i, args.block_size - slot % args.block_size)", "end - i"),
    Breakage("every sequence begins at token 0", SCATTER, "first_token[b - 1] + args.seq_lens[b - 1]",
             "first_token[b - 1]"),
    Breakage("padded sequences read as packed", SCATTER, "plane->src + b * plane->src_batch_stride",
             "plane->src + 0 * plane->src_batch_stride"),
    # The window
    Breakage("Alibi keeps the first tokens", SCATTER, "token(head.length - head.window)", "token(0)"),
    Breakage("mean begins one token late", SCATTER, "token(head.offset), plane.src_token_stride, head.window,",
             "token(head.offset + (head.offset + head.window < head.length)), plane.src_token_stride, head.window,"),
    Breakage("tail begins inside the window", SCATTER, "const int64_t behind = head.offset + head.window;",
             "const int64_t behind = head.offset + head.window - 1;"),
    Breakage("mean multiplied by a reciprocal", MEAN, "sum[d] / count", "sum[d] * (1.0F / count)"),
    Breakage("mean summed pairwise", MEAN,
             "      total = _mm256_add_ps(total, Channels::load(src));\n"
             "      total = _mm256_add_ps(total, Channels::load(src + token_stride));\n",
             "      total = _mm256_add_ps(total, _mm256_add_ps(\n"
             "          Channels::load(src), Channels::load(src + token_stride)));\n"),
    Breakage("mean loses the channels behind the last eight", MEAN, "count, channels - whole * kStep);", "count, 0);"),
    Breakage("an offset of -1 is not special", "csrc/scatter_args.h", "return head.offset == -1 || head.window == 0",
             "return head.window == 0"),
    Breakage("Omni leaves a row for the mean", SCATTER_ARGS, "(kind == ScatterKind::kRope ? 1 : 0)", "1"),
    # Loads
    Breakage("table column without seq_starts", LOAD, "const int64_t column = args.first_column(b);",
             "const int64_t column = 0;"),
    Breakage("first row boundary taken as 0", LOAD_ARGS, "rows.push_back(args.is_cumsum ? args.context_lens[0] : 0);",
             "rows.push_back(0);"),
    Breakage("whole blocks are loaded", LOAD, "std::min(args.block_size - position, sequence_end - row)",
             "args.block_size - position"),
    Breakage("a share of the rows begins in the next sequence", LOAD, "rows.end(), row) - rows.begin() - 1;",
             "rows.end(), row) - rows.begin() - (row == first_row);"),
    Breakage("value beside the key of the run's first token", LOAD,
             "position + done, now, stream);", "position, now, stream);"),
    # Moving bytes
    Breakage("last NZ unit of a head not written", SCATTER, "plane.head_bytes / plane.unit_bytes;",
             "plane.head_bytes / plane.unit_bytes - (plane.head_bytes > plane.unit_bytes);"),
    Breakage("last NZ unit of a head not read", LOAD, "plane.head_bytes / plane.unit_bytes;",
             "plane.head_bytes / plane.unit_bytes - (plane.head_bytes > plane.unit_bytes);"),
    Breakage("last byte of an odd row not written", SCATTER_ARGS,
             "if (dims.unit < 0) {\n    plane.unit_bytes = plane.head_bytes;",
             "if (dims.unit < 0) {\n"
             "    plane.unit_bytes = plane.head_bytes - (plane.head_bytes > 1 && plane.head_bytes % 2);"),
    Breakage("odd last unit of a row not read", LOOPS, "    if (u < units) {", "    if (u + 1 < units) {"),
    Breakage("second unit read from the first", LOOPS, "load(from + t * paged_token_stride + paged_unit_stride)",
             "load(from + t * paged_token_stride)"),
    Breakage("NZ tokens sorted away from their slots", SCATTER, "tile[t].token * plane.src_token_stride",
             "(begin + first + t) * plane.src_token_stride"),
    Breakage("equal slots lose their order", SCATTER, "std::tie(slot, token) < std::tie(other.slot, other.token)",
             "std::tie(slot, other.token) < std::tie(other.slot, token)"),
    Breakage("strided heads taken as dense", ROW, "if (row.units == 1 && row.paged_head_stride == row.unit_bytes) {",
             "if (row.units == 1) {"),
    Breakage("the remainder of a split is lost", PARALLEL,
             "at::parallel_for(0, count, grain(kGrainBytes), f);",
             "at::parallel_for(0, count - count % grain(kGrainBytes), grain(kGrainBytes), f);"),
    Breakage("deterministic mode runs in parallel", PARALLEL,
             "count <= grain(kGrainBytes) ||\n      at::globalContext().deterministicAlgorithms()",
             "count <= grain(kGrainBytes)"),
    Breakage("a forked process waits for OpenMP", PARALLEL, "else if (came_through_fork()) {", "else if (false) {"),
    Breakage("a new thread's share is lost", "csrc/cpu/parallel.cpp", "{ f(begin, end); });",
             "{ f(begin + 1, end); });"),
    # Rules on memory
    Breakage("overlap not checked", MEMORY, "!regions_overlap(later, earlier)", "true"),
    Breakage("overlap by bounding boxes", MEMORY, "  return SumSearch(std::move(merged))\n      .reaches(static_cast<"
             "int64_t>(b.base - a.base));", "  return true;"),
    Breakage("overlap search loses merged terms", MEMORY, "merged.back().high += term.high;", ""),
    Breakage("storage bound off by one", MEMORY, "within && last < capacity", "within && last <= capacity"),
    Breakage("expanded caches not refused", MEMORY, "t.tensor->size(dim) > 1 && t.tensor->stride(dim) == 0",
             "t.tensor->size(dim) > 1 && t.tensor->stride(dim) < 0"),
    Breakage("value's Nct stride taken from key", SCATTER_ARGS, "apply_nct(value_arg, strides[1], offsets[1],",
             "apply_nct(value_arg, strides[0], offsets[1],"),
    Breakage("Nct's bound forgets the last row", SCATTER_ARGS, "!__builtin_add_overflow(end, width, &end) &&", ""),
    # Rules on values
    Breakage("values checked after writing", SCATTER, "  check_scatter_values(args);\n  if (args.is_compressed()) {\n"
             "    scatter_heads(args);", "  if (args.is_compressed()) {\n    scatter_heads(args);\n"
             "    check_scatter_values(args);"),
    Breakage("slot behind the end accepted", SCATTER_ARGS, "static_cast<int64_t>(largest) < limit",
             "static_cast<int64_t>(largest) <= limit"),
    Breakage("room of a head off by one", SCATTER_ARGS, "head.slot <= num_slots - rows", "head.slot < num_slots"),
    Breakage("sum of seq_lens not checked", SCATTER_ARGS, "total == static_cast<uint64_t>(args.num_tokens)",
             "total <= static_cast<uint64_t>(args.num_tokens)"),
    Breakage("window longer than its sequence accepted", SCATTER_ARGS, "head.window >= 0 && head.window <= head.length",
             "head.window >= 0"),
    Breakage("rows of a load not bounded together", LOAD_ARGS, "length <= args.num_rows - row",
             "length <= args.num_rows"),
    Breakage("table column not bounded", LOAD_ARGS, "first <= args.num_columns - blocks", "first < args.num_columns"),
    Breakage("block id behind the end accepted", LOAD_ARGS, "block >= 0 && block < args.num_blocks",
             "block >= 0 && block <= args.num_blocks"),
    Breakage("negative block id accepted", LOAD_ARGS, "block >= 0 && block < args.num_blocks",
             "block < args.num_blocks"),
    # Rules on shapes and registration
    # Lines and pairs of tokens
    Breakage("neighbouring tokens swapped in a line", AVX512, "load_pair(dense[t] + from, dense[t + 1] + from)",
             "load_pair(dense[t + 1] + from, dense[t] + from)"),
    Breakage("tokens taken for neighbours", AVX512, "paged[t + 1] == paged[t] + kNzUnit", "tokens > 1"),
    Breakage("odd last unit not gathered by lines", AVX512, "if (u < units) {", "if (u + 1 < units) {"),
    Breakage("rest of a run behind its lines lost", AVX512,
             "const int64_t done = copy_lines<true>(dst, src, head, n);\n  if (done < n) {",
             "const int64_t done = copy_lines<true>(dst, src, head, n);\n  if (done < head) {"),
    # Eager calls
    Breakage("modes are not asked", "csrc/eager_call.cpp", "if (!no_mode_is_active() || !(", "if (!("),
    Breakage("a subclass is taken for a tensor", "csrc/eager_call.cpp",
             "value(THPVariable_CheckExact(object) ?", "value(THPVariable_Check(object) ?"),
    Breakage("autograd does not learn of a write", "csrc/written.h", "t.unsafeGetTensorImpl()->bump_version();", ";"),
    # Keys and values in one tensor
    Breakage("values written over keys", SCATTER_ARGS, "packed_plane(in.value, packed, packed.value_start)",
             "packed_plane(in.value, packed, 0)"),
    Breakage("keys read for values", LOAD_ARGS, "packed_plane(in.value, packed, packed.value_start)",
             "packed_plane(in.value, packed, 0)"),
    Breakage("heads taken for tokens in BHNC", "csrc/packed_layout.cpp", "4, -1, 0, 2, 1}", "4, -1, 0, 1, 2}"),
    Breakage("halves over each other accepted", "csrc/packed_layout.cpp", "!regions_overlap(region(0, cache.key_size),",
             "true || !regions_overlap(region(0, cache.key_size),"),
    Breakage("sizes that no number holds accepted", "csrc/tensor_rules.cpp", "bytes >= kLimit) {\n      return false;",
             "bytes >= kLimit) {\n      return true;"),
    Breakage("windows counted in 64 bits", SCATTER_ARGS, "bounded_product(args.batch, args.num_heads)",
             "args.batch * args.num_heads"),
    Breakage("last dimension may be strided", "csrc/tensor_rules.cpp",
             "t.tensor->size(-1) <= 1 || t.tensor->stride(-1) == 1", "t.tensor->size(-1) >= 0"),
    Breakage("gradients are lost silently", "csrc/tensor_rules.cpp",
             "!(t->requires_grad() && at::GradMode::is_enabled())", "t->dim() >= 0"),
    Breakage("mutation of a cache not declared", "csrc/ops.cpp", "Tensor(a!) key_cache, ", "Tensor key_cache, "),
    Breakage("no refusal for other backends", "csrc/no_kernel.cpp", 'm.impl("paged_cache_load"',
             'if (false) m.impl("paged_cache_load"'),
    # Python
    Breakage("fake kernel checks nothing", "pacache_torch/fake.py", "    _rules.check_load(",
             "    return\n    _rules.check_load("),
    Breakage("fake kernels not registered", "pacache_torch/__init__.py", "    fake.register()", "    pass"),
    Breakage("another text in the Python rules", "pacache_torch/_rules.py", '"must have num_tokens {num_rows} as key',
             '"must have {num_rows} tokens as key'),
)  # fmt: skip


def run(command: list[str], folder: Path, timeout: float = 1200) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PACACHE_WITH_NPU": "0", "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)


def build(folder: Path) -> None:
    ran = run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], folder)
    if ran.returncode != 0:
        sys.exit("it does not build:\n" + ran.stdout[-3000:] + ran.stderr[-3000:])


def first_failure(folder: Path) -> str | None:
    """Run the tests until one fails; give its name, or None if all passed."""
    options = ["-x", "-q", "--no-header", "-rfE", "-p", "no:cacheprovider", "--tb=no", "--show-capture=no"]
    try:
        ran = run([sys.executable, "-m", "pytest", *options, *TESTS], folder)
    except subprocess.TimeoutExpired:
        return "the tests hang"
    if ran.returncode == 0:
        return None
    if ran.returncode < 0:
        return f"the process dies of signal {-ran.returncode}"
    found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", ran.stdout, re.MULTILINE)
    if found is None:
        sys.exit("pytest fails without a failing test:\n" + ran.stdout[-3000:] + ran.stderr[-3000:])
    return found[1].split("[")[0]


def try_one(breakage: Breakage, folder: Path) -> str | None:
    """Break the copy, see what fails, mend it."""
    path = folder / breakage.file
    text = path.read_text()
    path.write_text(text.replace(breakage.old, breakage.new))
    try:
        if path.suffix != ".py":
            build(folder)
        return first_failure(folder)
    finally:
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="breakages whose description or file matches this")
    parser.add_argument("--keep", action="store_true", help="leave the copy behind")
    options = parser.parse_args()
    chosen = [b for b in BREAKAGES if re.search(options.only, f"{b.what} {b.file}")]
    for breakage in chosen:
        count = (ROOT / breakage.file).read_text().count(breakage.old)
        if count != 1:
            sys.exit(f"'{breakage.what}' is out of date: its text stands {count} times in {breakage.file}")

    folder = Path(tempfile.mkdtemp(prefix="mutate-")) / "repository"
    left_out = shutil.ignore_patterns(".git", ".*cache*", ".hypothesis", ".venv*", "build", "*.so", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=left_out)
    survivors = []
    try:
        started = time.monotonic()
        build(folder)
        failure = first_failure(folder)
        if failure is not None:
            sys.exit(f"the suite fails as it is: {failure}")
        print(f"The suite passes as it is ({time.monotonic() - started:.0f} s with the build).\n", flush=True)
        print("| broken | in | noticed by |\n|---|---|---|", flush=True)
        for breakage in chosen:
            killer = try_one(breakage, folder)
            if killer is None:
                survivors.append(breakage.what)
            print(f"| {breakage.what} | {breakage.file} | {killer or '**nothing**'} |", flush=True)
    finally:
        if options.keep:
            print(f"\nThe copy is in {folder}")
        else:
            shutil.rmtree(folder.parent)
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} noticed.")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
