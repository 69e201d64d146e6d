"""Settings of data sets as typed records; torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from adatape.limits import Count, FolderName, InnerShare, PartialShare, Pixels, Quantity, Record, Seed, Share, Width


@dataclass(frozen=True)
class Parity(Record):
    """The parity task: is the number of ones among symbols -1, 0, 1 odd?"""

    source: ClassVar[str] = "parity"
    image_size: ClassVar[None] = None
    several_labels: ClassVar[bool] = False
    letterboxed: ClassVar[bool] = False
    exif_orientation: ClassVar[bool] = False
    length: Width = 32
    """symbols per sequence (N)"""
    held_out: Annotated[int, Ge(1), Le(10_000_000)] = 6400
    """sequences in the fixed test set, and in the validation set that stops a run"""

    @property
    def sequence_length(self) -> int | None:
        return self.length


Crop = Literal["none", "inception", "pad"]
Source = Literal[
    "digits", "haystack", "cifar10", "cifar100", "pets", "fashion", "imagenet", "folder", "arrays", "shards"
]


@dataclass(frozen=True)
class Augment(Record):
    """Augmentation of training images; the defaults apply none."""

    crop: Crop = "none"
    """inception: a box of random area and aspect, resized; pad: a random crop of the image padded by `pad`"""
    area: tuple[Annotated[float, Gt(0), Le(1)], Annotated[float, Gt(0), Le(1)]] = (0.05, 1.0)
    """smallest and largest fraction of the image area in an inception crop"""
    pad: Annotated[int, Ge(0), Le(4096)] = 4
    """pixels on each side of a padded crop"""
    flip: bool = False
    """flip horizontally with probability 1/2"""
    randaug: Annotated[int, Ge(0), Le(100)] = 0
    """operations of RandAugment per image (the paper's first number)"""
    magnitude: Annotated[float, Ge(0), Le(100)] = 10.0
    """their magnitude on the paper's scale, where 10 is the maximum (its second number)"""
    jitter: Annotated[float, Ge(0), Le(100)] = 0.0
    """standard deviation of that magnitude between images"""
    mixup: Annotated[float, Ge(0), Le(1000)] = 0.0
    """α of Mixup's Beta distribution"""
    cutmix: Annotated[float, Ge(0), Le(1000)] = 0.0
    """α of CutMix's Beta distribution; with mixup too, each is used in half of the steps"""
    erase: Share = 0.0
    """probability of filling a random box with noise"""
    smoothing: PartialShare = 0.0
    """label smoothing: fraction of the target spread over all classes"""
    repeats: Quantity = 1
    """differently augmented copies of an image in one batch"""


@dataclass(frozen=True)
class Images(Record):
    """A labelled set of images."""

    may_fetch: ClassVar[bool] = True
    """whether it may be downloaded or read from a URL"""
    sequence_length: ClassVar[None] = None
    several_labels: ClassVar[bool] = False
    letterboxed: ClassVar[bool] = False
    """whether an image of another shape is shown as a whole and padded, not cropped to its centre"""
    source: Source = "digits"
    """folder: class folders; arrays: NumPy files; shards: WebDataset tars; others: a data set by its name"""
    path: str | None = None
    """folder of the data set, or shards as path or URL with {000..123} for numbers"""
    size: Pixels = 32
    """side of the model's square input, in pixels"""
    augment: Augment = Augment()
    """of training images"""
    validate_on: InnerShare | None = None
    """fraction of the training set held out for validation; None validates on the test set"""
    resident: bool | None = None
    """keep the whole set on the device; None decides by the kind of set"""
    download: bool = False
    """let torchvision download the set"""
    broken: Share = 0.02
    """a run stops above this fraction of unreadable images; each is replaced by the next image"""
    modes: Literal["convert", "refuse"] = "convert"
    """images that are not RGB are converted and counted, or refused"""
    classes: Annotated[int, Ge(1), Le(10_000_000)] | None = None
    """number of classes; required for shards, which do not store it"""
    samples: Count | None = None
    """number of training images; required for shards, which do not store it"""
    exif_orientation: bool = False
    """rotate images by their EXIF orientation; recipes set it, a config.json without this field means false"""

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of the model's input."""
        return self.size, self.size


@dataclass(frozen=True)
class UntrustedImages(Images):
    """Images named by a file that may come from someone else: only local files are read."""

    may_fetch: ClassVar[bool] = False


@dataclass(frozen=True)
class Scenes(Record):
    """A folder of images and a CSV file with the labels of each: several, one or none. Nothing is ever downloaded."""

    source: ClassVar[str] = "scenes"
    sequence_length: ClassVar[None] = None
    several_labels: ClassVar[bool] = True
    letterboxed: ClassVar[bool] = True
    path: str
    """the folder; files of the CSV are named relative to it, and must lie in it"""
    csv: FolderName = "labels.csv"
    """name of its table: columns file, labels (names with ; between, or nothing) and perhaps split (train or test)"""
    size: tuple[Pixels, Pixels] = (800, 1360)
    """height and width of the model's input; images of another shape are resized to fit and padded with grey"""
    classes: tuple[str, ...] | None = None
    """names of the labels in the model's order; None is all that occur, sorted"""
    validate_on: InnerShare | None = None
    """fraction of the training set held out for validation; None validates on the test set"""
    flip: bool = False
    """flip training images horizontally with probability 1/2"""
    jitter: Share = 0.0
    """strength of random contrast, brightness and tint of training images"""
    resident: bool | None = None
    """keep decoded training images on the device; None does so if they take less than 4 GB"""
    broken: Share = 0.02
    """a run stops above this fraction of unreadable images; each is replaced by the next image"""
    exif_orientation: bool = True
    """rotate images by their EXIF orientation"""

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of the model's input."""
        return self.size


MegapixelTask = Literal["majority", "maximum", "topmost", "all"]
DrawOrder = Literal["under", "over"]


@dataclass(frozen=True)
class Megapixel(Record):
    """Megapixel MNIST: five digits among line patterns on a large canvas. Nothing is ever downloaded."""

    source: ClassVar[str] = "megapixel"
    sequence_length: ClassVar[None] = None
    letterboxed: ClassVar[bool] = True
    exif_orientation: ClassVar[bool] = False
    path: str
    """the folder: train_images.npy, train_labels.npy, test_images.npy, test_labels.npy, or MNIST's idx files"""
    task: MegapixelTask = "majority"
    """which class most digits have, the highest class, that of the topmost digit, or all that occur (several labels)"""
    order: DrawOrder = "under"
    """whether lines are drawn under the digits (as in IPS) or over them (as in ATS)"""
    side: Annotated[int, Ge(112), Le(16_384)] = 1500
    """side of a canvas in pixels"""
    noise: Annotated[int, Ge(0), Le(100_000)] = 50
    """line patterns of a canvas"""
    train: Quantity = 5000
    """training canvases"""
    held_out: Quantity = 1000
    """test canvases, and as many for validation"""
    seed: Seed = 0
    """canvas i is a function of it, the split and i"""
    validate_on: InnerShare | None = 1 / 6
    """fraction of MNIST's training digits that only validation canvases show; None validates on the test canvases"""

    @property
    def several_labels(self) -> bool:
        return self.task == "all"

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of the model's input."""
        return self.side, self.side
