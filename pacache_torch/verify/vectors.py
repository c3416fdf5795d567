"""The worked examples of ``data/`` as tensors and calls.

Every number was computed independently of this package and is exact in its dtype, so results are compared bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DATA = Path(__file__).parent / "data"
FILL = -99.0  # around the memory that an Nct vector describes; no vector holds it


@dataclass(frozen=True)
class Vector:
    """One call of an operator and what it must leave in the tensors that it writes."""

    name: str
    positional: tuple[Tensor | None, ...]
    keyword: dict[str, Any]
    written: dict[str, Tensor]
    expected: dict[str, Tensor]
    c_api_status: int | None = None  # what CANN's first phase answers to this call, for information

    def run(self, function: Callable[..., None]) -> None:
        """Call the operator; ``written`` changes in place."""
        function(*self.positional, **self.keyword)


def scatter_vectors(index_dtype: torch.dtype) -> list[Vector]:
    """Make the vectors of scatter_pa_kv_cache, fresh tensors, with all index tensors in this dtype."""
    return [_scatter_vector(v, index_dtype) for v in _read("scatter_pa_kv_cache.json")["vectors"]]


def load_vectors(index_dtype: torch.dtype) -> list[Vector]:
    """Make the vectors of paged_cache_load, fresh tensors, with all index tensors in this dtype."""
    return [_load_vector(case, index_dtype) for case in _read("paged_cache_load.json")["cases"]]


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / name).read_text(encoding="utf-8"))
    return content


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _tensor(entry: dict[str, Any], dtype: torch.dtype) -> Tensor:
    # float64 holds every number of the files exactly, and so does their own dtype.
    return torch.tensor(entry["data"], dtype=torch.float64).reshape(entry["shape"]).to(dtype)


def _index(entry: dict[str, Any] | None, dtype: torch.dtype) -> Tensor | None:
    return None if entry is None else torch.tensor(entry["data"], dtype=dtype).reshape(entry["shape"])


def _source(entry: dict[str, Any], offset: int) -> Tensor | None:
    """Make a key or value; ``storage`` is the memory from the data pointer on, of which Nct picks its elements."""
    dtype = _dtype(entry["dtype"])
    if entry["shape"] == []:  # how CANN says that there is no value
        return None
    if "storage" not in entry:
        return _tensor(entry, dtype)
    lead = 3  # a data pointer that is not where the storage begins
    storage = torch.tensor([FILL] * lead + entry["storage"], dtype=torch.float64).to(dtype)
    assert offset < len(entry["storage"])
    tokens, heads, head_size = entry["shape"]
    return storage[lead:][: tokens * heads * head_size].view(tokens, heads, head_size)


def _scatter_vector(vector: dict[str, Any], index_dtype: torch.dtype) -> Vector:
    inputs, attrs = vector["inputs"], vector["attrs"]
    nct = attrs["scatter_mode"] == "Nct"
    key = _source(inputs["key"], attrs["offsets"][0])
    value = _source(inputs["value"], attrs["offsets"][1])
    key_cache = _tensor(inputs["key_cache"], _dtype(inputs["key_cache"]["dtype"]))
    value_cache = None
    if value is not None:
        value_cache = _tensor(inputs["value_cache"], _dtype(inputs["value_cache"]["dtype"]))
    caches = {"key_cache": key_cache} if value_cache is None else {"key_cache": key_cache, "value_cache": value_cache}
    expected = {name: _tensor(vector["expected"][name], cache.dtype) for name, cache in caches.items()}
    keyword: dict[str, Any] = {
        "compress_lens": _index(inputs["compress_lens"], index_dtype),
        "compress_seq_offsets": _index(inputs["compress_seq_offset"], index_dtype),
        "seq_lens": _index(inputs["seq_lens"], index_dtype),
        "cache_mode": attrs["cache_mode"],
        "scatter_mode": attrs["scatter_mode"],
        "strides": attrs["strides"] if nct else None,
        "offsets": attrs["offsets"] if nct else None,
    }
    slots = _index(inputs["slot_mapping"], index_dtype)
    return Vector(vector["name"], (key, value, key_cache, value_cache, slots), keyword, caches, expected)


def _load_vector(case: dict[str, Any], index_dtype: torch.dtype) -> Vector:
    dtypes = {"key": _dtype(case["dtype_key"]), "value": _dtype(case["dtype_value"])}
    outputs, expected = {}, {}
    for name, dtype in dtypes.items():
        before = case[f"{name}_before"]
        outputs[name] = torch.full(before["shape"], before["fill"], dtype=dtype)
        expected[name] = _tensor(case[f"expected_{name}"], dtype)
    positional = (
        _tensor(case["keyCache"], dtypes["key"]),
        _tensor(case["valueCache"], dtypes["value"]),
        _index(case["blockTables"], index_dtype),
        _index(case["contextLens"], index_dtype),
        outputs["key"],
        outputs["value"],
    )
    keyword = {
        "seq_starts": _index(case["seqStarts"], index_dtype),
        "cache_mode": "PA_NZ" if case["format"] == "nz" else "Norm",
        "is_seq_lens_cumsum": case["isSeqLensCumsumType"],
    }
    return Vector(case["name"], positional, keyword, outputs, expected, case["c_api_status"])
