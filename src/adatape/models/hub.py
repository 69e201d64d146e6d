"""Registers `adatape`, a wrapper of any ViT in timm's registry, so that timm can save and rebuild wrapped models."""

from __future__ import annotations

import inspect
from typing import Any

import timm
from timm.models._builder import build_model_with_cfg
from timm.models._registry import generate_default_cfgs, get_pretrained_cfg, register_model
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer

from adatape.models.adatape import AdaTape
from adatape.models.base import Adaptive
from adatape.models.build import JOIN_FIELDS, READER_FIELDS, WINDOW_FIELDS, wrap
from adatape.models.prefix import filter_checkpoint, wrapped_layers
from adatape.models.registry import SETTINGS, split

default_cfgs = generate_default_cfgs({"adatape": SETTINGS})  # timm looks up this name
ABOUT_IMAGES = ("input_size", "num_classes", "mean", "std", "interpolation", "crop_pct", "crop_mode", "license")
OWN = {*inspect.signature(wrap).parameters, *inspect.signature(AdaTape).parameters}
OWN |= {*JOIN_FIELDS, *READER_FIELDS, *WINDOW_FIELDS}
OWN -= {"vit", "reading", "join", "options"}
# Only these: timm.create_model also takes files and URLs of weights, which a release's config.json could name.
BACKBONES = {**inspect.signature(VisionTransformer).parameters, **inspect.signature(Eva).parameters}


def build(*, backbone: str, **options: Any) -> Adaptive:
    """Creates and wraps a ViT by its name in timm's registry; `options` are those of `wrap` and of that ViT."""
    own, rest = split(options, OWN)
    if "blocks" in own.get("tape_ffn", ""):
        raise ValueError(f"tape_ffn is {own['tape_ffn']!r}; a wrapped ViT keeps its blocks, so use 'append' or 'none'")
    strange = sorted(rest.keys() - BACKBONES.keys())
    if strange:
        raise ValueError(f"{strange[0]} is {rest[strange[0]]!r}; the options of a backbone are {', '.join(BACKBONES)}")
    return wrap(timm.create_model(backbone, **rest), **own)


@register_model
def adatape(pretrained: bool = False, *, backbone: str | None = None, **options: Any) -> Adaptive:
    """AdaTape around timm's `backbone`; `pretrained` means weights of the whole wrapper."""
    if backbone is None or not timm.is_model(timm.models.split_model_name_tag(backbone)[0]):
        raise ValueError(
            f"backbone is {backbone!r}; it must be the name of a ViT in timm's registry (a wrapped ViT is saved by "
            "timm.models.save_for_hf(model, folder, **adatape.hub_settings(model)))"
        )
    settings = options.pop("pretrained_cfg", None) or _settings_of(backbone)
    theirs = get_pretrained_cfg(backbone)
    if options.get("bank") == "windows" and theirs is not None:
        # Else timm would build the ViT for whole images, whose size the settings state.
        options.setdefault("img_size", theirs.input_size[-2:])
    return build_model_with_cfg(
        build,
        "adatape",
        pretrained,
        settings,
        pretrained_filter_fn=filter_checkpoint,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        backbone=backbone,
        **options,
    )


def _settings_of(backbone: str) -> dict[str, Any]:
    """The backbone's input settings, and the names of a wrapper's first and last layer."""
    found = get_pretrained_cfg(backbone)
    theirs = {} if found is None else {key: value for key, value in found.to_dict().items() if value is not None}
    about = {name: theirs[name] for name in ABOUT_IMAGES if name in theirs}
    return {**SETTINGS, **about, **wrapped_layers(theirs)}
