"""Imports the scripts of benchmarks/ and research/ as modules; they import one another by name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "research", "research/large")
SCRIPTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))


def script(path: Path | str) -> ModuleType:
    """The module of a script, such as `research/cells.py`."""
    path = ROOT / path
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    found = importlib.import_module(path.stem)
    assert found.__file__ == str(path), f"{path.stem} is the name of another module, {found.__file__}"
    return found
