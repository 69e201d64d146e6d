"""Settings as typed records, free of torch so that the command line answers at once."""

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


# Limits of fields and options, which `validation` checks; NaN passes none. Upper limits stop what could only be a slip
# before it fills the memory or runs for ever.
FolderName = Annotated[str, Predicate(is_folder_name)]
Count = Annotated[int, Ge(1), Le(10**12)]
Whole = Annotated[int, Ge(0), Le(10**12)]
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
NotNegative = Annotated[float, Ge(0), Le(1e30)]  # what float32 can hold, with room to multiply
Threshold = Annotated[float, Gt(0)]  # infinity is one that is never reached

Update = Literal["average", "replace"]
Ponder = Literal["gini", "max", "collect"]
Choice = Literal["highest", "random", "order"]
ReaderName = Literal["adaptive", "parallel", "fixed", "act", "act-after-norm"]
TapeFFN = Literal["none", "append", "blocks", "append+blocks"]


class Record:
    """Settings that are read by name; a name that a record does not have is an error."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


@dataclass(frozen=True)
class Reading(Record):
    """How a tape is read; the paper's letters are T, τ, K, h and λ."""

    steps: Quantity = 10
    """most tape tokens per sample (T)"""
    threshold: Threshold = 2.0
    """reading stops once the summed largest weights reach this (τ)"""
    merge: Quantity | None = None
    """bank tokens merged into one tape token (K); None is steps / threshold"""
    query_width: Width = 64
    """leading coordinates of query and bank that are compared (h)"""
    update: Update = "average"
    """next query: mean of query and token, or the token alone"""
    ponder: Ponder = "gini"
    """length loss: 1 - Σw², 1 - max w, or the halting sum"""
    ponder_at_halt: bool = True
    """whether the halting step counts in that loss"""
    norm_scale: Positive = 1.0
    """initial scale of the LayerNorm that query and bank share"""
    norm_learns: bool = True
    """whether that norm's scale and shift are trained; a scale that grows saturates the softmax, and tapes get short"""
    noise: NotNegative = 0.0
    """standard deviation of the noise on the training query"""
    hide: PartialShare = 0.0
    """share of the bank hidden at random while training"""
    choose: Choice = "highest"
    """which bank tokens a step takes; the others are controls"""
    temperature: Positive | None = None
    """what scores are divided by before the softmax; None is √h"""
    norm: bool = True
    """whether query and bank pass their shared LayerNorm"""
    sample_budgets: bool = False
    """draw each training sample's most tokens from 0 to steps, so that one model is good at every budget"""

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
    """What a trained model may spend; `adatape budget` finds one and stores it."""

    steps: QuantityOrZero
    """most tape tokens, or most repetitions of a block"""
    threshold: Threshold | None = None
    """where reading stops; None scales the trained one with steps"""


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
    """replay calls as CUDA graphs; auto does so for inference of at most 8 images"""
    rounds: Annotated[int, Ge(0), Le(100_000)] = 7
    """turns that every side gets; 0 shows what the file of --out holds"""
    seconds: Annotated[float, Gt(0), Le(3600)] = 0.5
    """length of one turn"""
    data: bool = False
    """begin each call with bytes on the host, and crop and flip them for training"""
    full_tape: bool = True
    """let nothing halt early, so that times belong to the FLOPs beside them"""


@dataclass(frozen=True)
class SequenceModel(Record):
    """A Transformer on symbols; `reading` shows them only through a tape, `universal` repeats one block."""

    width: Width = 192
    depth: Depth = 12
    heads: Width = 3
    reading: Reading | None = None
    reader: ReaderName = "adaptive"
    universal: Depth | None = None
    """most steps of a Universal Transformer, one block that ACT repeats"""
    layer: Annotated[int, Ge(0), Lt(1_000)] = 1
    """block index before which the tape joins"""
    tape_ffn: TapeFFN = "append"
    """where tape tokens take a feed-forward of their own"""
    budget: Budget | None = None
    """what the trained model is loaded with; training ignores it"""


@dataclass(frozen=True)
class Parity(Record):
    """Is the number of ones among symbols -1, 0, 1 odd?"""

    length: Width = 32
    """symbols per sequence (N)"""
    held_out: Annotated[int, Ge(1), Le(10_000_000)] = 6400
    """sequences in the fixed test set, and in the validation set that stops a run"""


Crop = Literal["none", "inception", "pad"]
Source = Literal[
    "digits", "haystack", "cifar10", "cifar100", "pets", "fashion", "imagenet", "folder", "arrays", "shards"
]


@dataclass(frozen=True)
class Augment(Record):
    """How a training image is varied; the defaults leave it as it is."""

    crop: Crop = "none"
    """inception: a box of random area and aspect, resized; pad: the frame moved within a border of `pad`"""
    area: tuple[Annotated[float, Gt(0), Le(1)], Annotated[float, Gt(0), Le(1)]] = (0.05, 1.0)
    """least and largest share of the image that an inception crop keeps"""
    pad: Annotated[int, Ge(0), Le(4096)] = 4
    """pixels on each side of a padded crop"""
    flip: bool = False
    """mirror every other image"""
    randaug: Annotated[int, Ge(0), Le(100)] = 0
    """operations of RandAugment per image (the paper's first figure)"""
    magnitude: Annotated[float, Ge(0), Le(100)] = 10.0
    """their strength on the paper's scale, where 10 is full (its second figure)"""
    jitter: Annotated[float, Ge(0), Le(100)] = 0.0
    """standard deviation of that strength from image to image"""
    mixup: Annotated[float, Ge(0), Le(1000)] = 0.0
    """α of the Beta distribution that mixes an image with its neighbour in the batch"""
    cutmix: Annotated[float, Ge(0), Le(1000)] = 0.0
    """α of the share that a pasted box of the neighbour leaves; with mixup too, either half of the steps"""
    erase: Share = 0.0
    """probability of filling a random box with noise"""
    smoothing: PartialShare = 0.0
    """share of the label that is spread over all classes"""
    repeats: Quantity = 1
    """times that an image occurs in one batch, differently varied"""


