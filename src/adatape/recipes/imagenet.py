"""ImageNet from scratch and large-scale pre-training with the paper's settings; the recipes of PlainViT and DeiT."""

from __future__ import annotations

import dataclasses
from typing import Literal

from adatape.config import Engine, Experiment, Optimizer
from adatape.data_config import Augment, Images
from adatape.limits import Count, CountOrZero, NotNegative, Quantity, Seed
from adatape.recipes.systems import Size, System, image_model, ponder_weight

TRAINING, SIZE = 1_281_167, 224
INCEPTION = Augment(crop="inception", area=(0.05, 1.0), flip=True)
# torch multiplies weight decay by the rate: the paper's decoupled 1e-4 and 8e-5 over its peak rate (departure 26).
DECAY: dict[Size, float] = {"tiny": 0.1, "small": 0.08, "base": 0.08}


def imagenet(
    path: str = "data/imagenet",
    system: System = "adatape",
    size: Size = "tiny",
    epochs: CountOrZero = 300,
    batch: Quantity = 1024,
    loss: Literal["softmax", "sigmoid"] = "softmax",
    source: Literal["imagenet", "folder", "shards"] = "imagenet",
    seed: Seed = 0,
) -> Experiment:
    """ImageNet-1k from scratch with the paper's hyper-parameters for Ti, S and B.

    torchrun --nproc-per-node 8 -m adatape train imagenet --path /data/imagenet --size small --out runs/s16
    Not run here: ImageNet was not available. The paper reports 73.6 (Ti), 79.5 (S) and 80.8 % (B).
    """
    light = size == "tiny"
    augment = dataclasses.replace(
        INCEPTION,
        randaug=2,
        magnitude=10.0 if light else 15.0,
        mixup=0.2 if light else 0.5,
        smoothing=0.0 if light else 0.1,
    )
    return Experiment(
        recipe="imagenet",
        data=_data(source, path, augment),
        model=image_model(system, size, 16, 8),
        optimizer=_cosine(epochs, batch, DECAY[size]),
        loss=loss,
        ponder_weight=ponder_weight(system),
        seed=seed,
        evaluate_every=max(1, TRAINING // batch),
        engine=ENGINE,
    )


def plainvit(
    path: str = "data/imagenet",
    size: Size = "small",
    epochs: CountOrZero = 90,
    batch: Quantity = 1024,
    source: Literal["imagenet", "folder", "shards"] = "imagenet",
    seed: Seed = 0,
) -> Experiment:
    """PlainViT on ImageNet-1k as Beyer et al. trained it: RandAugment(2, 10), Mixup 0.2, decay on matrices only.

    torchrun --nproc-per-node 8 -m adatape train plainvit --path /data/imagenet --epochs 90 --out runs/plain
    Not run here: ImageNet was not available. They report 76.5 % for S/16 after 90 epochs.
    """
    augment = dataclasses.replace(INCEPTION, randaug=2, mixup=0.2)
    return Experiment(
        recipe="plainvit",
        data=_data(source, path, augment, validate_on=0.01),
        model=image_model("plainvit", size, 16, 8),
        optimizer=_cosine(epochs, batch, 0.1),
        seed=seed,
        evaluate_every=max(1, TRAINING // batch),
        engine=ENGINE,
    )


def deit(
    path: str = "data/imagenet",
    size: Size = "small",
    epochs: CountOrZero = 300,
    batch: Quantity = 1024,
    source: Literal["imagenet", "folder", "shards"] = "imagenet",
    seed: Seed = 0,
) -> Experiment:
    """DeiT without distillation on ImageNet-1k: Mixup 0.8, CutMix 1, erasing, repeated augmentation, drop-path 0.1.

    torchrun --nproc-per-node 8 -m adatape train deit --path /data/imagenet --size tiny --out runs/deit
    Not run here: ImageNet was not available. They report 72.2 (Ti), 79.9 (S) and 81.8 % (B). They use timm's
    RandAugment (rand-m9-mstd0.5-inc1); here the paper's operations are used at that magnitude.
    """
    augment = Augment(
        crop="inception",
        area=(0.08, 1.0),
        flip=True,
        randaug=2,
        magnitude=9.0,
        jitter=0.5,
        mixup=0.8,
        cutmix=1.0,
        erase=0.25,
        smoothing=0.1,
        repeats=3,
    )
    per_epoch = max(1, TRAINING // batch)
    return Experiment(
        recipe="deit",
        data=_data(source, path, augment),
        model=image_model("deit", size, 16, 8),
        optimizer=Optimizer(
            lr=5e-4 * batch / 512,
            warmup=5 * per_epoch,
            steps=epochs * per_epoch,
            batch=batch,
            weight_decay=0.05,
            clip=None,
            schedule="cosine",
            floor=1e-5,
            ema=0.99996,
        ),
        seed=seed,
        evaluate_every=per_epoch,
        engine=ENGINE,
    )


def pretrain(
    path: str = "data/train-{000000..000999}.tar | data/test-{000000..000009}.tar",
    classes: Quantity = 21_841,
    samples: Count = 14_197_122,
    system: System = "adatape-learn",
    size: Size = "base",
    patch: Literal[16, 32] = 32,
    epochs: CountOrZero = 7,
    batch: Quantity = 4096,
    lr: NotNegative = 8e-4,
    seed: Seed = 0,
) -> Experiment:
    """Large-scale pre-training as on JFT-300M: 7 epochs, linear decay, no Mixup, tape feed-forwards in every block.

    torchrun --nproc-per-node 8 -m adatape train pretrain --path 'https://host/{split}-{000..999}.tar' --out runs/big
    Not run here: JFT-300M is not public. The defaults fit ImageNet-21k in WebDataset shards.
    """
    model = image_model(system, size, patch, 8, tape_ffn="append+blocks")
    return Experiment(
        recipe="pretrain",
        data=Images("shards", path, SIZE, INCEPTION, classes=classes, samples=samples, exif_orientation=True),
        model=model,
        optimizer=Optimizer(
            lr=lr,
            warmup=10_000,
            steps=epochs * samples // batch,
            batch=batch,
            weight_decay=0.1,
            decay="all",
            schedule="linear",
        ),
        loss="sigmoid",
        ponder_weight=ponder_weight(system),
        seed=seed,
        evaluate_every=5000,
        engine=ENGINE,
    )


def _data(source: str, path: str, augment: Augment, validate_on: float | None = None) -> Images:
    shards = {"classes": 1000, "samples": TRAINING} if source == "shards" else {}
    kept = None if source == "shards" else validate_on
    return Images(source, path, SIZE, augment, validate_on=kept, exif_orientation=True, **shards)  # type: ignore[arg-type]


def _cosine(epochs: int, batch: int, weight_decay: float) -> Optimizer:
    steps = epochs * max(1, TRAINING // batch)
    return Optimizer(
        lr=1e-3,
        warmup=min(10_000, steps // 5),
        steps=steps,
        batch=batch,
        weight_decay=weight_decay,
        schedule="cosine",
    )


ENGINE = Engine(precision="bf16", compile=True, workers=12, checkpoint_every=2000)
