"""Recovery beside the user: ranks are started anew, and all of them form a process group again.

Each attempt has a generation number. Ranks that live get a `Rejoin` order and meet the new ones in a group of that generation.
When one of them fails at it, the others leave the group that was being formed; it is replaced, and they meet in the next generation::

    rank 0   Rejoin 1 ─▶ waits ─▶ released ─▶ Rejoin 2 ─▶ joined, with its variables
    rank 1   Rejoin 1 ─▶ fails ─▶ killed
    rank 1                        started for 2 ────────▶ joined

Where nobody is at fault, or it fails again, all ranks are started anew.

A recovery owns the ranks from when it has them reserved: a restart that is asked for meanwhile ends none of those that are being started
anew, which are what it wants, and leaves the others to be replaced in the recovery's next generation.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skymagic.cluster import Node
from skymagic.display.screen import Screen, print_note
from skymagic.errors import PoolError, PoolStateError, RequestError
from skymagic.plan.plans import Plan
from skymagic.plan.units import rank_words
from skymagic.pool import messages, slow_start
from skymagic.pool.dispatch import RankReservation, Scheduler
from skymagic.pool.resources import PoolResources, devices_environment
from skymagic.pool.status import PoolEvent, SharedStatus, State
from skymagic.run.report import Limits, Report
from skymagic.run.results import is_connection_error, may_be_connection_error
from skymagic.run.stall import HangWatch
from skymagic.run.submission import Submission
from skymagic.wire.order import Rejoin
from skymagic.wire.processes import describe
from skymagic.wire.threads import failures, run_all

REJOIN_TIMEOUT = 60.0
"""Seconds for which ranks that live wait for a new group; one that hangs by itself is found sooner (`hanging`)."""
REJOIN_GRACE = 1.0  # seconds in which they leave it when one of them has failed; a few times that, while they are slow
ATTEMPTS = 4  # how often a group is formed at most; the last time with all ranks started anew
TIMEOUT = 120.0
"""Seconds for which a restart waits for the ranks."""
LOOK_INTERVAL = 0.5
"""Seconds between two looks of a restart at what holds the ranks up."""
GIVE_UP_TIMEOUT = 10.0
"""Seconds in which a recovery ends whose nodes were given up."""


@dataclass(eq=False, repr=False)
class Recovery:
    """Thread that brings back a pool's ranks, while it has all of them reserved."""

    _status: SharedStatus
    _resources: PoolResources
    _scheduler: Scheduler
    """Recovery comes ahead of runs that have not begun."""
    _send: Callable[..., Report]
    """Has an order carried out by ranks, and waits for them (`Dispatch.send`)."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held for moments, while what follows is changed."""
    _to_replace: set[int] = field(default_factory=set)
    _to_form: bool = False
    """Whether groups must be formed anew; else the ranks only go on together after a cell that failed."""
    _queued: bool = False
    _fresh: frozenset[int] | None = None
    """Ranks that the recovery under way has started anew; None while there is none."""
    _thread: threading.Thread | None = None
    _problem: Exception | None = None
    generation: int = 0
    """Number of the process group that was formed last."""
    _infos: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """The new places of ranks that live, which they get when they join the next group."""

    def begin(self, dead: Iterable[int], *, form: bool = True) -> None:
        """Start ranks anew and form the process groups again; returns at once, and runs that wait go on after it.

        It needs all ranks, and so begins when the runs that have begun are over.

        Args:
            form: False where the groups are whole, and plugins only put in order what a failed cell has left.

        Raises:
            PoolStateError: not in this state.
        """
        self._status.check(PoolEvent.RECOVER)
        with self._lock:
            self._to_replace.update(dead)
            self._to_form |= form
            self._queue()

    def _queue(self) -> None:
        """Have a thread recover once it has all ranks; the lock is held."""
        if self._queued:
            return
        self._queued = True
        reservation = self._scheduler.request(range(self._status.world_size), urgent=True)
        self._thread = threading.Thread(
            target=self._recover_when_free,
            args=(reservation,),
            name="skymagic-recovery",
            daemon=True,
        )
        self._thread.start()

    def begin_after(self, report: Report) -> None:
        """Begin if a run has left ranks dead, out of their group, or out of step with each other, or has failed otherwise."""
        dead = [
            number
            for number, rank in report.ranks.items()
            if rank.died is not None or (rank.outcome or {}).get("gpu_lost")
        ]
        outcomes = [rank.outcome for rank in report.ranks.values() if rank.outcome is not None]
        left_group = not all(outcome.get("joined", True) for outcome in outcomes)
        broken = bool(dead) or left_group or report.freed or report.out_of_step
        settles = not report.good and any(
            plugin.settle is not None for plugin in self._status.plugins
        )
        if (broken or settles) and self._status.state in (State.READY, State.RUNNING):
            self.begin(dead, form=broken)

    def wait(self, timeout: float = TIMEOUT) -> bool:
        """Wait for the recovery begun last; False if it goes on after so many seconds, or there was none."""
        with self._lock:
            thread = self._thread  # it is started: `begin` holds the lock until then
        if thread is None:
            return False
        thread.join(timeout)
        return not thread.is_alive()

    def check(self) -> None:
        """Raises PoolStateError, once, if ranks did not come back; called before each run."""
        if (problem := self._take_problem()) is not None:
            raise PoolStateError(
                f"pool {self._status.name!r} lost ranks that did not come back: {problem}; try %sky_restart"
            )

    def _take_problem(self) -> Exception | None:
        problem, self._problem = self._problem, None
        return problem

    def restart(self, ranks: Sequence[int] | None) -> None:
        """Start ranks anew (all of them), and those of machines that can be reached again.

        Raises:
            RequestError: there are no such ranks.
            PoolError: they did not come back.
        """
        world_size = self._status.world_size
        self._status.check(PoolEvent.RECOVER)
        chosen = list(range(world_size)) if ranks is None else sorted(set(ranks))
        wrong = [rank for rank in chosen if not 0 <= rank < world_size]
        if wrong:
            raise RequestError(
                f"pool {self._status.name!r} has ranks 0 to {world_size - 1}, not {rank_words(wrong)}"
            )
        if slow_start.give_up(self._resources, chosen):
            self.wait(GIVE_UP_TIMEOUT)  # for the recovery that waits for what was given up
        self._replace({*chosen, *self._resources.revive()})
        self._wait_until_back()
        if (problem := self._take_problem()) is not None:
            raise PoolError(f"the ranks did not come back: {problem}") from problem

    def _wait_until_back(self) -> None:
        """Wait for the ranks that were started anew, and tell what holds them up."""
        end, told = time.monotonic() + TIMEOUT, False
        while not self.wait(LOOK_INTERVAL):
            if time.monotonic() >= end:
                raise PoolError(
                    f"the ranks have not come back within {TIMEOUT:.0f} s, and are still starting: %sky_status shows them"
                )
            if not told and (text := slow_start.reason(self._resources)):
                told = True
                print_note(f"[{text}]")

    def slow(self) -> str:
        """Return what holds up ranks that are being started anew, or "" while nothing has for long."""
        recovering = self._status.state is State.RECOVERING
        return slow_start.reason(self._resources) if recovering else ""

    def _replace(self, chosen: Iterable[int]) -> None:
        """Have ranks started anew, by the recovery under way if there is one; runs that have begun on them end."""
        with self._lock:
            wanted = sorted(set(chosen) - (self._fresh or frozenset()))
            self._problem = None
            # while the lock is held no recovery starts one of them: only what runs now is hit
            self._resources.agents.signal(wanted, signal.SIGKILL)
            self._to_replace.update(wanted)
            if self._fresh is None:
                self._to_form = True
                self._queue()

    def exchange(self, machines: Mapping[int, Node]) -> None:
        """Go on with other machines in the place of those that are gone: their ranks start anew, and all form a new group.

        Raises:
            ProvisionError: one is not to be reached.
            PoolError: the ranks did not come back.
        """
        lost = self._resources.revive(machines)
        self._infos = self._resources.reshape()
        try:
            self._take_problem()
            self.begin(lost)
            while not self.wait():
                pass
            if (problem := self._take_problem()) is not None:
                raise PoolError(f"the ranks did not come back: {problem}") from problem
        finally:
            self._infos = {}

    def resize(self, plan: Plan) -> str:
        """Add or release nodes of a pool on this machine, between runs; the ranks that stay form a new group with the others.

        Returns:
            What became of the ranks' variables, in a line.

        Raises:
            PoolStateError: not in this state.
            PoolError: the ranks did not come up.
        """
        self._status.check(PoolEvent.RECOVER)
        before, after = self._status.world_size, plan.topology.world_size
        stay = range(min(before, after))
        # a process cannot take other GPUs than it has opened
        moved = any(
            devices_environment(self._status.plan, rank) != devices_environment(plan, rank)
            or self._status.plan.devices_of(rank) != plan.devices_of(rank)
            for rank in stay
        )
        # The wait may be interrupted. What follows may not, and so goes on by itself when the user does not wait for it.
        reservation = self._scheduler.request(range(max(before, after)))
        self._scheduler.acquire(reservation)

        def work() -> None:
            try:
                self.check()
                self._status.plan = plan
                self._infos = self._resources.reshape()
                self._recover(
                    list(range(0 if moved or self._status.inseparable else before, after))
                )
                if (problem := self._take_problem()) is not None:
                    raise PoolError(f"the ranks did not come up: {problem}") from problem
            finally:
                self._infos = {}
                self._scheduler.release(reservation)

        for problem in failures(run_all([work], name="skymagic-resize")):
            raise problem
        return messages.variables_then(before, after, self._status.inseparable, moved)

    # -- on its own thread -------------------------------------------------------------------------------------------

    def _recover_when_free(self, reservation: RankReservation) -> None:
        with reservation:
            with self._lock:
                form, self._to_form, self._queued, self._fresh = (
                    self._to_form,
                    False,
                    False,
                    frozenset(),
                )
            self._recover((), form=form)

    def _recover(self, dead: Iterable[int], *, form: bool = True) -> None:
        try:
            self._status.move(PoolEvent.RECOVER)
            if (
                form
                or self._rejoin(range(self._status.world_size), form=False) is not None
                or not self._over()
            ):
                self._bring_back(dead)
        except Exception as problem:
            self._fresh = None
            self._problem = problem
            # without the head, where the controller runs, all ranks are out of reach
            self._status.move(
                PoolEvent.LOSE if 0 in self._resources.agents.gone else PoolEvent.DEGRADE
            )
        else:
            self._status.move(PoolEvent.RECOVERED)

    def _bring_back(self, dead: Iterable[int]) -> None:
        """Replace the dead, and let all others join a new group with them; replace those too that cannot.

        Raises PoolError if even new ranks alone cannot form a group.
        """
        everyone = set(range(self._status.world_size))
        replaced, attempt = set(dead), 0
        while attempt < ATTEMPTS:
            with self._lock:
                replaced |= self._to_replace
                if replaced and self._status.inseparable:
                    replaced = set(everyone)
                self._to_replace, self._fresh = set(), frozenset(replaced)
            self.generation += 1
            self._resources.forget(sorted(replaced))
            self._resources.agents.respawn(sorted(replaced), self.generation)
            problems = self._rejoin(sorted(everyone - replaced))
            if problems is None:
                self._resources.take_up(sorted(replaced))
                if self._over():
                    return
            if self._to_replace:  # a restart has ended ranks: that is no fault of theirs
                continue
            attempt += 1
            last = attempt + 1 >= ATTEMPTS or self._status.inseparable
            faulty = {*problems} if problems and not last else everyone
            self._status.note(
                messages.replaced_words(problems or {}, faulty, self._status.world_size)
            )
            replaced |= faulty
        raise PoolError(f"the ranks of pool {self._status.name!r} did not come back")

    def _over(self) -> bool:
        """Whether no restart wants other ranks replaced; then this recovery takes no more of them."""
        with self._lock:
            if not self._to_replace:
                self._fresh = None
            return not self._to_replace

    def _rejoin(self, alive: Sequence[int], *, form: bool = True) -> dict[int, str] | None:
        """Let ranks that live form a new group, or go on together in the one that they have.

        None if they did, else those that failed by themselves, each with what went wrong.
        """
        if not alive:
            return None
        # those that are being replaced take part too, from their side
        infos = {str(rank): info for rank, info in self._infos.items()}
        everyone = tuple(range(self._status.world_size))
        order = Rejoin(ranks=everyone, generation=self.generation, form=form, infos=infos)
        limits = Limits(
            timeout=REJOIN_TIMEOUT, grace=REJOIN_GRACE, interrupt_grace=0.0, silent_may_leave=True
        )
        submission = Submission(alive)
        starting = {*everyone} - {*alive} if form else ()
        with HangWatch(self._resources.agents, submission.pending, starting) as watch:
            report = self._send(submission, order, "", Screen(), limits)
        if not report.good:
            return at_fault(report, watch.found)
        for rank in report.ranks.values():
            for note in (rank.outcome or {}).get("notes", ()):
                self._status.note(note)
        return None


def at_fault(report: Report, hung: Mapping[int, str]) -> dict[int, str]:
    """The ranks that could not form a group because of themselves, each with what went wrong.

    Those that waited for them say so when they are released, or that a connection has closed if that comes first, in one of the many
    words that torch has for it: where a rank has ended or raised something else, it is the cause. One that does not even
    end when it is released hangs by itself, and was killed.

    Args:
        hung: ranks that were ended because they hung, or could not start, each with why.
    """
    certain = {rank: why for rank, why in hung.items() if rank not in report.ranks}
    suspected = {}
    for number, rank in report.ranks.items():
        outcome = rank.outcome or {}
        if rank.died is not None:
            unanswered = (
                f"no answer within {REJOIN_TIMEOUT:.0f} s" if rank.killed else describe(rank.died)
            )
            certain[number] = hung.get(number, unanswered)
        elif rank.failed and not outcome["freed"]:
            problem = f"{outcome['ename']}: {outcome['evalue']}"
            if not may_be_connection_error(outcome["ename"]):
                certain[number] = problem
            elif not is_connection_error(outcome["ename"], outcome["evalue"]):
                suspected[number] = problem
    return certain or suspected
