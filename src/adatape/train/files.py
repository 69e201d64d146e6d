"""Files that are written whole or not at all, by name where they cannot be, and never through a link."""

from __future__ import annotations

import errno
import os
import stat
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


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a regular file; never of what a link of that name leads to, nor of a pipe, which would wait."""
    handle = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, f"{path} is no regular file")
    return handle
