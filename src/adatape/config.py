"""Settings as typed records, free of torch so that the command line answers at once."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

Update = Literal["average", "replace"]
Ponder = Literal["gini", "max", "collect"]
Choice = Literal["highest", "random", "order"]
ReaderName = Literal["adaptive", "selective", "parallel", "fixed", "act", "act-after-norm"]
TapeFFN = Literal["none", "append", "blocks", "append+blocks"]


@dataclass(frozen=True)
class Reading:
    """How a tape is read; the paper's letters are T, τ, K, h and λ."""

    steps: int = 10
    """most tape tokens per sample (T)"""
    threshold: float = 2.0
    """reading stops once the summed largest weights reach this (τ)"""
    merge: int | None = None
    """bank tokens merged into one tape token (K); None is steps / threshold"""
    query_width: int = 64
    """leading coordinates of query and bank that are compared (h)"""
    update: Update = "average"
    """next query: mean of query and token, or the token alone"""
    ponder: Ponder = "gini"
    """length loss: 1 - Σw², 1 - max w, or the halting sum"""
    ponder_at_halt: bool = True
    """whether the halting step counts in that loss"""
    norm_scale: float = 1.0
    """initial scale of the LayerNorm that query and bank share"""
    norm_learns: bool = True
    """whether that norm's scale and shift are trained; a scale that grows saturates the softmax, and tapes get short"""
    noise: float = 0.0
    """standard deviation of the noise on the training query"""
    hide: float = 0.0
    """share of the bank hidden at random while training"""
    choose: Choice = "highest"
    """which bank tokens a step takes; the others are controls"""
    temperature: float | None = None
    """what scores are divided by before the softmax; None is √h"""
    norm: bool = True
    """whether query and bank pass their shared LayerNorm"""
    sample_budgets: bool = False
    """draw each training sample's most tokens from 0 to steps, so that one model is good at every budget"""
    least: int = 0
    """the fewest that are drawn, and that a doubting model reads"""
    uncut: float = 0.0
    """share of training samples that may read all steps even so"""
    floor: float = 0.5
    """the least gate that the selective reader finds worth reading"""

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
class Budget:
    """What a trained model may spend; `adatape budget` finds one and stores it."""

    steps: int
    """most tape tokens, or most repetitions of a block"""
    threshold: float | None = None
    """where reading stops; None scales the trained one with steps"""


@dataclass(frozen=True)
class Bench:
    """How models are timed against their reference."""

    against: str | None = None
    """the reference; default the plain ViT of each model's size and patch"""
    batch: tuple[int, ...] | None = None
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
    rounds: int = 7
    """turns that every side gets; 0 shows what the file of --out holds"""
    seconds: float = 0.5
    """length of one turn"""
    data: bool = False
    """begin each call with bytes on the host, and crop and flip them for training"""
    full_tape: bool = True
    """let nothing halt early, so that times belong to the FLOPs beside them"""


@dataclass(frozen=True)
class SequenceModel:
    """A Transformer on symbols; `reading` shows them only through a tape, `universal` repeats one block."""

    width: int = 192
    depth: int = 12
    heads: int = 3
    reading: Reading | None = None
    reader: ReaderName = "adaptive"
    universal: int | None = None
    """most steps of a Universal Transformer, one block that ACT repeats"""
    layer: int = 1
    """block index before which the tape joins"""
    tape_ffn: TapeFFN = "append"
    """where tape tokens take a feed-forward of their own"""
    budget: Budget | None = None
    """what the trained model is loaded with; training ignores it"""


@dataclass(frozen=True)
class Parity:
    """Is the number of ones among symbols -1, 0, 1 odd?"""

    length: int = 32
    """symbols per sequence (N)"""
    held_out: int = 6400
    """sequences in the fixed test set, and in the validation set that stops a run"""


Crop = Literal["none", "inception", "pad"]
Source = Literal["digits", "cifar10", "cifar100", "pets", "fashion", "imagenet", "folder", "arrays", "shards"]


@dataclass(frozen=True)
class Augment:
    """How a training image is varied; the defaults leave it as it is."""

    crop: Crop = "none"
    """inception: a box of random area and aspect, resized; pad: the frame moved within a border of `pad`"""
    area: tuple[float, float] = (0.05, 1.0)
    """least and largest share of the image that an inception crop keeps"""
    pad: int = 4
    """pixels on each side of a padded crop"""
    flip: bool = False
    """mirror every other image"""
    randaug: int = 0
    """operations of RandAugment per image (the paper's first figure)"""
    magnitude: float = 10.0
    """their strength on the paper's scale, where 10 is full (its second figure)"""
    jitter: float = 0.0
    """standard deviation of that strength from image to image"""
    mixup: float = 0.0
    """α of the Beta distribution that mixes an image with its neighbour in the batch"""
    cutmix: float = 0.0
    """α of the share that a pasted box of the neighbour leaves; with mixup too, either half of the steps"""
    erase: float = 0.0
    """probability of filling a random box with noise"""
    smoothing: float = 0.0
    """share of the label that is spread over all classes"""
    repeats: int = 1
    """times that an image occurs in one batch, differently varied"""


