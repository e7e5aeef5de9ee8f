"""Ranks for which others would wait in vain while a process group is formed anew: those that hang are found by what they do, and ended.

A deadline would be missed by a healthy rank on a busy machine too. What tells them apart is the main thread: one that waits for its turn
on the processor, or for the other ranks, goes on when it can; one that sleeps elsewhere, or runs what a cell has put in the place of a
function, does not, and all others wait for it::

    rank 0   Rejoin ──▶ waits ──────────────────────────────▶ released, joins the next group
    rank 1   Rejoin ──▶ open(…), which a cell has replaced ──▶ killed
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from skymagic.cluster import Agents
from skymagic.wire.processes import describe

DEADLINE = 5.0
"""Seconds without a sign of life after which a rank counts as hanging."""
INTERVAL = 0.5
"""Seconds between two looks; a group is formed in less than one."""
ANSWER_TIMEOUT = 1.0
"""Seconds in which agents and ranks answer."""
CPU_TIME = 0.05
"""Seconds of processor time that are a sign of life."""
SLEEPS = "S"
"""The state of a Linux thread that waits for an event; one that waits for its turn is R, for a disk D."""


@dataclass(frozen=True)
class Look:
    """What a rank's main thread does at one time.

    Attributes:
        at: when, in monotonic seconds.
        state: a letter of Linux's; "" where nobody can tell.
        cpu: seconds of processor time that it has used.
        waits: it waits for other ranks.
        in_cell: it runs code of a cell, though no cell runs.
    """

    at: float
    state: str
    cpu: float
    waits: bool
    in_cell: bool

    def lives(self, before: Look) -> bool:
        """Whether it has gone on since an earlier look, or will by itself."""
        if self.in_cell:
            return False
        return self.waits or self.state != SLEEPS or self.cpu - before.cpu > CPU_TIME


def look(at: float, usage: Any, joining: Any) -> Look:
    """What an agent tells of a rank, and what the rank's control thread says, if it can."""
    state, cpu = usage or ("", 0.0)
    said: Mapping[str, bool] = joining or {}
    return Look(at, state, cpu, said.get("waits", False), said.get("in_cell", False))


class SignsOfLife:
    """The last one of each rank."""

    def __init__(self) -> None:
        self._last: dict[int, Look] = {}

    def hanging(self, looks: Mapping[int, Look]) -> list[int]:
        """The ranks for which others wait, and which have not gone on for `DEADLINE`."""
        for rank, now in looks.items():
            if rank not in self._last or now.lives(self._last[rank]):
                self._last[rank] = now
        if not any(each.waits for each in looks.values()):
            return []
        return [rank for rank, now in looks.items() if now.at - self._last[rank].at >= DEADLINE]


@dataclass
class Watch:
    """Looks at ranks while the block goes on, and ends those that hang. Where one that is started anew fails, it releases the others.

    Args:
        pending: the ranks that have not ended the order.
        starting: those that are started anew, and take part from their side.
    """

    _agents: Agents
    _pending: Callable[[], Collection[int]]
    _starting: Collection[int] = ()
    found: dict[int, str] = field(default_factory=dict)
    """Ranks that were ended, or could not start, each with why."""
    _signs: SignsOfLife = field(default_factory=SignsOfLife)
    _over: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __enter__(self) -> Watch:
        threading.Thread(target=self._run, name="skymagic-hanging", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._over, INTERVAL):
                    return
            failed, hanging = self._failed(), self._signs.hanging(self._look())
            with self._changed:
                if self._over:
                    return
                self.found |= failed | dict.fromkeys(hanging, f"it hung by itself for {DEADLINE:.0f} s")
                self._agents.signal(hanging, signal.SIGKILL)
                if not self.found.keys().isdisjoint(self._starting):
                    self._agents.ask(self._pending(), "release", timeout=0.0)

    def _failed(self) -> dict[int, str]:
        states = {rank: self._agents.ranks[rank] for rank in self._starting if rank not in self.found}
        failed = {rank: f"{one.failed.ename}: {one.failed.evalue}" for rank, one in states.items() if one.failed}
        return failed | {rank: describe(one.exited) for rank, one in states.items() if one.exited}

    def _look(self) -> dict[int, Look]:
        ranks = [rank for rank in self._pending() if not self._agents.is_away(rank)]
        usage = self._agents.ask(ranks, "usage", ANSWER_TIMEOUT)
        joining = self._agents.ask(ranks, "joining", ANSWER_TIMEOUT)
        now = time.monotonic()
        return {rank: look(now, usage.get(rank), joining.get(rank)) for rank in ranks}
