"""Files that are written whole or not at all, by name where they cannot be."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

PARTIAL = ".partial"
_umask = os.umask(0)
os.umask(_umask)
READABLE = 0o666 & ~_umask  # as for any other new file


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file that then appears at once."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with named(path):
            partial.unlink(missing_ok=True)  # a link in its place would have its target written
            yield partial
            partial.chmod(READABLE)  # safetensors leaves a file to its owner alone
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def named(path: Path) -> Iterator[None]:
    """A failed write says which file it was; the system's own error knows only a number."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number, reason = getattr(error, "errno", None), getattr(error, "strerror", None)
        raise OSError(number or errno.EIO, f"{path} could not be written: {reason or error}") from error
