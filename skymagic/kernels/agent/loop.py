"""The agent's event loop: one thread that waits for descriptors to become readable, and for the next timer."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable
from typing import Any


class Loop:
    """Calls back when a descriptor can be read, or a time has come.

    Args:
        on_error: called with what a callback raised; the loop goes on.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def watch(self, source: Any, callback: Callable[[], None]) -> None:
        """Call back whenever `source` (a descriptor, or what has one) can be read."""
        self._selector.register(source, selectors.EVENT_READ, callback)

    def unwatch(self, source: Any) -> None:
        """Watch it no longer; twice is safe."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back once, after this time."""
        self._timers.append((time.monotonic() + seconds, callback))

    def run_once(self, until: float | None) -> None:
        """Wait for events, for timers, or until a time (monotonic seconds, None: as long as it takes), and call back."""
        due = [when for when, _ in self._timers] + ([until] if until is not None else [])
        ready = self._selector.select(max(0.0, min(due) - time.monotonic()) if due else None)
        for key, _ in ready:
            # an earlier call of this round may have closed it, and its number may be another descriptor's by now
            if self._selector.get_map().get(key.fd) is key:
                self._call(key.data)
        now = time.monotonic()
        expired = [callback for when, callback in self._timers if when <= now]
        self._timers = [timer for timer in self._timers if timer[0] > now]
        for callback in expired:
            self._call(callback)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as problem:
            self._on_error(problem)
