"""Settings as typed records; torch is not imported, so that `adatape --help` is quick."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt, Predicate

T = TypeVar("T")


def is_folder_name(text: str) -> bool:
    """at most 100 letters, digits, dots, hyphens and underscores, the first a letter or digit"""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text) is not None


# Limits of fields and options, checked by `validation`; NaN fails all of them. Upper limits catch typing errors before
# they exhaust the memory.
FolderName = Annotated[str, Predicate(is_folder_name)]
Count = Annotated[int, Ge(1), Le(10**12)]
CountOrZero = Annotated[int, Ge(0), Le(10**12)]
Quantity = Annotated[int, Ge(1), Le(1_000_000)]
QuantityOrZero = Annotated[int, Ge(0), Le(1_000_000)]
Pixels = Annotated[int, Ge(1), Le(16_384)]
Width = Annotated[int, Ge(1), Le(65_536)]
Depth = Annotated[int, Ge(1), Le(1_000)]
Seed = Annotated[int, Ge(0), Lt(2**63)]
Share = Annotated[float, Ge(0), Le(1)]
PartialShare = Annotated[float, Ge(0), Lt(1)]
InnerShare = Annotated[float, Gt(0), Lt(1)]
Positive = Annotated[float, Gt(0), Le(1e30)]
NotNegative = Annotated[float, Ge(0), Le(1e30)]  # below float32's largest value, 3.4e38, with a margin for products
Threshold = Annotated[float, Gt(0)]  # infinity is allowed: reading never halts

Update = Literal["average", "replace"]
Ponder = Literal["gini", "max", "collect"]
Choice = Literal["highest", "random", "order"]
ReaderName = Literal["adaptive", "parallel", "fixed", "act", "act-after-norm"]
TapeFFN = Literal["none", "append", "blocks", "append+blocks"]


class Record:
    """Base class of settings; unknown field names are an error."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


@dataclass(frozen=True)
class ReaderConfig(Record):
    """How a tape is read; the paper's letters are T, τ, K, h and λ."""

    steps: Quantity = 10
    """maximum number of tape tokens per sample (T)"""
    threshold: Threshold = 2.0
    """reading stops once the summed largest weights reach this (τ)"""
    merge: Quantity | None = None
    """bank tokens merged into one tape token (K); None is steps / threshold"""
    query_width: Width = 64
    """leading coordinates of query and bank that are compared (h)"""
    update: Update = "average"
    """next query: the mean of query and token, or the token"""
    ponder: Ponder = "gini"
    """length loss: 1 - Σw², 1 - max w, or the halting sum"""
    ponder_at_halt: bool = True
    """whether the halting step counts in that loss"""
    norm_scale: Positive = 1.0
    """initial scale of the LayerNorm that query and bank share"""
    norm_learns: bool = True
    """whether that norm's scale and shift are trained; a growing scale saturates the softmax and shortens tapes"""
    query_noise: NotNegative = 0.0
    """standard deviation of Gaussian noise added to the query in training"""
    bank_dropout: PartialShare = 0.0
    """fraction of bank tokens hidden at random in training"""
    choose: Choice = "highest"
    """which unread bank tokens a step reads; random and order are controls"""
    temperature: Positive | None = None
    """what scores are divided by before the softmax; None is √h"""
    norm: bool = True
    """whether query and bank share a LayerNorm"""
    sample_budgets: bool = False
    """in training, draw each sample's maximum tape length from 0 to steps, to train one model for every budget"""

    @property
    def merged(self) -> int:
        return merge_of(self.steps, self.threshold, self.merge)


def merge_of(steps: int, threshold: float, merge: int | None) -> int:
    """K, by default T / τ: the count for which a uniform softmax halts after exactly T steps."""
    if merge is not None:
        return merge
    if threshold == math.inf:
        raise ValueError(f"threshold is {threshold} and merge is None; steps / threshold gives 0, so pass merge >= 1")
    if not threshold > 0:
        raise ValueError(f"threshold is {threshold}; it must be positive")
    return max(1, int(steps / threshold + 1e-9))


@dataclass(frozen=True)
class Budget(Record):
    """The inference budget of a trained model; `adatape budget` finds one and stores it."""

    steps: QuantityOrZero
    """maximum number of tape tokens, or of repetitions of a block"""
    threshold: Threshold | None = None
    """halting threshold; None scales the trained one with steps"""


@dataclass(frozen=True)
class Bench(Record):
    """How models are timed against their reference."""

    against: str | None = None
    """the reference; default the plain ViT of each model's size and patch"""
    batch: tuple[Quantity, ...] | None = None
    """images per call; default 1 8 64 256, on a CPU 1 16"""
    mode: tuple[Literal["train", "inference"], ...] = ("train", "inference")
    """train is a whole step, inference a forward pass"""
    device: str = "auto"
    """cpu, cuda, or auto"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto is bf16 by autocast on a GPU, fp32 on a CPU"""
    compile: Literal["auto", "none", "default", "max-autotune"] = "auto"
    """how torch.compile is used; auto is default on a GPU, none on a CPU"""
    graphs: Literal["auto", "on", "off"] = "auto"
    """replay calls as CUDA graphs; auto: for inference with a batch of at most 8"""
    rounds: Annotated[int, Ge(0), Le(100_000)] = 7
    """rounds in which model and reference are timed in turn; 0 prints the rows stored in the file of --out"""
    seconds: Annotated[float, Gt(0), Le(3600)] = 0.5
    """duration of one round of one model"""
    data: bool = False
    """start each call from uint8 images on the host, cropped and flipped for training"""
    full_tape: bool = True
    """never halt early, so that times match the FLOPs in the same row"""


