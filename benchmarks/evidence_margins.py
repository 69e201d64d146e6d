"""Who is ahead of whom at equal cost, and by how much: in accuracy, from few images, and among adaptive systems."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from evidence_cells import OURS, PLAIN, Cell, at_budgets, table, with_budgets

ADAPTIVE = ("avit", "ponder", "u2t", "ut", "uvit")
DEARER = 1.02  # what a rival may cost at most, in units of ours: equal but for a rounding of lengths


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
            yield Margin(ours, rival, *_lead(ours, rival, "accuracy"), beyond_line(ours, plain))


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


def against_adaptive(every: Sequence[Cell]) -> Iterator[Margin]:
    """For each other adaptive system the best of ours that costs no more, smaller budgets included."""
    for rival in (cell for cell in every if cell.name in ADAPTIVE):
        limit = DEARER * rival.mean("gflops_mean")
        whole = [cell for cell in every if cell.recipe == rival.recipe and cell.name.startswith(OURS)]
        mine = [each for cell in whole for each in (cell, *_cheaper(cell)) if each.mean("gflops_mean") <= limit]
        if mine:
            ours = max(mine, key=lambda cell: cell.mean("accuracy"))
            yield Margin(ours, rival, *_lead(ours, rival, "accuracy"), None)


def _cheaper(cell: Cell) -> list[Cell]:
    return [each for each in at_budgets(cell) if each.mean("gflops_mean") < 0.999 * cell.mean("gflops_mean")]


def _lead(ours: Cell, rival: Cell, name: str) -> tuple[float, float]:
    """In points, and the error of that."""
    return 100 * (ours.mean(name) - rival.mean(name)), 100 * math.hypot(ours.error(name), rival.error(name))


def margin_table(every: Sequence[Cell]) -> str:
    head = [
        "set",
        "system",
        "seeds",
        "GFLOPs",
        "best plain ViT that costs no more",
        "its cost ÷ ours",
        "ahead by, points",
    ]
    head += ["± error", "", "above the line between plain ViTs"]
    rows = [
        [
            each.ours.recipe,
            each.ours.name,
            str(len(each.ours.results)),
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


def adaptive_table(every: Sequence[Cell]) -> str:
    head = ["set", "adaptive system", "GFLOPs", "best of ours that costs no more", "GFLOPs", "ahead by, points"]
    rows = [
        [
            each.rival.recipe,
            each.rival.name,
            f"{each.rival.mean('gflops_mean'):.4f}",
            each.ours.name,
            f"{each.ours.mean('gflops_mean'):.4f}",
            told_lead(each.points, each.error),
        ]
        for each in against_adaptive(every)
    ]
    return table(head, rows) if rows else ""


def told_lead(points: float, error: float) -> str:
    """Bold where it is more than two errors ahead; behind by as much, with a mark."""
    text = f"{points:+.2f}" + ("" if math.isnan(error) else f" ± {error:.2f}")
    return f"**{text}**" if points > 2 * error else f"{text} ▼" if -points > 2 * error else text


class Learnt(NamedTuple):
    """What a system scores on a set from a number of shots, by pre-training seed: a cell for `_lead`."""

    cell: Cell
    column: tuple[str, int]

    def as_cell(self) -> Cell:
        told = self.cell.told("fewshot.json")
        means = [row["mean"] for each in told for row in each[self.column[0]] if row["shots"] == self.column[1]]
        return self.cell._replace(results=[{"accuracy": mean} for mean in means])


def columns_of(every: Sequence[Cell]) -> list[tuple[str, int]]:
    """Sets and numbers of shots that these systems were tried on."""
    told = next((found for cell in every if (found := cell.told("fewshot.json"))), None)
    return [(name, row["shots"]) for name, rows in told[0].items() for row in rows] if told else []


def few_shot_margins(every: Sequence[Cell]) -> str:
    """Ours against the plain ViT that is best in the same column and costs no more."""
    parts = []
    for recipe in dict.fromkeys(cell.recipe for cell in every):
        tried = [cell for cell in every if cell.recipe == recipe and cell.told("fewshot.json")]
        columns, rows = columns_of(tried), []
        for ours in (cell for cell in tried if cell.name.startswith(OURS)):
            limit = DEARER * ours.mean("gflops_mean")
            rivals = [cell for cell in tried if cell.name.startswith(PLAIN) and cell.mean("gflops_mean") <= limit]
            if rivals:
                leads = [_few_shot_lead(ours, rivals, column) for column in columns]
                rows.append([recipe, ours.name, *(told_lead(*lead) for lead in leads)])
        heads = [f"{name}, {shots} shot{'s' if shots > 1 else ''}" for name, shots in columns]
        parts += [table(["pre-trained on", "system", *heads], rows)] if rows else []
    return "\n\n".join(parts)


def _few_shot_lead(ours: Cell, rivals: Sequence[Cell], column: tuple[str, int]) -> tuple[float, float]:
    best = max((Learnt(cell, column).as_cell() for cell in rivals), key=lambda cell: cell.mean("accuracy"))
    return _lead(Learnt(ours, column).as_cell(), best, "accuracy")
