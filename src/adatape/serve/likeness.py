"""Whether an image looks like those of the data set: by light, contrast, detail and colour, not by what it shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from adatape.data.decode import BrokenImage
from adatape.data.imageset import ImageSet
from adatape.data.sets import evenly_apart
from adatape.serve.pictures import seen

STORED = "likeness.json"  # of a run whose data set does not come along
LOOKED_AT, FEWEST = 300, 50  # images of a set, and how many it must have
USUAL, MARGIN = 0.99, 1.15  # the limit is this many times the distance that so many of a set's images have at most
ROWS = 64  # of an image that are looked at, or up to twice as many
BLACK, WHITE = 0.05, 0.95
SOFTEN = 0.01  # keeps what an image without any contrast gives finite
NAMES = ("brightness", "contrast", "detail", "light at its edges", "black areas", "white areas", "colour", "tint")


class Likeness(NamedTuple):
    far: bool
    most: str  # what differs most from the set's mean, in its deviations
    images: int  # that it was compared with


class Reference(NamedTuple):
    """Mean and covariance of a set's statistics, and the distance from the mean that few of its images exceed."""

    mean: Float[Tensor, "s"]
    covariance: Float[Tensor, "s s"]
    limit: float
    images: int

    def judge(self, pixels: UInt8[Tensor, "c h w"]) -> Likeness:
        away = statistics_of(pixels) - self.mean
        most = int((away / self.covariance.diagonal().sqrt()).abs().argmax())
        return Likeness(float(_distances(away[None], self.covariance)) > self.limit, NAMES[most], self.images)

    def save(self, path: Path) -> None:
        lists = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in self._asdict().items()}
        path.write_text(json.dumps(lists, indent=1) + "\n")


def statistics_of(pixels: UInt8[Tensor, "c h w"]) -> Float[Tensor, "s"]:
    """Those of NAMES, the last two only of images in colour; large images are sampled by rows."""
    rows = pixels[:, :: max(1, pixels.shape[1] // ROWS)].double() / 255
    grey = rows.mean(0)
    contrast = grey.std(correction=0) + SOFTEN
    edges = torch.cat([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    found = [
        grey.mean(),
        contrast.log(),
        grey.diff(dim=1, append=grey[:, -1:]).abs().mean() / contrast,
        edges.mean(),
        (grey < BLACK).double().mean().sqrt(),
        (grey > WHITE).double().mean().sqrt(),
    ]
    if rows.shape[0] > 1:
        found += [(rows.amax(0) - rows.amin(0)).mean().sqrt(), rows[0].mean() - rows[-1].mean()]
    return torch.stack(found)


def reference_of(images: Iterable[UInt8[Tensor, "c h w"]]) -> Reference | None:
    """None where there are too few images to tell what is usual."""
    found = [statistics_of(each) for each in images]
    if len(found) < FEWEST:
        return None
    every = torch.stack(found)
    mean, covariance = every.mean(0), torch.cov(every.T) + 1e-6 * torch.eye(every.shape[1], dtype=torch.float64)
    limit = MARGIN * float(_distances(every - mean, covariance).quantile(USUAL))
    return Reference(mean, covariance, limit, len(found))


def load_reference(folder: Path) -> Reference | None:
    """What a run stores; None where it stores nothing, or something else."""
    try:
        kept: dict[str, Any] = json.loads((folder / STORED).read_text())
        mean, covariance = (torch.tensor(kept[name], dtype=torch.float64) for name in ("mean", "covariance"))
        found = Reference(mean, covariance, float(kept["limit"]), int(kept["images"]))
        return found if _fits(found) else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _fits(found: Reference) -> bool:
    width, numbers = len(found.mean), torch.cat([found.mean, found.covariance.flatten()])
    shaped = found.mean.dim() == 1 and 0 < width <= len(NAMES) and found.covariance.shape == (width, width)
    return shaped and bool(numbers.isfinite().all()) and bool(torch.linalg.eigvalsh(found.covariance)[0] > 0)


def _distances(away: Float[Tensor, "n s"], covariance: Float[Tensor, "s s"]) -> Float[Tensor, "n"]:
    """In deviations of the set, taking into account which statistics go together (Mahalanobis)."""
    return (away * torch.linalg.solve(covariance, away.T).T).sum(1).sqrt()


class KnownImages:
    """What the images of a served model look like: stored with its run, or read from its set once that is asked for."""

    def __init__(
        self, stored: Reference | None, images: ImageSet | None, channels: int, size: int | tuple[int, int]
    ) -> None:
        self._reference, self._unread = stored, None if stored else images
        self._channels, self._size = channels, size
        self._reading = asyncio.Lock()

    async def reference(self) -> Reference | None:
        """None where there is nothing to compare with."""
        async with self._reading:
            if self._unread is not None:
                self._reference = await asyncio.to_thread(lambda images: reference_of(self._seen(images)), self._unread)
                self._unread = None
        return self._reference

    def _seen(self, images: ImageSet) -> Iterable[Tensor]:
        for row in evenly_apart(len(images), LOOKED_AT).tolist():
            try:
                yield seen(images.read(row), self._channels, self._size)
            except BrokenImage:
                continue
