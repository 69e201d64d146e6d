"""A run folder as the server needs it: the model, its class names, and its test images where they are at hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adatape.banks import InputBank, LearnedBank
from adatape.config import Experiment, ImageModel, Images, Parity
from adatape.data.decode import one_line
from adatape.data.imageset import ImageSet
from adatape.data.sets import open_set
from adatape.evaluate.budget import apply_budget
from adatape.evaluate.cost import input_tokens
from adatape.models.base import Adaptive
from adatape.models.sequence import SymbolEmbed
from adatape.serve.budgets import as_dict, tokens_a_step
from adatape.train.folder import RESULT, WEIGHTS, load_config, load_finished, load_run, load_weights
from adatape.train.task import build_image_model
from adatape.train.trust import check_links
from adatape.train.weights import read_weights

PACKAGED = Path(__file__).parent / "model"
STEM, HEAD = "vit.patch_embed.proj.weight", "vit.head.weight"


class ServedModel(NamedTuple):
    """A trained model and what is known about it."""

    name: str
    experiment: Experiment
    model: Adaptive
    classes: list[str]
    accuracy: float | None
    images: ImageSet | None  # None for sequences, and where the set is not at hand
    missing: str  # why there are no images

    @property
    def channels(self) -> int:
        return self.model.vit.in_chans

    @property
    def exif_orientation(self) -> bool:
        """Whether uploads are turned upright: as the images were that it learnt from."""
        return self.experiment.data.exif_orientation

    @property
    def sample(self) -> Tensor:
        """Something of the right shape to time and test the model with."""
        data = self.experiment.data
        if data.image_size is None:
            return torch.arange(data.sequence_length or 0) % 3 - 1
        return torch.full((self.channels, data.image_size, data.image_size), 127, dtype=torch.uint8)


def load_served(folder: Path | None, trust: bool = False) -> ServedModel:
    """The run of a folder, or the digits that come with the package; every damage is a ValueError or OSError."""
    trust, folder = trust or folder is None, folder or PACKAGED
    try:
        return _loaded(folder, trust)
    except (TypeError, KeyError, AttributeError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{folder} holds no model that can be rebuilt: {one_line(error)}") from error


def _loaded(folder: Path, trust: bool) -> ServedModel:
    images, missing, accuracy = None, "this model reads sequences, not images", _accuracy(folder)
    config = folder / "config.json"
    if config.is_file() and not trust:
        check_links(folder)
    data = load_config(config, trust).data if config.is_file() else None
    of_images = data is not None and data.image_size is not None
    if data is not None and of_images:
        images, missing = _test_images(data)
    experiment, model = _without_data(folder) if of_images and not images else load_run(folder, trust=trust)
    names = images.names if images else [str(label) for label in range(model.num_classes)]
    kind = experiment.model.name if isinstance(experiment.model, ImageModel) else type(model).__name__
    return ServedModel(f"{experiment.recipe}: {kind}", experiment, model, names, accuracy, images, missing)


def _test_images(data: Images | Parity) -> tuple[ImageSet | None, str]:
    try:
        images = open_set(data, "test").images
        return images, "" if images else "the data set lies in shards that are read one after the other"
    except (ValueError, OSError) as error:
        return None, f"the data set is not at hand: {one_line(error)}"


def _without_data(folder: Path) -> tuple[Experiment, Adaptive]:
    """A server need not have the data set: the weights say how many channels and classes there are."""
    experiment = load_finished(folder)
    weights = read_weights(folder / WEIGHTS)
    size = experiment.data.image_size
    if not isinstance(experiment.model, ImageModel) or size is None:
        raise ValueError(f"{folder}/config.json mixes images with a model of sequences")
    if STEM not in weights or HEAD not in weights:
        raise ValueError(f"{folder / WEIGHTS} lacks {STEM} or {HEAD}; it must be a model's")
    channels, classes = weights[STEM].shape[1], weights[HEAD].shape[0]
    model = build_image_model(experiment.model, size, channels, classes, weights=False)
    load_weights(model, folder / WEIGHTS, experiment)
    if experiment.model.budget is not None:
        apply_budget(model, experiment.model.budget)
    return experiment, model


def _accuracy(folder: Path) -> float | None:
    try:
        accuracy = float(json.loads((folder / RESULT).read_text())["accuracy"])
        return accuracy if math.isfinite(accuracy) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def description(served: ServedModel) -> dict[str, Any]:
    """The answer of GET /v1/model."""
    model, data, known = served.model, served.experiment.data, served.model.budget_range()
    size, length = data.image_size, data.sequence_length
    patch = getattr(model.vit.patch_embed, "patch_size", None)
    return {
        "name": served.name,
        "kind": "image" if length is None else "parity",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "classes": served.classes,
        "input": None if size is None else {"size": size, "channels": served.channels},
        "length": length,
        "tokens": input_tokens(model.vit),
        "patch": patch[0] if patch else None,
        "bank": _bank(model),
        "budget": {
            "steps": known and known.most,
            "threshold": known and known.threshold,
            "merge": tokens_a_step(model) if known else None,
        },
        "default": as_dict(model.budget()),
        "accuracy": served.accuracy,
    }


def _bank(model: Adaptive) -> dict[str, Any]:
    bank = model.tape_bank()
    match bank:
        case InputBank():
            return {"kind": "input", "patch": bank.patch, "grid": list(bank.h1.grid_size), "size": bank.size}
        case LearnedBank():
            return {"kind": "learn", "patch": None, "grid": None, "size": bank.size}
        case SymbolEmbed():
            return {"kind": "input", "patch": None, "grid": None, "size": bank.size}
    return {"kind": None, "patch": None, "grid": None, "size": 0}
