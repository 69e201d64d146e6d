"""What the columns of printed tables mean, where their names do not say it, and the units of their figures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adatape.config import Budget

SMALL = 0.1  # GFLOPs below which millions say more
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


def legend(columns: Iterable[str]) -> list[str]:
    """One line that explains those of the columns that need it; none where no column does."""
    known = [f"{name}: {LEGEND[name]}" for name in dict.fromkeys(columns) if name in LEGEND]
    batches = [f"{name}: for one image of a batch of {name[6:]}" for name in columns if _is_batch(name)]
    return ["; ".join(known + batches)] if known or batches else []


def unit_of(gflops: float) -> tuple[str, int]:
    """Millions where billions would say little, and how many are a billion."""
    return ("GFLOPs", 1) if gflops >= SMALL else ("MFLOPs", 1000)


def budget_text(budget: Budget) -> str:
    return f"steps {budget.steps}" + ("" if budget.threshold is None else f", threshold {budget.threshold:.3g}")


def _is_batch(name: str) -> bool:
    return name.startswith("ms of ") and name[6:].isdigit()
