"""The operators on DTensors: KV heads sharded over the devices of a tensor-parallel group.

After `register`, each operator takes DTensors and works on the local shards: no collective runs and nothing is
redistributed. See docs/tensor_parallel.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor

from pacache_torch import _library, _rules, fake, ops

__all__ = ["register"]

_registered = False


def register() -> None:
    """Let the operators take DTensors.

    Called once, before the first call with a DTensor; again does nothing. It is a call of its own because DTensor is
    half a second of imports that who does not use it should not pay for.

    In every dimension of the mesh one of two holds:

    * every argument is replicated: each device does the whole call;
    * keys, values and caches are sharded on heads, index tensors (slots, block tables, lengths) are replicated: each
      device writes and reads its own heads.

    ===================== ========================================== ==================
    argument              shape                                      dimension of heads
    ===================== ========================================== ==================
    key, value            [num_tokens, num_heads, head_size]         1
    key, value (PA_NZ)    [num_tokens, num_heads * head_size]        1
    key_cache (Norm)      [num_blocks, block_size, num_heads, ...]   2
    key_cache (PA_NZ)     4-D or 5-D                                 1
    key_cache (NHSD)      [num_blocks, num_heads, block_size, ...]   1
    kv_cache              2BNHD, B2NHD                               3
    kv_cache              BHNC                                       1
    kv_cache              BNHC                                       2
    ===================== ========================================== ==================

    Where heads are no dimension of their own (PA_NZ in 4-D, rows of num_heads * head_size) the devices must divide the
    heads. Elsewhere they need not: DTensor gives the first devices one head more, the last ones fewer or none.

    Anything else raises ValueError (TypeError for a plain tensor among DTensors) on every device alike, and nothing is
    written: sharded tokens, blocks or slots, partial sums, shards in the scenarios whose cache keeps each head in
    blocks of its own (Alibi, Rope, Omni, key [batch, seq_len, num_heads, head_size]) or in Nct with explicit strides.

    Example:
        >>> register()
        >>> mesh = init_device_mesh("cpu", (2,))                                # two processes
        >>> key_cache = zeros(64, 16, 8, 128, device_mesh=mesh, placements=[Shard(2)])
        >>> value_cache = zeros(64, 16, 8, 128, device_mesh=mesh, placements=[Shard(2)])
        >>> key = DTensor.from_local(torch.randn(5, 4, 128), mesh, [Shard(1)])  # 4 of the 8 heads here
        >>> slots = DTensor.from_local(torch.arange(5), mesh, [Replicate()])
        >>> torch.ops.pacache.scatter_pa_kv_cache(key, key, key_cache, value_cache, slots)
        >>> torch.equal(key_cache.to_local()[0, 2], key.to_local()[2])
        True
    """
    global _registered
    if _registered:
        return
    for name in _library.OPERATORS:
        torch.library.register_torch_dispatch(f"pacache::{name}", DTensor, _on_local_shards)
    ops.new_output_for[DTensor] = _new_output
    _registered = True


def _on_local_shards(
    cls: type, op: torch._ops.OpOverload, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """One call of an operator, with a DTensor among its arguments."""
    name = op._schema.name.removeprefix("pacache::")
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    mesh = _checked(name, given)
    if mesh.get_coordinate() is None:
        return  # this process is not part of it
    op(**{argument: _local(value) for argument, value in given.items()})


# Calls that have been found good, by all that the verdict depends on: finding out costs more than the call.
_good: dict[tuple[Any, ...], DeviceMesh] = {}
_MOST_GOOD = 4096


def _checked(op: str, given: dict[str, Any]) -> DeviceMesh:
    """Check a call, or remember that one like it has been checked."""
    call = (op, torch.is_grad_enabled(), *((name, _facts(value)) for name, value in given.items()))
    try:
        mesh = _good.get(call)
    except TypeError:  # a symbolic size, while a graph is traced
        return _check(op, given)
    if mesh is None:
        mesh = _check(op, given)
        if len(_good) >= _MOST_GOOD:
            _good.clear()
        _good[call] = mesh
    return mesh


def _facts(value: Any) -> Any:
    """What of an argument can matter to `_check`."""
    if isinstance(value, DTensor):
        return value.device_mesh, value.placements, value.shape, value.stride(), value.dtype, value.requires_grad
    return tuple(value) if isinstance(value, list) else value


def _local(value: Any) -> Any:
    """A DTensor's shard: its own memory, so that what is written into it stays."""
    return value.to_local() if isinstance(value, DTensor) else value


