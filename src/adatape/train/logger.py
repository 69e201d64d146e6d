"""Writes a run's metrics to metrics.jsonl, and to TensorBoard if it is installed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adatape.train.files import atomic_write, naming_errors, open_no_follow

METRICS, DAMAGED = "metrics.jsonl", "metrics.damaged.jsonl"
MOST_DIGITS = 15  # integers of more digits are not exact as floats


class Metrics(NamedTuple):
    """The lines of a metrics file."""

    lines: list[dict[str, Any]]
    damaged: list[bytes]  # truncated or corrupted lines


class MetricsWriter:
    """Appends lines of figures; at a resume it first removes lines beyond `step` and moves damaged ones to DAMAGED."""

    def __init__(self, out: Path, step: int = 0, say: Callable[[str], None] = print) -> None:
        self.path = out / METRICS
        found = read_metrics(self.path)
        kept = [line for line in found.lines if line["step"] <= step]
        if found.damaged:
            aside, flags = out / DAMAGED, os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with naming_errors(aside), os.fdopen(open_no_follow(aside, flags), "ab") as file:
                file.writelines(line + b"\n" for line in found.damaged)
            say(f"{self.path} has damaged lines, moved to {aside}: {len(found.damaged)}")
        with atomic_write(self.path) as partial:
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self.board = _tensorboard(out / "tensorboard", step)

    def write(self, kind: str, step: int, **figures: Any) -> None:
        line = {"kind": kind, "step": step, **{name: _rounded(value) for name, value in figures.items()}}
        with naming_errors(self.path), self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.board is not None:
            for name, value in figures.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self.board.add_scalar(f"{kind}/{name}", value, step)

    def histogram(self, name: str, counts: list[int], step: int) -> None:
        """Adds a TensorBoard histogram of tape lengths; `counts[n]` samples have n tokens."""
        if self.board is None or not sum(counts):
            return
        lengths = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        self.board.add_histogram(name, lengths, step)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def read_metrics(path: Path) -> Metrics:
    lines, damaged = [], []
    for text in path.read_bytes().split(b"\n") if path.is_file() else ():
        line = _line(text)
        if line is not None:
            lines.append(line)
        elif text.strip():
            damaged.append(text)
    return Metrics(lines, damaged)


def _line(text: bytes) -> dict[str, Any] | None:
    """The parsed line if it is an object with a step and finite figures, else None."""
    try:
        found = json.loads(text.decode(), parse_int=_parse_int)
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    sound = isinstance(found, dict) and type(found.get("step")) is int and found["step"] >= 0
    return found if sound and isinstance(found.get("kind", ""), str) else None


def _parse_int(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits; it must have at most {MOST_DIGITS}")
    return int(text)


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    if os.path.lexists(folder) and not folder.is_dir():  # opening a pipe would block
        raise NotADirectoryError(f"{folder} is not a folder; remove it")
    return SummaryWriter(folder, purge_step=step + 1 if step else None)


def _rounded(value: Any) -> Any:
    """Floats to 7 digits, the precision of float32; None if not finite, which JSON lacks."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else None
