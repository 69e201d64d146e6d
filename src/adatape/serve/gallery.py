"""What the page shows of a whole data set: some of its images, and which bank tokens are read over many."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image
from starlette.exceptions import HTTPException

from adatape.banks import InputBank
from adatape.data.decode import BrokenImage
from adatape.data.imageset import ImageSet
from adatape.serve.batcher import Batcher
from adatape.serve.budgets import Setting
from adatape.serve.engine import Answer, Engine
from adatape.serve.pictures import seen
from adatape.serve.served import Served

COUNTED, AT_ONCE = 500, 32
MOST_EXAMPLES = 100


class Gallery:
    """Reads test images, and remembers what it found."""

    def __init__(self, served: Served, engine: Engine, batcher: Batcher) -> None:
        self.served, self.engine, self.batcher = served, engine, batcher
        self._heatmaps: dict[Setting, dict[str, Any]] = {}
        self._one_at_a_time = asyncio.Lock()

    def examples(self, count: int) -> list[dict[str, Any]]:
        """Images spread over the classes, as the model should get them."""
        if not 1 <= count <= MOST_EXAMPLES:
            raise HTTPException(422, f"count is {count}; it must be 1 to {MOST_EXAMPLES}")
        images = self._images()
        return [
            {
                "image": data_url(image),
                "label": int(images.labels[row]),
                "name": images.names[int(images.labels[row])],
            }
            for row, image in _readable(images, _by_turns(images.labels)[:count])
        ]

    async def heatmap(self, setting: Setting) -> dict[str, Any]:
        async with self._one_at_a_time:
            if setting not in self._heatmaps:
                self._heatmaps[setting] = await self._counted(setting)
            return self._heatmaps[setting]

    async def _counted(self, setting: Setting) -> dict[str, Any]:
        bank = self.served.model.tape_bank()
        if not isinstance(bank, InputBank):
            raise HTTPException(404, "this model has no bank of image patches, so there is nothing to map")
        images = self._images()
        counts, weights = np.zeros((2, setting.steps or 0, bank.size))
        rows, total = np.linspace(0, len(images) - 1, min(COUNTED, len(images))).astype(int), 0
        for start in range(0, len(rows), AT_ONCE):
            answers = await self.batcher.alone(self._answers, images, rows[start : start + AT_ONCE], setting)
            total += len(answers)
            _add(answers, counts, weights)
        return {
            "grid": list(bank.h1.grid_size),
            "counts": counts.sum(0).astype(int).tolist(),
            "weights": weights.sum(0).tolist(),
            "per_step": counts.astype(int).tolist(),
            "images": total,
            "budget": setting._asdict(),
        }

    def _answers(self, images: ImageSet, rows: np.ndarray, setting: Setting) -> list[Answer]:
        size = self.served.sample.shape[-1]
        pixels = [seen(image, self.served.channels, size) for _, image in _readable(images, rows)]
        return self.engine.answers(pixels, setting) if pixels else []

    def _images(self) -> ImageSet:
        if self.served.images is None:
            raise HTTPException(404, self.served.missing)
        return self.served.images


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
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
