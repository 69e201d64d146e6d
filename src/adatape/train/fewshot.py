"""Few-shot accuracy of a finished run on another set of images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from adatape.data.batch import Shard
from adatape.data.sets import LabelledSet, open_set
from adatape.data_config import Images, Source
from adatape.evaluate.device import pick_device
from adatape.evaluate.fewshot import FewShot, Spread, features_of, few_shot, summary
from adatape.evaluate.result import Result
from adatape.models.base import Adaptive
from adatape.train.folder import load_run

WORKERS = 2


@dataclass(frozen=True)
class FewShotResult(Result):
    run: Path
    on: str
    rows: list[FewShot]
    summary: list[Spread]


def fewshot_run(
    folder: Path,
    on: str,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: Sequence[int] = (0, 1, 2),
    l2: Sequence[float] = (1024.0,),
    device: str = "auto",
    trust: bool = False,
) -> FewShotResult:
    """Ridge regression on a run's frozen features, over random supports."""
    experiment, model = load_run(folder, trust=trust)
    trained_on = experiment.data
    if trained_on.image_size is None:
        raise ValueError(f"{folder} is a run on {type(trained_on).__name__}; few-shot needs one on images")
    if trained_on.several_labels:
        raise ValueError(f"{folder} is a run on images with several labels; few-shot needs one label per image")
    data = data_named(on, trained_on.image_size[0], trained_on.exif_orientation)
    place = torch.device(pick_device(device))
    model = model.to(place)
    sets = [open_set(data, split) for split in ("train", "test")]
    (train, train_labels), (test, test_labels) = (
        features_of(model, _fitting(model, each, place), place) for each in sets
    )
    rows = few_shot(train, train_labels, test, test_labels, shots, l2, seeds, classes=sets[0].classes)
    return FewShotResult(folder, on, rows, summary(rows))


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


def _fitting(model: Adaptive, images: LabelledSet, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Grey images for a colour model are shown in all channels."""
    channels = model.vit.in_chans
    if images.shape[0] not in (1, channels):
        raise ValueError(f"the images have {images.shape[0]} channels; the model takes {channels}")
    for x, label in images.evaluation_batches(images.eval_batch, Shard(), device, WORKERS):
        yield x.expand(-1, channels, -1, -1), label
