"""Looks closer at trained runs: how they read each test image, what they score on less, and from few images of others.

    python benchmarks/evidence_look.py results/evidence --fewshot data/few/c10 data/few/pets     all that have weights
    python benchmarks/evidence_look.py results/evidence --speed                                images a second, alone

A run's folder then has its length and certainty for every test image (`images.npz`), its reading, what it scores at
smaller budgets and hastes (`budgets.json`), and `fewshot.json`. `evidence.py` does the same after training; here it can
be done beside the next training, by several processes (`--share 0/3`), after which the weights go (with `--brief` they
stay).
"""

from __future__ import annotations

import argparse
import json
import statistics
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adatape.config import Images
from adatape.data.loaders import Labelled
from adatape.graph import WARM_UP_CALLS, Tensors, captured
from adatape.measure.budget import apply_budget, look, scaled_budget
from adatape.measure.reading import Reads, collect
from adatape.measure.speed import seconds_per_call
from adatape.models.adaptive import Adaptive
from adatape.models.adatape import AdaTape
from adatape.show.transfer import print_fewshot
from adatape.train.evaluate import test_batches
from adatape.train.folder import WEIGHTS, load_config, load_run
from adatape.train.task import build_for

CLOSER = ("images.npz", "reading.json", "budgets.json", "fewshot.json")
HASTES = (0.0, 1.0, 2.0, 4.0)
EIGHTHS = (0, 1, 2, 4, 6, 8)  # of the most tokens
SHOTS, DRAWS, L2 = (1, 5, 10, 25), (0, 1, 2), (1024.0,)


def look_closer(
    folder: Path, device: str, fewshot: Sequence[str] = (), *, speed: bool = False, brief: bool = False
) -> None:
    """What the model does with each test image, what it scores where it may read less, and on what it never saw."""
    experiment, model = load_run(folder)
    if isinstance(experiment.data, Images) and experiment.data.validate_on is not None:
        raise ValueError(f"{folder} held images out to choose by; a closer look would be at the test set")
    model = model.to(device).eval()

    def test() -> Iterator[Labelled]:
        return test_batches(experiment, None, torch.device(device))

    reads = collect(model, test())
    figures = {"certainty": reads.certainty.half().numpy(), "length": reads.length.to(torch.uint8).numpy()}
    np.savez_compressed(folder / "images.npz", **figures)
    if speed and torch.device(device).type == "cuda":
        note_speed(folder, throughput(model, next(iter(test()))[0]))
    if isinstance(model, AdaTape):
        (folder / "reading.json").write_text(json.dumps(saturation(model, reads), indent=1) + "\n")
    if isinstance(model, AdaTape) and not brief:
        (folder / "budgets.json").write_text(json.dumps(at_budgets(model, test), indent=1) + "\n")
    learn_from_few(folder, fewshot, device)


def saturation(model: AdaTape, reads: Reads) -> dict[str, float]:
    """How far the softmax of a read is from even, and the scale that its norm has come to."""
    visible = reads.taken[..., 0] >= 0
    found = {"top_weight": reads.weight.amax(-1)[visible].mean().item()}
    if isinstance(model.reader.norm, nn.LayerNorm):
        scale = model.reader.norm.weight[: model.reader.reading.query_width].detach()
        found["norm_scale"] = scale.square().mean().sqrt().item()
    return found


def note_speed(folder: Path, images_per_second: float) -> None:
    result = json.loads((folder / "result.json").read_text()) | {"images_per_second": images_per_second}
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")


def throughput(model: Adaptive, x: Tensor) -> float:
    """Images a second in bf16, replayed as a CUDA graph; every system alike: none compiled, none ends early."""

    @torch.no_grad()
    def answer(x: Tensor) -> Tensors:
        with torch.autocast("cuda", torch.bfloat16):
            return (model(x),)

    call = captured(answer)
    for _ in range(WARM_UP_CALLS + 1):
        call(x)
    took = [seconds_per_call(lambda: call(x), 20, torch.cuda.synchronize) for _ in range(5)]
    return len(x) / statistics.median(took)


def at_budgets(model: AdaTape, test: Callable[[], Iterator[Labelled]]) -> list[dict[str, Any]]:
    """What it scores where all may read less; and where doubt decides, the same for all and then at several hastes."""

    def found() -> dict[str, float]:
        seen = look(model, test())
        accuracy, length, macs = (each.double().mean().item() for each in (seen.right, seen.length, seen.macs))
        return {"accuracy": accuracy, "length_mean": length, "gflops_mean": macs / 1e9}

    most, rows = model.reader.reading.steps, []
    alike = {"for_all": True} if model.doubts else {}
    model.set_haste(0 if model.doubts else None)
    for steps in sorted({most * share // 8 for share in EIGHTHS}):
        budget = scaled_budget(model, steps)
        apply_budget(model, budget)
        rows.append({**budget.__dict__, **alike, **found()})
    for haste in HASTES if model.doubts else ():
        model.set_haste(haste)
        rows.append({"haste": haste, **found()})
    return rows


def learn_from_few(folder: Path, sets: Sequence[str], device: str) -> None:
    """Few-shot accuracy on other sets of images, each a folder of arrays."""
    if sets:
        found = {Path(on).name: print_fewshot(folder, on, SHOTS, DRAWS, L2, device)["summary"] for on in sets}
        (folder / "fewshot.json").write_text(json.dumps(found, indent=1) + "\n")


def time_alone(folder: Path, device: str) -> None:
    """Untrained: nothing ends early in what is timed, so weights do not matter."""
    experiment = load_config(folder / "config.json")
    images, _ = next(iter(test_batches(experiment, None, torch.device(device))))
    note_speed(folder, throughput(build_for(experiment).to(device).eval(), images))


def left_in(out: Path, runs: str, share: str, *, speed: bool) -> list[Path]:
    """Those of this share that nobody has timed, or whose weights nobody has looked at."""
    part, parts = (int(number) for number in share.split("/"))
    found = []
    for result in sorted(out.glob(f"{runs}/result.json")):
        timed = "images_per_second" in json.loads(result.read_text())
        wanted = not timed if speed else (result.parent / WEIGHTS).is_file()
        if wanted and zlib.crc32(str(result.parent).encode()) % parts == part:
            found.append(result.parent)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--fewshot", nargs="*", default=[], help="folders of arrays to learn from few images of")
    parser.add_argument("--brief", action="store_true", help="how they read, but not at other budgets; weights stay")
    parser.add_argument("--speed", action="store_true", help="only time those that have not been, on an idle GPU")
    parser.add_argument("--runs", default="*/*/seed-*", help="which folders, as a pattern")
    parser.add_argument("--share", default="0/1", metavar="N/M", help="the Nth, from 0, of M processes that look")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    for folder in left_in(arguments.out, arguments.runs, arguments.share, speed=arguments.speed):
        try:
            if arguments.speed:
                time_alone(folder, arguments.device)
            else:
                look_closer(folder, arguments.device, arguments.fewshot, brief=arguments.brief)
                if not arguments.brief:
                    (folder / WEIGHTS).unlink()
        except (RuntimeError, ValueError, FileNotFoundError) as error:  # the others are worth a look all the same
            print(f"{folder}: {type(error).__name__}: {error}"[:500], flush=True)


if __name__ == "__main__":
    main()
