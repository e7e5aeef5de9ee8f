"""Runs on a pool: reserve the ranks, ship what the cell needs, carry it out, and recover what broke.

Other orders to ranks, such as the commands of a debugger and copies of names, go the same way. A notebook that takes a pool up in the place of
another one is told of the runs that it has left."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from skymagic.cluster import Agents, Node
from skymagic.data.capture.imports import ModulesNeeded
from skymagic.display.screen import Screen, ShippingProgress, print_note
from skymagic.display.text import places
from skymagic.errors import PoolError, PoolStateError, ProvisionError, RunInterrupted
from skymagic.plan.units import agreeing, count, rank_words
from skymagic.pool import messages
from skymagic.pool.dispatch import Dispatch, RankReservation, Scheduler
from skymagic.pool.keys import PoolKey
from skymagic.pool.losses import Replacement
from skymagic.pool.packages import Packages
from skymagic.pool.recovery import Recovery
from skymagic.pool.resources import PoolResources
from skymagic.pool.status import PoolEvent, SharedStatus, State
from skymagic.run import interrupt
from skymagic.run.interrupt import StopSignal
from skymagic.run.metrics import Metrics, kept
from skymagic.run.report import Limits, Report, RunSpec
from skymagic.run.submission import Submission
from skymagic.wire.order import Order, RunCell
from skymagic.wire.session.frames import REPLACED

if TYPE_CHECKING:
    from skymagic.data.shipping.shipper import Manifest

MOST_NUMBERS = 10_000_000
"""Doubles of reports that a pool holds."""
STOPPED_WAITING = "stopped before it began"
RECALL_TIMEOUT = 20.0
"""Seconds in which ranks tell of their last runs."""


@dataclass(eq=False, repr=False)
class PoolRuns:
    """Runs of cells on the pool's ranks, counted while they are under way."""

    _status: SharedStatus
    _resources: PoolResources
    _dispatch: Dispatch
    _scheduler: Scheduler
    _recovery: Recovery
    _packages: Packages
    _replacement: Replacement
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers of the runs to come."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held for moments, while what follows is changed."""
    _running: int = 0
    """Runs that have begun and not ended."""
    count: int = 0
    """Runs that have begun since the pool was made."""
    reported: list[Metrics] = field(default_factory=list)
    """What runs have reported, in the order in which they began."""

    def run(self, spec: RunSpec, screen: Screen, limits: Limits, stop: StopSignal) -> Report:
        """Ship what the run needs, carry it out, and recover what broke; waits for its ranks first.

        Raises:
            CaptureError: names that cannot travel; nothing has run.
            PoolStateError: the pool is stopped or lost.
            PoolError: the pool was ended meanwhile.
            RunInterrupted: it was stopped before it began.
        """
        if self._status.closed is not None:
            if self._status.ended is not None:
                self._status.check_ended()
            raise self._status.missing()
        bindings = self._resources.shipper.bindings
        if self._replacement.lost:
            self._replacement.wait(
                spec.ranks, self._may_wait(stop), lambda text: screen.note(f"[{text}]\n")
            )
        with self._ends_with_pool(), self._reservation(spec, stop, screen):
            self.check(spec.ranks)
            for note in self._status.take_notes():
                screen.note(f"[{note}]\n")
            with self.counted():
                begun = time.monotonic()
                manifest = self._prepare(spec, screen, stop)
                spec.taken()
                ship_seconds = time.monotonic() - begun
                # those of the store, on where the values went, are shown with the cell that sent them
                instead = (
                    messages.sent_instead(manifest, bindings, spec.ranks)
                    if bindings.replaced
                    else []
                )
                for note in [*self._status.take_notes(), *instead]:
                    screen.note(f"[{note}]\n")
                report = self._carry_out(spec, manifest, screen, limits, stop)
                report.shipped, report.ship_seconds = manifest.nbytes, ship_seconds
            if not report.good:
                report.notes += messages.missing_names(report, bindings, spec.source_without_magics)
            # nobody waits for it: the error is shown, and the next run waits, and tells what recovery has found out
            self._recovery.begin_after(report)
        return report

    def follow(
        self, spec: RunSpec, run: int, screen: Screen, limits: Limits, stop: StopSignal
    ) -> Report:
        """Show what a run that another notebook began has not shown there, and what follows; wait for its ranks."""
        with self._ends_with_pool(), self._reservation(spec, stop, screen), self.counted():
            submission = Submission(spec.ranks, run, self._metrics(spec))
            stop.attach(submission)
            with interrupt.deferred() as interrupts, interrupts.sent_to(submission):
                report = self._dispatch.follow(submission, screen, limits)
        # not before the run counts as over: only then is it known that the pool goes on without a machine, whose ranks nobody starts
        self._recovery.begin_after(report)
        return report

    def _reservation(self, spec: RunSpec, stop: StopSignal, screen: Screen) -> RankReservation:
        """The run's place in the queue; one that is stopped leaves it."""
        may_wait, told = self._may_wait(stop), False

        def check() -> None:
            nonlocal told
            may_wait()
            if not told and (text := self._recovery.slow()):
                told = True
                screen.note(f"[{text}]\n")

        reservation = self._scheduler.request(spec.ranks)
        reservation.run, reservation.check = spec, check
        reservation.on_wait = lambda others: _tell(
            spec, [one.run for one in others if one.run is not None]
        )
        return reservation

    def _may_wait(self, stop: StopSignal) -> Callable[[], None]:
        """Return what raises once a run that waits was stopped, or its pool was ended."""

        def check() -> None:
            if stop.sent:
                raise RunInterrupted(STOPPED_WAITING)
            self._status.check_ended()

        return check

    @contextlib.contextmanager
    def _ends_with_pool(self) -> Iterator[None]:
        """Raise PoolError for whatever fails inside because the pool was ended meanwhile: a store or an engine that is closed,
        a state that allows nothing any more."""
        try:
            yield
        except RunInterrupted:
            raise
        except Exception as problem:
            if self._status.closed is None:
                raise
            raise PoolError(self._status.closed) from problem

    def under_way(self) -> list[RunSpec]:
        """Runs that have their ranks, then those that wait for them."""
        return self._scheduler.runs()

    def check(self, ranks: Sequence[int]) -> None:
        """Raises PoolStateError if something cannot run on these ranks now."""
        self._status.check_ended()
        self._recovery.check()
        self._check_present(ranks)

    def order(self, ranks: Sequence[int], order: Order, screen: Screen | None = None) -> Report:
        """Have ranks carry out an order that is no cell; the caller has reserved them, and counts it.

        Args:
            screen: shows what it prints; nothing does unless said.
        """
        submission = Submission(ranks)
        limits = Limits(grace=self._status.defaults.grace)
        with interrupt.deferred() as interrupts, interrupts.sent_to(submission):
            return self._dispatch.send(submission, order, "", screen or Screen(), limits)

    def preview(self, spec: RunSpec) -> Manifest:
        """What a run would ship; nothing is written or sent."""
        return self._prepare(spec, Screen(), StopSignal(), dry_run=True)

    def _check_present(self, ranks: Sequence[int]) -> None:
        """Raises PoolStateError if the pool has released or lost some of these ranks."""
        status = self._status
        if max(ranks, default=0) >= status.world_size:
            raise PoolStateError(
                f"pool {status.name!r} has {count(status.world_size, 'rank')} by now, and the cell was for "
                f"{rank_words(list(ranks))}: run it again"
            )
        agents = self._resources.agents
        if status.state is State.LOST:
            raise PoolStateError(f"{'; '.join(agents.gone.values())}; {messages.lost(status.name)}")
        if status.state is not State.DEGRADED:
            return
        lost = [rank for rank, state in agents.ranks.items() if not state.ready]
        if {*ranks} & {*lost}:
            reasons = "; ".join(agents.gone.values()) or "they did not come back"
            gone = f"{rank_words(lost)} {agreeing(len(lost), 'is', 'are')} gone"
            ways = messages.ways_without(lost, status.world_size)
            raise PoolStateError("\n".join([f"{gone} ({reasons})", *ways]))

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """The pool is running while there is a run: the first one moves its state, and the last one."""
        with self._lock:
            if self._status.state is not State.RUNNING:
                self._status.move(PoolEvent.RUN)
            self._running += 1
            self.count += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._status.move(PoolEvent.DONE)
                    if self._resources.agents.gone:
                        self._status.move(PoolEvent.DEGRADE)

    def _prepare(
        self, spec: RunSpec, screen: Screen, stop: StopSignal, *, dry_run: bool = False
    ) -> Manifest:
        """What the run needs on its ranks, written into the store; what packages it needs, the nodes get before."""
        while True:
            try:
                return self._prepare_once(spec, screen, dry_run=dry_run)
            except ModulesNeeded as needed:
                self._packages.settle(needed, screen, lambda: stop.sent > 0)

    def _prepare_once(self, spec: RunSpec, screen: Screen, *, dry_run: bool = False) -> Manifest:
        """One attempt of `_prepare`; raises ModulesNeeded where packages are missing, and shows a line when it takes long."""
        progress = ShippingProgress(screen)

        def note(said: str) -> None:
            screen.note(f"[{said}]\n")

        with progress:
            return self._resources.shipper.prepare(
                spec.source_without_magics, spec.ranks, push=spec.push, gather=spec.gather, no_push=spec.no_push, fresh=spec.fresh,
                extra=spec.extra, compiler_flags=spec.compiler_flags, dry_run=dry_run, progress=progress, warn=note, note=note,
                unsettled=self._packages.unsettled if self._status.plan.remote else None,
            )  # fmt: skip

    def _carry_out(
        self, spec: RunSpec, manifest: Manifest, screen: Screen, limits: Limits, stop: StopSignal
    ) -> Report:
        defaults = self._status.defaults
        order = RunCell(
            run=next(self.numbers), manifest=manifest.orders, ranks=spec.ranks, visible_ranks=spec.visible_ranks,
            gather=spec.gather, gather_ranks=spec.gather_ranks, value_ranks=spec.value_ranks, profile=spec.profile,
            execution_count=spec.execution_count, compiler_flags=spec.compiler_flags, job=spec.job, output=spec.output,
            head=spec.head, screen_limit=defaults.screen_limit,
        )  # fmt: skip
        if stop.sent:
            raise RunInterrupted(STOPPED_WAITING)
        submission = Submission(spec.ranks, order.run, self._metrics(spec))
        stop.attach(submission)
        with interrupt.deferred() as interrupts, interrupts.sent_to(submission):
            report = self._dispatch.send(submission, order, spec.source, screen, limits)
        shipper = self._resources.shipper
        for number, rank in report.ranks.items():
            outcome = rank.outcome or {}
            if outcome.get("bound"):
                completed = outcome["status"] == "ok"
                shipper.bound(
                    manifest, number, outcome["rebound"], outcome["deleted"], completed=completed
                )
            shipper.gone(number, outcome.get("unlinked", ()), outcome.get("lost", ()))
            if "reads" in outcome:
                shipper.reads(number, **outcome["reads"])
        return report

    def _metrics(self, spec: RunSpec) -> Metrics:
        """Where the numbers go that this run will report: into the pool's, of which the oldest are forgotten when there are too many."""
        made = Metrics(spec.execution_count)
        with self._lock:
            self.reported = [*kept(self.reported, MOST_NUMBERS), made]
        return made


