"""Settings with which timm's hub functions save a wrapped ViT so that timm and transformers can build it again."""

from __future__ import annotations

import dataclasses
from itertools import zip_longest
from typing import Any

import timm
import torch
from timm.models.eva import Eva
from torch import nn

from adatape.ablation import ActReader, FixedTokens, ParallelReader
from adatape.banks import Bank, InputBank, LearnedBank, NoBank
from adatape.config import ReaderName
from adatape.models.adatape import AdaTape
from adatape.models.backbone import ViT, timm_name
from adatape.models.base import Adaptive
from adatape.models.join import head_count
from adatape.models.windows import WindowTape
from adatape.windows.encoders import TimmEncoder, timm_encoder

DRAWN_COORDINATES = ("shift_coords", "jitter_coords", "rescale_coords")  # of a rotary embedding in training
NO_OUTPUT = (
    "training",
    "drop",
    "init",
    "fused",
    "grad_checkpointing",
    "inplace",
    "qkv_bias_separate",
)  # parts of attributes' names


def hub_settings(model: Adaptive) -> dict[str, Any]:
    """Further arguments of timm's `save_for_hf` and `push_to_hf_hub` for a wrapped ViT.

    >>> timm.models.save_for_hf(model, folder, **adatape.hub_settings(model))
    >>> timm.create_model(f"local-dir:{folder}", pretrained=True)

    They do not hold a budget; the number of classes is written by timm, and read by transformers, outside model_args.
    """
    if model.rescale is not None:
        raise ValueError("the model is of a run that scales images itself, which timm would not; use `adatape release`")
    return {"model_config": {"architecture": "adatape"}, "model_args": _options(model)}


def _options(model: Adaptive) -> dict[str, Any]:
    vit: Any = model.vit
    name = timm_name(vit)
    if not name:
        raise ValueError("the ViT has no pretrained_cfg, so its name is not known; create it by timm.create_model")
    options = _backbone_options(vit, name)
    if isinstance(model, WindowTape):
        _check_encoder(model)
        own = {"bank": "windows", "image": list(model.image), **dataclasses.asdict(model.options)}
    elif isinstance(model, AdaTape):
        own = {**_bank_options(model.bank), "reader": _reader_name(model.reader)}
        own |= {**dataclasses.asdict(model.reader.reading), **dataclasses.asdict(model.join), "query": model.query}
    else:
        raise TypeError(f"the model is a {type(model).__name__}; only a ViT wrapped by adatape.wrap is saved so")
    return {"backbone": name, **options, **{key: value for key, value in own.items() if value is not None}}


def _check_encoder(model: WindowTape) -> None:
    """Refuses an encoder that is not what its name builds."""
    if not isinstance(model.encoder, TimmEncoder):
        return
    name = model.options.encoder
    if not name:
        raise ValueError("the encoder has no pretrained_cfg, so its name is not known; create it by timm.create_model")
    with torch.device("meta"):
        built = timm_encoder(name, model.vit.in_chans, model.window)
    unequal = _difference(model.encoder, built)
    if unequal is not None:
        raise ValueError(f"the encoder is not {name} with its defaults: {unequal}; pass model_args yourself")


def _bank_options(bank: Bank) -> dict[str, Any]:
    if isinstance(bank, InputBank):
        return {"bank": "input", "patch": bank.patch}
    if isinstance(bank, LearnedBank):
        return {"bank": "learn", "bank_size": bank.size}
    if isinstance(bank, NoBank):
        return {}
    raise ValueError(f"the bank is a {type(bank).__name__}, which timm cannot build; it must be 'input' or 'learn'")


def _reader_name(reader: nn.Module) -> ReaderName:
    if isinstance(reader, ActReader):
        return "act-after-norm" if reader.scales_rows else "act"
    if isinstance(reader, ParallelReader):
        return "parallel"
    return "fixed" if isinstance(reader, FixedTokens) else "adaptive"


