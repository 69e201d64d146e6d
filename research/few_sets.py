"""Makes the image sets of the few-shot columns: folders of arrays at 32 px, named like the columns.

    python research/few_sets.py data/few --cifar10 data/cifar10 --cifar100 data/cifar100 --pets data/pets

`c10` has the first 100 training images of each class, `c100` the first 10,000, `pets` all, each cropped to its largest
centre square; test sets are complete. Supports are drawn from the training images. A source is a folder of arrays, or
SOURCE:PATH as in `adatape fewshot --on pets:data/pets`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from adatape.data.images import open_images
from adatape.data.imageset import ImageSet
from adatape.train.fewshot import data_named

SIDE = 32
OF_EACH_CLASS, AT_FIRST = 100, 10_000


def first_of_each(labels: np.ndarray, count: int) -> np.ndarray:
    """Positions of the first `count` of each class, class by class."""
    return np.concatenate([np.flatnonzero(labels == label)[:count] for label in np.unique(labels)])


def squared(image: Image.Image, side: int = SIDE) -> np.ndarray:
    """The largest centre square, resized to `side`."""
    edge = min(image.size)
    left, top = (image.width - edge) // 2, (image.height - edge) // 2
    square = image.crop((left, top, left + edge, top + edge))
    return np.asarray(square if edge == side else square.resize((side, side), Image.Resampling.BICUBIC))


def put(folder: Path, split: str, images: ImageSet, rows: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"{split}_images.npy", np.stack([squared(images.read(int(row))) for row in rows]))
    np.save(folder / f"{split}_labels.npy", images.labels[rows])
    print(f"{folder} {split}: {len(rows)} images of {images.classes} classes", flush=True)


def make(out: Path, name: str, source: str) -> None:
    train, test = (open_images(data_named(source, SIDE), split) for split in ("train", "test"))
    rows = {
        "c10": lambda: first_of_each(train.labels, OF_EACH_CLASS),
        "c100": lambda: np.arange(AT_FIRST),
        "pets": lambda: np.arange(len(train)),
    }[name]()
    put(out / name, "train", train, rows)
    put(out / name, "test", test, np.arange(len(test)))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cifar10")
    parser.add_argument("--cifar100")
    parser.add_argument("--pets")
    arguments = parser.parse_args(given)
    sources = {"c10": arguments.cifar10, "c100": arguments.cifar100, "pets": arguments.pets}
    if not any(sources.values()):
        parser.error("nothing to make; give --cifar10, --cifar100 or --pets")
    for name, source in sources.items():
        if source:
            make(arguments.out, name, source)


if __name__ == "__main__":
    main()
