"""A run folder as the server needs it: the model, its class names, and its test images where they are at hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adatape.banks import InputBank, LearnedBank
from adatape.config import Budget, Experiment, ImageModel
from adatape.data.imageset import ImageSet
from adatape.data.sets import open_set
from adatape.data_config import Images, Megapixel, Parity, Scenes
from adatape.models.base import Adaptive
from adatape.models.sequence import SymbolEmbed
from adatape.serve.budgets import as_dict, served_range, tokens_a_step
from adatape.serve.likeness import Reference, load_reference
from adatape.serve.stops import Stop, bound, stops_of
from adatape.train.folder import RESULT, WEIGHTS, load_config, load_run, load_without_data, trained_classes
from adatape.train.trust import check_links
from adatape.validation import one_line

PACKAGED = {name: Path(__file__).parent / "models" / name for name in ("street", "digits")}
EXAMPLES = "examples"  # folder of a run that stands for the test set of scenes
METHODS = {
    "Plain": "Transformer",
    "Universal": "Universal Transformer",
    "vit": "ViT",
    "plainvit": "PlainViT",
    "deit": "DeiT",
    "vit3ffn": "ViT-3FFN",
    "ut": "Universal Transformer",
    "u2t": "U2T",
    "uvit": "UViT",
    "avit": "A-ViT",
    "ponder": "PonderNet",
}
OWN_FILES = ("folder", "arrays", "shards", "scenes")  # sources that are named by where they lie


class ServedModel(NamedTuple):
    """A trained model and what is known about it."""

    name: str
    experiment: Experiment
    model: Adaptive
    classes: list[str]
    accuracy: float | None
    images: ImageSet | None  # None for sequences, and where the set is not at hand
    missing: str  # why there are no images
    mean_ap: float | None = None  # of images with several labels
    stops: Sequence[Stop] = ()  # cost, and figures on the test set where known, by budget
    likeness: Reference | None = None  # what its images look like, where the run stores that

    @property
    def channels(self) -> int:
        return self.model.vit.in_chans

    @property
    def exif_orientation(self) -> bool:
        """Whether uploads are turned upright: as the images were that it learnt from."""
        return self.experiment.data.exif_orientation

    @property
    def size(self) -> int | tuple[int, int]:
        """The side of the square that images are cropped to, height and width where they are not; 0 for sequences."""
        data = self.experiment.data
        if data.image_size is None:
            return 0
        return data.image_size if data.letterboxed else data.image_size[0]

    @property
    def sample(self) -> Tensor:
        """Something of the right shape to time and test the model with."""
        data = self.experiment.data
        if data.image_size is None:
            return torch.arange(data.sequence_length or 0) % 3 - 1
        return torch.full((self.channels, *data.image_size), 127, dtype=torch.uint8)


def load_served(folder: Path | None, trust: bool = False) -> ServedModel:
    """The run of a folder, or the street scenes of the package; every damage is a ValueError or OSError."""
    folder = folder or PACKAGED["street"]
    trust = trust or folder in PACKAGED.values()
    try:
        return _loaded(folder, trust)
    except (TypeError, KeyError, AttributeError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{folder} holds no model that can be rebuilt: {one_line(error)}") from error


def _loaded(folder: Path, trust: bool) -> ServedModel:
    images, missing = None, "this model reads sequences, not images"
    config = folder / "config.json"
    if config.is_file() and not trust:
        check_links(folder)
    data = load_config(config, trust).data if config.is_file() else None
    of_images = data is not None and data.image_size is not None
    own = isinstance(data, Scenes) and (folder / EXAMPLES).is_dir()
    if data is not None and of_images:
        images, missing = _test_images(replace(data, path=str(folder / EXAMPLES)) if own else data)  # type: ignore[arg-type]
    at_hand = not of_images or (images is not None and not own)
    experiment, model = load_run(folder, trust=trust) if at_hand else load_without_data(folder)
    stored = trained_classes(folder / WEIGHTS) or [str(label) for label in range(model.num_classes)]
    names = images.names if images else stored
    if len(names) != model.num_classes:
        raise ValueError(
            f"{folder / EXAMPLES} names {len(names)} labels and the model has {model.num_classes}; "
            "add scenes that show the others, or train with data.classes, which names them all"
        )
    accuracy, mean_ap = (_figure(folder, name) for name in ("accuracy", "mean_ap"))
    name, stops = display_name(experiment, model), stops_of(folder, model)
    known = (accuracy, images, missing, mean_ap, stops, load_reference(folder))
    return ServedModel(name, experiment, model, names, *known)


def _test_images(data: Images | Parity | Scenes | Megapixel) -> tuple[ImageSet | None, str]:
    try:
        images = open_set(data, "test").images
        drawn = isinstance(data, Megapixel)
        kept = "is drawn batch by batch" if drawn else "lies in shards that are read one after the other"
        return images, "" if images else f"the data set {kept}"
    except (ValueError, OSError) as error:
        return None, f"the data set is not at hand: {one_line(error)}"


def _figure(folder: Path, name: str) -> float | None:
    try:
        figure = float(json.loads((folder / RESULT).read_text())[name])
        return figure if math.isfinite(figure) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def description(served: ServedModel, default: Budget | None) -> dict[str, Any]:
    """The answer of GET /v1/model; `default` is the budget of requests that name none.

    It is passed, since the model's own is that of whatever request ran last.
    """
    model, data, known = served.model, served.experiment.data, served_range(served.model, default)
    length = data.sequence_length
    patch = getattr(model.vit.patch_embed, "patch_size", None)
    return {
        "name": served.name,
        "architecture": architecture(served.experiment, model),
        "kind": "image" if length is None else "parity",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "classes": served.classes,
        "input": {"size": served.size, "channels": served.channels} if served.size else None,
        "several_labels": data.several_labels,
        "length": length,
        "tokens": model.input_tokens(),
        "patch": patch[0] if patch else None,
        "bank": _bank(model),
        "budget": {
            "least": known and known.least,
            "steps": known and known.most,
            "threshold": known and known.threshold,
            "merge": tokens_a_step(model) if known else None,
        },
        "default": as_dict(default),
        **_quality(served, default),
        "gflops": bound(model),
        "stops": list(served.stops),
    }


def _quality(served: ServedModel, default: Budget | None) -> dict[str, float | None]:
    """What the test set gave at the default budget; a run's result is that of the trained one."""
    if default is None or getattr(served.experiment.model, "budget", None) is None:
        return {"accuracy": served.accuracy, "mean_ap": served.mean_ap}
    stop = next((each for each in served.stops if _is_at(each, default)), {})
    return {name: stop.get(name) for name in ("accuracy", "mean_ap")}


