"""A task: what is learnt from, what is scored, and the model for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch import nn

import adatape.models  # noqa: F401  registers the models
from adatape.config import Experiment, ImageModel, Images, Parity, SequenceModel
from adatape.data.batch import Batch, Part
from adatape.data.images import open_images
from adatape.data.imageset import ImageSet, Tally
from adatape.data.loaders import (
    DecodingLoader,
    Labelled,
    ParityLoader,
    ResidentLoader,
    labelled_images,
    labelled_sequences,
)
from adatape.data.parity import held_out_set, validation_set
from adatape.data.sampler import Order
from adatape.data.shard_loader import CHANNELS, ShardLoader, classes_of, labelled_shards
from adatape.data.shards import open_shards
from adatape.models.adaptive import Adaptive
from adatape.models.construct import construct
from adatape.models.making import wrap
from adatape.models.options import check_options, check_wrap
from adatape.models.plain import Plain
from adatape.models.sequence import build_sequence_model
from adatape.train.weights import read_weights

SCORED_AT_ONCE = 500


class Task(NamedTuple):
    """Everything that a trainer needs to know of its data; each is called for one process's part."""

    build: Callable[[bool], Adaptive]  # with the weights that training begins from, or without
    batches: Callable[[int], Iterator[Batch]]  # from a step on
    validation: Callable[[], Iterator[Labelled]]
    test: Callable[[], Iterator[Labelled]]
    epoch: Callable[[int], float | None]  # epochs done before a step
    tally: Tally | None = None  # of images that could not be read


def task_of(experiment: Experiment, part: Part, device: torch.device) -> Task:
    if isinstance(experiment.data, Parity) and isinstance(experiment.model, SequenceModel):
        return _parity(experiment, experiment.data, experiment.model, part, device)
    if isinstance(experiment.data, Images) and isinstance(experiment.model, ImageModel):
        if experiment.data.source == "shards":
            return _shards(experiment, experiment.data, experiment.model, part, device)
        return _images(experiment, experiment.data, experiment.model, part, device)
    raise _mismatch(experiment)


def _mismatch(experiment: Experiment) -> ValueError:
    data, model = type(experiment.data).__name__, type(experiment.model).__name__
    return ValueError(f"data is {data} and model {model}; Parity goes with SequenceModel, Images with ImageModel")


def build_for(experiment: Experiment, weights: bool = False) -> Adaptive:
    """The model alone: by default untrained, for weights to be loaded into; with weights as training begins it."""
    data, model = experiment.data, experiment.model
    if isinstance(data, Parity) and isinstance(model, SequenceModel):
        return build_sequence_model(model, data.length)
    if isinstance(data, Images) and isinstance(model, ImageModel):
        if data.source == "shards":
            return build_image_model(model, data.size, CHANNELS, classes_of(data), weights)
        test = open_images(data, "test")
        return build_image_model(model, data.size, test.channels, test.classes, weights)
    raise _mismatch(experiment)


def _parity(experiment: Experiment, data: Parity, model: SequenceModel, part: Part, device: torch.device) -> Task:
    batch, seed = experiment.optimizer.batch, experiment.seed
    sets = validation_set(data.length, data.held_out), held_out_set(data.length, data.held_out)
    return Task(
        build=lambda weights: build_sequence_model(model, data.length),  # noqa: ARG005
        batches=ParityLoader(data, batch, seed, part, device).batches,
        validation=lambda: labelled_sequences(sets[0], 1600, part, device),
        test=lambda: labelled_sequences(sets[1], 1600, part, device),
        epoch=lambda step: None,  # noqa: ARG005
    )


