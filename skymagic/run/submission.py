"""A request to some ranks, and the mailbox of the events that it causes."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skymagic.run.metrics import Metrics

JOINED_CHARS = 64 << 10
"""Maximum number of characters of consecutive output that are read as one event."""


@dataclass(frozen=True)
class RunEvent:
    """Event of a submission.

    Its kind is ``output``, ``outcome`` or ``died``; or, with rank -1, ``stop``, ``note`` or
    ``closed`` (the pool was ended).
    """

    kind: str
    rank: int
    content: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stream(self) -> tuple[int, str] | None:
        """Rank and stream of text that can be joined with following text; None for other events."""
        text = (
            self.kind == "output"
            and self.content["kind"] == "stream"
            and not self.content.get("maybe_seen")
        )
        return (self.rank, self.content["name"]) if text else None


# kinds that would be visible twice; a repeated update only replaces itself
SEEN = ("stream", "display_data")


class Repeated:
    """Messages that ranks repeat to a notebook that follows another notebook's run.

    Messages that the other notebook had begun to show are marked as possibly seen, and joined.

    Args:
        begun: rank → number of the last message that the other notebook had begun to show.
    """

    def __init__(self, shown: Mapping[int, int]) -> None:
        self._begun = shown
        # possibly seen messages, until the last one of their rank has arrived
        self._held: dict[int, list[dict[str, Any]]] = {}

    def take(self, rank: int, content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Add a rank's next message and return the messages that can be shown now."""
        seq, begun = content.get("seq", 0), self._begun.get(rank, 0)
        # messages without a number, and later ones, were never shown
        if not 0 < seq <= begun:
            return [*self._held.pop(rank, ()), content]
        pending = self._held.setdefault(rank, [])
        doubtful = {**content, "maybe_seen": True} if content["kind"] in SEEN else dict(content)
        previous = pending[-1] if pending else {}
        if (
            doubtful["kind"] == previous.get("kind") == "stream"
            and doubtful["name"] == previous["name"]
        ):
            pending[-1] = {**doubtful, "text": previous["text"] + doubtful["text"]}
        else:
            pending.append(doubtful)
        return [*self._held.pop(rank)] if seq == begun else []


class Submission:
    """Mailbox of one run: many threads put events into its queue, and the run's thread reads them.

    Attributes:
        futures: ipyparallel's future of each rank.
        nbytes: number of bytes sent, to all ranks together.
        number: number of the run in the pool; 0 for an order that is not a run.
        metrics: metrics that the ranks have reported.
        repeated: messages of another notebook's run that may have been shown there.
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
        self.futures: dict[int, Any] = {}
        self.nbytes = 0
        self.repeated = Repeated({})
        self._ahead: RunEvent | None = None  # taken from the queue but not read yet
        self._late_stops = 0
        self._unread: list[RunEvent] = []

    def put(self, kind: str, rank: int, content: Mapping[str, Any] | None = None) -> None:
        """Add an event; safe on any thread, and in a signal handler."""
        self.events.put(RunEvent(kind, rank, content or {}))

    def read(self, timeout: float) -> RunEvent | None:
        """Return the next event, or None after `timeout` seconds.

        Consecutive text of a stream is joined: the output that a notebook has missed for hours may
        consist of tens of thousands of pieces.
        """
        event = self._take(timeout)
        if event is None or event.stream is None:
            return event
        latest, texts = event, [event.content["text"]]
        size = len(texts[0])
        while size < JOINED_CHARS and (following := self._take(0.0)) is not None:
            if following.stream != event.stream:
                self._ahead = following
                break
            latest = following
            texts.append(following.content["text"])
            size += len(texts[-1])
        # the joined event has the number of its last piece, so that all pieces count as shown
        return replace(event, content={**latest.content, "text": "".join(texts)})

    def news(self) -> Iterator[RunEvent]:
        """Iterate over the events that have already arrived."""
        while (event := self.read(0.0)) is not None:
            yield event

    def _take(self, timeout: float) -> RunEvent | None:
        event, self._ahead = self._ahead, None
        with contextlib.suppress(queue.Empty):
            return event or self.events.get(timeout=timeout)
        return None

    def pending(self) -> list[int]:
        """List the ranks that have not replied."""
        return [rank for rank, future in list(self.futures.items()) if not future.done()]

    def stop_was_late(self) -> None:
        """Count a stop that was read when there was nothing left to stop."""
        self._late_stops += 1

    def undelivered_stops(self) -> int:
        """Count the stops that were late or never read; called after the last event was read."""
        return self._late_stops + len(self.unread("stop"))

    def unread(self, kind: str) -> list[RunEvent]:
        """List the events of a kind that arrived after the last read."""
        while (event := self._take(0.0)) is not None:
            self._unread.append(event)
        return [event for event in self._unread if event.kind == kind]
