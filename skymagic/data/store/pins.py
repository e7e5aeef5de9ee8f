"""Which files of a store somebody still needs."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Pins:
    """Counts who needs a key; what a store is built on."""

    def __init__(self) -> None:
        self._pinned: dict[str, int] = {}
        self._lock = threading.RLock()

    def pin(self, keys: Iterable[str]) -> None:
        """Keep these from eviction until ``unpin``; pins are counted."""
        with self._lock:
            for key in keys:
                self._pinned[key] = self._pinned.get(key, 0) + 1

    def unpin(self, keys: Iterable[str]) -> None:
        """Take one pin off each key."""
        with self._lock:
            for key in keys:
                count = self._pinned.pop(key, 0) - 1
                if count > 0:
                    self._pinned[key] = count

    def pinned(self, key: str) -> bool:
        """Whether somebody still needs this file."""
        return key in self._pinned
