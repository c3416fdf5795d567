"""Contract of ``pacache_torch.integrations.transformers``.

With a `PagedCache`, ``generate`` gives token for token what it gives with transformers' own cache, for grouped heads
(Llama), norms on the heads (Qwen) and a latent cache whose two parts have different sizes (DeepSeek): greedy, sampled,
with beams, left-padded, from a reused prefix, eager and compiled. Everything that is read, and at the end every block,
is compared bit for bit with a dense cache that was given the same keys and values. Models are made from configurations
with random weights; nothing is downloaded.
"""

from __future__ import annotations

import os

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # its disk cache replays code for an old schema
os.environ["HF_HUB_OFFLINE"] = "1"

import copy
import gc
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from pacache_torch import ops
from pacache_torch.blocks import OutOfBlocks
from pacache_torch.integrations import transformers as integration
from pacache_torch.integrations.transformers import PagedCache

pytestmark = [
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning"),
]

VOCABULARY, PROMPT, NEW = 97, 21, 18
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.6,  # large enough that the best token stands clear of the second
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
    "deepseek": lambda: transformers.DeepseekV3Config(**{**SIZES, **LATENT}),
    "window": lambda: transformers.MistralConfig(**SIZES, head_dim=8, sliding_window=7),
}
TWO_LAYERS = "llama of two layers"  # compiles in less time
FORMS: dict[str, dict[str, Any]] = {
    "growing": {"block_size": 5},
    "PA_NZ": {"block_size": 4, "cache_mode": "PA_NZ"},
    "reserved": {"block_size": 4, "max_length": PROMPT + NEW + 2},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 4},
    "sampled beams": {"do_sample": True, "num_beams": 3},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep the many small matmuls from waiting for a second core that someone else has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


_models: dict[str, Any] = {}


def make(name: str) -> Any:
    """A model with random weights, the same every time."""
    if name not in _models:
        torch.manual_seed(0)
        two = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 2})
        configuration = two if name == TWO_LAYERS else CONFIGURATIONS[name]()
        _models[name] = transformers.AutoModelForCausalLM.from_config(configuration).eval()
    return _models[name]


def prompts(batch: int = 3) -> dict[str, Tensor]:
    """Left-padded prompts of different lengths."""
    ids = torch.randint(1, VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : (9, 3)[row % 2]] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model: Any, inputs: dict[str, Tensor], cache: Any = None, **options: Any) -> Any:
    torch.manual_seed(3)
    return model.generate(**inputs, past_key_values=cache, **{"max_new_tokens": NEW, "do_sample": False, **options})


