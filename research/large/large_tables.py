"""Tables of the large-image studies from their rows; street scenes with a paired bootstrap over scenes.

python research/large/large_tables.py
python research/large/large_tables.py --add runs/street     first adds the scores that street.py left there
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).resolve().parents[2] / "results" / "large"
BUDGETS = RESULTS / "street_budgets.npz"  # of street_budgets.py
THIN, WIDE = "16,32,48,48:1500:zoom", "32,64,96,96:2500:zoom+classes"
SEEDS = (0, 1, 2)
PLAIN = {224: 1.268, 256: 1.675, 320: 2.838, 384: 4.682, 512: 10.553}  # GFLOPs
ALL_GMAC = 94.71
ALGORITHM2, ALGORITHM2_GMAC = "algorithm2 10", 1.997
DRAWS = 2000


def mean_ap(scores: np.ndarray, labels: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Mean over classes of average precision; `weight` says how often each scene was drawn.

    As in the package, equal scores share the last of their ranks.
    """
    weight = np.ones(len(scores)) if weight is None else weight
    found = []
    for s, y in zip(scores.T, labels.T, strict=True):
        order = np.argsort(-s, kind="stable")
        positive, all_of, sorted_scores = (y * weight)[order], weight[order], -s[order]
        precision = np.cumsum(positive) / np.maximum(np.cumsum(all_of), 1e-9)
        last = np.searchsorted(sorted_scores, sorted_scores, side="right") - 1
        found.append((precision[last] * positive).sum() / max(positive.sum(), 1e-9))
    return float(np.mean(found))


class Scores:
    """Scores of test scenes by system, reads and seed."""

    def __init__(self, path: Path) -> None:
        stored = np.load(path)
        self.labels = stored["labels"].astype(float)
        self.scores = {name: stored[name].astype(np.float32) for name in stored.files if name != "labels"}
        self.weights = draws_of_scenes(len(self.labels))

    def seeds(self, name: str) -> list[float]:
        return [mean_ap(self.scores[f"{name} seed {seed}"], self.labels) for seed in SEEDS]

    def draws(self, name: str) -> np.ndarray:
        """The mean over seeds in each bootstrap sample of scenes."""
        each = [self.scores[f"{name} seed {seed}"] for seed in SEEDS]
        return np.array([np.mean([mean_ap(s, self.labels, w) for s in each]) for w in self.weights])

    def difference(self, name: str, other: str) -> str:
        mean = float(np.mean(self.seeds(name)) - np.mean(self.seeds(other)))
        return points_with_interval(mean, self.draws(name) - self.draws(other))


def draws_of_scenes(scenes: int) -> np.ndarray:
    """(draws, scenes): how often each scene is in a bootstrap sample."""
    drawn = np.random.default_rng(0).integers(0, scenes, (DRAWS, scenes))
    return np.stack([np.bincount(each, minlength=scenes) for each in drawn]).astype(float)


def points_with_interval(mean: float, drawn: np.ndarray) -> str:
    low, high = np.percentile(100 * drawn, [2.5, 97.5])
    return f"{100 * mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def rows_of(file: str, **wanted: Any) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def street() -> None:
    kept = Scores(RESULTS / "street_scores.npz")
    cost = {(row["plan"], row["reads"]): row["gmac"]
            for row in rows_of("street.jsonl", name="test scenes", stage="scan") if "reads" in row}  # fmt: skip

    def line(label: str, gmac: float, name: str, against: str = "") -> None:
        each = kept.seeds(name)
        print(f"| {label} | {gmac:.2f} | {', '.join(f'{v:.3f}' for v in each)} | {np.mean(each):.3f} | {against} |")

    print("| street scenes, test | GFLOPs | mean AP, seeds 0, 1, 2 | mean | against |\n|---|---|---|---|---|")
    for side, gmac in PLAIN.items():
        line(f"plain ViT-Ti, {side} px", gmac, f"plain {side}")
    if all(f"{ALGORITHM2} seed {seed}" in kept.scores for seed in SEEDS):
        line("Algorithm 2 as published, T 10", ALGORITHM2_GMAC, ALGORITHM2)
    for scan, label in ((THIN, "16 channels"), (WIDE, "32 channels")):
        for reads in (1, 2, 4, 8, 16, 32, 64):
            gmac = cost[scan, reads]
            dearer = next((side for side, other in PLAIN.items() if other >= gmac), None)
            against = f"plain {dearer}: {kept.difference(f'{scan} {reads}', f'plain {dearer}')}" if dearer else ""
            line(f"scan of {label}, {reads} windows", gmac, f"{scan} {reads}", against)
    for reads in (8, 1008):
        line(f"all windows encoded, {reads} answer", ALL_GMAC, f"all {reads}")
    for scan, label in ((THIN, "16"), (WIDE, "32")):
        for reads in (8, 32, 64):
            print(f"{label} channels, {reads} windows − all windows: {kept.difference(f'{scan} {reads}', 'all 1008')}")
    print(f"random windows, 8: {', '.join(f'{v:.3f}' for v in kept.seeds('random 8'))}")


