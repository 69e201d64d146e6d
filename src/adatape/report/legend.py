"""What the columns of printed tables mean, where their names do not say it, and what the figures of a run show."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adatape.config import Budget

LEGEND = {
    "M": "millions of parameters",
    "M parameters": "millions of parameters",
    "adapts": "what varies from input to input",
    "tape length": "tape tokens read, mean ± standard deviation",
    "length": "mean tape tokens read, or steps taken",
    "sequence": "mean tokens of input and tape",
    "longest": "most tokens",
    "variance": "of tape length",
    "paper": "the paper's figure for what stands to the left",
    "÷ ours": "the paper's GFLOPs ÷ ours - 1",
    "GFLOPs": "billions of multiply-adds for one sample",
    "GFLOPs mean": "mean billions of multiply-adds for one sample",
    "GFLOPs (bound)": "billions of multiply-adds for one sample, with the longest tape or all steps",
    "MFLOPs mean": "mean millions of multiply-adds for one sample",
    "MFLOPs": "millions of multiply-adds for one sample",
    "p50": "its median",
    "p95": "its 95th percentile",
    "bound": "with the longest tape or all steps",
    "typical": "mean GFLOPs over 8 noise images, before training",
    "share": "of all GFLOPs",
    "halts at": "halting sum at which reading stops; of windows, the score below which none is read",
    "mean AP": "mean over labels of the average precision",
    "test mean AP": "mean over labels of the average precision",
    "ms alone": "for one image by itself",
    "shots": "training images per class",
    "l2": "strength of the ridge",
    "seeds": "random choices of those images",
}


CAPTIONS = {  # in the order in which figures are listed
    "training": "Loss, accuracy or mean AP, tape length by step; the band is one standard deviation over samples.",
    "parity": "Accuracy, tape lengths, and one sequence with the pairs that were read.",
    "quality": "Accuracy or mean AP of the one model against what it costs at several budgets.",
    "budgets": "Budgets: accuracy or mean AP against work and time, tape lengths, easy and hard samples.",
    "heatmap": "How often each patch of the image is read, in all and by step.",
    "long_tail": "How often each bank token is read, most read first; both axes are logarithmic.",
    "lengths": "Tape lengths of all samples, and of right and wrong answers.",
    "lengths_by_class": "Tape lengths by class.",
    "easy": "Samples that cost the model least.",
    "hard": "Samples that cost the model most.",
    "mistakes": "Samples that it gets wrong.",
}


def caption(figure: str) -> str:
    return CAPTIONS.get(figure, figure)


def rank(figure: str) -> tuple[int, str]:
    """Those that we know first."""
    return (list(CAPTIONS).index(figure) if figure in CAPTIONS else len(CAPTIONS), figure)


def legend(columns: Iterable[str]) -> list[str]:
    """One line that explains those of the columns that need it; none where no column does."""
    known = [f"{name}: {LEGEND[name]}" for name in dict.fromkeys(columns) if name in LEGEND]
    sizes = [name.removeprefix("ms of ") for name in columns if re.fullmatch(r"ms of \d+", name)]
    batches = [f"ms of {size}: for one image of a batch of {size}" for size in sizes]
    return ["; ".join(known + batches)] if known or batches else []


def budget_text(budget: Budget) -> str:
    return f"steps {budget.steps}" + ("" if budget.threshold is None else f", threshold {budget.threshold:.3g}")
