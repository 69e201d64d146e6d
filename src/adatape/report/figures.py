"""The pictures of a finished run, and the demo's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

from adatape.banks import InputBank, LearnedBank
from adatape.config import Budget, Experiment, ImageModel
from adatape.data.parity import Sequences, held_out_set
from adatape.data.sets import LabelledSet, open_set
from adatape.evaluate.device import pick_device
from adatape.evaluate.progress import SILENT, Progress, with_progress
from adatape.evaluate.reading import (
    ParityExample,
    Reads,
    collect,
    inputs_at,
    parity_example,
    spread_batches,
    taken_counts,
)
from adatape.evaluate.result import Result
from adatape.models.base import Adaptive
from adatape.report.gallery import COLUMNS, ROWS, Grid, draw_gallery, easiest_first, varied
from adatape.report.pictures.budgets import draw_budgets
from adatape.report.pictures.parity import LONGEST, Points, draw_curves, draw_lengths, draw_reading, one_length
from adatape.report.pictures.reading import draw_heatmap, draw_lengths_by_answer, draw_lengths_by_class, draw_long_tail
from adatape.report.pictures.style import save
from adatape.report.pictures.training import draw_training, known
from adatape.train.folder import load_run
from adatape.train.lock import write_lock
from adatape.train.logger import METRICS, read_metrics

FIGURES, BUDGETS = "figures", "budgets.json"
SIZES = {"embed_dim", "depth"}  # options that make another size of a named model
TELLING = 64  # sequences among which one is chosen to be drawn


class Finished(NamedTuple):
    """A finished run with what its model read of the test set."""

    folder: Path
    experiment: Experiment
    test: LabelledSet
    model: Adaptive
    device: torch.device
    samples: int
    reads: Reads
    lines: list[dict[str, Any]]

    @property
    def out(self) -> Path:
        return self.folder / FIGURES

    def batches(self) -> Iterator[Any]:
        return spread_batches(self.experiment, self.samples, self.device)

    @property
    def has_tape(self) -> bool:
        return self.reads.taken.shape[1] > 0


@dataclass(frozen=True)
class FiguresResult(Result):
    run: Path
    out: Path
    figures: dict[str, Path]
    samples: int
    """test samples that they show"""
    metrics: Path
    damaged_lines: int
    """of the metrics, left out"""
    stored: Budget | None = None
    """stored in the run; pictures show the trained one"""


def write_figures(
    folder: Path, device: str = "auto", samples: int = 2000, trust: bool = False, progress: Progress = SILENT
) -> FiguresResult:
    """Draws all that applies to a run, at its trained budget, into its figures/ folder."""
    experiment, model = load_run(folder, stored_budget=False, trust=trust)
    place = torch.device(pick_device(device))
    reads = collect(model.to(place), spread_batches(experiment, samples, place))
    metrics = read_metrics(folder / METRICS)
    test = open_set(experiment.data, "test")
    done = Finished(folder, experiment, test, model, place, samples, reads, metrics.lines)
    with write_lock(folder):
        paths = [path for draw in with_progress(DRAWN, "figures", len(DRAWN), progress) for path in draw(done)]
    drawn = {path.stem: path for path in paths if path is not None}
    facts = folder / METRICS, len(metrics.damaged), experiment.model.budget
    return FiguresResult(folder, done.out, drawn, len(reads.label), *facts)


def _training(run: Finished) -> list[Path | None]:
    title = f"{run.experiment.recipe}, {model_name(run.experiment)}"
    return [draw_training(run.out / "training.png", run.lines, title)]


def _parity(run: Finished) -> list[Path]:
    length, reading = run.experiment.data.sequence_length, getattr(getattr(run.model, "reader", None), "reading", None)
    if length is None or length > LONGEST or reading is None or reading.merged != 2:
        return []
    lines = [line for line in run.lines if line.get("kind", "validation") == "validation"]
    curve = [(line["step"], line["accuracy"]) for line in lines if known(line, "accuracy")]
    example = parity_example(run.model, Sequences(*(each.to(run.device) for each in held_out_set(length, TELLING))))
    lengths = torch.bincount(run.reads.length).tolist()
    return [draw_parity(run.out / "parity.png", {"adatape": curve}, lengths, example)]


def _tape(run: Finished) -> list[Path]:
    """Which bank tokens are read, and how many of them by which samples."""
    if not run.has_tape:
        return []
    bank, reads, samples = getattr(run.model, "bank", None), run.reads, len(run.reads.label)
    lengths, right, drawn = reads.length.numpy(), reads.right.numpy(), []
    if isinstance(bank, InputBank | LearnedBank):
        counts = taken_counts(reads, bank.size).numpy()
        if isinstance(bank, InputBank):
            shape = tuple(bank.h1.grid_size)
            drawn.append(draw_heatmap(run.out / "heatmap.png", counts, shape, samples, bank.patch))
        learned = isinstance(bank, LearnedBank)
        drawn.append(draw_long_tail(run.out / "long_tail.png", counts.sum(0), samples, learned))
    drawn.append(draw_lengths_by_answer(run.out / "lengths.png", lengths, right))
    if run.test.of_images:
        names = reads.names(run.test.names)
        drawn.append(draw_lengths_by_class(run.out / "lengths_by_class.png", lengths, reads.label.numpy(), names))
    return drawn


def _galleries(run: Finished) -> list[Path]:
    if not run.test.of_images:
        return []
    bank, reads = getattr(run.model, "bank", None), run.reads
    grid = Grid(*bank.h1.grid_size) if isinstance(bank, InputBank) and run.has_tape else None
    order, names = easiest_first(reads), reads.names(run.test.names)
    mistakes = [place for place in order[::-1] if not reads.right[place]]
    least, most = _extremes(run)
    chosen = {
        name: (title, varied(places, reads.label, COLUMNS * ROWS))
        for name, title, places in (
            ("easy", f"Easy: {least}", order),
            ("hard", f"Hard: {most}", order[::-1]),
            ("mistakes", f"Mistakes, true class → answer: {len(mistakes):,} of {len(order):,}", mistakes),
        )
    }
    images = inputs_at(run.batches(), {place for _, places in chosen.values() for place in places})
    windows = run.model.tape_boxes if run.has_tape and run.model.window_grid() is not None else None
    order_note = "; numbers: reading order" if grid or windows else ""
    return [
        draw_gallery(run.out / f"{name}.png", f"{title}{order_note}", places, images, reads, names, grid, windows)
        for name, (title, places) in chosen.items()
        if places
    ]


def _extremes(run: Finished) -> tuple[str, str]:
    if run.has_tape and bool((run.reads.length != run.reads.length[0]).any()):
        return "shortest tapes", "longest tapes"
    adapts = bool((run.reads.macs != run.reads.macs[0]).any())
    return ("least work", "most work") if adapts else ("surest answers", "least sure answers")


def _quality(run: Finished) -> list[Path | None]:
    return [draw_budgets(run.out / "quality.png", budget_rows(run.out / BUDGETS))]


DRAWN: tuple[Callable[[Finished], Sequence[Path | None]], ...] = (_training, _parity, _tape, _galleries, _quality)


def budget_rows(path: Path) -> list[dict[str, Any]]:
    """The measurements of `adatape eval --budgets`, as a list or as `rows`; none where there is no such file."""
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    rows = found.get("rows", []) if isinstance(found, dict) else found
    # How many the accuracies are of, which the histogram of lengths tells.
    counts = found.get("lengths") if isinstance(found, dict) else None
    counts = counts if isinstance(counts, list) and all(isinstance(count, int) for count in counts) else []
    known = {"samples": sum(counts)} if counts else {}
    return [{**known, **row} for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def model_name(experiment: Experiment) -> str:
    model = experiment.model
    if isinstance(model, ImageModel):  # a name says a size, which options may have changed
        name = model.name.partition("_")[0] if model.options.keys() & SIZES else model.name
        return name if model.wrap is None else f"{name} with a tape"
    return "adatape" if model.reading else "ut" if model.universal else "transformer"


def draw_parity(path: Path, curves: Mapping[Any, Points], lengths: Sequence[int], example: ParityExample) -> Path:
    """Learning curves, tape lengths, and one sequence with its pairs as the reader took them."""
    figure = Figure(figsize=(11, 7.2), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(2, 3, height_ratios=(1, 1.25))
    if varies := sum(count > 0 for count in lengths) > 1:
        draw_lengths(figure.add_subplot(grid[0, 2]), lengths)
    draw_curves(figure.add_subplot(grid[0, : 2 if varies else 3]), curves, "" if varies else one_length(lengths))
    draw_reading(figure.add_subplot(grid[1, :]), *example)
    return save(figure, path, 130)
