"""The folder of a run: creating it, and loading its config, weights and result."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import timm
import torch

import adatape
from adatape.config import Budget, Experiment, ImageModel, to_dict
from adatape.data.sets import open_set
from adatape.evaluate.budget import apply_budget
from adatape.limits import CountOrZero, NotNegative, Share
from adatape.models.base import Adaptive
from adatape.reader import TapeReader
from adatape.train.files import PARTIAL, atomic_write
from adatape.train.identity import check_classes, check_identity
from adatape.train.lock import LOCK, command_line, write_lock
from adatape.train.task import build_image_model, build_on
from adatape.train.trust import check_links, untrusted
from adatape.train.weights import expect_stamp, read_stamp, read_weights
from adatape.validation import check_values, first_few, read_object, read_record

CHECKPOINTS = "checkpoints"
WEIGHTS = Path(CHECKPOINTS) / "model.safetensors"
RESULT = "result.json"
STEM, HEAD = "vit.patch_embed.proj.weight", "vit.head.weight"
MAY_MOVE = ("data.path", "data.download")  # may differ from the fields stored with the weights: data can be moved
RESULT_FIGURES = {
    "accuracy": Share,
    "length_mean": NotNegative,
    "length_var": NotNegative,
    "gflops": NotNegative,
    "gflops_mean": NotNegative,
    "parameters": CountOrZero,
    "steps": CountOrZero,
    "seconds": NotNegative,
}
SEVERAL_LABELS_FIGURES = {"mean_ap": Share, "average_precision": dict[str, Share | None]}


@contextmanager
def new_folder(
    out: Path,
    experiment: Experiment,
    device: str,
    say: Callable[[str], None] = print,
    begun: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Creates and locks the folder of a new run; it is removed on a failure before `begun`."""
    check_free(out)
    absent = absent_folders(out)
    with write_lock(out, say):
        check_free(out)  # again under the lock
        with removed_on_failure(out, absent, unless=begun):
            prepare(out, experiment, device)
            yield


def absent_folders(out: Path) -> list[Path]:
    """The folder and those above it that do not exist yet, innermost first."""
    return [each for each in (out, *out.parents) if not each.exists()]


@contextmanager
def removed_on_failure(out: Path, absent: list[Path], unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """On an exception, empties `out` and removes the `absent` folders, unless `unless()`."""
    try:
        yield
    except BaseException:
        if not unless():
            _remove(out, absent)
        raise


def _remove(out: Path, absent: list[Path]) -> None:
    for each in list(out.iterdir()) if out.is_dir() else []:
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each, ignore_errors=True)
        else:
            each.unlink(missing_ok=True)
    for folder in absent:
        with suppress(OSError):  # not empty: another process has written there
            folder.rmdir()


def prepare(out: Path, experiment: Experiment, device: str) -> None:
    """Creates the folder with config.json and env.json; refuses a folder that is not empty."""
    check_free(out)
    out.mkdir(parents=True, exist_ok=True)
    # A budget belongs to trained weights, so a replay does not start with it.
    write(out / "config.json", to_dict(with_budget(experiment, None)))
    write(out / "env.json", environment(device))


def check_free(out: Path) -> None:
    # A run that is killed before its start leaves a lock and partial files.
    if out.exists() and (not out.is_dir() or any(p.suffix != PARTIAL and p.name != LOCK for p in out.iterdir())):
        hint = f"`adatape train {out}` resumes it, or " if (out / "config.json").is_file() else ""
        raise FileExistsError(f"{out} exists and is not empty; {hint}choose another --out or remove it")


def check_same(out: Path, experiment: Experiment) -> None:
    """Refuses to resume a folder with another experiment; `engine` may change."""
    both = (load_config(out / "config.json"), experiment)
    before, now = (to_dict(with_budget(each, None)) for each in both)
    differ = [name for name in now if name != "engine" and before[name] != now[name]]
    if differ:
        raise ValueError(f"{out} contains another experiment: {', '.join(differ)} differ; choose another --out")


def with_budget(experiment: Experiment, budget: Budget | None) -> Experiment:
    return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, budget=budget))


def load_run(
    folder: Path, length: int | None = None, stored_budget: bool = True, trust: bool = False
) -> tuple[Experiment, Adaptive]:
    """A finished run's experiment and model, with its stored budget set unless `stored_budget` is False.

    `length` is a sequence length other than the trained one; the budget scales with it. Without `trust` only local data
    is read, and links that lead out of the folder are refused.
    """
    experiment = load_finished(folder, trust)
    data = open_set(experiment.data, "test")
    model = build_on(data, experiment)
    load_weights(model, folder / WEIGHTS, experiment, data.names)
    if stored_budget and experiment.model.budget is not None:
        apply_budget(model, experiment.model.budget)
    if length is not None:
        _at_length(experiment, model, length)
    return experiment, model


