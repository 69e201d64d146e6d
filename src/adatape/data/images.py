"""Sources of labelled images: scikit-learn's digits, torchvision's sets, class folders, arrays."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import importlib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.error import URLError

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt8
from PIL import Image

from adatape.counter_rng import key_of, keys_of
from adatape.data.class_folders import class_folders, files_below
from adatape.data.decode import FORMATS, MOST_BYTES, REFUSAL, RefusedMode, open_regular
from adatape.data.haystack import COUNTS, SIDE, Haystack, make_haystack
from adatape.data.imageset import Files, ImageSet, Pixels
from adatape.data_config import Images, Megapixel, Scenes
from adatape.extras import how_to_install
from adatape.validation import one_line

Split = Literal["train", "validation", "test"]

DIGITS_TEST, VALIDATION, HAYSTACK = 101, 102, 103  # first words of keys, so that their draws are independent
KNOWN_CLASSES = {"cifar10": 10, "cifar100": 100, "pets": 37, "fashion": 10, "imagenet": 1000}


def open_images(config: Images, split: Split) -> ImageSet:
    """Opens a split of the set; validation is `validate_on` of train, or the test set if that is None."""
    if config.source not in SOURCES:
        raise ValueError(f"source is {config.source!r}; sets with random access are {', '.join(SOURCES)}")
    if split not in ("train", "validation", "test"):
        raise ValueError(f"split is {split!r}; it must be train, validation or test")
    tested = split_of(config, split) == "test"
    whole = _whole(config, not tested)
    if config.classes not in (None, whole.classes):
        raise ValueError(f"classes is {config.classes}; {config.source} has {whole.classes}")
    images = whole if tested or config.validate_on is None else _cut(whole, config.validate_on, split)
    if config.modes == "refuse" and isinstance(images, Files):
        _refuse_modes(images)
    return images


def split_of(config: Images | Scenes | Megapixel, split: Split) -> Split:
    """The split that is read: validation is the test set if no part of train is held out."""
    return "test" if split == "validation" and config.validate_on is None else split


def _whole(config: Images, train: bool) -> ImageSet:
    """The whole train or test set; it is downloaded only if the config may fetch."""
    if not config.download or config.may_fetch:
        return SOURCES[config.source](config, train)
    try:
        return SOURCES[config.source](dataclasses.replace(config, download=False), train)
    except (ValueError, OSError) as error:
        reason = "download is true only in a file, which may not download; give --trust if the file is your own"
        raise ValueError(f"{error}; {reason}") from error


def _cut(whole: ImageSet, share: float, split: Split) -> ImageSet:
    count = round(share * len(whole)) if 0 < share < 1 else 0
    if not 0 < count < len(whole):
        raise ValueError(f"validate_on is {share} of {len(whole)} images; both parts must have at least one")
    held = stratified(whole.labels, count, key_of(VALIDATION))
    return whole.subset(np.flatnonzero(held == (split == "validation")))


def stratified(labels: Int64[np.ndarray, "n"], count: int, key: int) -> Bool[np.ndarray, "n"]:
    """A random mask of `count` rows, stratified by class; the largest remainders round up."""
    sizes = np.bincount(labels)
    exact = sizes * count / len(labels)
    quota = np.floor(exact).astype(np.int64)
    quota[np.argsort(quota - exact, kind="stable")[: count - quota.sum()]] += 1
    order = np.lexsort((keys_of(key, torch.arange(len(labels))).numpy(), labels))
    within = np.arange(len(labels)) - (np.cumsum(sizes) - sizes)[labels[order]]
    drawn = np.zeros(len(labels), bool)
    drawn[order] = within < quota[labels[order]]
    return drawn


def _refuse_modes(images: Files) -> None:
    for i in range(len(images)):
        try:
            with open_regular(images.path(i)) as file, Image.open(file, formats=FORMATS) as image:
                mode = image.mode
        except Exception:  # unreadable images are reported when they are read
            continue
        if mode != "RGB":
            raise RefusedMode(REFUSAL.format(name=images.path(i), mode=mode))


def library(module: str, package: str, source: str) -> Any:
    """Imports a module that only some sources need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        line = how_to_install(module) or f"{package} is not installed"
        raise ValueError(f"source {source} needs {package}: {line}") from error


def _digits(config: Images, train: bool) -> ImageSet:  # noqa: ARG001  every source has these arguments
    digits = library("sklearn.datasets", "scikit-learn", "digits").load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = digits.target.astype(np.int64)
    test = stratified(labels, 360, key_of(DIGITS_TEST))
    return Pixels([str(digit) for digit in range(10)], labels, images).subset(np.flatnonzero(test != train))


