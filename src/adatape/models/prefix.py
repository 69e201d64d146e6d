"""Names of a ViT's weights and settings under the prefix `vit.` of its wrapper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from timm.models.eva import Eva
from timm.models.eva import checkpoint_filter_fn as eva_filter
from timm.models.vision_transformer import checkpoint_filter_fn

if TYPE_CHECKING:
    from adatape.models.base import Adaptive


def is_added(name: str) -> bool:
    """Whether a parameter was added by wrapping a ViT, or belongs to its head, which is new for other classes."""
    return not name.startswith("vit.") or name.startswith("vit.head") or "tape_mlp" in name


def filter_checkpoint(state: dict[str, Any], model: Adaptive) -> dict[str, Any]:
    """A checkpoint of a wrapper, or of a plain ViT, by a wrapper's keys and for the images that the model takes.

    Positions are resized, as timm does. Of a plain ViT, the model's other parameters stay as they are.
    """
    state = state.get("state_dict", state.get("model", state))
    within = {key.removeprefix("vit."): value for key, value in state.items() if key.startswith("vit.")}
    convert = eva_filter if isinstance(model.vit, Eva) else checkpoint_filter_fn
    backbone = {f"vit.{key}": value for key, value in convert(within or state, model.vit).items()}
    if within:
        return {
            **_fitted({key: value for key, value in state.items() if not key.startswith("vit.")}, model),
            **backbone,
        }
    ours = {key: value for key, value in model.state_dict().items() if not key.startswith("vit.") or "tape_mlp" in key}
    return {**ours, **backbone}


def _fitted(state: dict[str, Any], model: Adaptive) -> dict[str, Any]:
    """What a wrapper has beside its ViT, with the bank's weights for the images that the model takes."""
    bank = model.tape_bank()
    stored = {key.removeprefix("bank."): value for key, value in state.items() if key.startswith("bank.")}
    return state if bank is None else {**state, **{f"bank.{key}": value for key, value in bank.fitted(stored).items()}}


def wrapped_settings(vit: Any, image: tuple[int, int]) -> dict[str, Any]:
    """A ViT's `pretrained_cfg` as that of its wrapper: other names of layers, and no source of weights."""
    sources = {"url", "file", "hf_hub_id", "hf_hub_filename", "source", "state_dict", "custom_load", "tag"}
    kept = {key: value for key, value in vit.pretrained_cfg.items() if key not in sources}
    shape = {"input_size": (vit.in_chans, *image), "num_classes": vit.num_classes}
    return {**kept, **wrapped_layers(kept), **shape, "architecture": "adatape"}


def wrapped_layers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers of a wrapper are the first and the last, from a ViT's `pretrained_cfg`; a distilled ViT has two."""
    return {key: _prefixed(settings[key]) for key in ("first_conv", "classifier") if settings.get(key)}


def _prefixed(names: str | Sequence[str]) -> str | tuple[str, ...]:
    return f"vit.{names}" if isinstance(names, str) else tuple(f"vit.{name}" for name in names)
