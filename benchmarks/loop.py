"""What the training loop adds to a step: the whole run (loader, logging, checkpoints) against the bare update.

    python benchmarks/loop.py results/loop.json --model vit_base_patch16_224 --size 224 --batch 256

Both run in one process, a few dozen steps of each in turn; medians over the rounds. The bare side repeats the same
compiled update on one batch that lies on the device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adatape.config import Augment, Engine, Experiment, ImageModel, Images, Optimizer
from adatape.train.folder import environment
from adatape.train.loop import Trainer
from adatape.train.run import _Run
from adatape.train.stop import Stop

PAPER = Augment(crop="inception", area=(0.05, 1.0), flip=True, randaug=2, magnitude=15.0, mixup=0.5, smoothing=0.1)


def cifar_sized(folder: Path) -> str:
    """Noise of CIFAR's shape: pixels do not change what a step costs."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 50_000), ("test", 1000)):
        np.save(folder / f"{split}_images.npy", draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8))
        np.save(folder / f"{split}_labels.npy", np.arange(count) % 10)
    return str(folder)


def experiment(arguments: argparse.Namespace, data: str) -> Experiment:
    options: dict[str, Any] = json.loads(arguments.options)
    engine = Engine(
        precision="bf16", compile=True, checkpoint_every=arguments.checkpoint_every, log_every=arguments.log_every
    )
    return Experiment(
        recipe="loop",
        data=Images("arrays", data, arguments.size, PAPER),
        model=ImageModel(arguments.model, options),
        optimizer=Optimizer(lr=1e-3, warmup=100, steps=10**6, batch=arguments.batch, weight_decay=0.1),
        evaluate_every=10**9,
        engine=engine,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--options", default="{}")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30, help="of each side per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--checkpoint-every", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        trainer = Trainer(experiment(arguments, cifar_sized(out)), "cuda")
        loop = _Run(trainer, out, lambda _: None, Stop(), {})
        steps = trainer.train(10**6)
        batch = next(trainer.task.batches(0))

        def whole() -> None:
            for stats in itertools.islice(steps, arguments.steps):
                loop._after(stats)

        def bare() -> None:
            for _ in range(arguments.steps):
                trainer.update(batch)

        def loader() -> None:
            for _ in itertools.islice(trainer.task.batches(0), arguments.steps):
                pass

        sides = {"whole": whole, "bare": bare, "loader": loader}
        took: dict[str, list[float]] = {name: [] for name in sides}
        for side in sides.values():  # warm-up: compile, capture
            side()
        for _, (name, side) in itertools.product(range(arguments.rounds), sides.items()):
            torch.cuda.synchronize()
            began = time.perf_counter()
            side()
            torch.cuda.synchronize()
            took[name].append(1e3 * (time.perf_counter() - began) / arguments.steps)
        saves = []
        for _ in range(3):  # each of a step of its own; the first also asks for the memory that the others use again
            trainer.step += 1
            loop.saver.wait()
            began = time.perf_counter()
            loop._save()
            saves.append(time.perf_counter() - began)
        loop.saver.wait()
        save = saves[-1]
    median = {name: statistics.median(values) for name, values in took.items()}
    result = {
        "model": arguments.model,
        "batch": arguments.batch,
        "size": arguments.size,
        "ms": {name: round(value, 3) for name, value in median.items()},
        "spread": {name: [round(min(values), 3), round(max(values), 3)] for name, values in took.items()},
        "whole_over_bare": round(median["whole"] / median["bare"], 4),
        "save_seconds": [round(each, 3) for each in saves],
        "with_checkpoints": round((median["whole"] + 1e3 * save / arguments.checkpoint_every) / median["bare"], 4),
        "environment": environment("cuda"),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
