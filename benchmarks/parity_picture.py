"""The parity figure: validation accuracy by training step, a panel for each length, from the committed curves.

    python benchmarks/parity_picture.py results/parity docs/images/parity.png

Rows of benchmarks/parity.py and run folders of benchmarks/evidence.py are read alike. A run that was stopped is drawn
as far as it came; one of which only the last point is known, as a dot.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes

from adatape.show.pictures.style import ALERT, BLUE, FAINT, GREEN, ORANGE, PURPLE, picture, tidy

LENGTHS = (16, 32, 64, 128)
COLOURS = {
    "adatape": GREEN,
    "transformer": PURPLE,
    "ut": BLUE,
    "singles": ORANGE,
    "random": ALERT,
    "order": FAINT,
}
NAMES = {
    "adatape": "AdaTape",
    "transformer": "Transformer, three rates",
    "ut": "Universal Transformer",
    "singles": "control: symbols singly",
    "random": "control: random pairs",
    "order": "control: pairs in order",
}


class Curve(NamedTuple):
    system: str
    length: int
    points: list[tuple[int, float]]  # step and validation accuracy


def curves(place: Path) -> Iterator[Curve]:
    for path in sorted(place.glob("*.json")):
        for row in json.loads(path.read_text()):
            words = shlex.split(row["options"])
            options = dict(zip(words[::2], words[1::2], strict=True))
            if row.get("session", "").startswith("exploration"):
                continue
            yield Curve(options.get("--system", "adatape"), int(options["--length"]), [tuple(p) for p in row["curve"]])
    for path in sorted(place.rglob("metrics.jsonl")):
        config = json.loads((path.parent / "config.json").read_text())
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        points = [(line["step"], line["accuracy"]) for line in lines if line["kind"] == "validation"]
        yield Curve(path.parent.parent.name.split("-")[0], config["data"]["length"], points)


def draw(path: Path, every: list[Curve]) -> None:
    with picture(path, 5.6) as figure:
        panels = figure.subplots(2, 2, sharey=True, sharex=True)
        for axes, length in zip(panels.flat, LENGTHS, strict=True):
            for system in COLOURS:
                _draw(axes, [curve for curve in every if (curve.system, curve.length) == (system, length)], system)
            axes.axhline(50, color=FAINT, linewidth=0.8, linestyle=":")
            axes.set(title=f"N = {length}", ylim=(40, 103))
            tidy(axes)
        for axes in panels[1]:
            axes.set_xlabel("training step")
        for axes in panels[:, 0]:
            axes.set_ylabel("validation accuracy (%)")
        handles = {
            text: line for axes in panels.flat for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, frameon=False)


def _draw(axes: Axes, found: list[Curve], system: str) -> None:
    for n, curve in enumerate(found):
        steps, accuracy = [step for step, _ in curve.points], [100 * share for _, share in curve.points]
        marker = "o" if len(steps) == 1 else ""
        label = NAMES[system] if n == 0 else None
        axes.plot(steps, accuracy, color=COLOURS[system], linewidth=1.5, marker=marker, markersize=5, label=label)


if __name__ == "__main__":
    draw(Path(sys.argv[2]), list(curves(Path(sys.argv[1]))))
