"""Weights files: safetensors with a SHA-256 of their tensors and the identity of their experiment as metadata."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from adatape.train.files import atomic_write

STAMP = "adatape"  # the only metadata key of a run, since safetensors writes several in no fixed order
FORMAT = "format"  # metadata key of other programs, and of a release
UNREADABLE = (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, MemoryError, OverflowError)


def write_weights(path: Path, weights: dict[str, Tensor], experiment: dict[str, Any] | None = None) -> None:
    """Writes weights and their stamp; `experiment` is the identity of the experiment that made them."""
    path.parent.mkdir(exist_ok=True)
    kept = {name: value.contiguous() for name, value in weights.items()}
    with atomic_write(path) as partial:
        save_file(kept, partial, metadata=stamp(kept, experiment))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file; other formats are refused, and pickles are never loaded.

    Tensors that do not match the stored SHA-256, if there is one, and non-finite values are refused too.
    """
    path = Path(path)
    with path.open("rb") as file:
        start = file.read(2)
    try:
        weights = load_file(path)
    except UNREADABLE as error:
        if start[:1] == b"\x80" or start == b"PK" or path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl"):
            raise ValueError(
                f"{path} looks like a pickle, which could execute code; if you trust it, convert it once: "
                f"safetensors.torch.save_file(torch.load('{path.name}', weights_only=True), 'model.safetensors')"
            ) from error
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
    stamped = read_stamp(path)
    if stamped is not None:
        found, wanted = digest(weights, stamped.get("experiment")), str(stamped.get("sha256"))
        if found != wanted:
            reason = f"its weights have SHA-256 {found[:12]}…; its metadata has {wanted[:12]}…"
            raise ValueError(f"{path} is damaged: {reason}")
    _check_finite(path, weights)
    return weights


def stamp(weights: dict[str, Tensor], experiment: dict[str, Any] | None = None) -> dict[str, str]:
    """The metadata of a safetensors file with these weights."""
    made_by = {} if experiment is None else {"experiment": experiment}
    return {STAMP: json.dumps({"sha256": digest(weights, experiment), **made_by}, sort_keys=True)}


def read_stamp(path: Path) -> dict[str, Any] | None:
    """The SHA-256 and experiment identity stored in a file; None for files of other programs."""
    metadata = _metadata(path)
    if STAMP not in metadata:
        return None
    try:
        return {**json.loads(metadata[STAMP])}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} has metadata that cannot be read: {error}") from error


def expect_stamp(path: Path) -> dict[str, Any]:
    """The stamp of a run's weights; older files have none, for which it warns once."""
    stamped = read_stamp(path)
    if stamped is not None:
        return stamped
    strange = set(_metadata(path)) - {FORMAT}
    if strange:
        raise ValueError(f"{path} has metadata under {', '.join(sorted(strange))}; a run writes {STAMP} only")
    _say_once(f"{path} has no SHA-256 of its weights, so damage cannot be detected")
    return {}


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except UNREADABLE as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error


def digest(weights: dict[str, Tensor], experiment: dict[str, Any] | None = None) -> str:
    """The SHA-256 of names, dtypes, shapes and all bytes of the weights, and of the experiment's identity."""
    found = hashlib.sha256(json.dumps(experiment, sort_keys=True).encode())
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        found.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _check_finite(path: Path, weights: dict[str, Tensor]) -> None:
    for name in sorted(weights):
        value = weights[name]
        bad = int((~(value.float() if value.dtype.itemsize == 1 else value).isfinite()).sum())
        if bad:
            raise ValueError(f"{path} has non-finite weights: {bad} of {value.numel()} values in {name}")


@functools.cache
def _say_once(text: str) -> None:
    logging.getLogger("adatape").warning(text)
