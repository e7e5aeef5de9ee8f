"""Replacement of machines that are lost (``--replace``): others are rented beside the user, and their ranks start anew.

node lost ──▶ provider.replace: waits for capacity ──▶ recovery.exchange: agents, a new process group ──▶ the next cell
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from skymagic.plan.units import agreeing, rank_words
from skymagic.pool.dispatch import Dispatch
from skymagic.pool.recovery import Recovery
from skymagic.pool.resources import Resources
from skymagic.pool.states import State
from skymagic.pool.status import Status

CLOSE_SECONDS = 30.0
"""How long the end of the pool waits for a launch that is under way; what it makes is found by its tags."""
POLL_SECONDS = 0.2
"""Between two looks of a cell that waits at whether it was stopped."""


@dataclass(eq=False, repr=False)
class Replacement:
    """Owns the thread that rents them."""

    _status: Status
    _resources: Resources
    _dispatch: Dispatch
    _recovery: Recovery
    _done: Callable[[], None]
    """Called when the pool has other machines."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _lost: set[int] = field(default_factory=set)
    """Nodes that have no other machine yet."""
    _thread: threading.Thread | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def wanted(self) -> bool:
        """Whether machines that are lost are replaced."""
        return self._resources.replacing is not None

    def begin(self, index: int) -> bool:
        """Replace a node that is gone; returns at once. False where that is not wanted."""
        if not self.wanted or self._stop.is_set():
            return False
        with self._lock:
            self._lost.add(index)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="skymagic-replacement", daemon=True)
                self._thread.start()
        return True

    def wait(self, ranks: Sequence[int], check: Callable[[], None], tell: Callable[[str], None]) -> None:
        """Wait while machines of these ranks are being replaced.

        Args:
            check: called again and again; what it raises ends the wait.
            tell: gets a line if there is something to wait for.
        """
        thread = self._thread
        if thread is None or not {*ranks} & {*self._ranks()}:
            return
        tell(f"waits for another machine in the place of {self._names()} (--replace)")
        while thread.is_alive():
            check()
            thread.join(POLL_SECONDS)

    def close(self) -> None:
        """Rent nothing any more; twice is safe."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)

    def _ranks(self) -> list[int]:
        """Those that wait for a machine; all of them where it is the head's, with the controller."""
        with self._lock:
            lost = sorted(self._lost)
        if 0 in lost:
            return list(range(self._status.world_size))
        return [rank for index in lost for rank in self._resources.agents.ranks_of(index)]

    def _names(self) -> str:
        with self._lock:
            return ", ".join(f"node {index}" for index in sorted(self._lost))

    # -- on its own thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                lost = sorted(self._lost)
                if not lost or self._stop.is_set():
                    self._thread = None
                    return
            try:
                self._replace(lost)
            except Exception as problem:
                self._status.note(f"{self._names()} could not be replaced: {problem}; %sky_down ends the pool")
                with self._lock:
                    self._lost.clear()

    def _replace(self, lost: list[int]) -> None:
        ranks, replace = self._ranks(), self._resources.replacing
        assert replace is not None
        machines = replace(lost, self._tell, self._stop)
        if not machines or self._stop.is_set():
            return
        self._recovery.exchange(machines)
        self._done()
        with self._lock:
            self._lost.difference_update(machines)
        names = ", ".join(f"node {index} is {machines[index].name} now" for index in sorted(machines))
        have = agreeing(len(ranks), "has", "have")
        self._status.note(f"{names}; {rank_words(ranks)} {have} started anew, without variables")

    def _tell(self, text: str) -> None:
        if self._status.state not in (State.STOPPING, State.STOPPED):
            self._dispatch.note(str(text))
