"""German street scenes (GTSDB) as arrays, and average precision."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

CATEGORIES = ("prohibitory", "danger", "mandatory", "other")


class Scenes(NamedTuple):
    images: Tensor  # (n, 800, 1360, 3) uint8
    labels: Tensor  # (n, 4) float: which categories occur
    boxes: list[np.ndarray]  # (signs, 5) left, top, right, bottom, category: for evaluation and the upper bound

    def at(self, chosen: np.ndarray) -> Scenes:
        index = torch.from_numpy(chosen).to(self.images.device)
        return Scenes(self.images[index], self.labels[index], [self.boxes[i] for i in chosen])


def load(archive: Path, classes: Path, device: str) -> Scenes:
    packed = np.load(archive)
    blob, offsets, boxes = packed["bytes"].tobytes(), packed["offsets"], packed["boxes"]
    category = {int(k): CATEGORIES.index(v[1]) for k, v in json.loads(classes.read_text()).items()}

    def decode(i: int) -> Tensor:
        image = Image.open(io.BytesIO(blob[offsets[i] : offsets[i + 1]])).convert("RGB")
        return torch.from_numpy(np.array(image))

    with ThreadPoolExecutor(16) as pool:
        images = torch.stack(list(pool.map(decode, range(len(offsets) - 1))))
    kinds = np.array([category[int(c)] for c in boxes[:, 5]])
    labels = torch.zeros(len(images), len(CATEGORIES))
    labels[boxes[:, 0], kinds] = 1
    signs = [np.c_[boxes[boxes[:, 0] == i, 1:5], kinds[boxes[:, 0] == i]] for i in range(len(images))]
    return Scenes(images.to(device), labels.to(device), signs)


def held_out(count: int, kept: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation indices, the same for every run."""
    kept = kept or count // 5
    order = np.random.default_rng(0).permutation(count)
    return np.sort(order[kept:]), np.sort(order[:kept])


def average_precision(scores: Tensor, labels: Tensor) -> list[float]:
    """Per class, (n, classes) each: the mean over positives of the precision at their rank."""
    found = []
    for s, y in zip(scores.T, labels.T, strict=True):
        ranked = y[s.argsort(descending=True)].double().cpu()
        precision = ranked.cumsum(0) / torch.arange(1, len(ranked) + 1)
        found.append(float((precision * ranked).sum() / ranked.sum()))
    return found
