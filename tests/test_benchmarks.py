"""The benchmarks run, their files hold what they promise, and the README's block is made from them alone.

Nothing here looks at a time: figures of a busy machine mean nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
# One row of every kind.
CPU_ROWS = (
    "scatter/norm/(1|64|512|1024)/|scatter/norm/32/cold|scatter/nz/64|scatter/(nhsd|mla|int8)/512|alibi|omni|rope"
    "|load/norm/1x(128|1024)$|load/nz/1x|strided/(qkv|half)/pages|model/.*/decode-32"
)


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    # Threads that wait without spinning: other tests may run beside this one.
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, check=False, timeout=300)


def run_well(script: str, *arguments: object) -> str:
    done = run(script, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of benchmarks/ as they import one another."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1"))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a --quick run of the CPU set."""
    folder = tmp_path_factory.mktemp("results")
    table = run_well("cpu_copy.py", "--quick", "--rows", CPU_ROWS, "--output", folder / "cpu_copy.json")
    assert "scatter PA_NZ, 64 tokens random, 1 thread" in table and "written: " in table
    table = run_well("host_cost.py", "--quick", "--output", folder / "host_cost.json")
    assert "empty op" in table
    return folder


def read(results: Path, name: str) -> dict[str, Any]:
    return json.loads((results / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["cpu_copy", "host_cost"])
def test_a_file_says_where_how_and_every_sample(results: Path, name: str) -> None:
    document = read(results, name)
    assert document["schema"] == 1 and document["benchmark"] == name
    assert document["quick"] is True and document["simulated"] is False
    machine = document["machine"]
    for key in ("cpu", "usable_cores", "caches", "versions", "built_with", "openmp", "revision", "load_average"):
        assert key in machine
    assert machine["versions"]["torch"] and machine["versions"]["pacache_torch"]
    assert len({row["id"] for row in document["rows"]}) == len(document["rows"]) > 3
    for row in document["rows"]:
        assert set(row["summary"]) == set(row["samples"])
        assert row["checks"], row["id"]
        for peer, samples in row["samples"].items():
            assert samples and min(samples) > 0
            assert row["summary"][peer]["n"] == len(samples)
        for check in row["checks"]:
            assert (check["met"] is None) == (check["target"] is None)


def test_the_machine_is_not_named(results: Path) -> None:
    for path in results.glob("*.json"):
        text = path.read_text()
        assert str(ROOT) not in text and os.uname().nodename not in text


def test_peers_that_are_not_there_are_named(results: Path, tmp_path: Path) -> None:
    output = tmp_path / "vllm.json"
    run_well("cpu_copy.py", "--quick", "--threads", "1", "--rows", "norm/4096/pages", "--output", output)
    document = json.loads(output.read_text())
    assert document["absent"] == {"vLLM cpu_attn_reshape_and_cache": "no --vllm-library given"}
    run_well(
        "cpu_copy.py", "--quick", "--threads", "1", "--rows", "norm/4096/pages", "--output", output,
        "--vllm-library", tmp_path / "missing.so",
    )  # fmt: skip
    assert "missing.so" in json.loads(output.read_text())["absent"]["vLLM cpu_attn_reshape_and_cache"]


def test_one_library_with_an_openmp_of_its_own_would_be_seen(results: Path) -> None:
    assert len(read(results, "cpu_copy")["machine"]["openmp"]) == 1


def test_every_row_of_the_table_is_there(module: Any) -> None:
    cpu_copy = module("cpu_copy")
    specs = cpu_copy.all_specs(cpu_copy.VllmOp(None), [1, 2])
    ids = [spec.id for spec in specs]
    assert len(set(ids)) == len(ids)
    for wanted in (
        *(f"scatter/norm/{tokens}/pages" for tokens in (512, *cpu_copy.SWEEP)),
        *(f"scatter/norm/{tokens}/random" for tokens in (1, 64, 4096, 16384)),
        *(f"scatter/nz/{tokens}" for tokens in ("512/pages", "4096/pages", "64/random", "4096/random")),
        "scatter/nhsd/4096/pages", "scatter/mla/4096/pages", "scatter/int8/4096/pages",
        "scatter/alibi", "scatter/omni", "scatter/rope",
        "load/norm/8x1024", "load/norm/1x8192", "load/norm/8x4096", "load/nz/8x1024",
        "scatter/strided/qkv/pages", *(f"load/strided/{layout}" for layout in ("split", "split_h", "half")),
        "threads/scatter/32768", "model/deepseek-v3-mla/prefill-8192", "model/llama-3-70b-tp8/decode-256",
    ):  # fmt: skip
        assert wanted in ids


def test_a_result_that_is_wrong_stops_the_run(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_copy = module("cpu_copy")
    monkeypatch.setattr(cpu_copy, "scatter", lambda *tensors, **modes: None)
    built = cpu_copy.build_scatter_norm(64, "random")
    with pytest.raises(AssertionError, match="not what it must be"):
        built.verify()


def test_values_are_ratios_of_medians(module: Any) -> None:
    harness = module("harness")
    samples = {"pacache": [1.0, 2.0, 4.0], "copy_": [2.0, 2.0, 20.0], "memcpy": [3.0, 3.0, 3.0]}
    fast = harness.judge(harness.speed("copy_", 1.0), samples)
    assert fast["value"] == 1.0 and fast["met"] is True
    best = harness.judge(harness.speed(("memcpy", "copy_", "absent"), 1.1), samples)
    assert best["fastest"] == "copy_" and best["met"] is False
    assert harness.judge(harness.Check("time", ("memcpy",), 0.5, allowance_us=0.5e6), samples)["value"] == 0.5
    assert harness.judge(harness.Check("extra_us", ("copy_",), 0.0), samples)["met"] is True
    assert harness.judge(harness.speed("absent"), samples) is None


def test_compare_tells_a_change_from_the_spread(results: Path, tmp_path: Path) -> None:
    before = results / "host_cost.json"
    assert " 0 faster, 0 slower," in run_well("compare.py", before, before)
    slower = read(results, "host_cost")
    for summary in (row["summary"]["pacache"] for row in slower["rows"]):
        summary.update({name: value * 100 for name, value in summary.items()})
    after = tmp_path / "after.json"
    after.write_text(json.dumps(slower))
    assert f" 0 faster, {len(slower['rows'])} slower," in run_well("compare.py", before, after)
    assert run("compare.py", before, results / "cpu_copy.json").returncode == 2


def test_plots_appear(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not ours: matplotlib is not installed (requirements/bench.txt)")
    run_well("plot.py", "--results", results, "--output", tmp_path)
    for name in ("bandwidth", "host_cost"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    assert run("plot.py", "--results", tmp_path, "--output", tmp_path).returncode == 2, "nothing to draw"


def test_the_readme_block_is_made_and_unmade(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not ours: matplotlib is not installed (requirements/bench.txt)")
    readme = tmp_path / "README.md"
    empty = "before\n\n<!-- benchmarks:begin -->\nold\n<!-- benchmarks:end -->\n\nafter\n"
    readme.write_text(empty)
    paths = ("--plots", tmp_path / "plots", "--readme", readme)
    refused = run("readme.py", "--results", results, *paths)
    assert refused.returncode == 2 and "--quick" in refused.stderr and readme.read_text() == empty
    run_well("readme.py", "--allow-quick", "--results", results, *paths)
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| scatter Norm, 64 tokens random | copy_ |" in text and "(plots/bandwidth.svg)" in text
    run_well("readme.py", "--allow-quick", "--results", results, *paths)
    assert readme.read_text() == text
    run_well("readme.py", "--empty", *paths)
    assert "make bench" in readme.read_text() and "(plots/bandwidth.svg)" not in readme.read_text()
    readme.write_text("no markers\n")
    assert run("readme.py", "--empty", *paths).returncode != 0


def test_the_readme_has_its_block_once(module: Any) -> None:
    pytest.importorskip("matplotlib", reason="not ours: matplotlib is not installed (requirements/bench.txt)")
    readme = module("readme")
    text = (ROOT / "README.md").read_text()
    assert readme.BEGIN in readme.replace_block(text, "")


def test_npu_results_are_judged_and_marked(module: Any) -> None:
    host_cost = module("host_cost")
    counts = {"phase_one": 0, "casts": 100, "handles": 0, "waits": 0}

    def case(**peers: float) -> dict[str, Any]:
        times = {name.replace("_npu_atb", "_npu.atb"): [value, value] for name, value in peers.items()}
        return {"calling": times, "idle": times, "counts": dict.fromkeys(times, counts)}

    scatter = case(pacache=8e-6, torch_npu=1e-5)
    load = case(pacache=1.0, torch_npu_atb=1.0)
    found = {
        "reused": {"cases": {"scatter/same": scatter, "scatter/int64": scatter, "load": load}},
        "hidden": {"cases": {"scatter/same": case(pacache=4e-5, torch_npu=4e-5)}},
    }
    rows = {row.id: row.to_json() for row in host_cost.npu_rows(1, found, simulated=True)}
    assert all(row["simulated"] for row in rows.values())
    same = {check["against"]: check for check in rows["npu/scatter/same/tq1/calling"]["checks"]}
    assert same["torch_npu"]["met"] and same["torch_npu, executors not reused"]["met"]
    assert same["first phases in 100 calls"]["met"]
    assert rows["npu/load/atb/tq1/calling"]["checks"][0]["met"] is False
    alone = next(host_cost.npu_rows(1, {"reused": found["reused"]}, simulated=False))
    assert "torch_npu, executors not reused" in alone.absent and not alone.simulated


def test_without_a_device_there_are_no_device_figures(tmp_path: Path) -> None:
    output = tmp_path / "npu.json"
    done = run("npu_device.py", "--output", output)
    assert done.returncode == 2 and done.stderr.startswith("npu_device: not measured: ")
    assert done.stderr.rstrip().endswith(".") and not output.exists()