def _tell(spec: RunSpec, before: Sequence[RunSpec]) -> None:
    """Say for which other cells a run waits. Raises PoolStateError for a run that does not wait."""
    others = {
        other.execution_count: other
        for other in before
        if other.execution_count != spec.execution_count
    }
    if others and not spec.waits:
        raise PoolStateError("; ".join(_busy(number, other) for number, other in others.items()))
    spec.taken()
    for number, other in others.items():
        remedy = (
            f"; to stop that one, stop this cell, then Out[{number}].cancel()"
            if other.beside
            else ""
        )
        print_note(f"[waits for cell {number} on {rank_words(other.ranks)}{remedy}]")


def _busy(number: int, other: RunSpec) -> str:
    """Why a run is refused that does not wait."""
    remedy = (
        f": Out[{number}].cancel() stops it, Out[{number}].wait() waits for it"
        if other.beside
        else ""
    )
    return f"cell {number} is running on {rank_words(other.ranks)}{remedy}"


# -- of another notebook ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnfinishedRun:
    """A run that another notebook began, and whose end its user has not seen.

    Attributes:
        run: the pool's number of it.
        over: whether all of its ranks have ended it.
    """

    run: int
    spec: RunSpec
    over: bool

    @property
    def words(self) -> str:
        """Which run it is, and whether it still runs: "[cell 11 on ranks 0, 1 is still running]"."""
        cell = f"cell {self.spec.execution_count} on {rank_words(self.spec.ranks)}"
        return f"[{cell} {'had ended' if self.over else 'is still running'}]"


