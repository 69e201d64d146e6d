"""Parity as a reader sees it: learning curves, tape lengths, and one sequence with the pairs taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Arc, Circle, Rectangle

from adatape.report.pictures.style import ALERT, GREEN, INK, PURPLE, tidy

TEXT = {-1: "white", 0: INK, 1: INK}
COLOURS = {-1: "#4C78A8", 0: "#B8B8B8", 1: "#F2A93B"}
LINES = {"adatape": GREEN, "transformer": PURPLE}
LONGEST = 48  # symbols that can still be told apart
Points = Sequence[tuple[int, float]]


def draw_curves(axes: Axes, curves: Mapping[Any, Points], note: str = "") -> None:
    """Accuracies from 0 to 1 by step, a line for each system."""
    for system, points in curves.items():
        steps, accuracy = [step for step, _ in points], [100 * share for _, share in points]
        axes.plot(steps, accuracy, color=LINES.get(system, INK), linewidth=2, label=system)
    axes.axhline(50, color=INK, linewidth=0.8, linestyle=":", label="chance")
    axes.text(0.99, 0.72, note, transform=axes.transAxes, ha="right", color=INK)
    axes.set(
        title="Is the number of ones odd?", xlabel="training step", ylabel="validation accuracy (%)", ylim=(40, 103)
    )
    axes.set_xlim(left=0)
    if len(curves) > 1:
        axes.legend(frameon=False, loc="center right")
    tidy(axes)


def one_length(lengths: Sequence[int]) -> str:
    """What a histogram of one bar would show."""
    found = [(length, count) for length, count in enumerate(lengths) if count]
    return "".join(f"all {count:,} test sequences read {length} tape tokens" for length, count in found)


def draw_lengths(axes: Axes, lengths: Sequence[int]) -> None:
    axes.bar(range(len(lengths)), lengths, color=LINES["adatape"])
    axes.set(title="Tape tokens read", xlabel="tape length", ylabel="test sequences")
    axes.set_xlim(-0.5, len(lengths) - 0.5)
    tidy(axes)


def draw_reading(
    axes: Axes, symbols: Sequence[int], pairs: Sequence[Sequence[int]], weights: Sequence[Sequence[float]], answer: int
) -> None:
    """Arcs join the symbols read together, numbered in reading order; below, the tape that they make."""
    top = 0.0
    for number, pair in enumerate(pairs, 1):
        left, right = min(pair), max(pair)
        mixed = symbols[left] != symbols[right]
        reach = right - left
        height = 0.5 + 0.16 * reach
        top = max(top, height)
        style: Any = {"color": ALERT, "linewidth": 2.2} if mixed else {"color": INK, "linewidth": 0.9}
        axes.add_patch(Arc(((left + right) / 2, 0.42), reach, 2 * height, theta1=0, theta2=180, **style))
        label: Any = {"color": ALERT if mixed else INK, "fontweight": "bold" if mixed else "normal"}
        axes.text((left + right) / 2, 0.42 + height, str(number), ha="center", va="bottom", fontsize=9, **label)
    for place, symbol in enumerate(symbols):
        axes.add_patch(Circle((place, 0), 0.38, facecolor=COLOURS[symbol], edgecolor=INK, linewidth=0.8))
        axes.text(place, 0, f"{symbol}".replace("-", "−"), ha="center", va="center", fontsize=11, color=TEXT[symbol])
    _draw_tape(axes, symbols, pairs, weights)
    ones = sum(symbol == 1 for symbol in symbols)
    verdict = f"{ones} ones: {'odd' if ones % 2 else 'even'}; AdaTape answers {'odd' if answer else 'even'}"
    axes.set_title(f"One sequence as it was read: equal symbols pair up, an odd count leaves a mixed pair.\n{verdict}")
    axes.set(xlim=(-2.6, len(symbols) - 0.4), ylim=(-2.4, top + 1.0), aspect="equal")
    axes.axis("off")


def _draw_tape(
    axes: Axes, symbols: Sequence[int], pairs: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]
) -> None:
    for height, name in ((0, "sequence"), (-1.6, "tape")):
        axes.text(-0.8, height, name, ha="right", va="center", color=INK)
    room = len(symbols) / len(pairs)
    width = 0.75 * room
    for number, (pair, weight) in enumerate(zip(pairs, weights, strict=True)):
        centre = (number + 0.5) * room - 0.5
        left = centre - width / 2
        for place, share in zip(pair, weight, strict=True):
            axes.add_patch(Rectangle((left, -1.9), width * share, 0.6, facecolor=COLOURS[symbols[place]], linewidth=0))
            left += width * share
        mixed = len({symbols[place] for place in pair}) > 1
        edge: Any = {"edgecolor": ALERT if mixed else INK, "linewidth": 2.2 if mixed else 0.8}
        axes.add_patch(Rectangle((centre - width / 2, -1.9), width, 0.6, fill=False, **edge))
        axes.text(centre, -2.2, str(number + 1), ha="center", va="center", fontsize=9, color=ALERT if mixed else INK)
