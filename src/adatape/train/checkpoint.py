"""Checkpoints: written atomically, verified by SHA-256, and loaded without executing code."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from adatape.config import Experiment
from adatape.train.checkpoint_storage import DamagedCheckpoint, LoadPlanner, Reader, Writer, plain_errors
from adatape.train.identity import check_identity, identity
from adatape.train.parallel import is_distributed, is_rank_zero, on_rank_zero
from adatape.validation import first_few

MANIFEST = "manifest.json"


def save(
    folder: Path, step: int, state: dict[str, Tensor], facts: dict[str, Any], experiment: Experiment | None = None
) -> Path:
    """Writes `folder/step-…` atomically; every process of a group must call it."""
    made_by = {} if experiment is None else {"experiment": identity(experiment).to_json()}
    target = Path(folder) / f"step-{step:08d}"
    partial = target.with_name(f".{target.name}.partial")
    try:
        if on_rank_zero(lambda: _begin(target, partial, facts, made_by)):
            _write(partial, state)
            on_rank_zero(lambda: _seal(partial, target, {"step": step, "facts": facts, **made_by}))
    except BaseException as error:
        if is_rank_zero():
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise OSError(error.errno or errno.EIO, f"{target} could not be written: {reason}") from error
        raise
    return target


def load(path: Path, state: dict[str, Tensor], experiment: Experiment | None = None) -> dict[str, Any]:
    """Fills `state` in place and returns the facts and the step; the number of processes may differ from the writer's.

    Every process of a group must call it. A checkpoint of another experiment, or with other shapes, is refused before
    anything is loaded.
    """
    path = Path(path)
    manifest = on_rank_zero(lambda: verify(path))
    if experiment is not None and "experiment" in manifest:
        check_identity(path, manifest["experiment"], experiment)
    reader = Reader(path, manifest["files"])
    _check_fit(path, reader.read_metadata().state_dict_metadata, state)
    with plain_errors():
        dcp.load(
            state, storage_reader=reader, planner=LoadPlanner(flatten_state_dict=False), no_dist=not is_distributed()
        )
    return {**manifest["facts"], "step": manifest["step"]}


def has_identity(path: Path) -> bool:
    """Whether a checkpoint stores its experiment's identity; older ones do not."""
    return "experiment" in _manifest(Path(path))


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return [path for path in _step_folders(Path(folder)) if (path / MANIFEST).is_file()]


def verify(path: Path) -> dict[str, Any]:
    """Checks every file's SHA-256 and returns the manifest; raises DamagedCheckpoint with file and reason."""
    manifest = _checked_sizes(Path(path))
    for name, record in manifest["files"].items():
        digest = _digest(Path(path) / name)
        if digest != record["sha256"]:
            raise DamagedCheckpoint(
                f"{path}/{name} has SHA-256 {digest[:12]}…; the manifest has {record['sha256'][:12]}…"
            )
    return manifest


def newest_good(folder: Path, on_skip: Callable[[Path, str], None]) -> Path | None:
    """The newest checkpoint that verifies; calls `on_skip` on the first process for each newer one, with the reason.

    Every process of a group must call it, and gets the first process's result.
    """

    def look() -> Path | None:
        for path in reversed(_step_folders(Path(folder))):
            try:
                verify(path)
            except (ValueError, OSError) as error:
                on_skip(path, str(error))
            else:
                return path
        return None

    return on_rank_zero(look)


def prune(folder: Path, keep: int = 2, upto: int | None = None) -> None:
    """Keeps the newest `keep` checkpoints and the best; the first process removes the others and interrupted saves.

    Checkpoints beyond step `upto` are removed: a run that restarted before them found them damaged.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; it must be at least 1")
    if not is_rank_zero():
        return
    folder = Path(folder)
    # Sizes are checked so that a truncated checkpoint does not displace a good one; hashing each time costs too much.
    found = [path for path in checkpoints(folder) if (upto is None or _step(path) <= upto) and _has_its_sizes(path)]
    kept = {*found[-keep:], _best(found)}
    for path in _step_folders(folder) if found else []:
        if path not in kept:
            _discard(path)
    remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Removes files of interrupted saves and removals, on the first process."""
    for path in Path(folder).glob(".step-*") if is_rank_zero() else ():
        if path.suffix in (".partial", ".removed"):
            _remove(path)


