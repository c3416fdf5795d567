"""A real vLLM engine generates through the operators what it generates through its own CPU attention.

Each backend runs in a process of its own, chosen as a user chooses it, by ``PACACHE_VLLM_BACKEND`` and the plugin that
vLLM finds in the installed package. Right-looking tokens can come from the wrong backend, so every run also says which
classes attended, how often which operator was called, and what the scheduler did.

float32 is compared token for token. In 16 bits two attention kernels round differently and greedy tokens part where two
logits are nearly equal, so there the operator is compared, bit for bit, with a plain write under the same attention.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_directory
import pytest
import record
from clean_environment import clean_environment
from model_directory import NUM_LAYERS
from record import Job, Results
from scenarios import NEW_TOKENS, SCENARIOS

HERE = Path(__file__).resolve().parent

FLOAT32_NOISE = 1e-3  # of a logprob; 40 times what is seen


@pytest.fixture(scope="session")
def generate(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[Job], Results]:
    """Run a job, once in a session."""
    model = model_directory.make(tmp_path_factory.mktemp("model"))
    done = request.config.stash[record.DONE]

    def run(job: Job) -> Results:
        if job not in done:
            done[job] = _run(job, model, tmp_path_factory.mktemp("job"))
        return done[job]

    return run


def _run(job: Job, model: Path, folder: Path) -> Results:
    asked: dict[str, Any] = {
        "model": str(model),
        "dtype": job.dtype,
        "scenarios": job.scenarios,
        "eager": job.eager,
        # Small parts of the sampler are compiled for them, also in an engine that is eager.
        "logprobs": job.eager and not job.own_process,
        "block_size": job.block_size,
        "register": job.backend if job.own_process else None,
    }
    if job.instead is not None:
        asked["backend"] = f"other_backends.{job.instead}"
    if job.rows_at_once is not None:
        asked["rows_at_once"] = job.rows_at_once
    (folder / "job.json").write_text(json.dumps(asked))
    environment = clean_environment(folder)
    if job.eager:
        environment["TORCH_COMPILE_DISABLE"] = "1"
    if job.own_process:
        environment |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # to ask it for its classes
        }
    elif job.backend is not None:
        environment["PACACHE_VLLM_BACKEND"] = job.backend
    ran = subprocess.run(
        [sys.executable, HERE / "generate.py", folder / "job.json", folder / "results.json"],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]
    return json.loads((folder / "results.json").read_text())


OWN = Job()
PACKED = Job("packed")
CONTIGUOUS = Job("contiguous")


def same_tokens(ours: Results, own: Results, scenario: str) -> None:
    """Every request gets the tokens that vLLM's own backend gives it."""
    expected = own[scenario]["tokens"]
    assert len(expected) == sum(len(prompts) for prompts in SCENARIOS[scenario].rounds)
    assert all(len(tokens) == NEW_TOKENS for tokens in expected)
    assert ours[scenario]["tokens"] == expected


def ran_through_the_operators(result: dict[str, Any], implementation: str) -> None:
    """Every layer of every step wrote by one call and read by one, and vLLM's own kernels did not run."""
    name = f"pacache_torch.integrations.vllm_backend.{implementation}"
    assert result["implementations"] == [name] * NUM_LAYERS
    calls = NUM_LAYERS * sum(result["steps"].values())
    assert calls > 0
    assert result["operators"] == {"pacache::scatter_pa_kv_cache": calls, "pacache::paged_cache_load": calls}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_installed_package_changes_no_engine(generate: Callable[[Job], Results], scenario: str) -> None:
    """It is what the other tests compare with, too: scenarios in which what they are named after has happened."""
    result = generate(OWN)[scenario]
    assert result["implementations"] == ["vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"] * NUM_LAYERS
    calls = NUM_LAYERS * sum(result["steps"].values())
    assert result["operators"] == {"_C::cpu_attn_reshape_and_cache": calls, "_C::cpu_attention_with_kv_cache": calls}
    assert min(result["leads"]) > FLOAT32_NOISE, "the best token must lead by more than rounding"
    assert len({tuple(tokens) for tokens in result["tokens"]}) > 3, "requests must not all say the same"
    if scenario == "mixed":
        assert result["steps"]["decode"] >= NEW_TOKENS - 1
    if scenario == "chunked":
        assert result["steps"]["prefill"] > 1 and result["steps"]["both"] > 1 and result["steps"]["decode"] > 1
    assert (max(result["cached"]) > 0) == (scenario == "prefix")
    assert (result["preemptions"] > 0) == (scenario == "preempt")


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("job", [PACKED, CONTIGUOUS], ids=lambda job: job.backend)
def test_tokens_are_those_of_vllms_own_attention(generate: Callable[[Job], Results], job: Job, scenario: str) -> None:
    ours, own = generate(job)[scenario], generate(OWN)[scenario]
    ran_through_the_operators(ours, "PackedImpl" if job is PACKED else "ContiguousImpl")
    same_tokens(generate(job), generate(OWN), scenario)
    for ours_of_one, own_of_one in zip(ours["logprobs"], own["logprobs"], strict=True):
        assert ours_of_one == pytest.approx(own_of_one, abs=FLOAT32_NOISE)
    for what in ("steps", "cached", "preemptions"):
        assert ours[what] == own[what]


