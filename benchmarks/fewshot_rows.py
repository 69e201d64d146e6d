"""What few shots gain from rows of an earlier block, so that a tape's echo is compared with the like in a plain ViT.

    python benchmarks/fewshot_rows.py results/long/rows.json RUN... --on data/cifar10_few data/pets32 --after 2 3

For each run, which needs its weights: few-shot accuracy from what is pooled, and with the normalised mean of all rows
after so many blocks beside it. Of a tape with an echo: without it, and with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from evidence_look import DRAWS, L2, SHOTS
from torch import Tensor

from adatape.data.batch import Part
from adatape.data.images import open_images
from adatape.data.loaders import labelled_images
from adatape.measure.fewshot import few_shot, summary
from adatape.models.adaptive import Adaptive
from adatape.models.adatape import AdaTape
from adatape.show.transfer import data_named
from adatape.train.folder import load_run

AT_ONCE = 500


def kinds_of_features(model: Adaptive, x: Tensor, after: list[int]) -> Iterator[tuple[str, Tensor]]:
    """Named by what is beside the pooled mean."""
    features = model(x, output=True).features
    if isinstance(model, AdaTape) and model.echo:
        yield from (("pooled", features.chunk(2, 1)[0]), ("echo", features))
        return
    yield "pooled", features
    blocks = [count for count in after if count < len(model.vit.blocks)]
    rows = model.forward_intermediates(x, [n - 1 for n in blocks], output_fmt="NLC", intermediates_only=True)
    for count, each in zip(blocks, rows, strict=True):
        mean = each.mean(1)
        yield f"rows after {count}", torch.cat([features, F.layer_norm(mean, mean.shape[-1:])], 1)


@torch.no_grad()
def learnt(model: Adaptive, on: str, size: int, after: list[int], device: torch.device) -> dict[str, list[float]]:
    """Accuracy for each number of shots, of each kind of features."""
    found: dict[str, list[Tensor]] = {}
    labels, sets = [], [open_images(data_named(on, size), split) for split in ("train", "test")]
    for images in sets:
        parts: dict[str, list[Tensor]] = {}
        own = []
        for x, label in labelled_images(images, size, AT_ONCE, Part(), device):
            own.append(label.cpu())
            for name, features in kinds_of_features(model, x, after):
                parts.setdefault(name, []).append(features.float().cpu())
        labels.append(torch.cat(own))
        for name, rows in parts.items():
            found.setdefault(name, []).append(torch.cat(rows))
    return {
        name: [
            row.mean
            for row in summary(few_shot(train, labels[0], test, labels[1], SHOTS, L2, DRAWS, classes=sets[0].classes))
        ]
        for name, (train, test) in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--on", nargs="+", required=True, help="folders of arrays to learn from few images of")
    parser.add_argument("--after", nargs="+", type=int, default=[2, 3], help="blocks")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    found = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    for run in arguments.runs:
        experiment, model = load_run(run)
        model = model.to(arguments.device).eval()
        for on in arguments.on:
            name = f"{run.parent.name}/{run.name} on {Path(on).name}"
            found[name] = learnt(model, on, experiment.data.size, arguments.after, torch.device(arguments.device))
            print(name, {kind: [round(100 * each, 2) for each in row] for kind, row in found[name].items()}, flush=True)
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
