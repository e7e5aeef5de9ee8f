"""Mending a pool beside the user: ranks are started anew, and all of them form a process group again."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from skymagic.display.screen import NullScreen
from skymagic.errors import PoolError, PoolStateError
from skymagic.pool.scheduling import Turn, Turns
from skymagic.pool.states import Event
from skymagic.run.report import Limits, Report
from skymagic.run.submission import Submission
from skymagic.wire.exit_status import describe
from skymagic.wire.order import Order, Rejoin

REJOIN_TIMEOUT = 20.0
TIMEOUT = 120.0
"""Seconds for which a restart waits for the ranks."""


class Patient(Protocol):
    """What is mended: a pool. All methods but `move` are called by the mending's own thread, when it has all ranks' turn."""

    name: str

    def move(self, event: Event) -> None:
        """Something has happened to the pool."""

    def tell(self, note: str) -> None:
        """What the user must hear before the next run; the same twice is told once."""

    def replace(self, ranks: Sequence[int], generation: int) -> None:
        """End what is left of these ranks and begin to start them anew."""

    def take_up(self, ranks: Sequence[int]) -> None:
        """Wait for ranks that are starting, and bind them."""

    def send(
        self,
        submission: Submission,
        order: Order,
        source: str,
        screen: NullScreen,
        limits: Limits,
    ) -> Report:
        """Have an order carried out."""


class Mending:
    """Owns the thread that mends one pool.

    Args:
        pool: what is mended.
        turns: where it waits for all ranks, ahead of runs that have not begun.
        world_size: number of ranks.
        inseparable: whether all ranks must be started anew when one has died.
    """

    def __init__(self, pool: Patient, turns: Turns, world_size: int, *, inseparable: bool) -> None:
        self._pool = pool
        self._turns = turns
        self._world_size = world_size
        self._inseparable = inseparable
        self._news = threading.Lock()
        """Held for moments, while what follows is changed."""
        self._to_replace: set[int] = set()
        self._waits = False
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None
        self._generation = 0
        self._infos: Mapping[int, Mapping[str, Any]] = {}
        """What ranks that live must learn of their places when they join the next group."""

    def begin(self, dead: Iterable[int]) -> None:
        """Start ranks anew and form the process groups again; returns at once, and runs that wait go on after it.

        It needs all ranks, and so begins when the runs that have begun are over.
        """
        with self._news:
            self._to_replace.update(dead)
            if self._waits:
                return
            self._waits = True
            turn = self._turns.ask(range(self._world_size), urgent=True)
            self._thread = threading.Thread(
                target=self._mend_in, args=(turn,), name="skymagic-mend", daemon=True
            )
            self._thread.start()

    def wait(self, timeout: float = TIMEOUT) -> bool:
        """Until the mending begun last is over; False if it goes on after so many seconds, or there was none."""
        with self._news:
            thread = self._thread  # it is started, for who begins one holds the lock until then
        if thread is None:
            return False
        thread.join(timeout)
        return not thread.is_alive()

    def check(self) -> None:
        """Whether it worked; asked before each run.

        Raises:
            PoolStateError: ranks did not come back. It is said once.
        """
        if (problem := self.forgive()) is not None:
            raise PoolStateError(
                f"pool {self._pool.name!r} lost ranks that did not come back: {problem}; try %sky_restart"
            )

    def forgive(self) -> Exception | None:
        """What went wrong, which is forgotten with this."""
        problem, self._problem = self._problem, None
        return problem

    def resize(self, world_size: int, infos: Mapping[int, Mapping[str, Any]], added: Sequence[int]) -> None:
        """Form a group of another size; called by who has the turn of all ranks, before and after.

        Args:
            infos: rank → its new place (``InstanceInfo.plain()``).
            added: ranks that are to be started; all of them are where they are inseparable.

        Raises:
            PoolError: the ranks did not come up.
        """
        self._world_size, self._infos = world_size, infos
        try:
            self._mend(list(range(world_size)) if self._inseparable else list(added))
        finally:
            self._infos = {}
        if (problem := self.forgive()) is not None:
            raise PoolError(f"the ranks did not come up: {problem}") from problem

    # -- on its own thread -------------------------------------------------------------------------------------------

    def _mend_in(self, turn: Turn) -> None:
        with turn:
            with self._news:
                dead, self._to_replace, self._waits = sorted(self._to_replace), set(), False
            self._mend(list(range(self._world_size)) if dead and self._inseparable else dead)

    def _mend(self, dead: list[int]) -> None:
        try:
            self._pool.move(Event.MEND)
            if not self._bring_back(dead) and not self._bring_back(list(range(self._world_size))):
                raise PoolError(f"the ranks of pool {self._pool.name!r} did not come back")
        except Exception as problem:
            self._problem = problem
            self._pool.move(Event.DEGRADE)
        else:
            self._pool.move(Event.MENDED)

    def _bring_back(self, dead: Sequence[int]) -> bool:
        """Replace the dead, and let all others join a new group with them; whether that worked."""
        self._generation += 1
        self._pool.replace(dead, self._generation)
        problem = self._rejoin([rank for rank in range(self._world_size) if rank not in dead])
        if problem is not None:
            self._pool.tell(
                f"the process group could not be formed again ({problem}): all ranks were started anew and lost their variables"
            )
            return False
        self._pool.take_up(dead)
        return True

    def _rejoin(self, alive: Sequence[int]) -> str | None:
        """Let ranks that live form a new group; why that did not work, or None."""
        if not alive:
            return None
        # those that are being replaced take part too, from their side
        infos = {str(rank): info for rank, info in self._infos.items()}
        order = Rejoin(ranks=tuple(range(self._world_size)), generation=self._generation, infos=infos)
        limits = Limits(timeout=REJOIN_TIMEOUT, grace=0.1)
        report = self._pool.send(Submission(alive), order, "", NullScreen(), limits)
        for number, rank in report.ranks.items():
            outcome = rank.outcome or {}
            if rank.failed and not rank.stopped:
                return (
                    f"rank {number}: {describe(rank.died)}"
                    if rank.died
                    else f"rank {number}: {outcome['ename']}: {outcome['evalue']}"
                )
            for note in outcome.get("notes", ()):
                self._pool.tell(note)
        return None if report.good else f"not within {REJOIN_TIMEOUT:.0f} s"
