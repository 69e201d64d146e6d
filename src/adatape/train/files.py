"""Atomic file writes, errors that name the file, and opening files without following links."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

if TYPE_CHECKING:
    from jinja2 import Template

PARTIAL = ".partial"
_umask = os.umask(0)
os.umask(_umask)
READABLE = 0o666 & ~_umask  # the default mode of a new file


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path, which replaces `path` at the end if no error occurred."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with naming_errors(path):
            partial.unlink(missing_ok=True)  # a link there would redirect the write
            yield partial
            partial.chmod(READABLE)  # safetensors creates files readable by their owner only
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def naming_errors(path: Path) -> Iterator[None]:
    """Adds the path to the error of a failed write."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number, reason = getattr(error, "errno", None), getattr(error, "strerror", None)
        raise OSError(number or errno.EIO, f"{path} could not be written: {reason or error}") from error


def open_no_follow(path: Path, flags: int) -> int:
    """Opens a regular file; links are not followed, and pipes, which would block, are refused."""
    handle = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, f"{path} is not a regular file")
    return handle


def template(path: Path, autoescape: bool) -> Template:
    """A file of jinja2's, where lines of tags alone leave no line; a name that is not passed is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(path.parent),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(path.name)