class Compared(PagedCache):
    """A paged cache beside a dense one that is given the same; whatever is read must be the same bits."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.dense = transformers.DynamicCache()
        self.rows_compared = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        wanted = self.dense.update(key_states, value_states, layer_idx)
        got = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        for name, ours, theirs in zip(("key", "value"), got, wanted, strict=True):
            ours = ours[:, :, : theirs.size(2)]
            assert ours.shape == theirs.shape
            assert torch.equal(ours, theirs), f"{name} of layer {layer_idx} differs"
            self.rows_compared += ours.size(0) * ours.size(2)
        return got

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.dense.reorder_cache(beam_idx)
        super().reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        # Not all releases of transformers take the number of tokens to keep.
        self.dense.crop(min(tokens_to_remove - self.get_seq_length(), 0) if tokens_to_remove > 0 else tokens_to_remove)
        super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.dense.batch_repeat_interleave(repeats)
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.dense.batch_select_indices(indices)
        super().batch_select_indices(indices)

    def wanted_pools(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each cache with what its blocks must hold; blocks that nobody has written are zero."""
        for layer, pair in enumerate(zip(self.key_caches, self.value_caches, strict=True)):
            dense = self.dense.layers[layer]
            for pool, rows in zip(pair, (dense.keys, dense.values), strict=True):
                wanted = torch.zeros_like(pool)
                for sequence, table in enumerate(self.block_tables):
                    for position in range(rows.size(2)):
                        block, offset = table[position // pool.size(1)], position % pool.size(1)
                        wanted[block, offset] = rows[sequence, :, position]
                yield pool, wanted


# Token for token ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_name", CONFIGURATIONS)
def test_generate_gives_what_the_default_cache_gives(model_name: str, way: str) -> None:
    model, inputs = make(model_name), prompts()
    wanted = generate(model, inputs, **WAYS[way])
    assert len(set(wanted[:, PROMPT:].flatten().tolist())) > 15, "the tokens say something"
    for form in FORMS.values():
        cache = PagedCache(model.config, num_blocks=150, **form)
        assert torch.equal(generate(model, inputs, cache, **WAYS[way]), wanted), form
        # The last token is not fed back.
        assert cache.get_seq_length() == PROMPT + NEW - 1
        assert {tuple(cache.key_caches[0].shape[-2:])} != {tuple(cache.value_caches[0].shape[-2:])} or (
            model_name != "deepseek" or form.get("cache_mode") == "PA_NZ"
        )


def test_the_tokens_are_not_a_matter_of_rounding() -> None:
    for name in CONFIGURATIONS:
        result = generate(make(name), prompts(), return_dict_in_generate=True, output_logits=True)
        best = torch.stack(result.logits).topk(2).values
        assert (best[..., 0] - best[..., 1]).min() > 2e-4, name  # float32 noise of these logits is about 1e-5


def test_every_read_and_write_is_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"scatter_pa_kv_cache": 0, "paged_cache_load": 0}
    for name in calls:
        real = getattr(ops, name)

        def counted(*args: Any, name: str = name, real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            calls[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(ops, name, counted)
    model = make("llama")
    generate(model, prompts(), PagedCache(model.config, num_blocks=40))
    # The prompt's keys and values are at hand and not read back.
    assert calls == {"scatter_pa_kv_cache": 3 * NEW, "paged_cache_load": 3 * (NEW - 1)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model_name", ("llama", "deepseek"))
def test_every_block_holds_what_a_dense_cache_holds(model_name: str, form: str) -> None:
    model = make(model_name)
    cache = Compared(model.config, num_blocks=60, **FORMS[form])
    generate(model, prompts(), cache)
    assert cache.rows_compared == 2 * 3 * 3 * sum(range(PROMPT, PROMPT + NEW))
    if form == "PA_NZ":
        return  # every row has been compared where it was read
    for pool, wanted in cache.wanted_pools():
        assert wanted.any() and torch.equal(pool, wanted)


@pytest.mark.parametrize("form", FORMS)
def test_beams_share_blocks_and_copy_those_they_write(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    real = integration._Pool.copy
    monkeypatch.setattr(
        integration._Pool, "copy", lambda self, copies, device: (copied.append(len(copies)), real(self, copies, device))
    )
    model = make("llama")
    cache = Compared(model.config, num_blocks=200, **FORMS[form])
    generate(model, prompts(), cache, num_beams=4)
    tables = cache.block_tables
    assert sum(copied) > 0 and len(tables) == 12
    blocks = {block for table in tables for block in table}
    assert len(blocks) < sum(len(table) for table in tables), "beams share"
    assert cache.num_free_blocks == 199 - len(blocks)


def test_assisted_generation_crops() -> None:
    model = make("llama")
    inputs = {name: tensor[:1] for name, tensor in prompts().items()}
    inputs["input_ids"][0, 10:20] = inputs["input_ids"][0, :10]  # something to look up
    wanted = generate(model, inputs)
    cache = Compared(model.config, num_blocks=40, block_size=3)
    assert torch.equal(generate(model, inputs, cache, prompt_lookup_num_tokens=4), wanted)
    assert cache.rows_compared > 0


# A prefix, used again -------------------------------------------------------------------------------------------------


def prefilled(model: Any, ids: Tensor, **form: Any) -> Compared:
    cache = Compared(model.config, num_blocks=90, **form)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fork", (PagedCache.fork, copy.deepcopy))
def test_forks_go_on_from_a_prefix_and_do_not_see_each_other(fork: Callable[[Any], Any], form: str) -> None:
    model = make("qwen")
    ids = prompts(1)["input_ids"]
    prefix = PagedCache(model.config, num_blocks=90, **FORMS[form])
    with torch.no_grad():
        model(ids[:, :14], past_key_values=prefix)
    before = prefix.num_free_blocks
    snapshot = [pool.clone() for pool in prefix.key_caches]
    tails = [ids[:, 14:17], ids[:, 17:21], ids[:, 14:15]]
    forks = []
    for tail in tails:
        full = {"input_ids": torch.cat([ids[:, :14], tail], 1)}
        forks.append(fork(prefix))
        assert torch.equal(generate(model, full, forks[-1], max_new_tokens=8), generate(model, full, max_new_tokens=8))
    assert prefix.get_seq_length() == 14
    for pool, old in zip(prefix.key_caches, snapshot, strict=True):
        held = prefix.block_tables[0][: -(-14 // FORMS[form]["block_size"])]
        assert torch.equal(pool[held], old[held])
    # Its own blocks were read, not copied: the whole ones are those of the prefix.
    whole = 14 // FORMS[form]["block_size"]
    assert all(fork.block_tables[0][:whole] == prefix.block_tables[0][:whole] for fork in forks)
    assert forks[0].key_caches[0].data_ptr() == prefix.key_caches[0].data_ptr()
    del forks
    gc.collect()
    assert prefix.num_free_blocks == before, "the blocks of dropped forks are free again"
    full = {"input_ids": torch.cat([ids[:, :14], tails[0]], 1)}
    assert torch.equal(generate(model, full, prefix, max_new_tokens=8), generate(model, full, max_new_tokens=8))


@pytest.mark.parametrize("form", FORMS)
def test_one_prefix_for_a_batch(form: str) -> None:
    model = make("llama")
    ids = prompts(3)["input_ids"]
    ids[:, :11] = ids[0, :11]
    ids[ids == 0] = 5
    cache = prefilled(model, ids[:1, :11], **FORMS[form])
    cache.batch_repeat_interleave(3)
    assert cache.batch_size == 3
    assert torch.equal(generate(model, {"input_ids": ids}, cache), generate(model, {"input_ids": ids}))


@pytest.mark.parametrize("form", FORMS)
def test_cropped_tokens_are_gone_and_their_blocks_are_free(form: str) -> None:
    model = make("deepseek")
    ids = prompts(1)["input_ids"].expand(2, -1)
    cache = prefilled(model, ids, **FORMS[form])
    cache.crop(-8)
    assert cache.get_seq_length() == 13
    assert torch.equal(generate(model, {"input_ids": ids}, cache), generate(model, {"input_ids": ids}))
    cache.crop(0)
    cache.crop(7)  # the form that says how many stay
    assert cache.get_seq_length() == 7
    if form != "reserved":
        assert cache.num_free_blocks == 89 - 2 * 2
    assert torch.equal(generate(model, {"input_ids": ids}, cache), generate(model, {"input_ids": ids}))
    with pytest.raises(ValueError, match=r"PagedCache.crop: must remove at most the 38 tokens there are, got -39"):
        cache.crop(-39)


def test_selected_sequences_stay_and_the_others_blocks_are_free() -> None:
    model, inputs = make("llama"), prompts()
    cache = Compared(model.config, num_blocks=60, block_size=5)
    with torch.no_grad():
        model(inputs["input_ids"], past_key_values=cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert cache.batch_size == 2 and cache.num_free_blocks == 59 - 2 * 5
    with torch.no_grad():
        model(inputs["input_ids"][:2, :3], past_key_values=cache)  # compared where it is read


@pytest.mark.parametrize("form", FORMS)
def test_reset_begins_anew(form: str) -> None:
    model = make("llama")
    cache = PagedCache(model.config, num_blocks=60, **FORMS[form])
    generate(model, prompts(), cache)
    pools = [pool.data_ptr() for pool in cache.key_caches]
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, prompts(), cache), generate(model, prompts()))
    if form != "reserved":
        cache.reset()
        assert cache.num_free_blocks == 59
        assert torch.equal(generate(model, prompts(1), cache), generate(model, prompts(1)))
    assert [pool.data_ptr() for pool in cache.key_caches] == pools


# No copy of a cache ---------------------------------------------------------------------------------------------------


class LargestResult(TorchDispatchMode):
    """The elements of the largest tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_the_size_of_a_cache_is_made(form: str) -> None:
    model = make("llama")
    cache = PagedCache(model.config, num_blocks=1200, **FORMS[form])
    generate(model, prompts(), cache, num_beams=2, max_new_tokens=3)
    cache.reset()
    watch = LargestResult()
    with watch:
        generate(model, prompts(), cache, num_beams=2)
    assert 0 < watch.elements < cache.key_caches[0].numel() // 2


# Compiled -------------------------------------------------------------------------------------------------------------


def test_a_reserved_cache_compiles_whole_and_copies_nothing(fresh_compiler: None) -> None:
    """One Inductor graph for all decode steps; the prompt runs eagerly, as generate's own compilation has it."""
    model, inputs = make(TWO_LAYERS), prompts()
    wanted = generate(model, inputs)
    cache = PagedCache(model.config, num_blocks=61, block_size=4, max_length=PROMPT + NEW)
    step = torch.compile(model.forward, fullgraph=True, dynamic=False)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, NEW, dtype=torch.int64)], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    code: list[str] = []
    with torch.no_grad():
        ids, tokens = inputs["input_ids"], []
        for end in range(PROMPT, PROMPT + NEW):
            options = {
                "attention_mask": mask[:, :end],
                "position_ids": positions[:, end - ids.size(1) : end],
                "past_key_values": cache,
            }
            options = model.prepare_inputs_for_generation(ids, **options)
            if end == PROMPT:
                out = model(**options)
            elif end == PROMPT + 1:
                out, code = run_and_get_code(step, **options)
            else:
                out = step(**options)
            ids = out.logits[:, -1:].argmax(-1)
            tokens.append(ids)
    assert torch.equal(torch.cat(tokens, 1), wanted[:, PROMPT:])
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert sum(text.count("torch.ops.pacache.scatter_pa_kv_cache.default(") for text in code) == 2
    assert not [line for text in code for line in text.splitlines() if "empty_strided_cpu((61, 4, 2, 8)" in line]


@pytest.mark.parametrize("model_name", ("qwen", "deepseek"))
def test_generate_compiles_a_reserved_cache_by_itself(model_name: str, fresh_compiler: None) -> None:
    model, inputs = make(model_name), prompts()
    options = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    options._compile_all_devices = True  # it leaves the CPU out otherwise
    cache = PagedCache(model.config, num_blocks=61, block_size=4, max_length=PROMPT + NEW)
    assert torch.equal(generate(model, inputs, cache, compile_config=options), generate(model, inputs))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    cache.reset()
    assert torch.equal(generate(model, inputs, cache, compile_config=options), generate(model, inputs))
    assert counters["stats"]["unique_graphs"] == 1, "a reset cache is compiled already"


def test_a_growing_cache_breaks_the_graph_and_is_right(fresh_compiler: None) -> None:
    model, inputs = make("llama"), prompts()
    counter = CompileCounterWithBackend("eager")
    with torch.no_grad():
        wanted = model(**inputs).logits
        cache = PagedCache(model.config, num_blocks=61, block_size=4)
        got = torch.compile(model.forward, backend=counter)(**inputs, past_key_values=cache).logits
        assert torch.allclose(got, wanted, atol=1e-4)
        assert counter.frame_count > 1 and counters["graph_break"]
        cache.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="a PagedCache without max_length chooses blocks"):
            torch.compile(model.forward, backend="eager", fullgraph=True)(**inputs, past_key_values=cache)


# Faults that must be seen ---------------------------------------------------------------------------------------------


def next_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.scatter_pa_kv_cache
    monkeypatch.setattr(ops, "scatter_pa_kv_cache", lambda k, v, kc, vc, s, **o: real(k, v, kc, vc, s + 1, **o))


def value_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.scatter_pa_kv_cache
    monkeypatch.setattr(ops, "scatter_pa_kv_cache", lambda k, v, kc, vc, s, **o: real(k, v, kc, vc.clone(), s, **o))


def another_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.paged_cache_load
    monkeypatch.setattr(
        ops, "paged_cache_load", lambda kc, vc, t, n, k, v, **o: real(kc, vc, t.roll(1, 0), n, k, v, **o)
    )


def no_copy_on_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration._Pool, "copy", lambda self, copies, device: None)


def shared_blocks_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pacache_torch.blocks.BlockTable._is_shared", lambda self, index: False)


def beams_not_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration._Batch, "select", lambda self, rows, length: None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "fault",
    (next_slot, value_not_written, another_sequence, no_copy_on_write, shared_blocks_written, beams_not_reordered),
)
def test_a_fault_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama")
    wanted = generate(model, prompts(), num_beams=4)
    fault(monkeypatch)
    tokens = generate(model, prompts(), PagedCache(model.config, num_blocks=200, **FORMS[form]), num_beams=4)
    assert not torch.equal(tokens, wanted), "in the tokens"
    with pytest.raises(AssertionError, match=r"(key|value) of layer \d differs"):
        generate(model, prompts(), Compared(model.config, num_blocks=200, **FORMS[form]), num_beams=4)


