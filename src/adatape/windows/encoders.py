"""Encoders of windows: a window of pixels becomes one feature vector."""

from __future__ import annotations

import copy
from typing import Any

import timm
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


class WindowConvolutions(nn.Module):
    """Three convolutions, each halving the window, and their maximum over all places: for small images of few kinds."""

    def __init__(self, channels: int, width: int, widths: tuple[int, int, int] = (32, 64, 128)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, o in zip((channels, *widths[:-1]), widths, strict=True):
            layers += [nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.GELU()]
        self.layers = nn.Sequential(*layers)
        self.project = nn.Linear(widths[-1], width)
        self.num_features = width

    def forward(self, windows: Float[Tensor, "n ch size size"]) -> Float[Tensor, "n width"]:
        x = self.layers(windows.contiguous(memory_format=torch.channels_last))
        return self.project(x.amax((2, 3)))

    def macs(self, size: int) -> int:
        total = self.project.weight.numel()
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                size = -(-size // 2)
                total += size * size * layer.weight.numel()
        return total


class TimmEncoder(nn.Module):
    """The pooled features of a timm model without its classifier; it sees windows scaled as the ViT's images are."""

    def __init__(self, model: nn.Module, channels: int, size: int) -> None:
        super().__init__()
        self.model = model
        if getattr(model, "num_classes", 0):
            model.reset_classifier(0)  # type: ignore[operator]
        patch = getattr(getattr(model, "patch_embed", None), "patch_size", (1, 1))
        if any(size % side for side in patch):  # timm would drop the edge
            raise ValueError(f"window is {size}; patches of {patch[0]} pixels encode it, which must divide it")
        resize: Any = getattr(model, "set_input_size", None)
        if resize is not None:  # a transformer's positions are those of one size
            resize(img_size=size)
        self.size, (self.num_features, self.counted) = size, _features_and_macs(model, channels, size)

    def forward(self, windows: Float[Tensor, "n ch size size"]) -> Float[Tensor, "n width"]:
        return self.model(windows)

    def macs(self, size: int) -> int:
        assert size == self.size
        return self.counted


def window_encoder(
    made: str | nn.Module, channels: int, width: int, size: int
) -> WindowConvolutions | TimmEncoder | None:
    """What `WindowOptions.encoder` names, or a timm model; None where the ViT encodes windows."""
    if isinstance(made, nn.Module):
        return TimmEncoder(made, channels, size)
    if made == "vit":
        return None
    return WindowConvolutions(channels, width) if made == "convolutions" else timm_encoder(made, channels, size)


def timm_encoder(name: str, channels: int, size: int) -> TimmEncoder:
    """An untrained model of timm's registry, without its classifier."""
    if not timm.is_model(timm.models.split_model_name_tag(name)[0]):
        raise ValueError(f"encoder is {name!r}; it must be 'vit', 'convolutions' or a name of timm.list_models()")
    return TimmEncoder(timm.create_model(name, num_classes=0, in_chans=channels), channels, size)


def _features_and_macs(model: nn.Module, channels: int, size: int) -> tuple[int, int]:
    """The width of what a model makes of one window, and its multiply-adds, by PyTorch's counter."""
    name, sketch = type(model).__name__, copy.deepcopy(model).to("meta").eval()
    # Fused attention is counted as nothing by torch before 2.15.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        try:
            made = sketch(torch.zeros(1, channels, size, size, device="meta"))
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"encoder is a {name}; it does not take windows of {size} pixels: {error}") from error
    if not isinstance(made, Tensor) or made.dim() != 2:
        found = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise ValueError(f"encoder is a {name} that returns {found}; it must return one row (1, width) for a window")
    return made.shape[1], counter.get_total_flops() // 2


class WindowHead(nn.Module):
    """How much a window's evidence counts, and its evidence for each class, both as logits."""

    def __init__(self, width: int, classes: int, hidden: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.hidden, self.gelu = nn.Linear(width, hidden), nn.GELU()
        self.reset_classes(classes)

    def reset_classes(self, classes: int) -> None:
        self.out = nn.Linear(self.hidden.out_features, 1 + classes).to(self.hidden.weight)
        nn.init.zeros_(self.out.bias)
        # Gates start shut: the evidence of many shut windows adds up to little, so that one open window stands out.
        nn.init.constant_(self.out.bias[:1], -3.0)

    def forward(self, features: Float[Tensor, "*n width"]) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n classes"]]:
        out = self.out(self.gelu(self.hidden(self.norm(features)))).float()
        return out[..., 0], out[..., 1:]