def budgets() -> None:
    """The packaged model with one window to all that an image has room for; all is the last budget."""
    stored = np.load(BUDGETS)
    labels, reads = stored["labels"].astype(float), [name for name in stored.files if name.isdecimal()]
    weights = draws_of_scenes(len(labels))
    drawn = {n: np.array([mean_ap(stored[n], labels, weight) for weight in weights]) for n in reads}
    ap, gflops = {n: mean_ap(stored[n], labels) for n in reads}, {n: float(stored[f"gflops {n}"]) for n in reads}
    most = reads[-1]
    print("\n| windows | GFLOPs | share of the cost of all | mean AP | − all windows |\n|---|---|---|---|---|")
    for n in reads:
        behind = points_with_interval(ap[n] - ap[most], drawn[n] - drawn[most])
        print(f"| {n} | {gflops[n]:.2f} | {gflops[n] / gflops[most]:.3f} | {ap[n]:.3f} | {behind} |")


def lengths() -> None:
    """A floor on scores against one length for all, means over seeds."""
    print("\n| floor set for a mean of | windows read | with 0, 1, 2, 3 signs | ρ | mean AP | so many for all |")
    print("|---|---|---|---|---|---|")
    for plan, channels in ((THIN, 16), (WIDE, 32)):
        for target in (1, 2, 4, 8):
            of = {"name": "test scenes", "plan": plan}
            rows = rows_of("street.jsonl", **of, stage="floor", target=target)
            fixed = np.mean([row["map"] for row in rows_of("street.jsonl", **of, stage="scan", reads=target)])
            length, rho, ap = (np.mean([row[key] for row in rows]) for key in ("length", "rho", "map"))
            signs = ", ".join(f"{np.mean([row['by_signs'][n] for row in rows]):.1f}" for n in "0123")
            print(f"| {target} ({channels} channels) | {length:.2f} | {signs} | {rho:.2f} | {ap:.3f} | {fixed:.3f} |")


def megapixel() -> None:
    print("\n| Megapixel MNIST, test | GFLOPs | majority | maximum | topmost | all | seeds |\n" + "|---" * 7 + "|")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows_of("megapixel.jsonl", final=True, test=True):
        groups.setdefault((row["name"], row.get("reads"), row.get("floor")), []).append(row)
    for (name, reads, floor), rows in groups.items():
        tasks = " | ".join(
            f"{np.mean([row[task] for row in rows]):.1f}" for task in ("majority", "maximum", "topmost", "all")
        )
        label = name + (f", {reads} windows" if reads else "") + (f", floor {floor}" if floor else "")
        print(f"| {label} | {np.mean([row['gmac'] for row in rows]):.2f} | {tasks} | {len(rows)} |")


def add_scores(folder: Path, stored: Path) -> list[str]:
    """Adds street-scores-…-SEED.npz of a folder to the stored scores, of the same scenes; the names that are new."""
    scores = dict(np.load(stored))
    before = set(scores)
    for path in sorted(folder.glob("street-scores-*.npz")):
        found, seed = np.load(path), path.stem.rpartition("-")[2]
        if not np.array_equal(found["labels"], scores["labels"]):
            raise ValueError(f"{path} has other scenes than {stored}; run street.py with --final")
        scores |= {f"{name} seed {seed}": found[name].astype(np.float16) for name in found.files if name != "labels"}
    np.savez_compressed(stored, **scores)
    return sorted(set(scores) - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path)
    parser.add_argument("--only", choices=tuple(TABLES), nargs="+", default=list(TABLES))
    args = parser.parse_args()
    if args.add is not None:
        print("added:", ", ".join(add_scores(args.add, RESULTS / "street_scores.npz")) or "nothing new")
    for name in args.only:
        TABLES[name]()


TABLES: dict[str, Callable[[], None]] = {
    "street": street,
    "budgets": budgets,
    "lengths": lengths,
    "megapixel": megapixel,
}

if __name__ == "__main__":
    main()
