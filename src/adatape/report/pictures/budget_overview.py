"""One model at many budgets, in one picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from adatape.data.loaders import Labelled
from adatape.evaluate.budget import Point
from adatape.evaluate.reading import Reads, inputs_at
from adatape.evaluate.result import FIGURE_NAMES, main_figure, work_unit
from adatape.report.pictures.budgets import ABOVE, accuracy_error, draw_curve
from adatape.report.pictures.style import ALERT, BLUE, GREEN, INK, ORANGE, draw_image, picture, shortened, tidy

SHOWN = 6  # easy examples, and hard ones
SHORT, LONGEST = 10, 16  # letters of two names that fit a line, and of one that is not cut
SYMBOLS = ListedColormap([BLUE, "#B8B8B8", ORANGE])


class Example(NamedTuple):
    x: Tensor
    text: str
    right: bool


def examples_of(reads: Reads, batches: Iterable[Labelled], names: Sequence[str]) -> tuple[list[Example], list[Example]]:
    """Easy ones are right after a short tape, the surest first; hard ones wrong, or right after a long tape."""
    names = reads.names(names)
    columns = zip((~reads.right).tolist(), reads.length.tolist(), (-reads.certainty).tolist(), strict=True)
    hardness = list(columns)
    order = sorted(range(len(hardness)), key=hardness.__getitem__)
    easy = [n for n in order[:SHOWN] if reads.right[n]]
    hard = [n for n in reversed(order[-SHOWN:]) if n not in easy]
    wanted = inputs_at(batches, {*easy, *hard})
    shown = ([_example(reads, n, wanted[n], names) for n in each] for each in (easy, hard))
    return next(shown), next(shown)


def _example(reads: Reads, n: int, x: Tensor, names: Sequence[str]) -> Example:
    label, answer = (shortened(names[int(column[n])], LONGEST) for column in (reads.label, reads.answer))
    gap = " " if len(label) + len(answer) < SHORT else "\n"
    said = label if label == answer else f"{label},{gap}said {answer}"
    return Example(x, f"{said}\nreads {int(reads.length[n])}", label == answer)


def draw_budget_overview(
    path: Path, points: Sequence[Point], usual: Reads, examples: tuple[list[Example], list[Example]], unit: str
) -> Path:
    """Accuracy or mean AP against work and time, lengths at the trained budget, and what was easy and hard there."""
    with picture(path, 9.0) as figure:
        cells = figure.add_gridspec(4, 1, height_ratios=(2.4, 1.6, 1, 1))
        top = cells[0].subgridspec(1, 2)
        left = figure.add_subplot(top[0])
        steps, quality = [each.budget.steps for each in points], [100 * each.quality for each in points]
        errors = [accuracy_error(each.accuracy, len(usual.right), each.mean_ap) for each in points]
        work_name, scale = work_unit(max(each.gflops_mean for each in points))
        work = {"": [scale * each.gflops_mean for each in points]}
        draw_curve(left, steps, quality, errors, work, f"{work_name}, mean; numbers: budgets")
        name = FIGURE_NAMES[main_figure(points[0]._asdict())] + (" ± error" if any(errors) else "")
        left.set(title="One model at several budgets", ylabel=f"{name} (%)")
        times = {
            "alone" if size == 1 else f"{size} at once": [each.milliseconds[size] for each in points]
            for size in points[0].milliseconds
        }
        right = figure.add_subplot(top[1], sharey=left)
        draw_curve(right, steps, quality, errors, times, "milliseconds per sample, measured")
        _draw_lengths(figure.add_subplot(cells[1]), usual, unit)
        for row, (kind, each) in enumerate(zip(("easy", "hard"), examples, strict=True), 2):
            _draw_examples(figure, cells[row].subgridspec(1, SHOWN), kind, each)
    return path


def _draw_lengths(axes: Axes, reads: Reads, label: str) -> None:
    most = int(reads.length.max()) + 1
    right, wrong = (torch.bincount(reads.length[keep], minlength=most) for keep in (reads.right, ~reads.right))
    axes.bar(range(len(right)), right.tolist(), color=GREEN, label="right")
    axes.bar(range(len(wrong)), wrong.tolist(), bottom=right.tolist(), color=ALERT, label="wrong")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title="At the trained budget", xlabel=label, ylabel="test samples")
    axes.legend(**ABOVE)
    tidy(axes)


def _draw_examples(figure: Figure, cells: Any, name: str, examples: Sequence[Example]) -> None:
    for n in range(SHOWN):
        axes = figure.add_subplot(cells[n])
        axes.set(xticks=[], yticks=[])
        axes.set_frame_on(False)
        if n == 0:
            axes.set_ylabel(name, rotation=0, ha="right", va="center", fontweight="bold")
        if n >= len(examples):
            continue
        x, text, right = examples[n]
        if x.dim() == 1:
            axes.imshow(x[None], cmap=SYMBOLS, vmin=-1, vmax=1, aspect="auto")
        else:
            draw_image(axes, x)
        axes.set_xlabel(text, color=INK if right else ALERT, fontsize=10)
