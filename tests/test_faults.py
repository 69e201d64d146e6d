"""Runs survive kills, signals, damaged files, full disks, non-finite numbers and bad input."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import (
    EVERY,
    LONG,
    QUIET,
    Forks,
    Unplugged,
    at_step,
    children_of,
    command,
    contents,
    fingerprint,
    history,
    in_the_long_suite,
    logged,
    newest_step,
    no_watch,
    tiny,
    torchrun,
    unplug_at,
    unplugged,
    wait_until,
)
from torch import Tensor

from adatape import cli
from adatape.data.batch import Batch
from adatape.models.base import Adaptive
from adatape.train.checkpoint import checkpoints
from adatape.train.logger import MetricsWriter
from adatape.train.run import run
from adatape.train.trainer import Trainer

STEPS, STEPS_OF_TWO = 40, 80  # `undisturbed` takes STEPS
SILENT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
KILLS, RUNS = (100, 10) if LONG else (3, 1)


pytestmark = pytest.mark.usefixtures("one_order_of_sums")


class Kills:
    """Counts kills, those within a save, and steps lost."""

    def __init__(self) -> None:
        self.count, self.saving, self.lost, self.left = 0, 0, [0], set[tuple[str, float]]()

    def note(self, out: Path) -> None:
        left = {(str(path), path.stat().st_mtime) for path in (out / "checkpoints").glob(".step-*")}
        self.count += 1
        self.saving += not left <= self.left
        self.left |= left
        self.lost.append(logged(out) - newest_step(out))

    def __str__(self) -> str:
        lost = f"{sum(self.lost) / max(1, self.count):.2f} steps lost on average, {max(self.lost)} at most"
        return f"{self.count} kills, {self.saving} of them within a save; {lost}"


def killed_at_random(forks: Forks, out: Path, draws: random.Random, times: int, kills: Kills) -> None:
    """Starts with `--resume`, as a queue would, and kills a run several times; then lets it finish."""
    again = [*command(out, STEPS), "--resume"]
    for _ in range(times):
        child = forks.start(again)
        time.sleep(draws.uniform(0, 1.5))
        child.kill()
        if child.wait() == 0:
            break
        kills.note(out)
    forks.finish(again)


def test_kills_at_random_moments_lose_at_most_one_interval_and_change_no_weight(
    forks: Forks, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kills, draws, n = Kills(), random.Random(0), 0
    while kills.count < KILLS:
        n += 1
        out = tmp_path / str(n)
        killed_at_random(forks, out, draws, min(KILLS // RUNS, KILLS - kills.count), kills)
        assert fingerprint(out) == fingerprint(undisturbed)
        assert history(out) == history(undisturbed)
        assert not list((out / "checkpoints").glob(".step-*"))
    with capsys.disabled():
        print(f"\n{n} runs: {kills}")
    assert max(kills.lost) <= EVERY


def test_a_real_process_killed_within_a_save_goes_on_by_its_folder(
    forks: Forks, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-m", "adatape", *command(out, STEPS)], env=QUIET, **SILENT)
    wait_until(lambda: logged(out) > EVERY and any((out / "checkpoints").glob(".step-*.partial")))
    process.kill()
    process.wait()
    assert newest_step(out) >= logged(out) - EVERY
    assert forks.finish(["train", str(out), "--device", "cpu"]).errors == []
    assert fingerprint(out) == fingerprint(undisturbed)


@pytest.fixture(scope="module")
def undisturbed_two(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "two"
    forks.finish_two(command(out, STEPS_OF_TWO))
    return out


def kill_a_rank(agent: subprocess.Popen[str], rank: int) -> None:
    """Kills one rank and waits until both are restarted."""
    before = children_of(agent.pid)
    assert len(before) == 2
    os.kill(before[rank], signal.SIGKILL)
    wait_until(lambda: not set(before) & set(children_of(agent.pid)))


@in_the_long_suite
def test_a_rank_killed_three_times_under_torchrun_changes_no_weight(undisturbed_two: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with torchrun(command(out, STEPS_OF_TWO), restarts=3) as agent:
        for n in range(3):
            wait_until(at_step(out, 5 + 20 * n))
            kill_a_rank(agent, n % 2)
        _, said = agent.communicate(timeout=600)
    assert agent.returncode == 0, said
    assert fingerprint(out) == fingerprint(undisturbed_two)
    assert history(out) == history(undisturbed_two)


@in_the_long_suite
def test_a_killed_rank_and_a_sigterm_to_torchrun_cost_no_weight(
    forks: Forks, undisturbed_two: Path, tmp_path: Path
) -> None:
    """torchrun signals whole process groups: the ranks and their loader workers."""
    out = tmp_path / "run"
    with torchrun(command(out, STEPS_OF_TWO, data__resident=False, engine__workers=1), restarts=1) as agent:
        wait_until(at_step(out, 5))
        kill_a_rank(agent, 0)
        wait_until(at_step(out, 12))
        agent.terminate()
        _, said = agent.communicate(timeout=300)
    assert agent.returncode != 0
    assert "SIGKILL" not in said  # which torchrun sends to what is left after 30 s
    assert f"adatape: stopped at step {logged(out)} and saved" in said
    assert 12 <= newest_step(out) == logged(out) < STEPS_OF_TWO
    forks.finish_two(["train", str(out), "--device", "cpu"])
    assert fingerprint(out) == fingerprint(undisturbed_two)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_a_run_with_a_checkpoint(
    forks: Forks, undisturbed: Path, tmp_path: Path, number: int, code: int
) -> None:
    out = tmp_path / "run"
    child = forks.start(command(out, STEPS, engine__checkpoint_every=1000, evaluate_every=1000))
    wait_until(at_step(out, 5))
    child.kill(number)
    assert child.wait() == code
    stopped = logged(out)
    assert child.errors == [f"adatape: stopped at step {stopped} and saved; `adatape train {out}` resumes from there"]
    assert newest_step(out) == stopped
    assert not (out / "result.json").exists()
    forks.finish(["train", str(out), "--device", "cpu"])
    assert fingerprint(out) == fingerprint(undisturbed)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_loader_workers_too_stops_a_run_with_a_checkpoint(
    forks: Forks, tmp_path: Path, number: int, code: int
) -> None:
    """Ctrl-C and most schedulers signal all processes of a job."""
    child, out = forks.start_on_images(tmp_path)
    child.kill(number, group=True)
    assert child.wait() == code, child.errors
    assert (
        child.errors[-1]
        == f"adatape: stopped at step {logged(out)} and saved; `adatape train {out}` resumes from there"
    )
    assert newest_step(out) == logged(out)


@pytest.fixture
def interrupted(forks: Forks, tmp_path: Path) -> Path:
    """A run that was asked to stop, with two checkpoints or more."""
    out = tmp_path / "run"
    child = forks.start(command(out, STEPS))
    wait_until(at_step(out, 2 * EVERY + 1))
    child.kill(signal.SIGTERM)
    assert child.wait() == 143
    return out


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "truncated": ("__0_0.distcp", cut),
    "flipped": ("__0_0.distcp", flip),
    "without data": ("__0_0.distcp", Path.unlink),
    "without metadata": (".metadata", Path.unlink),
    "without manifest": ("manifest.json", Path.unlink),
}


@pytest.mark.parametrize("damage", DAMAGE if LONG else ["flipped", "without manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(
    forks: Forks, undisturbed: Path, interrupted: Path, damage: str
) -> None:
    name, harm = DAMAGE[damage]
    newest = checkpoints(interrupted / "checkpoints")[-1]
    harm(newest / name)
    child = forks.finish(["train", str(interrupted), "--device", "cpu"])
    named = [line for line in child.output.splitlines() if "is damaged" in line]
    assert len(named) == 1
    assert named[0].startswith(f"{newest.name} is damaged and was skipped: ")
    assert str(newest) in named[0]
    assert fingerprint(interrupted) == fingerprint(undisturbed)


@pytest.mark.parametrize("damage", DAMAGE if LONG else ["truncated", "without manifest"])
def test_a_run_with_no_good_checkpoint_is_refused_and_left_alone(forks: Forks, interrupted: Path, damage: str) -> None:
    name, harm = DAMAGE[damage]
    for path in checkpoints(interrupted / "checkpoints"):
        harm(path / name)
    before = contents(interrupted)
    child = forks.start(["train", str(interrupted), "--device", "cpu"])
    assert child.wait() == 2
    assert child.errors == [
        f"adatape: {interrupted}/checkpoints has no good checkpoint left; remove {interrupted} to start again"
    ]
    assert contents(interrupted) == before


def test_a_new_checkpoint_outlives_damaged_ones_of_later_steps(tmp_path: Path) -> None:
    """Otherwise the two damaged ones would be kept as the newest, and the good one removed."""
    experiment, out = tiny("plainvit", steps=30), tmp_path / "run"
    with pytest.raises(Unplugged):
        run(experiment, out, "cpu", unplug_at(8))
    for step in (20, 21):
        copy = shutil.copytree(out / "checkpoints/step-00000006", out / f"checkpoints/step-{step:08d}")
        flip(copy / "__0_0.distcp")
    said: list[str] = []
    with pytest.raises(Unplugged):
        run(experiment, out, "cpu", unplug_at(11), resume=True, say=said.append)
    assert [line.split()[0] for line in said] == ["step-00000021", "step-00000020"]
    assert newest_step(out) == 10


@pytest.mark.parametrize("room", [100_000, 2_500], ids=["for no checkpoint", "for no journal"])
def test_a_full_disk_is_one_line_and_costs_no_earlier_checkpoint(forks: Forks, interrupted: Path, room: int) -> None:
    before = contents(interrupted / "checkpoints")
    child = forks.start(["train", str(interrupted), "--device", "cpu"], largest=room)
    assert child.wait() == 2
    assert len(child.errors) == 1
    assert child.errors[0].startswith("adatape: ")
    assert "File too large" in child.errors[0]
    assert str(interrupted) in child.errors[0]
    assert contents(interrupted / "checkpoints") == before
    forks.finish(["train", str(interrupted), "--device", "cpu"])


def test_a_disk_too_full_for_the_result_is_one_line_and_the_run_can_still_end(forks: Forks, tmp_path: Path) -> None:
    """The last checkpoint is already saved."""
    out = tmp_path / "run"
    forks.finish(command(out, 2))
    (out / "result.json").unlink()
    (out / "checkpoints" / "model.safetensors").unlink()
    child = forks.start(["train", str(out), "--device", "cpu"], largest=50_000)
    assert child.wait() == 2
    assert len(child.errors) == 1
    assert "model.safetensors" in child.errors[0]
    assert not (out / "checkpoints" / "model.safetensors").exists()
    forks.finish(["train", str(out), "--device", "cpu"])
    assert (out / "result.json").is_file()


def test_a_journal_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    journal = MetricsWriter(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"metrics\.jsonl could not be written: No space left on device"):
        journal.write("train", 1, loss=0.5)
    journal.close()


def test_a_run_killed_before_it_had_a_config_starts_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.json.partial").write_text("{")
    assert run(tiny("plainvit", steps=1), out, "cpu", no_watch, resume=True)["steps"] == 1


def test_a_run_cut_short_after_it_had_learnt_trains_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, out = tiny("plainvit", stop_at=0.0, evaluate_every=1, engine__checkpoint_every=1), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("adatape.train.run.finalize", unplugged)
        with pytest.raises(Unplugged):
            run(experiment, out, "cpu", no_watch)
    assert newest_step(out) == 3
    assert run(experiment, out, "cpu", no_watch, resume=True)["steps"] == 3


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Weights, moments, step counts and averages."""
    return {name: value.detach().clone() for name, value in trainer.state().items() if name != "skipped.row"}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    return [name for name in before if not torch.equal(before[name], after[name])]