def _begin(target: Path, partial: Path, facts: dict[str, Any], made_by: dict[str, Any]) -> bool:
    """Creates the partial folder; returns False if a good checkpoint of this step and experiment exists."""
    try:
        json.dumps(facts)
    except TypeError as error:
        raise ValueError(f"facts are {facts}; they must be JSON values: {error}") from error
    with contextlib.suppress(DamagedCheckpoint):  # a damaged or missing one is written again
        if verify(target).get("experiment") == made_by.get("experiment"):
            return False
    _remove(partial)
    partial.mkdir(parents=True)
    return True


def _write(partial: Path, state: dict[str, Tensor]) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    with plain_errors():
        dcp.save(state, storage_writer=Writer(partial), planner=planner, no_dist=not is_distributed())


def _seal(partial: Path, target: Path, said: dict[str, Any]) -> None:
    names = sorted(entry.name for entry in os.scandir(partial))
    files = {name: {"bytes": (partial / name).stat().st_size, "sha256": _digest(partial / name)} for name in names}
    (partial / MANIFEST).write_text(_rendered({**said, "files": files}))
    for path in (*(partial / name for name in (*names, MANIFEST)), partial):
        _sync(path)
    if os.path.lexists(target):
        _discard(target)
    partial.rename(target)
    _sync(target.parent)


def _discard(path: Path) -> None:
    """Renames before deleting, so that a partly deleted checkpoint is never visible."""
    hidden = path.with_name(f".{path.name}.removed")
    _remove(hidden)
    path.rename(hidden)
    _sync(path.parent)
    _remove(hidden)


def _remove(path: Path) -> None:
    """Removes a folder, or any other kind of file at its path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _rendered(manifest: dict[str, Any]) -> str:
    """The manifest as text, with its own SHA-256, so that changes of the manifest itself are detected."""
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True)


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not file.is_file():
        raise DamagedCheckpoint(f"{file} is missing")
    try:
        text = file.read_bytes().decode()
        manifest = json.loads(text)
        intact = text == _rendered(manifest)
        _ = [manifest["step"] + 0, {**manifest["facts"]}]
        _ = [(record["bytes"] + 0, record["sha256"] + "") for record in manifest["files"].values()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{file} is not a readable manifest: {error!r}") from error
    if not intact:
        raise DamagedCheckpoint(f"{file} does not match the SHA-256 that it contains")
    return manifest


def _checked_sizes(path: Path) -> dict[str, Any]:
    manifest = _manifest(path)
    found = {entry.name: entry for entry in os.scandir(path) if entry.name != MANIFEST}
    for name, record in manifest["files"].items():
        if name not in found:
            raise DamagedCheckpoint(f"{path}/{name} is missing")
        size = found[name].stat(follow_symlinks=False).st_size
        if size != record["bytes"]:
            raise DamagedCheckpoint(f"{path}/{name} has {size} bytes; the manifest has {record['bytes']}")
    for name, entry in found.items():
        if name not in manifest["files"] or not entry.is_file(follow_symlinks=False):
            raise DamagedCheckpoint(f"{path}/{name} is not in the manifest")
    return manifest


def _has_its_sizes(path: Path) -> bool:
    try:
        _checked_sizes(path)
    except DamagedCheckpoint:
        return False
    return True


def _best(paths: list[Path]) -> Path | None:
    """The checkpoint whose fact `accuracy` is highest, the newest among equals."""
    values = [(_manifest(path)["facts"].get("accuracy"), path) for path in paths]
    scored = [(value, path) for value, path in values if isinstance(value, int | float) and not math.isnan(value)]
    return max(scored, key=lambda pair: (pair[0], _step(pair[1])))[1] if scored else None


def _step_folders(folder: Path) -> list[Path]:
    found = folder.iterdir() if folder.is_dir() else []
    return sorted((path for path in found if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir()), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_fit(path: Path, saved: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    wrong = []
    for name, here in wanted.items():
        there = saved.get(name)
        if there is None:
            wrong.append(f"checkpoint lacks {name}")
        elif there.size != here.shape:
            wrong.append(f"checkpoint has {name} of shape {tuple(there.size)}; the model has {tuple(here.shape)}")
        elif there.properties.dtype != here.dtype:
            wrong.append(f"checkpoint has {name} of {there.properties.dtype}; the model has {here.dtype}")
    wrong += [f"checkpoint has {name}, which the model lacks" for name in saved if name not in wanted]
    if wrong:
        raise ValueError(f"{path} does not fit: {first_few(wrong)}")
