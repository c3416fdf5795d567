"""A process of its own that generates with one attention backend: ``python generate.py JOB.json RESULT.json``.

The backend comes from the environment, as for a user: ``PACACHE_VLLM_BACKEND`` through the plugin that vLLM finds. What
ran is observed from outside of it: by torch's profiler, by the objects that vLLM made, and by what its scheduler asked
of its executor.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from attending import implementation, implementations_of
from scenarios import NEW_TOKENS, SCENARIOS
from torch.profiler import ProfilerActivity, profile
from vllm import LLM, SamplingParams

OBSERVED = (
    "pacache::scatter_pa_kv_cache",
    "pacache::paged_cache_load",
    "_C::cpu_attn_reshape_and_cache",
    "_C::cpu_attention_with_kv_cache",
)


class Watch:
    """Counts operators while it is entered, and the kinds of steps that the executor is asked for."""

    def __init__(self, executor: Any) -> None:
        self.operators: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self._execute = executor.execute_model
        executor.execute_model = self._count_and_execute

    def _count_and_execute(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        counts = list(scheduled.num_scheduled_tokens.values())
        if counts:
            more = sum(count > 1 for count in counts)
            self.steps["decode" if more == 0 else "prefill" if more == len(counts) else "both"] += 1
        return self._execute(scheduled, *args, **kwargs)

    def __enter__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._profile.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        for event in self._profile.events():
            if event.name in OBSERVED:
                self.operators[event.name] += 1


def attention_layers(llm: LLM) -> dict[str, Any]:
    """The attention layers of the model, by name."""
    return dict(llm.llm_engine.vllm_config.compilation_config.static_forward_context)


def preemptions(llm: LLM) -> int:
    """How many requests have had to give their blocks back."""
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def digest(tensors: list[torch.Tensor]) -> str:
    """One text for all bytes."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def dummy_batch(llm: LLM, watch: Watch) -> dict[str, Any]:
    """Have the engine run a batch without requests, which comes with slot -1, and look at the caches."""
    caches = [layer.kv_cache for layer in attention_layers(llm).values()]
    before, counted = digest(caches), watch.operators["pacache::scatter_pa_kv_cache"]
    with watch:
        llm.collective_rpc("execute_dummy_batch")
    return {
        "unchanged": digest(caches) == before,
        "written": any(bool(cache.count_nonzero()) for cache in caches),
        "writes": watch.operators["pacache::scatter_pa_kv_cache"] - counted,
    }


def engine(name: str, job: dict[str, Any]) -> LLM:
    """An engine for a scenario."""
    arguments: dict[str, Any] = {
        "dtype": job["dtype"],
        "enforce_eager": job["eager"],
        "block_size": job["block_size"],
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
        "load_format": "safetensors",
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "seed": 0,
        **SCENARIOS[name].arguments,
    }
    return LLM(model=job["model"], **arguments)


def generate(llm: LLM, prompts: list[list[int]], logprobs: bool) -> list[Any]:
    """Greedy tokens for each prompt."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=2 if logprobs else None
    )
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


def run(name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Generate one scenario with an engine of its own, in this process, and say what happened."""
    llm = engine(name, job)
    watch = Watch(llm.llm_engine.engine_core.engine_core.model_executor)
    result: dict[str, Any] = {"tokens": [], "logprobs": [], "leads": [], "cached": []}
    for prompts in SCENARIOS[name].rounds:
        with watch:
            outputs = generate(llm, prompts, job["logprobs"])
        for output in outputs:
            chosen = output.outputs[0]
            result["tokens"].append(list(chosen.token_ids))
            result["cached"].append(output.num_cached_tokens)
            if job["logprobs"]:
                best = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in chosen.logprobs]
                result["logprobs"].append([first for first, _ in best])
                result["leads"].append(min(first - second for first, second in best))
    layers = attention_layers(llm)
    result |= {
        "steps": dict(watch.steps),
        "operators": dict(watch.operators),
        "preemptions": preemptions(llm),
        "implementations": [implementation(layer) for layer in layers.values()],
        "caches": digest([layer.kv_cache for layer in layers.values()]),
        "contiguous": [
            [view.is_contiguous() for view in layer.impl.split(layer.kv_cache)]
            for layer in layers.values()
            if hasattr(layer.impl, "split")
        ],
    }
    result["dummy_batch"] = dummy_batch(llm, watch)
    return result


def run_elsewhere(name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Generate one scenario with an engine in a process that vLLM starts."""
    from pacache_torch.integrations import vllm_plugin

    vllm_plugin.register(job["register"])
    llm = engine(name, job)
    (prompts,) = SCENARIOS[name].rounds
    tokens = [list(output.outputs[0].token_ids) for output in generate(llm, prompts, logprobs=False)]
    (implementations,) = llm.apply_model(implementations_of)
    return {"tokens": tokens, "implementations": implementations}


def main(job_file: str, result_file: str) -> None:
    """Run the scenarios of a job one after the other."""
    job = json.loads(Path(job_file).read_text())
    if "backend" in job:
        # A backend of the tests in the place of the plugin's.
        from vllm.plugins import load_general_plugins
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        load_general_plugins()
        register_backend(AttentionBackendEnum.CPU_ATTN, job["backend"])
    if "rows_at_once" in job:
        from pacache_torch.integrations import vllm_backend

        vllm_backend.ROWS_AT_ONCE = job["rows_at_once"]
    results = {}
    for name in job["scenarios"]:
        results[name] = run_elsewhere(name, job) if job["register"] else run(name, job)
        gc.collect()
    Path(result_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
