"""Signal handling: SIGTERM or Ctrl-C stops a run after the next step with a checkpoint, a second Ctrl-C at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Stopped(Exception):  # noqa: N818  not an error: the run can be resumed
    """Raised when a run has saved a checkpoint after a signal to stop."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Stop:
    """Records SIGTERM and SIGINT in `code` instead of ending the process."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.before: dict[int, object] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for each in (signal.SIGTERM, signal.SIGINT):
                self.before[each] = signal.signal(each, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.code is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.code = 128 + number

    def __exit__(self, *_: object) -> None:
        for each, handler in self.before.items():
            signal.signal(each, handler)  # type: ignore[arg-type]
