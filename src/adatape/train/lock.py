"""A lock on a run folder, so that one process at a time writes into it.

It is `flock` on `writer.lock`: the kernel releases it when the process ends, and NFS forwards it to its server. The
file names its holder and is removed at the end. Some file systems have no locks, or only per machine, so the holder
also touches the file every BEAT seconds; a file from another machine, or without a kernel lock, is taken over only if
it is not touched for WATCHED seconds. (filelock neither names the holder nor checks whether a remote one is alive.)
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from adatape.train.files import PARTIAL, naming_errors, open_no_follow

if sys.platform == "win32":
    LOCK_EX = LOCK_NB = 0

    def flock(handle: int, operation: int) -> None:  # noqa: ARG001
        raise OSError(errno.ENOSYS, "Windows has no flock")
else:
    from fcntl import LOCK_EX, LOCK_NB, flock

LOCK = "writer.lock"
BEAT, WATCHED = 5.0, 20.0  # seconds between touches of the file; seconds without one until it is taken over
SETTLED = 1.0  # without a kernel lock: seconds after which the last of several concurrent writers has the lock
TAKEN = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
LACKING = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
MOST_TEXT = 500
Say = Callable[[str], None]
_held: set[int] = set()


class FolderInUse(OSError):  # noqa: N818
    """Another process is writing into this run folder."""


class Holder(NamedTuple):
    """The process that the lock file names."""

    host: str
    pid: str
    since: str
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since} ({self.command})"


@contextmanager
def write_lock(folder: Path, say: Say = print) -> Iterator[None]:
    """Holds the lock on a run folder; raises FolderInUse, which names the holder, if another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    path, over = folder / LOCK, threading.Event()
    handle = _acquired(path, say)
    _held.add(handle)
    touching = threading.Thread(target=_touch, args=(handle, over), name="lock", daemon=True)
    touching.start()
    try:
        yield
    finally:
        if handle in _held:  # not in a forked child, whose parent holds the lock
            over.set()
            touching.join()
            _release(path, handle)


def _acquired(path: Path, say: Say) -> int:
    while True:
        handle = open_no_follow(path, os.O_RDWR | os.O_CREAT)
        try:
            locked = _locked(handle, path)
            last = _holder(handle)
            if last is not None and not (locked and last.host == socket.gethostname()):
                _watch(path, last, say)
            if _is_at(path, handle):  # else its holder has just removed it: try again
                if locked:
                    with naming_errors(path):
                        os.ftruncate(handle, 0)
                        os.pwrite(handle, _details(), 0)
                    return handle
                return _put_in_place(path, handle, say)
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _locked(handle: int, path: Path) -> bool:
    """Locks the file; False if the file system has no locks."""
    try:
        flock(handle, LOCK_EX | LOCK_NB)
    except OSError as error:
        if error.errno in TAKEN:
            raise _in_use(path, _holder(handle)) from None
        if error.errno not in LACKING:
            raise
        return False
    return True


def _put_in_place(path: Path, handle: int, say: Say) -> int:
    """Without a kernel lock, the process whose file is in place after SETTLED seconds has the lock."""
    say(f"the file system of {path.parent} has no locks; {LOCK}, touched every {BEAT:g} s, is used instead")
    mine = path.with_name(f"{LOCK}.{uuid.uuid4().hex}{PARTIAL}")
    own = open_no_follow(mine, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        with naming_errors(path):
            os.pwrite(own, _details(), 0)
            mine.replace(path)
        time.sleep(SETTLED)
        if not _is_at(path, own):
            raise _in_use(path, _holder_at(path))
    except BaseException:
        os.close(own)
        mine.unlink(missing_ok=True)
        raise
    os.close(handle)
    return own


def _watch(path: Path, last: Holder, say: Say) -> None:
    """Returns after WATCHED seconds without a touch; only changes of the time are used, not clocks of two machines."""
    say(f"{path} was left by {last}; waiting {WATCHED:g} s to see whether it still runs")
    touched, end = _touched(path), time.monotonic() + WATCHED
    while touched is not None and time.monotonic() < end:
        time.sleep(BEAT / 10)
        if (now := _touched(path)) not in (None, touched):
            raise _in_use(path, last)
        touched = now


def _touched(path: Path) -> tuple[int, int] | None:
    """Inode and modification time; the file is reopened each time, since NFS asks its server only then."""
    try:
        with os.fdopen(open_no_follow(path, os.O_RDONLY)) as file:
            found = os.fstat(file.fileno())
            return found.st_ino, found.st_mtime_ns
    except FileNotFoundError:
        return None


def _touch(handle: int, over: threading.Event) -> None:
    while not over.wait(BEAT):
        with contextlib.suppress(OSError):  # disk errors are reported by the writer
            os.utime(handle)


def _release(path: Path, handle: int) -> None:
    _held.discard(handle)
    with contextlib.suppress(OSError):
        if _is_at(path, handle):
            path.unlink()
    os.close(handle)


def _is_at(path: Path, handle: int) -> bool:
    try:
        there, here = os.stat(path, follow_symlinks=False), os.fstat(handle)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def command_line() -> str:
    """The command that started this process, as it may be typed again; `python -m adatape` is `adatape`."""
    started = Path(sys.argv[0])
    name = started.parent.name if started.name == "__main__.py" else started.name
    return shlex.join([name, *sys.argv[1:]])


def _details() -> bytes:
    now, command = datetime.now(UTC).isoformat(timespec="seconds"), command_line()[:MOST_TEXT]
    return json.dumps(Holder(socket.gethostname(), str(os.getpid()), now, command)._asdict()).encode()


def _holder(handle: int) -> Holder | None:
    """The holder that the file names; None if it is empty, an unknown holder if it is unreadable."""
    content = os.pread(handle, 8 * MOST_TEXT, 0)
    if not content:
        return None
    try:
        found = json.loads(content)
        return Holder(*(_shown(found[name]) for name in Holder._fields))
    except (ValueError, TypeError, KeyError, RecursionError):
        return Holder("?", "?", "?", "the lock file is unreadable")


def _holder_at(path: Path) -> Holder | None:
    with contextlib.suppress(OSError), os.fdopen(open_no_follow(path, os.O_RDONLY)) as file:
        return _holder(file.fileno())
    return None


def _shown(value: Any) -> str:
    """Printable characters only, since the folder may come from someone else."""
    return "".join(each for each in str(value) if each.isprintable())[:MOST_TEXT]


def _in_use(path: Path, holder: Holder | None) -> FolderInUse:
    return FolderInUse(f"{path.parent} is being written by {holder or 'another process'}; wait for it or stop it")


def _leave_to_parent() -> None:
    """Closes inherited locks in a forked child, so that a data worker that outlives its trainer holds no lock."""
    for handle in _held:
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
