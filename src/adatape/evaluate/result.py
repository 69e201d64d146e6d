"""What a verb returns: plain values, which a notebook reads and the command line prints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adatape.validation import finite

FIGURE_NAMES = {"accuracy": "accuracy", "mean_ap": "mean AP"}  # as tables and pictures show them
SMALL = 0.1  # GFLOPs below which millions say more


def main_figure(figures: Mapping[str, Any]) -> str:
    """The name of the figure that runs are compared by: mean_ap where samples have several labels, else accuracy."""
    return "accuracy" if figures.get("mean_ap") is None else "mean_ap"


def work_unit(gflops: float) -> tuple[str, int]:
    """The unit to show work in, and how many of it are a GFLOP: millions where billions would say little."""
    return ("GFLOPs", 1) if gflops >= SMALL else ("MFLOPs", 1000)


@dataclass(frozen=True)
class Result:
    """Base class of results; `to_json` is what `--json` prints."""

    def as_dict(self) -> dict[str, Any]:
        return {field.name: to_plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def to_json(self) -> str:
        return json.dumps(finite(self.as_dict()), allow_nan=False)


def to_plain(value: Any) -> Any:
    """Dictionaries, lists, text and numbers in place of records, tuples and paths."""
    if isinstance(value, Result):
        return value.as_dict()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_plain(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_plain(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {key: to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
