"""One request on its way to some ranks, and the mailbox of events that come back."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skymagic.run.metrics import Metrics

JOINED_CHARS = 64 << 10
"""Of text that is read as one."""


@dataclass(frozen=True)
class RunEvent:
    """Something that happened to a submission: kind is ``output``, ``outcome``, ``died``, or, of no rank (-1), ``stop``, ``note`` or
    ``closed`` (its pool was ended)."""

    kind: str
    rank: int
    content: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stream(self) -> tuple[int, str] | None:
        """A rank and the name of its stream, of text that may be shown as one with what follows; None of all else."""
        text = (
            self.kind == "output"
            and self.content["kind"] == "stream"
            and not self.content.get("maybe_seen")
        )
        return (self.rank, self.content["name"]) if text else None


SEEN = (
    "stream",
    "display_data",
)  # kinds of what can be seen twice; an update replaces what it repeats


class Repeated:
    """What ranks show once more to a notebook that follows a run: contents that another notebook had begun to show are announced, together.

    Args:
        begun: rank → number of the last content that the other notebook had begun to show.
    """

    def __init__(self, begun: Mapping[int, int]) -> None:
        self._begun = begun
        self._held: dict[
            int, list[dict[str, Any]]
        ] = {}  # contents in doubt, until the last of their rank has come

    def take(self, rank: int, content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """What can be shown, now that a rank's next content has come."""
        seq, begun = content.get("seq", 0), self._begun.get(rank, 0)
        if not 0 < seq <= begun:
            return [*self._held.pop(rank, ()), content]
        held = self._held.setdefault(rank, [])
        doubtful = {**content, "maybe_seen": True} if content["kind"] in SEEN else dict(content)
        last = held[-1] if held else {}
        if doubtful["kind"] == last.get("kind") == "stream" and doubtful["name"] == last["name"]:
            held[-1] = {**doubtful, "text": last["text"] + doubtful["text"]}
        else:
            held.append(doubtful)
        return [*self._held.pop(rank)] if seq == begun else []


class Submission:
    """The mailbox of one run: many threads put events into its queue, the run's own thread reads them.

    Attributes:
        futures: ipyparallel's future of each rank.
        nbytes: what was sent, to all ranks together.
        number: the pool's, of the run; 0 for what is none.
        metrics: what the ranks have reported.
        repeated: what of a run that another notebook left may have been shown there.
    """

    def __init__(
        self, ranks: Sequence[int], number: int = 0, metrics: Metrics | None = None
    ) -> None:
        self.ranks = tuple(ranks)
        self.number = number
        self.metrics = Metrics() if metrics is None else metrics
        # SimpleQueue.put is reentrant: a signal handler may interrupt a put (Queue.put would deadlock)
        self.events: queue.SimpleQueue[RunEvent] = queue.SimpleQueue()
        self.futures: dict[int, Any] = {}
        self.nbytes = 0
        self.repeated = Repeated({})
        self._ahead: RunEvent | None = None  # taken from the queue, and not read yet
        self._late_stops = 0
        self._unread: list[RunEvent] = []

    def put(self, kind: str, rank: int, content: Mapping[str, Any] | None = None) -> None:
        """Add an event; safe on any thread, and in a signal handler."""
        self.events.put(RunEvent(kind, rank, content or {}))

    def read(self, timeout: float) -> RunEvent | None:
        """The next event; None if none comes for so many seconds. Text of a stream that has come by now is one: of what a notebook has missed in
        hours there may be tens of thousands of pieces."""
        event = self._take(timeout)
        if event is None or event.stream is None:
            return event
        last, texts = event, [event.content["text"]]
        size = len(texts[0])
        while size < JOINED_CHARS and (following := self._take(0.0)) is not None:
            if following.stream != event.stream:
                self._ahead = following
                break
            last = following
            texts.append(following.content["text"])
            size += len(texts[-1])
        return replace(event, content={**last.content, "text": "".join(texts)})

    def news(self) -> Iterator[RunEvent]:
        """The events that have come by now."""
        while (event := self.read(0.0)) is not None:
            yield event

    def _take(self, timeout: float) -> RunEvent | None:
        event, self._ahead = self._ahead, None
        with contextlib.suppress(queue.Empty):
            return event or self.events.get(timeout=timeout)
        return None

    def pending(self) -> list[int]:
        """The ranks that have not replied."""
        return [rank for rank, future in list(self.futures.items()) if not future.done()]

    def stop_was_late(self) -> None:
        """Count a stop that was read when there was nothing left to stop."""
        self._late_stops += 1

    def undelivered_stops(self) -> int:
        """How many stops were late or never read; called when nobody reads events any more."""
        return self._late_stops + len(self.unread("stop"))

    def unread(self, kind: str) -> list[RunEvent]:
        """The events of a kind that came when nobody read any more."""
        while (event := self._take(0.0)) is not None:
            self._unread.append(event)
        return [event for event in self._unread if event.kind == kind]