def poison_loss(trainer: Trainer, bad: Callable[[int], bool], patch: pytest.MonkeyPatch, value: float) -> None:
    """A non-finite loss with finite gradients."""
    plain = trainer.model.loss

    def total(*given: Any) -> Tensor:
        return plain(*given) + (value if bad(trainer.step) else 0.0)

    patch.setattr(trainer.model, "loss", total)


def poison_gradient(trainer: Trainer, bad: Callable[[int], bool], patch: pytest.MonkeyPatch, value: float) -> None:  # noqa: ARG001
    """A non-finite value in one gradient, with a finite loss."""

    def spoil(gradient: Tensor) -> Tensor:
        spoilt = gradient.clone()
        spoilt.view(-1)[0] = value
        return spoilt if bad(trainer.step) else gradient

    next(iter(trainer.stepper.named.values())).register_hook(spoil)


def poison_data(trainer: Trainer, bad: Callable[[int], bool], patch: pytest.MonkeyPatch, value: float) -> None:  # noqa: ARG001
    """A non-finite pixel in one image."""
    plain = trainer.task.batches

    def batches(first: int) -> Iterator[Batch]:
        for step, batch in enumerate(plain(first), first):
            if bad(step):
                batch.x[3, 0, 2, 2] = value
            yield batch

    trainer.task = trainer.task._replace(batches=batches)