@dataclass(frozen=True)
class SequenceModel(Record):
    """A Transformer on symbols; with `reading` it sees only a tape of them, with `universal` it repeats one block."""

    width: Width = 192
    depth: Depth = 12
    heads: Width = 3
    reading: ReaderConfig | None = None
    reader: ReaderName = "adaptive"
    universal: Depth | None = None
    """maximum number of steps of a Universal Transformer, one block repeated by ACT"""
    layer: Annotated[int, Ge(0), Lt(1_000)] = 1
    """index of the block before which the tape is appended"""
    tape_ffn: TapeFFN = "append"
    """where tape tokens have a separate feed-forward: when appended, in the blocks, both or neither"""
    budget: Budget | None = None
    """budget set after loading the trained model; training ignores it"""


@dataclass(frozen=True)
class Parity(Record):
    """The parity task: is the number of ones among symbols -1, 0, 1 odd?"""

    source: ClassVar[str] = "parity"
    image_size: ClassVar[None] = None
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
    source: Source = "digits"
    path: str | None = None
    """the folder, or the shards as path or URL with {000..123} for numbers; digits needs none"""
    size: Pixels = 32
    """side of the model's square input, in pixels"""
    augment: Augment = Augment()
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
    def image_size(self) -> int | None:
        return self.size


@dataclass(frozen=True)
class UntrustedImages(Images):
    """Images named by a file that may come from someone else: only local files are read."""

    may_fetch: ClassVar[bool] = False


@dataclass(frozen=True)
class ImageModel(Record):
    """A model by its name in timm's registry, ours included."""

    may_fetch: ClassVar[bool] = True
    """whether training may start from `pretrained` weights"""
    name: str = "adatape_tiny_patch16_224"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """keywords of timm.create_model: patch_size, bank, bank_patch, steps, threshold, …"""
    pretrained: str | None = None
    """a weights file, or `hub` for timm's pretrained weights"""
    wrap: dict[str, Any] | None = None
    """keywords of adatape.wrap, to add a tape to a plain ViT"""
    trains: Literal["all", "tape"] = "all"
    """tape: train only the parameters that wrapping added, and the head"""
    budget: Budget | None = None
    """budget set after loading the trained model; training ignores it"""


@dataclass(frozen=True)
class UntrustedImageModel(ImageModel):
    """A model named by a file that may come from someone else: only the run's own weights are read."""

    may_fetch: ClassVar[bool] = False


@dataclass(frozen=True)
class Optimizer(Record):
    """AdamW with linear warm-up, then a constant or decaying rate."""

    lr: NotNegative = 3e-5
    warmup: CountOrZero = 1000
    steps: CountOrZero = 10_000
    batch: Quantity = 128
    """samples per step, over all processes"""
    weight_decay: NotNegative = 0.0
    """as in torch, multiplied by the rate; the paper's decoupled value is this times the peak rate"""
    decay: Literal["matrices", "all"] = "matrices"
    """matrices: without biases, norms, positions and class tokens; all: every tensor, as in the released code"""
    betas: tuple[PartialShare, PartialShare] = (0.9, 0.999)
    clip: Positive | None = 1.0
    """maximum gradient norm"""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    floor: NotNegative = 0.0
    """final rate of a schedule"""
    ema: PartialShare | None = None
    """decay of the exponential moving average of weights; if set, the average is evaluated and released"""


@dataclass(frozen=True)
class Engine(Record):
    """How a run is executed; these fields change results by rounding only."""

    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool | Literal["blocks"] = False
    """true: the whole forward; blocks: each block, which runs slower, but equal blocks of all models compile once"""
    accumulate: Quantity = 1
    """gradient accumulation: parts into which a process splits its batch, to save memory"""
    shard: bool = False
    """shard parameters over the processes (FSDP2) instead of copying them (DDP)"""
    workers: Annotated[int, Ge(0), Le(1024)] = 4
    """processes that decode images, per training process"""
    checkpoint_every: Count = 1000
    """steps between checkpoints"""
    log_every: Count = 50
    """steps between lines of metrics.jsonl"""
    deterministic: bool = False
    """bitwise reproducible, slower"""
    bad_steps: Count = 10
    """a run stops after this many steps in a row with a non-finite gradient; such steps change no weight"""


@dataclass(frozen=True)
class Experiment(Record):
    """Everything that a run depends on, stored as `config.json` in its folder."""

    recipe: FolderName
    data: Parity | Images
    model: SequenceModel | ImageModel
    optimizer: Optimizer
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """softmax cross-entropy, or sigmoid cross-entropy summed over classes"""
    ponder_weight: NotNegative = 0.0
    """weight of the length loss (λ)"""
    seed: Seed = 0
    evaluate_every: Count = 250
    """steps between evaluations"""
    stop_at: Share | None = None
    """a run stops once validation accuracy has reached this three times in a row"""
    engine: Engine = Engine()


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(kind: type[T], values: Any, source: str = "") -> T:
    """Inverse of `to_dict`, with limits checked; error messages start with `source`."""
    from adatape.validation import from_values

    return from_values(kind, values, source)
