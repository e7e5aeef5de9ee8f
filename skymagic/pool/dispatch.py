"""Orders on their way to the ranks: who waits for which, so that a rank's death reaches the run that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from skymagic.display.screen import Screen
from skymagic.pool.following import Following
from skymagic.pool.resources import Resources
from skymagic.pool.status import Status, now
from skymagic.run.report import Limits, Report
from skymagic.run.run import Run
from skymagic.run.submission import Repeated, Submission
from skymagic.wire import agent as wire
from skymagic.wire.order import Order


@dataclass(eq=False, repr=False)
class Dispatch:
    """Owns the submissions under way."""

    _status: Status
    _resources: Resources
    on_late_death: Callable[[wire.RankExited], None] = lambda exited: None
    """Called when a rank died that nobody waits for any more, on the run's thread."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held for moments, while what follows is changed."""
    _under_way: set[Submission] = field(default_factory=set)
    _following: dict[Submission, Following] = field(default_factory=dict)
    """Of those under way, the ones that another notebook began."""

    def send(self, submission: Submission, order: Order, source: str, screen: Screen, limits: Limits) -> Report:
        """Have an order carried out by ranks that are reserved for it; waits for them."""
        engine = self._resources.engine
        return self._run(submission, lambda: engine.submit(submission, order, source), screen, limits)

    def follow(self, submission: Submission, screen: Screen, limits: Limits) -> Report:
        """Go on with a run that another notebook began, from where that has shown it; waits for its ranks."""
        shown = self._status.shown.read(submission.number)
        submission.repeated = Repeated({rank: begun for rank, (_, begun) in shown.items()})
        agents = self._resources.agents
        places = {rank: max(0, shown.get(rank, (0, 0))[0]) for rank in submission.ranks}
        with Following(submission, agents) as following:
            self._following[submission] = following
            try:
                return self._run(submission, lambda: agents.follow(places), screen, limits)
            finally:
                del self._following[submission]

    def _run(self, submission: Submission, begin: Callable[[], object], screen: Screen, limits: Limits) -> Report:
        agents = self._resources.agents
        shown, number = self._status.shown, submission.number
        marks = (partial(shown.begin, number), partial(shown.mark, number)) if number else ()
        try:
            self._status.lifetime.begin(id(submission))
            with agents.busy(submission.ranks):
                self._begin(submission, begin)
                report = Run(submission, agents, screen, limits, *marks).wait()
        finally:
            self._status.lifetime.end(id(submission), now())
            with self._lock:
                self._under_way.discard(submission)
        for event in submission.unread("died"):  # after its outcome
            self.on_late_death(event.content["exited"])
        self._resources.engine.purge(submission)
        return report

    def _begin(self, submission: Submission, begin: Callable[[], object]) -> None:
        # Registered before the ranks are looked at, so that a death in between is reported twice rather than never.
        with self._lock:
            self._status.check_ended()
            self._under_way.add(submission)
        for rank in submission.ranks:
            exited = self._resources.agents.ranks[rank].exited
            if exited is not None:
                submission.put("died", rank, {"exited": exited})
        begin()

    def shown(self, rank: int, content: Mapping[str, Any]) -> None:
        """A rank of a run that another notebook began shows something, on a link's thread."""
        with self._lock:
            current = next((each for each in self._under_way if rank in each.ranks), None)
        if current is None:
            return
        for one in current.repeated.take(rank, content):
            current.put("output", rank, one)
        following = self._following.get(current)
        if content["kind"] == "end" and following is not None:
            following.ended(rank)

    def rank_died(self, exited: wire.RankExited) -> bool:
        """Report a rank's death to the run that waits for it; False if there is none."""
        with self._lock:
            current = next((each for each in self._under_way if exited.rank in each.ranks), None)
            if current is not None:
                current.put("died", exited.rank, {"exited": exited})
        return current is not None

    def ranks_lost(self, ranks: Iterable[int], reason: str, *, expected: bool = False) -> bool:
        """Report to all runs that these ranks are out of reach; False if there are no runs."""
        with self._lock:
            under_way = list(self._under_way)
        for current in under_way:
            for rank in {*current.ranks} & {*ranks}:
                current.put("died", rank, {"exited": wire.RankExited(rank, 0, None, expected, tail=reason)})
        return bool(under_way)

    def end(self, reason: str) -> None:
        """Refuse submissions from now on: the pool has ended by itself."""
        with self._lock:
            self._status.ended = reason

    def note(self, text: str) -> bool:
        """Have all runs show a line; whether there is one."""
        with self._lock:
            for current in self._under_way:
                current.put("note", -1, {"text": text})
            return bool(self._under_way)
