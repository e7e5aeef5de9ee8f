"""Remote calls to agents: requests by number, and replies that come back on their links' threads."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any


class PendingCalls:
    """Requests that wait for replies, each by the number that its replies bear.

    Args:
        changed: notified whenever a message of an agent has come.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._numbers = itertools.count(1)
        self._replies: dict[int, dict[int, Any]] = {}

    def number(self) -> int:
        """A number that no other request has."""
        return next(self._numbers)

    @contextlib.contextmanager
    def call(self) -> Iterator[tuple[int, dict[int, Any]]]:
        """A number for a request, and where its replies arrive, by who sends them."""
        number = self.number()
        replies = self._replies.setdefault(number, {})
        try:
            yield number, replies
        finally:
            self._replies.pop(number, None)

    def replied(self, number: int, sender: int, reply: Any) -> None:
        """A reply has come; one that nobody waits for any more is dropped."""
        self._replies.get(number, {})[sender] = reply

    def wait(self, enough: Callable[[], bool], timeout: float) -> None:
        """Wait until there are enough replies, `timeout` seconds at most."""
        with self._changed:
            self._changed.wait_for(enough, timeout)
