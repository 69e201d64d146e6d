"""The device that a verb runs on."""

from __future__ import annotations

import torch

DEVICES = "it must be auto, cpu, or cuda with or without a number"


def pick_device(asked: str) -> str:
    """`auto` is a GPU where there is one; a device that this machine lacks is refused."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise ValueError(f"device is {asked!r}; {DEVICES}") from error
    if asked != "cpu" and device.type != "cuda":
        raise ValueError(f"device is {asked!r}; {DEVICES}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {asked!r}; torch finds no CUDA GPU here, so use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {asked!r}; the last of this machine is cuda:{torch.cuda.device_count() - 1}")
    return asked