POISONS = {"loss": poison_loss, "gradient": poison_gradient, "data": poison_data}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", POISONS)
@pytest.mark.parametrize("clip", [1.0, None])
def test_a_bad_step_moves_nothing_and_the_next_good_one_does(
    where: str, value: float, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tiny("adatape", optimizer__clip=clip))
    POISONS[where](trainer, lambda step: step in (2, 3), monkeypatch, value)
    states, skipped = [state_of(trainer)], []
    for stats in trainer.train(5):
        states.append(state_of(trainer))
        skipped.append(int(stats.skipped))
    assert skipped == [0, 0, 1, 2, 0]
    assert moved(states[2], states[3]) == moved(states[3], states[4]) == []
    for before, after in ((1, 2), (4, 5)):
        assert {name.split(".")[0] for name in moved(states[before], states[after])} == {
            "model",
            "optimizer",
            "average",
        }
    assert all(value.isfinite().all() for value in states[5].values())
    assert {
        int(value) for name, value in states[5].items() if name.startswith("optimizer") and name.endswith(".step")
    } == {3}


def test_a_bad_piece_of_an_accumulated_batch_spoils_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(tiny("plainvit", engine__accumulate=4))
    poison_data(trainer, lambda step: step == 1, monkeypatch, math.nan)
    states = [state_of(trainer) for _ in trainer.train(3)]
    assert moved(states[0], states[1]) == []
    assert moved(states[1], states[2])


