"""Recovery in the background: restart ranks, and form a process group of all ranks again.

Each attempt has a generation number. Live ranks get a `Rejoin` order and join the new ranks in a
group of that generation. If one of them fails to join, the others leave the unfinished group; the
failed rank is replaced, and all join in the next generation::

    rank 0   Rejoin 1 ─▶ waits ─▶ released ─▶ Rejoin 2 ─▶ joined, with its variables
    rank 1   Rejoin 1 ─▶ fails ─▶ killed
    rank 1                        started for 2 ────────▶ joined

If no rank is at fault, or joining fails again, all ranks are restarted.

If a cell has failed, but left the group intact, the ranks keep it and only *settle*: their plugins
clean up what the cell has left half-done (`Plugin.settle`). A rank that fails to settle is replaced
as above.

A recovery owns the ranks once it has reserved them. A restart requested meanwhile does not kill
ranks that the recovery is restarting anyway; the recovery replaces the other ranks in its next
generation.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from skymagic.cluster import Node
from skymagic.display.screen import Screen, print_note
from skymagic.errors import PoolError, PoolStateError, RequestError
from skymagic.plan.plans import Plan
from skymagic.plan.units import rank_words
from skymagic.pool import messages, slow_start
from skymagic.pool.dispatch import RankReservation, Scheduler
from skymagic.pool.resources import START_TIMEOUT, PoolResources, devices_environment
from skymagic.pool.status import PoolEvent, SharedStatus, State
from skymagic.run.results import is_connection_error, may_be_connection_error
from skymagic.run.stall import HangWatch
from skymagic.run.state import Limits, Report
from skymagic.run.submission import Submission
from skymagic.wire.order import Rejoin
from skymagic.wire.processes import describe
from skymagic.wire.threads import failures, run_all
from skymagic.wire.typed import JsonObject

logger = logging.getLogger(__name__)

REJOIN_TIMEOUT = 60.0
"""Seconds that live ranks wait for a new group.

A rank that hangs is detected sooner (`run.stall.SignsOfLife.hanging`).
"""
REJOIN_GRACE = 1.0
"""Seconds for ranks to leave a group after another rank failed.

