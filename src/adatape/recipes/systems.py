"""The systems of the paper's image tables, for any image and patch size."""

from __future__ import annotations

from typing import Any, Literal

from adatape.config import SIZES, ImageModel

Size = Literal["tiny", "small", "base"]
System = Literal[
    "adatape", "adatape-learn", "plainvit", "vit", "deit", "vit3ffn", "ut", "u2t", "uvit", "avit", "ponder"
]
# The paper's table has a ponder loss for an input bank only; the others have the weights of their own papers.
PONDER_WEIGHTS: dict[System, float] = {
    "adatape": 0.01,
    "ut": 0.01,
    "u2t": 0.01,
    "uvit": 0.01,
    "avit": 5e-4,
    "ponder": 0.01,
}
AVIT_PRIOR = 200.0  # alpha_d / alpha_p = 0.1 / 5e-4
# Of systems that are not called SYSTEM_SIZE_patch16_224.
NAMES: dict[System, str] = {
    "adatape-learn": "adatape_{size}_patch16_224",
    "vit3ffn": "vit3ffn_base_patch28_224",
    "ut": "ut_tiny_patch16_224",
}


def image_model(
    system: System, size: Size, patch: int, bank_patch: int, *, bank_size: int = 10_000, **tape: Any
) -> ImageModel:
    """The model of a system; `tape` (steps, threshold, merge, …) applies to AdaTape only."""
    options: dict[str, Any] = {"patch_size": patch}
    if system == "adatape":
        options |= {"bank": "input", "bank_patch": bank_patch, **tape}
    elif system == "adatape-learn":
        options |= {"bank": "learn", "bank_size": bank_size, **tape}
    elif system == "vit3ffn":
        options |= SIZES[size]
    elif system == "ut":
        options |= {**SIZES[size], "depth": 1}
    elif system == "avit":
        options |= {"prior_weight": AVIT_PRIOR}
    elif system == "deit":
        options |= {"drop_path_rate": 0.1}
    given = {name: value for name, value in options.items() if value is not None}
    return ImageModel(NAMES.get(system, f"{system}_{size}_patch16_224").format(size=size), given)


def ponder_weight(system: System) -> float:
    return PONDER_WEIGHTS.get(system, 0.0)