@dataclass(eq=False, repr=False)
class Attaching:
    """Takeover of a pool as another notebook has left it."""

    _status: SharedStatus
    _resources: PoolResources
    _recovery: Recovery
    _runs: PoolRuns
    _node_lost: Callable[[int, str], None]
    """Called with a node that is gone, and why."""

    def attach(
        self, nodes: Sequence[Node], connect: Callable[[Sequence[Node]], Agents], key: PoolKey
    ) -> list[UnfinishedRun]:
        """Take it up; the runs that its user has to hear of, the oldest first. After a failure all is as before.

        Nodes other than the head may be gone: their ranks are lost.

        Raises:
            ProvisionError: the head is gone, a node does not answer, or another notebook attaches too.
        """
        met = [
            replace(node, address=address, hostname=hostname)
            for node, (address, hostname) in zip(nodes, key.addresses, strict=True)
        ]
        self._status.move(PoolEvent.START)
        try:
            dead = self._resources.attach(met, connect, key.port)
            agents = self._resources.agents
            kept = agents.ask(range(self._status.world_size), "recall", RECALL_TIMEOUT)
            if refusals := [
                reason for index, reason in agents.gone.items() if index == 0 or REPLACED in reason
            ]:
                raise ProvisionError(refusals[0])
        except BaseException as problem:
            self._resources.leave()
            self._status.move(PoolEvent.STOPPED)
            if isinstance(problem, ProvisionError) and self._head_lost():
                raise ProvisionError(
                    f"{problem}; {messages.headless(self._status.job_id, [one.name for one in met[1:]], not self._status.plan.region)}"
                ) from problem
            raise
        self._status.move(PoolEvent.STARTED)
        gone = {rank for index in agents.gone for rank in agents.ranks_of(index)}
        for index, reason in sorted(agents.gone.items()):
            self._node_lost(index, reason)
        found = [
            one
            for one in unfinished_runs(kept)
            if not (one.over and self._status.shown.delivered(one.run, one.spec.ranks))
        ]
        for text in interrupted_runs(kept, {one.run for one in found}):
            self._status.note(text)
        self._runs.numbers = itertools.count(1 + max(map(_number, kept.values()), default=0))
        self._recovery.generation = max((one["generation"] for one in kept.values()), default=0)
        followed = {
            rank for one in found for rank in one.spec.ranks
        }  # their deaths are the runs' to tell
        if lost := sorted({*dead} - followed - gone):
            self._status.note(
                f"{rank_words(lost)} had died; {agreeing(len(lost), 'it is', 'they are')} restarted without variables"
            )
            self._recovery.begin(lost)
        return found

    def _head_lost(self) -> bool:
        gone = self._resources.agents.gone if self._resources.started else {}
        return 0 in gone and not any(REPLACED in reason for reason in gone.values())


