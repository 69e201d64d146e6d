"""Removes the folder of a run that fails before its first step."""

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
