"""Registers models with timm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from timm.models._builder import build_model_with_cfg
from timm.models._registry import generate_default_cfgs, register_model

from adatape.models.base import Adaptive
from adatape.models.prefix import filter_checkpoint
from adatape.patches import PatchRows

SETTINGS = {
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "fixed_input_size": True,
    "interpolation": "bilinear",
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
    "first_conv": "vit.patch_embed.proj",
    "classifier": "vit.head",
    "license": "apache-2.0",
}
default_cfgs: dict[str, Any] = {}  # timm looks up this name in the module that registers a model


def split(options: dict[str, Any], names: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits options into those in `names` and the others."""
    own = {name: options[name] for name in names if name in options}
    return own, {name: value for name, value in options.items() if name not in own}


def register(name: str, build: Callable[..., Adaptive], features: int = 3, **defaults: Any) -> None:
    """Makes `timm.create_model(name, **options)` call `build` with the defaults, overridden by the options.

    `features` is the number of last blocks that `features_only` returns by default.
    """

    def create(pretrained: bool = False, **options: Any) -> Adaptive:
        return build_model_with_cfg(
            build,
            name,
            pretrained,
            pretrained_filter_fn=filter_checkpoint,
            feature_cfg={"out_indices": features, "feature_cls": "getter"},
            **{"embed_layer": PatchRows, **defaults, **options},
        )

    create.__name__ = create.__qualname__ = name
    create.__doc__ = build.__doc__
    default_cfgs.update(generate_default_cfgs({name: SETTINGS}))
    register_model(create)
