"""Prompts and their byte-level tokens."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources


def load_prompts() -> list[bytes]:
    """Return the shipped prompts, the bytes of ``prompts/*.txt``, in the order of their names."""
    folder = resources.files("pacache_torch.demo").joinpath("prompts")
    files = (entry for entry in folder.iterdir() if entry.name.endswith(".txt"))
    return [entry.read_bytes() for entry in sorted(files, key=lambda entry: entry.name)]


def to_text(tokens: Iterable[int]) -> str:
    """Return the bytes ``tokens`` as one line of text."""
    text = bytes(tokens).decode("utf-8", errors="replace")
    return "".join(char if char.isprintable() else " " for char in text)
