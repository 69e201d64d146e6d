"""How a run went: loss, accuracy (several labels: mean AP) and tape length by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from adatape.evaluate.result import FIGURE_NAMES
from adatape.report.pictures.style import FAINT, GREEN, name_line, picture, tidy

Lines = Sequence[dict[str, Any]]
MOST = 1e38  # about what float32 holds; nothing larger was a figure of a run, and axes cannot be drawn for it
SPAN_OF_LOG = 10  # a loss that falls further than this is drawn on a logarithmic scale


def draw_training(path: Path, lines: Lines, title: str) -> Path | None:
    """From the lines of metrics.jsonl; None where they hold no curve."""
    train = [line for line in lines if line.get("kind") == "train"]
    validation = [line for line in lines if line.get("kind", "validation") == "validation"]
    if len(train) < 2 and len(validation) < 2:
        return None
    reads = any(known(line, "length_mean") and line["length_mean"] for line in validation or train)
    panels = [_loss, _accuracy, _length] if reads else [_loss, _accuracy]
    with picture(path, 0.9 + 1.7 * len(panels)) as figure:
        every = figure.subplots(len(panels), 1, sharex=True)
        for axes, draw in zip(every, panels, strict=True):
            draw(axes, train, validation)
            tidy(axes)
        every[0].set_title(title)
        every[-1].set_xlabel("training step")
    return path


def _loss(axes: Axes, train: Lines, validation: Lines) -> None:
    values = _both(axes, train, validation, "loss", 1, ("training", "validation"))
    positive = [value for value in values if value > 0]
    if positive and len(positive) == len(values) and max(positive) > SPAN_OF_LOG * min(positive):
        axes.set_yscale("log")
    axes.set_ylabel("loss")


def _accuracy(axes: Axes, train: Lines, validation: Lines) -> None:
    main = "mean_ap" if any(known(line, "mean_ap") for line in validation) else "accuracy"
    scored = [line[main] for line in validation if known(line, main)]
    last = f"{100 * scored[-1]:.1f} %" if scored else ""
    _both(axes, train, validation, main, 100, ("", last))
    axes.set_ylabel(f"{FIGURE_NAMES[main]} (%)")


def _length(axes: Axes, train: Lines, validation: Lines) -> None:
    lines = [line for line in (validation if len(validation) > 1 else train) if known(line, "length_mean")]
    if not lines:
        return
    steps, mean = [line["step"] for line in lines], [line["length_mean"] for line in lines]
    spread = [_spread(line) for line in lines]
    low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
    axes.fill_between(steps, low, high, color=GREEN, alpha=0.18, linewidth=0)
    axes.plot(steps, mean, color=GREEN, linewidth=2)
    name_line(axes, steps[-1], mean[-1], f"{mean[-1]:.1f} ± {spread[-1]:.1f}", GREEN)
    axes.set_ylabel("tape tokens")
    axes.set_ylim(bottom=0)


def _spread(line: dict[str, Any]) -> float:
    if known(line, "length_sd"):
        return line["length_sd"]
    return max(0.0, line["length_var"]) ** 0.5 if known(line, "length_var") else 0.0


def _both(
    axes: Axes, train: Lines, validation: Lines, figure: str, scale: float, names: tuple[str, str]
) -> list[float]:
    """Training thin, validation thick, each named at its end; gives all values drawn."""
    drawn = []
    looks = ((train, FAINT, 1.0, names[0]), (validation, GREEN, 2.0, names[1]))
    for lines, colour, width, name in looks:
        drawable = [line for line in lines if known(line, figure)]
        if not drawable:
            continue
        steps, values = [line["step"] for line in drawable], [scale * line[figure] for line in drawable]
        axes.plot(steps, values, color=colour, linewidth=width, marker="o" if len(values) == 1 else None)
        drawn += values
        if name:
            name_line(axes, steps[-1], values[-1], name, colour)
    return drawn


def known(line: dict[str, Any], figure: str) -> bool:
    value = line.get(figure)
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST
