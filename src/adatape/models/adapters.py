"""What adapters such as LoRA, which freeze a model, need to know of a tape's own parameters."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from adatape.models.base import Adaptive
from adatape.models.prefix import is_added
from adatape.patches import is_plain


def tape_modules(model: nn.Module) -> list[str]:
    """Names of the modules that wrapping added to a ViT and that train: PEFT's `modules_to_save`.

    Each is the outermost module with parameters of its own, so that a reader keeps its budget. The head is not
    among them; add "vit.head" where it is new.
    """
    found = next((module for module in model.modules() if isinstance(module, Adaptive)), None)
    if found is None:
        raise TypeError(f"the model is a {type(model).__name__} without a tape; it must come from adatape.wrap")
    names: list[str] = []
    for name, module in found.named_modules():
        own = next(module.parameters(recurse=False), None) is not None
        added = name != "" and is_added(f"{name}.") and not name.startswith("vit.head")
        if own and added and not any(name.startswith(f"{outer}.") for outer in names):
            names.append(name)
    return names


def warn_of_adapters(model: nn.Module, gate: nn.Module | None) -> None:
    """Warns of adapters that make training pointless."""
    _warn_of_frozen_gate(model, gate)
    _warn_of_bypassed_adapter(model)


def _warn_of_frozen_gate(model: nn.Module, gate: nn.Module | None) -> None:
    """Warns if gates are frozen at 0 while other parameters train: the tape then never changes the output."""
    if gate is None:
        return
    opened: torch.Tensor = gate.open  # type: ignore[assignment]
    shut = not opened.requires_grad and not opened.is_meta and not opened.any()
    if shut and any(parameter.requires_grad for parameter in model.parameters()):
        warnings.warn(
            "the gates of the tape are frozen at 0, so training cannot use the tape; with PEFT pass "
            "modules_to_save=adatape.tape_modules(model), otherwise gate.requires_grad_(True)",
            stacklevel=4,
        )


def _warn_of_bypassed_adapter(model: nn.Module) -> None:
    """Warns if attention multiplies by the weight of a replaced layer itself, past what an adapter adds to it.

    timm's Eva does, where queries and values have biases and keys none (EVA-02 among others).
    """
    bypassed = [
        name
        for name, module in model.named_modules()
        if getattr(module, "qkv_bias_separate", None) is False
        and module.q_bias is not None
        and not is_plain(module.qkv)
    ]
    if bypassed:
        warnings.warn(
            f"{bypassed[0]} reads the weight of its qkv, so what an adapter adds to that layer has no effect; call it "
            "instead: for block in model.vit.blocks: block.attn.qkv_bias_separate = True",
            stacklevel=4,
        )
