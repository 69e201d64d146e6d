"""Our trainer against a bare loop of timm's parts: equal where both see the same images."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripts import script
from words import experiment_of

from adatape.config import Experiment
from adatape.data_config import Augment
from adatape.recipes import RECIPES
from adatape.train.optim import rate_at
from adatape.train.trainer import Trainer

timm_loop = script("research/timm_loop.py")
COUNT, STEPS = 48, 8
SMALL = (
    f"batch={COUNT} lr=3e-3 optimizer.steps={STEPS} optimizer.warmup=3 optimizer.ema=0.5 optimizer.clip=0.5 "
    "model.options.embed_dim=48 model.options.num_heads=3 model.options.depth=2 engine.precision=fp32 "
    "engine.compile=false engine.workers=0 engine.log_every=2"
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, draw = tmp_path_factory.mktemp("arrays"), np.random.default_rng(0)
    for split in ("train", "test"):
        np.save(folder / f"{split}_images.npy", draw.integers(0, 256, (COUNT, 32, 32, 3), dtype=np.uint8))
        np.save(folder / f"{split}_labels.npy", np.arange(COUNT) % 100)
    return str(folder)


def experiment(data: str, augment: Augment | None = None) -> Experiment:
    made = experiment_of(RECIPES["cifar100"], f"vit patch=4 {SMALL}", path=data, seed=3)
    return made if augment is None else dataclasses.replace(made, data=dataclasses.replace(made.data, augment=augment))


def losses_of(trainer: Trainer) -> list[float]:
    return [float(stats.loss) for stats in trainer.train(STEPS)]


def assert_same_weights(trainer: Trainer, loop: Any) -> None:
    """Weights and averages, compared with how far they have moved: Adam enlarges the rounding of tiny gradients."""
    start = dict(Trainer(trainer.experiment).model.named_parameters())
    pairs = (
        (dict(trainer.model.named_parameters()), dict(loop.model.named_parameters())),
        (trainer.stepper.average, dict(loop.average.module.named_parameters())),
    )
    for ours, theirs in pairs:
        apart = torch.cat([(p - theirs[name.removeprefix("vit.")]).flatten() for name, p in ours.items()])
        moved = torch.cat([(p - start[name]).flatten() for name, p in ours.items()])
        assert apart.norm() < 2e-3 * moved.norm()


def test_both_loops_start_from_the_same_weights(data: str) -> None:
    trainer, loop = Trainer(experiment(data)), timm_loop.TimmLoop(experiment(data), CPU, 100)
    theirs = loop.model.state_dict()
    for name, mine in trainer.model.vit.state_dict().items():
        assert torch.equal(mine, theirs[name]), name


@pytest.mark.usefixtures("one_order_of_sums")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_without_augmentation_both_loops_have_the_same_losses_from_their_own_loaders(
    data: str, smoothing: float
) -> None:
    """A batch is the whole set, so that both loops see the same images, in whichever order."""
    plain = experiment(data, Augment(smoothing=smoothing))
    trainer, loop = Trainer(plain), timm_loop.TimmLoop(plain, CPU, 100)
    ours = losses_of(trainer)
    theirs = [float(loop.step(*batch)) for batch in itertools.islice(loop.batches(), STEPS)]
    assert len(ours) == len(theirs) == STEPS
    assert ours[-1] < ours[0]
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert_same_weights(trainer, loop)


@pytest.mark.usefixtures("one_order_of_sums")
def test_on_the_same_augmented_and_mixed_batches_both_loops_have_the_same_losses(data: str) -> None:
    trainer, loop = Trainer(experiment(data)), timm_loop.TimmLoop(experiment(data), CPU, 100)
    theirs = [float(loop.step(batch.x, batch.target)) for batch in itertools.islice(trainer.task.batches(0), STEPS)]
    assert losses_of(trainer) == pytest.approx(theirs, abs=1e-5)
    assert_same_weights(trainer, loop)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 10), (3, 10), (10, 1000)])
def test_rates_are_the_same_at_every_step(warmup: int, steps: int) -> None:
    settings = dataclasses.replace(experiment("").optimizer, warmup=warmup, steps=steps, floor=1e-5)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=settings.lr)
    schedule = timm_loop.schedule_of(optimizer, settings)
    for step in range(steps):
        timm_loop.set_rate(schedule, settings, step)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate_at(settings, step), rel=1e-9)


def test_the_same_parameters_decay(data: str) -> None:
    trainer, loop = Trainer(experiment(data)), timm_loop.TimmLoop(experiment(data), CPU, 100)

    def decays(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        by_id = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        return {name.removeprefix("vit."): by_id[id(p)] for name, p in model.named_parameters()}

    assert decays(trainer.model, trainer.stepper.adamw) == decays(loop.model, loop.optimizer)


def test_both_sides_with_all_augmentation_give_a_row_for_each_seed_and_go_on_where_they_were_stopped(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    given = [str(out), "--data", data, "--seeds", "0", "--device", "cpu", "--runs", str(tmp_path / "runs")]
    timm_loop.main([*given, "--set", *SMALL.replace(f"batch={COUNT}", "batch=16").split(), "engine.precision=bf16"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["run"] for row in rows] == ["cifar100/timm/seed-0", "cifar100/ours/seed-0"]
    assert all(0 <= row["accuracy"] <= 1 and row["images_per_second"] > 0 for row in rows)
    assert all(len(row["losses"]) == STEPS / 2 for row in rows)
    assert rows[0]["config"] == rows[1]["config"]
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[-2:]] == ["timm", "ours"]

    out.write_text(json.dumps(rows[0]) + "\n")  # as if our side had been stopped before its row
    timm_loop.main([*given, "--set", *SMALL.replace(f"batch={COUNT}", "batch=16").split(), "engine.precision=bf16"])
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert again[0] == rows[0]
    assert again[1]["losses"] == rows[1]["losses"]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["timm", "ours"]


def test_timms_loop_on_our_batches_has_our_losses_with_all_augmentation(data: str, tmp_path: Path) -> None:
    out, sets = tmp_path / "rows.jsonl", SMALL.replace(f"batch={COUNT}", "batch=16").split()
    given = [str(out), "--data", data, "--seeds", "0", "--device", "cpu", "--runs", str(tmp_path / "runs")]
    timm_loop.main([*given, "--side", "timm", "ours", "mixed", "--set", *sets, "engine.precision=fp32"])
    timm, ours, mixed = (json.loads(line)["losses"] for line in out.read_text().splitlines())
    assert mixed == pytest.approx(ours, rel=1e-4)
    assert mixed != pytest.approx(timm, rel=1e-4)


def test_both_sides_are_timed_in_turns(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    sets = SMALL.replace(f"optimizer.steps={STEPS}", "optimizer.steps=100").replace(f"batch={COUNT}", "batch=8").split()
    timm_loop.main([str(out), "--data", data, "--pace", "2", "--set", *sets])
    [row] = [json.loads(line) for line in out.read_text().splitlines()]
    assert min(row["images_per_second"][side] for side in timm_loop.SIDES) > 0
    assert [word for word in capsys.readouterr().out.split() if word in timm_loop.SIDES] == ["timm", "ours"]
    with pytest.raises(ValueError, match=r"engine\.workers is 2; .* so 0"):
        timm_loop.main([str(out), "--data", data, "--pace", "1", "--set", *sets, "engine.workers=2"])


def test_what_the_loop_would_not_follow_is_refused(data: str) -> None:
    with pytest.raises(ValueError, match=r"data\.augment\.crop is 'inception'; the loop of timm's parts has 'pad' or"):
        timm_loop.check_covered(experiment(data, Augment(crop="inception")))
