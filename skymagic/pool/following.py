"""How the ranks of a run end that another notebook began: their outcome went to that one, and each rank has kept its own."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from skymagic.cluster.agents import Agents
from skymagic.run.submission import Submission

RECALL_TIMEOUT = 10.0
"""Seconds in which a rank that has ended tells how."""
LOOK_INTERVAL = 5.0
"""Seconds after which an order of a notebook that was killed is not on its way to a rank any more; and between further looks."""
_NOT_SENT = "this rank did not get the cell, for its notebook was killed while it sent it: run the cell again"
UNSENT = {"status": "error", "ename": "CellNotSent", "evalue": _NOT_SENT, "traceback": [_NOT_SENT]}


@dataclass(eq=False, repr=False)
class Following:
    """Asks ranks for their outcomes, on a thread of its own, while the run is waited for (`with`).

    Those whose last output has come are asked at once. All others are asked every few seconds: ranks to which their notebook was killed
    before it sent the cell, and any whose last output is lost.
    """

    _submission: Submission
    _agents: Agents
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _ended: set[int] = field(default_factory=set)
    """Ranks whose last output has come, and that were not asked yet how they have ended."""
    _over: bool = False

    def __enter__(self) -> Following:
        threading.Thread(target=self._ask, name="skymagic-follow", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()

    def ended(self, rank: int) -> None:
        """A rank's last output has come."""
        with self._changed:
            self._ended.add(rank)
            self._changed.notify()

    def _ask(self) -> None:
        untold = {*self._submission.ranks}
        look = time.monotonic() + LOOK_INTERVAL
        while (ended := self._wait(look)) is not None:
            if ended & untold:
                untold -= self._told(ended & untold, RECALL_TIMEOUT)
            if time.monotonic() >= look:
                # a rank that does not answer holds up the others' ends no longer than this
                untold -= self._told(untold, LOOK_INTERVAL, unsent=True)
                look = time.monotonic() + LOOK_INTERVAL

    def _wait(self, until: float) -> set[int] | None:
        """Wait for ranks' last output, or until this time of `time.monotonic`; which it was of, None when the run is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._ended, max(0.0, until - time.monotonic()))
            ended, self._ended = self._ended, set()
            return None if self._over else ended

    def _told(self, ranks: set[int], timeout: float, *, unsent: bool = False) -> set[int]:
        """Ask these ranks, and tell the run how those have ended that have; which.

        Args:
            unsent: one that has not got the cell by now never will.
        """
        run, told = self._submission, set[int]()
        for rank, kept in self._agents.ask(ranks, "recall", timeout).items():
            number = kept["order"]["run"] if kept and kept["order"] else 0
            if kept is None or number > run.number or (number and kept["outcome"] is None):
                continue  # it is at work
            if number < run.number:
                if not unsent:
                    continue
                run.put("output", rank, {"kind": "end"})
            run.put("outcome", rank, kept["outcome"] if number == run.number else UNSENT)
            told.add(rank)
        return told
