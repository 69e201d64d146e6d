"""What is read: which bank tokens, how many of them, and for which samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from adatape.report.pictures.style import ALERT, FAINT, GREEN, HEAT, INK, WIDTH, picture, shortened, tidy

MOST_STEPS, MOST_CLASSES, MOST_MARKED, MOST_WRITTEN = 6, 16, 200, 12
FEW_DECADES = 300  # up to this ratio an axis has room for 2 and 5 between powers of ten


def draw_heatmap(path: Path, counts: Int[np.ndarray, "t c"], grid: tuple[int, int], samples: int, patch: int) -> Path:
    """The share of images for which each patch was read, in all and by step."""
    share = 100 * counts / samples
    read = np.flatnonzero(counts.any(1))
    steps = read if len(read) <= MOST_STEPS else read[np.linspace(0, len(read) - 1, MOST_STEPS).round().astype(int)]
    columns = -(-len(steps) // 2)
    with picture(path, 1.3 + WIDTH / (2 + columns) * 2 * min(1.5, grid[0] / grid[1])) as figure:
        places = figure.add_gridspec(2, 2 + columns)
        axes = figure.add_subplot(places[:, :2])
        image = axes.imshow(share.sum(0).reshape(grid), cmap=HEAT, vmin=0)
        axes.set_title("How often patches are read")
        _bare(axes)
        bar = figure.colorbar(image, ax=axes, orientation="horizontal", shrink=0.9, pad=0.03, format="%.3g %%")
        bar.outline.set_visible(False)
        bar.set_label(f"of {samples:,} images; {patch} × {patch} pixels a patch")
        for place, step in enumerate(steps):
            axes = figure.add_subplot(places[place // columns, 2 + place % columns])
            axes.imshow(share[step].reshape(grid), cmap=HEAT, vmin=0, vmax=share.max())  # a scale for all steps
            axes.set_title(f"step {step + 1}", fontweight="normal", fontsize=11, pad=4)
            axes.set_xlabel(f"at most {share[step].max():.3g} %", fontsize=9)
            _bare(axes)
    return path


def draw_long_tail(path: Path, counts: Int[np.ndarray, "c"], samples: int, learned: bool) -> Path:
    """Selections of each bank token, most selected first, both axes logarithmic."""
    ordered = np.sort(counts)[::-1]
    read, even = ordered[ordered > 0], ordered.sum() / len(counts)
    tenth = -(-len(counts) // 10)
    top, never = ordered[:tenth].sum() / max(1, ordered.sum()), len(counts) - len(read)
    with picture(path, 4.2) as figure:
        axes = figure.subplots()
        look = {"marker": "o", "markersize": 4} if len(read) <= MOST_MARKED else {}
        axes.loglog(np.arange(1, len(read) + 1), read, color=GREEN, linewidth=2, **look)
        axes.axhline(even, color=FAINT, linewidth=1, linestyle=":")
        axes.annotate("if all were read alike", (1, even), (0, -4), textcoords="offset points", va="top", color=FAINT)
        kind = "Learned" if learned else "Input"
        axes.set_title(f"{kind} bank: {tenth:,} of {len(counts):,} tokens take {100 * top:.0f} % of reads")
        axes.set_xlabel("bank token by rank" + (f"; {never:,} were never read" if never else ""))
        axes.set_ylabel(f"times read, {samples:,} samples")
        for axis, most, least in ((axes.xaxis, len(read), 1), (axes.yaxis, read.max(initial=1), read.min(initial=1))):
            axis.set_major_formatter("{x:,.0f}")
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if most < FEW_DECADES * least else (1,), numticks=12))
            axis.set_minor_formatter(NullFormatter())
        tidy(axes, "both")
    return path


def draw_lengths_by_answer(path: Path, lengths: Int[np.ndarray, "n"], right: np.ndarray) -> Path:
    """Tape lengths of all samples, and of right and wrong answers apart."""
    span = np.arange(lengths.max() + 1)
    with picture(path, 3.9) as figure:
        whole, apart = figure.subplots(1, 2)
        whole.bar(span, _shares(lengths, span), 0.8, color=GREEN)
        whole.set_title(f"All: {lengths.mean():.1f} ± {lengths.std():.1f} tokens")
        whole.set_ylabel(f"share of {len(lengths):,} samples (%)")
        for line, (chosen, colour, name) in enumerate(((right, GREEN, "right"), (~right, ALERT, "wrong"))):
            some = lengths[chosen]
            apart.bar(span + 0.4 * line - 0.2, _shares(some, span), 0.38, color=colour)
            text = f"{name}: {len(some):,}" + (f", mean {some.mean():.2f}" if len(some) else "")
            apart.text(0.02, 0.98 - 0.08 * line, text, transform=apart.transAxes, va="top", color=colour)
        apart.set_title("By answer")
        apart.set_ylabel("share of each (%)")
        apart.set_ylim(top=apart.get_ylim()[1] * 1.25)
        apart.set_yticks([tick for tick in apart.get_yticks() if tick <= 100])
        for axes in (whole, apart):
            axes.set_xlabel("tape tokens read")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            tidy(axes)
    return path


def draw_lengths_by_class(
    path: Path, lengths: Int[np.ndarray, "n"], labels: Int[np.ndarray, "n"], names: Sequence[str]
) -> Path:
    """Each class's lengths as a row, shortest mean first; of many classes those at both ends."""
    found = [c for c in range(len(names)) if (labels == c).any()]
    means = {c: lengths[labels == c].mean() for c in found}
    order = sorted(found, key=lambda c: means[c])
    cut = len(order) > MOST_CLASSES
    if cut:
        order = order[: MOST_CLASSES // 2] + order[-MOST_CLASSES // 2 :]
    span = np.arange(lengths.min(), lengths.max() + 1)
    table = np.stack([_shares(lengths[labels == c], span) for c in order])
    with picture(path, 1.4 + 0.34 * len(order)) as figure:
        axes = figure.subplots()
        axes.imshow(table, cmap=HEAT, vmin=0, vmax=100, aspect="auto")
        axes.set_yticks(range(len(order)), [shortened(names[c], 22) for c in order])
        axes.set_xticks(range(len(span)), [str(length) for length in span])
        if len(span) <= MOST_WRITTEN:
            _write_cells(axes, table)
        for row, c in enumerate(order):
            _write_beside(axes, row, f"{means[c]:.2f}")
        _write_beside(axes, -0.8, "mean")
        axes.set_xlabel("tape tokens read; share of each class")
        half = f", {MOST_CLASSES // 2} of each end" if cut else ""
        axes.set_title(f"Tape length by class, shortest first{half}")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return path


def _write_cells(axes: Axes, table: Float[np.ndarray, "r s"]) -> None:
    for (row, column), share in np.ndenumerate(table):
        if share > 0:
            colour = "white" if share > 45 else INK
            axes.text(column, row, f"{share:.0f} %", ha="center", va="center_baseline", fontsize=10, color=colour)


def _write_beside(axes: Axes, row: float, text: str) -> None:
    """To the right of a row, clear of the axes."""
    axes.annotate(text, (1, row), (8, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                  va="center_baseline", annotation_clip=False)  # fmt: skip


def _shares(lengths: np.ndarray, span: np.ndarray) -> Float[np.ndarray, "s"]:
    return 100 * (lengths[:, None] == span).sum(0) / max(1, len(lengths))


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
