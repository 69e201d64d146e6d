"""Transformers whose computation adapts to each input. Public names load lazily, since importing timm takes seconds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "AdaTape": "adatape.models",
    "wrap": "adatape.models",
    "InputBank": "adatape.banks",
    "LearnedBank": "adatape.banks",
    "TapeReader": "adatape.reader",
    "ReaderConfig": "adatape.config",
    "read_tape": "adatape.atr",
    "Tape": "adatape.records",
    "Output": "adatape.records",
}
__all__ = [  # the keys of _HOMES, spelled out because type checkers cannot evaluate [*_HOMES]
    "AdaTape",
    "InputBank",
    "LearnedBank",
    "Output",
    "ReaderConfig",
    "Tape",
    "TapeReader",
    "__version__",
    "read_tape",
    "wrap",
]

if TYPE_CHECKING:
    from adatape.atr import read_tape
    from adatape.banks import InputBank, LearnedBank
    from adatape.config import ReaderConfig
    from adatape.models import AdaTape, wrap
    from adatape.reader import TapeReader
    from adatape.records import Output, Tape
else:  # a visible __getattr__ would make type checkers accept any name

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'adatape' has no attribute {name!r}; it has {', '.join(_HOMES)}")


def __dir__() -> list[str]:
    return __all__
