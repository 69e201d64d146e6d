"""Your own images: training from scratch, or fine-tuning a pretrained ViT with a tape."""

from __future__ import annotations

from typing import Any, Literal

from adatape.config import Engine, Experiment, ImageModel, Optimizer
from adatape.data_config import Augment, Images, Source
from adatape.limits import CountOrZero, NotNegative, Pixels, Quantity, Seed
from adatape.recipes.systems import Size, System, image_model, ponder_weight

GENTLE = Augment(crop="inception", area=(0.3, 1.0), flip=True, randaug=2, magnitude=5.0, mixup=0.2, smoothing=0.1)


def images(
    path: str,
    source: Source = "folder",
    system: System = "adatape",
    size: Size = "small",
    pixels: Pixels = 224,
    patch: Pixels = 16,
    bank_patch: Pixels = 8,
    steps: CountOrZero = 20_000,
    batch: Quantity = 256,
    lr: NotNegative = 1e-3,
    weight_decay: NotNegative = 0.1,
    seed: Seed = 0,
) -> Experiment:
    """Any system on your own images, from scratch: class folders, arrays, or a data set of torchvision.

    adatape train images --path my/photos --size tiny --pixels 64 --patch 8 --bank-patch 4 --steps 2000
    """
    return Experiment(
        recipe="images",
        data=Images(source, path, pixels, GENTLE, exif_orientation=True),
        model=image_model(system, size, patch, bank_patch),
        optimizer=Optimizer(lr, steps // 20, steps, batch, weight_decay, schedule="cosine"),
        ponder_weight=ponder_weight(system),
        seed=seed,
        evaluate_every=max(1, steps // 20),
        engine=Engine(precision="bf16", checkpoint_every=max(1, steps // 20)),
    )


def finetune(
    path: str,
    source: Source = "folder",
    backbone: str = "vit_base_patch16_224.augreg_in21k_ft_in1k",
    pretrained: str = "hub",
    bank: Literal["input", "learn", "none"] = "input",
    bank_patch: Pixels | None = None,
    trains: Literal["all", "tape"] = "all",
    pixels: Pixels = 224,
    steps: CountOrZero = 5000,
    batch: Quantity = 256,
    lr: NotNegative = 3e-5,
    weight_decay: NotNegative = 0.05,
    seed: Seed = 0,
) -> Experiment:
    """Fine-tunes a pretrained ViT on your own images, with a tape, or with `--bank none` without one.

    adatape train finetune --path my/photos --backbone vit_small_patch16_224.augreg_in21k
    adatape train finetune --path my/photos --backbone vit_tiny_patch16_224 --pretrained vit.safetensors --bank none
    `--pretrained` is a safetensors file of the backbone, or `hub`. `--trains tape` freezes the ViT but for its head.
    """
    return Experiment(
        recipe="finetune",
        data=Images(source, path, pixels, GENTLE, exif_orientation=True),
        model=ImageModel(backbone, {}, pretrained, wrap=_tape(bank, bank_patch), trains=trains, scaling="backbone"),
        optimizer=Optimizer(lr, steps // 10, steps, batch, weight_decay, schedule="cosine"),
        ponder_weight=0.01 if bank == "input" else 0.0,
        seed=seed,
        evaluate_every=max(1, steps // 20),
        engine=Engine(precision="bf16", checkpoint_every=max(1, steps // 20)),
    )


def _tape(bank: Literal["input", "learn", "none"], bank_patch: int | None) -> dict[str, Any] | None:
    """Keywords of `adatape.wrap`, which chooses the bank's patch where none is given; None without a tape."""
    if bank == "input":
        return {"bank": bank} if bank_patch is None else {"bank": bank, "patch": bank_patch}
    if bank_patch is not None:
        raise ValueError(f"bank_patch is {bank_patch}; bank {bank!r} has no patches, so leave it out")
    return {"bank": bank} if bank == "learn" else None