def poisoned_run(
    out: Path, bad: Callable[[int], bool], where: str, patch: pytest.MonkeyPatch, **fields: Any
) -> dict[str, Any]:
    """A run whose trainer is poisoned when it is built."""

    def spoilt(*given: Any, **options: Any) -> Trainer:
        trainer = Trainer(*given, **options)
        POISONS[where](trainer, bad, patch, math.nan)
        return trainer

    patch.setattr("adatape.train.run.Trainer", spoilt)
    return run(tiny("plainvit", **fields), out, "cpu", no_watch)


@pytest.mark.parametrize("where", POISONS)
def test_one_bad_step_is_skipped_and_the_run_goes_on(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert poisoned_run(out, lambda step: step == 4, where, monkeypatch)["steps"] == 12
    steps = [line["step"] for line in history(out) if line["kind"] == "train"]
    assert steps == list(range(1, 13))
    assert math.isfinite(json.loads((out / "result.json").read_text())["loss"])


@pytest.mark.parametrize("where", POISONS)
def test_bad_steps_in_a_row_end_a_run_by_name_and_good_checkpoints_remain(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, fields = tmp_path / "run", {"steps": 12, "engine__bad_steps": 4}
    with (
        monkeypatch.context() as patch,
        pytest.raises(ValueError, match=r"not finite in the 4 steps up to step 11") as error,
    ):
        poisoned_run(out, lambda step: step >= 7, where, patch, **fields)
    assert "bad_steps is 4" in str(error.value)
    assert str(out / "checkpoints") in str(error.value)
    assert newest_step(out) >= 6
    clean, trainer = Trainer(tiny("plainvit", **fields)), Trainer(tiny("plainvit", **fields))
    list(clean.train(7))
    trainer.load(checkpoints(out / "checkpoints")[-1])
    assert moved(state_of(clean), state_of(trainer)) == []
    assert run(tiny("plainvit", **fields), out, "cpu", no_watch, resume=True)["steps"] == 12


def said_by(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a command that ends with code 2."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, said
    return said[0]


def test_bad_numbers_end_the_command_with_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Adaptive, "loss", lambda _, output, *__: output.logits.sum() * math.nan)
    assert "not finite in the 2 steps" in said_by(command(tmp_path / "run", 9, engine__bad_steps=2), capsys)


@pytest.fixture(scope="module")
def finished(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    forks.finish(command(out, 4))
    return out


def test_an_existing_run_is_never_overwritten(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(finished)
    said = said_by(command(finished, 4), capsys)
    assert said.startswith(f"adatape: {finished} exists and is not empty; `adatape train {finished}` resumes it")
    assert contents(finished) == before


def test_another_experiment_does_not_go_on_in_a_folder(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(finished)
    said = said_by([*command(finished, 4, optimizer__lr=0.1), "--resume"], capsys)
    assert said == f"adatape: {finished} contains another experiment: optimizer differ; choose another --out"
    assert contents(finished) == before


def test_a_finished_run_gives_its_result_without_training(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(finished)
    monkeypatch.setattr(Trainer, "train", lambda *_: pytest.fail("it trains"))
    cli.main(["train", str(finished), "--device", "cpu", "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == {**json.loads((finished / "result.json").read_text()), "out": str(finished)}
    assert contents(finished) == before


def test_a_checkpoint_of_another_width_is_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(finished, tmp_path / "run")
    config = json.loads((out / "config.json").read_text())
    config["model"]["options"]["embed_dim"] = 64
    (out / "config.json").write_text(json.dumps(config))
    width = "was made by another experiment than that of config.json: model.options.embed_dim is 32 there and 64 here"
    assert f"model.safetensors {width}" in said_by(["eval", str(out), "--device", "cpu"], capsys)
    (out / "result.json").unlink()
    before = contents(out / "checkpoints")
    said = said_by(["train", str(out), "--device", "cpu"], capsys)
    assert f"step-00000004 {width}" in said
    assert contents(out / "checkpoints") == before


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "optimizer.lrr=1",
            "optimizer.lrr is not a field of this experiment; perhaps optimizer.lr was meant; it has recipe, data",
        ),
        ("optimizer.lr=abc", "lr is 'abc'; it must be a number"),
        ("optimizer.batch=1.5", "batch is 1.5; it must be a whole number"),
        ("optimizer.schedule=step", "schedule is 'step'; it must be one of constant, cosine, linear"),
        ("engine.accumulate=7", "batch is 16; with 1 processes and accumulate 7 it must be a multiple of 7"),
        ("optimizer.lr", "must be field=value"),
        *(
            (f"{name}=0", f"{name.split('.')[-1]} is 0; it must be at least 1")
            for name in ("evaluate_every", "engine.checkpoint_every", "engine.log_every", "engine.bad_steps")
        ),
    ],
)
def test_a_wrong_setting_is_refused_before_a_folder_is_made(
    setting: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in said_by([*command(tmp_path / "run", 4), "--set", setting], capsys)
    assert not (tmp_path / "run").exists()