def _haystack(config: Images, train: bool) -> ImageSet:
    made = haystack_of(train)
    if config.size != SIDE:
        raise ValueError(f"size is {config.size}; canvases of source haystack are {SIDE} pixels wide")
    return Pixels([str(digit) for digit in range(10)], made.labels, made.images)


@functools.cache
def haystack_of(train: bool) -> Haystack:
    """Canvases of scikit-learn's digits; those of the test set show digits that no training canvas has."""
    digits = _digits(Images("digits"), train)
    assert isinstance(digits, Pixels)
    count = COUNTS["train" if train else "test"]
    return make_haystack(digits.pixels[..., 0], digits.labels, count, seed=key_of(HAYSTACK, int(train)) % 2**32)


def _named(config: Images, train: bool) -> ImageSet:
    """A set of torchvision, or arrays if its folder contains them."""
    path = _folder(config)
    if (path / "train_images.npy").exists():
        return _arrays(config, train)
    try:
        return TORCHVISION[config.source](config, path, train)
    except (RuntimeError, URLError) as error:
        raise ValueError(f"path {path} does not contain {config.source}: {one_line(error)}") from error


def _cifar(config: Images, path: Path, train: bool) -> ImageSet:
    datasets = library("torchvision.datasets", "torchvision", config.source)
    kind = datasets.CIFAR10 if config.source == "cifar10" else datasets.CIFAR100
    found = kind(path, train=train, download=config.download)
    return Pixels(list(found.classes), np.array(found.targets, np.int64), np.ascontiguousarray(found.data))


def _fashion(config: Images, path: Path, train: bool) -> ImageSet:
    kind = library("torchvision.datasets", "torchvision", "fashion").FashionMNIST
    if config.download:
        kind(path, download=True)
    part = "train" if train else "t10k"
    images, labels = _idx(path, f"{part}-images-idx3-ubyte"), _idx(path, f"{part}-labels-idx1-ubyte")
    images, labels = _checked_pair(images, labels, f"{path}: ")
    _check_range(labels, 10, str(path))
    return Pixels(list(kind.classes), labels, images)


def mnist(folder: str, train: bool) -> tuple[UInt8[np.ndarray, "n h w"], Int64[np.ndarray, "n"]]:
    """MNIST's digits from arrays, as source `arrays` has them, or from its idx files, as torchvision leaves them."""
    path, part = Path(folder), "train" if train else "t10k"
    if (path / "train_images.npy").exists():
        images, labels = _array_pair(path, "train" if train else "test")
    else:
        advice = "arrays are train_images.npy, train_labels.npy, test_images.npy and test_labels.npy"
        images, labels = (
            _idx(path, f"{part}-{name}-ubyte", "MNIST", advice) for name in ("images-idx3", "labels-idx1")
        )
        images, labels = _checked_pair(images, labels, f"{path}: ")
    if images.shape[-1] != 1:
        raise ValueError(f"path {path} has images of {images.shape[-1]} channels; MNIST's digits have one")
    _check_range(labels, 10, str(path))
    return images[..., 0], labels


