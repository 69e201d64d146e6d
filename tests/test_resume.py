"""A resumed run equals an uninterrupted one to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import FAMILIES, LONG, tiny, weights_of, write_folder
from torch import Tensor

from adatape.config import Experiment
from adatape.data.batch import Batch, Shard
from adatape.train.checkpoint import checkpoints
from adatape.train.run import run
from adatape.train.task import task_of
from adatape.train.trainer import Stats, Trainer

HALF = 50 if LONG else 6
pytestmark = [
    pytest.mark.usefixtures("one_order_of_sums"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores is the point
]


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def seen(trainer: Trainer, steps: Iterator[Stats]) -> Iterator[dict[str, Tensor]]:
    """Each step's loss and gradient norm, with all state after it."""
    for stats in steps:
        yield {"loss": stats.loss, "norm": stats.norm, **copied(trainer.state())}


def another(experiment: Experiment, path: Path) -> Trainer:
    """A new trainer that loads the first one's checkpoint."""
    torch.manual_seed(12345)
    trainer = Trainer(experiment)
    trainer.load(path)
    return trainer


@pytest.mark.parametrize("family", FAMILIES)
def test_resuming_gives_every_later_step_to_the_bit(family: str, tmp_path: Path) -> None:
    experiment = tiny(family, steps=2 * HALF)
    trainer = Trainer(experiment)
    steps = seen(trainer, trainer.train(2 * HALF))
    first = list(islice(steps, HALF))
    path = trainer.save(tmp_path, {})
    rest = list(steps)
    resumed = another(experiment, path)
    again = list(seen(resumed, resumed.train(HALF)))
    assert len(again) == len(rest) == HALF
    for n, (one, two) in enumerate(zip(rest, again, strict=True)):
        assert same(one, two), f"step {HALF + n}"
    assert not same(first[-1], rest[-1])


class Before(Exception):  # noqa: N818
    """Raised instead of taking a step."""


def right_before_the_next_step(trainer: Trainer) -> dict[str, Tensor]:
    """State, batch, rate and generator state right before the next step."""
    found: dict[str, Tensor] = {}

    def look(batch: Batch) -> Tensor:
        found.update(copied(trainer.state()))
        found.update({f"batch.{name}": value for name, value in batch._asdict().items()})
        found.update(rng=torch.get_rng_state(), rate=trainer.stepper.rate.clone(), step=torch.tensor(trainer.step))
        raise Before

    trainer.update = look
    with pytest.raises(Before):
        next(trainer.train(1))
    return found


@pytest.mark.parametrize("family", ["adatape-learn", "deit", "parity adatape"])
def test_everything_that_a_step_depends_on_is_back_before_it(family: str, tmp_path: Path) -> None:
    experiment = tiny(family, steps=12, optimizer__schedule="cosine")
    trainer = Trainer(experiment)
    assert len(list(trainer.train(5))) == 5
    path = trainer.save(tmp_path, {})
    resumed = another(experiment, path)
    wanted, found = right_before_the_next_step(trainer), right_before_the_next_step(resumed)
    assert {name.split(".")[0] for name in wanted} == {
        *("model", "optimizer", "average", "skipped", "batch", "rng", "rate", "step"),
    }
    moments = [name for name in wanted if name.endswith((".exp_avg", ".exp_avg_sq"))]
    assert all(wanted[name].any() for name in moments if "head" in name)
    assert {int(wanted[name]) for name in wanted if name.startswith("optimizer.") and name.endswith(".step")} == {5}
    for name, value in wanted.items():
        assert torch.equal(value, found[name]), name
    assert wanted.keys() == found.keys()


def of_folder(path: Path, workers: int, **fields: Any) -> Experiment:
    """An experiment on decoded images, five steps per epoch."""
    settings = {"data__source": "folder", "data__path": str(path), "data__size": 16, "optimizer__batch": 4, **fields}
    return tiny("plainvit", engine__workers=workers, data__resident=False, **settings)


def batches(experiment: Experiment, first: int, count: int) -> list[Batch]:
    return list(islice(task_of(experiment, Shard(), torch.device("cpu")).batches(first), count))


@pytest.mark.parametrize("first", [0, 3, 5], ids=["step 0", "mid-epoch", "epoch end"])
def test_loader_workers_and_the_step_begun_at_change_no_sample_and_no_pixel(first: int, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, 20)
    whole = batches(of_folder(folder, 0), 0, 12)
    resumed = batches(of_folder(folder, 4), first, 12 - first)
    for one, two in zip(whole[first:], resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(whole[0].x, whole[5].x)


def test_an_epoch_that_is_resumed_in_its_middle_shows_every_image_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, 20)
    plain = {"data__augment__mixup": 0.0, "data__augment__crop": "none"}
    before, after = batches(of_folder(folder, 4, **plain), 5, 2), batches(of_folder(folder, 0, **plain), 7, 3)
    shades = torch.cat([batch.x[:, 0, 0, 0] for batch in (*before, *after)])
    assert shades.unique().numel() == 20


@pytest.mark.parametrize("stop", [0, 3, 5])
def test_a_run_resumed_with_other_workers_ends_with_the_same_weights(stop: int, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", 20)
    every = {"engine__checkpoint_every": max(1, stop)}
    run(of_folder(folder, 0, steps=7, **every), tmp_path / "whole", "cpu", lambda _: None)

    def pull_the_plug(status: Any) -> None:
        if status.step == stop + 1:
            raise Before

    with pytest.raises(Before):
        run(of_folder(folder, 0, steps=7, **every), tmp_path / "halves", "cpu", pull_the_plug)
    left = [path.name for path in checkpoints(tmp_path / "halves" / "checkpoints")]
    assert left == ([f"step-{stop:08d}"] if stop else [])
    run(of_folder(folder, 2, steps=7, **every), tmp_path / "halves", "cpu", lambda _: None, resume=True)
    assert same(weights_of(tmp_path / "whole"), weights_of(tmp_path / "halves"))
