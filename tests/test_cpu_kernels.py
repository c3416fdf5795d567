"""Every instruction set's copy kernels give the same bytes as the reference, and the choice between them holds.

The variant that runs is chosen once per process, so each makes the same calls in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

# Sizes at which the kernels take other paths: parts of a unit, of a line, of a tile; runs, gaps and duplicates.
SCRIPT = """
import hashlib, json, sys
import torch
import pacache_torch
from pacache_torch import _library

torch.manual_seed(5)
digest = hashlib.sha256()
sizes = [(3, 16, 5, 7, 1), (2, 48, 16, 37, 2), (8, 128, 128, 700, 2), (1, 7, 3, 11, 1)]
for heads, size, block_size, tokens, threads in sizes:
    torch.set_num_threads(threads)
    blocks = tokens * 2 // block_size + 2
    qkv = torch.randint(-9999, 9999, (tokens, heads + 1, 2 * size + 16), dtype=torch.int16)
    key, value = qkv[:, :heads, :size], qkv[:, 1:, size:2 * size]
    random = torch.randperm(blocks * block_size)[:tokens]
    runs = torch.arange(tokens) + 1
    gaps = torch.where(torch.arange(tokens) % 3 == 1, -1, random)
    for slots in (random, runs, gaps):
        for shape, mode in (
            ((blocks, block_size, heads, size), "Norm"),
            ((blocks, heads * size // 16, block_size, 16), "PA_NZ"),
            ((blocks, heads, size // 16, block_size, 16), "PA_NZ"),
        ):
            if mode == "PA_NZ" and size % 16:
                continue
            # At offsets of a unit and of an element, so that nothing is aligned by luck.
            for shift in (0, 16, 3):
                total = 1
                for n in shape:
                    total *= n
                caches = [torch.zeros(total + shift, dtype=torch.int16)[shift:].view(shape) for _ in range(2)]
                pacache_torch.scatter_pa_kv_cache(key, value, *caches, slots, cache_mode=mode)
                rows = min(tokens, blocks * block_size)
                table = torch.randperm(blocks, dtype=torch.int32)[None]
                out = pacache_torch.paged_cache_load(
                    *caches, table, torch.tensor([rows], dtype=torch.int32), cache_mode=mode, num_tokens=rows
                )
                for t in (*caches, *out):
                    digest.update(t.contiguous().view(torch.uint8).numpy().tobytes())

# Past the cache: few rows of a memory that is too big for one, and many rows. 300 MB of which little is ever touched.
torch.set_num_threads(1)
heads, size, block_size, blocks = 8, 128, 128, 530
key, value = torch.randint(-9999, 9999, (2, 3100, heads, size), dtype=torch.int16).unbind()
random = torch.randperm(blocks * block_size)[:37]
runs = torch.arange(3100) + 1
for shape, mode in (
    ((blocks, block_size, heads, size), "Norm"),
    ((blocks, heads * size // 16, block_size, 16), "PA_NZ"),
):
    for shift in (0, 16, 3):
        caches = [
            torch.zeros(blocks * block_size * heads * size + shift, dtype=torch.int16)[shift:].view(shape)
            for _ in range(2)
        ]
        for slots in (random, runs[:37], runs):
            pacache_torch.scatter_pa_kv_cache(key, value, *caches, slots, cache_mode=mode)
        touched = torch.cat((random // block_size, runs // block_size)).unique()
        table = torch.arange(25, dtype=torch.int32)[None]
        lens = torch.tensor([3100], dtype=torch.int32)
        out = [torch.zeros(3100 * heads * size + shift, dtype=torch.int16)[shift:] for _ in range(2)]
        out = [t.view(3100, heads, size) for t in out]
        pacache_torch.paged_cache_load(*caches, table, lens, *out, cache_mode=mode)
        for t in (*(cache[touched] for cache in caches), *out):
            digest.update(t.contiguous().view(torch.uint8).numpy().tobytes())
print(json.dumps({"kernels": _library.build_info()["cpu_kernels"], "digest": digest.hexdigest()}))
"""


def run(**variables: str) -> dict[str, str]:
    env = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


CAPABILITY = torch.backends.cpu.get_cpu_capability()
BEST = {"AVX2": "avx2", "AVX512": "avx512"}.get(CAPABILITY, "portable")
VARIANTS = {"portable": ("portable",), "avx2": ("portable", "avx2"), "avx512": ("portable", "avx2", "avx512")}[BEST]


def test_every_variant_writes_and_reads_the_same_bytes() -> None:
    reference = run(PACACHE_FORCE_REFERENCE="1")
    for variant in VARIANTS:
        found = run(PACACHE_CPU_KERNELS=variant)
        assert found == {"kernels": variant, "digest": reference["digest"]}


def test_the_processor_at_hand_gets_its_best_variant() -> None:
    assert run()["kernels"] == BEST
