"""What a run writes down as it goes: metrics.jsonl always, TensorBoard where it is installed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from adatape.train.files import named, whole

METRICS = "metrics.jsonl"


class Journal:
    """Lines of `step` and figures; what an earlier attempt wrote beyond `step` is taken back."""

    def __init__(self, out: Path, step: int = 0) -> None:
        self.path = out / METRICS
        kept = [line for line in lines_of(self.path) if line["step"] <= step]
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


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a crash may have cut the last."""
    found = []
    for text in path.read_text().splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(folder, purge_step=step + 1 if step else None)


def _rounded(value: Any) -> Any:
    """Seven digits say all that float32 knows; JSON has no word for what is not finite."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else None
