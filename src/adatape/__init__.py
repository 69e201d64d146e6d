"""Transformers whose computation adapts to each input. Public names resolve lazily: importing timm takes seconds."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "AdaTape": "adatape.models",
    "wrap": "adatape.models",
    "InputBank": "adatape.banks",
    "LearnedBank": "adatape.banks",
    "TapeReader": "adatape.reader",
    "Reading": "adatape.config",
    "read_tape": "adatape.atr",
    "Tape": "adatape.records",
    "Output": "adatape.records",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'adatape' has no attribute {name!r}; it has {', '.join(_HOMES)}")


def __dir__() -> list[str]:
    return __all__
