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
        self.nbytes = 0
        """What was sent, to all ranks together."""

    def put(self, kind: str, rank: int, content: Mapping[str, Any] | None = None) -> None:
        """Add an event; safe on any thread, and in a signal handler."""
        self.events.put(Event(kind, rank, content or {}))
