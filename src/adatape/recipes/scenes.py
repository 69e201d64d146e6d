"""Your own large images with several labels each, or none: AdaTape reads a few windows of every image."""

from __future__ import annotations

from typing import Any, Literal

from adatape.config import Engine, Experiment, ImageModel, Optimizer
from adatape.data_config import Scenes
from adatape.limits import CountOrZero, InnerShare, NotNegative, Pixels, Quantity, QuantityOrZero, Seed, Width


def scenes(
    path: str,
    csv: str = "labels.csv",
    system: Literal["adatape", "plainvit"] = "adatape",
    backbone: str = "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    pretrained: str = "hub",
    height: Pixels = 800,
    width: Pixels = 1360,
    window: Pixels = 64,
    reads: Quantity = 8,
    search: QuantityOrZero = 256,
    scan_width: Width = 16,
    steps: CountOrZero = 5000,
    batch: Quantity = 16,
    lr: NotNegative = 5e-5,
    new_lr: NotNegative = 1e-3,
    weight_decay: NotNegative = 0.05,
    validate_on: InnerShare | None = 0.2,
    seed: Seed = 0,
) -> Experiment:
    """A folder of large images and a CSV file of their labels; plainvit sees the image at height × width as a whole.

    adatape train scenes --path data/gtsdb
    adatape train scenes --path data/gtsdb --system plainvit --height 224 --width 384
    adatape train scenes --path data/gtsdb --device cpu --batch 8 --search 64 --steps 1200
    An hour of one CPU core: a test mean AP of 0.69 with 8 windows, 0.54 with one (seed 0).
    """
    tape: dict[str, Any] = {"bank": "windows", "window": window, "steps": reads, "search": search}
    tape |= {"scan_width": scan_width, "labels": "several"}
    return Experiment(
        recipe="scenes",
        data=Scenes(path, csv, (height, width), validate_on=validate_on, flip=True, jitter=0.3),
        model=ImageModel(backbone, {}, pretrained, wrap=tape if system == "adatape" else None),
        optimizer=Optimizer(lr, steps // 20, steps, batch, weight_decay, schedule="cosine", new_lr=new_lr),
        loss="sigmoid",
        seed=seed,
        evaluate_every=max(1, steps // 10),
        engine=Engine(precision="bf16", checkpoint_every=max(1, steps // 5)),
    )
