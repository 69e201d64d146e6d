"""Tables of a study on images: accuracy for cost, few shots, what lengths follow, smaller budgets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from cells import Cell, at_budgets, by_set, cells, percent, table
from margins import Column, adaptive_table, columns_of, few_shot_margins, headed, learnt, margin_table
from rows import Row

JUDGE = "plain-4-depth-4"  # the model whose loss defines how hard an image is


def accuracies(every: Sequence[Cell]) -> str:
    """Accuracy and cost of every system, one table for all sets."""
    head = ["set", "system", "accuracy, %", "seeds", "GFLOPs, mean", "bound", "M parameters", "images/s ᵃ", "tape"]
    rows = []
    for cell in every:
        speed = cell.mean("images_per_second")
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
                cell.tape if cell.mean("length_mean") else "",
            ]
        )
    return (
        table(head, rows)
        + "\n\nᵃ Inference in bf16 as a CUDA graph, batch 500: nothing ends early, so it goes with the bound."
    )


def few_shots(every: Sequence[Cell]) -> str:
    """Few-shot accuracy, one table for each pre-training set, since their few-shot sets differ.

    Mean over pre-training seeds of the mean over draws; ± is over pre-training seeds.
    """
    parts = []
    for of_set in by_set(every):
        tried = [cell for cell in of_set if cell.told("fewshot")]
        columns, rows = columns_of(tried), []
        for cell in tried:
            scores = [learnt(cell, column).values("accuracy") for column in columns]
            rows.append([cell.recipe, cell.name, str(len(scores[0])), *map(percent, scores)])
        parts += [table(["pre-trained on", "system", "seeds", *map(headed, columns)], rows)] if rows else []
    return "\n\n".join(parts)


def second_means(every: Sequence[Cell]) -> str:
    """Few-shot accuracy with additional features: the mean of an earlier block's rows, or of the tape's."""
    parts = []
    for of_set in by_set(every):
        head, rows = [], []
        for cell in of_set:
            for kind, scores in _by_kind(cell).items():
                head = ["pre-trained on", "system", "features", "seeds", *map(headed, scores)]
                seeds = str(len(next(iter(scores.values()))))
                rows.append([cell.recipe, cell.name, kind, seeds, *map(percent, scores.values())])
        parts += [table(head, rows)] if rows else []
    return "\n\n".join(parts)


def _by_kind(cell: Cell) -> dict[str, dict[Column, list[float]]]:
    """For each kind of features, the scores of all seeds by column."""
    found: dict[str, dict[Column, list[float]]] = {}
    for told in cell.told("second_means"):
        for on, by_kind in told.items():
            for kind, row in ((kind, row) for kind, shots in by_kind.items() for row in shots):
                found.setdefault(kind, {}).setdefault((on, row["shots"]), []).append(row["mean"])
    return found


def difficulty_table(every: Sequence[Cell]) -> str:
    """Rank correlation of tape lengths with the judge's loss on the same images, mean over its seeds (`look.py`)."""
    head = ["set", "system", f"ρ of length with the loss of {JUDGE}, by seed", "95 % intervals"]
    rows = []
    for cell in every:
        if found := [told[JUDGE] for told in cell.told("difficulty") if JUDGE in told]:
            rhos = ", ".join(f"{each['rho']:+.3f}" for each in found)
            intervals = ", ".join(f"{each['low']:+.3f} to {each['high']:+.3f}" for each in found)
            rows.append([cell.recipe, cell.name, rhos, intervals])
    return table(head, rows) if rows else ""


def saturations(every: Sequence[Cell]) -> str:
    """Norm scale, largest weight and tape length: a large scale saturates the softmax, which ends tapes early."""
    rows = []
    for cell in every:
        told = cell.told("reading")
        if not told:
            continue
        scales = [each["norm_scale"] for each in told if "norm_scale" in each]
        rows.append(
            [
                cell.recipe,
                cell.name,
                f"{statistics.fmean(scales):.2f}" if scales else "",
                f"{statistics.fmean(each['top_weight'] for each in told):.2f}",
                cell.tape,
            ]
        )
    head = ["set", "system", "scale of the norm, trained", "largest weight of a step ᵇ", "tape"]
    note = "\n\nᵇ Of K that add up to 1; a selective reader takes one token a step, and this is its mean gate."
    return table(head, rows) + note if rows else ""


def budgets(every: Sequence[Cell]) -> str:
    """Accuracy of each trained model at smaller budgets, mean over seeds."""
    rows = []
    for cell in every:
        points = [
            f"{each.name.rpartition(' at ')[2]}: {100 * each.mean('accuracy'):.1f} ({each.mean('gflops_mean'):.3f})"
            for each in at_budgets(cell, least=0)
        ]
        rows += [[cell.recipe, cell.name, " · ".join(points)]] if points else []
    return table(["set", "system", "most tape tokens: accuracy, % (GFLOPs)"], rows) if rows else ""


def tables_of(rows: Sequence[Row]) -> dict[str, str]:
    """The tables of a study by title, without those that it has no figures for."""
    every = cells(rows)
    parts = {
        "Accuracy and cost": accuracies(every),
        "At equal cost": margin_table(every),
        "Against other adaptive systems": adaptive_table(every),
        "Few shots": few_shots(every),
        "Few shots, at equal cost": few_shot_margins(every),
        "Few shots, by what is beside the pooled mean": second_means(every),
        "Does length follow difficulty?": difficulty_table(every),
        "Why lengths are what they are": saturations(every),
        "One model, smaller budgets": budgets(every),
    }
    return {name: text for name, text in parts.items() if text}
