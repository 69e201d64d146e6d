"""Task: the data loaders and the model of an experiment."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

import adatape.models  # noqa: F401  registers the models
from adatape.config import Experiment, ImageModel, SequenceModel
from adatape.data.batch import Batch, Shard
from adatape.data.imageset import Tally
from adatape.data.letterbox import LETTERBOX
from adatape.data.loaders import Labelled
from adatape.data.sets import LabelledSet, open_set
from adatape.models.base import Adaptive
from adatape.models.build import image_size_options, wrap
from adatape.models.checked_build import build_checked
from adatape.models.options import check_options, check_wrap
from adatape.models.prefix import is_added
from adatape.models.rescale import rescale_as
from adatape.models.sequence import build_sequence_model
from adatape.models.vit import Plain
from adatape.train.weights import read_weights
from adatape.validation import one_line


class Task(NamedTuple):
    """The model and data of a trainer, for one process's part."""

    build: Callable[[bool], Adaptive]  # with or without pretrained weights
    batches: Callable[[int], Iterator[Batch]]  # from a step on
    validation: Callable[[], Iterator[Labelled]]
    test: Callable[[], Iterator[Labelled]]
    epoch: Callable[[int], float | None]  # epochs completed before a step
    names: list[str]  # of the classes
    tally: Tally | None = None  # counts of unreadable images


def task_of(experiment: Experiment, shard: Shard, device: torch.device) -> Task:
    data, workers = experiment.data, experiment.engine.workers
    train, validation, test = (open_set(data, split) for split in ("train", "validation", "test"))
    _check_pair(experiment, test)
    for each in (validation, test):
        each.check_exists()
    loader = train.training_loader(experiment.optimizer.batch, experiment.seed, shard, device, workers)
    return Task(
        build=partial(build_on, test, experiment),
        batches=loader.batches,
        validation=lambda: validation.evaluation_batches(validation.validation_batch, shard, device, workers),
        test=lambda: test.evaluation_batches(test.validation_batch, shard, device, workers),
        epoch=loader.epoch,
        names=test.names,
        tally=loader.tally,
    )


def build_for(experiment: Experiment, weights: bool = False) -> Adaptive:
    """The model only: untrained, or with the pretrained weights that training starts from."""
    return build_on(open_set(experiment.data, "test"), experiment, weights)


def build_on(data: LabelledSet, experiment: Experiment, weights: bool = False) -> Adaptive:
    """`build_for` with the test set already open."""
    _check_pair(experiment, data)
    if isinstance(experiment.model, SequenceModel):
        return build_sequence_model(experiment.model, *data.shape)
    channels, height, width = data.shape
    model: Any = build_image_model(experiment.model, (height, width), channels, data.classes, weights)
    if experiment.data.letterboxed and getattr(model, "pretrained_cfg", None):
        model.pretrained_cfg = {**model.pretrained_cfg, **LETTERBOX}  # as the data loader shows images to it
    return model


def _check_pair(experiment: Experiment, data: LabelledSet) -> None:
    if isinstance(experiment.model, ImageModel) != data.of_images:
        given, model = type(experiment.data).__name__, type(experiment.model).__name__
        raise ValueError(f"data is {given} and model {model}; Parity goes with SequenceModel, others with ImageModel")
    wrap, wanted = getattr(experiment.model, "wrap", None) or {}, "several" if experiment.data.several_labels else "one"
    if wrap.get("bank") == "windows" and wrap.get("labels", "one") != wanted:
        said = wrap.get("labels", "one")
        raise ValueError(f"model.wrap.labels is {said!r}; for {type(experiment.data).__name__} it must be {wanted!r}")


