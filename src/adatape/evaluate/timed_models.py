"""One side of a comparison on the clock: a model with its input, compiled, warmed up, ready to be called."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import timm
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from adatape.counter_rng import keys_of
from adatape.cuda_graphs import WARM_UP_CALLS, Tensors, cuda_graphed, raised_recompile_limit
from adatape.data.augment import augment_images, scaled
from adatape.data.batch import Batch
from adatape.evaluate.speed import Call, TimedModel
from adatape.losses import class_loss
from adatape.models.base import Adaptive
from adatape.recipes.imagenet import INCEPTION
from adatape.records import Output

Mode = Literal["train", "inference"]
Precision = Literal["fp32", "bf16"]
Compile = Literal["none", "default", "max-autotune"]

PONDER_WEIGHT = 0.01
RATE = 1e-5
MODELS_COMPILED = 64


class TimingSettings(NamedTuple):
    """How all sides of a comparison run."""

    mode: Mode = "inference"
    batch: int = 1
    device: str = "cpu"
    precision: Precision = "fp32"
    compile: Compile = "none"
    graphs: bool = False  # replay each call as one CUDA graph
    data: bool = False  # begin each call with bytes on the host
    full_tape: bool = True  # nothing stops early

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def free_memory() -> None:
    """Gives back what earlier sides held: memory, and what dynamo compiled for them."""
    if "torch._dynamo" in sys.modules:  # where nothing was compiled, the import alone would take a second
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def build_timed(name: str, options: Mapping[str, Any], timing: TimingSettings) -> TimedModel:
    """A model of timm's registry with its compiled and warmed-up call: all that must not be timed happens here."""
    before = _memory_baseline(timing) if timing.on_gpu else 0
    torch.manual_seed(0)
    model = timm.create_model(name, **options).to(timing.device).train(timing.mode == "train")
    if timing.full_tape:
        disable_halting(model)
    feed = feeder(input_shape(model), model.num_classes, timing)
    step = training_step(model, timing) if timing.mode == "train" else inference(model, timing)
    with nullcontext() if timing.compile == "none" else raised_recompile_limit(MODELS_COMPILED):
        for _ in range(WARM_UP_CALLS):
            step(*feed())
        peak = _peak(lambda: step(*feed()), timing) - before if timing.on_gpu and timing.mode == "train" else None
        run = cuda_graphed(step) if timing.graphs else step
        for _ in range(WARM_UP_CALLS + 1 if timing.graphs else 0):
            run(*feed())
    timing.synchronize()
    return TimedModel(lambda: run(*feed()), peak)


def _compiled(model: nn.Module, timing: TimingSettings) -> Callable[..., Any]:
    if timing.compile == "none":
        return model
    # CUDA graphs are a choice of their own, the same for both ways to compile.
    mode = "max-autotune-no-cudagraphs" if timing.compile == "max-autotune" else None
    return torch.compile(model, dynamic=False, mode=mode)


def _autocast(timing: TimingSettings) -> Any:
    return torch.autocast(torch.device(timing.device).type, torch.bfloat16, enabled=timing.precision == "bf16")


def _memory_baseline(timing: TimingSettings) -> int:
    """Bytes in use before a side is built; nothing that is not its own may come or go after this."""
    torch.set_float32_matmul_precision("high")  # as in training
    square = torch.ones(16, 16, device=timing.device)
    _ = square @ square  # cuBLAS takes memory of its own at its first product
    gc.collect()
    return torch.cuda.memory_allocated(timing.device)


def _peak(call: Call, timing: TimingSettings) -> int:
    torch.cuda.synchronize(timing.device)
    torch.cuda.reset_peak_memory_stats(timing.device)
    call()
    torch.cuda.synchronize(timing.device)
    return torch.cuda.max_memory_allocated(timing.device)


def inference(model: nn.Module, timing: TimingSettings) -> Callable[..., Tensors]:
    forward = _compiled(model, timing)

    @torch.no_grad()
    def answer(x: Float[Tensor, "n c h w"]) -> Tensors:
        with _autocast(timing):
            return (forward(x),)

    return answer


def training_step(model: nn.Module, timing: TimingSettings) -> Callable[..., Tensors]:
    """Forward, loss, backward, fused AdamW; a model of ours draws its noise by key, as in `adatape train`."""
    forward, ours = _compiled(model, timing), isinstance(model, Adaptive)
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=RATE, fused=True, capturable=timing.on_gpu)

    def step(x: Float[Tensor, "n c h w"], target: Int[Tensor, "n"], key: Int[Tensor, "n"]) -> Tensors:
        with _autocast(timing):
            given = forward(x, output=True, key=key) if ours else forward(x)
        loss = loss_of(model, given, target)
        loss.backward()
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return (loss.detach(),)

    return step


def loss_of(model: Any, given: Tensor | Output, target: Int[Tensor, "n"]) -> Float[Tensor, ""]:
    """Of a model of ours its own, with the length loss; of another's logits the cross-entropy."""
    if isinstance(given, Tensor):
        return class_loss(given, target)
    loss: Tensor = model.loss(given, target, PONDER_WEIGHT)
    return loss


def feeder(shape: tuple[int, int, int], classes: int, timing: TimingSettings) -> Callable[[], Tensors]:
    """What a call takes: one batch that lies on the device, or, with data, made of bytes on the host each time."""
    position = torch.arange(timing.batch)
    label, key = (position % classes).to(timing.device), keys_of(0, position).to(timing.device)
    resident = torch.empty(0) if timing.data else torch.randn(timing.batch, *shape, device=timing.device)
    make = _from_host(shape, key, timing) if timing.data else lambda: resident
    return (lambda: Batch(make(), label, key)) if timing.mode == "train" else (lambda: (make(),))


def _from_host(shape: tuple[int, int, int], key: Tensor, timing: TimingSettings) -> Callable[[], Tensor]:
    """Copied to the device, there cropped, flipped and scaled for training, scaled for inference."""
    pixels = torch.randint(256, (timing.batch, *shape), dtype=torch.uint8)
    pixels = pixels.pin_memory() if timing.on_gpu else pixels

    def prepared(bytes_: Tensor) -> Tensors:
        return (augment_images(bytes_, key, INCEPTION, shape[-1]) if timing.mode == "train" else scaled(bytes_),)

    prepare = cuda_graphed(prepared) if timing.on_gpu else prepared  # as the loader that varies on the device does
    return lambda: prepare(pixels.to(timing.device, non_blocking=True))[0]


def input_shape(model: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model takes."""
    embed: Any = getattr(getattr(model, "vit", model), "patch_embed", None)
    if embed is None or getattr(embed, "img_size", None) is None:
        return tuple(model.pretrained_cfg["input_size"])  # type: ignore[index]
    return (embed.proj.in_channels, *embed.img_size)


def disable_halting(model: nn.Module) -> None:
    """Every sample takes all that its model's budget allows, which is what the bound on its FLOPs counts."""
    if isinstance(model, Adaptive):
        model.never_halt()
