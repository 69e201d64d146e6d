"""Settings as typed records; torch is not imported, so that `adatape --help` is quick."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt

from adatape.data_config import Images, Megapixel, Parity, Scenes
from adatape.limits import (
    Count,
    CountOrZero,
    Depth,
    FolderName,
    NotNegative,
    PartialShare,
    Positive,
    Quantity,
    QuantityOrZero,
    Record,
    Seed,
    Share,
    Threshold,
    Width,
)

T = TypeVar("T")


Update = Literal["average", "replace"]
Ponder = Literal["gini", "max", "collect"]
Choice = Literal["highest", "random", "order"]
ReaderName = Literal["adaptive", "parallel", "fixed", "act", "act-after-norm"]
TapeFFN = Literal["none", "append", "blocks", "append+blocks"]


SIZES: dict[str, dict[str, int]] = {  # of ViTs, by the word in their names
    "tiny": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
}


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
    """The inference budget of a trained model; `adatape budget RUN --store` finds one and stores it."""

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
    """replay calls as CUDA graphs; auto: with full tapes, for inference with a batch of at most 8"""
    rounds: Annotated[int, Ge(0), Le(100_000)] = 7
    """rounds in which model and reference are timed in turn; 0 prints the rows stored in the file of --out"""
    seconds: Annotated[float, Gt(0), Le(3600)] = 0.5
    """duration of one round of one model"""
    data: bool = False
    """start each call from uint8 images on the host, cropped and flipped for training"""
    full_tape: bool = True
    """after a model as it is built, time it once more so that it never halts and times match FLOPs"""


@dataclass(frozen=True)
class SequenceModel(Record):
    """A Transformer on symbols; with `reading` it sees only a tape of them, with `universal` it repeats one block."""

    width: Width = 192
    """coordinates of a token"""
    depth: Depth = 12
    """number of blocks"""
    heads: Width = 3
    """attention heads of a block"""
    reading: ReaderConfig | None = None
    """how the tape is read; None has no tape"""
    reader: ReaderName = "adaptive"
    """what reads the tape: the paper's reader (adaptive), one of its ablations (parallel, fixed), or ACT"""
    universal: Depth | None = None
    """maximum number of steps of a Universal Transformer, one block repeated by ACT"""
    layer: Annotated[int, Ge(0), Lt(1_000)] = 1
    """index of the block before which the tape is appended"""
    tape_ffn: TapeFFN = "append"
    """where tape tokens have a separate feed-forward: when appended, in the blocks, both or neither"""
    budget: Budget | None = None
    """budget set after loading the trained model; training ignores it"""


@dataclass(frozen=True)
class ImageModel(Record):
    """A model by its name in timm's registry, ours included."""

    may_fetch: ClassVar[bool] = True
    """whether training may start from `pretrained` weights"""
    name: str = "adatape_tiny_patch16_224"
    """as `adatape models` or timm.list_models() has it"""
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
    scaling: Literal["half", "backbone"] = "half"
    """half: pixels from -1 to 1; backbone: by the mean and standard deviation that the model was pretrained with"""


@dataclass(frozen=True)
class UntrustedImageModel(ImageModel):
    """A model named by a file that may come from someone else: only the run's own weights are read."""

    may_fetch: ClassVar[bool] = False


@dataclass(frozen=True)
class Optimizer(Record):
    """AdamW with linear warm-up, then a constant or decaying rate."""

    lr: NotNegative = 3e-5
    """peak learning rate"""
    warmup: CountOrZero = 1000
    """training steps in which the rate rises to its peak"""
    steps: CountOrZero = 10_000
    """training steps, each on one batch"""
    batch: Quantity = 128
    """samples per step, over all processes"""
    weight_decay: NotNegative = 0.0
    """weight decay as in torch, multiplied by the rate; the paper's decoupled value is this times the peak rate"""
    decay: Literal["matrices", "all"] = "matrices"
    """matrices: without biases, norms, positions and class tokens; all: every tensor, as in the released code"""
    betas: tuple[PartialShare, PartialShare] = (0.9, 0.999)
    """decay rates of AdamW's moments"""
    clip: Positive | None = 1.0
    """maximum gradient norm"""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """how the rate falls after warm-up"""
    floor: NotNegative = 0.0
    """final rate of a schedule"""
    ema: PartialShare | None = None
    """decay of the exponential moving average of weights; if set, the average is evaluated and released"""
    new_lr: NotNegative | None = None
    """learning rate of the parameters that wrapping added, and of the head; None is lr"""


@dataclass(frozen=True)
class Engine(Record):
    """How a run is executed; these fields change results by rounding only."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 is by autocast; weights stay fp32"""
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
    """its name, by which the default run folder is called"""
    data: Parity | Images | Scenes | Megapixel
    """what is trained and tested on"""
    model: SequenceModel | ImageModel
    """what is trained"""
    optimizer: Optimizer
    """how it is trained"""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """softmax cross-entropy, or sigmoid cross-entropy summed over classes"""
    ponder_weight: NotNegative = 0.0
    """weight of the length loss (λ)"""
    seed: Seed = 0
    """seed of weights, order of samples, augmentation and noise"""
    evaluate_every: Count = 250
    """steps between evaluations"""
    stop_at: Share | None = None
    """a run stops once validation accuracy (several labels: mean AP) has reached this three times in a row"""
    engine: Engine = Engine()
    """how it is executed"""


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(kind: type[T], values: Any) -> T:
    """Inverse of `to_dict`, with limits checked."""
    from adatape.validation import from_values

    return from_values(kind, values)
