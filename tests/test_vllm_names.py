"""vLLM's and vllm-ascend's functions do what theirs do, with their signatures, on caches as they hand them over.

Results are held against the reference, or where vLLM means more than the operators do, against plain loops; whole
caches are compared. Signatures are those of vLLM 0.32.0 and of vllm-ascend's device operator.
"""

from __future__ import annotations

import doctest
import inspect
import math
import os
import re

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # its disk cache replays code for an old schema

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pacache_torch import reference
from pacache_torch.integrations import vllm

SCALE = torch.ones(1)
WRITE = ("key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale")
SIGNATURES: dict[str, tuple[Callable[..., Any], tuple[str, ...], dict[str, Any]]] = {
    "reshape_and_cache_flash": (vllm.reshape_and_cache_flash, WRITE, {}),
    "reshape_and_cache": (vllm.reshape_and_cache, WRITE, {}),
    "concat_and_cache_mla": (
        vllm.concat_and_cache_mla,
        ("kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "scale"),
        {},
    ),
    "cp_gather_cache": (
        vllm.cp_gather_cache,
        ("src_cache", "dst", "block_table", "cu_seq_lens", "batch_size", "seq_starts"),
        {"seq_starts": None},
    ),
    "DeviceOperator.reshape_and_cache": (vllm.DeviceOperator.reshape_and_cache, WRITE[:5], {}),
    "DeviceOperator.kv_cache_load": (
        vllm.DeviceOperator.kv_cache_load,
        ("cache_kv_c", "cache_k_pe", "block_table", "context_seq_len_npu", "seq_starts", "key", "value"),
        {},
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_is_theirs(name: str) -> None:
    function, arguments, defaults = SIGNATURES[name]
    parameters = inspect.signature(function).parameters
    assert tuple(parameters) == arguments
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert {n: p.default for n, p in parameters.items() if p.default is not p.empty} == defaults


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# reshape_and_cache_flash, reshape_and_cache, DeviceOperator.reshape_and_cache

BLOCKS, BLOCK_SIZE, HEADS, SIZE = 5, 7, 3, 16
SLOTS = torch.tensor([33, -1, 4, 19, 0, 34, 8, -1, 20, 21, 1])


def projected(tokens: int = 13) -> tuple[Tensor, Tensor]:
    """Key and value as slices of a fused projection, two rows of padding behind the 11 slots."""
    qkv = noise(tokens, 7 * HEADS * SIZE, seed=1)
    key, value = qkv[:, 5 * HEADS * SIZE :].unflatten(1, (2, HEADS, SIZE)).unbind(1)
    return key, value


# What vLLM's engine hands over as one tensor, and the two caches in it.
PACKED: dict[str, tuple[tuple[int, ...], Callable[[Tensor], tuple[Tensor, ...]]]] = {
    "heads first, K beside V": (
        (BLOCKS, HEADS, BLOCK_SIZE, 2 * SIZE),
        lambda kv: kv.transpose(1, 2).split(SIZE, dim=-1),
    ),
    "tokens first, K beside V": ((BLOCKS, BLOCK_SIZE, HEADS, 2 * SIZE), lambda kv: kv.split(SIZE, dim=-1)),
    "K before V": ((2, BLOCKS, BLOCK_SIZE, HEADS, SIZE), lambda kv: kv.unbind(0)),
    "K and V of a block": ((BLOCKS, 2, BLOCK_SIZE, HEADS, SIZE), lambda kv: kv.unbind(1)),
}


@pytest.mark.parametrize("dtype", ("auto", "bfloat16"))
@pytest.mark.parametrize("packed", PACKED)
def test_reshape_and_cache_flash(packed: str, dtype: str) -> None:
    shape, split = PACKED[packed]
    mine, theirs = noise(*shape), noise(*shape)
    key, value = projected()
    vllm.reshape_and_cache_flash(key, value, *split(mine), SLOTS, dtype, SCALE, SCALE)
    reference.scatter_pa_kv_cache(key, value, *split(theirs), SLOTS)
    assert torch.equal(mine, theirs) and not torch.equal(mine, noise(*shape))


def test_reshape_and_cache_of_whole_units() -> None:
    shape = (BLOCKS, HEADS, SIZE // 16, BLOCK_SIZE, 16)
    mine, theirs = noise(2, *shape), noise(2, *shape)
    key, value = projected()
    vllm.reshape_and_cache(key, value, *mine, SLOTS, "auto", SCALE, SCALE)
    reference.scatter_pa_kv_cache(key, value, *theirs, SLOTS, cache_mode="PA_NZ")
    assert torch.equal(mine, theirs) and not torch.equal(mine, noise(2, *shape))


def test_reshape_and_cache_of_another_layout_is_refused() -> None:
    """Units of 16 bytes, and values across tokens: what vLLM itself makes."""
    key, value = projected()
    key_cache = noise(BLOCKS, HEADS, SIZE // 8, BLOCK_SIZE, 8)
    value_cache = noise(BLOCKS, HEADS, SIZE, BLOCK_SIZE)
    before = key_cache.clone()
    with pytest.raises(
        NotImplementedError, match=r"reshape_and_cache: key_cache must be .* 16\] .* got \[5, 3, 2, 7, 8\]"
    ):
        vllm.reshape_and_cache(key, value, key_cache, value_cache, SLOTS, "auto", SCALE, SCALE)
    units = noise(BLOCKS, HEADS, SIZE // 16, BLOCK_SIZE, 16)
    with pytest.raises(NotImplementedError, match=r"value_cache must be .* got \[5, 3, 16, 7\]"):
        vllm.reshape_and_cache(key, value, units, value_cache, SLOTS, "auto", SCALE, SCALE)
    assert torch.equal(key_cache, before)


def test_device_operator_reshape_and_cache() -> None:
    """MLA: the latent as key, the rotated part as value, one head."""
    kv_c, k_pe = noise(11, 1, 32), noise(11, 3, 8)[:, 1:2]
    mine = noise(BLOCKS, BLOCK_SIZE, 1, 32), noise(BLOCKS, BLOCK_SIZE, 1, 8)
    theirs = mine[0].clone(), mine[1].clone()
    vllm.DeviceOperator.reshape_and_cache(
        key=kv_c, value=k_pe, key_cache=mine[0], value_cache=mine[1], slot_mapping=SLOTS.int()
    )
    reference.scatter_pa_kv_cache(kv_c, k_pe, *theirs, SLOTS)
    assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])


# ---------------------------------------------------------------------------------------------------------------------
# What would have to be quantised


QUANTISED = ("fp8", "fp8_e4m3", "fp8_ds_mla", "int8_per_token_head", "nvfp4")


@pytest.mark.parametrize("kv_cache_dtype", QUANTISED)
def test_a_quantised_cache_is_refused_by_its_name(kv_cache_dtype: str) -> None:
    key, value = projected()
    cache = torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, SIZE, dtype=torch.uint8)
    said = f"kv_cache_dtype must be 'auto', .* never quantised\\), got '{kv_cache_dtype}'"
    for function in (vllm.reshape_and_cache_flash, vllm.reshape_and_cache):
        with pytest.raises(NotImplementedError, match=f"{function.__name__}: {said}"):
            function(key, value, cache, cache.clone(), SLOTS, kv_cache_dtype, SCALE, SCALE)
    with pytest.raises(NotImplementedError, match=f"concat_and_cache_mla: {said}"):
        vllm.concat_and_cache_mla(key[:, 0], value[:, 0], cache[:, :, 0], SLOTS, kv_cache_dtype, SCALE)


@pytest.mark.parametrize("dtype", (torch.int8, torch.uint8, torch.float8_e4m3fn))
def test_a_quantised_cache_is_refused_by_its_dtype(dtype: torch.dtype) -> None:
    key, value = projected()
    cache = torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, SIZE).to(dtype)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(NotImplementedError, match=f"key_cache must have dtype bfloat16 as key .*never.*, got {name}"):
        vllm.reshape_and_cache_flash(key, value, cache, cache.clone(), SLOTS, "auto", SCALE, SCALE)


def test_what_is_quantised_already_is_stored() -> None:
    key = noise(11, HEADS, SIZE, dtype=torch.int8)
    mine, theirs = torch.zeros(2, 2, BLOCKS, BLOCK_SIZE, HEADS, SIZE, dtype=torch.int8)
    vllm.reshape_and_cache_flash(key, key, *mine, SLOTS, "auto", SCALE, SCALE)
    reference.scatter_pa_kv_cache(key, key, *theirs, SLOTS)
    assert torch.equal(mine, theirs) and mine.any()


def test_a_dtype_that_is_not_the_caches_is_refused() -> None:
    key, value = projected()
    cache = torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, SIZE, dtype=torch.bfloat16)
    with pytest.raises(
        TypeError, match="key_cache must have dtype float16 as kv_cache_dtype 'half' says, got bfloat16"
    ):
        vllm.reshape_and_cache_flash(key, value, cache, cache.clone(), SLOTS, "half", SCALE, SCALE)
    with pytest.raises(TypeError, match="scatter_pa_kv_cache: key_cache must have dtype bfloat16 as key, got float32"):
        vllm.reshape_and_cache_flash(key, value, cache.float(), cache.float(), SLOTS, "auto", SCALE, SCALE)


# ---------------------------------------------------------------------------------------------------------------------
# concat_and_cache_mla


@pytest.mark.parametrize("padded", (False, True))
def test_concat_and_cache_mla(padded: bool) -> None:
    """Parts out of wider tensors; blocks with and without a gap behind them."""
    kv_c, k_pe = noise(13, 40)[:, 3:35], noise(13, 1, 20)[:, 0, 5:13]
    memory = noise(BLOCKS, BLOCK_SIZE + 2, 40)
    mine = memory.clone()[:, :BLOCK_SIZE] if padded else memory[:, :BLOCK_SIZE].contiguous()
    theirs = mine.clone()
    vllm.concat_and_cache_mla(kv_c, k_pe, mine, SLOTS, "auto", SCALE)
    for token, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            theirs[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = torch.cat((kv_c[token], k_pe[token]))
    assert torch.equal(mine, theirs)
    if padded:
        assert torch.equal(mine._base[:, BLOCK_SIZE:], memory[:, BLOCK_SIZE:])


def test_concat_and_cache_mla_refuses() -> None:
    kv_c, k_pe, cache = noise(11, 32), noise(11, 8), noise(BLOCKS, BLOCK_SIZE, 40)
    before = cache.clone()
    for spoiled, error, said in (
        ((kv_c[:, None], k_pe, cache), ValueError, r"kv_c must be \[num_tokens, kv_lora_rank\], got \[11, 1, 32\]"),
        ((kv_c, k_pe[:, None], cache), ValueError, r"k_pe must be \[num_tokens, pe_dim\], got \[11, 1, 8\]"),
        ((kv_c, k_pe.half(), cache), TypeError, "k_pe must have dtype bfloat16 as kv_c, got float16"),
        ((kv_c, k_pe, cache[:, :, :39]), ValueError, r"kv_lora_rank \+ pe_dim 40, got \[5, 7, 39\]"),
        (
            (kv_c[:10], k_pe, cache),
            ValueError,
            r"kv_c must have at least the 11 tokens of slot_mapping, got \[10, 32\]",
        ),
        ((kv_c, k_pe[:10], cache), ValueError, r"k_pe must have at least the 11 tokens of slot_mapping, got \[10, 8\]"),
    ):
        with pytest.raises(error, match=f"concat_and_cache_mla: .*{said}"):
            vllm.concat_and_cache_mla(*spoiled, SLOTS, "auto", SCALE)
    with pytest.raises(IndexError, match="must be less than"):
        vllm.concat_and_cache_mla(kv_c, k_pe, cache, SLOTS + 2, "auto", SCALE)
    assert torch.equal(cache, before)


# ---------------------------------------------------------------------------------------------------------------------
# cp_gather_cache

TABLE = torch.tensor([[4, 0, 3, 1], [1, 2, 0, 4], [2, 9, 9, 9], [3, 1, 4, 0]])  # the third has one block


def gathered(cache: Tensor, dst: Tensor, lengths: list[int], starts: list[int], first: int = 0) -> Tensor:
    """What must come out, in loops."""
    result, row = dst.clone(), first
    for sequence, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        for position in range(start, start + length):
            block = int(TABLE[sequence, position // cache.size(1)])
            result[row] = cache[block, position % cache.size(1)]
            row += 1
    return result


def boundaries(lengths: list[int], first: int = 0) -> Tensor:
    return torch.tensor([first, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("index", (torch.int32, torch.int64))
@pytest.mark.parametrize("entries", ((10,), (2, 5)))
@pytest.mark.parametrize("starts", (None, [0, 7, 0, 14], [3, 9, 6, 1], [13, 0, 2, 27]))
def test_cp_gather_cache(starts: list[int] | None, entries: tuple[int, ...], index: torch.dtype) -> None:
    """Starts on and inside blocks, an empty sequence, rows before and behind all sequences."""
    cache, dst = noise(BLOCKS, BLOCK_SIZE, *entries), noise(29, *entries, seed=7)[::2]
    lengths = [9, 0, 1, 1]
    wanted = gathered(cache, dst, lengths, starts or [0] * 4, first=2)
    before = dst._base.clone()
    given = None if starts is None else torch.tensor(starts, dtype=index)
    vllm.cp_gather_cache(cache, dst, TABLE.to(index), boundaries(lengths, 2).to(index), 4, given)
    assert torch.equal(dst, wanted)
    assert torch.equal(dst._base[1::2], before[1::2])


def test_cp_gather_cache_reads_as_many_sequences_as_it_is_told() -> None:
    cache, lengths = noise(BLOCKS, BLOCK_SIZE, 10), [5, 6, 1, 8]
    for count in (4, 2, 1, 0):
        for starts in (None, [1, 2, 3, 4]):
            dst = noise(20, 10, seed=7)
            wanted = gathered(cache, dst, lengths[:count], (starts or [0] * 4)[:count])
            given = None if starts is None else torch.tensor(starts)
            vllm.cp_gather_cache(cache, dst, TABLE, boundaries(lengths).long(), count, given)
            assert torch.equal(dst, wanted)


def test_cp_gather_cache_out_of_a_wider_allocation() -> None:
    """Entries with a gap behind each; blocks with a gap between them only from their beginning."""
    wide, lengths, starts = noise(BLOCKS, BLOCK_SIZE, 13), [5, 6, 1, 8], [1, 2, 3, 4]
    cache, dst = wide[:, :, 2:12], noise(20, 10, seed=7)
    wanted = gathered(cache, dst, lengths, starts)
    vllm.cp_gather_cache(cache, dst, TABLE, boundaries(lengths), 4, torch.tensor(starts))
    assert torch.equal(dst, wanted)

    cache = noise(BLOCKS, BLOCK_SIZE + 1, 10)[:, :BLOCK_SIZE]
    wanted = gathered(cache, dst, lengths, [0] * 4)
    vllm.cp_gather_cache(cache, dst, TABLE, boundaries(lengths), 4)
    assert torch.equal(dst, wanted)
    with pytest.raises(NotImplementedError, match=r"no gaps between blocks\), got shape .* strides \[80, 10, 10, 1\]"):
        vllm.cp_gather_cache(cache, dst, TABLE, boundaries(lengths), 4, torch.tensor(starts))
    assert torch.equal(dst, wanted)


def test_cp_gather_cache_refuses() -> None:
    cache, dst, cu, starts = (
        noise(BLOCKS, BLOCK_SIZE, 10),
        noise(20, 10),
        boundaries([5, 6, 1, 8]),
        torch.tensor([1] * 4),
    )
    before = dst.clone()
    for arguments, error, said in (
        ((cache[0], dst, TABLE, cu, 4), ValueError, r"cp_gather_cache: src_cache must be .* got \[7, 10\]"),
        (
            (cache, dst[None], TABLE, cu, 4),
            ValueError,
            r"cp_gather_cache: dst must be \[num_tokens, 10\] as src_cache, got \[1, 20",
        ),
        (
            (cache, dst, TABLE, cu, 5),
            ValueError,
            r"cp_gather_cache: block_table must have at least 5 rows .* got \[4, 4",
        ),
        (
            (cache, dst, TABLE, cu[:4], 4),
            ValueError,
            r"cu_seq_lens must have at least 5 rows for batch_size 4, got \[4",
        ),
        ((cache, dst, TABLE, cu, 4, starts[:3]), ValueError, r"seq_starts must have at least 4 rows .* got \[3\]"),
        ((cache, dst[:, :9], TABLE, cu, 4), ValueError, r"paged_cache_load: key must be"),
        ((cache, dst.half(), TABLE, cu, 4), TypeError, r"paged_cache_load: key must have dtype bfloat16 as key_cache"),
        ((cache, dst[:19], TABLE, cu, 4), ValueError, r"paged_cache_load: "),
        ((cache, dst[:19], TABLE, cu, 4, starts), ValueError, r"paged_cache_load: "),
        ((cache, dst, TABLE, cu.flip(0), 4), ValueError, r"paged_cache_load: context_lens"),
        ((cache, dst, TABLE, cu.flip(0), 4, starts), ValueError, r"paged_cache_load: context_lens"),
        ((cache, dst, TABLE, boundaries([5, 6, 8, 1]), 4), IndexError, r"block_tables\[2, 1\] .* got 9"),
        ((cache, dst, TABLE, boundaries([5, 6, 8, 1]), 4, starts), IndexError, r"block_tables\[2, .* got 6[0-9]"),
        ((cache, dst, TABLE, cu, 4, starts * -1), IndexError, r"block_tables\[0, 0\] .* got -1"),
        ((cache, dst, TABLE, cu, 4, starts * 24), IndexError, "out of bounds"),
    ):
        with pytest.raises(error, match=said):
            vllm.cp_gather_cache(*arguments)
    assert torch.equal(dst, before)


def test_device_operator_kv_cache_load() -> None:
    """Starts in whole blocks; lengths with something between them, as a slice of a bigger tensor has."""
    kv_c, k_pe = noise(BLOCKS, BLOCK_SIZE, 1, 32), noise(BLOCKS, BLOCK_SIZE, 1, 8)
    key, value = noise(20, 1, 32, seed=7), noise(20, 1, 8, seed=7)
    lengths, starts = [5, 7, 1, 6], [7, 0, 0, 14]
    wanted = [gathered(cache, dst, lengths, starts) for cache, dst in ((kv_c, key), (k_pe, value))]
    strided = torch.stack((torch.tensor(lengths), torch.tensor([99] * 4)), 1)[:, 0].int()
    vllm.DeviceOperator.kv_cache_load(
        kv_c, k_pe, TABLE.int(), strided, torch.tensor(starts, dtype=torch.int32), key=key, value=value
    )
    assert torch.equal(key, wanted[0]) and torch.equal(value, wanted[1])


# ---------------------------------------------------------------------------------------------------------------------
# In graphs


def step(a: dict[str, Tensor]) -> None:
    """A write and a read by every name, on caches that are inputs or views of one."""
    key, value = a["qkv"][:, 5 * HEADS * SIZE :].unflatten(1, (2, HEADS, SIZE)).unbind(1)
    key = key * 2
    vllm.reshape_and_cache_flash(key, value, *a["packed"].unbind(1), a["slots"], "auto", SCALE, SCALE)
    vllm.reshape_and_cache(key, value, a["key_units"], a["value_units"], a["slots"], "auto", SCALE, SCALE)
    vllm.DeviceOperator.reshape_and_cache(key, value, a["key_cache"], a["value_cache"], a["slots"])
    vllm.DeviceOperator.kv_cache_load(
        a["key_cache"], a["value_cache"], a["table"], a["lens"], a["starts"], key=a["key_rows"], value=a["value_rows"]
    )
    vllm.concat_and_cache_mla(key[:, 0], value[:, 1, :4], a["latent"], a["slots"], "auto", SCALE)
    vllm.cp_gather_cache(a["latent"], a["latent_rows"], a["table"], a["cu"], 4)
    vllm.cp_gather_cache(a["latent"], a["later_rows"], a["table"], a["cu"], 4, a["starts"] + 1)


def step_arguments(tokens: int = 13) -> dict[str, Tensor]:
    cache = (BLOCKS, BLOCK_SIZE, HEADS, SIZE)
    units = (BLOCKS, HEADS, SIZE // 16, BLOCK_SIZE, 16)
    lengths = [5, 6, 1, 5]
    return {
        "qkv": noise(tokens, 7 * HEADS * SIZE, seed=1),
        "slots": SLOTS.clone(),
        "packed": noise(BLOCKS, 2, BLOCK_SIZE, HEADS, SIZE),
        "key_units": noise(*units, seed=1),
        "value_units": noise(*units, seed=2),
        "key_cache": noise(*cache, seed=3),
        "value_cache": noise(*cache, seed=4),
        "latent": noise(BLOCKS, BLOCK_SIZE, SIZE + 4),
        "table": TABLE.clamp(max=4),
        "lens": torch.tensor(lengths),
        "cu": boundaries(lengths).long(),
        "starts": torch.tensor([7, 14, 0, 7]),
        "key_rows": noise(20, HEADS, SIZE, seed=5),
        "value_rows": noise(20, HEADS, SIZE, seed=6),
        "latent_rows": noise(20, SIZE + 4, seed=7),
        "later_rows": noise(20, SIZE + 4, seed=8),
    }


WRITTEN = {
    "packed", "key_units", "value_units", "key_cache", "value_cache", "latent",
    "key_rows", "value_rows", "latent_rows", "later_rows",
}  # fmt: skip


@pytest.mark.parametrize("dynamic", (False, True))
def test_compiled(dynamic: bool) -> None:
    """As in eager mode, in place; what the graph makes is smaller than the smallest cache.

    Dynamic are tokens, rows and blocks. A dynamic block size would give the halves of `packed` a symbolic offset.
    """
    expected, actual = step_arguments(), step_arguments()
    step(expected)
    torch._dynamo.reset()
    if dynamic:
        for name in ("qkv", "slots", "packed", "latent", "latent_rows", "later_rows"):
            torch._dynamo.mark_dynamic(actual[name], 0)
    backend = "aot_eager" if dynamic else "inductor"
    _, code = run_and_get_code(torch.compile(step, fullgraph=True, backend=backend), actual)
    untouched = step_arguments()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name
        assert torch.equal(tensor, untouched[name]) != (name in WRITTEN), name
    if not dynamic:
        made = re.findall(r"= empty_strided\w*\(\(([\d, ]+)\)", "".join(code))
        assert made
        assert (
            max(math.prod(int(n) for n in sizes.split(",") if n.strip()) for sizes in made) < actual["latent"].numel()
        )


def test_meta_and_fake_tensors() -> None:
    """Nothing is read, rules hold."""
    fake = FakeTensorMode(shape_env=ShapeEnv())
    for mode, convert in ((nullcontext(), lambda t: t.to("meta")), (fake, fake.from_tensor)):
        a = {name: convert(t) for name, t in step_arguments().items()}
        short = convert(noise(10, 7 * HEADS * SIZE))
        with mode:
            step(a)
            with pytest.raises(ValueError, match=r"key must have at least the .* tokens of slot_mapping"):
                step(a | {"qkv": short})


def test_the_examples_hold() -> None:
    result = doctest.testmod(vllm, extraglobs={"torch": torch})
    assert result.attempted and not result.failed