def _is_at(stop: Stop, budget: Budget) -> bool:
    given, used = stop["threshold"], budget.threshold
    same = given == used if given is None or used is None else math.isclose(given, used, rel_tol=1e-3)
    return stop["steps"] == budget.steps and same


def _bank(model: Adaptive) -> dict[str, Any]:
    bank, windows = model.tape_bank(), model.window_grid()
    if windows is not None:
        side, grid = windows.window, [windows.rows, windows.columns]
        return {"kind": "windows", "patch": None, "window": side, "grid": grid, "size": math.prod(grid)}
    match bank:
        case InputBank():
            return {"kind": "input", "patch": bank.patch, "grid": list(bank.h1.grid_size), "size": bank.size}
        case LearnedBank():
            return {"kind": "learn", "patch": None, "grid": None, "size": bank.size}
        case SymbolEmbed():
            return {"kind": "input", "patch": None, "grid": None, "size": bank.size}
        case None:
            return {"kind": None, "patch": None, "grid": None, "size": 0}
    return {"kind": "other", "patch": None, "grid": None, "size": bank.size}


def display_name(experiment: Experiment, model: Adaptive) -> str:
    """As in "AdaTape for digits, 8 × 8 pixels: patches of 4, bank of 16 patches of 2"."""
    data, family = experiment.data, architecture(experiment, model).partition("_")[0]
    reads = model.tape_bank() is not None or model.window_grid() is not None
    method = "AdaTape" if reads else METHODS.get(family, family)
    path, size = getattr(data, "path", None), data.image_size
    named = Path(path).name if path and data.source in OWN_FILES else ""
    shape = f"{data.sequence_length} symbols" if size is None else f"{size[1]} × {size[0]} pixels"
    return f"{method} for {named or data.source}, {shape}: {_tokens(model)}"


def architecture(experiment: Experiment, model: Adaptive) -> str:
    """The name that the run's config.json gives to timm; the class for sequences, which have none."""
    return experiment.model.name if isinstance(experiment.model, ImageModel) else type(model).__name__


def _tokens(model: Adaptive) -> str:
    patch, bank = getattr(model.vit.patch_embed, "patch_size", None), _bank(model)
    read = f"bank of {bank['size']} tokens" if bank["size"] else "no bank"
    match bank["kind"]:
        case "windows":
            read = f"bank of {bank['size']} windows of {bank['window']}"
        case "input":
            read = f"bank of {bank['size']} patches of {bank['patch']}" if bank["patch"] else "bank of the symbols"
        case "learn":
            read = f"bank of {bank['size']} learned tokens"
    return f"{f'patches of {patch[0]}, ' if patch else ''}{read}"
