"""What the scale of the shared norm does to the lengths of trained tapes, all else being equal.

    python benchmarks/length_by_scale.py results/length/by_scale.json results/length/cifar10/adatape-scale-1/seed-*

Scale and shift of a run's norm are multiplied after training; lengths and accuracy are of its first 1,000 test images.
The runs must still have their weights (`evidence.py --weights`).
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adatape.models.adatape import AdaTape
from adatape.train.evaluate import test_batches
from adatape.train.folder import load_run

FACTORS = (1 / 3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
BATCHES = 2  # of 500


@torch.no_grad()
def at_scale(folder: Path, factor: float, device: str) -> dict[str, Any]:
    experiment, model = load_run(folder)
    if not isinstance(model, AdaTape) or not isinstance(model.reader.norm, nn.LayerNorm):
        raise ValueError(f"{folder} has no shared norm to scale; it must be an AdaTape with norm=True")
    model.to(device).eval()
    for parameter in model.reader.norm.parameters():
        parameter.mul_(factor)
    lengths, right = [], []
    for x, label in itertools.islice(test_batches(experiment, None, torch.device(device)), BATCHES):
        output = model(x, output=True)
        lengths.append(output.tape.length.double())
        right.append(output.logits.argmax(-1) == label)
    length = torch.cat(lengths)
    found = {"length_mean": length.mean().item(), "length_sd": length.std().item()}
    return {"factor": factor, **found, "accuracy": torch.cat(right).double().mean().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    rows = []
    for factor, folder in itertools.product(FACTORS, arguments.runs):
        row = {"run": f"{folder.parent.name}/{folder.name}", **at_scale(folder, factor, arguments.device)}
        rows.append(row)
        length = f"{row['length_mean']:5.2f} ± {row['length_sd']:.2f} tokens"
        print(f"{row['run']:24} × {factor:.2f}  {length}  {100 * row['accuracy']:.1f} %", flush=True)
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
