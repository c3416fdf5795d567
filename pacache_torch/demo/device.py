"""Where the demo runs: the CPU, or an NPU when there is one."""

from __future__ import annotations

import importlib

import torch

from pacache_torch import _library, doctor

_OPS = ("pacache::scatter_pa_kv_cache", "pacache::paged_cache_load")


class DeviceUnavailable(RuntimeError):
    """The device that was asked for cannot be used; the text says why."""


def choose_device(name: str) -> tuple[torch.device, str]:
    """Return the device for ``cpu``, ``npu`` or ``auto``, and a few words on the choice."""
    if name == "cpu":
        return torch.device("cpu"), "as asked"
    obstacle = _npu_obstacle()
    if obstacle is None:
        return torch.device("npu:0"), "as asked" if name == "npu" else "an NPU is available"
    if name == "npu":
        raise DeviceUnavailable(f"no NPU to run on: {obstacle}")
    return torch.device("cpu"), obstacle


def simulated_note(device: torch.device) -> str | None:
    """Return a sentence for results of the simulated CANN, or None on a real device and on the CPU."""
    version = doctor.simulated_cann() if device.type != "cpu" else None
    if version is None:
        return None
    return (
        f"SIMULATED: {device} is the simulated CANN {version} of this project's tests, on the CPU. "
        "It shows that the calls are right; its times mean nothing."
    )


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done what was queued; nothing to wait for on the CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def _npu_obstacle() -> str | None:
    if not hasattr(torch, "npu"):
        if not _library.torch_npu_installed():
            return "torch_npu is not installed"
        try:
            importlib.import_module("torch_npu")
        except Exception as error:
            # Without CANN this is an ImportError or an OSError that names a library.
            return f"torch_npu does not import ({error})"
    if not torch.get_device_module("npu").is_available():
        return "torch_npu finds no device"
    # torch_npu runs an op that has no NPU kernel on the CPU, silently.
    for op in _OPS:
        if not _has_npu_kernel(op):
            return f"{op} has no NPU kernel in this build of pacache_torch"
    return None


def _has_npu_kernel(op: str) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, "PrivateUse1"))
    except RuntimeError:  # no such operator: the extension is not loaded
        return False