Slow ranks get up to `run.run.MAX_GRACE_EXTENSIONS` more of these periods.
"""
ATTEMPTS = 4
"""Maximum number of attempts to form a group; the last one restarts all ranks."""
TIMEOUT = 120.0
"""Seconds that a restart waits for the ranks."""
LOOK_INTERVAL = 0.5
"""Seconds between two checks for what delays a restart."""
GIVE_UP_TIMEOUT = 10.0
"""Seconds for a recovery to end after its nodes were given up."""


@dataclass(eq=False, repr=False)
class Recovery:
    """Restores a pool's ranks on a background thread, which first reserves all of them."""

    _status: SharedStatus
    _resources: PoolResources
    _scheduler: Scheduler
    """Reserves the ranks; a recovery comes before the runs in the queue."""
    _send: Callable[..., Report]
    """Sends an order to ranks and waits for them (`Dispatch.send`)."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held briefly while the fields below change."""
    _to_replace: set[int] = field(default_factory=set)
    """Ranks to replace: in the current recovery's next generation, or else in the next recovery."""
    _to_form: bool = False
    """True if the next recovery must form the process group again; otherwise ranks only settle."""
    _queued: bool = False
    """True while a recovery waits for its reservation."""
    _restarted: frozenset[int] | None = None
    """Ranks that the current recovery has restarted; None if no recovery is in progress."""
    _thread: threading.Thread | None = None
    _problem: Exception | None = None
    generation: int = 0
    """Number of the latest process group."""
    _infos: Mapping[int, JsonObject] = field(default_factory=dict)
    """New `InstanceInfo` values of live ranks, which they get when they join the next group."""

    def begin(self, dead: Iterable[int], *, form: bool = True) -> None:
        """Start to replace dead ranks and to form the process group again, and return at once.

        Recovery needs all ranks: it starts when current runs are over, and before the runs in the
        queue.

        Args:
            form: False if the group is intact, and the ranks only settle.

        Raises:
            PoolStateError: the pool's state does not allow it.
        """
        self._status.check(PoolEvent.RECOVER)
        dead = sorted(dead)
        logger.info("recovery begins: pool=%s ranks=%s form=%s", self._status.name, dead, form)
        with self._lock:
            self._to_replace.update(dead)
            self._to_form |= form
            self._queue()

    def _queue(self) -> None:
        """Start a thread that recovers once it has all ranks. The caller holds the lock."""
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
        """Start a recovery if a run has failed, or has broken the process group.

        The group is broken if ranks died, left it, were released from a collective, or have started
        different numbers of collectives.
        """
        dead = [
            number
            for number, rank in report.ranks.items()
            if rank.died is not None or (rank.outcome is not None and rank.outcome.gpu_lost)
        ]
        outcomes = [rank.outcome for rank in report.ranks.values() if rank.outcome is not None]
        has_left_group = not all(outcome.joined for outcome in outcomes)
        is_broken = bool(dead) or has_left_group or report.freed or report.out_of_step
        must_settle = not report.succeeded and any(
            plugin.settle is not None for plugin in self._status.plugins
        )
        if (is_broken or must_settle) and self._status.state in (State.READY, State.RUNNING):
            self.begin(dead, form=is_broken)

    def wait(self, timeout: float = TIMEOUT) -> bool:
        """Wait for the latest recovery.

        Return False if none was started, or if it exceeds `timeout` seconds.
        """
        with self._lock:
            thread = self._thread  # it is started: `begin` holds the lock until then
        if thread is None:
            return False
        thread.join(timeout)
        return not thread.is_alive()

    def check(self) -> None:
        """Raise PoolStateError, once, if ranks did not come back. Called before each run."""
        if (problem := self._take_problem()) is not None:
            raise PoolStateError(
                f"pool {self._status.name!r} lost ranks that did not come back: {problem}; try "
                "%sky_restart",
                code="ranks-lost",
            )

    def _take_problem(self) -> Exception | None:
        problem, self._problem = self._problem, None
        return problem

    def restart(self, ranks: Sequence[int] | None) -> None:
        """Restart ranks (by default all of them), and those of machines that can be reached again.

        Raises:
            RequestError: a rank does not exist.
            PoolError: the ranks did not come back.
        """
        world_size = self._status.world_size
        self._status.check(PoolEvent.RECOVER)
        selected = list(range(world_size)) if ranks is None else sorted(set(ranks))
        unknown_ranks = [rank for rank in selected if not 0 <= rank < world_size]
        if unknown_ranks:
            raise RequestError(
                f"pool {self._status.name!r} has ranks 0 to {world_size - 1}, not "
                f"{rank_words(unknown_ranks)}",
                code="no-rank",
                names=map(str, unknown_ranks),
            )
        logger.info("ranks are restarted: pool=%s ranks=%s", self._status.name, selected)
        if slow_start.give_up_slow_nodes(self._resources, selected):
            self.wait(GIVE_UP_TIMEOUT)  # let the recovery notice that its nodes were given up
        is_head_new = 0 in self._resources.agents.gone
        revived = self._resources.revive()
        if is_head_new:  # the other ranks must learn its new port
            self._infos = self._resources.reshape()
        self._replace({*selected, *revived})
        self._wait_until_back()
        self._infos = {}
        if (problem := self._take_problem()) is not None:
            raise PoolError(
                f"the ranks did not come back: {problem}", code="ranks-not-back"
            ) from problem

    def _wait_until_back(self) -> None:
        """Wait for restarted ranks, and show what delays them."""
        deadline, is_shown = time.monotonic() + TIMEOUT, False
        while not self.wait(LOOK_INTERVAL):
            if time.monotonic() >= deadline:
                raise PoolError(
                    f"the ranks have not come back within {TIMEOUT:.0f} s, and are still starting: "
                    "%sky_status shows them",
                    code="ranks-not-back",
                )
            if not is_shown and (text := slow_start.delay_reason(self._resources)):
                is_shown = True
                print_note(f"[{text}]")

    def delay_reason(self) -> str:
        """Return what delays ranks that are restarting, or "" if nothing does for long."""
        recovering = self._status.state is State.RECOVERING
        return slow_start.delay_reason(self._resources) if recovering else ""

    def _replace(self, chosen: Iterable[int]) -> None:
        """Restart ranks and end the runs on them, in the recovery in progress or in a new one."""
        with self._lock:
            ranks = sorted(set(chosen) - (self._restarted or frozenset()))
            self._problem = None
            # No recovery starts one of these ranks while the lock is held, so the signal hits only
            # the current processes.
            self._resources.agents.signal(ranks, signal.SIGKILL)
            self._to_replace.update(ranks)
            if self._restarted is None:
                self._to_form = True
                self._queue()

    def replace_nodes(self, machines: Mapping[int, Node]) -> None:
        """Replace lost machines with others, restart their ranks, and form a new process group.

        Raises:
            ProvisionError: a machine cannot be reached.
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
                raise PoolError(
                    f"the ranks did not come back: {problem}", code="ranks-not-back"
                ) from problem
        finally:
            self._infos = {}

    def resize(self, plan: Plan) -> str:
        """Resize a local pool: start or end ranks, and form a new group of all ranks.

        Waits until the current runs are over.

        Returns:
            What happened to the ranks' variables, in a line.

        Raises:
            PoolStateError: the pool's state does not allow it.
            PoolError: the ranks did not start.
        """
        self._status.check(PoolEvent.RECOVER)
        before, after = self._status.world_size, plan.topology.world_size
        remaining = range(min(before, after))
        # a process cannot switch to other GPUs once it has opened some
        has_other_gpus = any(
            devices_environment(self._status.plan, rank) != devices_environment(plan, rank)
            or self._status.plan.devices_of(rank) != plan.devices_of(rank)
            for rank in remaining
        )
        # The wait may be interrupted. The work may not: it continues on its thread if the user
        # stops waiting for it.
        reservation = self._scheduler.request(range(max(before, after)))
        self._scheduler.acquire(reservation)
        logger.info("pool is resized: pool=%s ranks=%s", self._status.name, after)

        def work() -> None:
            try:
                self.check()
                self._status.plan = plan
                self._infos = self._resources.reshape()
                self._recover(
                    list(range(0 if has_other_gpus or self._status.inseparable else before, after))
                )
                if (problem := self._take_problem()) is not None:
                    raise PoolError(
                        f"the ranks did not come up: {problem}", code="ranks-not-back"
                    ) from problem
            finally:
                self._infos = {}
                self._scheduler.release(reservation)

        for problem in failures(run_all([work], name="skymagic-resize")):
            raise problem
        return messages.variables_then(before, after, self._status.inseparable, has_other_gpus)

    # -- on the recovery thread -------------------------------------------------------------------

    def _recover_when_free(self, reservation: RankReservation) -> None:
        with reservation:
            with self._lock:
                form, self._to_form, self._queued, self._restarted = (
                    self._to_form,
                    False,
                    False,
                    frozenset(),
                )
            self._recover((), form=form)

    def _recover(self, dead: Iterable[int], *, form: bool = True) -> None:
        try:
            self._status.move(PoolEvent.RECOVER)
            is_settled = (
                not form and self._rejoin(range(self._status.world_size), form=False) is None
            )
            # Settling is not enough if a restart has asked for ranks meanwhile.
            if not (is_settled and self._end_unless_requested()):
                self._bring_back(dead)
        except Exception as problem:
            logger.warning(
                "recovery failed: pool=%s error=%s", self._status.name, type(problem).__name__
            )
            self._restarted = None
            self._problem = problem
            agents = self._resources.agents
            is_lost = len(agents.gone) == len(agents.nodes)
            self._status.move(PoolEvent.LOSE if is_lost else PoolEvent.DEGRADE)
        else:
            self._status.move(PoolEvent.RECOVERED)

    def _bring_back(self, dead: Iterable[int]) -> None:
        """Replace the dead ranks, and ranks that fail to join, and form a new group of all ranks.

        Raises PoolError if even restarted ranks alone cannot form a group.
        """
        everyone = set(range(self._status.world_size))
        replaced, attempt = set(dead), 0
        while attempt < ATTEMPTS:
            with self._lock:
                replaced |= self._to_replace
                if replaced and self._status.inseparable:
                    replaced = set(everyone)
                self._to_replace, self._restarted = set(), frozenset(replaced)
            self.generation += 1
            logger.info(
                "ranks are replaced: pool=%s ranks=%s generation=%s attempt=%s",
                self._status.name,
                sorted(replaced),
                self.generation,
                attempt,
            )
            self._resources.forget(sorted(replaced))
            self._resources.agents.respawn(sorted(replaced), self.generation)
            problems = self._rejoin(sorted(everyone - replaced))
            if problems is None:
                self._resources.agents.wait_ready(START_TIMEOUT, sorted(replaced))
                if self._end_unless_requested():
                    return
            if self._to_replace:  # a restart killed ranks, so they are not at fault
                continue
            attempt += 1
            is_last = attempt + 1 >= ATTEMPTS or self._status.inseparable
            faulty = {*problems} if problems and not is_last else everyone
            self._status.note(
                messages.replaced_words(problems or {}, faulty, self._status.world_size)
            )
            replaced |= faulty
        raise PoolError(
            f"the ranks of pool {self._status.name!r} did not come back", code="ranks-not-back"
        )

    def _end_unless_requested(self) -> bool:
        """End this recovery unless a restart has asked for more ranks; return whether it ended.

        A restart that comes later starts another recovery.
        """
        with self._lock:
            if not self._to_replace:
                self._restarted = None
            return not self._to_replace

    def _rejoin(self, alive: Sequence[int], *, form: bool = True) -> dict[int, str] | None:
        """Let live ranks form a new group, or settle in the one that they have.

        Returns:
            None on success, else the ranks at fault with their errors.
        """
        if not alive:
            return None
        # ranks that are being replaced join the group too, as part of their start
        everyone = tuple(range(self._status.world_size))
        order = Rejoin(ranks=everyone, generation=self.generation, form=form, infos=self._infos)
        limits = Limits(
            timeout=REJOIN_TIMEOUT, grace=REJOIN_GRACE, interrupt_grace=0.0, silent_may_leave=True
        )
        submission = Submission(alive)
        starting = {*everyone} - {*alive} if form else ()
        with HangWatch(self._resources.agents, submission.pending, starting) as watch:
            report = self._send(submission, order, "", Screen(), limits)
        if not report.succeeded:
            problems = at_fault(report, watch.problems)
            logger.warning(
                "process groups not formed: pool=%s generation=%s ranks=%s",
                self._status.name,
                self.generation,
                sorted(problems),
            )
            return problems
        logger.debug(
            "process groups are formed: pool=%s generation=%s", self._status.name, self.generation
        )
        for rank in report.ranks.values():
            for note in rank.outcome.notes if rank.outcome is not None else ():
                self._status.note(note)
        return None


def at_fault(report: Report, hung: Mapping[int, str]) -> dict[int, str]:
    """Return the ranks that could not form a group through their own fault, with their errors.

    Most failures are only consequences: a rank that waited for a faulty one was released, or had
    lost its connection to it before (torch words this in many ways). At fault are the ranks that
    died, that raised any other error, or that had to be killed because releasing them did not end
    their wait. If no rank is among these, the suspects are returned: ranks whose error has a type
    that may mean a lost connection, but a text that does not say so.

    Args:
        hung: ranks that were killed because they hung or could not start, with the reasons.
    """
    causes = {rank: why for rank, why in hung.items() if rank not in report.ranks}
    suspects = {}
    for number, rank in report.ranks.items():
        failure = rank.failure
        if rank.died is not None:
            reason = (
                f"no answer within {REJOIN_TIMEOUT:.0f} s" if rank.killed else describe(rank.died)
            )
            causes[number] = hung.get(number, reason)
        elif failure is not None and not failure.freed:
            problem = f"{failure.ename}: {failure.evalue}"
            if not may_be_connection_error(failure.ename):
                causes[number] = problem
            elif not is_connection_error(failure.ename, failure.evalue):
                suspects[number] = problem
    return causes or suspects
