"""Haystack: a few digits of 8 pixels on a canvas of 128, which a model has to find before it can read them."""

from __future__ import annotations

from typing import Any, Literal

from adatape.config import Engine, Experiment, ImageModel, Optimizer
from adatape.data_config import Images
from adatape.limits import CountOrZero, NotNegative, Quantity, Seed

SIDE, VIEW, WINDOW = 128, 32, 16
SHAPE: dict[str, Any] = {"embed_dim": 64, "depth": 2, "num_heads": 2}
WHOLE: dict[str, Any] = {**SHAPE, "depth": 4, "patch_size": 16}  # of a ViT that sees all of the canvas


def haystack(
    system: Literal["adatape", "published", "plainvit"] = "adatape",
    reads: Quantity = 8,
    steps: CountOrZero = 2000,
    lr: NotNegative = 1e-3,
    seed: Seed = 0,
) -> Experiment:
    """One to four small digits of one class on a large canvas, among distractors: AdaTape reads windows of it.

    adatape train haystack
    Two CPU cores, torch 2.15: 67 s. Seeds 0, 1, 2: 92.4, 93.1, 95.0 % with 8 windows, 87.7, 86.4, 89.4 % with one.
    adatape train haystack --system plainvit
    A plain ViT of patches of 16 pixels, 16.0 in place of 14.1 MFLOPs: 91 s, 9.3 % (chance 10 %; seeds 0 and 1).
    adatape train haystack --system published
    Algorithm 2 as published, from all patches of 8 pixels, 20.5 MFLOPs: 9.3, 9.3 % (seeds 0 and 1).
    """
    if system == "adatape":
        tape = {"bank": "windows", "window": WINDOW, "view": VIEW, "steps": reads, "layer": 1, "cell": WINDOW // 2}
        tape |= {"encoder": "convolutions", "scan_scale": 1, "scan_fold": 4, "scan_width": 32, "training_steps": 8}
        model = ImageModel("vit_tiny_patch16_224", {**SHAPE, "img_size": VIEW, "patch_size": 8}, wrap=tape)
    elif system == "published":
        model = ImageModel("adatape_tiny_patch16_224", {**WHOLE, "bank": "input", "bank_patch": 8})
    else:
        model = ImageModel("vit_tiny_patch16_224", WHOLE)
    return Experiment(
        recipe="haystack",
        data=Images("haystack", size=SIDE, validate_on=0.025, exif_orientation=True),
        model=model,
        optimizer=Optimizer(lr, 50, steps, batch=32, weight_decay=0.05, schedule="cosine", clip=None),
        seed=seed,
        evaluate_every=max(1, steps // 4),
        engine=Engine(checkpoint_every=max(1, steps // 2), log_every=20, workers=0),
    )
