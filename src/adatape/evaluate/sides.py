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

from adatape.data.augment import vary
from adatape.data.batch import Batch
from adatape.data.loaders import scaled
from adatape.evaluate.speed import Call, Side
from adatape.graph import WARM_UP_CALLS, Tensors, captured, room_to_compile
from adatape.keyed import keys_of
from adatape.losses import class_loss
from adatape.models.adaptive import Adaptive
from adatape.recipes.imagenet import INCEPTION
from adatape.records import Output

Mode = Literal["train", "inference"]
Precision = Literal["fp32", "bf16"]
Compile = Literal["none", "default", "max-autotune"]

PONDER_WEIGHT = 0.01
RATE = 1e-5
SIDES_COMPILED = 64


class How(NamedTuple):
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


def clear() -> None:
    """Gives back what earlier sides held: memory, and what dynamo compiled for them."""
    if "torch._dynamo" in sys.modules:  # where nothing was compiled, the import alone would take a second
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def build_side(name: str, options: Mapping[str, Any], how: How) -> Side:
    """A model of timm's registry with its compiled and warmed-up call: all that must not be timed happens here."""
    before = _settled(how) if how.on_gpu else 0
    torch.manual_seed(0)
    model = timm.create_model(name, **options).to(how.device).train(how.mode == "train")
    if how.full_tape:
        let_nothing_halt(model)
    feed = feeder(input_shape(model), model.num_classes, how)
    step = training_step(model, how) if how.mode == "train" else inference(model, how)
    with _compiling(how):
        for _ in range(WARM_UP_CALLS):
            step(*feed())
        peak = _peak(lambda: step(*feed()), how) - before if how.on_gpu and how.mode == "train" else None
        run = captured(step) if how.graphs else step
        for _ in range(WARM_UP_CALLS + 1 if how.graphs else 0):
            run(*feed())
    how.synchronize()
    return Side(lambda: run(*feed()), peak)


def _compiling(how: How) -> Any:
    if how.compile == "none":
        return nullcontext()
    return room_to_compile(SIDES_COMPILED)


def _compiled(model: nn.Module, how: How) -> Callable[..., Any]:
    if how.compile == "none":
        return model
    # CUDA graphs are a choice of their own, the same for both ways to compile.
    mode = "max-autotune-no-cudagraphs" if how.compile == "max-autotune" else None
    return torch.compile(model, dynamic=False, mode=mode)


def _autocast(how: How) -> Any:
    return torch.autocast(torch.device(how.device).type, torch.bfloat16, enabled=how.precision == "bf16")


def _settled(how: How) -> int:
    """Bytes in use before a side is built; nothing that is not its own may come or go after this."""
    torch.set_float32_matmul_precision("high")  # as in training
    square = torch.ones(16, 16, device=how.device)
    _ = square @ square  # cuBLAS takes memory of its own at its first product
    gc.collect()
    return torch.cuda.memory_allocated(how.device)


def _peak(call: Call, how: How) -> int:
    torch.cuda.synchronize(how.device)
    torch.cuda.reset_peak_memory_stats(how.device)
    call()
    torch.cuda.synchronize(how.device)
    return torch.cuda.max_memory_allocated(how.device)


def inference(model: nn.Module, how: How) -> Callable[..., Tensors]:
    forward = _compiled(model, how)

    @torch.no_grad()
    def answer(x: Float[Tensor, "n c h w"]) -> Tensors:
        with _autocast(how):
            return (forward(x),)

    return answer


def training_step(model: nn.Module, how: How) -> Callable[..., Tensors]:
    """Forward, loss, backward, fused AdamW; a model of ours draws its noise by key, as in `adatape train`."""
    forward, ours = _compiled(model, how), isinstance(model, Adaptive)
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=RATE, fused=True, capturable=how.on_gpu)

    def step(x: Float[Tensor, "n c h w"], target: Int[Tensor, "n"], key: Int[Tensor, "n"]) -> Tensors:
        with _autocast(how):
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


def feeder(shape: tuple[int, int, int], classes: int, how: How) -> Callable[[], Tensors]:
    """What a call takes: one batch that lies on the device, or, with data, made of bytes on the host each time."""
    position = torch.arange(how.batch)
    label, key = (position % classes).to(how.device), keys_of(0, position).to(how.device)
    make = _from_host(shape, key, how) if how.data else _resident(torch.randn(how.batch, *shape, device=how.device))
    return (lambda: Batch(make(), label, key)) if how.mode == "train" else (lambda: (make(),))


def _resident(x: Tensor) -> Callable[[], Tensor]:
    return lambda: x


def _from_host(shape: tuple[int, int, int], key: Tensor, how: How) -> Callable[[], Tensor]:
    """Copied to the device, there cropped, flipped and scaled for training, scaled for inference."""
    pixels = torch.randint(256, (how.batch, *shape), dtype=torch.uint8)
    pixels = pixels.pin_memory() if how.on_gpu else pixels

    def prepared(bytes_: Tensor) -> Tensors:
        return (vary(bytes_, key, INCEPTION, shape[-1]) if how.mode == "train" else scaled(bytes_),)

    prepare = captured(prepared) if how.on_gpu else prepared  # as the loader that varies on the device does
    return lambda: prepare(pixels.to(how.device, non_blocking=True))[0]


def input_shape(model: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model takes."""
    embed: Any = getattr(getattr(model, "vit", model), "patch_embed", None)
    if embed is None or getattr(embed, "img_size", None) is None:
        return tuple(model.pretrained_cfg["input_size"])  # type: ignore[index]
    return (embed.proj.in_channels, *embed.img_size)


def let_nothing_halt(model: nn.Module) -> None:
    """Every sample takes all that its model's budget allows, which is what the bound on its FLOPs counts."""
    if isinstance(model, Adaptive):
        model.never_halt()