def _check(op: str, given: dict[str, Any]) -> DeviceMesh:
    """Refuse what cannot run shard by shard; the same verdict on every device, from shapes and placements alone."""
    first, leader = next((name, value) for name, value in given.items() if isinstance(value, DTensor))
    mesh: DeviceMesh = leader.device_mesh
    tensors: dict[str, DTensor] = {}
    for name, value in given.items():
        if isinstance(value, DTensor):
            tensors[name] = value
        elif isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a DTensor as {first}, got {type(value).__name__}")
    for name, tensor in tensors.items():
        if tensor.device_mesh != mesh:
            raise ValueError(f"{op}: {name} must be on the device mesh of {first}, {mesh}, got {tensor.device_mesh}")
    fake.KERNELS[op](**given)  # the operator's own rules, on the whole shapes
    heads = _head_dims(op, given, tensors)
    devices = 1
    for dim in range(mesh.ndim):
        placements = {name: tensor.placements[dim] for name, tensor in tensors.items()}
        if all(_is_replicated(placement) for placement in placements.values()):
            continue
        sharded = {name: Shard(heads[name]) if name in heads else Replicate() for name in tensors}
        if not heads or any(not _is(placements[name], wanted) for name, wanted in sharded.items()):
            rule = f", or {_list(sharded)} (sharded on heads)" if heads else " in this scenario"
            raise ValueError(
                f"{op}: placements must be Replicate() for every argument{rule}, "
                f"got {_list(placements)} in dimension {dim} of the mesh"
            )
        devices *= mesh.size(dim)
    sizes = {name: tensors[name].size(dim) for name, dim in heads.items()}
    if devices > 1 and len(set(sizes.values())) > 1:
        # Heads are hidden in a longer dimension somewhere: cut evenly, or the cuts do not meet.
        for name, size in sizes.items():
            if size % devices != 0:
                raise ValueError(
                    f"{op}: dimension {heads[name]} of {name} must be a multiple of the {devices} devices that share "
                    f"its heads, got {size}"
                )
    return mesh


def _head_dims(op: str, given: dict[str, Any], tensors: dict[str, DTensor]) -> dict[str, int]:
    """The dimension of heads of each argument that has one; empty where heads cannot be sharded."""
    if op.endswith("_packed"):
        dims = {"key": 1, "value": 1, "kv_cache": _rules.PACKED_LAYOUTS[given["kv_layout"]].head}
    elif op == "scatter_pa_kv_cache":
        mode = given.get("scatter_mode", "None")
        explicit = given.get("strides") is not None or given.get("offsets") is not None
        if mode in ("Alibi", "Rope", "Omni") or given["key"].dim() == 4 or explicit:
            return {}
        in_cache = 1 if mode == "NHSD" or given.get("cache_mode") == "PA_NZ" else 2
        dims = {"key": 1, "value": 1, "key_cache": in_cache, "value_cache": in_cache}
    else:
        in_cache = 1 if given.get("cache_mode") == "PA_NZ" else 2
        dims = {"key_cache": in_cache, "value_cache": in_cache, "key": 1, "value": 1}
    return {name: dim for name, dim in dims.items() if name in tensors}


def _is_replicated(placement: Placement) -> bool:
    return isinstance(placement, Replicate)


def _is(placement: Placement, wanted: Placement) -> bool:
    # A strided shard, as of a fused projection, cuts elsewhere: only the plain kind will do.
    return type(placement) is type(wanted) and placement == wanted


def _list(placements: dict[str, Any]) -> str:
    return ", ".join(f"{name} {placement!r}" for name, placement in placements.items())


def _new_output(cache: DTensor, shape: Sequence[int]) -> DTensor:
    """An output ``[num_tokens, ...]`` for what is read from ``cache``, sharded on dimension 1 where the cache is."""
    placements = [Shard(1) if isinstance(placement, Shard) else placement for placement in cache.placements]
    output: DTensor = empty_dtensor(*shape, dtype=cache.dtype, device_mesh=cache.device_mesh, placements=placements)
    return output
