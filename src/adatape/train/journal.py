"""What a run writes down as it goes: metrics.jsonl always, TensorBoard where it is installed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adatape.train.files import named, open_own, whole

METRICS, DAMAGED = "metrics.jsonl", "metrics.damaged.jsonl"
MOST_DIGITS = 15  # of a whole number that a float holds too


class Metrics(NamedTuple):
    """What a metrics file holds."""

    lines: list[dict[str, Any]]
    damaged: list[bytes]  # cut by a crash, or changed on the disk


class Journal:
    """Lines of `step` and figures; what an earlier attempt wrote beyond `step` is taken back, and damage set aside."""

    def __init__(self, out: Path, step: int = 0, say: Callable[[str], None] = print) -> None:
        self.path = out / METRICS
        found = read_metrics(self.path)
        kept = [line for line in found.lines if line["step"] <= step]
        if found.damaged:
            _set_aside(out / DAMAGED, found.damaged)
            say(f"{self.path} has damaged lines, set aside in {out / DAMAGED}: {len(found.damaged)}")
        with whole(self.path) as partial:
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self.board = _board(out / "tensorboard", step)

    def write(self, kind: str, step: int, **figures: Any) -> None:
        line = {"kind": kind, "step": step, **{name: _rounded(value) for name, value in figures.items()}}
        with named(self.path), self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.board is not None:
            for name, value in figures.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self.board.add_scalar(f"{kind}/{name}", value, step)

    def histogram(self, name: str, counts: list[int], step: int) -> None:
        """How many samples read 0, 1, 2, … tokens; the JSON line has them as `lengths`."""
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


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The sound lines of a metrics file."""
    return read_metrics(path).lines


def _line(text: bytes) -> dict[str, Any] | None:
    """An object with a step and finite figures; else None."""
    try:
        found = json.loads(text.decode(), parse_int=_whole)
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    sound = isinstance(found, dict) and type(found.get("step")) is int and found["step"] >= 0
    return found if sound and isinstance(found.get("kind", ""), str) else None


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"{len(text)} digits; a count has at most {MOST_DIGITS}")
    return int(text)


def _set_aside(path: Path, lines: list[bytes]) -> None:
    with named(path), os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
        file.writelines(line + b"\n" for line in lines)


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    if os.path.lexists(folder) and not folder.is_dir():  # a pipe would be waited for
        raise NotADirectoryError(f"{folder} is no folder; remove it")
    return SummaryWriter(folder, purge_step=step + 1 if step else None)


def _rounded(value: Any) -> Any:
    """Seven digits say all that float32 knows; JSON has no word for what is not finite."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else None
