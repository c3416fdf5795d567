"""In which environment do the engines of the tests run?"""

from __future__ import annotations

import os
from pathlib import Path


def clean_environment(folder: Path) -> dict[str, str]:
    """Nothing that the caller has set for vLLM or for the package, no network, caches in a folder of the test's own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PACACHE_", "VLLM_"))}
    return environment | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that is watched
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
