"""How long the operators took and how many bytes they moved."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class OpTotal:
    """Sum over the calls of one operator; bytes count both the read and the write."""

    calls: int = 0
    seconds: float = 0.0
    bytes: int = 0

    @property
    def gb_per_second(self) -> float:
        """Bytes moved per second, in 1e9."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


class OpClock:
    """Times calls: by the host's clock on the CPU, by events on a device, which never waits."""

    def __init__(self, device: torch.device) -> None:
        """Time calls on ``device``."""
        self._device = device
        self._totals: defaultdict[str, OpTotal] = defaultdict(OpTotal)
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def measure(self, name: str, num_bytes: int) -> Iterator[None]:
        """Add the call made inside to the total of ``name``."""
        total = self._totals[name]
        total.calls += 1
        total.bytes += num_bytes
        if self._device.type == "cpu":
            start = time.perf_counter()
            yield
            total.seconds += time.perf_counter() - start
        else:
            module = torch.get_device_module(self._device)
            begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))

    def totals(self) -> dict[str, OpTotal]:
        """Return the totals so far, after the device has finished."""
        if self._events:
            torch.get_device_module(self._device).synchronize()
            for name, begin, end in self._events:
                self._totals[name].seconds += begin.elapsed_time(end) / 1e3
            self._events.clear()
        return dict(self._totals)
