"""Transformers whose computation adapts to each input. Public names load lazily, since importing timm takes seconds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "AdaTape": "adatape.models",
    "wrap": "adatape.models",
    "tape_modules": "adatape.models",
    "hub_settings": "adatape.models",
    "Bank": "adatape.banks",
    "BankView": "adatape.banks",
    "FrozenBank": "adatape.banks",
    "InputBank": "adatape.banks",
    "KeyedView": "adatape.banks",
    "LearnedBank": "adatape.banks",
    "RetrievalBank": "adatape.banks",
    "build_index": "adatape.banks",
    "TapeReader": "adatape.reader",
    "ReaderConfig": "adatape.config",
    "read_tape": "adatape.atr",
    "Tape": "adatape.records",
    "Output": "adatape.records",
    "open_image": "adatape.data.large",
    "show_tape": "adatape.report.show",
}
__all__ = [  # the keys of _HOMES, spelled out because type checkers cannot evaluate [*_HOMES]
    "AdaTape",
    "Bank",
    "BankView",
    "FrozenBank",
    "InputBank",
    "KeyedView",
    "LearnedBank",
    "Output",
    "ReaderConfig",
    "RetrievalBank",
    "Tape",
    "TapeReader",
    "__version__",
    "build_index",
    "hub_settings",
    "open_image",
    "read_tape",
    "show_tape",
    "tape_modules",
    "wrap",
]

if TYPE_CHECKING:
    from adatape.atr import read_tape
    from adatape.banks import Bank, BankView, FrozenBank, InputBank, KeyedView, LearnedBank, RetrievalBank, build_index
    from adatape.config import ReaderConfig
    from adatape.data.large import open_image
    from adatape.models import AdaTape, hub_settings, tape_modules, wrap
    from adatape.reader import TapeReader
    from adatape.records import Output, Tape
    from adatape.report.show import show_tape
else:  # a visible __getattr__ would make type checkers accept any name

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'adatape' has no attribute {name!r}; it has {', '.join(_HOMES)}")


def __dir__() -> list[str]:
    return __all__
