"""A run: an experiment carried out, and the folder it leaves behind."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file, save_file

import adatape
from adatape.config import Experiment, from_dict, to_dict
from adatape.data.parity import held_out_set
from adatape.measure.accuracy import Score, score
from adatape.measure.cost import cost, total
from adatape.models.adaptive import Adaptive
from adatape.models.adatape import AdaTape
from adatape.models.sequence import build_sequence_model
from adatape.train.loop import Trainer

Watch = Callable[[int, float, Score | None], None]
WEIGHTS = Path("checkpoints/model.safetensors")
CONFIRMATIONS = 3  # evaluations in a row that must reach `stop_at`


def run(experiment: Experiment, out: Path, device: str, watch: Watch) -> dict[str, Any]:
    """Trains until `stop_at` or the last step, scores the test set once, and writes the folder."""
    prepare(out, experiment, device)
    began = time.perf_counter()
    trainer = Trainer(experiment, device)
    met = 0
    with (out / "metrics.jsonl").open("w") as metrics:
        while trainer.step < experiment.optimizer.steps and met < CONFIRMATIONS:
            loss = _advance(trainer, watch)
            result = trainer.evaluate()
            met = met + 1 if experiment.stop_at is not None and result.accuracy >= experiment.stop_at else 0
            watch(trainer.step, loss, result)
            line = {"step": trainer.step, "train_loss": loss, **_plain(result), "seconds": _since(began)}
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()
    return conclude(trainer, out, _since(began))


def prepare(out: Path, experiment: Experiment, device: str) -> None:
    """Makes the folder and writes what the run depends on; refuses a folder that holds anything."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not empty; choose another --out or remove it")
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "config.json", to_dict(experiment))
    _write(out / "env.json", environment(device))


def conclude(trainer: Trainer, out: Path, seconds: float) -> dict[str, Any]:
    """Scores the test set, saves the weights, and writes and returns `result.json`."""
    data, model = trainer.experiment.data, trainer.model
    whole = total(cost(model))
    result = {
        **_plain(score(model, held_out_set(data.length, data.held_out))),
        "steps": trainer.step,
        "seconds": seconds,
        "sequences_per_second": trainer.step * trainer.experiment.optimizer.batch / seconds,
        "parameters": whole.parameters,
        "gflops": whole.macs / 1e9,
    }
    (out / WEIGHTS).parent.mkdir(exist_ok=True)
    save_file({name: value.contiguous().cpu() for name, value in model.state_dict().items()}, out / WEIGHTS)
    _write(out / "result.json", result)
    return result


def load_run(folder: Path, length: int | None = None) -> tuple[Experiment, Adaptive]:
    """A finished run's model; at another sequence length than it was trained on, its budget scales along."""
    for name in (Path("config.json"), WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}; it must be the folder of a finished run")
    experiment = load_config(folder / "config.json")
    trained = experiment.data.length
    model = build_sequence_model(experiment.model, trained)
    model.load_state_dict(load_file(folder / WEIGHTS))
    if length is not None and length != trained:
        if not isinstance(model, AdaTape):
            raise ValueError(f"length is {length}; this run's Transformer has positions for {trained} symbols only")
        reading = model.reader.reading
        model.set_budget(reading.steps * length // trained, reading.threshold * length / trained)
        model.bank.size = length
    return experiment, model


def load_config(path: Path) -> Experiment:
    try:
        return from_dict(Experiment, json.loads(path.read_text()))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def environment(device: str) -> dict[str, Any]:
    """Hardware, versions and commit, so that a figure can be traced."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else platform.processor()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "hardware": name or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "adatape": adatape.__version__,
        "commit": _commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _advance(trainer: Trainer, watch: Watch) -> float:
    """Trains up to the next evaluation; gives the mean loss."""
    losses = []
    for loss in trainer.train(trainer.experiment.evaluate_every):
        losses.append(loss)
        if trainer.device.type == "cpu":  # reading a loss from a GPU would wait for it at every step
            watch(trainer.step, float(loss), None)
    return float(torch.stack(losses).mean())


def _commit() -> str | None:
    here = Path(__file__).parent
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def _plain(result: Score) -> dict[str, Any]:
    return result._asdict()


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 3)


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
