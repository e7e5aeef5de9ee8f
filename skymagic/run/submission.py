"""One order on its way to some ranks, and the events that come back."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """Something that happened to a submission: kind is ``output``, ``outcome``, ``died``, or, of no rank (-1), ``stop`` or ``note``."""

    kind: str
    rank: int
    content: Mapping[str, Any] = field(default_factory=dict)


class Submission:
    """One order on its way: events as they come, in a queue."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.futures: dict[int, Any] = {}
        self._missed = 0
        self._unread: list[Event] = []
        self.nbytes = 0
        """What was sent, to all ranks together."""

    def put(self, kind: str, rank: int, content: Mapping[str, Any] | None = None) -> None:
        """Add an event; safe on any thread, and in a signal handler."""
        self.events.put(Event(kind, rank, content or {}))

    def miss(self) -> None:
        """A press of the stop button came too late."""
        self._missed += 1

    def late(self) -> int:
        """How many came too late; asked when nobody reads events any more."""
        return self._missed + len(self.unread("stop"))

    def unread(self, kind: str) -> list[Event]:
        """The events of a kind that came when nobody read any more."""
        while not self.events.empty():
            self._unread.append(self.events.get())
        return [event for event in self._unread if event.kind == kind]
