"""Refuses symbolic tracing by torch.fx, naming what to use instead."""

from __future__ import annotations

from typing import Any

from torch.fx import Proxy


def refuse_symbolic_tracing(x: Any) -> None:
    if isinstance(x, Proxy):
        raise TypeError(
            "torch.fx cannot trace an adaptive model, whose shapes and masks depend on its input; for features use "
            "forward_intermediates(x, indices) or timm.create_model(…, features_only=True), for a graph torch.export"
        )
