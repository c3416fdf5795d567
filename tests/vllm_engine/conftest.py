"""Nothing here is collected where vLLM is not installed; `make test-vllm` has an environment with it."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob: list[str] = [] if find_spec("vllm") else ["test_*.py"]
