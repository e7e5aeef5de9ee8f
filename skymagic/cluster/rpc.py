"""Questions to agents, by number, and the answers that come back on their links' threads."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class Questions:
    """Those that wait for answers.

    Args:
        news: notified whenever something was heard of an agent.
    """

    def __init__(self, news: threading.Condition) -> None:
        self._news = news
        self._numbers = itertools.count(1)
        self._open: dict[int, dict[int, Any]] = {}

    def number(self) -> int:
        """A number that no other question has."""
        return next(self._numbers)

    @contextlib.contextmanager
    def asked(self) -> Iterator[tuple[int, dict[int, Any]]]:
        """A number for a question, and where its answers arrive, by who gives them."""
        number = self.number()
        answers = self._open.setdefault(number, {})
        try:
            yield number, answers
        finally:
            self._open.pop(number, None)

    def answered(self, number: int, who: int, answer: Any) -> None:
        """An answer has come; one that nobody waits for any more is dropped."""
        self._open.get(number, {})[who] = answer

    def hear(self, enough: Callable[[], bool], timeout: float) -> None:
        """Wait until there are enough answers, `timeout` seconds at most."""
        end = time.monotonic() + timeout
        with self._news:
            while not enough() and (left := end - time.monotonic()) > 0:
                self._news.wait(left)
