"""Task: the data loaders and the model of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch import nn

import adatape.models  # noqa: F401  registers the models
from adatape.config import Experiment, ImageModel, SequenceModel
from adatape.data.batch import Batch, Shard
from adatape.data.imageset import Tally
from adatape.data.loaders import Labelled
from adatape.data.sets import LabelledSet, open_set
from adatape.models.base import Adaptive
from adatape.models.build import image_size_options, wrap
from adatape.models.checked_build import build_checked
from adatape.models.options import check_options, check_wrap
from adatape.models.plain import Plain
from adatape.models.sequence import build_sequence_model
from adatape.train.weights import read_weights


class Task(NamedTuple):
    """The model and data of a trainer, for one process's part."""

    build: Callable[[bool], Adaptive]  # with or without pretrained weights
    batches: Callable[[int], Iterator[Batch]]  # from a step on
    validation: Callable[[], Iterator[Labelled]]
    test: Callable[[], Iterator[Labelled]]
    epoch: Callable[[int], float | None]  # epochs completed before a step
    tally: Tally | None = None  # counts of unreadable images


def task_of(experiment: Experiment, shard: Shard, device: torch.device) -> Task:
    data, workers = experiment.data, experiment.engine.workers
    train, validation, test = (open_set(data, split) for split in ("train", "validation", "test"))
    _check_pair(experiment, test)
    for each in (validation, test):
        each.check_exists()
    loader = train.training_loader(experiment.optimizer.batch, experiment.seed, shard, device, workers)
    return Task(
        build=partial(_build, experiment, test),
        batches=loader.batches,
        validation=lambda: validation.evaluation_batches(validation.validation_batch, shard, device, workers),
        test=lambda: test.evaluation_batches(test.validation_batch, shard, device, workers),
        epoch=loader.epoch,
        tally=loader.tally,
    )


def build_for(experiment: Experiment, weights: bool = False) -> Adaptive:
    """The model only: untrained, or with the pretrained weights that training starts from."""
    return _build(experiment, open_set(experiment.data, "test"), weights)


def _build(experiment: Experiment, data: LabelledSet, weights: bool) -> Adaptive:
    _check_pair(experiment, data)
    if isinstance(experiment.model, SequenceModel):
        return build_sequence_model(experiment.model, *data.shape)
    channels, size, _ = data.shape
    return build_image_model(experiment.model, size, channels, data.classes, weights)


def _check_pair(experiment: Experiment, data: LabelledSet) -> None:
    if isinstance(experiment.model, ImageModel) != data.of_images:
        given, model = type(experiment.data).__name__, type(experiment.model).__name__
        raise ValueError(f"data is {given} and model {model}; Parity goes with SequenceModel, Images with ImageModel")


def build_image_model(model: ImageModel, size: int, channels: int, classes: int, weights: bool = True) -> Adaptive:
    """A model of timm's registry for these images, pretrained and wrapped according to `model`."""
    if not timm.is_model(model.name):
        raise ValueError(f"model.name is {model.name!r}; `adatape models` lists ours, timm.list_models() all")
    check_options("model.options", model.options)
    check_wrap("model.wrap", model.wrap or {})
    sized, whole = image_size_options(model.wrap, size)
    given: dict[str, Any] = {"in_chans": channels, "num_classes": classes, **sized}
    for option, value in given.items():
        if model.options.get(option, value) != value:
            said = f"model.options.{option} is {model.options[option]!r}"
            raise ValueError(f"{said}; the data has {value}, so leave it out")
    if model.pretrained and weights:
        if not model.may_fetch:
            raise ValueError(
                f"model.pretrained is {model.pretrained!r}; a file may not load other weights: "
                f"give --trust if the file is your own, or --set model.pretrained={model.pretrained}"
            )
        given["pretrained"] = True
        if model.pretrained != "hub":
            given["pretrained_cfg_overlay"] = {"state_dict": read_weights(Path(model.pretrained)), "custom_load": False}
    named = partial(timm.create_model, model.name)
    built = build_checked(named, model.name, model.options, "model.options", **given)
    if not whole:
        _check_fits(built, size)
    if model.wrap is not None:
        built = build_checked(partial(wrap, built, **whole), "adatape.wrap", model.wrap, "model.wrap")
    elif not isinstance(built, Adaptive):
        built = Plain(built)
    if model.trains == "tape":
        _freeze_backbone(built)
    return built


def _check_fits(model: nn.Module, size: int) -> None:
    """Refuses a patch size that does not divide the image, where timm silently drops pixels, and no pooling."""
    vit: Any = getattr(model, "vit", model)
    if getattr(vit, "global_pool", None) == "":
        raise ValueError("model.options.global_pool is ''; for classification it must be token, avg, max or avgmax")
    embed = getattr(vit, "patch_embed", None)
    patch = getattr(embed, "patch_size", (1,))
    if any(size % side for side in patch) and not getattr(embed, "dynamic_img_pad", False):
        raise ValueError(f"model.options.patch_size is {patch[0]}; it must divide data.size, {size}")


def _freeze_backbone(model: nn.Module) -> None:
    """Freezes all parameters except those that wrapping added, and the head."""
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith("vit.") or name.startswith("vit.head") or "tape_mlp" in name)
