"""What one of several threads does with both operators, the same on any device, so that another can repeat it."""

from __future__ import annotations

import torch
from torch import Tensor

import pacache_torch  # noqa: F401

STREAMS = 3
BETWEEN_WAITS = 97  # calls after which a thread waits for its streams: in lazy mode nothing has run until then


class Worker:
    """What one thread does: the same on any device, with streams or without."""

    def __init__(self, number: int, count: int, device: str = "cpu") -> None:
        self.number = number
        self.count = count
        self.on_npu = device != "cpu"
        self.nz = number % 4 >= 2
        generator = torch.Generator().manual_seed(number)
        blocks, block_size, heads, size = 7, 16, 3, 32

        def noise(*shape: int) -> Tensor:
            bits = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
            return bits.view(torch.float16).to(device)

        cache = (blocks, heads * size // 16, block_size, 16) if self.nz else (blocks, block_size, heads, size)
        self.mode = {"cache_mode": "PA_NZ" if self.nz else "Norm"}
        self.caches = [[noise(*cache), noise(*cache)] for _ in range(STREAMS)]
        self.rows = [[noise(50, heads, size), noise(50, heads, size)] for _ in range(2 * STREAMS)]
        self.tokens = []
        for i in range(7):
            slots = torch.randperm(blocks * block_size, generator=generator)[: 5 + i]
            slots[i] = -1
            fused = noise(5 + i, heads, 3 * size)  # views: dense copies are made, and freed at once
            self.tokens.append((fused[..., :size], fused[..., size : 2 * size], slots.to(torch.int32).to(device)))
        self.tables = []
        for i in range(5):
            table = torch.stack([torch.randperm(blocks, generator=generator)[:3] for _ in range(2)])
            lens = torch.tensor([40 - i, 3 + i])
            dtype = torch.int64 if i == 4 else torch.int32
            self.tables.append((table.to(dtype).to(device), lens.to(dtype).to(device)))
        if self.on_npu:
            self.streams = [torch.npu.Stream(device) for _ in range(STREAMS)]

    def work(self) -> None:
        """Make the calls."""
        for i in range(self.count):
            stream = i % STREAMS
            # The cache of another stream, once it has written what it has to.
            other = (stream + 1) % STREAMS if i % 11 == 0 else stream
            if self.on_npu:
                with torch.npu.stream(self.streams[stream]):
                    if other != stream:
                        self.streams[stream].wait_stream(self.streams[other])
                    self.calls(i, stream, other)
                if other != stream:
                    self.streams[other].wait_stream(self.streams[stream])
                if i % BETWEEN_WAITS == 0:
                    self.wait()
            else:
                self.calls(i, stream, other)

    def calls(self, i: int, stream: int, other: int) -> None:
        """One of each operator."""
        ops = torch.ops.pacache
        key, value, slots = self.tokens[(5 * i + self.number) % 7]
        ops.scatter_pa_kv_cache(key, value, *self.caches[stream], slots, **self.mode)
        rows = self.rows[stream + STREAMS * (other != stream)]
        ops.paged_cache_load(*self.caches[other], *self.tables[i % 5], *rows, **self.mode)

    def wait(self) -> None:
        """Wait for the streams."""
        for stream in self.streams:
            stream.synchronize()

    def results(self) -> list[Tensor]:
        """Everything that is written."""
        return [t.cpu() for pair in (*self.caches, *self.rows) for t in pair]
