"""What evidence.py found, as tables and a picture: regenerated from the small files under results/, by one command.

    python benchmarks/evidence_tables.py results/evidence                                to read
    python benchmarks/evidence_tables.py results/evidence --into docs/results.md --picture docs/images/evidence.png

With `--into` the tables replace what stands between the lines `<!-- evidence -->` and `<!-- end of evidence -->`, named
after the folder.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from evidence_cells import Cell, at_budgets, by_set, cells, percent, table
from evidence_margins import Column, adaptive_table, columns_of, few_shot_margins, headed, learnt, margin_table
from evidence_picture import draw
from torch import Tensor

from adatape.measure.difficulty import Correlation, spearman

NO_SPREAD = 0.1  # tokens: lengths that vary less follow nothing


def accuracies(every: Sequence[Cell]) -> str:
    """One table for all sets: what a system scores and what it costs."""
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
    """A table for each set that models were trained on, since each has other sets to learn from few images of.

    Mean over pre-training seeds of the mean over draws; ± is over pre-training seeds.
    """
    parts = []
    for of_set in by_set(every):
        tried = [cell for cell in of_set if cell.told("fewshot.json")]
        columns, rows = columns_of(tried), []
        for cell in tried:
            scores = [learnt(cell, column).values("accuracy") for column in columns]
            rows.append([cell.recipe, cell.name, str(len(scores[0])), *map(percent, scores)])
        parts += [table(["pre-trained on", "system", "seeds", *map(headed, columns)], rows)] if rows else []
    return "\n\n".join(parts)


def second_means(every: Sequence[Cell]) -> str:
    """Few shots by what is beside the pooled mean (`fewshot_rows.py`): one of rows of an earlier block, an echo."""
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
    """Of each kind of features, what every seed scores in each column."""
    found: dict[str, dict[Column, list[float]]] = {}
    for told in cell.told("rows.json"):
        for on, by_kind in told.items():
            for kind, row in ((kind, row) for kind, shots in by_kind.items() for row in shots):
                found.setdefault(kind, {}).setdefault((on, row["shots"]), []).append(row["mean"])
    return found


def lengths_and_losses(every: Sequence[Cell], plain: str) -> Iterator[tuple[Cell, list[Correlation]]]:
    """How far each system's lengths follow the loss of a plain ViT on the same images, the mean over that one's seeds.

    One correlation for each of the system's seeds, its interval from a bootstrap over images.
    """
    for of_set in by_set(every):
        judged = [folder for cell in of_set if cell.name == plain for folder in _seen(cell)]
        if not judged:
            continue
        loss = torch.stack([_loss(folder) for folder in judged]).mean(0)
        for cell in of_set:
            seen = [_lengths(folder) for folder in _seen(cell)]
            if seen and all(length.double().std() > NO_SPREAD for length in seen):
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
    """Accuracy of one trained model where it may read less, mean over seeds."""
    rows = []
    for cell in every:
        points = [
            f"{each.name.rpartition(' at ')[2]}: {100 * each.mean('accuracy'):.1f} ({each.mean('gflops_mean'):.3f})"
            for each in at_budgets(cell, least=0)
        ]
        rows += [[cell.recipe, cell.name, " · ".join(points)]] if points else []
    return table(["set", "system", "most tape tokens: accuracy, % (GFLOPs)"], rows) if rows else ""


def sections(every: Sequence[Cell], plain: str) -> dict[str, str]:
    parts = {
        "Accuracy and cost": accuracies(every),
        "At equal cost": margin_table(every),
        "Against other adaptive systems": adaptive_table(every),
        "Few shots": few_shots(every),
        "Few shots, at equal cost": few_shot_margins(every),
        "Few shots, by what is beside the pooled mean": second_means(every),
        "Does length follow difficulty?": difficulty_table(every, plain),
        "Why lengths are what they are": saturations(every),
        "One model, smaller budgets": budgets(every),
    }
    return {name: text for name, text in parts.items() if text}


def put_into(path: Path, name: str, text: str) -> None:
    """Between the two lines that say where."""
    page, begin, end = path.read_text(), f"<!-- {name} -->", f"<!-- end of {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"{path} must have one line {begin} and one line {end}, between which the tables go")
    before, after = page.split(begin)[0], page.split(end)[1]
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


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
        put_into(
            arguments.into,
            arguments.out.resolve().name,
            "\n\n".join(f"### {name}\n\n{text}" for name, text in parts.items()),
        )
    else:
        print("\n\n".join(f"{name}\n\n{text}" for name, text in parts.items()))
    if arguments.picture:
        draw(arguments.picture, every)


if __name__ == "__main__":
    main()
