"""Recipes: typed functions that return an `Experiment`, without importing torch; `adatape train NAME` runs one."""

from __future__ import annotations

from collections.abc import Callable

from adatape.config import Experiment
from adatape.recipes.cifar import cifar10, cifar100
from adatape.recipes.digits import digits
from adatape.recipes.haystack import haystack
from adatape.recipes.imagenet import deit, imagenet, plainvit, pretrain
from adatape.recipes.megapixel import megapixel
from adatape.recipes.parity import parity, parity_small
from adatape.recipes.scenes import scenes
from adatape.recipes.transfer import finetune, images

RECIPES: dict[str, Callable[..., Experiment]] = {
    "parity": parity,
    "parity-small": parity_small,
    "digits": digits,
    "haystack": haystack,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "images": images,
    "finetune": finetune,
    "scenes": scenes,
    "megapixel": megapixel,
    "imagenet": imagenet,
    "plainvit": plainvit,
    "deit": deit,
    "pretrain": pretrain,
}