def unfinished_runs(kept: Mapping[int, Mapping[str, Any]]) -> list[UnfinishedRun]:
    """The last runs of these ranks, the oldest first; pure.

    Args:
        kept: rank → what it has kept: ``order``, ``outcome``.
    """
    orders = {_number(one): one["order"] for one in kept.values() if one["order"]}
    found = []
    for run, order in sorted(orders.items()):
        if any(_number(kept[rank]) > run for rank in order["ranks"] if rank in kept):
            continue  # one of its ranks has begun another: its user had seen its end
        outcomes = [one["outcome"] for one in kept.values() if _number(one) == run]
        found.append(
            UnfinishedRun(run, _spec_of(order), all(outcome is not None for outcome in outcomes))
        )
    return found


def interrupted_runs(kept: Mapping[int, Mapping[str, Any]], followed: Collection[int]) -> list[str]:
    """A line for each of the ranks' last runs that was interrupted and whose end was shown: which cell, when, and where.

    A front end may interrupt a cell before it restarts the kernel: the next notebook would only find that its variables are
    not there.

    Args:
        kept: as of `unfinished_runs`.
        followed: runs that tell their end themselves.
    """
    ranks: dict[int, list[int]] = {}
    for rank, one in sorted(kept.items()):
        if one["order"] and (one["outcome"] or {}).get("interrupted"):
            ranks.setdefault(_number(one), []).append(rank)
    return [
        _interrupted(kept[where[0]], where, {rank: kept[rank]["outcome"] for rank in where})
        for run, where in sorted(ranks.items())
        if run not in followed
    ]


def _interrupted(
    one: Mapping[str, Any], ranks: list[int], outcomes: Mapping[int, Mapping[str, Any]]
) -> str:
    order = one["order"]
    when = time.strftime("%H:%M:%S", time.localtime(one.get("ended_at", 0.0)))
    step = f", after step {one['step']:g}" if one.get("step") is not None else ""
    at = places({rank: outcome.get("stopped_at") or () for rank, outcome in outcomes.items()})
    names = [name for name in (order["output"], *order["gather"]) if name]
    unset = f": {', '.join(names)} {agreeing(len(names), 'was', 'were')} not set" if names else ""
    where = f" ({at})" if at else ""
    return f"cell {order['execution_count']} on {rank_words(ranks)} was interrupted at {when}{step}{where}{unset}"


def _number(kept: Mapping[str, Any]) -> int:
    return int(kept["order"]["run"]) if kept["order"] else 0


def _spec_of(order: Mapping[str, Any]) -> RunSpec:
    """What a rank remembers of a run; the text of the cell is not among it."""
    return RunSpec(
        source="", source_without_magics="", ranks=tuple(order["ranks"]), visible_ranks=tuple(order["visible_ranks"]),
        value_ranks=tuple(order["value_ranks"]), gather=tuple(order["gather"]), gather_ranks=tuple(order["gather_ranks"]),
        execution_count=order["execution_count"], job=order["job"], output=order["output"], head=order["head"],
    )  # fmt: skip
