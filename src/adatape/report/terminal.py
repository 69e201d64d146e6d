"""What every verb prints with: a table style, a progress bar, and the device it runs on."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

DEVICES = "it must be auto, cpu, or cuda with or without a number"
TABLE: dict[str, Any] = {"box": None, "header_style": "bold"}


def pick_device(asked: str) -> str:
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


def progress_bar(disable: bool = False) -> Progress:
    """Live on a terminal, silent in a file or a pipe."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    note = TextColumn("{task.fields[note]}")
    return Progress(*columns, note, disable=disable or not sys.stdout.isatty())


def free_folder(recipe: str) -> Path:
    return next(path for n in itertools.count(1) if not (path := Path("runs") / f"{recipe}-{n}").exists())