@pytest.mark.parametrize("job", [PACKED, CONTIGUOUS], ids=lambda job: job.backend)
def test_the_caches_are_what_their_name_says(generate: Callable[[Job], Results], job: Job) -> None:
    for result in generate(job).values():
        assert result["contiguous"] == [[job is CONTIGUOUS] * 2] * NUM_LAYERS


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_layout_of_the_cache_changes_no_bit(generate: Callable[[Job], Results], scenario: str) -> None:
    packed, contiguous = generate(PACKED)[scenario], generate(CONTIGUOUS)[scenario]
    assert packed["logprobs"] == contiguous["logprobs"]


@pytest.mark.parametrize("job", [PACKED, CONTIGUOUS], ids=lambda job: job.backend)
def test_a_batch_without_requests_leaves_the_cache_alone(generate: Callable[[Job], Results], job: Job) -> None:
    """What an idle rank runs comes with slot -1."""
    for result in generate(job).values():
        assert result["dummy_batch"] == {"unchanged": True, "written": True, "writes": NUM_LAYERS}


def test_contexts_that_are_read_in_parts(generate: Callable[[Job], Results]) -> None:
    """The requests of "chunked" are longer together than the longest may be, which is what a call then reads.

    With blocks smaller than vLLM's own attention takes.
    """
    job = Job("contiguous", scenarios=("chunked",), rows_at_once=1, block_size=16)
    result = generate(job)["chunked"]
    writes, reads = (result["operators"][f"pacache::{name}"] for name in ("scatter_pa_kv_cache", "paged_cache_load"))
    assert writes == NUM_LAYERS * sum(result["steps"].values()) < reads
    assert result["logprobs"] == generate(PACKED)["chunked"]["logprobs"]
    same_tokens(generate(job), generate(OWN), "chunked")


@pytest.mark.parametrize("fault", ["FaultyWrite", "FaultyRead"])
@pytest.mark.parametrize("scenario", ["mixed", "prefix"])
def test_a_fault_is_noticed(generate: Callable[[Job], Results], fault: str, scenario: str) -> None:
    job = Job("packed", fault, scenarios=("mixed", "prefix"))
    faulty = generate(job)
    assert faulty[scenario]["operators"] == generate(PACKED)[scenario]["operators"]
    with pytest.raises(AssertionError):
        same_tokens(faulty, generate(OWN), scenario)


@pytest.mark.parametrize(
    ("dtype", "scenario"),
    [("bfloat16", "chunked"), ("bfloat16", "prefix"), ("bfloat16", "preempt"), ("float16", "mixed")],
)
def test_16_bits_are_those_of_a_plain_write(generate: Callable[[Job], Results], dtype: str, scenario: str) -> None:
    scenarios = ("chunked", "prefix", "preempt") if dtype == "bfloat16" else ("mixed",)
    ours = generate(Job("packed", dtype=dtype, scenarios=scenarios))[scenario]
    plain = generate(Job("packed", record.PLAIN, dtype=dtype, scenarios=scenarios))[scenario]
    ran_through_the_operators(ours, "PackedImpl")
    assert plain["implementations"] == ["other_backends.WritesByIndexing"] * NUM_LAYERS
    assert "pacache::scatter_pa_kv_cache" not in plain["operators"]
    for what in ("tokens", "logprobs", "caches", "steps", "cached", "preemptions"):
        assert ours[what] == plain[what], what


def test_an_engine_in_a_process_of_its_own(generate: Callable[[Job], Results]) -> None:
    """What is registered in Python, with no variable set, holds in the process that vLLM spawns."""
    job = Job("contiguous", scenarios=("mixed",), own_process=True)
    name = "pacache_torch.integrations.vllm_backend.ContiguousImpl"
    assert generate(job)["mixed"]["implementations"] == [name] * NUM_LAYERS
    same_tokens(generate(job), generate(OWN), "mixed")


def test_a_compiled_engine(generate: Callable[[Job], Results]) -> None:
    job = Job("packed", scenarios=("mixed", "prefix"), eager=False)
    for scenario in job.scenarios:
        ran_through_the_operators(generate(job)[scenario], "PackedImpl")
        same_tokens(generate(job), generate(OWN), scenario)