# What is refused ------------------------------------------------------------------------------------------------------


def test_a_pool_that_is_too_small_says_so_and_stays_usable() -> None:
    model = make("llama")
    cache = PagedCache(model.config, num_blocks=16, block_size=5)
    with pytest.raises(
        OutOfBlocks,
        match=r"num_blocks must have room for 3 sequences of 26 tokens in blocks of 5 .* got 16: 1 blocks asked for, 0",
    ):
        generate(model, prompts(), cache)
    cache.reset()
    assert cache.num_free_blocks == 15
    assert torch.equal(generate(model, prompts(1), cache), generate(model, prompts(1)))


def test_more_tokens_than_reserved_are_refused() -> None:
    model = make("llama")
    cache = PagedCache(model.config, num_blocks=60, block_size=4, max_length=30)
    with pytest.raises(
        ValueError, match="PagedCache: max_length must be at least the 31 tokens of each sequence, got 30"
    ):
        generate(model, prompts(), cache)


def test_another_batch_is_refused() -> None:
    model = make("llama")
    cache = PagedCache(model.config, num_blocks=60)
    generate(model, prompts(3), cache)
    with pytest.raises(ValueError, match=r"key must have the 3 sequences .* got \[2, 2, 1, 8\]"), torch.no_grad():
        model(prompts(2)["input_ids"][:, :1], past_key_values=cache)


