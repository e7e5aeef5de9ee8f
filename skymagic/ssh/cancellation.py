"""Cooperative cancellation of connects under way, and login slots per sshd."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

POLL_INTERVAL = 0.05
"""Seconds between a wait's checks for cancellation."""
CONCURRENT_LOGINS = 8
"""Logins at one sshd at a time: beyond 10 unauthenticated ones it drops connections at random (MaxStartups 10:30:100)."""


class Cancelled(BaseException):
    """The connect was cancelled; a BaseException, so that it ends its thread past every ``except Exception``."""


class Cancellation:
    """Cancellation token: shared by the threads of one request, checked wherever they wait."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._servers: dict[tuple[str, int], threading.Semaphore] = {}
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Have all waits raise Cancelled."""
        self._cancelled.set()

    def check(self) -> None:
        """Raise Cancelled when cancelled."""
        if self._cancelled.is_set():
            raise Cancelled

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Whether the event came within so many seconds.

        Raises:
            Cancelled: the request was cancelled.
        """
        end = time.monotonic() + seconds
        while not event.wait(max(0.0, min(POLL_INTERVAL, end - time.monotonic()))):
            self.check()
            if time.monotonic() >= end:
                return False
        self.check()
        return True

    @contextlib.contextmanager
    def login_slot(self, server: tuple[str, int]) -> Iterator[None]:
        """Hold one of the login slots of the sshd at this address: a counting semaphore."""
        with self._lock:
            slots = self._servers.setdefault(server, threading.Semaphore(CONCURRENT_LOGINS))
        while not slots.acquire(timeout=POLL_INTERVAL):
            self.check()
        try:
            yield
        finally:
            slots.release()
