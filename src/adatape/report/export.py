"""Exporting on the command line: what was written, and how far its answers are from the model's."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from adatape.config import Experiment
from adatape.export import Format, arguments, example_for, export_run, open_export
from adatape.models.adaptive import Adaptive
from adatape.report.terminal import TABLE
from adatape.train.folder import load_run

BATCHES = (1, 2, 4, 5, 8)


class Compared(NamedTuple):
    """The largest difference of a logit between an exported file and the model that it came from."""

    batch: int
    length: int | None  # tape tokens that may be read; None without a tape
    difference: float


def print_export(folder: Path, to: Format, out: Path | None = None, trust: bool = False) -> dict[str, Any]:
    """Writes a run's model for other programs, and compares it with the model at sizes that it was not traced at."""
    began = time.perf_counter()
    path = export_run(folder, to, out, trust)
    seconds, size, console = time.perf_counter() - began, path.stat().st_size, Console()
    checks = [] if to == "onnx" and find_spec("onnxruntime") is None else compare(path, *load_run(folder, trust=trust))
    table = Table("batch", "tape", "largest difference of a logit", **TABLE)
    for each in checks:
        table.add_row(str(each.batch), "" if each.length is None else str(each.length), f"{each.difference:.1e}")
    console.print(table if checks else "without onnxruntime the file was not compared with the model")
    console.print(f"exported to {path}, {size / 1e6:.2f} MB in {seconds:.1f} s", highlight=False, soft_wrap=True)
    return {
        "out": str(path),
        "to": to,
        "bytes": size,
        "seconds": seconds,
        "checks": [each._asdict() for each in checks],
        "largest_difference": max((each.difference for each in checks), default=None),
    }


def compare(path: Path, experiment: Experiment, model: Adaptive) -> list[Compared]:
    """Both at several sizes of batch and tape, at the trained threshold."""
    answer, model = open_export(path), model.eval()
    found = []
    for n, batch in enumerate(BATCHES):
        x, length, threshold = example_for(experiment, model, batch, seed=n), None, 1.0
        reader = model.tape_reader()
        if reader is not None:
            reading = reader.reading
            length, threshold = round(n * reading.steps / (len(BATCHES) - 1)), reading.threshold
            model.set_budget(length, threshold)
        with torch.no_grad():
            logits = model(x)
        away = answer(arguments(model, x, length or 0, threshold)).logits - logits
        found.append(Compared(batch, length, float(away.abs().max())))
    return found
