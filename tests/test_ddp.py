"""Two processes compute the same as one: every system, DDP and FSDP2, and resuming with another number.

The saved weights are the evaluated ones.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small_runs import FAMILIES, LONG, SMALL, tiny
from torch import Tensor
from torch.distributed.tensor import DTensor

from adatape.config import Engine, Experiment, Optimizer
from adatape.data_config import Augment, Images
from adatape.recipes.digits import digits
from adatape.recipes.systems import System
from adatape.train.evaluate import score_run
from adatape.train.folder import load_run
from adatape.train.parallel import full_state_dict, this_shard
from adatape.train.run import plain, run
from adatape.train.trainer import Trainer

STEPS = 3
SYSTEMS: tuple[System, ...] = get_args(System)
WAYS = {
    "copied": Engine(workers=0),
    "copied in two parts": Engine(workers=0, accumulate=2),
    "cut up": Engine(workers=0, shard=True),
    "cut up in two parts": Engine(workers=0, shard=True, accumulate=2),
}
# Every system is copied; the long suite also cuts up every one, and takes its batches in two parts.
CUT_UP: tuple[System, ...] = SYSTEMS if LONG else ("adatape", "adatape-learn", "avit", "ut")
IN_PARTS: tuple[System, ...] = SYSTEMS if LONG else ("adatape", "avit")
TRACED = [
    (system, way)
    for system in SYSTEMS
    for way in WAYS
    if (system in CUT_UP or "cut up" not in way) and (system in IN_PARTS or "parts" not in way)
]
SAVED = [  # families, whether parameters are cut up, and how fast their average moves
    (family, shard, ema)
    for family in (FAMILIES if LONG else ("adatape", "parity ut"))
    for shard in (False, True)
    for ema in ((0.9, None) if LONG else (0.9,))
]
TURN = 16 if LONG else 4  # steps that a run makes with one number of processes before it changes


def small(system: System, engine: Engine) -> Experiment:
    """Digits with a model of width 32 and depth 2.

    Without DropPath and A-ViT's prior, which depend on the process.
    """
    whole = digits(system)
    options = {**whole.model.options, "drop_path_rate": 0.0}
    options |= {"prior_weight": 0.0} if system == "avit" else {}
    options |= {name.rpartition(".")[2]: value for name, value in SMALL.items()}
    options |= {"depth": 2} if "depth" in options else {"steps": 2}
    return dataclasses.replace(
        whole,
        model=dataclasses.replace(whole.model, options=options),
        optimizer=Optimizer(lr=1e-4, warmup=0, steps=STEPS, batch=16, ema=0.9),
        engine=engine,
    )


def changing(engine: Engine = WAYS["copied"]) -> Experiment:
    """A run with all random parts: Mixup, augmentation, query noise, hidden bank tokens."""
    whole = small("adatape-learn", engine)
    augment = Augment(
        crop="pad", pad=1, flip=True, randaug=1, jitter=0.5, mixup=0.8, cutmix=1.0, erase=0.25, smoothing=0.1
    )
    options = {**whole.model.options, "query_noise": 0.1, "bank_dropout": 0.2}
    return dataclasses.replace(
        whole,
        data=Images("digits", size=8, augment=augment),
        model=dataclasses.replace(whole.model, options=options),
        optimizer=Optimizer(lr=1e-3, warmup=2, steps=3 * TURN + 2, batch=16, weight_decay=0.05, ema=0.9, new_lr=3e-3),
    )


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def trace(experiment: Experiment) -> dict[str, Any]:
    """Losses, gradients of every step, and final weights with their average."""
    trainer = Trainer(experiment, "cpu", this_shard())
    gradients: list[dict[str, Tensor]] = []
    step = trainer.stepper.step

    def watched(loss: Tensor) -> Tensor:
        gradients.append({n: whole(p.grad) for n, p in trainer.stepper.named.items() if p.grad is not None})
        return step(loss)

    trainer.stepper.step = watched  # type: ignore[method-assign]
    losses = [float(stats.loss) for stats in trainer.train(STEPS)]
    weights = {name: whole(p) for name, p in trainer.model.named_parameters()}
    average = {name: whole(value) for name, value in trainer.stepper.average.items()}
    score = trainer.evaluate("test") if experiment.engine.accumulate == 1 else None
    return {"losses": losses, "gradients": gradients, "weights": weights, "average": average, "score": score}


def one_rank(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = {(system, way): trace(small(system, WAYS[way])) for system, way in TRACED}
    torch.save(found, Path(folder) / f"{rank}.pt")
    losses = turn(Trainer(changing(), "cpu", this_shard()), Path(folder) / "turns", TURN)
    cut = turn(Trainer(changing(WAYS["cut up"]), "cpu", this_shard()), Path(folder) / "turns", TURN, "cut up")
    torch.save((losses, cut), Path(folder) / f"turn-{rank}.pt")
    results = [run(saved(*each), place_of(folder, *each), "cpu", lambda _: None) for each in SAVED]
    torch.save(results, Path(folder) / f"results-{rank}.pt")
    dist.destroy_process_group()


def saved(family: str, shard: bool, ema: float | None) -> Experiment:
    return tiny(family, steps=2, engine__shard=shard, optimizer__ema=ema)


def place_of(folder: Path | str, family: str, shard: bool, ema: float | None) -> Path:
    return Path(folder) / f"{family} {shard} {ema}"


def turn(trainer: Trainer, folder: Path, first: int, name: str = "") -> list[float]:
    """Trains from step `first` and saves at the end."""
    if first:
        trainer.load(folder / f"step-{first:08d}")
    losses = [float(stats.loss) for stats in trainer.train(TURN)]
    trainer.save(folder / name, {})
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with the results of two processes, started once for all tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("pair")
    torch.save(turn(Trainer(changing()), folder / "turns", 0), folder / "first.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(one_rank, (port, str(folder)), nprocs=2)
    yield folder
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[tuple[str, str], Any]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {system: trace(small(system, WAYS["copied"])) for system in SYSTEMS}


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], share: float) -> None:
    """Each tensor within a relative tolerance, or a tolerance relative to the largest.

    A key bias does not affect attention: its gradient is rounding noise, which Adam scales to full steps.
    """
    largest = max(float(value.norm()) for value in wanted.values())
    for name, value in wanted.items():
        difference = found[name] - value if name in found else value
        if name.endswith("qkv.bias"):
            query, _, values = difference.chunk(3)
            difference = torch.cat([query, values])
        error = float(difference.norm())
        assert error <= share * max(float(value.norm()), 0.01 * largest), (name, error, float(value.norm()))


@pytest.mark.parametrize(("system", "way"), TRACED)
def test_two_processes_give_the_gradients_of_one(ranks: Any, alone: Any, system: str, way: str) -> None:
    pair, one = [found[system, way] for found in ranks], alone[system]
    for step in range(STEPS):
        mine, theirs = (found["gradients"][step] for found in pair)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert_near(mine, one["gradients"][step], 1e-5)
    assert pair[0]["losses"] == pair[1]["losses"]
    torch.testing.assert_close(torch.tensor(pair[0]["losses"]), torch.tensor(one["losses"]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("system", CUT_UP)
def test_weights_cut_up_end_as_weights_copied(ranks: Any, system: str) -> None:
    copied, cut = (ranks[0][system, way] for way in ("copied", "cut up"))
    for kind in ("weights", "average"):
        assert_near(cut[kind], copied[kind], 1e-5)
    assert cut["score"].accuracy == copied["score"].accuracy
    assert cut["score"].loss == pytest.approx(copied["score"].loss, rel=1e-5)


def test_a_run_that_goes_from_one_process_to_two_and_back_is_the_unbroken_one(folder: Path) -> None:
    unbroken = [float(stats.loss) for stats in Trainer(changing()).train(3 * TURN + 2)]
    two, cut = torch.load(folder / "turn-0.pt")
    first = torch.load(folder / "first.pt")
    for name, middle in (("", two), ("cut up", cut)):
        last = Trainer(changing())
        last.load(folder / "turns" / name / f"step-{2 * TURN:08d}")
        losses = first + middle + [float(stats.loss) for stats in last.train(TURN + 2)]
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(unbroken), rtol=1e-5, atol=0)


@pytest.mark.parametrize("each", SAVED, ids=str)
def test_what_two_processes_save_is_what_they_scored(folder: Path, each: tuple[str, bool, float | None]) -> None:
    """One process loads and evaluates it; it equals the last checkpoint."""
    mine, theirs = (torch.load(folder / f"results-{rank}.pt")[SAVED.index(each)] for rank in range(2))
    experiment, model = load_run(place_of(folder, *each))
    again = plain(score_run(experiment, model, torch.device("cpu")))
    assert again == {name: mine[name] for name in again} == {name: theirs[name] for name in again}
    trainer = Trainer(saved(*each))
    trainer.load(place_of(folder, *each) / "checkpoints" / "step-00000002")
    with trainer.averaged():
        wanted = full_state_dict(trainer.model)
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    assert trainer.evaluate("test").accuracy == mine["accuracy"]
