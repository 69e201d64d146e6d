"""A run that fails before its first step leaves nothing behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def absent_folders(out: Path) -> list[Path]:
    """The folder and those above it that do not exist yet, innermost first."""
    return [each for each in (out, *out.parents) if not each.exists()]


@contextmanager
def removed_on_failure(out: Path, absent: list[Path], unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Removes a folder that this process has just made, and those above it that were absent before, if what is within
    fails; of a folder that was there and empty, what it holds."""
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
        with suppress(OSError):  # somebody else has put something there
            folder.rmdir()
