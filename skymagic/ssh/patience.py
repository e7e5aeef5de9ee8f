"""How long connecting may take, and whether it is still wanted."""

from __future__ import annotations

import threading
import time

SLICE = 0.05
"""Seconds after which a wait looks whether it was cancelled."""


class Cancelled(BaseException):
    """Nobody wants this connection any more; ends the thread that makes it, past every ``except Exception``."""


class Patience:
    """A deadline and a way to call it off, shared by the threads of one request."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Let all waits end with Cancelled."""
        self._cancelled.set()

    def check(self) -> None:
        """Raise Cancelled when cancelled."""
        if self._cancelled.is_set():
            raise Cancelled

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Whether the event came within so many seconds.

        Raises:
            Cancelled: it is no longer wanted.
        """
        end = time.monotonic() + seconds
        while not event.wait(max(0.0, min(SLICE, end - time.monotonic()))):
            self.check()
            if time.monotonic() >= end:
                return False
        self.check()
        return True
