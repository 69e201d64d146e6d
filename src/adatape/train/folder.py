"""The folder of a run: what it depends on, what it has learnt, and how to read both back."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

import adatape
from adatape.config import Budget, Experiment, Parity, from_dict, to_dict
from adatape.measure.budget import apply_budget
from adatape.models.adaptive import Adaptive
from adatape.models.adatape import AdaTape
from adatape.reader import TapeReader
from adatape.train.files import PARTIAL, whole
from adatape.train.lock import LOCK, writing
from adatape.train.release import read_weights
from adatape.train.task import build_for

CHECKPOINTS = "checkpoints"
WEIGHTS = Path(CHECKPOINTS) / "model.safetensors"
RESULT = "result.json"


@contextmanager
def new_folder(out: Path, experiment: Experiment, device: str, say: Callable[[str], None] = print) -> Iterator[None]:
    """A folder made for a run, into which this process alone writes."""
    check_free(out)
    with writing(out, say):
        prepare(out, experiment, device)
        yield


def prepare(out: Path, experiment: Experiment, device: str) -> None:
    """Makes the folder and writes what the run depends on; refuses a folder that holds anything."""
    check_free(out)
    out.mkdir(parents=True, exist_ok=True)
    write(out / "config.json", to_dict(with_budget(experiment, None)))  # a budget belongs to weights, not to a replay
    write(out / "env.json", environment(device))


def check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(_is_other(path) for path in out.iterdir())):
        hint = f"`adatape train {out}` goes on with it, or " if (out / "config.json").is_file() else ""
        raise FileExistsError(f"{out} exists and is not empty; {hint}choose another --out or remove it")


def _is_other(path: Path) -> bool:
    """Than what a run leaves that was killed before it began."""
    return path.suffix != PARTIAL and path.name != LOCK


def check_same(out: Path, experiment: Experiment) -> None:
    """Going on with another experiment than the folder's would mix two; how it is carried out may change."""
    both = (load_config(out / "config.json"), experiment)
    before, now = (to_dict(with_budget(each, None)) for each in both)
    differ = [name for name in now if name != "engine" and before[name] != now[name]]
    if differ:
        raise ValueError(f"{out} holds another experiment: {', '.join(differ)} differ; choose another --out")


def with_budget(experiment: Experiment, budget: Budget | None) -> Experiment:
    return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, budget=budget))


def load_run(folder: Path, length: int | None = None, stored_budget: bool = True) -> tuple[Experiment, Adaptive]:
    """A finished run's model, at the budget stored with it unless that is to be ignored.

    At another sequence length than it was trained on, its budget scales along.
    """
    for name in (Path("config.json"), WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}; it must be the folder of a finished run")
    experiment = load_config(folder / "config.json")
    model = build_for(experiment)
    load_weights(model, folder / WEIGHTS)
    if stored_budget and experiment.model.budget is not None:
        apply_budget(model, experiment.model.budget)
    if length is not None:
        _at_length(experiment, model, length)
    return experiment, model


def load_weights(model: Adaptive, path: Path) -> None:
    """Refuses weights that are not this model's, naming the first that differ."""
    given, wanted = read_weights(path), model.state_dict()
    shapes = [f"{name} is {tuple(given[name].shape)}, the model's {tuple(wanted[name].shape)}"
              for name in given if name in wanted and given[name].shape != wanted[name].shape]  # fmt: skip
    strange = [f"{name} is not in the model" for name in given if name not in wanted]
    missing = [f"{name} is missing" for name in wanted if name not in given]
    wrong = shapes + strange + missing
    if wrong:
        raise ValueError(f"{path} does not fit the model: {'; '.join(wrong[:3])}{' …' if len(wrong) > 3 else ''}")
    model.load_state_dict(given)


def _at_length(experiment: Experiment, model: Adaptive, length: int) -> None:
    if not isinstance(experiment.data, Parity):
        raise ValueError(f"length is {length}; only sequences have another length than the one trained on")
    trained = experiment.data.length
    if length == trained:
        return
    if not isinstance(model, AdaTape):
        raise ValueError(f"length is {length}; this run's Transformer has positions for {trained} symbols only")
    reader = model.reader
    threshold = reader.threshold * length / trained if isinstance(reader, TapeReader) and reader.steps else None
    model.set_budget(reader.steps * length // trained, threshold)
    model.bank.size = length


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


def _commit() -> str | None:
    here = Path(__file__).parent
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def write(path: Path, values: dict[str, Any]) -> None:
    with whole(path) as partial:
        partial.write_text(json.dumps(values, indent=2) + "\n")


def write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    path.parent.mkdir(exist_ok=True)
    with whole(path) as partial:
        save_file({name: value.contiguous() for name, value in weights.items()}, partial)
