"""One picture for each concept of docs/concepts.md: bank, reader, tape, budget.

python research/concept_pictures.py        draws concept_*.png in docs/images
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from PIL import Image
from rows import RESULTS

from adatape.atr import read_tape
from adatape.records import Tape
from adatape.report.pictures.style import FAINT, GREEN, HEAT, INK, ORANGE, picture, tidy

IMAGES = RESULTS.parent / "docs" / "images"
STREET = RESULTS.parent / "src" / "adatape" / "serve" / "models" / "street"
SCENE = STREET / "examples" / "00018.webp"
INPUTS, BANK, STEPS, THRESHOLD = 6, 18, 6, 2.0  # of the example: K = STEPS / THRESHOLD = 3


def example() -> Tape:
    """Three samples that read a bank of 18 random tokens, three at a time."""
    random = torch.Generator().manual_seed(5)
    query, bank = torch.randn(3, 16, generator=random), torch.randn(BANK, 16, generator=random)
    query = query * torch.tensor([1.0, 4.0, 0.1])[:, None]  # a long query prefers some tokens by far, a short one none
    return read_tape(query, bank, steps=STEPS, threshold=THRESHOLD, query_width=16)


def draw_bank(path: Path) -> None:
    """One image twice: the patches that every sample sees, and the finer ones that may be read."""
    scene = Image.open(SCENE).convert("RGB")
    side = min(scene.size)
    image = np.asarray(scene.crop((0, 0, side, side)).resize((224, 224), Image.Resampling.LANCZOS))
    with picture(path, 3.9) as figure:
        panels = figure.subplots(1, 2)
        for axes, patch, title in zip(
            panels,
            (16, 8),
            ("tokens: 196 patches of 16 px, always seen", "bank: 784 patches of 8 px, may be read"),
            strict=True,
        ):
            axes.imshow(image)
            axes.set_xticks(np.arange(patch, 224, patch) - 0.5, minor=True)
            axes.set_yticks(np.arange(patch, 224, patch) - 0.5, minor=True)
            axes.grid(which="minor", color="white", linewidth=0.5)
            axes.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
            axes.set_title(title, fontsize=10)


def few_colours(path: Path) -> None:
    """A photograph as a PNG is large; with a palette it is a third of that."""
    Image.open(path).convert("RGB").quantize(96).save(path, optimize=True)


def draw_reader(path: Path, tape: Tape) -> None:
    """Step by step, which three bank tokens the first sample takes, with which weights, and when it stops."""
    weights = np.full((STEPS, BANK), np.nan)
    for step in range(int(tape.length[0])):
        weights[step, tape.index[0, step]] = tape.weight[0, step]
    with picture(path, 3.4) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 1.3))
        left.imshow(weights, cmap=HEAT, vmin=0, vmax=1, aspect="auto")
        for (step, token), weight in np.ndenumerate(weights):
            if not np.isnan(weight):
                left.text(
                    token,
                    step,
                    f"{weight:.2f}"[1:],
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if weight > 0.4 else INK,
                )
        left.set(title="weights of the K = 3 best at each step", xlabel="bank token", ylabel="step")
        left.set_xticks(range(BANK))
        left.set_yticks(range(STEPS), range(1, STEPS + 1))
        left.set_facecolor("#F4F5F4")
        sums = tape.weight[0].amax(-1).cumsum(0)[: int(tape.length[0])].numpy()
        right.barh(range(len(sums)), sums, color=GREEN, height=0.6)
        right.axvline(THRESHOLD, color=ORANGE, linewidth=1.5)
        right.set(
            title="halting sum",
            xlabel="sum of the largest weights",
            ylim=(STEPS - 0.5, -0.5),
            xlim=(0, THRESHOLD + 0.9),
        )
        right.text(THRESHOLD + 0.04, -0.1, "threshold", color=ORANGE, fontsize=9)
        right.set_yticks(range(STEPS), range(1, STEPS + 1))
        tidy(right, "x")


def draw_tapes(path: Path, tape: Tape) -> None:
    """Sequences of three samples: the same inputs, tapes of different lengths, hidden places behind them."""
    with picture(path, 2.5) as figure:
        axes = figure.subplots()
        for row, length in enumerate(tape.length.tolist()):
            for column in range(INPUTS + STEPS):
                kind = "input" if column < INPUTS else "tape" if column < INPUTS + length else "hidden"
                _square(axes, column, row, kind)
            axes.text(-0.4, row + 0.5, f"sample {row + 1}", ha="right", va="center", fontsize=10)
        axes.text(INPUTS / 2, -0.25, "input tokens", ha="center", fontsize=10)
        axes.text(INPUTS + STEPS / 2, -0.25, "tape, at most 6 tokens", ha="center", fontsize=10, color=GREEN)
        axes.set(xlim=(-2, INPUTS + STEPS), ylim=(3.1, -0.8), aspect="equal")
        axes.axis("off")


def _square(axes: Axes, column: int, row: int, kind: str) -> None:
    look: dict[str, dict[str, Any]] = {
        "input": {"facecolor": "#DDEBE5", "edgecolor": FAINT},
        "tape": {"facecolor": GREEN, "edgecolor": GREEN},
        "hidden": {"facecolor": "none", "edgecolor": FAINT, "linestyle": ":"},
    }
    axes.add_patch(Rectangle((column + 0.08, row + 0.08), 0.84, 0.84, linewidth=1, **look[kind]))


def draw_budget(path: Path) -> None:
    """One trained model, the packaged one of street scenes, at several budgets."""
    rows = json.loads((STREET / "figures" / "budgets.json").read_text())["rows"]
    cost, value = [row["gflops_mean"] for row in rows], [100 * row["mean_ap"] for row in rows]
    with picture(path, 3.2) as figure:
        axes = figure.subplots()
        axes.plot(cost, value, color=GREEN, marker="o", linewidth=1.5)
        for row, x, y in zip(rows, cost, value, strict=True):
            axes.annotate(str(row["steps"]), (x, y), (6, -14), textcoords="offset points", color=INK, fontsize=10)
        axes.set(
            title="one model, windows it may read beside each point",
            xlabel="GFLOPs per image, mean over 300 street scenes",
            ylabel="mean AP (%)",
        )
        axes.margins(y=0.14)
        tidy(axes, "both")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=IMAGES)
    into = parser.parse_args(given).into
    tape = example()
    draw_bank(into / "concept_bank.png")
    few_colours(into / "concept_bank.png")
    draw_reader(into / "concept_reader.png", tape)
    draw_tapes(into / "concept_tape.png", tape)
    draw_budget(into / "concept_budget.png")


if __name__ == "__main__":
    main()
