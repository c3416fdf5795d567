"""One table of calls that the operators must refuse, and the words in which they do.

A row takes a valid call, spoils one thing, and says which exception comes with exactly which message. The table is for
every executor (kernels, reference, fake kernels) and every device: it builds its tensors on the device that it is
given and knows no test framework. What a row needs to be noticed is written beside it: ``nothing`` but shapes, dtypes
and modes; ``memory``, that is, real storages; or ``values`` of index tensors.

Tensors are strided, sizes are coprime and every storage is larger than its tensor, so that a write that should not
have happened lands somewhere where it is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Arguments = dict[str, Any]
Needs = Literal["nothing", "memory", "values"]

SCATTER = "scatter_pa_kv_cache"
LOAD = "paged_cache_load"
SCATTER_PACKED = "scatter_pa_kv_cache_packed"
LOAD_PACKED = "paged_cache_load_packed"
WRITTEN = {
    SCATTER: ("key_cache", "value_cache"),
    LOAD: ("key", "value"),
    SCATTER_PACKED: ("kv_cache",),
    LOAD_PACKED: ("key", "value"),
}

_HUGE = 2**62
_MOST = 2**63 - 1


class Build:
    """Makes tensors on one device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        # For a tensor that is on the wrong device.
        self.elsewhere = torch.device("meta" if self.device.type == "cpu" else "cpu")

    def memory(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A storage with contents that differ from element to element, 1-D."""
        return (torch.arange(elements) % 113 + elements % 7).to(dtype).to(self.device)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        """A dense last dimension, gaps between all others, and something before and behind."""
        strides, extent = [1] * len(shape), shape[-1] + 1
        for dim in reversed(range(len(shape) - 1)):
            strides[dim] = extent
            extent = extent * shape[dim] + 1
        return self.memory(2 + extent + 1, dtype).as_strided(shape, strides, 2)

    def index(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """An index tensor with a stride of 2; what lies between its elements would be refused, were it read."""
        x = torch.tensor(values, dtype=dtype)
        return torch.stack((x, torch.full_like(x, torch.iinfo(dtype).max - 5)), -1).to(self.device)[..., 0]


def unchecked_view(t: Tensor, shape: list[int], strides: list[int], offset: int = 0) -> Tensor:
    """A view that no function of torch's front end would make, but a storage that shrank leaves behind."""
    view: Tensor = torch.ops.inductor._reinterpret_tensor(t, shape, strides, offset)
    return view


def shrunk(t: Tensor, elements: int) -> Tensor:
    """The tensor, its storage cut down to so many elements."""
    t.untyped_storage().resize_(elements * t.element_size())
    return t


# ---------------------------------------------------------------------------------------------------------------------
# Valid calls, by the scenario that they are. In every one something is written.

_LENS = [4, 3]  # of the sequences of a compressed call
_TASKS = [0, 4, 8, 12]  # first slots: 2 sequences times 2 heads


def _norm(b: Build) -> Arguments:
    return {
        "key": b.tensor(6, 3, 7),  # one token of padding
        "value": b.tensor(5, 3, 5),
        "key_cache": b.tensor(4, 3, 3, 7),
        "value_cache": b.tensor(4, 3, 3, 5),
        "slot_mapping": b.index([4, -1, 11, 0, 7]),
    }


def _key_only(b: Build) -> Arguments:
    return _norm(b) | {"value": None, "value_cache": None}


def _nct(b: Build) -> Arguments:
    return _norm(b) | {
        "key": b.memory(118, torch.float16).as_strided((5, 3, 7), (21, 7, 1), 3),
        "value": b.memory(85, torch.float16).as_strided((5, 3, 5), (15, 5, 1), 1),
        "scatter_mode": "Nct",
        "strides": [23, 17],
        "offsets": [2, 1],
    }


def _nz(b: Build) -> Arguments:
    return {
        "key": b.tensor(5, 3, 32),
        "value": b.tensor(6, 3, 16),
        "key_cache": b.tensor(4, 6, 3, 16),
        "value_cache": b.tensor(4, 3, 3, 16),
        "slot_mapping": b.index([4, -1, 11, 0, 7], torch.int32),
        "cache_mode": "PA_NZ",
    }


def _nz_5d(b: Build) -> Arguments:
    return _nz(b) | {"key_cache": b.tensor(4, 3, 2, 3, 16), "value_cache": b.tensor(4, 3, 1, 3, 16)}


def _nhsd(b: Build) -> Arguments:
    return _norm(b) | {
        "key_cache": b.tensor(4, 3, 5, 7),
        "value_cache": b.tensor(4, 3, 5, 5),
        "scatter_mode": "NHSD",
    }


def _alibi(b: Build) -> Arguments:
    return {
        "key": b.tensor(7, 2, 5),
        "value": b.tensor(7, 2, 5),
        "key_cache": b.tensor(6, 3, 1, 5),
        "value_cache": b.tensor(6, 3, 1, 5),
        "slot_mapping": b.index(_TASKS),
        "compress_lens": b.index([2, 3, 0, 1], torch.int32),
        "seq_lens": b.index(_LENS),
        "scatter_mode": "Alibi",
    }


def _rope(b: Build) -> Arguments:
    return _alibi(b) | {
        "compress_lens": b.index([2, 1, 0, 2]),
        "compress_seq_offsets": b.index([1, -1, 1, 1], torch.int32),
        "scatter_mode": "Rope",
    }


def _omni(b: Build) -> Arguments:
    return _rope(b) | {"scatter_mode": "Omni"}


def _padded_alibi(b: Build) -> Arguments:
    return {
        "key": b.tensor(2, 5, 2, 7),
        "value": b.tensor(2, 5, 2, 3),
        "key_cache": b.tensor(6, 3, 1, 7),
        "value_cache": b.tensor(6, 3, 1, 3),
        "slot_mapping": b.index([_TASKS[:2], _TASKS[2:]], torch.int32),
        "compress_lens": b.index([[2, 3], [0, 1]]),
        "seq_lens": b.index(_LENS, torch.int32),
    }


def _padded_rope(b: Build) -> Arguments:
    return _padded_alibi(b) | {
        "compress_lens": b.index([[2, 1], [0, 2]]),
        "compress_seq_offsets": b.index([1, -1, 1, 1]),
    }


def _load(b: Build) -> Arguments:
    return {
        "key_cache": b.tensor(5, 3, 2, 7),
        "value_cache": b.tensor(5, 3, 2, 5),
        "block_tables": b.index([[4, 0, 3], [1, 2, 0]]),
        "context_lens": b.index([5, 2], torch.int32),
        "key": b.tensor(8, 2, 7),
        "value": b.tensor(8, 2, 5),
    }


def _load_starts(b: Build) -> Arguments:
    return _load(b) | {"seq_starts": b.index([3, 7])}


def _load_cumsum(b: Build) -> Arguments:
    return _load(b) | {"context_lens": b.index([1, 6, 8]), "is_seq_lens_cumsum": True}


def _load_nz(b: Build) -> Arguments:
    return {
        "key_cache": b.tensor(5, 6, 3, 16),
        "value_cache": b.tensor(5, 3, 3, 32, dtype=torch.int8),
        "block_tables": b.index([[4, 0, 3], [1, 2, 0]], torch.int32),
        "context_lens": b.index([5, 2]),
        "key": b.tensor(8, 96),
        "value": b.tensor(8, 96, dtype=torch.int8),
        "cache_mode": "PA_NZ",
    }


def _load_nz_5d(b: Build) -> Arguments:
    return _load_nz(b) | {
        "key_cache": b.tensor(5, 3, 2, 3, 16),
        "value_cache": b.tensor(5, 1, 3, 3, 32, dtype=torch.int8),
        "key": b.tensor(8, 96).unflatten(1, (3, 32)),
    }


# Key and value have one head size where a dimension tells them apart, 7 and 5 where they share the last one.
_PACKED_SHAPES = {
    "2BNHD": lambda blocks, heads: (2, blocks, 3, heads, 7),
    "B2NHD": lambda blocks, heads: (blocks, 2, 3, heads, 7),
    "BHNC": lambda blocks, heads: (blocks, heads, 3, 7 + 5),
    "BNHC": lambda blocks, heads: (blocks, 3, heads, 7 + 5),
}


def _packed(kv_layout: str) -> Callable[[Build], Arguments]:
    return lambda b: {
        "key": b.tensor(6, 3, 7),
        "value": b.tensor(5, 3, 7 if "D" in kv_layout else 5),
        "kv_cache": b.tensor(*_PACKED_SHAPES[kv_layout](4, 3)),
        "slot_mapping": b.index([4, -1, 11, 0, 7]),
        "kv_layout": kv_layout,
    }


def _load_packed(kv_layout: str, *, starts: bool = False, cumsum: bool = False) -> Callable[[Build], Arguments]:
    return lambda b: {
        "kv_cache": b.tensor(*_PACKED_SHAPES[kv_layout](5, 2)),
        "block_tables": b.index([[4, 0, 3], [1, 2, 0]]),
        "context_lens": b.index([1, 6, 8] if cumsum else [5, 2], torch.int32),
        "key": b.tensor(8, 2, 7),
        "value": b.tensor(8, 2, 7 if "D" in kv_layout else 5),
        "kv_layout": kv_layout,
        **({"seq_starts": b.index([3, 7])} if starts else {}),
        **({"is_seq_lens_cumsum": True} if cumsum else {}),
    }


BASES: dict[str, tuple[str, Callable[[Build], Arguments]]] = {
    "norm": (SCATTER, _norm),
    "key_only": (SCATTER, _key_only),
    "nct": (SCATTER, _nct),
    "nz": (SCATTER, _nz),
    "nz_5d": (SCATTER, _nz_5d),
    "nhsd": (SCATTER, _nhsd),
    "alibi": (SCATTER, _alibi),
    "rope": (SCATTER, _rope),
    "omni": (SCATTER, _omni),
    "padded_alibi": (SCATTER, _padded_alibi),
    "padded_rope": (SCATTER, _padded_rope),
    "load": (LOAD, _load),
    "load_starts": (LOAD, _load_starts),
    "load_cumsum": (LOAD, _load_cumsum),
    "load_nz": (LOAD, _load_nz),
    "load_nz_5d": (LOAD, _load_nz_5d),
    "2bnhd": (SCATTER_PACKED, _packed("2BNHD")),
    "b2nhd": (SCATTER_PACKED, _packed("B2NHD")),
    "bhnc": (SCATTER_PACKED, _packed("BHNC")),
    "bnhc": (SCATTER_PACKED, _packed("BNHC")),
    "load_2bnhd": (LOAD_PACKED, _load_packed("2BNHD", starts=True)),
    "load_b2nhd": (LOAD_PACKED, _load_packed("B2NHD", cumsum=True)),
    "load_bhnc": (LOAD_PACKED, _load_packed("BHNC")),
    "load_bnhc": (LOAD_PACKED, _load_packed("BNHC", starts=True)),
}


# ---------------------------------------------------------------------------------------------------------------------
# Rows


@dataclass(frozen=True)
class Row:
    """A valid call, what is changed in it, and what comes of it."""

    name: str
    op: str
    base: str
    change: Callable[[Build, Arguments], Arguments]
    error: type[Exception]
    text: str  # of the message, behind "op: "
    needs: Needs

    def build(self, device: torch.device | str) -> Arguments:
        """The arguments of the call, all by name."""
        b = Build(device)
        arguments = BASES[self.base][1](b)
        return arguments | self.change(b, arguments)

    def message(self, device: torch.device | str) -> str:
        """The whole message on a device, as ``str(tensor.device)`` gives it."""
        text = self.text.replace("{device}", str(device)).replace("{elsewhere}", str(Build(device).elsewhere))
        return f"{self.op}: {text}"

    @property
    def argument(self) -> str:
        """The argument that the message names."""
        return self.text.split()[0].split("[")[0]


ROWS: list[Row] = []


def _row(
    base: str,
    name: str,
    error: type[Exception],
    text: str,
    change: Callable[[Build, Arguments], Arguments] | None = None,
    *,
    needs: Needs = "nothing",
    **plain: Any,
) -> None:
    """Add a row. ``change`` gives the arguments that are different, ``plain`` those that need no tensor."""

    def changed(b: Build, a: Arguments) -> Arguments:
        return plain | ({} if change is None else change(b, a))

    ROWS.append(Row(f"{base}: {name}", BASES[base][0], base, changed, error, text, needs))


# Layout, device, gradient: every tensor argument ----------------------------------------------------------------------


def _tensor_rows(base: str) -> None:
    arguments = [name for name, value in BASES[base][1](Build("meta")).items() if isinstance(value, Tensor)]
    lead = arguments[0]
    for name in arguments:
        _row(
            base,
            f"{name} sparse",
            ValueError,
            f"{name} must be a strided tensor, got layout sparse_coo",
            lambda b, a, n=name: {
                n: torch.empty(a[n].shape, dtype=a[n].dtype, device=b.device, layout=torch.sparse_coo)
            },
        )
        _row(
            base,
            f"{name} of absurd sizes",
            ValueError,
            f"{name} must have sizes, each taken as 1 at least, of less than 2^62 bytes, got [0, {_HUGE}, 4]",
            lambda b, a, n=name: {n: a[n].as_strided((0, _HUGE, 4), (0, 0, 0))},
        )
        if name != lead:
            _row(
                base,
                f"{name} elsewhere",
                ValueError,
                f"{name} must be on {{device}} as {lead}, got {{elsewhere}}",
                lambda b, a, n=name: {n: torch.empty(a[n].shape, dtype=a[n].dtype, device=b.elsewhere)},
            )
        if name in ("key", "value", "key_cache", "value_cache", "kv_cache"):
            _row(
                base,
                f"{name} requires grad",
                RuntimeError,
                f"{name} must not require grad while grad mode is on (the op has no backward; use torch.no_grad() or "
                "detach()), got requires_grad=True",
                lambda b, a, n=name: {n: a[n].detach().requires_grad_()},
            )


_tensor_rows("rope")
_tensor_rows("load_starts")
_tensor_rows("bhnc")
_tensor_rows("load_bnhc")

# Modes ---------------------------------------------------------------------------------------------------------------

for _base, _mode in (("norm", "ND"), ("norm", ""), ("nz", "PA_nz"), ("load", "NZ"), ("load_nz", "")):
    _row(
        _base,
        f"cache_mode {_mode!r}",
        ValueError,
        f"cache_mode must be 'Norm' or 'PA_NZ', got '{_mode}'",
        cache_mode=_mode,
    )
for _mode in ("none", "", "Rope "):
    _row(
        "norm",
        f"scatter_mode {_mode!r}",
        ValueError,
        f"scatter_mode must be 'None', 'Nct', 'Alibi', 'Rope', 'Omni' or 'NHSD', got '{_mode}'",
        scatter_mode=_mode,
    )
for _base, _mode in (("nz", "Nct"), ("nz_5d", "NHSD")):
    _row(
        _base,
        f"scatter_mode {_mode} with PA_NZ",
        ValueError,
        f"scatter_mode must be 'None' with cache_mode 'PA_NZ', got '{_mode}'",
        scatter_mode=_mode,
    )
_row(
    "load_nz",
    "cumulative lengths with PA_NZ",
    ValueError,
    "is_seq_lens_cumsum must be False with cache_mode 'PA_NZ', got True",
    is_seq_lens_cumsum=True,
)
_row(
    "load_nz",
    "seq_starts with PA_NZ",
    ValueError,
    "seq_starts must be None with cache_mode 'PA_NZ', got a tensor of shape [2]",
    lambda b, a: {"seq_starts": b.index([0, 0])},
)
# An ND cache that could be read as NZ (bugs.md, 19): only the mode says what it is, so a wrong one must not fit.
_row(
    "load",
    "Norm cache with PA_NZ",
    ValueError,
    "key_cache must be [num_blocks, num_heads * head_size / 16, block_size, 16] or [num_blocks, num_heads, "
    "head_size / 16, block_size, 16], got [5, 3, 2, 7]",
    cache_mode="PA_NZ",
)
_row(
    "nz",
    "NZ cache with Norm",
    ValueError,
    "key_cache must be [num_blocks, block_size, num_heads, head_size] with num_heads 3 and head_size 32 as key, "
    "got [4, 6, 3, 16]",
    cache_mode="Norm",
)

for _base, _layout in (("2bnhd", "2bnhd"), ("bhnc", ""), ("load_b2nhd", "NHD"), ("load_bnhc", "BNHC ")):
    _row(
        _base,
        f"kv_layout {_layout!r}",
        ValueError,
        f"kv_layout must be '2BNHD', 'B2NHD', 'BHNC' or 'BNHC', got '{_layout}'",
        kv_layout=_layout,
    )

# Which optional arguments come together ------------------------------------------------------------------------------

_row(
    "norm",
    "value without value_cache",
    ValueError,
    "value and value_cache must be given together, got value and no value_cache",
    value_cache=None,
)
_row(
    "norm",
    "value_cache without value",
    ValueError,
    "value and value_cache must be given together, got value_cache and no value",
    value=None,
)
_WITH_MODE = {
    "norm": "with scatter_mode 'None'",
    "nct": "with scatter_mode 'Nct'",
    "nz": "with cache_mode 'PA_NZ'",
    "nhsd": "with scatter_mode 'NHSD'",
    "alibi": "with scatter_mode 'Alibi'",
    "rope": "with scatter_mode 'Rope'",
    "omni": "with scatter_mode 'Omni'",
    "padded_alibi": "with a 4-D key",
    "padded_rope": "with a 4-D key",
}
for _base in ("nz", "nhsd", "alibi", "rope", "omni", "padded_alibi", "padded_rope"):
    _row(
        _base,
        "key only",
        ValueError,
        f"value must be given {_WITH_MODE[_base]}, got None",
        value=None,
        value_cache=None,
    )
for _base in ("alibi", "rope", "omni", "padded_alibi", "padded_rope"):
    for _name in ("compress_lens", "seq_lens"):
        _row(
            _base,
            f"no {_name}",
            ValueError,
            f"{_name} must be given {_WITH_MODE[_base]}, got None",
            **{_name: None},
        )
for _base in ("rope", "omni"):
    _row(
        _base,
        "no compress_seq_offsets",
        ValueError,
        f"compress_seq_offsets must be given {_WITH_MODE[_base]}, got None",
        compress_seq_offsets=None,
    )
for _base, _name in (
    ("norm", "compress_lens"),
    ("nz", "compress_lens"),
    ("norm", "compress_seq_offsets"),
    ("nhsd", "compress_seq_offsets"),
    ("alibi", "compress_seq_offsets"),
    ("norm", "seq_lens"),
    ("nct", "seq_lens"),
):
    _row(
        _base,
        f"{_name} given",
        ValueError,
        f"{_name} must be None {_WITH_MODE[_base]}, got a tensor of shape [3]",
        lambda b, a, n=_name: {n: b.index([1, 1, 1])},
    )
_row("nct", "no strides", ValueError, "strides must be given with scatter_mode 'Nct', got None", strides=None)
for _base in ("norm", "nz", "padded_alibi", "rope"):
    _row(
        _base,
        "strides given",
        ValueError,
        f"strides must be None {_WITH_MODE[_base]}, got [21, 15]",
        strides=[21, 15],
    )
_row("norm", "offsets given", ValueError, "offsets must be None with scatter_mode 'None', got [0, 0]", offsets=[0, 0])
for _name, _pair in (("strides", [23]), ("strides", [23, 17, 1]), ("strides", []), ("offsets", [2])):
    _row(
        "nct",
        f"{_name} {_pair}",
        ValueError,
        f"{_name} must have 2 elements (key, value), got {_pair}",
        **{_name: _pair},
    )
for _pair in ([0, 17], [23, 0], [23, -1], [-(2**63), 17]):
    _row("nct", f"strides {_pair}", ValueError, f"strides must be at least 1 each, got {_pair}", strides=_pair)
for _pair in ([-1, 0], [0, -(2**63)]):
    _row("nct", f"offsets {_pair}", ValueError, f"offsets must be at least 0 each, got {_pair}", offsets=_pair)

# dtypes --------------------------------------------------------------------------------------------------------------


def _cast_row(base: str, name: str, dtype: torch.dtype, text: str) -> None:
    short = str(dtype).removeprefix("torch.")
    _row(base, f"{name} {short}", TypeError, f"{name} {text}, got {short}", lambda b, a: {name: a[name].to(dtype)})


for _dtype in (torch.float64, torch.int64, torch.complex64, torch.bool):
    _cast_row("norm", "key", _dtype, "must have a 1-, 2- or 4-byte dtype")
_cast_row("nz", "value", torch.float64, "must have a 1-, 2- or 4-byte dtype")
_cast_row("load", "key_cache", torch.float64, "must have a 1-, 2- or 4-byte dtype")
_cast_row("load_nz", "value_cache", torch.int64, "must have a 1-, 2- or 4-byte dtype")
_cast_row("norm", "key_cache", torch.bfloat16, "must have dtype float16 as key")
_cast_row("key_only", "key_cache", torch.float32, "must have dtype float16 as key")
_cast_row("norm", "value", torch.int8, "must have dtype float16 as key (only PA_NZ may mix)")
_cast_row("nhsd", "value", torch.bfloat16, "must have dtype float16 as key (only PA_NZ may mix)")
_cast_row("padded_rope", "value", torch.float32, "must have dtype float16 as key (only PA_NZ may mix)")
_cast_row("norm", "value_cache", torch.int16, "must have dtype float16 as value")
_cast_row("nz", "value_cache", torch.float32, "must have dtype float16 as value")
_cast_row("load", "value_cache", torch.bfloat16, "must have dtype float16 as key_cache (only PA_NZ may mix)")
_cast_row("load", "key", torch.float32, "must have dtype float16 as key_cache")
_cast_row("load_nz", "value", torch.float16, "must have dtype int8 as value_cache")
for _base, _name, _dtype in (
    ("norm", "slot_mapping", torch.float32),
    ("norm", "slot_mapping", torch.int16),
    ("nz", "slot_mapping", torch.uint8),
    ("alibi", "compress_lens", torch.int8),
    ("rope", "compress_seq_offsets", torch.float64),
    ("omni", "seq_lens", torch.int16),
    ("padded_alibi", "seq_lens", torch.bool),
    ("load", "block_tables", torch.float32),
    ("load_nz", "block_tables", torch.int16),
    ("load", "context_lens", torch.int8),
    ("load_starts", "seq_starts", torch.float16),
):
    _cast_row(_base, _name, _dtype, "must be int32 or int64")
_cast_row("2bnhd", "key", torch.float64, "must have a 1-, 2- or 4-byte dtype")
_cast_row("bhnc", "value", torch.bfloat16, "must have dtype float16 as key")
_cast_row("b2nhd", "kv_cache", torch.int8, "must have dtype float16 as key")
_cast_row("bnhc", "slot_mapping", torch.float32, "must be int32 or int64")
_cast_row("load_2bnhd", "kv_cache", torch.int64, "must have a 1-, 2- or 4-byte dtype")
_cast_row("load_bhnc", "key", torch.bfloat16, "must have dtype float16 as kv_cache")
_cast_row("load_b2nhd", "value", torch.float32, "must have dtype float16 as kv_cache")
_cast_row("load_bhnc", "block_tables", torch.int16, "must be int32 or int64")
_cast_row("load_bnhc", "seq_starts", torch.bool, "must be int32 or int64")
for _base in ("rope", "padded_rope"):
    _row(
        _base,
        "window mean of int8",
        TypeError,
        "key must be float16, bfloat16 or float32 for the window mean of Rope, got int8",
        lambda b, a: {name: a[name].to(torch.int8) for name in ("key", "value", "key_cache", "value_cache")},
    )

# Shapes of scatter_pa_kv_cache ---------------------------------------------------------------------------------------

_TOKENS = "[num_tokens, num_heads, head_size]"
_PADDED = "[batch, seq_len, num_heads, head_size]"


def _shape_row(base: str, name: str, text: str, *shape: int, dtype: torch.dtype | None = None) -> None:
    _row(
        base,
        f"{name} {list(shape)}",
        ValueError,
        f"{name} {text}, got {list(shape)}",
        lambda b, a: {name: b.tensor(*shape, dtype=dtype or a[name].dtype)},
    )


_shape_row("norm", "key", f"must be {_TOKENS} or {_PADDED}", 6, 21)
_shape_row("norm", "key", f"must be {_TOKENS} or {_PADDED}", 6, 3, 7, 1, 1)
_shape_row("nct", "key", f"must be {_TOKENS}", 5, 1, 3, 7)
_shape_row("nz", "key", f"must be {_TOKENS}", 5, 96)
_shape_row("nhsd", "key", f"must be {_TOKENS}", 1, 5, 3, 7)
_shape_row("alibi", "key", f"must be {_TOKENS}", 7, 10)
_shape_row("norm", "key", "must have at least the 5 tokens of slot_mapping", 4, 3, 7)
_shape_row("key_only", "key", "must have at least the 5 tokens of slot_mapping", 0, 3, 7)
_shape_row("norm", "value", "must have at least the 5 tokens of slot_mapping", 4, 3, 5)
_shape_row("norm", "value", f"must be {_TOKENS} with num_heads 3 as key", 5, 2, 5)
_shape_row("nz", "value", f"must be {_TOKENS} with num_heads 3 as key", 6, 48)
_shape_row("nct", "value", f"must be {_TOKENS} with num_heads 3 as key", 5, 1, 15)
_shape_row("norm", "slot_mapping", "must be [num_tokens]", 5, 1)
_shape_row("nz", "slot_mapping", "must be [num_tokens]", 1, 5)
_row(
    "norm",
    "slot_mapping without dimension",
    ValueError,
    "slot_mapping must be [num_tokens], got []",
    lambda b, a: {"slot_mapping": a["slot_mapping"][0]},
)

for _shape in ((3, 5, 2, 3), (2, 4, 2, 3), (2, 5, 1, 3), (10, 2, 3)):
    _shape_row("padded_alibi", "value", f"must be {_PADDED} with batch 2, seq_len 5 and num_heads 2 as key", *_shape)
_shape_row("padded_alibi", "seq_lens", "must be [batch] = [2]", 3)
_shape_row("padded_rope", "seq_lens", "must be [batch] = [2]", 2, 1)
_shape_row("padded_alibi", "slot_mapping", "must be [batch, num_heads] = [2, 2]", 4)
_shape_row("padded_rope", "slot_mapping", "must be [batch, num_heads] = [2, 2]", 2, 1)
_shape_row("padded_alibi", "compress_lens", "must be [batch, num_heads] = [2, 2]", 1, 2)
_shape_row("padded_rope", "compress_lens", "must be [batch, num_heads] = [2, 2]", 4)
_shape_row("padded_rope", "compress_seq_offsets", "must be [batch * num_heads] = [4]", 2, 2)
for _shape in ((6, 2, 5), (7, 1, 5), (7, 2, 4), (14, 5)):
    _shape_row("alibi", "value", "must be [7, 2, 5] as key", *_shape)
_shape_row("rope", "seq_lens", "must be [batch]", 2, 1)
_shape_row("alibi", "slot_mapping", "must be [batch * num_heads] = [4]", 7)
_shape_row("rope", "slot_mapping", "must be [batch * num_heads] = [4]", 2, 2)
_shape_row("omni", "compress_lens", "must be [batch * num_heads] = [4]", 2)
_shape_row("omni", "compress_seq_offsets", "must be [batch * num_heads] = [4]", 5)
# The offsets of the device's tiling are checked by the shape of another tensor: seq_lens' own length must not pass.
_shape_row("rope", "compress_seq_offsets", "must be [batch * num_heads] = [4]", 2)

# Caches of scatter_pa_kv_cache ---------------------------------------------------------------------------------------

_NORM_KEY = "must be [num_blocks, block_size, num_heads, head_size] with num_heads 3 and head_size 7 as key"
_NORM_VALUE = "must be [num_blocks, block_size, num_heads, head_size] with num_heads 3 and head_size 5 as value"
_shape_row("norm", "key_cache", _NORM_KEY, 4, 3, 2, 7)
_shape_row("norm", "key_cache", _NORM_KEY, 4, 3, 3, 6)
_shape_row("norm", "key_cache", _NORM_KEY, 4, 3, 21)
_shape_row("nct", "key_cache", _NORM_KEY, 4, 3, 1, 3, 7)
_shape_row("key_only", "key_cache", _NORM_KEY, 12, 3, 7)
_shape_row("norm", "value_cache", _NORM_VALUE, 4, 3, 3, 7)
_shape_row("nct", "value_cache", _NORM_VALUE, 4, 3, 1, 5)
_NHSD_KEY = "must be [num_blocks, num_heads, block_size, head_size] with num_heads 3 and head_size 7 as key"
_shape_row("nhsd", "key_cache", _NHSD_KEY, 4, 5, 3, 7)
_shape_row(
    "nhsd",
    "value_cache",
    "must be [num_blocks, num_heads, block_size, head_size] with num_heads 3 and head_size 5 as value",
    4,
    3,
    5,
    7,
)
_shape_row("alibi", "key_cache", "must be [num_blocks, block_size, 1, head_size] with head_size 5 as key", 6, 3, 2, 5)
_shape_row("omni", "key_cache", "must be [num_blocks, block_size, 1, head_size] with head_size 5 as key", 18, 1, 5)
_shape_row(
    "rope", "value_cache", "must be [num_blocks, block_size, 1, head_size] with head_size 5 as value", 6, 3, 1, 4
)
_shape_row(
    "padded_rope", "value_cache", "must be [num_blocks, block_size, 1, head_size] with head_size 3 as value", 6, 3, 1, 7
)
_NZ_KEY = "must be [num_blocks, 6, block_size, 16] or [num_blocks, 3, 2, block_size, 16] for key [5, 3, 32]"
_NZ_VALUE = "must be [num_blocks, 3, block_size, 16] or [num_blocks, 3, 1, block_size, 16] for value [6, 3, 16]"
_shape_row("nz", "key_cache", _NZ_KEY, 4, 6, 3, 32)
_shape_row("nz", "key_cache", _NZ_KEY, 4, 3, 3, 16)
_shape_row("nz", "key_cache", _NZ_KEY, 4, 3, 96)
_shape_row("nz_5d", "key_cache", _NZ_KEY, 4, 2, 3, 3, 16)
_shape_row("nz_5d", "key_cache", _NZ_KEY, 4, 3, 2, 3, 8)
_shape_row("nz", "value_cache", _NZ_VALUE, 4, 6, 3, 16)
_shape_row("nz_5d", "value_cache", _NZ_VALUE, 4, 3, 2, 3, 16)
_shape_row("nz", "key", "must have a head_size that is a multiple of 16 (32 bytes) with cache_mode 'PA_NZ'", 5, 3, 24)
_shape_row(
    "nz_5d", "value", "must have a head_size that is a multiple of 16 (32 bytes) with cache_mode 'PA_NZ'", 6, 3, 8
)
# A unit is 32 bytes of that tensor's dtype: 16 elements are enough for float16 and not for int8.
_row(
    "nz",
    "head size of int8",
    ValueError,
    "value must have a head_size that is a multiple of 32 (32 bytes) with cache_mode 'PA_NZ', got [6, 3, 16]",
    lambda b, a: {name: a[name].to(torch.int8) for name in ("value", "value_cache")},
)
_shape_row("norm", "key_cache", "must have a block_size of at least 1", 4, 0, 3, 7)
_shape_row("nz", "key_cache", "must have a block_size of at least 1", 4, 6, 0, 16)
_shape_row("nz_5d", "value_cache", "must have a block_size of at least 1", 4, 3, 1, 0, 16)
_shape_row("nhsd", "key_cache", "must have a block_size of at least 1", 4, 3, 0, 7)
_row(
    "nz",
    "block_size 65536",
    ValueError,
    "key_cache must have a block_size of at most 65535 with cache_mode 'PA_NZ', got [1, 1, 65536, 16]",
    lambda b, a: {
        "key": b.tensor(5, 1, 16),
        "value": b.tensor(5, 1, 16),
        "key_cache": b.tensor(1, 1, 65536, 16),
        "value_cache": b.tensor(1, 1, 65536, 16),
    },
)
_shape_row("norm", "value_cache", "must have num_blocks 4 and block_size 3 as key_cache", 5, 3, 3, 5)
_shape_row("norm", "value_cache", "must have num_blocks 4 and block_size 3 as key_cache", 3, 4, 3, 5)
_shape_row("nz", "value_cache", "must have num_blocks 4 and block_size 3 as key_cache", 4, 3, 5, 16)
_shape_row("nz_5d", "value_cache", "must have num_blocks 4 and block_size 3 as key_cache", 2, 3, 1, 3, 16)
_shape_row("nhsd", "value_cache", "must have num_blocks 4 and block_size 5 as key_cache", 4, 3, 3, 5)
_shape_row("alibi", "value_cache", "must have num_blocks 6 and block_size 3 as key_cache", 6, 2, 1, 5)
_row(
    "norm",
    "more tokens than slots",
    ValueError,
    "slot_mapping must have at most num_blocks * block_size = 3 elements, got 5",
    lambda b, a: {"key_cache": a["key_cache"][:1], "value_cache": a["value_cache"][:1]},
)
_row(
    "nz_5d",
    "no blocks",
    ValueError,
    "slot_mapping must have at most num_blocks * block_size = 0 elements, got 5",
    lambda b, a: {"key_cache": a["key_cache"][:0], "value_cache": a["value_cache"][:0]},
)


def _every_second(base: str, name: str, strides: str) -> None:
    """The last dimension of an argument with a stride of 2."""
    _row(
        base,
        f"{name} with a last stride of 2",
        ValueError,
        f"{name} must have a dense last dimension (stride 1), got strides {strides}",
        lambda b, a: {
            name: b.tensor(*a[name].shape[:-1], 2 * a[name].size(-1), dtype=a[name].dtype)[..., ::2],
        },
    )


_every_second("norm", "key", "[46, 15, 2]")
_every_second("norm", "value", "[34, 11, 2]")
_every_second("key_only", "key_cache", "[139, 46, 15, 2]")
_every_second("nct", "value_cache", "[103, 34, 11, 2]")
_every_second("nz", "key_cache", "[601, 100, 33, 2]")
_every_second("nhsd", "key", "[46, 15, 2]")
_every_second("rope", "key", "[23, 11, 2]")
_every_second("padded_alibi", "value", "[76, 15, 7, 2]")
_every_second("load", "key_cache", "[94, 31, 15, 2]")
_every_second("load", "value_cache", "[70, 23, 11, 2]")
_every_second("load_nz", "key", "[193, 2]")
_every_second("load", "value", "[23, 11, 2]")

# Shapes of paged_cache_load ------------------------------------------------------------------------------------------

_shape_row("load", "block_tables", "must be [batch, max_num_blocks]", 6)
_shape_row("load_nz", "block_tables", "must be [batch, max_num_blocks]", 2, 3, 1)
_shape_row("load", "context_lens", "must be [batch] = [2]", 3)
_shape_row("load_nz", "context_lens", "must be [batch] = [2]", 2, 1)
# Lengths per sequence where row boundaries are asked for, and the other way round (bugs.md, 43).
_shape_row("load_cumsum", "context_lens", "must be [batch + 1] = [3] with is_seq_lens_cumsum", 2)
_shape_row("load_starts", "seq_starts", "must be [batch] = [2]", 1)
_shape_row("load_starts", "seq_starts", "must be [batch] = [2]", 2, 1)
_shape_row("load", "key_cache", "must be [num_blocks, block_size, num_heads, head_size]", 5, 3, 14)
_shape_row("load", "value_cache", "must be [num_blocks, block_size, num_heads, head_size]", 5, 3, 1, 2, 5)
_shape_row("load", "key_cache", "must have a block_size of at least 1", 5, 0, 2, 7)
_shape_row("load_nz_5d", "value_cache", "must have a block_size of at least 1", 5, 1, 3, 0, 32)
_LOAD_NORM = f"must be {_TOKENS} with num_heads 2 and head_size"
_shape_row("load", "key", f"{_LOAD_NORM} 7 as key_cache", 8, 14)
_shape_row("load", "key", f"{_LOAD_NORM} 7 as key_cache", 8, 1, 7)
_shape_row("load_starts", "key", f"{_LOAD_NORM} 7 as key_cache", 8, 2, 5)
_shape_row("load_cumsum", "value", f"{_LOAD_NORM} 5 as value_cache", 8, 2, 7)
_row(
    "load",
    "value_cache with another number of heads",
    ValueError,
    "value_cache must have num_heads 2 as key_cache, got [5, 3, 1, 5]",
    lambda b, a: {"value_cache": b.tensor(5, 3, 1, 5), "value": b.tensor(8, 1, 5)},
)
_shape_row("load", "value_cache", "must have num_blocks 5 and block_size 3 as key_cache", 4, 3, 2, 5)
_shape_row("load_nz", "value_cache", "must have num_blocks 5 and block_size 3 as key_cache", 5, 3, 4, 32)
_shape_row("load_nz_5d", "value_cache", "must have num_blocks 5 and block_size 3 as key_cache", 6, 1, 3, 3, 32)
_NZ_LOAD_KEY = (
    "must be [num_blocks, num_heads * head_size / 16, block_size, 16] or [num_blocks, num_heads, head_size / 16, "
    "block_size, 16]"
)
_shape_row("load_nz", "key_cache", _NZ_LOAD_KEY, 5, 6, 3, 32)
_shape_row("load_nz", "key_cache", _NZ_LOAD_KEY, 5, 18, 16)
_shape_row("load_nz_5d", "key_cache", _NZ_LOAD_KEY, 5, 3, 2, 3, 8)
_NZ_OUT = "must be [num_tokens, 96] or [num_tokens, num_heads, head_size] with num_heads * head_size 96 as"
_shape_row("load_nz", "key", f"{_NZ_OUT} key_cache", 8, 95)
_shape_row("load_nz", "key", f"{_NZ_OUT} key_cache", 8, 3, 31)
_shape_row("load_nz_5d", "value", f"{_NZ_OUT} value_cache", 8)
_shape_row("load_nz", "value", f"{_NZ_OUT} value_cache", 8, 1, 3, 32)
_shape_row("load", "value", "must have num_tokens 8 as key", 7, 2, 5)
_shape_row("load_nz", "value", "must have num_tokens 8 as key", 9, 96)
_row(
    "load_nz",
    "gaps between the heads of a row",
    ValueError,
    "key must have dense rows with cache_mode 'PA_NZ', got shape [8, 3, 32] and strides [100, 33, 1]",
    lambda b, a: {"key": b.tensor(8, 3, 32)},
)
_row(
    "load_nz_5d",
    "heads of a row out of order",
    ValueError,
    "value must have dense rows with cache_mode 'PA_NZ', got shape [8, 3, 32] and strides [97, 1, 1]",
    lambda b, a: {"value": a["value"].as_strided((8, 3, 32), (97, 1, 1), 2)},
)

# Shapes of the packed operators --------------------------------------------------------------------------------------

_shape_row("2bnhd", "key", f"must be {_TOKENS}", 6, 1, 3, 7)
_shape_row("bhnc", "value", f"must be {_TOKENS} with num_heads 3 as key", 5, 2, 5)
_shape_row("bnhc", "value", "must have at least the 5 tokens of slot_mapping", 4, 3, 5)
_shape_row("b2nhd", "slot_mapping", "must be [num_tokens]", 5, 1)
_2BNHD = "must be [2, num_blocks, block_size, num_heads, head_size] with num_heads"
_B2NHD = "must be [num_blocks, 2, block_size, num_heads, head_size] with num_heads"
_BHNC = "must be [num_blocks, num_heads, block_size, C] with num_heads"
_BNHC = "must be [num_blocks, block_size, num_heads, C] with num_heads"
_C = "as key and C 7 + 5, the head sizes of key and value"
_shape_row("2bnhd", "kv_cache", f"{_2BNHD} 3 and head_size 7 as key", 4, 2, 3, 3, 7)
_shape_row("2bnhd", "kv_cache", f"{_2BNHD} 3 and head_size 7 as key", 2, 4, 3, 21)
_shape_row("2bnhd", "kv_cache", f"{_2BNHD} 3 and head_size 7 as key", 2, 4, 3, 3, 14)
_shape_row("b2nhd", "kv_cache", f"{_B2NHD} 3 and head_size 7 as key", 2, 4, 3, 3, 7)
_shape_row("b2nhd", "kv_cache", f"{_B2NHD} 3 and head_size 7 as key", 4, 2, 3, 2, 7)
_shape_row("bhnc", "kv_cache", f"{_BHNC} 3 {_C}", 4, 5, 3, 12)  # tokens first
_shape_row("bhnc", "kv_cache", f"{_BHNC} 3 {_C}", 4, 3, 5, 14)
_shape_row("bnhc", "kv_cache", f"{_BNHC} 3 {_C}", 4, 3, 2, 12)
_shape_row("bnhc", "kv_cache", f"{_BNHC} 3 {_C}", 2, 4, 3, 3, 12)
_shape_row("load_2bnhd", "kv_cache", f"{_2BNHD} 2 and head_size 7 as key", 1, 5, 3, 2, 7)
_shape_row("load_b2nhd", "kv_cache", f"{_B2NHD} 2 and head_size 7 as key", 5, 1, 3, 2, 7)
_shape_row("load_bhnc", "kv_cache", f"{_BHNC} 2 {_C}", 5, 3, 2, 12)
_shape_row("load_bnhc", "kv_cache", f"{_BNHC} 2 {_C}", 5, 3, 2, 13)
for _base, _layout, _rows, _heads in (
    ("2bnhd", "2BNHD", 5, 3),
    ("b2nhd", "B2NHD", 5, 3),
    ("load_2bnhd", "2BNHD", 8, 2),
    ("load_b2nhd", "B2NHD", 8, 2),
):
    _shape_row(_base, "value", f"must have head_size 7 as key with kv_layout '{_layout}'", _rows, _heads, 5)
_shape_row("2bnhd", "kv_cache", "must have a block_size of at least 1", 2, 4, 0, 3, 7)
_shape_row("load_bhnc", "kv_cache", "must have a block_size of at least 1", 5, 2, 0, 12)
_row(
    "bhnc",
    "more tokens than slots",
    ValueError,
    "slot_mapping must have at most num_blocks * block_size = 3 elements, got 5",
    lambda b, a: {"kv_cache": a["kv_cache"][:1]},
)
_every_second("2bnhd", "key", "[46, 15, 2]")
_every_second("bhnc", "value", "[34, 11, 2]")
_every_second("bnhc", "kv_cache", "[229, 76, 25, 2]")
_every_second("load_2bnhd", "kv_cache", "[471, 94, 31, 15, 2]")
_every_second("load_bhnc", "value", "[23, 11, 2]")
_shape_row("load_bhnc", "block_tables", "must be [batch, max_num_blocks]", 6)
_shape_row("load_2bnhd", "context_lens", "must be [batch] = [2]", 3)
_shape_row("load_b2nhd", "context_lens", "must be [batch + 1] = [3] with is_seq_lens_cumsum", 2)
_shape_row("load_bnhc", "seq_starts", "must be [batch] = [2]", 3)
_shape_row("load_bhnc", "key", f"must be {_TOKENS}", 8, 14)
_shape_row("load_bnhc", "value", f"must be {_TOKENS} with num_tokens 8 and num_heads 2 as key", 7, 2, 5)
_shape_row("load_2bnhd", "value", f"must be {_TOKENS} with num_tokens 8 and num_heads 2 as key", 8, 1, 7)

# Memory: within the storage ------------------------------------------------------------------------------------------

for _base, _name, _elements, _got in (
    ("norm", "key", 149, "shape [6, 3, 7] and strides [25, 8, 1] at offset 2"),  # needs 150
    ("norm", "value", 60, "shape [5, 3, 5] and strides [19, 6, 1] at offset 2"),
    ("norm", "key_cache", 302, "shape [4, 3, 3, 7] and strides [76, 25, 8, 1] at offset 2"),  # needs 303
    ("key_only", "key_cache", 0, "shape [4, 3, 3, 7] and strides [76, 25, 8, 1] at offset 2"),
    ("nct", "value_cache", 230, "shape [4, 3, 3, 5] and strides [58, 19, 6, 1] at offset 2"),  # needs 231
    ("nhsd", "key_cache", 100, "shape [4, 3, 5, 7] and strides [124, 41, 8, 1] at offset 2"),
    ("norm", "slot_mapping", 8, "shape [5] and strides [2] at offset 0"),  # needs 9
    ("alibi", "compress_lens", 6, "shape [4] and strides [2] at offset 0"),
    ("rope", "compress_seq_offsets", 0, "shape [4] and strides [2] at offset 0"),
    ("padded_alibi", "seq_lens", 2, "shape [2] and strides [2] at offset 0"),
    ("load", "key_cache", 235, "shape [5, 3, 2, 7] and strides [52, 17, 8, 1] at offset 2"),
    ("load", "value_cache", 1, "shape [5, 3, 2, 5] and strides [40, 13, 6, 1] at offset 2"),
    ("load", "key", 135, "shape [8, 2, 7] and strides [17, 8, 1] at offset 2"),  # needs 136
    ("load_nz", "value", 700, "shape [8, 96] and strides [97, 1] at offset 2"),
    ("load", "block_tables", 10, "shape [2, 3] and strides [6, 2] at offset 0"),  # needs 11
    ("load_nz", "context_lens", 2, "shape [2] and strides [2] at offset 0"),
    ("load_starts", "seq_starts", 1, "shape [2] and strides [2] at offset 0"),
    ("bhnc", "key", 149, "shape [6, 3, 7] and strides [25, 8, 1] at offset 2"),  # needs 150
    ("b2nhd", "value", 60, "shape [5, 3, 7] and strides [25, 8, 1] at offset 2"),
    ("bnhc", "kv_cache", 482, "shape [4, 3, 3, 12] and strides [121, 40, 13, 1] at offset 2"),  # needs 483
    ("2bnhd", "slot_mapping", 8, "shape [5] and strides [2] at offset 0"),  # needs 9
    ("load_2bnhd", "kv_cache", 300, "shape [2, 5, 3, 2, 7] and strides [261, 52, 17, 8, 1] at offset 2"),
    ("load_bhnc", "value", 100, "shape [8, 2, 5] and strides [13, 6, 1] at offset 2"),
):
    _row(
        _base,
        f"{_name} with {_elements} elements left of its storage",
        ValueError,
        f"{_name} must stay within its storage of {_elements} elements, got {_got}",
        lambda b, a, n=_name, e=_elements: {n: shrunk(a[n], e)},
        needs="memory",
    )
for _base, _name, _shape, _strides in (
    ("norm", "key_cache", [4, 3, 3, 7], [_HUGE, 21, 7, 1]),  # times 3 is more than int64 holds
    ("norm", "value_cache", [4, 3, 3, 5], [_MOST, 15, 5, 1]),
    ("nhsd", "key", [6, 3, 7], [21, _HUGE, 1]),  # times 2 too
    ("alibi", "value", [7, 2, 5], [2**61, _HUGE, 1]),  # each fits, the sum does not
    ("load", "key_cache", [5, 3, 2, 7], [2**60, 2**61, 2**61, 1]),
    ("load_starts", "key", [8, 2, 7], [_HUGE, 7, 1]),
):
    _row(
        _base,
        f"{_name} with strides {_strides}",
        ValueError,
        f"{_name} must stay within its storage of 64 elements, got shape {_shape} and strides {_strides} at offset 0",
        lambda b, a, n=_name, sh=_shape, st=_strides: {n: unchecked_view(b.memory(64, torch.float16), sh, st)},
        needs="memory",
    )
# Nct: the caller's strides and offsets decide what is read, not the tensor's. Key's reach exactly to the end of its 115
# elements with stride 23 and offset 2, value's to the end of its 84 with 17 and 1.
for _at, _strides, _offsets in (
    (0, [24, 17], [2, 1]),
    (0, [23, 17], [3, 1]),
    (1, [23, 18], [2, 1]),
    (1, [23, 17], [2, 2]),
    (0, [_HUGE, 1], [2, 1]),
    (1, [23, _MOST], [0, 0]),
    (0, [2**60, 17], [_HUGE, 1]),
    (0, [23, 17], [_MOST, 1]),
    (0, [2**61 - 1, 1], [3, 1]),  # without the row of the last token this is still an int64
):
    _row(
        "nct",
        f"{('key', 'value')[_at]} by strides {_strides} and offsets {_offsets}",
        ValueError,
        f"strides must keep {('key', 'value')[_at]} within the {(115, 84)[_at]} elements of its storage from its data "
        f"pointer, got stride {_strides[_at]} and offset {_offsets[_at]} for 5 tokens of {(21, 15)[_at]} elements",
        needs="memory",
        strides=_strides,
        offsets=_offsets,
    )
for _left in (100, 0):  # of which the key's own offset takes 3
    _row(
        "nct",
        f"key with {_left} elements left of its storage",
        ValueError,
        f"strides must keep key within the {_left - 3} elements of its storage from its data pointer, got stride 23 "
        "and offset 2 for 5 tokens of 21 elements",
        lambda b, a, left=_left: {"key": shrunk(a["key"], left)},
        needs="memory",
    )

# Memory: what is written shares no byte with anything else ------------------------------------------------------------


def _expanded_row(base: str, name: str, dim: int, got: str) -> None:
    def expand(b: Build, a: Arguments) -> Arguments:
        return {name: a[name].narrow(dim, 0, 1).expand(a[name].shape)}

    _row(base, f"{name} expanded", ValueError, f"{name} must not overlap itself, got {got}", expand, needs="memory")


_expanded_row("norm", "key_cache", 0, "shape [4, 3, 3, 7] and strides [0, 25, 8, 1]")
_expanded_row("norm", "value_cache", 2, "shape [4, 3, 3, 5] and strides [58, 19, 0, 1]")
_expanded_row("nz_5d", "key_cache", 3, "shape [4, 3, 2, 3, 16] and strides [316, 105, 52, 0, 1]")
_expanded_row("load", "key", 0, "shape [8, 2, 7] and strides [0, 8, 1]")
_expanded_row("load_cumsum", "value", 1, "shape [8, 2, 5] and strides [13, 0, 1]")
_expanded_row("2bnhd", "kv_cache", 0, "shape [2, 4, 3, 3, 7] and strides [0, 76, 25, 8, 1]")
_expanded_row("bhnc", "kv_cache", 1, "shape [4, 3, 3, 12] and strides [121, 0, 13, 1]")
_expanded_row("load_bhnc", "key", 0, "shape [8, 2, 7] and strides [0, 8, 1]")
# The two halves over each other: by a row, and by one element of every row.
for _base, _shape, _strides in (
    ("2bnhd", [2, 4, 3, 3, 7], [7, 63, 21, 7, 1]),
    ("b2nhd", [4, 2, 3, 3, 7], [126, 6, 39, 13, 1]),
    ("bhnc", [4, 3, 3, 12], [99, 33, 11, 1]),
    ("bnhc", [4, 3, 3, 12], [108, 36, 7, 1]),
):
    _row(
        _base,
        f"halves over each other by strides {_strides}",
        ValueError,
        f"kv_cache must not overlap itself, got shape {_shape} and strides {_strides}",
        lambda b, a, sh=_shape, st=_strides: {"kv_cache": b.memory(900, torch.float16).as_strided(sh, st, 0)},
        needs="memory",
    )


def _overlap(base: str, later: str, earlier: str, offsets: tuple[int, int], change: Any, name: str = "") -> None:
    _row(
        base,
        f"{later} over {earlier}{name}",
        ValueError,
        f"{later} must not share memory with {earlier}, got storage offsets {offsets[0]} and {offsets[1]}",
        change,
        needs="memory",
    )


def _by_one_element(b: Build, a: Arguments) -> Arguments:
    memory = b.memory(600, torch.float16)
    return {
        "key_cache": memory.as_strided((4, 3, 3, 7), (63, 21, 7, 1), 0),  # elements 0 to 251
        "value_cache": memory.as_strided((4, 3, 3, 5), (45, 15, 5, 1), 251),
    }


def _rows_into_each_other(b: Build, a: Arguments) -> Arguments:
    memory = b.memory(1200, torch.float16)
    return {  # rows of 7 and of 5 elements in pages of 11: one element of each is the other's
        "key_cache": memory.as_strided((4, 3, 3, 7), (99, 33, 11, 1), 0),
        "value_cache": memory.as_strided((4, 3, 3, 5), (99, 33, 11, 1), 6),
    }


_overlap("norm", "value_cache", "key_cache", (251, 0), _by_one_element, " by one element")
_overlap("norm", "value_cache", "key_cache", (6, 0), _rows_into_each_other, " in every row")
_overlap("norm", "key", "key_cache", (2, 2), lambda b, a: {"key": a["key_cache"].as_strided((5, 3, 7), (25, 8, 1), 2)})


def _by_the_last_element(b: Build, a: Arguments) -> Arguments:
    return {"value": a["value_cache"].as_strided((5, 3, 5), (0, 0, 1), 230)}  # value_cache ends with element 230


def _index_in_a_cache(name: str, cache: str, elements: int, start: int) -> Callable[[Build, Arguments], Arguments]:
    """An index tensor and a cache (or an output) out of one storage, the index tensor from int64 `start` on."""

    def change(b: Build, a: Arguments) -> Arguments:
        memory = torch.zeros(elements, dtype=torch.int64).to(b.device)
        index = memory[start : start + a[name].numel()].view(a[name].shape)
        return {cache: memory.view(a[cache].dtype)[: a[cache].numel()].view(a[cache].shape), name: index}

    return change


_overlap("norm", "value", "value_cache", (230, 2), _by_the_last_element, " by one element")
_overlap("norm", "value_cache", "key_cache", (0, 0), lambda b, a: {
    "value": a["key"][..., :5],
    "key_cache": (memory := b.memory(252, torch.float16)).view(4, 3, 3, 7),
    "value_cache": memory.view(4, 3, 3, 7)[..., :5],
}, " as a slice of it")  # fmt: skip
_overlap("nz", "value_cache", "key_cache", (2, 2), lambda b, a: {"value_cache": a["key_cache"][:, 3:6].as_strided(
    (4, 3, 3, 16), a["key_cache"].stride(), 2)})  # fmt: skip
_overlap("nz_5d", "key", "key_cache", (17, 2), lambda b, a: {
    "key": a["key_cache"].as_strided((5, 3, 32), (40, 33, 1), 17),  # begins behind the first unit, ends in others
})  # fmt: skip
_overlap("nhsd", "value_cache", "key_cache", (9, 2), lambda b, a: {
    "value_cache": a["key_cache"].as_strided((4, 3, 5, 5), (124, 41, 8, 1), 9 + 0),
})  # fmt: skip
_overlap("rope", "key", "value_cache", (0, 2), lambda b, a: {
    "key": a["value_cache"].as_strided((7, 2, 5), (10, 5, 1), 0),
})  # fmt: skip
_overlap("padded_alibi", "value", "value_cache", (2, 2), lambda b, a: {
    "value": a["value_cache"].as_strided((2, 5, 2, 3), (20, 4, 0, 1), 2),
})  # fmt: skip
# Nct: what is read is where strides and offsets lead, whatever the tensor itself covers.
_overlap("nct", "key", "key_cache", (3, 60), lambda b, a: {
    "key": (memory := b.memory(400, torch.float16)).as_strided((5, 3, 7), (0, 0, 1), 3),
    "key_cache": memory.as_strided((4, 3, 3, 7), (63, 21, 7, 1), 60),
}, " by its strides")  # fmt: skip
# The stride of a single token leads nowhere, however large it is; its own elements still must not be written.
_overlap("nct", "key", "key_cache", (3, 0), lambda b, a: {
    "key": (memory := b.memory(400, torch.float16)).as_strided((1, 3, 7), (21, 7, 1), 3),
    "key_cache": memory.as_strided((4, 3, 3, 7), (63, 21, 7, 1), 0),
    "slot_mapping": b.index([0]),
    "strides": [2**63 - 1, _HUGE],
}, " with one token")  # fmt: skip
_overlap("norm", "slot_mapping", "key_cache", (62, 0), _index_in_a_cache("slot_mapping", "key_cache", 70, 62))
_overlap("key_only", "slot_mapping", "key_cache", (0, 0), _index_in_a_cache("slot_mapping", "key_cache", 70, 0))
_overlap("alibi", "seq_lens", "value_cache", (21, 0), _index_in_a_cache("seq_lens", "value_cache", 25, 21))
_overlap("omni", "compress_lens", "key_cache", (5, 0), _index_in_a_cache("compress_lens", "key_cache", 25, 5))
_overlap(
    "rope", "compress_seq_offsets", "key_cache", (7, 0), _index_in_a_cache("compress_seq_offsets", "key_cache", 25, 7)
)
_overlap("load", "value", "key", (1, 2), lambda b, a: {
    "value": a["key"].as_strided((8, 2, 5), (17, 8, 1), 1),
})  # fmt: skip
_overlap("load", "key_cache", "key", (2, 40), lambda b, a: {
    "key": a["key_cache"].as_strided((8, 2, 7), (14, 7, 1), 40),
})  # fmt: skip
_overlap("load_cumsum", "value_cache", "value", (2, 2), lambda b, a: {
    "value": a["value_cache"].as_strided((8, 2, 5), (13, 6, 1), 2),
})  # fmt: skip
_overlap("load_nz", "key_cache", "key", (2, 5), lambda b, a: {
    "key": a["key_cache"].as_strided((8, 96), (96, 1), 5),
})  # fmt: skip
_overlap("load", "block_tables", "key", (24, 0), _index_in_a_cache("block_tables", "key", 40, 24))
_overlap("load", "context_lens", "value", (0, 0), _index_in_a_cache("context_lens", "value", 40, 0))
_overlap("load_starts", "seq_starts", "key", (27, 0), _index_in_a_cache("seq_starts", "key", 40, 27))

_overlap("bhnc", "key", "kv_cache", (2, 2), lambda b, a: {"key": a["kv_cache"].as_strided((5, 3, 7), (25, 8, 1), 2)})
_overlap("2bnhd", "value", "kv_cache", (383, 2), lambda b, a: {
    "value": a["kv_cache"].as_strided((5, 3, 7), (0, 7, 1), 383),  # in the values' half only
})  # fmt: skip
_overlap("b2nhd", "slot_mapping", "kv_cache", (0, 0), _index_in_a_cache("slot_mapping", "kv_cache", 140, 0))
_overlap("load_bnhc", "value", "key", (1, 2), lambda b, a: {"value": a["key"].as_strided((8, 2, 5), (17, 8, 1), 1)})
_overlap("load_bhnc", "kv_cache", "key", (2, 40), lambda b, a: {
    "key": a["kv_cache"].as_strided((8, 2, 7), (14, 7, 1), 40),
})  # fmt: skip
_overlap("load_b2nhd", "context_lens", "value", (0, 0), _index_in_a_cache("context_lens", "value", 40, 0))

# Values of scatter_pa_kv_cache ---------------------------------------------------------------------------------------


def _value_row(
    base: str, name: str, values: Any, error: type[Exception], text: str, dtype: torch.dtype = torch.int64, **more: Any
) -> None:
    """An argument (and ``more``) replaced by index tensors of these values."""

    def change(b: Build, a: Arguments) -> Arguments:
        return {name: b.index(values, dtype)} | {other: b.index(v, dtype) for other, v in more.items()}

    _row(base, f"{name} {values}{' ' + str(more) if more else ''}", error, text, change, needs="values")


_SLOT = "must be less than num_blocks * block_size ="
_value_row("norm", "slot_mapping", [4, -1, 12, 0, 7], IndexError, f"slot_mapping[2] {_SLOT} 12, got 12")
_value_row("norm", "slot_mapping", [0, 1, 2, 3, 12], IndexError, f"slot_mapping[4] {_SLOT} 12, got 12", torch.int32)
_value_row("norm", "slot_mapping", [99, 1, 12, 3, 4], IndexError, f"slot_mapping[0] {_SLOT} 12, got 99")
_value_row("key_only", "slot_mapping", [_HUGE] + [0] * 4, IndexError, f"slot_mapping[0] {_SLOT} 12, got {_HUGE}")
_value_row("nct", "slot_mapping", [0] * 4 + [_MOST], IndexError, f"slot_mapping[4] {_SLOT} 12, got {_MOST}")
_value_row("nz", "slot_mapping", [0, 2**31, 1, 2, 3], IndexError, f"slot_mapping[1] {_SLOT} 12, got {2**31}")
_value_row(
    "nz_5d", "slot_mapping", [0, 2**31 - 1, 1, 2, 3], IndexError, f"slot_mapping[1] {_SLOT} 12, got {2**31 - 1}",
    torch.int32,
)  # fmt: skip
# An int64 slot whose lower half is a good slot.
_value_row("norm", "slot_mapping", [1, 2**32 + 5, 0, 2, 3], IndexError, f"slot_mapping[1] {_SLOT} 12, got {2**32 + 5}")
_value_row("nhsd", "slot_mapping", [-(2**63), 19, 20, 0, 1], IndexError, f"slot_mapping[2] {_SLOT} 20, got 20")

_value_row("alibi", "seq_lens", [8, -1], ValueError, "seq_lens[1] must not be negative, got -1")
_value_row("rope", "seq_lens", [-(2**63), 3], ValueError, f"seq_lens[0] must not be negative, got {-(2**63)}")
_value_row("alibi", "seq_lens", [4, 2], ValueError, "seq_lens must sum to the 7 tokens of key, got 6", torch.int32)
_value_row("omni", "seq_lens", [4, 4], ValueError, "seq_lens must sum to the 7 tokens of key, got 8")
_value_row("rope", "seq_lens", [_MOST, _MOST], ValueError, f"seq_lens must sum to the 7 tokens of key, got {2 * _MOST}")
_value_row("padded_alibi", "seq_lens", [6, 3], ValueError, "seq_lens[0] must be between 0 and seq_len 5, got 6")
_value_row("padded_rope", "seq_lens", [4, -1], ValueError, "seq_lens[1] must be between 0 and seq_len 5, got -1")
_value_row(
    "padded_rope", "seq_lens", [4, _MOST], ValueError, f"seq_lens[1] must be between 0 and seq_len 5, got {_MOST}"
)

_WINDOW = "must be between 0 and"
_value_row("alibi", "compress_lens", [2, 5, 0, 1], ValueError, f"compress_lens[1] {_WINDOW} seq_lens[0] = 4, got 5")
_value_row("alibi", "compress_lens", [2, 3, -1, 1], ValueError, f"compress_lens[2] {_WINDOW} seq_lens[1] = 3, got -1")
_value_row("rope", "compress_lens", [2, 1, 0, 4], ValueError, f"compress_lens[3] {_WINDOW} seq_lens[1] = 3, got 4")
_value_row("omni", "compress_lens", [_MOST, 1, 0, 2], ValueError,
           f"compress_lens[0] {_WINDOW} seq_lens[0] = 4, got {_MOST}")  # fmt: skip
_value_row("padded_alibi", "compress_lens", [[2, 3], [0, 4]], ValueError,
           f"compress_lens[1, 1] {_WINDOW} seq_lens[1] = 3, got 4")  # fmt: skip
_value_row("padded_rope", "compress_lens", [[2, -3], [0, 1]], ValueError,
           f"compress_lens[0, 1] {_WINDOW} seq_lens[0] = 4, got -3")  # fmt: skip

_OFFSET = "must be -1, seq_lens[{b}] = {n} or between 0 and seq_lens[{b}] - compress_lens[{i}] = {most}, got {got}"
for _base, _values, _facts in (
    ("rope", [3, -1, 1, 1], {"b": 0, "n": 4, "i": 0, "most": 2, "got": 3}),
    ("rope", [1, -2, 1, 1], {"b": 0, "n": 4, "i": 1, "most": 3, "got": -2}),
    ("omni", [1, -1, 1, 2], {"b": 1, "n": 3, "i": 3, "most": 1, "got": 2}),
    ("omni", [1, -1, 4, 1], {"b": 1, "n": 3, "i": 2, "most": 3, "got": 4}),
    ("rope", [_MOST, -1, 1, 1], {"b": 0, "n": 4, "i": 0, "most": 2, "got": _MOST}),
    ("rope", [1, -1, 1, -(2**63)], {"b": 1, "n": 3, "i": 3, "most": 1, "got": -(2**63)}),
    ("padded_rope", [3, -1, 1, 1], {"b": 0, "n": 4, "i": "0, 0", "most": 2, "got": 3}),
    ("padded_rope", [1, -1, 1, 2], {"b": 1, "n": 3, "i": "1, 1", "most": 1, "got": 2}),
):
    _at = next(i for i, (mine, good) in enumerate(zip(_values, [1, -1, 1, 1], strict=True)) if mine != good)
    _value_row(
        _base, "compress_seq_offsets", _values, ValueError, f"compress_seq_offsets[{_at}] {_OFFSET.format(**_facts)}"
    )

_ROOM = "must leave room for its {} rows in num_blocks * block_size = 18 slots, got {}"
_value_row("alibi", "slot_mapping", [0, 16, 8, 12], IndexError, f"slot_mapping[1] {_ROOM.format(3, 16)}")
_value_row("alibi", "slot_mapping", [0, 4, 19, 12], IndexError, f"slot_mapping[2] {_ROOM.format(0, 19)}")
_value_row("rope", "slot_mapping", [16, 4, 8, 12], IndexError, f"slot_mapping[0] {_ROOM.format(3, 16)}", torch.int32)
_value_row("rope", "slot_mapping", [0, 15, 8, 12], IndexError, f"slot_mapping[1] {_ROOM.format(4, 15)}")
_value_row("omni", "slot_mapping", [0, 4, 8, 18], IndexError, f"slot_mapping[3] {_ROOM.format(1, 18)}")
_value_row("omni", "slot_mapping", [_MOST, 4, 8, 12], IndexError, f"slot_mapping[0] {_ROOM.format(2, _MOST)}")
_value_row("padded_alibi", "slot_mapping", [[17, 4], [8, 12]], IndexError, f"slot_mapping[0, 0] {_ROOM.format(2, 17)}")
_value_row(
    "padded_rope", "slot_mapping", [[0, 4], [8, _HUGE]], IndexError, f"slot_mapping[1, 1] {_ROOM.format(2, _HUGE)}"
)

# Values of paged_cache_load ------------------------------------------------------------------------------------------

_value_row("load", "context_lens", [5, -1], ValueError, "context_lens[1] must not be negative, got -1")
_value_row(
    "load_nz", "context_lens", [-(2**63), 2], ValueError, f"context_lens[0] must not be negative, got {-(2**63)}"
)
_value_row("load_cumsum", "context_lens", [-1, 6, 8], ValueError, "context_lens[0] must not be negative, got -1")
_value_row(
    "load_cumsum",
    "context_lens",
    [1, 0, 8],
    ValueError,
    "context_lens[1] must be at least context_lens[0] = 1, got 0",
    torch.int32,
)
_value_row(
    "load_cumsum",
    "context_lens",
    [1, 6, -(2**63)],
    ValueError,
    f"context_lens[2] must be at least context_lens[1] = 6, got {-(2**63)}",
)
_ROWS = "key must have room for the {} rows of sequence {} from row {}, got 8 rows"
_value_row("load", "context_lens", [5, 4], ValueError, _ROWS.format(4, 1, 5))
_value_row("load_nz", "context_lens", [9, 0], ValueError, _ROWS.format(9, 0, 0), torch.int32)
_value_row("load", "context_lens", [1, _MOST], ValueError, _ROWS.format(_MOST, 1, 1))
_value_row("load_cumsum", "context_lens", [1, 6, 9], ValueError, _ROWS.format(3, 1, 6))
_value_row("load_cumsum", "context_lens", [_HUGE, _HUGE, _MOST], ValueError, _ROWS.format(_MOST - _HUGE, 1, _HUGE))
_value_row("load_starts", "seq_starts", [3, -1], ValueError, "seq_starts[1] must not be negative, got -1")
_value_row(
    "load_starts", "seq_starts", [-(2**63), 0], ValueError, f"seq_starts[0] must not be negative, got {-(2**63)}"
)
_COLUMNS = "block_tables must have the columns for context_lens {} from seq_starts {} of sequence {} with block_size {}"
_value_row("load_starts", "seq_starts", [6, 7], ValueError, f"{_COLUMNS.format(5, 6, 0, 3)}, got 3 columns")
_value_row(
    "load_starts", "seq_starts", [3, 9], ValueError, f"{_COLUMNS.format(2, 9, 1, 3)}, got 3 columns", torch.int32
)
_value_row("load_starts", "seq_starts", [0, _MOST], ValueError, f"{_COLUMNS.format(2, _MOST, 1, 3)}, got 3 columns")
_row(
    "load_starts",
    "a start past the row of the table, as in bugs.md 36",
    ValueError,
    f"{_COLUMNS.format(65, 128, 0, 64)}, got 2 columns",
    lambda b, a: {
        "key_cache": b.tensor(4, 64, 2, 7),
        "value_cache": b.tensor(4, 64, 2, 5),
        "block_tables": b.index([[1, 2]]),
        "context_lens": b.index([65]),
        "key": b.tensor(65, 2, 7),
        "value": b.tensor(65, 2, 5),
        "seq_starts": b.index([128]),
    },
    needs="values",
)
_row(
    "load_nz_5d",
    "more tokens than the table has columns for",
    ValueError,
    f"{_COLUMNS.format(5, 0, 0, 3)}, got 1 columns",
    lambda b, a: {"block_tables": a["block_tables"][:, :1]},
    needs="values",
)
_ID = "must be between 0 and num_blocks - 1 = 4, got"
_value_row("load", "block_tables", [[4, -1, 3], [1, 2, 0]], IndexError, f"block_tables[0, 1] {_ID} -1")
_value_row("load", "block_tables", [[4, 0, 3], [5, 2, 0]], IndexError, f"block_tables[1, 0] {_ID} 5", torch.int32)
_value_row("load_nz", "block_tables", [[_HUGE, 0, 3], [1, 2, 0]], IndexError, f"block_tables[0, 0] {_ID} {_HUGE}")
_value_row("load_nz_5d", "block_tables", [[4, 2**32, 3], [1, 2, 0]], IndexError, f"block_tables[0, 1] {_ID} {2**32}")
_value_row(
    "load_starts", "block_tables", [[9, 0, -(2**63)], [9, 9, 0]], IndexError, f"block_tables[0, 2] {_ID} {-(2**63)}"
)
_value_row("load_cumsum", "block_tables", [[4, 0, 99], [_MOST, 2, 0]], IndexError, f"block_tables[1, 0] {_ID} {_MOST}")

# Values of the packed operators --------------------------------------------------------------------------------------

_value_row("2bnhd", "slot_mapping", [4, -1, 12, 0, 7], IndexError, f"slot_mapping[2] {_SLOT} 12, got 12")
_value_row("bhnc", "slot_mapping", [0, 1, 2, 3, 12], IndexError, f"slot_mapping[4] {_SLOT} 12, got 12", torch.int32)
_value_row("bnhc", "slot_mapping", [_HUGE] + [0] * 4, IndexError, f"slot_mapping[0] {_SLOT} 12, got {_HUGE}")
_value_row("load_bhnc", "context_lens", [5, -1], ValueError, "context_lens[1] must not be negative, got -1")
_value_row("load_b2nhd", "context_lens", [-1, 6, 8], ValueError, "context_lens[0] must not be negative, got -1")
_value_row(
    "load_b2nhd", "context_lens", [1, 0, 8], ValueError, "context_lens[1] must be at least context_lens[0] = 1, got 0"
)
_value_row("load_bhnc", "context_lens", [5, 4], ValueError, _ROWS.format(4, 1, 5))
_value_row("load_bnhc", "seq_starts", [3, -1], ValueError, "seq_starts[1] must not be negative, got -1")
_value_row("load_2bnhd", "seq_starts", [6, 7], ValueError, f"{_COLUMNS.format(5, 6, 0, 3)}, got 3 columns")
_value_row("load_bhnc", "block_tables", [[4, -1, 3], [1, 2, 0]], IndexError, f"block_tables[0, 1] {_ID} -1")
_value_row("load_b2nhd", "block_tables", [[4, 5, 3], [1, 2, 0]], IndexError, f"block_tables[0, 1] {_ID} 5")