def test_gradients_are_refused() -> None:
    model = make("llama")
    with pytest.raises(RuntimeError, match=r"scatter_pa_kv_cache: .*grad"):
        model(**prompts(), past_key_values=PagedCache(model.config, num_blocks=60))


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
        ({"num_blocks": 9, "block_size": 0}, "block_size must be at least 1, got 0"),
        ({"num_blocks": 9, "max_length": 0}, "max_length must be at least 1 or None, got 0"),
        ({"num_blocks": 9, "cache_mode": "NZ"}, "cache_mode must be 'Norm' or 'PA_NZ', got 'NZ'"),
    ),
)
def test_sizes_that_are_none_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedCache(CONFIGURATIONS["llama"](), **options)


@pytest.mark.parametrize(
    ("configuration", "message"),
    (
        (lambda: transformers.T5Config(), "the model must be a decoder, got T5Config"),
        (lambda: transformers.Qwen3NextConfig(), "layers must be attention layers, got linear_attention"),
        (
            lambda: transformers.Gemma3nTextConfig(),
            "each layer must have keys and values of its own, got 15 that share",
        ),
    ),
)
def test_models_with_other_layers_are_refused(configuration: Callable[[], Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        PagedCache(configuration(), num_blocks=9)


def test_a_layer_by_itself_is_refused() -> None:
    cache = PagedCache(CONFIGURATIONS["llama"](), num_blocks=9)
    with pytest.raises(NotImplementedError, match="call it on the cache, not on a layer"):
        cache.layers[0].crop(-1)


def test_without_transformers_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", None)
    spec = importlib.util.spec_from_file_location("without", Path(integration.__file__))
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"needs transformers 5\.16 or later .*: pip install transformers"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_package_does_not_import_transformers() -> None:
    code = "import sys, pacache_torch; print([name for name in sys.modules if name.startswith('transformers')])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and ran.stdout == "[]\n", ran.stderr
