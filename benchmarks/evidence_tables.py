"""What evidence.py found, as tables and a picture: regenerated from the small files under results/, by one command.

    python benchmarks/evidence_tables.py results/evidence                                to read
    python benchmarks/evidence_tables.py results/evidence --into docs/results.md --picture docs/images/evidence.png

With `--into` the tables replace what stands between the lines `<!-- evidence -->` and `<!-- end of evidence -->`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adatape.measure.difficulty import Correlation, spearman
from adatape.show.pictures.style import FAINT, INK, ORANGE, PURPLE, picture, tidy

BEGIN, END = "<!-- evidence -->", "<!-- end of evidence -->"
PLAIN, OURS = "plain-", "adatape"
WORTH_SEEING = 8  # points below a model's best that its smaller budgets are drawn down to
DEARER = 1.02  # what a rival may cost at most, in units of ours: equal but for a rounding of lengths


class Cell(NamedTuple):
    """A system on a set of images, over its seeds."""

    recipe: str
    name: str
    folders: list[Path]
    results: list[dict[str, Any]]

    def values(self, name: str) -> list[float]:
        return [float(result[name]) for result in self.results if result.get(name) is not None]

    def told(self, name: str) -> list[Any]:
        """What the runs that have such a file say in it."""
        return [json.loads(path.read_text()) for folder in self.folders if (path := folder / name).is_file()]

    def mean(self, name: str) -> float:
        found = self.values(name)
        return statistics.fmean(found) if found else math.nan

    def error(self, name: str) -> float:
        """Of the mean, over seeds."""
        found = self.values(name)
        return statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else math.nan


def found_in(folder: Path) -> dict[str, Any]:
    """A run's result; of one that held images out its score on those, since nobody chooses by the test set."""
    result = json.loads((folder / "result.json").read_text())
    if json.loads((folder / "config.json").read_text())["data"].get("validate_on") is None:
        return result
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line.get("kind") == "validation"][-1]
    return result | {name: last[name] for name in ("accuracy", "length_mean", "length_var")}


def cells(out: Path) -> list[Cell]:
    """Every system of every set, dearest last."""
    found = []
    for place in sorted(path for path in out.glob("*/*") if path.is_dir()):
        folders = sorted(path.parent for path in place.glob("seed-*/result.json"))
        if folders:
            found.append(Cell(place.parent.name, place.name, folders, [found_in(folder) for folder in folders]))
    return sorted(found, key=lambda cell: (cell.recipe, cell.mean("gflops_mean"), cell.name))


def with_budgets(every: Sequence[Cell]) -> list[Cell]:
    """And every smaller budget that a trained model was scored at, as a cell of its own: one model, many costs."""
    found = list(every)
    for cell in every:
        told = cell.told("budgets.json")
        for n, row in enumerate(told[0] if told else ()):
            if row.get("steps", 0) > 0 and row["length_mean"] < cell.mean("length_mean") - 0.5:
                found.append(cell._replace(name=f"{cell.name} at {row['steps']}", results=[each[n] for each in told]))
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(head), "|".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" if n != 1 else f"|{line}|" for n, line in enumerate(lines))


