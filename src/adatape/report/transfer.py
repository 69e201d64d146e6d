"""What a trained model is worth elsewhere: few-shot accuracy on another set, and a folder that others can load."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from adatape.config import ImageModel, Images, Source
from adatape.data.augment import SHORT_SIDE
from adatape.data.batch import Part
from adatape.data.sets import LabelledSet, open_set
from adatape.evaluate.fewshot import features_of, few_shot, summary
from adatape.models.adaptive import Adaptive
from adatape.report.terminal import TABLE, pick_device
from adatape.train.folder import load_result, load_run
from adatape.train.identity import identity
from adatape.train.release import release
from adatape.validation import read_object

WORKERS = 2


def data_named(text: str, size: int, exif_orientation: bool = False) -> Images:
    """`digits`, SOURCE:PATH as in pets:data/pets, or a folder of arrays or of classes."""
    source, _, path = text.partition(":")
    if source in get_args(Source):
        return Images(source, path or None, size, broken=1.0, exif_orientation=exif_orientation)  # type: ignore[arg-type]
    if not Path(text).is_dir():
        known = ", ".join(get_args(Source))
        raise FileNotFoundError(f"{text} is no folder; give SOURCE:PATH with a source of {known}, or a folder")
    kind: Source = "arrays" if (Path(text) / "train_images.npy").is_file() else "folder"
    return Images(kind, text, size, broken=1.0, exif_orientation=exif_orientation)


def print_fewshot(
    folder: Path,
    on: str,
    shots: tuple[int, ...],
    seeds: tuple[int, ...],
    l2: tuple[float, ...],
    device: str,
    trust: bool = False,
) -> dict[str, Any]:
    """Ridge regression on a run's frozen features, over random supports."""
    experiment, model = load_run(folder, trust=trust)
    if not isinstance(experiment.data, Images):
        raise ValueError(f"{folder} is a run on {type(experiment.data).__name__}; few-shot needs one on images")
    data = data_named(on, experiment.data.size, experiment.data.exif_orientation)
    place = torch.device(pick_device(device))
    model = model.to(place)
    sets = [open_set(data, split) for split in ("train", "test")]
    (train, train_labels), (test, test_labels) = (
        features_of(model, _fitting(model, each, place), place) for each in sets
    )
    rows = few_shot(train, train_labels, test, test_labels, shots, l2, seeds, classes=sets[0].classes)
    found = summary(rows)
    table = Table("shots", "l2", "accuracy", "seeds", title=f"{folder.name} on {on}", **TABLE)
    for row in found:
        spread = "" if row.sd is None else f" ± {100 * row.sd:.2f}"
        table.add_row(str(row.shots), f"{row.l2:g}", f"{100 * row.mean:.2f}{spread} %", str(row.seeds))
    Console().print(table)
    return {"on": on, "rows": [row._asdict() for row in rows], "summary": [row._asdict() for row in found]}


def _fitting(model: Adaptive, images: LabelledSet, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Grey images for a colour model are shown in all channels."""
    channels = model.vit.in_chans
    if images.shape[0] not in (1, channels):
        raise ValueError(f"the images have {images.shape[0]} channels; the model takes {channels}")
    for x, label in images.scored(images.at_once, Part(), device, WORKERS):
        yield x.expand(-1, channels, -1, -1), label


def _shown_share(images: LabelledSet, size: int) -> float:
    """The share of a short side that is scored, by which timm comes to the same size before it crops."""
    pixels = None if images.images is None else images.images.pixels
    if pixels is not None and min(pixels.shape[1:3]) <= size:
        return 1.0
    resized = round(size * SHORT_SIDE)
    share = size / resized
    return share if math.floor(size / share) == resized else math.nextafter(share, 0)


def print_release(folder: Path, to: Path, trust: bool = False) -> dict[str, Any]:
    """A finished run's weights in timm's hub format."""
    experiment, model = load_run(folder, trust=trust)
    data, settings = experiment.data, experiment.model
    if not isinstance(settings, ImageModel):
        raise ValueError(f"{folder} is a run on {type(data).__name__}; timm's format is for models of images")
    test = open_set(data, "test")
    channels, size, _ = test.shape
    shape = {"img_size": size, "in_chans": channels, "num_classes": test.classes}
    result, env = load_result(folder), read_object(folder / "env.json") if (folder / "env.json").is_file() else {}
    command = str(env.get("command", "the command is not known"))
    wrapped = {} if settings.wrap is None else {"backbone": settings.name, **settings.wrap}
    release(
        model,
        "adatape" if wrapped else settings.name,
        {**shape, **settings.options, **wrapped},
        to,
        result=result,
        command=command,
        classes=test.names,
        input_size=(channels, size, size),
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
        crop_pct=_shown_share(test, size),
        budget=settings.budget,
        experiment=identity(experiment),
    )
    Console().print(f'released to {to}; load it with timm.create_model("local-dir:{to}", pretrained=True)')
    return {"out": str(to), "accuracy": result["accuracy"]}
