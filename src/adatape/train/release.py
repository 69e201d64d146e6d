"""Releases a model: safetensors, timm's hub configuration and a model card in one folder."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from safetensors.torch import save_file
from timm.models._hub import save_config_for_hf
from torch import Tensor, nn

import adatape.models  # noqa: F401  registers the names
from adatape.config import Budget, ImageModel
from adatape.data.augment import SHORT_SIDE
from adatape.data.imageset import ImageSet, read_or_next
from adatape.data.letterbox import FILL, LETTERBOX
from adatape.data.sets import LabelledSet, open_set
from adatape.evaluate.result import Result
from adatape.models.base import Adaptive
from adatape.models.build import image_size_options
from adatape.train.files import template
from adatape.train.folder import load_result, load_run
from adatape.train.identity import Identity, identity
from adatape.train.weights import FORMAT, stamp
from adatape.validation import first_few, read_object

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
OF_TRAINING = ("seconds", "samples_per_second", "steps", "parameters", "broken_images", "converted_images")
UNTOLD = ("lengths", "logits_sha256", *OF_TRAINING)
FIGURES = {
    "mean_ap": "mean AP",
    "average_precision": "average precision",
    "length_mean": "tape tokens read, mean",
    "length_var": "tape tokens read, variance",
    "sequence_mean": "tokens of input and tape, mean",
    "sequence_max": "tokens of input and tape, most",
    "gflops_mean": "GFLOPs, mean",
    "gflops_p50": "GFLOPs, median",
    "gflops_p95": "GFLOPs, 95th percentile",
    "gflops": "GFLOPs, with the longest tape or all steps",
}
FAMILIES = {
    "adatape": "AdaTape (Xue et al., ICML 2023): a ViT with a tape of additional tokens, whose number adapts",
    "ut": "a Universal Transformer on images: one block, repeated until adaptive computation time (ACT) halts it",
    "u2t": "U2T: a Universal Transformer without sharing, whose blocks run until ACT halts them",
    "uvit": "UViT: a shallow universal stage, one shared block halted by ACT, and a ViT of full depth",
    "avit": "A-ViT (Yin et al., CVPR 2022): a ViT whose tokens halt at different layers",
    "ponder": "PonderNet (Banino et al., 2021) on images: one repeated block with learned halting",
    "plainvit": "PlainViT (Beyer et al., 2022): a ViT without a class token, with fixed sincos positions",
    "vit3ffn": "ViT-3FFN: a ViT with separate feed-forwards for the class token and each half of the patches",
}
OWN, UNKNOWN = "apache-2.0", "unknown"  # names of licences
MODES = {1: "in mode L", 3: "in mode RGB"}
LOOKED_AT = 100  # images whose sizes say whether a set is of small ones
UPRIGHT = ", upright as by PIL.ImageOps.exif_transpose"


class Licence(NamedTuple):
    """An identifier as model hubs have it, and where it comes from."""

    name: str
    reason: str

    def __str__(self) -> str:
        name = self.name.lower()
        limit = " It forbids commercial use." if "-nc" in name or "noncommercial" in name.replace("-", "") else ""
        return f"{self.name}: {self.reason}.{limit}"


def licence_of(model: ImageModel, given: str | None = None) -> Licence:
    """The licence of weights that were trained as `model` says; `given` takes its place.

    timm's settings name the licence of the weights that they point to; a file of weights names none.
    """
    if given:
        return Licence(given, "as given by those who release it")
    if model.pretrained is None:
        return Licence(OWN, "that of adatape, since the model was trained from scratch; its data may ask for another")
    if model.pretrained != "hub":
        return Licence(UNKNOWN, "the model was trained from a file of weights; ask those who made them")
    known = timm.get_pretrained_cfg(model.name)
    if known is None or not known.license:
        return Licence(UNKNOWN, f"timm names none for {model.name}, whose weights the model was trained from")
    return Licence(known.license, f"that of {model.name}, whose weights the model was trained from")


@dataclass(frozen=True)
class Released(Result):
    out: Path
    accuracy: float
    """with several labels, the share of images with all of them right"""
    licence: Licence


def release_to_folder(folder: Path, to: Path, trust: bool = False, licence: str | None = None) -> Released:
    """Writes a finished run's weights, config and model card in timm's hub format.

    The licence is by default that of the pretrained weights that the run began with.
    """
    experiment, model = load_run(folder, trust=trust)
    data, settings = experiment.data, experiment.model
    if not isinstance(settings, ImageModel):
        raise ValueError(f"{folder} is a run on {type(data).__name__}; timm's format is for models of images")
    test = open_set(data, "test")
    channels, height, width = test.shape
    sized, whole = image_size_options(settings.wrap, (height, width))
    crop: dict[str, Any] = LETTERBOX if data.letterboxed else {"crop_pct": _shown_share(test, height)}
    shape = {"in_chans": channels, "num_classes": test.classes, **sized}
    result, env = load_result(folder), read_object(folder / "env.json") if (folder / "env.json").is_file() else {}
    command = str(env.get("command", "the command is not known"))
    known = licence_of(settings, licence)
    wrapped = {} if settings.wrap is None else {"backbone": settings.name, **settings.wrap, **whole}
    release(
        model,
        "adatape" if wrapped else settings.name,
        {**shape, **settings.options, **wrapped},
        to,
        result=result,
        command=command,
        classes=test.names,
        input_size=(channels, height, width),
        several_labels=data.several_labels,
        exif_orientation=data.exif_orientation,
        **crop,
        budget=settings.budget,
        experiment=identity(experiment),
        licence=known,
    )
    return Released(to, result["accuracy"], known)


def _shown_share(images: LabelledSet, size: int) -> float:
    """The share of a short side that is scored, by which timm comes to the same size before it crops."""
    looked_at = None if images.images is None else images.evenly_spaced(LOOKED_AT).images
    if looked_at is not None and _short_side(looked_at) <= size:
        return 1.0
    resized = round(size * SHORT_SIDE)
    share = size / resized
    return share if math.floor(size / share) == resized else math.nextafter(share, 0)


def _short_side(images: ImageSet) -> float:
    """The median; scoring decides image by image, and a card has one share for all."""
    if images.pixels is not None:
        return min(images.pixels.shape[1:3])
    return statistics.median(min(read_or_next(images, i).image.size) for i in range(len(images)))


def release(
    model: nn.Module,
    name: str,
    options: dict[str, Any],
    folder: Path,
    *,
    result: dict[str, Any],
    command: str,
    classes: list[str] | None = None,
    input_size: tuple[int, int, int] | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    interpolation: str = "bilinear",
    crop_pct: float | None = None,
    crop_mode: str | None = None,
    several_labels: bool = False,
    exif_orientation: bool = False,
    budget: Budget | None = None,
    experiment: Identity | None = None,
    licence: Licence = Licence(UNKNOWN, "nobody has named one"),  # noqa: B008  a tuple
) -> Path:
    """Writes a folder from which `timm.create_model("local-dir:…", pretrained=True)` builds the same model.

    `crop_pct` and `crop_mode` are timm's; None keeps that of `name`. The card's code sets the `budget`, and asks for
    upright images with `exif_orientation`, since timm turns none. The weights store only the hash of the `experiment`,
    whose fields may contain paths of this machine.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty; choose another or remove it")
    skeleton = _built(name, options)
    # A run of timm's own ViT holds it as `vit`, where timm's name builds the ViT itself.
    named = model.vit if isinstance(model, Adaptive) and not isinstance(skeleton, Adaptive) else model
    # timm's users scale by mean and std, so the module that does it here is left out.
    saved = {key: value for key, value in named.state_dict().items() if not key.startswith("rescale.")}
    weights = {key: value.detach().cpu().contiguous() for key, value in saved.items()}
    _check_weights(skeleton, name, weights)
    if classes is not None and len(classes) != skeleton.num_classes:
        raise ValueError(f"classes has {len(classes)} names; the model has {skeleton.num_classes} classes")
    embed: Any = getattr(skeleton, "vit", skeleton).patch_embed
    size = input_size or (options.get("in_chans", 3), *embed.img_size)
    rescale = getattr(model, "rescale", None)
    half = (0.5,) * size[0]
    own_mean, own_std = (half, half) if rescale is None else rescale.statistics()
    seen: dict[str, Any] = {
        "input_size": size,
        "mean": mean or own_mean,
        "std": std or own_std,
        "interpolation": interpolation,
        "license": licence.name,
    }
    seen |= {name: value for name, value in (("crop_pct", crop_pct), ("crop_mode", crop_mode)) if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    made_by = None if experiment is None else {"naming": experiment.naming, "sha256": experiment.sha256}
    save_file(weights, folder / WEIGHTS, metadata={FORMAT: "pt", **stamp(weights, made_by)})
    labels = {"label_names": classes} if classes else {}
    config = {**labels, "architecture": name, "pretrained_cfg": _pretrained_cfg(skeleton, size, seen)}
    # transformers passes the number of classes itself, so model_args must not.
    model_args = {key: value for key, value in options.items() if key != "num_classes"}
    save_config_for_hf(skeleton, folder / CONFIG, model_config=config, model_args=model_args)
    bordered = crop_mode == LETTERBOX["crop_mode"]  # timm's transform would pad with the mean's colour
    card = template(Path(__file__).with_name("card.md"), autoescape=False).render(
        _about(skeleton, name),
        licence=licence,
        size=size,
        mode=f"{MODES.get(size[0], f'with {size[0]} channels')}{UPRIGHT if exif_orientation else ''}",
        several_labels=several_labels,
        named=bool(labels),
        grey=FILL if bordered and any(round(255 * each) != FILL for each in seen["mean"]) else None,
        figures=_figures(result),
        folder=folder.name,
        budget=budget,
        weights=WEIGHTS,
        config=CONFIG,
        command=command,
    )
    (folder / CARD).write_text(card)
    return folder


def _built(name: str, options: dict[str, Any]) -> Any:
    """The model of name and options on the meta device."""
    try:
        options = json.loads(json.dumps(options))
    except TypeError as error:
        raise ValueError(f"options are {options}; they must be JSON values: {error}") from error
    with torch.device("meta"):
        return timm.create_model(name, **options)


def _check_weights(skeleton: nn.Module, name: str, weights: dict[str, Tensor]) -> None:
    here = {key: tuple(value.shape) for key, value in weights.items()}
    there = {key: tuple(value.shape) for key, value in skeleton.state_dict().items()}
    wrong = [
        f"{key} is {here.get(key, 'missing')}, not {there.get(key, 'there')}"
        for key in {**here, **there}
        if here.get(key) != there.get(key)
    ]
    if wrong:
        raise ValueError(f"{name} with these options is another model: {first_few(wrong)}")


def _pretrained_cfg(skeleton: Any, size: tuple[int, ...], seen: dict[str, Any]) -> dict[str, Any]:
    sources = ("url", "file", "hf_hub_id", "hf_hub_filename", "source", "architecture")
    kept = {key: value for key, value in skeleton.pretrained_cfg.items() if key not in sources and value is not None}
    # timm would convert a first convolution of other than 3 channels as if it had 3, or drop it.
    first = {} if size[0] == 3 else {"first_conv": None}
    return {**kept, **seen, **first, "num_classes": skeleton.num_classes}


def _about(skeleton: Any, name: str) -> dict[str, Any]:
    what = FAMILIES.get(name.split("_")[0], "a Vision Transformer")
    kind = re.split(r" \(|:| on images", what)[0]
    return {
        "name": name,
        "what": what,
        "kind": f"{kind[0].upper()}{kind[1:]}",
        "parameters": sum(parameter.numel() for parameter in skeleton.parameters()),
        "classes": skeleton.num_classes,
    }


def _figures(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values, those that are given by class one for each; without those that only a run's tests need."""
    names = FIGURES if result.get("mean_ap") is None else {**FIGURES, "accuracy": "all labels right"}
    rows: dict[str, Any] = {}
    for key, value in result.items():
        if key in UNTOLD:
            continue
        said = names.get(key, key)
        rows |= {f"{said}, {name}": each for name, each in value.items()} if isinstance(value, dict) else {said: value}
    return [(_cell(name), _cell(value)) for name, value in rows.items()]


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", r"\|").replace("\n", " ")