def percent(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds."""
    spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.2f}{spread}"


def accuracies(every: Sequence[Cell]) -> str:
    """One table for all sets: what a system scores and what it costs."""
    head = ["set", "system", "accuracy, %", "seeds", "GFLOPs, mean", "bound", "M parameters", "images/s ᵃ", "tape"]
    rows = []
    for cell in every:
        speed, length = cell.mean("images_per_second"), cell.mean("length_mean")
        spread = statistics.fmean(value**0.5 for value in cell.values("length_var"))
        rows.append(
            [
                cell.recipe,
                cell.name,
                percent(cell.values("accuracy")),
                str(len(cell.results)),
                f"{cell.mean('gflops_mean'):.4f}",
                f"{cell.mean('gflops'):.4f}",
                f"{cell.mean('parameters') / 1e6:.2f}",
                "" if math.isnan(speed) else f"{speed:,.0f}",
                f"{length:.1f} ± {spread:.1f}" if length else "",
            ]
        )
    return (
        table(head, rows)
        + "\n\nᵃ Inference in bf16 as a CUDA graph, batch 500: nothing ends early, so it goes with the bound."
    )


class Margin(NamedTuple):
    """How far a system is ahead of the best plain ViT that costs no more, in points, with the error of that."""

    ours: Cell
    rival: Cell
    points: float
    error: float
    beyond: float | None  # points above the straight line between the plain ViTs that cost just less and just more

    @property
    def ahead(self) -> bool:
        return self.points > 2 * self.error


def margins(every: Sequence[Cell]) -> Iterator[Margin]:
    for ours in every:
        if not ours.name.startswith(OURS):
            continue
        plain = [cell for cell in every if cell.recipe == ours.recipe and cell.name.startswith(PLAIN)]
        limit = DEARER * ours.mean("gflops_mean")
        rivals = [cell for cell in plain if cell.mean("gflops_mean") <= limit]
        if rivals:
            rival = max(rivals, key=lambda cell: cell.mean("accuracy"))
            points = 100 * (ours.mean("accuracy") - rival.mean("accuracy"))
            error = 100 * math.hypot(ours.error("accuracy"), rival.error("accuracy"))
            yield Margin(ours, rival, points, error, beyond_line(ours, plain))


def beyond_line(ours: Cell, plain: Sequence[Cell]) -> float | None:
    """None where no plain ViT costs more: a line that ends is not drawn on."""
    points = best_of(plain)
    x, y = ours.mean("gflops_mean"), ours.mean("accuracy")
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= x <= x1:
            return 100 * (y - y0 - (y1 - y0) * (x - x0) / (x1 - x0))
    return None


def best_of(plain: Sequence[Cell]) -> list[tuple[float, float]]:
    """Cost and accuracy of those that no other beats for as little."""
    found: list[tuple[float, float]] = []
    for x, y in sorted((cell.mean("gflops_mean"), -cell.mean("accuracy")) for cell in plain):
        if not found or -y > found[-1][1]:
            found.append((x, -y))
    return found


def margin_table(every: Sequence[Cell]) -> str:
    head = ["set", "system", "GFLOPs", "best plain ViT that costs no more", "its cost ÷ ours", "ahead by, points"]
    head += ["± error", "", "above the line between plain ViTs"]
    rows = [
        [
            each.ours.recipe,
            each.ours.name,
            f"{each.ours.mean('gflops_mean'):.4f}",
            each.rival.name,
            f"{each.rival.mean('gflops_mean') / each.ours.mean('gflops_mean'):.2f}",
            f"{each.points:+.2f}",
            "" if math.isnan(each.error) else f"{each.error:.2f}",
            "**ahead**" if each.ahead else "",
            "" if each.beyond is None else f"{each.beyond:+.2f}",
        ]
        for each in margins(with_budgets(every))
    ]
    return table(head, rows) if rows else ""


def few_shots(every: Sequence[Cell]) -> str:
    """Mean over pre-training seeds of the mean over draws; ± is over pre-training seeds."""
    rows, columns = [], []
    for cell in every:
        told = cell.told("fewshot.json")
        if not told:
            continue
        keys = [(name, row["shots"]) for name, found in told[0].items() for row in found]
        columns = columns or keys
        scores = {
            key: [row["mean"] for each in told for row in each[key[0]] if row["shots"] == key[1]] for key in columns
        }
        rows.append([cell.recipe, cell.name, str(len(told)), *(percent(scores[key]) for key in columns)])
    heads = [f"{name}, {shots} shots" for name, shots in columns]
    return table(["pre-trained on", "system", "seeds", *heads], rows) if rows else ""


def lengths_and_losses(every: Sequence[Cell], plain: str) -> Iterator[tuple[Cell, list[Correlation]]]:
    """How far each system's lengths follow the loss of a plain ViT on the same images, the mean over that one's seeds.

    One correlation for each of the system's seeds, its interval from a bootstrap over images.
    """
    for recipe in dict.fromkeys(cell.recipe for cell in every):
        of_set = [cell for cell in every if cell.recipe == recipe]
        judged = [folder for cell in of_set if cell.name == plain for folder in _seen(cell)]
        if not judged:
            continue
        loss = torch.stack([_loss(folder) for folder in judged]).mean(0)
        for cell in of_set:
            seen = [_lengths(folder) for folder in _seen(cell)]
            if seen and all(length.min() < length.max() for length in seen):
                yield cell, [spearman(length, loss) for length in seen]


def _seen(cell: Cell) -> list[Path]:
    """Runs that say what became of each image."""
    return [folder for folder in cell.folders if (folder / "images.npz").is_file()]


def _loss(folder: Path) -> Tensor:
    certainty = np.load(folder / "images.npz")["certainty"].astype(np.float64)
    return -torch.from_numpy(certainty).clamp(min=1e-4).log()


def _lengths(folder: Path) -> Tensor:
    return torch.from_numpy(np.load(folder / "images.npz")["length"].astype(np.int64))


def difficulty_table(every: Sequence[Cell], plain: str) -> str:
    head = ["set", "system", f"ρ of length with the loss of {plain}, by seed", "95 % intervals"]
    rows = [
        [
            cell.recipe,
            cell.name,
            ", ".join(f"{each.rho:+.3f}" for each in found),
            ", ".join(f"{each.low:+.3f} to {each.high:+.3f}" for each in found),
        ]
        for cell, found in lengths_and_losses(every, plain)
    ]
    return table(head, rows) if rows else ""


def saturations(every: Sequence[Cell]) -> str:
    """Why lengths are what they are: a large scale makes one weight all there is, and a tape of a few steps is full."""
    rows = []
    for cell in every:
        told = cell.told("reading.json")
        if not told:
            continue
        scales = [each["norm_scale"] for each in told if "norm_scale" in each]
        spread = statistics.fmean(value**0.5 for value in cell.values("length_var"))
        rows.append(
            [
                cell.recipe,
                cell.name,
                f"{statistics.fmean(scales):.2f}" if scales else "",
                f"{statistics.fmean(each['top_weight'] for each in told):.2f}",
                f"{cell.mean('length_mean'):.1f} ± {spread:.1f}",
            ]
        )
    head = ["set", "system", "scale of the norm, trained", "largest weight of a step", "tape"]
    return table(head, rows) if rows else ""


def budgets(every: Sequence[Cell]) -> str:
    """Accuracy of one trained model where it may read less, mean over seeds."""
    rows = []
    for cell in every:
        told = cell.told("budgets.json")
        if not told:
            continue
        points = [
            f"{_setting(row)}: {100 * statistics.fmean(each[n]['accuracy'] for each in told):.1f} "
            f"({statistics.fmean(each[n]['gflops_mean'] for each in told):.3f})"
            for n, row in enumerate(told[0])
        ]
        rows.append([cell.recipe, cell.name, " · ".join(points)])
    return table(["set", "system", "most tape tokens: accuracy, % (GFLOPs)"], rows) if rows else ""


def _setting(row: dict[str, Any]) -> str:
    return f"haste {row['haste']:g}" if "haste" in row else str(row["steps"])


def sections(every: Sequence[Cell], plain: str) -> dict[str, str]:
    parts = {
        "Accuracy and cost": accuracies(every),
        "At equal cost": margin_table(every),
        "Few shots": few_shots(every),
        "Does length follow difficulty?": difficulty_table(every, plain),
        "Why lengths are what they are": saturations(every),
        "One model, smaller budgets": budgets(every),
    }
    return {name: text for name, text in parts.items() if text}


def put_into(path: Path, text: str) -> None:
    """Between the two lines that say where."""
    page = path.read_text()
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"{path} must have one line {BEGIN} and one line {END}, between which the tables go")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def draw(path: Path, every: Sequence[Cell]) -> None:
    """Accuracy against measured cost, a panel for each set; plain ViTs are joined, since more of one buys the next."""
    recipes = list(dict.fromkeys(cell.recipe for cell in every))
    with picture(path, 0.4 + 4.2 * len(recipes)) as figure:
        panels = figure.subplots(len(recipes), 1, squeeze=False)[:, 0]
        for axes, recipe in zip(panels, recipes, strict=True):
            for cell in (cell for cell in every if cell.recipe == recipe):
                x, y = cell.mean("gflops_mean"), 100 * cell.mean("accuracy")
                colour = PURPLE if cell.name.startswith(OURS) else FAINT if cell.name.startswith(PLAIN) else ORANGE
                spread = [100 * value for value in cell.values("accuracy")]
                bar = statistics.stdev(spread) if len(spread) > 1 else 0.0
                axes.errorbar(x, y, bar, fmt="o", color=colour, markersize=6)
                axes.annotate(cell.name, (x, y), (6, 4), textcoords="offset points", color=INK, fontsize=8)
                cheaper = [each for each in with_budgets([cell]) if y - 100 * each.mean("accuracy") < WORTH_SEEING]
                curve = sorted((each.mean("gflops_mean"), 100 * each.mean("accuracy")) for each in cheaper)
                axes.plot(*zip(*curve, strict=True), color=colour, linewidth=1, linestyle=":", marker=".")
            plain = best_of([cell for cell in every if cell.recipe == recipe and cell.name.startswith(PLAIN)])
            axes.plot([x for x, _ in plain], [100 * y for _, y in plain], color=FAINT, linewidth=1)
            axes.set_xlabel("GFLOPs per image, measured mean")
            axes.set_ylabel("accuracy (%)")
            axes.set_title(recipe)
            axes.margins(0.12, 0.12)
            tidy(axes, "both")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--plain", default="plain-4-depth-4", help="whose loss says how hard an image is")
    parser.add_argument("--into", type=Path, help="a page that has a place for the tables")
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    every = cells(arguments.out)
    if not every:
        parser.error(f"{arguments.out} holds no run; evidence.py makes them")
    parts = sections(every, arguments.plain)
    if arguments.into:
        put_into(arguments.into, "\n\n".join(f"### {name}\n\n{text}" for name, text in parts.items()))
    else:
        print("\n\n".join(f"{name}\n\n{text}" for name, text in parts.items()))
    if arguments.picture:
        draw(arguments.picture, every)


if __name__ == "__main__":
    main()