@dataclass(frozen=True)
class Images:
    """A labelled set of images."""

    source: Source = "digits"
    path: str | None = None
    """the folder, or the shards as path or URL with {000..123} for numbers; digits needs none"""
    size: int = 32
    """side of the square that the model sees"""
    augment: Augment = Augment()
    validate_on: float | None = None
    """share of the training set kept for validation; None validates on the test set"""
    resident: bool | None = None
    """whole set on the device; None decides by the kind of set"""
    download: bool = False
    """let torchvision fetch the set"""
    broken: float = 0.02
    """largest share of unreadable images, each replaced by its successor, before a run stops"""
    modes: Literal["convert", "refuse"] = "convert"
    """images that are not RGB are converted and counted, or refused"""
    classes: int | None = None
    """for shards, which do not say"""
    samples: int | None = None
    """training images of shards, which do not say"""
    exif_orientation: bool = False
    """turn images as their EXIF says; recipes do, and a config.json without this field is of a run that did not"""


@dataclass(frozen=True)
class ImageModel:
    """A model by its name in timm's registry, ours included."""

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
class Optimizer:
    """AdamW, warmed up linearly and then constant or decaying to zero."""

    lr: float = 3e-5
    warmup: int = 1000
    steps: int = 10_000
    batch: int = 128
    """samples per step, over all processes"""
    weight_decay: float = 0.0
    """torch's, which the rate multiplies; the paper's decoupled figure is this times the peak rate"""
    decay: Literal["matrices", "all"] = "matrices"
    """matrices: not biases, norms, positions and class tokens; all: every tensor, as the released code"""
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float | None = 1.0
    """largest gradient norm"""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    floor: float = 0.0
    """rate that a schedule ends at"""
    ema: float | None = None
    """decay of the moving average of weights, which is then what is scored and released"""


@dataclass(frozen=True)
class Engine:
    """How a run is carried out; none of it changes what is computed beyond rounding."""

    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool | Literal["blocks"] = False
    """the whole step's forward, or block by block: slower to run, but alike blocks of all models are compiled once"""
    accumulate: int = 1
    """parts that a process's share of a batch is computed in, to save memory"""
    shard: bool = False
    """spread parameters over the processes (FSDP2) instead of copying them (DDP)"""
    workers: int = 4
    """processes that decode images, per training process"""
    checkpoint_every: int = 1000
    """steps between checkpoints"""
    log_every: int = 50
    """steps between lines of metrics.jsonl"""
    deterministic: bool = False
    """repeat to the bit, slower"""
    bad_steps: int = 10
    """steps in a row without a finite gradient, none of which moves a weight, before a run stops"""


@dataclass(frozen=True)
class Experiment:
    """All that a run depends on; `config.json` of its folder."""

    recipe: str
    data: Parity | Images
    model: SequenceModel | ImageModel
    optimizer: Optimizer
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """cross-entropy over classes, or of each class by itself, summed"""
    ponder_weight: float = 0.0
    """weight of the length loss (λ)"""
    seed: int = 0
    evaluate_every: int = 250
    """steps between evaluations"""
    stop_at: float | None = None
    """validation accuracy that ends a run when met three times in a row"""
    engine: Engine = Engine()


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(kind: type[T], values: dict[str, Any]) -> T:
    """The record that `to_dict` wrote; an unknown name is an error that lists the known ones."""
    fields = _names(kind)
    unknown = sorted(set(values) - fields)
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}; it has {', '.join(sorted(fields))}")
    missing = sorted(_required(kind) - set(values))
    if missing:
        raise ValueError(f"{kind.__name__} lacks {', '.join(missing)}")
    hints = get_type_hints(kind)
    return kind(**{name: _typed(name, hints[name], value) for name, value in values.items()})


def _typed(name: str, hint: Any, value: Any) -> Any:
    """The value as its field wants it: records from dicts, tuples from lists, whole numbers where floats are."""
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return from_dict(hint, value)  # type: ignore[arg-type]
    if get_origin(hint) is tuple and isinstance(value, list | tuple) and len(value) == len(get_args(hint)):
        return tuple(_typed(name, each, part) for each, part in zip(get_args(hint), value, strict=True))
    if get_origin(hint) in (Union, UnionType):
        return _one_of(name, hint, value)
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(str, get_args(hint)))}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wanted = get_origin(hint) or hint
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ValueError(f"{name} is {value!r}; it must be {_words(hint)}")
    return value


def _one_of(name: str, hint: Any, value: Any) -> Any:
    """Of several records the one that shares most names with the value; else the first kind that takes it."""
    options = get_args(hint)
    records = [option for option in options if dataclasses.is_dataclass(option)]
    if records and isinstance(value, dict):
        return from_dict(max(records, key=lambda record: len(_names(record) & set(value))), value)  # type: ignore[arg-type]
    errors = []
    for option in options:
        try:
            return _typed(name, option, value)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError(f"{name} is {value!r}; it must be {_words(hint)}") if len(errors) > 1 else ValueError(errors[0])


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_words(option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        return f"{len(get_args(hint))} of {_words(get_args(hint)[0])}"
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _names(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _required(kind: Any) -> set[str]:
    empty = dataclasses.MISSING
    return {f.name for f in dataclasses.fields(kind) if f.default is empty and f.default_factory is empty}
