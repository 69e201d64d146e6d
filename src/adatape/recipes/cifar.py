"""CIFAR: the paper's recipe scaled to 32 × 32, the same for every system."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from adatape.config import Engine, Experiment, Optimizer
from adatape.data_config import Augment, Images
from adatape.limits import CountOrZero, InnerShare, NotNegative, Pixels, Quantity, Seed, Threshold
from adatape.recipes.systems import Size, System, image_model, ponder_weight

TRAINING, SIZE = 50_000, 32
# The paper's RandAugment and Mixup, with padded crops and CutMix, as is common for 32-pixel images.
AUGMENT = Augment(crop="pad", pad=4, flip=True, randaug=2, magnitude=10.0, mixup=0.2, cutmix=1.0, smoothing=0.1)


def _cifar(name: Literal["cifar10", "cifar100"], text: str) -> Callable[..., Experiment]:
    def recipe(
        path: str = f"data/{name}",
        system: System = "adatape",
        size: Size = "tiny",
        patch: Pixels = 4,
        bank_patch: Pixels = 2,
        tape_steps: CountOrZero | None = None,
        threshold: Threshold | None = None,
        merge: Quantity | None = None,
        sample_budgets: bool = False,
        epochs: CountOrZero = 200,
        batch: Quantity = 512,
        lr: NotNegative = 1e-3,
        weight_decay: NotNegative = 0.1,
        validate_on: InnerShare | None = None,
        seed: Seed = 0,
    ) -> Experiment:
        per_epoch = max(1, TRAINING // batch)
        return Experiment(
            recipe=name,
            data=Images(name, path, SIZE, AUGMENT, validate_on, exif_orientation=True),
            model=image_model(
                system,
                size,
                patch,
                bank_patch,
                bank_size=1000,
                steps=tape_steps,
                threshold=threshold,
                merge=merge,
                sample_budgets=sample_budgets or None,
            ),
            optimizer=Optimizer(
                lr=lr,
                warmup=10 * per_epoch,
                steps=epochs * per_epoch,
                batch=batch,
                weight_decay=weight_decay,
                schedule="cosine",
            ),
            ponder_weight=ponder_weight(system),
            seed=seed,
            evaluate_every=10 * per_epoch,
            engine=Engine(precision="bf16", compile=True, checkpoint_every=20 * per_epoch, log_every=per_epoch),
        )

    recipe.__name__, recipe.__doc__ = name, text
    return recipe


cifar10 = _cifar(
    "cifar10",
    """CIFAR-10 from scratch: any system at any patch size, all with the same augmentation and schedule.

    adatape train cifar10 --path data/cifar10 --system plainvit
    One H200, torch 2.11: 3.6 minutes. PlainViT-Ti/4 88.07 %, one seed; other runs: docs/log.md.
    """,
)
cifar100 = _cifar(
    "cifar100",
    """CIFAR-100 from scratch, as CIFAR-10; `--patch 8 --bank-patch 4` gives a coarse input with a finer bank.

    adatape train cifar100 --path data/cifar100 --patch 8 --bank-patch 4
    """,
)
