"""Our trainer beside a bare loop of timm's own parts: same model, recipe, data and steps.

    python research/timm_loop.py results/timm_loop.jsonl --data data/cifar100               both sides, three seeds
    python research/timm_loop.py results/timm_loop.jsonl --data data/cifar100 --side ours --seeds 0
    python research/timm_loop.py results/timm_loop.jsonl --data data/cifar100 --side mixed    timm's loop on our batches
    python research/timm_loop.py results/timm_loop.jsonl --data data/cifar100 --set epochs=60 engine.workers=12
    python research/timm_loop.py results/timm_loop.jsonl --data data/cifar100 --device cpu --pace 8      no training

The recipe is `adatape train cifar100 --system vit --patch 4` (ViT-Ti/4). A row has the accuracy on the test set, in
float32, and images per second, loader included: the median over log intervals after the first. The two sides have the
same initial weights, decay groups, rates, clipping, average and precision: with augmentation off they have the same
losses (tests/test_timm_loop.py). A side and seed that the file has a row of, with the same settings, is left out, and a
run of ours that was stopped goes on if the same command is given again. `--pace` takes turns of both sides in one
process and counts images per second of processor time, which a busy machine does not change. What differs otherwise:

- RandAugment: timm has 15 operations, ours 16, with cutout; each is always applied, on both sides.
- Mixup and CutMix pair a sample with its mirror place in the batch at timm, with the next sample at ours.
- timm drops the incomplete batch at the end of an epoch; ours continues with the next epoch's first images.
- timm augments on the CPU in worker processes, ours on the device; ours replays its step as a CUDA graph, with a fused
  AdamW that skips non-finite steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import timm
import torch
from PIL import Image
from rows import Row, add_rows, read_rows
from timm.data import Mixup, create_loader
from timm.data.auto_augment import rand_augment_transform
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, dispatch_clip_grad, random_seed
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision import transforms
from words import experiment_of

from adatape.config import Experiment, ImageModel, Optimizer, to_dict
from adatape.data.batch import Shard
from adatape.data.images import Split, open_images
from adatape.data.randaug import FILL
from adatape.data_config import Augment, Images
from adatape.recipes import RECIPES
from adatape.train.folder import environment
from adatape.train.launch import train_to_folder
from adatape.train.logger import METRICS, read_metrics
from adatape.train.task import task_of
from adatape.train.trainer import Trainer

Side = Literal["timm", "ours", "mixed"]
SIDES: tuple[Side, ...] = ("timm", "ours")
MIXED: Side = "mixed"  # timm's loop on our batches
SEEDS = (0, 1, 2)
RECIPE, WORDS = "cifar100", "vit patch=4"
HALF = (0.5, 0.5, 0.5)


class Trained(NamedTuple):
    accuracy: float
    images_per_second: float
    losses: list[float]  # means over log intervals


class Pictures(Dataset[Any]):
    """A split as PIL images, in the form of timm's data sets: its loader sets `transform`."""

    transform: Any = None

    def __init__(self, data: Images, split: Split) -> None:
        self.images = open_images(data, split)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image: Image.Image = self.images.read(index)
        return image if self.transform is None else self.transform(image), int(self.images.labels[index])


def check_covered(experiment: Experiment) -> tuple[Images, ImageModel]:
    """Refuses settings that the loop below would not follow."""
    data, model, optimizer = experiment.data, experiment.model, experiment.optimizer
    if not isinstance(data, Images) or not isinstance(model, ImageModel):
        raise TypeError(f"data is {type(data).__name__}; the loop covers Images with an ImageModel")
    augment = data.augment
    kept: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "data.augment.crop": (augment.crop, ("pad", "none")),
        "data.augment.jitter": (augment.jitter, (0,)),
        "data.augment.magnitude": (augment.magnitude, (int(augment.magnitude),)),
        "data.augment.erase": (augment.erase, (0,)),
        "data.augment.repeats": (augment.repeats, (1,)),
        "model.wrap": (model.wrap, (None,)),
        "model.pretrained": (model.pretrained, (None,)),
        "optimizer.schedule": (optimizer.schedule, ("cosine",)),
        "optimizer.decay": (optimizer.decay, ("matrices",)),
        "optimizer.new_lr": (optimizer.new_lr, (None,)),
        "engine.accumulate": (experiment.engine.accumulate, (1,)),
        "engine.compile": (experiment.engine.compile, (True, False)),
        "loss": (experiment.loss, ("softmax",)),
    }
    for name, (value, allowed) in kept.items():
        if value not in allowed:
            raise ValueError(
                f"{name} is {value!r}; the loop of timm's parts has {' or '.join(map(repr, allowed))} only"
            )
    return data, model


def training_transform(augment: Augment, size: int) -> Any:
    """Crop, flip and RandAugment of PIL images; timm's loader then makes tensors and scales them."""
    steps: list[Any] = [transforms.Resize((size, size))]
    if augment.crop == "pad":
        steps.append(transforms.RandomCrop(size, padding=augment.pad, fill=FILL))
    if augment.flip:
        steps.append(transforms.RandomHorizontalFlip(0.5))
    if augment.randaug:
        pixels = {"translate_pct": 100 / 224, "img_mean": (FILL,) * 3}
        steps.append(rand_augment_transform(f"rand-m{int(augment.magnitude)}-n{augment.randaug}-p1.0", pixels))
    return transforms.Compose([*steps, transforms.PILToTensor()])


