"""One request on its way to some ranks, and the mailbox of events that come back."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skymagic.run.metrics import Metrics


@dataclass(frozen=True)
class Event:
    """Something that happened to a submission: kind is ``output``, ``outcome``, ``died``, or, of no rank (-1), ``stop`` or ``note``."""

    kind: str
    rank: int
    content: Mapping[str, Any] = field(default_factory=dict)


class Submission:
    """The mailbox of one run: many threads put events into its queue, the run's own thread reads them.

    Attributes:
        futures: ipyparallel's future of each rank.
        nbytes: what was sent, to all ranks together.
        number: the pool's, of the run; 0 for what is none.
        metrics: what the ranks have reported.
        begun: rank → number of the last content that another notebook had begun to show, of a run that it left.
    """

    def __init__(self, ranks: Sequence[int], number: int = 0, metrics: Metrics | None = None) -> None:
        self.ranks = tuple(ranks)
        self.number = number
        self.metrics = Metrics() if metrics is None else metrics
        # SimpleQueue.put is reentrant: a signal handler may interrupt a put (Queue.put would deadlock)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.futures: dict[int, Any] = {}
        self.nbytes = 0
        self.begun: Mapping[int, int] = {}
        self._late_stops = 0
        self._unread: list[Event] = []

    def put(self, kind: str, rank: int, content: Mapping[str, Any] | None = None) -> None:
        """Add an event; safe on any thread, and in a signal handler."""
        self.events.put(Event(kind, rank, content or {}))

    def pending(self) -> list[int]:
        """The ranks that have not replied."""
        return [rank for rank, future in list(self.futures.items()) if not future.done()]

    def stop_was_late(self) -> None:
        """Count a stop that was read when there was nothing left to stop."""
        self._late_stops += 1

    def undelivered_stops(self) -> int:
        """How many stops were late or never read; called when nobody reads events any more."""
        return self._late_stops + len(self.unread("stop"))

    def unread(self, kind: str) -> list[Event]:
        """The events of a kind that came when nobody read any more."""
        while not self.events.empty():
            self._unread.append(self.events.get())
        return [event for event in self._unread if event.kind == kind]
