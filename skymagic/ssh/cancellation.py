"""How long connecting may take, and whether it is still wanted."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

SLICE = 0.05
"""Seconds after which a wait looks whether it was cancelled."""
AT_ONCE = 8
"""Logins at one sshd at the same time: more than 10 (MaxStartups) it refuses at random."""


class Cancelled(BaseException):
    """Nobody wants this connection any more; ends the thread that makes it, past every ``except Exception``."""


class Cancellation:
    """A deadline and a way to call it off, shared by the threads of one request."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._doors: dict[tuple[str, int], threading.Semaphore] = {}
        self._making = threading.Lock()

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

    @contextlib.contextmanager
    def turn(self, door: tuple[str, int]) -> Iterator[None]:
        """Wait for one of the places at this door, an address where many may want to log in at once."""
        with self._making:
            places = self._doors.setdefault(door, threading.Semaphore(AT_ONCE))
        while not places.acquire(timeout=SLICE):
            self.check()
        try:
            yield
        finally:
            places.release()