class TimmLoop:
    """The step of timm's training script, in the bare: its optimizer, schedule, clipping, Mixup, loss and average."""

    def __init__(self, experiment: Experiment, device: torch.device, classes: int) -> None:
        self.data, described = check_covered(experiment)
        self.settings, self.device, self.engine, self.taken = experiment.optimizer, device, experiment.engine, 0
        torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
        random_seed(experiment.seed)
        self.model: nn.Module = timm.create_model(
            described.name, img_size=self.data.size, num_classes=classes, **described.options
        ).to(device)
        self.forward = torch.compile(self.model) if self.engine.compile else self.model
        self.optimizer = create_optimizer_v2(
            self.model,
            "adamw",
            lr=self.settings.lr,
            weight_decay=self.settings.weight_decay,
            betas=self.settings.betas,
        )
        self.schedule = schedule_of(self.optimizer, self.settings)
        self.average = None if self.settings.ema is None else ModelEmaV3(self.model, decay=self.settings.ema)
        augment = self.data.augment
        self.mix = (
            Mixup(augment.mixup, augment.cutmix, label_smoothing=augment.smoothing, num_classes=classes)
            if augment.mixup or augment.cutmix
            else None
        )
        self.of_classes = LabelSmoothingCrossEntropy(augment.smoothing)
        self.of_shares = SoftTargetCrossEntropy()

    def step(self, x: Tensor, target: Tensor) -> Tensor:
        """One update on a batch with labels, or with shares of classes; returns the loss."""
        set_rate(self.schedule, self.settings, self.taken)
        self.model.train()
        self.optimizer.zero_grad()
        with self._autocast():
            logits = self.forward(x)
            loss = (self.of_classes if target.dim() == 1 else self.of_shares)(logits.float(), target)
        loss.backward()
        if self.settings.clip is not None:
            dispatch_clip_grad(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        if self.average is not None:
            self.average.update(self.model)
        self.taken += 1
        return loss.detach()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Epoch after epoch of timm's loader, mixed."""
        pictures = Pictures(self.data, "train")
        loader = self._loader(pictures, self.settings.batch, is_training=True, no_aug=True)
        pictures.transform = training_transform(self.data.augment, self.data.size)
        if len(loader) == 0:
            raise ValueError(f"batch is {self.settings.batch}; it must be at most the {len(pictures)} training images")
        for _ in itertools.count():
            for x, label in loader:
                yield (x, label) if self.mix is None else self.mix(x, label)

    @torch.no_grad()
    def accuracy(self) -> float:
        """On the test set, in float32, of the average if there is one."""
        model = (self.model if self.average is None else self.average.module).eval()
        pictures = Pictures(self.data, "test")
        loader = self._loader(pictures, 500, is_training=False, crop_pct=1.0)
        return sum(int((model(x).argmax(-1) == label).sum()) for x, label in loader) / len(pictures)

    def _loader(self, pictures: Pictures, batch: int, **options: Any) -> Any:
        workers, on_gpu = self.engine.workers, self.device.type == "cuda"
        return create_loader(
            pictures,
            (3, self.data.size, self.data.size),
            batch,
            mean=HALF,
            std=HALF,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=on_gpu,
            device=self.device,
            **options,
        )

    def _autocast(self) -> Any:
        if self.engine.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def schedule_of(optimizer: torch.optim.Optimizer, settings: Optimizer) -> CosineLRScheduler:
    return CosineLRScheduler(
        optimizer,
        t_initial=max(1, settings.steps - settings.warmup),
        lr_min=settings.floor,
        warmup_t=settings.warmup,
        warmup_prefix=True,
        t_in_epochs=False,
    )


def set_rate(schedule: CosineLRScheduler, settings: Optimizer, step: int) -> None:
    """The rate of a step. timm's warm-up has rate 0 at its first step, ours after `warmup` steps all but that."""
    schedule.step_update(step + 1 if step < settings.warmup else step)


def our_batches_of(experiment: Experiment, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in task_of(experiment, Shard(), device).batches(0):
        yield batch.x, batch.target


def train_by_timm(experiment: Experiment, device: torch.device, our_batches: bool = False) -> Trained:
    loop = TimmLoop(experiment, device, open_images(check_covered(experiment)[0], "test").classes)
    every, paces, losses = experiment.engine.log_every, [], []
    endless = our_batches_of(experiment, device) if our_batches else loop.batches()
    batches = itertools.islice(endless, experiment.optimizer.steps)
    began = time.perf_counter()
    while pending := [loop.step(*batch) for batch in itertools.islice(batches, every)]:
        losses.append(float(torch.stack(pending).mean()))  # synchronises
        ended = time.perf_counter()
        paces.append(len(pending) * experiment.optimizer.batch / (ended - began))
        began = ended
    return Trained(loop.accuracy(), median_pace(paces), losses)


def train_by_ours(experiment: Experiment, device: torch.device, folder: Path) -> Trained:
    result = train_to_folder(experiment, folder, str(device), resume=True).result
    lines = [line for line in read_metrics(folder / METRICS).lines if line["kind"] == "train"]
    paces = [line["samples_per_second"] for line in lines]
    return Trained(result["accuracy"], median_pace(paces), [line["loss"] for line in lines])


def paces_in_turns(experiment: Experiment, rounds: int, steps: int = 20) -> dict[Side, float]:
    """Images per second of processor time, loader included: medians over `rounds` turns after the first, on a CPU."""
    if experiment.engine.workers:
        raise ValueError(f"engine.workers is {experiment.engine.workers}; processor time is of one process, so 0")
    loop = TimmLoop(experiment, torch.device("cpu"), open_images(check_covered(experiment)[0], "test").classes)
    batches = loop.batches()
    steppers: dict[Side, Iterator[Any]] = {
        "timm": (loop.step(*batch) for batch in batches),
        "ours": iter(Trainer(experiment).train(steps * (rounds + 1))),
    }
    found: dict[Side, list[float]] = {side: [] for side in SIDES}
    for _, side in itertools.product(range(rounds + 1), SIDES):
        began = time.process_time()
        taken = len(list(itertools.islice(steppers[side], steps)))
        found[side].append(taken * experiment.optimizer.batch / (time.process_time() - began))
    return {side: median_pace(paces) for side, paces in found.items()}


def median_pace(paces: Sequence[float]) -> float:
    """The first interval has the start of workers and compilation."""
    return statistics.median(paces[1:] or paces)


def row_of(side: Side, experiment: Experiment, trained: Trained, device: str, sets: Sequence[str]) -> Row:
    given = f" --set {' '.join(sets)}" if sets else ""
    return {
        "run": f"{experiment.recipe}/{side}/seed-{experiment.seed}",
        "accuracy": trained.accuracy,
        "images_per_second": trained.images_per_second,
        "losses": [round(loss, 6) for loss in trained.losses],
        "command": f"python research/timm_loop.py OUT --data DIR --side {side} --seeds {experiment.seed}{given}",
        "config": to_dict(experiment),
        "environment": environment(device),
    }


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Mean accuracy with its standard error, and images per second, of each side."""
    for side in (*SIDES, MIXED):
        mine = [row for row in rows if f"/{side}/" in row["run"]]
        if mine:
            right, pace = ([100 * row["accuracy"] for row in mine], [row["images_per_second"] for row in mine])
            error = f" ± {statistics.stdev(right) / math.sqrt(len(right)):.2f}" if len(right) > 1 else ""
            seeds = f"{len(mine)} seed{'s' if len(mine) > 1 else ''}"
            yield f"{side:5} {statistics.mean(right):.2f}{error} %  {statistics.median(pace):,.0f} images/s  {seeds}"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a JSONL file; the row of a side and seed replaces an earlier one")
    parser.add_argument("--data", required=True, help="a folder with {train,test}_{images,labels}.npy")
    parser.add_argument("--side", nargs="+", choices=(*SIDES, MIXED), default=list(SIDES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--set", nargs="*", default=[], help="keywords and fields for every run, as in epochs=60")
    parser.add_argument("--runs", type=Path, help="where run folders of our side go; runs/OUT unless given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pace", type=int, metavar="ROUNDS", help="only time both sides, in turns, on a CPU")
    arguments = parser.parse_args(given)
    runs = arguments.runs or Path("runs") / arguments.out.stem
    if arguments.pace is not None:
        experiment = experiment_of(RECIPES[RECIPE], " ".join([WORDS, *arguments.set]), path=arguments.data)
        paces = paces_in_turns(experiment, arguments.pace)
        made = {"config": to_dict(experiment), "environment": environment("cpu")}
        add_rows(arguments.out, [{"run": f"{RECIPE}/pace", "images_per_second": paces, **made}])
        print("  ".join(f"{side} {pace:,.0f} images/s of processor time" for side, pace in paces.items()))
        return
    rows, known = [], {row["run"]: row for row in read_rows(arguments.out)}
    for seed, side in itertools.product(arguments.seeds, arguments.side):
        experiment = experiment_of(RECIPES[RECIPE], " ".join([WORDS, *arguments.set]), path=arguments.data, seed=seed)
        check_covered(experiment)
        device = torch.device(arguments.device)
        row = known.get(f"{RECIPE}/{side}/seed-{seed}")
        if row is not None and row["config"] == json.loads(json.dumps(to_dict(experiment))):
            rows.append(row)
            continue
        if side == "ours":
            trained = train_by_ours(experiment, device, runs / f"seed-{seed}")
        else:
            trained = train_by_timm(experiment, device, our_batches=side == MIXED)
        rows.append(row_of(side, experiment, trained, arguments.device, arguments.set))
        add_rows(arguments.out, rows[-1:])
        print(f"{rows[-1]['run']}: {trained.accuracy:.4f}, {trained.images_per_second:,.0f} images/s", flush=True)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
