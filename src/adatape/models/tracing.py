"""Refuses tracing by torch.fx and torch.jit, naming what to use instead."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Proxy


def refuse_tracing(x: Any, adapts: bool) -> None:
    """torch.jit keeps the control flow of its example, which is wrong only for a model that adapts."""
    if isinstance(x, Proxy):
        raise TypeError(
            "torch.fx cannot trace an adaptive model, whose shapes and masks depend on its input; for features use "
            "forward_intermediates(x, indices) or timm.create_model(…, features_only=True), for a graph torch.export"
        )
    if adapts and torch.jit.is_tracing():
        raise TypeError(
            "torch.jit cannot trace an adaptive model: it would keep the lengths of its example; use torch.export, "
            "torch.onnx.export(…, dynamo=True) or adatape export"
        )