def _backbone_options(vit: ViT, name: str) -> dict[str, Any]:
    """Arguments for which timm's `name` is this ViT but for its number of classes; refuses where there are none."""
    default, mine = _described(_on_meta(name)), _described(vit)
    options = {key: value for key, value in mine.items() if value is not None and value != default.get(key)}
    if "global_pool" in options:  # timm's default of the norm after pooling depends on it
        options |= {key: mine[key] for key in ("fc_norm", "use_fc_norm") if key in mine}
    wrong: list[str] = []
    for each in (options, {**options, "mlp_ratio": _mlp_ratio(vit)}):  # a width may be rounded, so the ratio comes last
        try:
            unequal = _difference(vit, _on_meta(name, num_classes=vit.num_classes, **each))
        except (AssertionError, TypeError, ValueError) as error:
            unequal = str(error) or "timm cannot build it"
        if unequal is None:
            return each
        wrong.append(unequal)
    raise ValueError(f"the ViT is not {name} with {options or 'its defaults'}: {wrong[0]}; pass model_args yourself")


def _on_meta(name: str, **options: Any) -> ViT:
    with torch.device("meta"):
        return timm.create_model(name, **options)


def _described(vit: Any) -> dict[str, Any]:
    """The arguments of a ViT that its attributes tell."""
    registers = 0 if vit.reg_token is None else vit.reg_token.shape[1]
    common = {
        "img_size": list(vit.patch_embed.img_size),
        "patch_size": list(vit.patch_embed.patch_size),
        "in_chans": vit.in_chans,
        "global_pool": vit.global_pool,
        "embed_dim": vit.embed_dim,
        "depth": len(vit.blocks),
        "num_heads": head_count(vit),
        "class_token": vit.cls_token is not None,
        "dynamic_img_size": vit.dynamic_img_size,
    }
    if isinstance(vit, Eva):
        drawn = {f"rope_{name}": getattr(vit.rope, name, None) for name in DRAWN_COORDINATES}
        groups = [getattr(block.attn, "num_kv_heads", None) for block in vit.blocks]
        grouped = {} if None in groups or len({*groups}) == 1 else {"num_kv_heads": groups}
        own = {"num_reg_tokens": registers, "use_abs_pos_emb": vit.pos_embed is not None, **grouped}
        own["use_fc_norm"] = not isinstance(vit.fc_norm, nn.Identity)
        return {**common, **own, **drawn}
    return {
        **common,
        "reg_tokens": registers,
        "pool_include_prefix": vit.pool_include_prefix,
        "pos_embed": "none" if vit.pos_embed is None else "learn",
        "fc_norm": not isinstance(vit.fc_norm, nn.Identity),
    }


def _mlp_ratio(vit: ViT) -> float | None:
    fc1 = getattr(getattr(vit.blocks[0], "mlp", None), "fc1", None)
    return None if fc1 is None else fc1.out_features / vit.embed_dim


def _difference(vit: nn.Module, built: nn.Module) -> str | None:
    """The first layer, weight's shape or setting in which two ViTs differ; None where they do not."""
    for facts in (_layers, _shapes, _settings):
        mine, theirs = facts(vit), facts(built)
        unequal = (f"{a or 'nothing'} instead of {b or 'nothing'}" for a, b in zip_longest(mine, theirs) if a != b)
        first = next(unequal, None)
        if first is not None:
            return first
    return None


def _layers(vit: nn.Module) -> list[str]:
    """The printed layers without those that drop, which only training uses, and without those that were removed."""
    lines = (line.strip() for line in str(vit).splitlines() if "drop" not in line.lower())
    return [line for line in lines if not line.endswith("): None")]


def _shapes(vit: nn.Module) -> list[str]:
    return [f"{key}, {tuple(value.shape)}" for key, value in vit.state_dict().items()]


def _settings(vit: nn.Module) -> list[str]:
    """Numbers and names that layers keep, without those that change no output of a trained model."""
    return [
        f"{name}.{key} {value}"
        for name, module in vit.named_modules()
        if "drop" not in name
        for key, value in sorted(vars(module).items())
        if isinstance(value, int | float | str | tuple) and key[0] != "_" and not any(part in key for part in NO_OUTPUT)
    ]
