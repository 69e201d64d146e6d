"""Evaluates trained runs further: tape lengths by test image, smaller budgets, few-shot accuracy, throughput.

    python research/look.py results/mine.jsonl --fewshot data/few/c10 data/few/pets      run folders under runs/mine
    python research/look.py results/mine.jsonl --speed                                   images a second, on an idle GPU

It writes into each run folder: length and certainty of every test image (`images.npz`), `reading`, scores at smaller
`budgets`, `fewshot`, and the correlation of its lengths with the loss of a plain ViT (`difficulty`); all but the images
go into the study's rows. Runs that have `images.npz` are skipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from image_tables import JUDGE
from rows import add_rows, row_of
from torch import Tensor, nn

from adatape.cuda_graphs import WARM_UP_CALLS, Tensors, cuda_graphed
from adatape.data.loaders import Labelled
from adatape.data_config import Images
from adatape.evaluate.budget import apply_budget, scaled_budget
from adatape.evaluate.difficulty import spearman
from adatape.evaluate.reading import Reads, collect
from adatape.evaluate.speed import seconds_per_call
from adatape.models.adatape import AdaTape
from adatape.models.base import Adaptive
from adatape.train.evaluate import test_batches
from adatape.train.fewshot import fewshot_run
from adatape.train.folder import load_run

EIGHTHS = (0, 1, 2, 4, 6, 8)  # budgets, in eighths of the maximum
SHOTS, DRAWS, L2 = (1, 5, 10, 25), (0, 1, 2), (1024.0,)
NO_SPREAD = 0.1  # tokens: no correlation is computed if lengths vary less


def opened(folder: Path, device: str) -> tuple[Adaptive, Callable[[], Iterator[Labelled]]]:
    """A run's model, and a function that returns its test batches."""
    experiment, model = load_run(folder)
    if isinstance(experiment.data, Images) and experiment.data.validate_on is not None:
        raise ValueError(f"{folder} has validate_on, for choices on held-out images; this would use the test set")
    return model.to(device).eval(), lambda: test_batches(experiment, None, torch.device(device))


def look_closer(folder: Path, device: str, fewshot: Sequence[str] = ()) -> None:
    """Writes the run's figures by test image, at smaller budgets, and on few-shot sets."""
    model, test = opened(folder, device)
    reads = collect(model, test())
    if isinstance(model, AdaTape):
        put(folder / "reading.json", saturation(model, reads))
        put(folder / "budgets.json", at_budgets(model, test))
    if fewshot:
        found = {
            Path(on).name: fewshot_run(folder, on, SHOTS, DRAWS, L2, device).as_dict()["summary"] for on in fewshot
        }
        put(folder / "fewshot.json", found)
    certainty, length = reads.certainty.half().numpy(), reads.length.to(torch.uint8).numpy()
    np.savez_compressed(folder / "images.npz", certainty=certainty, length=length)


def put(path: Path, found: Any) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n")


def saturation(model: AdaTape, reads: Reads) -> dict[str, float]:
    """Mean largest weight of a read, and the trained scale of the reader's norm."""
    visible = reads.taken[..., 0] >= 0
    found = {"top_weight": reads.weight.amax(-1)[visible].mean().item()}
    if isinstance(model.reader.norm, nn.LayerNorm):
        scale = model.reader.norm.weight[: model.reader.reading.query_width].detach()
        found["norm_scale"] = scale.square().mean().sqrt().item()
    return found


def note_speed(folder: Path, device: str) -> None:
    """Adds throughput to result.json; nothing halts early while timing, so it matches the upper bound of the cost."""
    model, test = opened(folder, device)
    speed = throughput(model, next(iter(test()))[0])
    put(folder / "result.json", json.loads((folder / "result.json").read_text()) | {"images_per_second": speed})


def throughput(model: Adaptive, x: Tensor) -> float:
    """Images per second in bf16 as a CUDA graph, not compiled and without early exit, for every system."""

    @torch.no_grad()
    def answer(x: Tensor) -> Tensors:
        with torch.autocast("cuda", torch.bfloat16):
            return (model(x),)

    call = cuda_graphed(answer)
    for _ in range(WARM_UP_CALLS + 1):
        call(x)
    took = [seconds_per_call(lambda: call(x), 20, torch.cuda.synchronize) for _ in range(5)]
    return len(x) / statistics.median(took)


def at_budgets(model: AdaTape, test: Callable[[], Iterator[Labelled]]) -> list[dict[str, Any]]:
    """Scores at smaller budgets."""
    most, rows = model.reader.reading.steps, []
    for steps in sorted({most * share // 8 for share in EIGHTHS}):
        budget = scaled_budget(model, steps)
        apply_budget(model, budget)
        seen = collect(model, test())
        accuracy, length, macs = (each.double().mean().item() for each in (seen.right, seen.length, seen.macs))
        figures = {"accuracy": accuracy, "length_mean": length, "gflops_mean": macs / 1e9}
        rows.append({**budget.__dict__, **figures})
    return rows


def judge_lengths(folders: Sequence[Path]) -> None:
    """Rank correlation of each run's lengths with its own loss and with the judge's mean loss over seeds.

    The interval is a bootstrap over images.
    """
    seen = {folder: np.load(folder / "images.npz") for folder in folders if (folder / "images.npz").is_file()}
    for recipe in {folder.parent.parent for folder in seen}:
        of_set = {folder: images for folder, images in seen.items() if folder.parent.parent == recipe}
        judges = [loss_of(images["certainty"]) for folder, images in of_set.items() if folder.parent.name == JUDGE]
        for folder, images in of_set.items():
            length = torch.from_numpy(images["length"].astype(np.int64))
            if length.double().std() > NO_SPREAD:
                found = {"itself": spearman(length, loss_of(images["certainty"]))._asdict()}
                if judges:
                    found[JUDGE] = spearman(length, torch.stack(judges).mean(0))._asdict()
                put(folder / "difficulty.json", found)


def loss_of(certainty: np.ndarray) -> Tensor:
    return -torch.from_numpy(certainty.astype(np.float64)).clamp(min=1e-4).log()


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the study's JSONL file")
    parser.add_argument("--runs", type=Path, help="where its run folders are; runs/STUDY unless given")
    parser.add_argument("--fewshot", nargs="*", default=[], help="folders of arrays to learn from few images of")
    parser.add_argument("--speed", action="store_true", help="only time them")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args(given)
    runs = arguments.runs or Path("runs") / arguments.out.stem
    folders = sorted(path.parent for path in runs.glob("*/*/seed-*/result.json"))
    for folder in folders:
        try:
            if arguments.speed:
                note_speed(folder, arguments.device)
            elif not (folder / "images.npz").is_file():
                look_closer(folder, arguments.device, arguments.fewshot)
        except (RuntimeError, ValueError, FileNotFoundError) as error:  # continue with the others
            print(f"{folder}: {type(error).__name__}: {error}"[:500], flush=True)
    judge_lengths(folders)
    add_rows(arguments.out, [row_of(folder, str(folder.relative_to(runs))) for folder in folders])


if __name__ == "__main__":
    main()