@dataclass(frozen=True)
class Images(Record):
    """A labelled set of images."""

    may_fetch: ClassVar[bool] = True
    """whether it may be downloaded or lie at a URL"""
    source: Source = "digits"
    path: str | None = None
    """the folder, or the shards as path or URL with {000..123} for numbers; digits needs none"""
    size: Pixels = 32
    """side of the square that the model sees"""
    augment: Augment = Augment()
    validate_on: InnerShare | None = None
    """share of the training set kept for validation; None validates on the test set"""
    resident: bool | None = None
    """whole set on the device; None decides by the kind of set"""
    download: bool = False
    """let torchvision fetch the set"""
    broken: Share = 0.02
    """largest share of unreadable images, each replaced by its successor, before a run stops"""
    modes: Literal["convert", "refuse"] = "convert"
    """images that are not RGB are converted and counted, or refused"""
    classes: Annotated[int, Ge(1), Le(10_000_000)] | None = None
    """for shards, which do not say"""
    samples: Count | None = None
    """training images of shards, which do not say"""
    exif_orientation: bool = False
    """turn images as their EXIF says; recipes do, and a config.json without this field is of a run that did not"""


@dataclass(frozen=True)
class UntrustedImages(Images):
    """Images as a file names them, which may come from someone else: read from this disk, and nothing more."""

    may_fetch: ClassVar[bool] = False


@dataclass(frozen=True)
class ImageModel(Record):
    """A model by its name in timm's registry, ours included."""

    may_fetch: ClassVar[bool] = True
    """whether training may begin from weights that lie elsewhere"""
    name: str = "adatape_tiny_patch16_224"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """keywords of timm.create_model: patch_size, bank, bank_patch, steps, threshold, …"""
    pretrained: str | None = None
    """a file of weights, or `hub` for those that timm knows"""
    wrap: dict[str, Any] | None = None
    """keywords of adatape.wrap, where a plain ViT is to read a tape"""
    trains: Literal["all", "tape"] = "all"
    """tape: only what wrapping added, and the head"""
    budget: Budget | None = None
    """what the trained model is loaded with; training ignores it"""


@dataclass(frozen=True)
class UntrustedImageModel(ImageModel):
    """A model as a file names it, which may come from someone else: no weights are read but the run's own."""

    may_fetch: ClassVar[bool] = False


@dataclass(frozen=True)
class Optimizer(Record):
    """AdamW, warmed up linearly and then constant or decaying to zero."""

    lr: NotNegative = 3e-5
    warmup: Whole = 1000
    steps: Whole = 10_000
    batch: Quantity = 128
    """samples per step, over all processes"""
    weight_decay: NotNegative = 0.0
    """torch's, which the rate multiplies; the paper's decoupled figure is this times the peak rate"""
    decay: Literal["matrices", "all"] = "matrices"
    """matrices: not biases, norms, positions and class tokens; all: every tensor, as the released code"""
    betas: tuple[PartialShare, PartialShare] = (0.9, 0.999)
    clip: Positive | None = 1.0
    """largest gradient norm"""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    floor: NotNegative = 0.0
    """rate that a schedule ends at"""
    ema: PartialShare | None = None
    """decay of the moving average of weights, which is then what is scored and released"""


@dataclass(frozen=True)
class Engine(Record):
    """How a run is carried out; none of it changes what is computed beyond rounding."""

    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool | Literal["blocks"] = False
    """the whole step's forward, or block by block: slower to run, but alike blocks of all models are compiled once"""
    accumulate: Quantity = 1
    """parts that a process's share of a batch is computed in, to save memory"""
    shard: bool = False
    """spread parameters over the processes (FSDP2) instead of copying them (DDP)"""
    workers: Annotated[int, Ge(0), Le(1024)] = 4
    """processes that decode images, per training process"""
    checkpoint_every: Count = 1000
    """steps between checkpoints"""
    log_every: Count = 50
    """steps between lines of metrics.jsonl"""
    deterministic: bool = False
    """repeat to the bit, slower"""
    bad_steps: Count = 10
    """steps in a row without a finite gradient, none of which moves a weight, before a run stops"""


@dataclass(frozen=True)
class Experiment(Record):
    """All that a run depends on; `config.json` of its folder."""

    recipe: FolderName
    data: Parity | Images
    model: SequenceModel | ImageModel
    optimizer: Optimizer
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """cross-entropy over classes, or of each class by itself, summed"""
    ponder_weight: NotNegative = 0.0
    """weight of the length loss (λ)"""
    seed: Seed = 0
    evaluate_every: Count = 250
    """steps between evaluations"""
    stop_at: Share | None = None
    """validation accuracy that ends a run when met three times in a row"""
    engine: Engine = Engine()


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(kind: type[T], values: Any, source: str = "") -> T:
    """The record that `to_dict` wrote, its limits held; `source` is what an error names first."""
    from adatape.validation import from_values

    return from_values(kind, values, source)
