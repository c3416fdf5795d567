"""Whether vLLM's CPU platform uses our attention backend: the plugin that vLLM finds, and the call that users make.

vLLM loads every plugin that is installed. This one does nothing unless ``PACACHE_VLLM_BACKEND`` is set, so that
installing pacache_torch changes no engine.
"""

from __future__ import annotations

import importlib
import os

VARIABLE = "PACACHE_VLLM_BACKEND"

_BACKENDS = {
    "packed": "pacache_torch.integrations.vllm_backend.PackedBackend",
    "contiguous": "pacache_torch.integrations.vllm_backend.ContiguousBackend",
}


def register_if_asked() -> None:
    """Call :func:`register` with the value of ``PACACHE_VLLM_BACKEND``, if it has one: vLLM's entry point.

    Raises:
        ValueError: another value than "packed" and "contiguous".
        ImportError, NotImplementedError: as :func:`register`.
    """
    cache = os.environ.get(VARIABLE, "")
    if cache != "":
        register(cache)


def register(cache: str = "packed") -> None:
    """Let the engines that this process and its children make from now on attend through the two operators.

    Takes the place of vLLM's CPU attention in vLLM's registry of backends, and sets ``PACACHE_VLLM_BACKEND`` for the
    processes that vLLM starts. Engines made before keep what they have.

    Args:
        cache: what the caches of a layer are, as vLLM's layouts allow them (docs/vllm.md): "packed", a key and its
            value side by side in one tensor, as vLLM lays them out by default; or "contiguous", a contiguous key cache
            and a contiguous value cache ``[num_blocks, block_size, num_kv_heads, head_size]``.

    Raises:
        ValueError: another value of ``cache``.
        ImportError: vLLM is not installed, or is a version without the interfaces that the backend needs.
        NotImplementedError: vLLM runs on another platform than its CPU.

    Example:
        >>> from pacache_torch.integrations import vllm_plugin
        >>> vllm_plugin.register("contiguous")                     # doctest: +SKIP
        >>> llm = vllm.LLM(model, enforce_eager=True)              # doctest: +SKIP
    """
    if cache not in _BACKENDS:
        raise ValueError(f"{VARIABLE}: cache must be 'packed' or 'contiguous', got {cache!r}")
    # Says what is missing, here and not while an engine is being made.
    importlib.import_module("pacache_torch.integrations.vllm_backend")
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not current_platform.is_cpu():
        raise NotImplementedError(
            f"{VARIABLE}: the backend must run on vLLM's CPU platform, got platform {current_platform.device_name!r}"
        )
    register_backend(AttentionBackendEnum.CPU_ATTN, _BACKENDS[cache])
    # The selector remembers what it chose for an earlier engine, and would go on choosing it.
    selector._cached_get_attn_backend.cache_clear()
    os.environ[VARIABLE] = cache
