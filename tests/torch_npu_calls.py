"""Valid calls of torch_npu's names, and the same calls in the words of the two operators."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from strategies import Call
from torch import Tensor

from pacache_torch import reference
from pacache_torch.integrations import torch_npu as names

# As the wheel's own libraries register them; checked against the wheel on the simulated CANN.
RECORD = json.loads(Path(__file__).with_name("torch_npu_schemas.json").read_text())
SCHEMAS = [torch._C.parse_schema(text) for text in RECORD["schemas"]]

ATB = "atb.npu_paged_cache_load"  # torch_npu has it in a module of its own; the others at the top
NAMES = tuple(
    dict.fromkeys(ATB if schema.name == "atb::npu_paged_cache_load" else schema.name[5:] for schema in SCHEMAS)
)

OURS = {
    "slot_indices": "slot_mapping",
    "block_table": "block_tables",
    "seq_lens": "context_lens",
    "seq_offset": "seq_starts",
    "cumsum": "is_seq_lens_cumsum",
}


def schemas(name: str) -> list[Any]:
    """The schemas of a name, the overload without outputs first."""
    return [schema for schema in SCHEMAS if schema.name.split("::")[1] == name.rsplit(".")[-1]]


def named(module: Any, name: str) -> Any:
    """The function of that name in a module that is like torch_npu."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Every bit pattern of float16."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    bits = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int32)
    return bits.to(torch.int16).view(torch.float16)


