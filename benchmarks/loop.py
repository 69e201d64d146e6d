"""Overhead of the training loop: the whole run (loader, logging, checkpoints) against the bare update.

    python benchmarks/loop.py results/loop.jsonl --model vit_base_patch16_224 --size 224 --batch 256
    python benchmarks/loop.py results/loop.jsonl --model adatape_base_patch16_224 --folder JPEGS --workers 16

With `--folder`, JPEGs that `loader.py --folder` has written are decoded by workers, as ImageNet's would be; `loader` is
then their share: the largest of `bare` and `loader` is the wall. What workers have decoded while another side ran is
taken before the clock starts.
Both run in one process, a few dozen steps of each in turn; figures are medians over rounds. The bare side repeats the
same compiled update on one batch on the device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import Row, add_rows, parser_of

from adatape.config import Engine, Experiment, ImageModel, Optimizer
from adatape.data.loaders import PREFETCHED
from adatape.data_config import Augment, Images
from adatape.train.run import RunLogger
from adatape.train.trainer import Trainer

PAPER = Augment(crop="inception", area=(0.05, 1.0), flip=True, randaug=2, magnitude=15.0, mixup=0.5, smoothing=0.1)


def cifar_sized(folder: Path, images: int) -> str:
    """Noise of CIFAR's shape; pixel values do not affect the time of a step."""
    draw = np.random.default_rng(0)
    for split, count in (("train", images), ("test", 1000)):
        np.save(folder / f"{split}_images.npy", draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8))
        np.save(folder / f"{split}_labels.npy", np.arange(count) % 10)
    return str(folder)


def experiment(arguments: argparse.Namespace, data: str) -> Experiment:
    options: dict[str, Any] = json.loads(arguments.options)
    engine = Engine(
        precision=arguments.precision,
        compile=arguments.compile,
        checkpoint_every=arguments.checkpoint_every,
        log_every=arguments.log_every,
        workers=arguments.workers,
    )
    return Experiment(
        recipe="loop",
        data=Images("folder" if arguments.folder else "arrays", data, arguments.size, PAPER),
        model=ImageModel(arguments.model, options),
        optimizer=Optimizer(lr=1e-3, warmup=100, steps=10**6, batch=arguments.batch, weight_decay=0.1),
        evaluate_every=10**9,
        engine=engine,
    )


Steps = Generator[None, None, None]  # endless


def timed(
    sides: dict[str, Callable[[], Steps]], rounds: int, steps: int, wait: Callable[[], None], ahead: int = 0
) -> dict[str, list[float]]:
    """Milliseconds per step of each side, by round; sides alternate, and the first `ahead` steps are not timed."""
    took: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():  # warm-up: compile, capture
        with closing(side()) as each:
            take(each, steps)
    for number, (name, side) in itertools.product(range(rounds), sides.items()):
        with closing(side()) as each:
            take(each, ahead)
            wait()
            began = time.perf_counter()
            take(each, steps)
            wait()
            took[name].append(1e3 * (time.perf_counter() - began) / steps)
        print(f"round {number + 1} of {rounds}: {name} {took[name][-1]:.2f} ms", flush=True)
    return took


def take(steps: Iterator[None], count: int) -> None:
    deque(itertools.islice(steps, count), maxlen=0)


def saves(logger: RunLogger, count: int = 3) -> list[float]:
    """Seconds of each save, at different steps; the first also allocates memory that the others reuse."""
    took = []
    for _ in range(count):
        logger.trainer.step += 1
        logger.saver.wait()
        began = time.perf_counter()
        logger.save()
        took.append(time.perf_counter() - began)
    logger.saver.wait()
    return took


def measure(arguments: argparse.Namespace, folder: Path) -> Row:
    data = arguments.folder or cifar_sized(folder, arguments.images)
    trainer = Trainer(experiment(arguments, data), arguments.device)
    logger = RunLogger(trainer, folder, lambda _: None, {})
    steps, batch = trainer.train(10**6), next(trainer.task.batches(0))

    def whole() -> Steps:
        for stats in steps:
            logger.on_step(stats)
            yield

    def bare() -> Steps:
        while True:
            trainer.update(batch)
            yield

    def loader() -> Steps:
        with closing(trainer.task.batches(0)) as batches:  # type: ignore[type-var]  # its workers end here
            for _ in batches:
                yield

    wait = torch.cuda.synchronize if arguments.device == "cuda" else lambda: None
    with logger:
        sides = {"whole": whole, "bare": bare, "loader": loader}
        took = timed(sides, arguments.rounds, arguments.steps, wait, PREFETCHED * arguments.workers)
        saved = saves(logger)
    median = {name: statistics.median(values) for name, values in took.items()}
    with_saves = median["whole"] + 1e3 * saved[-1] / arguments.checkpoint_every
    return {
        "case": f"{arguments.model}, {arguments.size} px, batch {arguments.batch}" + ", JPEGs" * bool(arguments.folder),
        "model": arguments.model,
        "batch": arguments.batch,
        "size": arguments.size,
        "ms": {name: round(value, 3) for name, value in median.items()},
        "spread": {name: [round(min(values), 3), round(max(values), 3)] for name, values in took.items()},
        "images_per_second": {name: round(1e3 * arguments.batch / value, 1) for name, value in median.items()},
        "whole_over_bare": round(median["whole"] / median["bare"], 4),
        "save_seconds": [round(each, 3) for each in saved],
        "with_checkpoints": round(with_saves / median["bare"], 4),
    }


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--options", default="{}", help="of the model, as JSON")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--images", type=int, default=50_000, help="in the training set")
    parser.add_argument("--folder", help="of JPEGs in class folders under train and test, instead of arrays")
    parser.add_argument("--workers", type=int, default=0, help="processes that decode JPEGs")
    parser.add_argument("--steps", type=int, default=30, help="of each side per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--checkpoint-every", type=int, default=1000)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as temporary:
        row = measure(arguments, Path(temporary))
    add_rows(arguments.out, [row], arguments.device)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
