"""Ctrl-C between steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class InterruptsBetweenSteps:
    """While open, a first Ctrl-C waits until `check`, so that no step is left half booked; a second
    one does not wait.

    Does nothing outside the main thread, or where the program handles SIGINT in its own way.
    """

    def __init__(self) -> None:
        self._is_due = False
        self._is_open = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_open:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error is None:
            self.check()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_due:
            signal.default_int_handler(number, frame)
        self._is_due = True

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C was pressed."""
        if self._is_due:
            self._is_due = False
            raise KeyboardInterrupt