def pair(shape: tuple[int, ...], size_key: int, size_value: int, *, dense: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Two tensors of these head sizes; if they need not be dense, side by side in one allocation."""
    if dense:
        return noise(*shape, size_key, seed=seed), noise(*shape, size_value, seed=seed + 1)
    both = noise(*shape, size_key + size_value + 3, seed=seed)
    return both[..., :size_key], both[..., size_key + 3 :]


def index(values: list[Any], *, dense: bool) -> Tensor:
    """int32, or int64 with something else between two elements."""
    if dense:
        return torch.tensor(values, dtype=torch.int32)
    t = torch.tensor(values)
    return torch.stack((t, t + 1000), dim=-1)[..., 0]


def scatter_arguments(layout: str, *, dense: bool) -> dict[str, Tensor]:
    """11 slots of 5 blocks of 7, 3 heads of 48 and of 16; two rows of padding."""
    key, value = pair((13, 3), 48, 16, dense=dense, seed=1)
    if layout == "PA_NZ":
        key_cache, value_cache = noise(5, 9, 7, 16), noise(5, 3, 7, 16)
        if not dense:
            key_cache, value_cache = (torch.cat((c, c), 1)[:, : c.size(1)] for c in (key_cache, value_cache))
    else:
        key_cache, value_cache = pair((5, 7, 3), 48, 16, dense=dense, seed=2)
    slots = index([33, -1, 4, 19, 0, 34, 8, -7, 20, 21, 1], dense=dense)
    if dense:
        key, value = key[:11], value[:11]  # torch_npu and ATB want as many
    return dict(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slots=slots)


def load_arguments(*, cumsum: bool, starts: bool, dense: bool) -> dict[str, Tensor | None]:
    """5 and 2 tokens of 5 blocks of 3, into 9 rows."""
    key_cache, value_cache = pair((5, 3, 2), 48, 16, dense=dense, seed=3)
    key, value = pair((9, 2), 48, 16, dense=dense, seed=4)
    return dict(
        key_cache=key_cache,
        value_cache=value_cache,
        tables=index([[4, 0, 3], [1, 2, 0]], dense=dense),
        lens=index([1, 6, 8] if cumsum else [5, 2], dense=dense),
        key=key,
        value=value,
        starts=index([3, 4], dense=dense) if starts else None,
    )


def calls(*, dense: bool) -> dict[str, Call]:
    """Calls of every name. Dense ones are such that torch_npu takes them too."""
    found: dict[str, Call] = {}
    caches = ("key_cache", "value_cache")
    for name in ("npu_scatter_pa_kv_cache", "npu_scatter_pa_kv_cache_functional"):
        for mode in ("default", "PA_NZ", "Norm", None):
            a = scatter_arguments("PA_NZ" if mode in ("default", "PA_NZ") else "Norm", dense=dense)
            a["slot_mapping"] = a.pop("slots")
            found[f"{name} {mode}"] = Call(name, a, {} if mode == "default" else {"cache_mode": mode}, caches)
    a = scatter_arguments("Norm", dense=dense)
    a["slot_indices"] = a.pop("slots")
    found["_npu_reshape_and_cache"] = Call("_npu_reshape_and_cache", a, {}, caches)
    only = {name: a[name] for name in ("key", "key_cache", "slot_indices")}
    found["_npu_reshape_and_cache_siso"] = Call("_npu_reshape_and_cache_siso", only, {}, caches[:1])

    for cumsum in (False, True):
        for starts in (False, True):
            how = f"{'cumsum' if cumsum else 'lengths'}{' starts' if starts else ''}"
            a = load_arguments(cumsum=cumsum, starts=starts, dense=dense)
            positional = {
                "key_cache": a["key_cache"],
                "value_cache": a["value_cache"],
                "block_tables": a["tables"],
                "seq_lens": a["lens"],
                "key": a["key"],
                "value": a["value"],
            }
            keyword = {"seq_offset": a["starts"], "is_seq_lens_cumsum": cumsum}
            for name in ("npu_gather_pa_kv_cache", "npu_gather_pa_kv_cache_functional"):
                found[f"{name} {how}"] = Call(name, positional, keyword, ("key", "value"))
            positional = {
                "key_cache": a["key_cache"],
                "value_cache": a["value_cache"],
                "block_table": a["tables"],
                "context_lens": a["lens"],
            }
            keyword = {"seq_starts": a["starts"], "cumsum": cumsum}
            found[f"{ATB} {how}"] = Call(ATB, positional, keyword, ("key", "value"))
            out = keyword | {"key": a["key"], "value": a["value"]}
            found[f"{ATB} {how} out"] = Call(ATB, positional, out, ("key", "value"))
    return found


def makes_outputs(call: Call) -> bool:
    """Whether the call returns new tensors and writes into none that it is given."""
    return call.op.endswith("_functional") or (call.op == ATB and "key" not in call.keyword)


def in_our_words(call: Call) -> Call:
    """The same call of the operator underneath, on the same tensors; outputs that it makes are zeros."""
    given = {OURS.get(name, name): argument for name, argument in (call.positional | call.keyword).items()}
    if "slot_mapping" in given:
        mode = given.get("cache_mode", "PA_NZ" if "scatter" in call.op else "Norm") or "Norm"
        return Call(reference.scatter_pa_kv_cache.__name__, {}, given | {"cache_mode": mode}, call.written)
    if "key" not in given:
        lens = given["context_lens"]
        rows = int(lens[-1] if given["is_seq_lens_cumsum"] else lens.sum())
        for name in call.written:
            cache = given[f"{name}_cache"]
            given[name] = cache.new_zeros(rows, *cache.shape[2:])
    return Call(reference.paged_cache_load.__name__, {}, given, call.written)


def expected(call: Call) -> Call:
    """What the reference makes of a clone of the call, in our words."""
    ours = in_our_words(call.clone())
    if ours.op == "scatter_pa_kv_cache":
        ours.keyword.setdefault("value", None)
        ours.keyword.setdefault("value_cache", None)
    ours.run(getattr(reference, ours.op))
    return ours


def outcome(call: Call, result: Any) -> dict[str, Tensor]:
    """What a call has written or returned, by the name of the cache or output."""
    if makes_outputs(call):
        return dict(zip(call.written, result, strict=True))
    return {name: call.tensors()[name] for name in call.written}


def only(call: Call, names: Iterable[str]) -> Call:
    """These tensors of a call, to be compared alone."""
    return Call("", {name: call.tensors()[name] for name in names}, {}, ())


def covered(call: Call, rows: Tensor) -> Tensor:
    """The bits of what is defined: of outputs that a load makes, the rows from the first boundary on."""
    bits = rows.cpu().view(torch.int16)
    if call.op == ATB and makes_outputs(call) and call.keyword["cumsum"]:
        return bits[int(call.positional["context_lens"][0]) :]
    return bits


__all__ = [
    "ATB",
    "NAMES",
    "RECORD",
    "calls",
    "covered",
    "expected",
    "makes_outputs",
    "named",
    "names",
    "only",
    "outcome",
    "schemas",
]