def _images(experiment: Experiment, data: Images, model: ImageModel, part: Part, device: torch.device) -> Task:
    train, validation, test = (open_images(data, split) for split in ("train", "validation", "test"))
    order = Order(len(train), experiment.optimizer.batch, experiment.seed, data.augment.repeats)
    workers = _workers(experiment)
    resident = train.pixels is not None if data.resident is None else data.resident
    loader = (
        ResidentLoader(train, data, order, part, device)
        if resident
        else DecodingLoader(train, data, order, part, device, workers)
    )

    def scored(images: ImageSet) -> Callable[[], Iterator[Labelled]]:
        return lambda: labelled_images(images, data.size, SCORED_AT_ONCE, part, device, workers, data.broken)

    return Task(
        build=lambda weights: build_image_model(model, data.size, train.channels, train.classes, weights),
        batches=loader.batches,
        validation=scored(validation),
        test=scored(test),
        epoch=order.epoch,
        tally=getattr(loader, "tally", None),
    )


def _shards(experiment: Experiment, data: Images, model: ImageModel, part: Part, device: torch.device) -> Task:
    workers = _workers(experiment)
    loader = ShardLoader(data, experiment.optimizer.batch, experiment.seed, part, device, workers)
    validation, test = (open_shards(data, split) for split in ("validation", "test"))

    def scored(urls: list[str]) -> Callable[[], Iterator[Labelled]]:
        return lambda: labelled_shards(urls, data, SCORED_AT_ONCE, part, device, workers)

    return Task(
        build=lambda weights: build_image_model(model, data.size, CHANNELS, loader.classes, weights),
        batches=loader.batches,
        validation=scored(validation),
        test=scored(test),
        epoch=loader.epoch,
        tally=loader.tally,
    )


def _workers(experiment: Experiment) -> int:
    """No more than there are cores; how many there are changes nothing that is read."""
    return min(experiment.engine.workers, os.cpu_count() or 1)


def build_image_model(model: ImageModel, size: int, channels: int, classes: int, weights: bool = True) -> Adaptive:
    """A model of timm's registry for these images; pretrained and wrapped where the settings say so."""
    if not timm.is_model(model.name):
        raise ValueError(f"model.name is {model.name!r}; `adatape models` lists ours, timm.list_models() all")
    check_options("model.options", model.options)
    check_wrap("model.wrap", model.wrap or {})
    given: dict[str, Any] = {"img_size": size, "in_chans": channels, "num_classes": classes}
    for option, value in given.items():
        if model.options.get(option, value) != value:
            said = f"model.options.{option} is {model.options[option]!r}"
            raise ValueError(f"{said}; the data has {value}, so leave it out")
    if model.pretrained and weights:
        if not model.may_fetch:
            raise ValueError(
                f"model.pretrained is {model.pretrained!r}; a file may not have weights read from elsewhere: "
                f"say --trust where it is your own, or --set model.pretrained={model.pretrained}"
            )
        given["pretrained"] = True
        if model.pretrained != "hub":
            given["pretrained_cfg_overlay"] = {"state_dict": read_weights(Path(model.pretrained)), "custom_load": False}
    named = partial(timm.create_model, model.name)
    built = construct(named, model.name, model.options, "model.options", **given)
    _check_fits(built, size)
    if model.wrap is not None:
        built = construct(partial(wrap, built), "adatape.wrap", model.wrap, "model.wrap")
    elif not isinstance(built, Adaptive):
        built = Plain(built)
    if model.trains == "tape":
        _freeze_backbone(built)
    return built


def _check_fits(model: nn.Module, size: int) -> None:
    """timm would leave out the pixels beyond the last whole patch, which may be all of them, and pool nothing."""
    vit: Any = getattr(model, "vit", model)
    if getattr(vit, "global_pool", None) == "":
        raise ValueError("model.options.global_pool is ''; to answer by classes it must be token, avg, max or avgmax")
    embed = getattr(vit, "patch_embed", None)
    patch = getattr(embed, "patch_size", (1,))
    if any(size % side for side in patch) and not getattr(embed, "dynamic_img_pad", False):
        raise ValueError(f"model.options.patch_size is {patch[0]}; it must divide data.size, {size}")


def _freeze_backbone(model: nn.Module) -> None:
    """Leaves what wrapping added, and the head."""
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith("vit.") or name.startswith("vit.head") or "tape_mlp" in name)
