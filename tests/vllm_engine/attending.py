"""Which classes attend in a model; a module of its own, so that an engine in another process can be asked."""

from __future__ import annotations

from typing import Any

import torch


def implementation(layer: Any) -> str:
    """The class that attends in a layer."""
    return f"{type(layer.impl).__module__}.{type(layer.impl).__qualname__}"


def implementations_of(model: torch.nn.Module) -> list[str]:
    """The classes that attend in the layers of a model."""
    return [implementation(layer) for layer in model.modules() if hasattr(layer, "impl")]
