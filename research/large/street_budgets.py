"""A run of street scenes at every budget: probabilities of its test scenes, and their differences to all windows.

    python research/large/street_budgets.py RUN --budgets 1 2 4 8 16 32 64 128 272
    python research/large/large_tables.py --only budgets

Without the run's stored floor. The last budget is what the others are compared with; the second command needs no run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from large_tables import BUDGETS

from adatape.evaluate.cost import cost
from adatape.macs import total
from adatape.models.base import Adaptive
from adatape.train.evaluate import test_batches
from adatape.train.folder import load_run


@torch.inference_mode()
def probabilities(model: Adaptive, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> np.ndarray:
    return torch.cat([model(images) for images, _ in batches]).sigmoid().float().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 272])
    parser.add_argument("--out", type=Path, default=BUDGETS)
    args = parser.parse_args()
    experiment, model = load_run(args.run, stored_budget=False)
    batches = list(test_batches(experiment, None, torch.device("cpu")))
    found: dict[str, Any] = {"labels": np.concatenate([label.numpy() for _, label in batches]).astype(np.uint8)}
    model.eval()
    for reads in args.budgets:
        model.set_budget(reads)
        found[str(reads)] = probabilities(model, batches)
        found[f"gflops {reads}"] = np.array(total(cost(model)).macs / 1e9)
        print(f"{reads} windows: {found[f'gflops {reads}']:.2f} GFLOPs", flush=True)
    np.savez_compressed(args.out, **found)


if __name__ == "__main__":
    main()
