"""Differences between systems at equal cost: accuracy, few-shot accuracy, and other adaptive systems."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cells import OURS, PLAIN, Cell, at_budgets, by_set, comparable, table, with_budgets

ADAPTIVE = ("avit", "ponder", "u2t", "ut", "uvit")
DEARER = 1.02  # maximum cost of a rival relative to ours; the tolerance is for rounded lengths


class Lead(NamedTuple):
    """Points, with the standard error of the difference."""

    points: float
    error: float

    @property
    def ahead(self) -> bool:
        return self.points > 2 * self.error

    def __str__(self) -> str:
        """Bold if more than two errors ahead; marked ▼ if more than two errors behind."""
        text = f"{self.points:+.2f}" + ("" if math.isnan(self.error) else f" ± {self.error:.2f}")
        return f"**{text}**" if self.ahead else f"{text} ▼" if -self.points > 2 * self.error else text


def lead(ours: Cell, rival: Cell) -> Lead:
    error = math.hypot(ours.error("accuracy"), rival.error("accuracy"))
    return Lead(100 * (ours.mean("accuracy") - rival.mean("accuracy")), 100 * error)


class Margin(NamedTuple):
    """The lead of one of our systems over a rival at equal cost."""

    ours: Cell
    rival: Cell
    lead: Lead
    beyond: Lead | None = None  # over the line between the next cheaper and the next more expensive plain ViT


def affordable(every: Sequence[Cell], at: Cell) -> list[Cell]:
    return [cell for cell in every if cell.mean("gflops_mean") <= DEARER * at.mean("gflops_mean")]


def best(every: Sequence[Cell]) -> Cell:
    return max(every, key=lambda cell: cell.mean("accuracy"))


def margins(every: Sequence[Cell]) -> Iterator[Margin]:
    """Each of ours against the best plain ViT that costs no more."""
    every = comparable(every)
    for ours in (cell for cell in every if cell.name.startswith(OURS)):
        plain = [cell for cell in every if cell.recipe == ours.recipe and cell.name.startswith(PLAIN)]
        if rivals := affordable(plain, ours):
            rival = best(rivals)
            yield Margin(ours, rival, lead(ours, rival), beyond_line(ours, plain))


def beyond_line(ours: Cell, plain: Sequence[Cell]) -> Lead | None:
    """Lead over the line between plain ViTs, which is flat where a more expensive one is no better; None outside it."""
    points, cost = best_of(plain), ours.mean("gflops_mean")
    for cheap, dear in itertools.pairwise(points):
        x0, x1 = cheap.mean("gflops_mean"), dear.mean("gflops_mean")
        if x0 <= cost <= x1:
            return _over_mix(ours, cheap, dear, (cost - x0) / (x1 - x0))
    if points and points[-1].mean("gflops_mean") <= cost <= max(cell.mean("gflops_mean") for cell in plain):
        return lead(ours, points[-1])
    return None


def _over_mix(ours: Cell, cheap: Cell, dear: Cell, share: float) -> Lead:
    between = (1 - share) * cheap.mean("accuracy") + share * dear.mean("accuracy")
    error = math.hypot(ours.error("accuracy"), (1 - share) * cheap.error("accuracy"), share * dear.error("accuracy"))
    return Lead(100 * (ours.mean("accuracy") - between), 100 * error)


def best_of(plain: Sequence[Cell]) -> list[Cell]:
    """The Pareto-optimal plain ViTs, cheapest first."""
    found: list[Cell] = []
    for cell in sorted(plain, key=lambda cell: (cell.mean("gflops_mean"), -cell.mean("accuracy"))):
        if not found or cell.mean("accuracy") > found[-1].mean("accuracy"):
            found.append(cell)
    return found


def by_seed(ours: Cell, rival: Cell) -> list[float]:
    """Differences in points for the seeds that both have, which share data order and augmentation."""
    theirs = _scores(rival)
    return [100 * (score - theirs[seed]) for seed, score in _scores(ours).items() if seed in theirs]


def _scores(cell: Cell) -> dict[str, float]:
    """Accuracy by seed."""
    seeds = [row["run"].rpartition("/")[2] for row in cell.rows]
    return {seed: float(result["accuracy"]) for seed, result in zip(seeds, cell.results, strict=True)}


def against_adaptive(every: Sequence[Cell]) -> Iterator[Margin]:
    """For each other adaptive system, our best one that costs no more, smaller budgets included."""
    every = comparable(every)
    for rival in (cell for cell in every if cell.name in ADAPTIVE):
        whole = [cell for cell in every if cell.recipe == rival.recipe and cell.name.startswith(OURS)]
        if mine := affordable(comparable([each for cell in whole for each in (cell, *_cheaper(cell))]), rival):
            ours = best(mine)
            yield Margin(ours, rival, lead(ours, rival))


def _cheaper(cell: Cell) -> list[Cell]:
    """The budgets below the full one, whose cost differs only by rounding."""
    return [each for each in at_budgets(cell) if each.mean("gflops_mean") < 0.999 * cell.mean("gflops_mean")]


def margin_table(every: Sequence[Cell]) -> str:
    head = ["set", "system", "seeds", "GFLOPs", "best plain ViT that costs no more", "its cost ÷ ours"]
    head += ["ahead by, points", "seed by seed", "above the line between plain ViTs"]
    rows = [
        [
            each.ours.recipe,
            each.ours.name,
            str(len(each.ours.results)),
            f"{each.ours.mean('gflops_mean'):.4f}",
            each.rival.name,
            f"{each.rival.mean('gflops_mean') / each.ours.mean('gflops_mean'):.2f}",
            str(each.lead),
            ", ".join(f"{points:+.2f}" for points in by_seed(each.ours, each.rival)),
            "" if each.beyond is None else str(each.beyond),
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
            str(each.lead),
        ]
        for each in against_adaptive(every)
    ]
    return table(head, rows) if rows else ""


Column = tuple[str, int]  # a set, and how many images of each class


def learnt(cell: Cell, column: Column) -> Cell:
    """What it scores there, by pre-training seed."""
    on, shots = column
    means = [row["mean"] for each in cell.told("fewshot") for row in each[on] if row["shots"] == shots]
    return cell._replace(results=[{"accuracy": mean, "gflops_mean": cell.mean("gflops_mean")} for mean in means])


def columns_of(every: Sequence[Cell]) -> list[Column]:
    """That these systems were tried in."""
    told = next((found for cell in every if (found := cell.told("fewshot"))), None)
    return [(name, row["shots"]) for name, rows in told[0].items() for row in rows] if told else []


def headed(column: Column) -> str:
    return f"{column[0]}, {column[1]} shot{'s' if column[1] > 1 else ''}"


def few_shot_margins(every: Sequence[Cell]) -> str:
    """Ours against the plain ViT that is best in the same column and costs no more, and against the line between."""
    parts = []
    for of_set in by_set(every):
        tried = [cell for cell in of_set if cell.told("fewshot")]
        tried = comparable(tried, lambda cell: len(cell.told("fewshot")))
        plain = [cell for cell in tried if cell.name.startswith(PLAIN)]
        columns, rows = columns_of(tried), []
        for ours in (cell for cell in tried if cell.name.startswith(OURS)):
            if rivals := affordable(plain, ours):
                leads = [lead(learnt(ours, each), best([learnt(cell, each) for cell in rivals])) for each in columns]
                rows.append([ours.recipe, ours.name, *map(str, leads)])
                lines = [beyond_line(learnt(ours, each), [learnt(cell, each) for cell in plain]) for each in columns]
                if any(lines):
                    rows.append(["", "above the line", *("" if line is None else str(line) for line in lines)])
        parts += [table(["pre-trained on", "system", *map(headed, columns)], rows)] if rows else []
    return "\n\n".join(parts)
