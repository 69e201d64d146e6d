"""What few shots gain from rows of an earlier block, so that a tape's echo is compared with the like in a plain ViT.

    python benchmarks/fewshot_rows.py RUN... --on data/few/c10 data/few/pets --after 2 3

Puts `rows.json` into each run's folder, which must have its weights: few-shot accuracy from what is pooled, and with
the normalised mean of the patches' rows after so many blocks beside it. Of a tape with an echo: without it, and with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from evidence_look import DRAWS, L2, SHOTS
from torch import Tensor

from adatape.config import Images
from adatape.data.batch import Part
from adatape.data.sets import LabelledSet, open_set
from adatape.measure.fewshot import few_shot, summary
from adatape.models.adaptive import Adaptive
from adatape.models.adatape import AdaTape
from adatape.show.transfer import data_named
from adatape.train.folder import load_run

AT_ONCE = 500


def kinds_of_features(model: Adaptive, x: Tensor, after: list[int]) -> Iterator[tuple[str, Tensor]]:
    """Named by what is beside the pooled mean."""
    if isinstance(model, AdaTape) and model.echo:
        features = model(x, output=True).features
        yield from (("pooled alone", features.chunk(2, 1)[0]), ("and the tape's mean", features))
        return
    last = len(model.vit.blocks)
    blocks = [count for count in after if count < last]
    tokens, rows = model.forward_intermediates(x, [count - 1 for count in (*blocks, last)], output_fmt="NLC")
    features = model.forward_head(tokens, pre_logits=True)
    yield "pooled alone", features
    for count, each in zip(blocks, rows[:-1], strict=True):
        mean = each.mean(1)
        yield f"and rows after {count} blocks", torch.cat([features, F.layer_norm(mean, mean.shape[-1:])], 1)


@torch.no_grad()
def by_kind(
    model: Adaptive, images: LabelledSet, after: list[int], device: torch.device
) -> tuple[dict[str, Tensor], Tensor]:
    """Of all images, by kind, and the labels."""
    found: dict[str, list[Tensor]] = {}
    labels = []
    for x, label in images.scored(AT_ONCE, Part(), device):
        labels.append(label.cpu())
        for kind, features in kinds_of_features(model, x, after):
            found.setdefault(kind, []).append(features.float().cpu())
    return {kind: torch.cat(parts) for kind, parts in found.items()}, torch.cat(labels)


def learnt(model: Adaptive, on: str, size: int, after: list[int], device: torch.device) -> dict[str, list[Any]]:
    """Accuracy for each number of shots, of each kind of features."""
    sets = [open_set(data_named(on, size), split) for split in ("train", "test")]
    (train, train_labels), (test, test_labels) = (by_kind(model, each, after, device) for each in sets)
    found = {}
    for kind in train:
        rows = few_shot(train[kind], train_labels, test[kind], test_labels, SHOTS, L2, DRAWS, classes=sets[0].classes)
        found[kind] = [{"shots": row.shots, "mean": row.mean} for row in summary(rows)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--on", nargs="+", required=True, help="folders of arrays to learn from few images of")
    parser.add_argument("--after", nargs="+", type=int, default=[2, 3], help="blocks")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    for run in arguments.runs:
        experiment, model = load_run(run)
        if not isinstance(experiment.data, Images) or experiment.data.validate_on is not None:
            raise ValueError(f"{run} is no run on images, or held some out to choose by; few shots are scored on tests")
        model = model.to(arguments.device).eval()
        device, size = torch.device(arguments.device), experiment.data.size
        found = {Path(on).name: learnt(model, on, size, arguments.after, device) for on in arguments.on}
        (run / "rows.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"{run}: {len(next(iter(found.values())))} kinds of features", flush=True)


if __name__ == "__main__":
    main()