def build_image_model(
    model: ImageModel, size: int | tuple[int, int], channels: int, classes: int, weights: bool = True
) -> Adaptive:
    """A model of timm's registry for images of this size, pretrained and wrapped according to `model`."""
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
    stored = None
    if model.pretrained and weights:
        if not model.may_fetch:
            raise ValueError(
                f"model.pretrained is {model.pretrained!r}; a file may not load other weights: "
                f"give --trust if the file is your own, or --set model.pretrained={model.pretrained}"
            )
        given["pretrained"] = True
        if model.pretrained != "hub":
            if not Path(model.pretrained).is_file():
                said = f"model.pretrained is {model.pretrained!r}, which is no file"
                raise FileNotFoundError(f"{said}; it must be hub, a safetensors file, or null for untrained weights")
            stored = read_weights(Path(model.pretrained))
            given["pretrained_cfg_overlay"] = {"state_dict": dict(stored), "custom_load": False}
    named = partial(timm.create_model, model.name)
    try:
        built = build_checked(named, model.name, model.options, "model.options", **given)
    except OSError as error:  # all that reads from the hub raises for a missing connection
        if model.pretrained != "hub":
            raise
        said = one_line(error).partition(". ")[0]
        raise ValueError(
            f"the pretrained weights of {model.name} cannot be fetched: {said}; "
            "`--pretrained FILE` takes a safetensors file of them instead"
        ) from error
    if stored is not None:
        _check_arrived(built, stored, model)
    if not whole:
        _check_fits(built, size)
    settings: Any = getattr(built, "pretrained_cfg", None) or {}
    if model.wrap is not None:
        built = build_checked(partial(wrap, built, **whole), "adatape.wrap", model.wrap, "model.wrap")
    elif not isinstance(built, Adaptive):
        built = Plain(built)
    _scale_as(built, model, settings, channels)
    if model.trains == "tape":
        for name, parameter in built.named_parameters():
            if not is_added(name):  # of what was added, some may be frozen, since nothing teaches it
                parameter.requires_grad_(False)
    return built


def _check_arrived(built: nn.Module, stored: dict[str, Tensor], model: ImageModel) -> None:
    """Refuses a file none of whose matrices is in a block of the model: since the head is another, timm passes over all
    names that differ, and would leave such a block at its random values without a word."""
    known = {_beginning(value) for value in stored.values() if value.dim() == 2}
    blocks: dict[str, bool] = {}
    for name, value in built.named_parameters():
        if value.dim() == 2 and (block := re.search(r"\bblocks\.\d+", name)):
            blocks[block[0]] = blocks.get(block[0], False) or _beginning(value) in known
    lacking = [name for name, found in blocks.items() if not found]
    if lacking:
        raise ValueError(
            f"model.pretrained is {model.pretrained!r}; {len(lacking)} of {len(blocks)} blocks of {model.name} "
            f"are not in it, {lacking[0]} the first: it must be a file of that ViT with timm's names, "
            f"and begins with {min(stored)}"
        )


def _beginning(matrix: Tensor) -> tuple[Any, ...]:
    return *matrix.shape, *matrix[0, :16].float().tolist()


def _scale_as(built: Adaptive, model: ImageModel, settings: dict[str, Any], channels: int) -> None:
    """Sets what the model makes of images from -1 to 1, which is what all data gives, and says so to timm's users."""
    if model.scaling == "backbone":
        built.rescale = rescale_as(settings, channels)
    if settings:
        half = (0.5,) * channels
        built.pretrained_cfg = {**(getattr(built, "pretrained_cfg", None) or settings), "mean": half, "std": half}


def _check_fits(model: nn.Module, size: int | tuple[int, int]) -> None:
    """Refuses a patch size that does not divide the image, where timm silently drops pixels, and no pooling."""
    vit: Any = getattr(model, "vit", model)
    if getattr(vit, "global_pool", None) == "":
        raise ValueError("model.options.global_pool is ''; for classification it must be token, avg, max or avgmax")
    embed = getattr(vit, "patch_embed", None)
    patch = getattr(embed, "patch_size", (1, 1))
    sides = (size, size) if isinstance(size, int) else size
    if any(side % part for side, part in zip(sides, patch, strict=True)) and not getattr(
        embed, "dynamic_img_pad", False
    ):
        raise ValueError(f"model.options.patch_size is {patch[0]}; it must divide data.size, {_written(size)}")


def _written(size: int | tuple[int, int]) -> str:
    return str(size) if isinstance(size, int) or size[0] != size[1] else str(size[0])
