"""The worked examples, which the package carries for ``python -m pacache_torch verify``."""

from pacache_torch.verify.vectors import Vector, load_vectors, scatter_vectors

__all__ = ["Vector", "load_vectors", "scatter_vectors"]
