"""A request to some ranks, and the mailbox of the events that it causes."""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from skymagic.run.metrics import Metrics
from skymagic.wire.agent import RankExited
from skymagic.wire.outcome import Outcome
from skymagic.wire.output import Output, OutputText

_PROCESS = secrets.token_hex(4)
"""Part of the identities of requests, so that two notebooks make different ones."""
_numbers = itertools.count(1)

JOINED_CHARS = 64 << 10
"""Maximum number of characters of consecutive output that are read as one event."""


@dataclass(frozen=True)
class OutputArrived:
    """Output of a rank."""

    output: Output

    @property
    def rank(self) -> int:
        """Rank that the event is about."""
        return self.output.rank


@dataclass(frozen=True)
class RankFinished:
    """A rank has replied, and its cell is over."""

    rank: int
    outcome: Outcome


@dataclass(frozen=True)
class RankDeath:
    """A rank's process or node is gone."""

    exited: RankExited
    output_follows: bool = True
    """True if the rank's agent still sends the end of its output."""

    @property
    def rank(self) -> int:
        """Rank that the event is about."""
        return self.exited.rank


@dataclass(frozen=True)
class StopPressed:
    """The user pressed the stop button."""


@dataclass(frozen=True)
class PoolNote:
    """A line about the pool to show to the user."""

    text: str


@dataclass(frozen=True)
class PoolClosed:
    """The pool was ended, here or elsewhere."""


RunEvent = OutputArrived | RankFinished | RankDeath | StopPressed | PoolNote | PoolClosed
E = TypeVar("E", bound=RunEvent)


def request_of_run(run: int) -> str:
    """Return the identity of a run's request, which a notebook that takes over derives too."""
    return f"run-{run}"


def _joinable_text(event: RunEvent | None) -> OutputText | None:
    """Return the text of an event if it can be joined with following text."""
    output = event.output if isinstance(event, OutputArrived) else None
    return output if isinstance(output, OutputText) else None


def _is_same_stream(first: OutputText, second: OutputText) -> bool:
    return (first.rank, first.name) == (second.rank, second.name)


class Submission:
    """Mailbox of one run: many threads put events into its queue, and the run's thread reads them.

    Attributes:
        number: number of the run in the pool; 0 for an order that is not a run.
        request: identity of the request.
        metrics: metrics that the ranks have reported.
        on_read: called with each piece of output once the run has read it.
    """

    def __init__(
        self, ranks: Sequence[int], number: int = 0, metrics: Metrics | None = None
    ) -> None:
        self.ranks = tuple(ranks)
        self.number = number
        self.metrics = Metrics() if metrics is None else metrics
        # SimpleQueue.put is reentrant: a signal handler may interrupt a put, where Queue.put would
        # deadlock
        self.events: queue.SimpleQueue[RunEvent] = queue.SimpleQueue()
        self.request = request_of_run(number) if number else f"order-{_PROCESS}-{next(_numbers)}"
        self._finished: set[int] = set()
        self.on_read: Callable[[Output], None] = lambda output: None
        self._ahead: RunEvent | None = None  # taken from the queue but not read yet
        self._late_stops = 0
        self._unread: list[RunEvent] = []

    def put(self, event: RunEvent) -> None:
        """Add an event; safe on any thread, and in a signal handler."""
        if isinstance(event, RankFinished):
            # Before the event can be read: its reader must not find this rank still pending.
            self._finished.add(event.rank)
        self.events.put(event)

    def read(self, timeout: float) -> RunEvent | None:
        """Return the next event, or None after `timeout` seconds.

        Consecutive text of a stream is joined: the output that a notebook has missed for hours may
        consist of tens of thousands of pieces.
        """
        event = self._take(timeout)
        if (latest := _joinable_text(event)) is None:
            return event
        texts = [latest.text]
        size = len(texts[0])
        while size < JOINED_CHARS and (next_event := self._take(0.0)) is not None:
            following = _joinable_text(next_event)
            if following is None or not _is_same_stream(latest, following):
                self._ahead = next_event
                break
            latest = following
            texts.append(following.text)
            size += len(following.text)
        # the joined event has the number of its last piece, so that all pieces count as shown
        return OutputArrived(replace(latest, text="".join(texts)))

    def news(self) -> Iterator[RunEvent]:
        """Iterate over the events that have already arrived."""
        while (event := self.read(0.0)) is not None:
            yield event

    def _take(self, timeout: float) -> RunEvent | None:
        event, self._ahead = self._ahead, None
        if event is not None:
            return event
        with contextlib.suppress(queue.Empty):
            event = self.events.get(timeout=timeout)
            if isinstance(event, OutputArrived):
                self.on_read(event.output)
        return event

    def pending(self) -> list[int]:
        """List the ranks that have not replied."""
        return [rank for rank in self.ranks if rank not in self._finished]

    def stop_was_late(self) -> None:
        """Count a stop that was read when there was nothing left to stop."""
        self._late_stops += 1

    def undelivered_stops(self) -> int:
        """Count the stops that were late or never read; called after the last event was read."""
        return self._late_stops + len(self.unread(StopPressed))

    def unread(self, kind: type[E]) -> list[E]:
        """List the events of a kind that arrived after the last read."""
        while (event := self._take(0.0)) is not None:
            self._unread.append(event)
        return [event for event in self._unread if isinstance(event, kind)]
