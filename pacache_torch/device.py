"""What can a device do, and how is it made ready?"""

from __future__ import annotations

from typing import Any

import torch

from pacache_torch import _library, _rules

_CPU_SCENARIOS = (
    (1, "PA_NZ"),
    (2, "None"),
    (2, "Nct"),
    (3, "None"),
    (4, "Alibi"),
    (5, "Rope"),
    (5, "Omni"),
    (6, "None"),
    (6, "Nct"),
    (7, "NHSD"),
)


def _device(device: torch.device | str) -> torch.device:
    """The device; ``"npu"`` is a name that torch knows only once torch_npu is imported."""
    if isinstance(device, str) and device.partition(":")[0] == "npu":
        _library.npu_module()  # raises the cause where there is none
    return torch.device(device)


def capabilities(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Say what the operators can do on a device.

    Args:
        device: ``"cpu"`` or ``"npu"`` (with or without an index).

    Returns:
        A dictionary with ``product``, ``verified_on_hardware`` and ``rows``; a row has ``op``, ``scenario`` (scatter
        only), ``mode``, ``dtypes`` and ``limits`` in words. On the NPU also ``soc``, ``cann`` and, per row, ``since``,
        the oldest CANN version: what is not in a row raises NotImplementedError. A packed operator is the row of
        scenario 2 or of Norm on the halves of its cache. The NPU's table was made by reading
        CANN's sources and documents; it has not been run on hardware.

    Raises:
        LibraryNotLoadedError: the NPU kernels are not loaded, with the cause.
        ValueError: another kind of device.

    Example:
        >>> rows = capabilities("cpu")["rows"]
        >>> [row["mode"] for row in rows if row.get("scenario") == 5]
        ['Rope', 'Omni']
    """
    kind = _device(device).type
    if kind == "cpu":
        copies = [_rules.dtype_name(dtype) for dtype in _rules.COPY_DTYPES]
        means = [_rules.dtype_name(dtype) for dtype in _rules.MEAN_DTYPES]
        rows: list[dict[str, Any]] = [
            {
                "op": _rules.SCATTER,
                "scenario": scenario,
                "mode": mode,
                "dtypes": means if mode == "Rope" else copies,
                "limits": "with compress_seq_offsets: float16, bfloat16, float32" if scenario == 3 else "",
            }
            for scenario, mode in _CPU_SCENARIOS
        ]
        rows += [{"op": _rules.LOAD, "mode": mode, "dtypes": copies, "limits": ""} for mode in _rules.CACHE_MODES]
        return {"product": "cpu", "verified_on_hardware": True, "rows": rows}
    if kind in ("npu", "privateuseone"):
        found: dict[str, Any] = _library.npu_module().capabilities()
        return found
    raise ValueError(f"capabilities: device must be cpu or npu, got {device}")


def warmup(device: torch.device | str) -> None:
    """Do on an NPU what the first calls would do: look up CANN's functions, make ATB's context.

    Call it once before a graph is captured, where neither is allowed. Waits for the device. Nothing is done on the CPU.

    Args:
        device: ``"npu"`` or ``"npu:1"``; without an index the current one.

    Raises:
        LibraryNotLoadedError: the NPU kernels are not loaded, with the cause.
        RuntimeError: a function is missing, with where it was looked for.
        ValueError: another kind of device.
    """
    target = _device(device)
    if target.type == "cpu":
        return
    if target.type not in ("npu", "privateuseone"):
        raise ValueError(f"warmup: device must be cpu or npu, got {device}")
    module = _library.npu_module()
    index = target.index if target.index is not None else torch.npu.current_device()
    module.warmup(index)
