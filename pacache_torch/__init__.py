"""The paged KV cache operators of Ascend NPUs for PyTorch, on CPU and NPU.

``scatter_pa_kv_cache`` writes new tokens into a paged cache, ``paged_cache_load`` reads a context back; each has a twin
``..._packed`` for a cache that holds keys and values in one tensor. All are also registered as ``torch.ops.pacache.*``.
``pacache_torch.layouts`` makes and converts caches, ``pacache_torch.reference`` says in plain loops what the operators
do, and ``python -m pacache_torch doctor`` says what is loaded.
"""

from pacache_torch import _library, fake, layouts, reference
from pacache_torch._library import LibraryNotLoadedError
from pacache_torch._version import __version__
from pacache_torch.device import capabilities, warmup

if _library.status()[0].loaded:
    fake.register()

from pacache_torch.ops import (
    paged_cache_load,
    paged_cache_load_packed,
    scatter_pa_kv_cache,
    scatter_pa_kv_cache_packed,
)

__all__ = [
    "LibraryNotLoadedError",
    "__version__",
    "capabilities",
    "layouts",
    "paged_cache_load",
    "paged_cache_load_packed",
    "reference",
    "scatter_pa_kv_cache",
    "scatter_pa_kv_cache_packed",
    "warmup",
]
