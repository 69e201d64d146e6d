"""Releases a model: safetensors, timm's hub configuration and a model card in one folder."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from timm.models._hub import save_config_for_hf
from torch import Tensor, nn

import adatape.models  # noqa: F401  registers the names
from adatape.config import Budget, ImageModel
from adatape.data.augment import SHORT_SIDE
from adatape.data.letterbox import FILL, LETTERBOX
from adatape.data.sets import LabelledSet, open_set
from adatape.evaluate.result import Result
from adatape.models.base import Adaptive
from adatape.models.build import image_size_options
from adatape.train.folder import load_result, load_run
from adatape.train.identity import Identity, identity
from adatape.train.licence import UNKNOWN, Licence, licence_of
from adatape.train.weights import FORMAT, stamp
from adatape.validation import read_object

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
NAMED = 3  # tensors named in an error message; further ones are counted
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
TEMPLATE = """---
license: {licence}
library_name: timm
pipeline_tag: image-classification
tags: [adatape, timm, image-classification]
---
# {title}

This is {what}.
It has {parameters:,} parameters, {classes} classes{several}, and takes images of {size} pixels. timm builds it by the
name `{name}` with the options in `{config}`, which go before what the name says.

| figure, on the test set | value |
|---|---|
{figures}

## Load
```python
import timm
import adatape.models  # registers the name with timm

model = timm.create_model("local-dir:{folder}", pretrained=True).eval()
{budget}transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
{answer}```
Loading reads `{weights}` and `{config}`; neither can execute code.

## Train it again
```
{command}
```

Licence: {licence_note}
"""

SEVERAL = ", of which an image may show several or none"
ANSWER = """answer = int(model(transform(image)[None]).argmax())  # `image` is PIL's, {mode}
"""
NAME = """name = model.pretrained_cfg["label_names"][answer]
"""
GREY = f"""next(each for each in transform.transforms if hasattr(each, "fill")).fill = {FILL}  # the grey of training
"""
MODES = {1: "in mode L", 3: "in mode RGB"}
SEVERAL_ANSWERS = """probability = model(transform(image)[None]).sigmoid()[0]  # of each label; `image` is PIL's, {mode}
there = [name for name, p in zip(model.pretrained_cfg["label_names"], probability) if p > 0.5]
"""


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
        **crop,
        budget=settings.budget,
        experiment=identity(experiment),
        licence=known,
    )
    return Released(to, result["accuracy"], known)


def _shown_share(images: LabelledSet, size: int) -> float:
    """The share of a short side that is scored, by which timm comes to the same size before it crops."""
    pixels = None if images.images is None else images.images.pixels
    if pixels is not None and min(pixels.shape[1:3]) <= size:
        return 1.0
    resized = round(size * SHORT_SIDE)
    share = size / resized
    return share if math.floor(size / share) == resized else math.nextafter(share, 0)


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
    budget: Budget | None = None,
    experiment: Identity | None = None,
    licence: Licence = Licence(UNKNOWN, "nobody has named one"),  # noqa: B008  a tuple
) -> Path:
    """Writes a folder from which `timm.create_model("local-dir:…", pretrained=True)` builds the same model.

    `crop_pct` and `crop_mode` are timm's; None keeps that of `name`. The card's code sets the `budget`. The weights
    store only the hash of the `experiment`, whose fields may contain paths of this machine.
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
    size = input_size or _input_size(skeleton, options)
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
    words = SEVERAL if several_labels else "", _grey(seen) + _answer(size[0], several_labels, bool(labels))
    card = _card(skeleton, name, folder, result, command, size, licence, budget, *words)
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
        more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise ValueError(f"{name} with these options is another model: {'; '.join(wrong[:NAMED])}{more}")


def _input_size(skeleton: Any, options: dict[str, Any]) -> tuple[int, ...]:
    embed: Any = getattr(skeleton, "vit", skeleton).patch_embed
    return (options.get("in_chans", 3), *embed.img_size)


def _pretrained_cfg(skeleton: Any, size: tuple[int, ...], seen: dict[str, Any]) -> dict[str, Any]:
    sources = ("url", "file", "hf_hub_id", "hf_hub_filename", "source", "architecture")
    kept = {key: value for key, value in skeleton.pretrained_cfg.items() if key not in sources and value is not None}
    # timm would convert a first convolution of other than 3 channels as if it had 3, or drop it.
    first = {} if size[0] == 3 else {"first_conv": None}
    return {**kept, **seen, **first, "num_classes": skeleton.num_classes}


def _grey(seen: dict[str, Any]) -> str:
    """The line of the card's code that pads images as in training, where timm would with the mean's colour."""
    bordered = seen.get("crop_mode") == LETTERBOX["crop_mode"]
    return GREY if bordered and any(round(255 * each) != FILL for each in seen["mean"]) else ""


def _answer(channels: int, several_labels: bool, named: bool) -> str:
    """The lines of the card's code that classify an image."""
    code = SEVERAL_ANSWERS if several_labels else ANSWER + (NAME if named else "")
    return code.format(mode=MODES.get(channels, f"with {channels} channels"))


def _card(
    skeleton: Any,
    name: str,
    folder: Path,
    result: dict[str, Any],
    command: str,
    size: tuple,
    licence: Licence,
    budget: Budget | None,
    several: str,
    answer: str,
) -> str:
    what = FAMILIES.get(name.split("_")[0], "a Vision Transformer")
    kind = re.split(r" \(|:| on images", what)[0]
    return TEMPLATE.format(
        licence=licence.name,
        licence_note=licence,
        name=name,
        title=f"{kind[0].upper()}{kind[1:]}, {size[2]} × {size[1]} pixels, {skeleton.num_classes} classes",
        what=what,
        parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
        classes=skeleton.num_classes,
        size=" × ".join(map(str, size)),
        several=several,
        answer=answer,
        figures="\n".join(f"| {_cell(key)} | {_cell(value)} |" for key, value in _flat(result).items()),
        folder=folder.name,
        budget="" if budget is None else f"{_set_budget(budget)}  # the figures above are without it\n",
        weights=WEIGHTS,
        config=CONFIG,
        command=command,
    )


def _flat(result: dict[str, Any]) -> dict[str, Any]:
    """Figures that are given by class as one for each; without those that only a run's tests need."""
    names = FIGURES if result.get("mean_ap") is None else {**FIGURES, "accuracy": "all labels right"}
    rows: dict[str, Any] = {}
    for key, value in result.items():
        if key in UNTOLD:
            continue
        said = names.get(key, key)
        rows |= {f"{said}, {name}": each for name, each in value.items()} if isinstance(value, dict) else {said: value}
    return rows


def _set_budget(budget: Budget) -> str:
    threshold = "" if budget.threshold is None else f", threshold={budget.threshold!r}"
    return f"model.set_budget(steps={budget.steps}{threshold})"


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", r"\|").replace("\n", " ")