def load_without_data(folder: Path) -> tuple[Experiment, Adaptive]:
    """`load_run` of a model of images where the data set is not at hand: its weights say how many channels and classes
    there are."""
    experiment = load_finished(folder)
    weights = read_weights(folder / WEIGHTS)
    size = experiment.data.image_size
    if not isinstance(experiment.model, ImageModel) or size is None:
        raise ValueError(f"{folder}/config.json mixes images with a model of sequences")
    if STEM not in weights or HEAD not in weights:
        raise ValueError(f"{folder / WEIGHTS} lacks {STEM} or {HEAD}; it must be a model's")
    channels, classes = weights[STEM].shape[1], weights[HEAD].shape[0]
    model = build_image_model(experiment.model, size, channels, classes, weights=False)
    load_weights(model, folder / WEIGHTS, experiment)
    if experiment.model.budget is not None:
        apply_budget(model, experiment.model.budget)
    return experiment, model


def load_finished(folder: Path, trust: bool = False) -> Experiment:
    """A finished run's experiment; raises if config.json or the weights are missing."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json; it must be the folder of a finished run")
    if not trust:
        check_links(folder)
    experiment, lacking = load_config(folder / "config.json", trust), missing_weights(folder)
    if lacking:
        raise FileNotFoundError(lacking)
    return experiment


def missing_weights(folder: Path) -> str | None:
    """The error message for a run without weights; None if they exist."""
    if (folder / WEIGHTS).is_file():
        return None
    if (folder / RESULT).is_file():
        return f"{folder} has no {WEIGHTS}: the weights of this run are missing; restore them or train it again"
    return f"{folder} has no {WEIGHTS}: the run is not finished; `adatape train {folder}` resumes it"


def load_weights(model: Adaptive, path: Path, experiment: Experiment, names: list[str] | None = None) -> None:
    """Loads weights; refuses those that are damaged, of another experiment, of classes with other names, or of other
    shapes."""
    given, wanted = read_weights(path), model.state_dict()
    check_made_by(path, experiment)
    if names is not None:
        check_classes(path, trained_classes(path), names)
    both = [(name, tuple(given[name].shape), tuple(wanted[name].shape)) for name in given if name in wanted]
    wrong = [f"{name} is {here}, the model's {there}" for name, here, there in both if here != there]
    wrong += [f"{name} is not in the model" for name in given if name not in wanted]
    wrong += [f"{name} is missing" for name in wanted if name not in given]
    if wrong:
        raise ValueError(f"{path} does not fit the model: {first_few(wrong)}")
    model.load_state_dict(given)


def check_made_by(path: Path, experiment: Experiment) -> None:
    """Refuses weights that store another experiment's identity."""
    stamped = expect_stamp(path)
    if "experiment" in stamped:
        check_identity(path, stamped["experiment"], experiment, free=MAY_MOVE)


def trained_classes(path: Path) -> list[str] | None:
    """The names of the classes that weights were trained for, in the model's order; None where they store none."""
    names = ((read_stamp(path) or {}).get("experiment") or {}).get("classes")
    return names if isinstance(names, list) and all(isinstance(each, str) for each in names) else None


def _at_length(experiment: Experiment, model: Adaptive, length: int) -> None:
    trained = experiment.data.sequence_length
    if trained is None:
        raise ValueError(f"length is {length}; it can be set for sequences only, so leave it out")
    if length == trained:
        return
    reader, bank = model.tape_reader(), model.tape_bank()
    if reader is None or bank is None:
        raise ValueError(f"length is {length}; this run's Transformer has positions for {trained} symbols only")
    threshold = reader.threshold * length / trained if isinstance(reader, TapeReader) and reader.steps else None
    bank.size = length
    model.set_budget(reader.steps * length // trained, threshold)


def load_config(path: Path, trust: bool = False) -> Experiment:
    """Reads an experiment from a file; without `trust` it may not download anything."""
    experiment = read_record(Experiment, path)
    return experiment if trust else untrusted(experiment)


def load_result(folder: Path, needed: Iterable[str] = ("accuracy",)) -> dict[str, Any]:
    """Reads result.json; raises if a needed figure is missing or any figure is not a number in range."""
    found = read_object(folder / RESULT)
    needed = {name: found.get(name) for name in needed}
    known = {name: value for name, value in found.items() if value is not None}
    check_values({**RESULT_FIGURES, **SEVERAL_LABELS_FIGURES}, {**needed, **known}, f"{folder / RESULT}: ")
    return found


def environment(device: str) -> dict[str, Any]:
    """Hardware, versions, commit and command, stored with every result."""
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
        "command": command_line(),
    }


def _commit() -> str | None:
    """Of the package's own source; None where it lies in no repository, or git is not installed."""
    if shutil.which("git") is None:
        return None
    here = Path(__file__).parent
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def write(path: Path, values: dict[str, Any]) -> None:
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(values, indent=2) + "\n")
