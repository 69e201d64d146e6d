"""What the page shows of a whole data set: some of its images, and which bank tokens are read over many."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image
from starlette.exceptions import HTTPException

from adatape.banks import InputBank
from adatape.config import Budget
from adatape.data.decode import BrokenImage
from adatape.data.imageset import ImageSet
from adatape.evaluate.reading import numbered_sets, set_name
from adatape.serve.batcher import Batcher
from adatape.serve.budgets import as_dict
from adatape.serve.engine import Answer, Engine
from adatape.serve.pictures import seen
from adatape.serve.served import ServedModel

COUNTED, AT_ONCE = 500, 32
MOST_EXAMPLES, EXAMPLES_BYTES = 100, 4_000_000
FEW = 12  # images of a set that are all shown, in its own order


class Gallery:
    """Reads test images, and remembers what it found."""

    def __init__(self, served: ServedModel, engine: Engine, batcher: Batcher) -> None:
        self.served, self.engine, self.batcher = served, engine, batcher
        self._heatmaps: dict[Budget | None, bytes] = {}
        self._examples: list[bytes] | None = None
        self._one_at_a_time, self._encoding = asyncio.Lock(), asyncio.Lock()

    async def examples(self, count: int) -> bytes:
        """JSON of images spread over the classes, as the model should get them; fewer where they are large."""
        if not 1 <= count <= MOST_EXAMPLES:
            raise HTTPException(422, f"count is {count}; it must be 1 to {MOST_EXAMPLES}")
        images = self._images()
        async with self._encoding:
            if self._examples is None:
                self._examples = await asyncio.to_thread(_encoded, images)
        return b'{"examples":[%s]}' % b",".join(self._examples[:count])

    async def heatmap(self, budget: Budget | None) -> bytes:
        """JSON of how often, and with which weight, each bank token is read."""
        async with self._one_at_a_time:
            if budget not in self._heatmaps:
                self._heatmaps[budget] = json.dumps(await self._counted(budget)).encode()
            return self._heatmaps[budget]

    async def _counted(self, budget: Budget | None) -> dict[str, Any]:
        bank = self.served.model.tape_bank()
        if not isinstance(bank, InputBank):
            raise HTTPException(404, "this model has no bank of image patches, so there is nothing to map")
        images = self._images()
        counts, weights = np.zeros((2, budget.steps if budget else 0, bank.size))
        rows, total = np.linspace(0, len(images) - 1, min(COUNTED, len(images))).astype(int), 0
        for start in range(0, len(rows), AT_ONCE):
            answers = await self.batcher.alone(self._answers, images, rows[start : start + AT_ONCE], budget)
            total += len(answers)
            _add(answers, counts, weights)
        return {
            "grid": list(bank.h1.grid_size),
            "counts": counts.sum(0).astype(int).tolist(),
            "weights": weights.sum(0).tolist(),
            "per_step": counts.astype(int).tolist(),
            "images": total,
            "budget": as_dict(budget),
        }

    def _answers(self, images: ImageSet, rows: np.ndarray, budget: Budget | None) -> list[Answer]:
        pixels = [seen(image, self.served.channels, self.served.size) for _, image in _readable(images, rows)]
        return self.engine.answers(pixels, budget) if pixels else []

    def _images(self) -> ImageSet:
        if self.served.images is None:
            raise HTTPException(404, self.served.missing)
        return self.served.images


def _encoded(images: ImageSet) -> list[bytes]:
    found: list[bytes] = []
    size = 0
    several = images.labels.ndim > 1
    kinds = numbered_sets(images.labels)[1] if several else images.labels
    order = np.arange(len(images)) if len(images) <= FEW else _by_turns(kinds)
    for row, image in _readable(images, order[:MOST_EXAMPLES]):
        url = _file_url(*images.file(row)) if several else data_url(image)  # large images as they are stored
        size += len(url)
        if found and size > EXAMPLES_BYTES:
            break
        found.append(json.dumps({"image": url, **_labels(images, row)}).encode())
    return found


def _labels(images: ImageSet, row: int) -> dict[str, Any]:
    label = images.labels[row]
    if images.labels.ndim == 1:
        return {"label": int(label), "name": images.names[int(label)]}
    return {"label": np.flatnonzero(label).tolist(), "name": set_name(label, images.names)}


def _add(answers: list[Answer], counts: np.ndarray, weights: np.ndarray) -> None:
    for answer in answers:
        for step, (index, weight) in enumerate(zip(answer.taken, answer.weight, strict=True)):
            counts[step, index] += 1
            weights[step, index] += weight


def _by_turns(labels: np.ndarray) -> np.ndarray:
    """Row numbers that take one image of each class, then the next of each."""
    turn = np.zeros(len(labels), dtype=int)
    for label in np.unique(labels):
        turn[labels == label] = np.arange((labels == label).sum())
    return np.lexsort((labels, turn))


def _readable(images: ImageSet, rows: np.ndarray) -> Iterator[tuple[int, Image.Image]]:
    for row in rows.tolist():
        try:
            yield row, images.read(row)
        except BrokenImage:
            continue


def data_url(image: Image.Image) -> str:
    content = io.BytesIO()
    image.save(content, "PNG")
    return _file_url("png", content.getvalue())


def _file_url(suffix: str, content: bytes) -> str:
    kind = "jpeg" if suffix == "jpg" else suffix
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