def _idx(
    path: Path, name: str, kind: str = "FashionMNIST", advice: str = "set download=true"
) -> UInt8[np.ndarray, "..."]:
    """Reads an array in MNIST's idx format: zeros, type, number of dimensions, their sizes, bytes."""
    places = [folder / f"{name}{end}" for folder in (path, path / kind / "raw") for end in ("", ".gz")]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise FileNotFoundError(f"path {path} contains neither {name}.gz nor {kind}/raw; {advice}")
    try:
        with open_regular(found) as file:
            content = (gzip.GzipFile(fileobj=file) if found.suffix == ".gz" else file).read(MOST_BYTES)
        shape = np.frombuffer(content, ">i4", content[3], 4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)
    except (ValueError, IndexError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{found} is not an idx file: {one_line(error)}") from error


def _pets(config: Images, path: Path, train: bool) -> ImageSet:
    kind = library("torchvision.datasets", "torchvision", "pets").OxfordIIITPet
    found = kind(path, split="trainval" if train else "test", download=config.download)
    return Files(list(found.classes), np.array(found._labels, np.int64), found._images, config.exif_orientation)


def _imagenet(config: Images, path: Path, train: bool) -> ImageSet:
    """torchvision's ImageNet if its devkit is there, else class folders named by WordNet ids."""
    if not any((path / name).exists() for name in ("meta.bin", "ILSVRC2012_devkit_t12.tar.gz")):
        return class_folders(path, train, ("val", "test"), config.exif_orientation)
    split = "train" if train else "val"
    if not config.may_fetch and not ((path / "meta.bin").is_file() and (path / split).is_dir()):
        raise ValueError(
            f"path {path} contains archives to unpack, which a file may not do; give --trust if the file is your own"
        )
    if (path / split).is_dir():
        files_below(path / split)  # refuses cyclic links, which torchvision would follow
    found = library("torchvision.datasets", "torchvision", "imagenet").ImageNet(path, split=split)
    names, paths = [names[0] for names in found.classes], (path for path, _ in found.samples)
    return Files(names, np.array(found.targets, np.int64), paths, config.exif_orientation)


def _from_folder(config: Images, train: bool) -> ImageSet:
    return class_folders(_folder(config), train, ("test", "val"), config.exif_orientation)


def _arrays(config: Images, train: bool) -> ImageSet:
    """Memory-mapped arrays in one folder; test must have the channels and classes of train."""
    path = _folder(config)
    images, labels = _array_pair(path, "train")
    classes = config.classes or KNOWN_CLASSES.get(config.source) or _counted(labels, path)
    _check_range(labels, classes, f"{path}/train_labels.npy")
    if not train or (path / "test_images.npy").exists():
        test_images, test_labels = _array_pair(path, "test")
        _check_range(test_labels, classes, f"{path}/test_labels.npy")
        if test_images.shape[-1] != images.shape[-1]:
            raise ValueError(f"{path}: train has {images.shape[-1]} channels and test {test_images.shape[-1]}")
        images, labels = (images, labels) if train else (test_images, test_labels)
    return Pixels([str(label) for label in range(classes)], labels, images)


def _array_pair(path: Path, part: str) -> tuple[UInt8[np.ndarray, "n h w c"], Int64[np.ndarray, "n"]]:
    return _checked_pair(_array(path, f"{part}_images"), _array(path, f"{part}_labels"), f"{path}/{part}_")


def _array(path: Path, name: str) -> np.ndarray:
    """Memory-maps an array; a header that claims more than the file has is then an error, not an allocation."""
    file = path / f"{name}.npy"
    if not file.is_file():
        raise FileNotFoundError(f"path {path} contains no {name}.npy")
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path / name}.npy is not a NumPy array file: {one_line(error)}") from error


def _checked_pair(
    images: np.ndarray, labels: np.ndarray, where: str
) -> tuple[UInt8[np.ndarray, "n h w c"], Int64[np.ndarray, "n"]]:
    grey = images[..., None] if images.ndim == 3 else images
    if images.dtype != np.uint8:
        raise ValueError(f"{where}images has type {images.dtype}; it must be uint8")
    if grey.ndim != 4 or grey.shape[-1] not in (1, 3) or 0 in grey.shape:
        raise ValueError(
            f"{where}images has shape {images.shape}; it must be N × H × W × 3, N × H × W × 1 or N × H × W"
        )
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise ValueError(f"{where}labels has type {labels.dtype} and shape {labels.shape}; it must be N whole numbers")
    if len(images) != len(labels):
        raise ValueError(f"{where}images has {len(images)} images and {where}labels {len(labels)} labels")
    return grey, labels.astype(np.int64)


def _counted(labels: Int64[np.ndarray, "n"], path: Path) -> int:
    """The number of classes, inferred from labels, which must have no gap; they have one if they start at 1."""
    missing = np.setdiff1d(np.arange(labels.max() + 1), labels)
    if len(missing):
        raise ValueError(
            f"{path}/train_labels.npy goes up to {labels.max()} but has no label {missing[0]}; set classes"
        )
    return int(labels.max()) + 1


def _check_range(labels: Int64[np.ndarray, "n"], classes: int, where: str) -> None:
    outside = labels[(labels < 0) | (labels >= classes)]
    if len(outside):
        raise ValueError(f"{where} has label {outside[0]}; with {classes} classes it must be 0 to {classes - 1}")


def _folder(config: Images) -> Path:
    if config.path is None:
        raise ValueError(f"path is None; source {config.source} needs a folder")
    path = Path(config.path).expanduser()
    if not path.is_dir() and not (config.download and config.source in TORCHVISION):
        raise FileNotFoundError(f"path {path} is not a folder; source {config.source} needs one")
    return path


TORCHVISION: dict[str, Callable[[Images, Path, bool], ImageSet]] = {
    "cifar10": _cifar,
    "cifar100": _cifar,
    "fashion": _fashion,
    "pets": _pets,
    "imagenet": _imagenet,
}
SOURCES: dict[str, Callable[[Images, bool], ImageSet]] = {
    "digits": _digits,
    "haystack": _haystack,
    "folder": _from_folder,
    "arrays": _arrays,
    **dict.fromkeys(TORCHVISION, _named),
}
