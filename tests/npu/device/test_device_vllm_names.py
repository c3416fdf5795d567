"""vLLM's and vllm-ascend's functions on a simulated NPU: what they do on the CPU, by device operators, or a refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import LOAD, NPU, PHASE_TWO, SCATTER, calls, launched, numbers
from torch import Tensor

from pacache_torch.integrations import vllm

SLOTS = torch.tensor([33, -1, 4, 19, 0, 34, 8, 20, 21, 1, 7], dtype=torch.int32)
TABLE = torch.tensor([[4, 0, 3], [1, 2, 0]], dtype=torch.int32)
SCALE = torch.ones(1)


def same(function: Callable[..., None], arguments: dict[str, Tensor], op: str) -> None:
    """Once on the CPU and once on the device, by one launch; every tensor is equal, and something was written."""
    host = {name: t.clone() for name, t in arguments.items()}
    device = {name: t.to(NPU) for name, t in arguments.items()}
    function(**host)
    with calls() as made:
        function(**device)
    assert launched(made) == {PHASE_TWO[op]: 1}
    assert all(torch.equal(device[name].cpu(), t) for name, t in host.items())
    assert not all(torch.equal(host[name], t) for name, t in arguments.items())


def write(heads: int, size_key: int, size_value: int) -> dict[str, Tensor]:
    return {
        "key": numbers(11, heads, size_key, seed=1),
        "value": numbers(11, heads, size_value, seed=2),
        "key_cache": numbers(5, 7, heads, size_key, seed=3),
        "value_cache": numbers(5, 7, heads, size_value, seed=4),
        "slot_mapping": SLOTS,
    }


def test_reshape_and_cache_flash() -> None:
    same(
        lambda **a: vllm.reshape_and_cache_flash(**a, kv_cache_dtype="auto", k_scale=SCALE, v_scale=SCALE),
        write(3, 48, 16),
        SCATTER,
    )


def test_reshape_and_cache_of_whole_units() -> None:
    arguments = write(3, 32, 16) | {
        "key_cache": numbers(5, 3, 2, 7, 16, seed=3),
        "value_cache": numbers(5, 3, 1, 7, 16, seed=4),
    }
    same(
        lambda **a: vllm.reshape_and_cache(**a, kv_cache_dtype="auto", k_scale=SCALE, v_scale=SCALE),
        arguments,
        SCATTER,
    )


def test_device_operator() -> None:
    """MLA's two caches."""
    arguments = write(1, 512, 64)
    same(vllm.DeviceOperator.reshape_and_cache, arguments, SCATTER)
    same(
        vllm.DeviceOperator.kv_cache_load,
        {
            "cache_kv_c": arguments["key_cache"],
            "cache_k_pe": arguments["value_cache"],
            "block_table": TABLE,
            "context_seq_len_npu": torch.tensor([10, 6], dtype=torch.int32),
            "seq_starts": torch.tensor([7, 0], dtype=torch.int32),
            "key": numbers(17, 1, 512, seed=5),
            "value": numbers(17, 1, 64, seed=6),
        },
        LOAD,
    )


def test_concat_and_cache_mla() -> None:
    same(
        lambda **a: vllm.concat_and_cache_mla(**a, kv_cache_dtype="auto", scale=SCALE),
        {
            "kv_c": numbers(11, 512, seed=1),
            "k_pe": numbers(11, 64, seed=2),
            "kv_cache": numbers(5, 7, 576, seed=3),
            "slot_mapping": SLOTS,
        },
        SCATTER,
    )


def gather() -> dict[str, Tensor]:
    return {
        "src_cache": numbers(5, 7, 576, seed=1),
        "dst": numbers(19, 576, seed=2),
        "block_table": TABLE,
        "cu_seq_lens": torch.tensor([1, 12, 18], dtype=torch.int32),
    }


def test_cp_gather_cache() -> None:
    same(lambda **a: vllm.cp_gather_cache(**a, batch_size=2), gather(), LOAD)


def test_what_the_device_does_not_take_is_refused() -> None:
    """Starts inside blocks, and caches that are views of a packed one; nothing is launched."""
    arguments = {name: t.to(NPU) for name, t in gather().items()}
    with calls() as made:
        with pytest.raises(NotImplementedError, match="cp_gather_cache: seq_starts must be None on the NPU"):
            vllm.cp_gather_cache(**arguments, batch_size=2, seq_starts=arguments["cu_seq_lens"][:2])
        packed = torch.zeros(5, 3, 7, 32, dtype=torch.float16, device=NPU)
        tokens = torch.zeros(11, 3, 16, dtype=torch.float16, device=NPU)
        with pytest.raises(NotImplementedError, match="scatter_pa_kv_cache: key_cache"):
            vllm.reshape_and_cache_flash(
                tokens, tokens, *packed.transpose(1, 2).split(16, dim=-1), SLOTS.to(NPU), "auto", SCALE, SCALE
            )
    assert launched(made) == {}
