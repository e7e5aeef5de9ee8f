"""Runs on a pool: reserve the ranks, ship what the cell needs, execute it, recover from failures.

Other orders to ranks, such as a debugger's commands and copies of names, take the same path. A
notebook that takes over a pool also gets the runs that the previous notebook left.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from skymagic.cluster import Agents, Node
from skymagic.data.capture.imports import ModulesNeeded
from skymagic.display.screen import Screen, ShippingProgress, print_note
from skymagic.display.text import positions
from skymagic.errors import PoolError, PoolStateError, ProvisionError, RunInterrupted
from skymagic.plan.units import count, rank_words, verb_form
from skymagic.pool import messages
from skymagic.pool.dispatch import Dispatch, RankReservation, Scheduler
from skymagic.pool.failures import Replacement
from skymagic.pool.keys import PoolKey
from skymagic.pool.packages import Packages
from skymagic.pool.recovery import Recovery
from skymagic.pool.resources import PoolResources
from skymagic.pool.status import PoolEvent, SharedStatus, State
from skymagic.run import interrupt
from skymagic.run.interrupt import StopSignal
from skymagic.run.metrics import Metrics, newest_within
from skymagic.run.state import Limits, Report, RunSpec
from skymagic.run.submission import Submission, request_of_run
from skymagic.wire import debug_log
from skymagic.wire.order import LONGEST_SOURCE, SOURCE_NAME, Order
from skymagic.wire.outcome import RECALL, Recollection
from skymagic.wire.session.frames import REPLACED

if TYPE_CHECKING:
    from skymagic.data.shipping.shipper import Manifest

logger = logging.getLogger(__name__)

MOST_NUMBERS = 10_000_000
"""Maximum number of reported doubles that a pool holds."""
STOPPED_WAITING = "stopped before it began"
RECALL_TIMEOUT = 20.0
"""Seconds for ranks to report their last runs."""


@dataclass(eq=False, repr=False)
class PoolRuns:
    """Runs of cells on the pool's ranks, counted while they execute."""

    _status: SharedStatus
    _resources: PoolResources
    _dispatch: Dispatch
    _scheduler: Scheduler
    _recovery: Recovery
    _packages: Packages
    _replacement: Replacement
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers of future runs."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held briefly while the fields below change."""
    _running: int = 0
    """Number of runs in progress."""
    count: int = 0
    """Number of runs since the pool was made."""
    reported: list[Metrics] = field(default_factory=list)
    """Metrics of the runs, the oldest run first."""

    def run(self, spec: RunSpec, screen: Screen, limits: Limits, stop: StopSignal) -> Report:
        """Wait for the ranks, ship what the run needs, execute it, and recover from failures.

        Recovery may still be in progress when this returns.

        Raises:
            CaptureError: names cannot be shipped; nothing has run.
            PoolStateError: the pool is stopped or lost.
            PoolError: the pool was ended in the meantime.
            RunInterrupted: the run was stopped before it began.
        """
        # checked here once more: another thread may have ended the pool since the cell was parsed
        if self._status.closed is not None:
            if self._status.ended is not None:
                self._status.check_ended()
            raise self._status.missing()
        bindings = self._resources.shipper.bindings
        # before the reservation: runs on other ranks must not queue up behind this wait, which
        # takes as long as the provider needs for a machine
        if self._replacement.lost:
            self._replacement.wait(
                spec.ranks, self._may_wait(stop), lambda text: screen.note(f"[{text}]\n")
            )
        with self._ends_with_pool(), self._reservation(spec, stop, screen):
            # only now: while the run waited for its ranks, some of them may have died or been
            # released
            self.check(spec.ranks)
            for note in self._status.take_notes():
                screen.note(f"[{note}]\n")
            with self.count_run():
                started = time.monotonic()
                if self._status.plan.remote and len(spec.source) > LONGEST_SOURCE:
                    extra = {**spec.extra, SOURCE_NAME: spec.source}
                    spec = replace(spec, source="", extra=extra)
                manifest = self._prepare(spec, screen, stop)
                # the values are in the store: a notebook that runs a cell in the background may
                # change its variables from here on
                spec.taken()
                ship_seconds = time.monotonic() - started
                # The store's notes on where values went belong to the cell that sent the values.
                replaced_notes = (
                    messages.replaced_value_warnings(
                        manifest, bindings, spec.ranks, self._resources.shipper.namespace
                    )
                    if bindings.replaced
                    else []
                )
                for note in [*self._status.take_notes(), *replaced_notes]:
                    screen.note(f"[{note}]\n")
                report = self._carry_out(spec, manifest, screen, limits, stop)
                report.shipped, report.ship_seconds = manifest.nbytes, ship_seconds
            if not report.succeeded:
                report.notes += messages.missing_names(report, bindings, spec.source_without_magics)
            # Return without waiting for the recovery: the error is shown now, and the next run
            # waits and shows what the recovery has found.
            self._recovery.begin_after(report)
        return report

    def follow(
        self, spec: RunSpec, run: int, screen: Screen, limits: Limits, stop: StopSignal
    ) -> Report:
        """Show what another notebook has not shown of its run, and wait for the run's ranks."""
        logger.info("run is followed: pool=%s run=%s", self._status.name, run)
        with self._ends_with_pool(), self._reservation(spec, stop, screen), self.count_run():
            submission = Submission(spec.ranks, run, self._metrics(spec))
            stop.attach(submission)
            with interrupt.deferred() as interrupts, interrupts.sent_to(submission):
                report = self._dispatch.follow(submission, screen, limits)
        # Not before the run counts as over: only then is it known whether the pool continues
        # without a machine, whose ranks are not restarted.
        self._recovery.begin_after(report)
        return report

    def deliver(self, run: int, ranks: Iterable[int]) -> None:
        """Record that the user has the values or the error of a run, for the next notebook.

        Output that is still on its way to the screen no longer matters.
        """
        # Pools that end with their notebook have no next one, and cells on them no further message.
        if self._status.plan.outlives and self._resources.has_agents:
            self._resources.agents.deliver(request_of_run(run), ranks)

    def _reservation(self, spec: RunSpec, stop: StopSignal, screen: Screen) -> RankReservation:
        """Queue the run for its ranks; stopping the run removes it from the queue."""
        may_wait, is_shown = self._may_wait(stop), False

        # called again and again while the run waits, so that the note appears during a long wait
        def check() -> None:
            nonlocal is_shown
            may_wait()
            if not is_shown and (text := self._recovery.delay_reason()):
                is_shown = True
                screen.note(f"[{text}]\n")

        reservation = self._scheduler.request(spec.ranks)
        reservation.run, reservation.check = spec, check
        reservation.on_wait = lambda other_runs: _note_waiting(
            spec,
            [
                reservation_before.run
                for reservation_before in other_runs
                if reservation_before.run is not None
            ],
        )
        return reservation

    def _may_wait(self, stop: StopSignal) -> Callable[[], None]:
        """Return a function that raises once a waiting run was stopped, or its pool was ended."""

        def check() -> None:
            if stop.sent:
                raise RunInterrupted(STOPPED_WAITING)
            self._status.check_ended()

        return check

    @contextlib.contextmanager
    def _ends_with_pool(self) -> Iterator[None]:
        """Turn errors inside the block into PoolError if the pool was ended meanwhile.

        Such errors come from a closed store, or from a state that allows nothing any
        more.
        """
        try:
            yield
        # the user stopped the run, which is what they must read
        except RunInterrupted:
            raise
        except Exception as problem:
            if self._status.closed is None:
                raise
            raise PoolError(
                self._status.closed, code="pool-closed", names=[self._status.name]
            ) from problem

    def active_runs(self) -> list[RunSpec]:
        """List the runs that hold their ranks, then the runs that wait for them."""
        return self._scheduler.runs()

    def check(self, ranks: Sequence[int]) -> None:
        """Raise PoolStateError if nothing can run on these ranks now."""
        self._status.check_ended()
        self._recovery.check()
        self._check_present(ranks)

    def order(self, ranks: Sequence[int], order: Order, screen: Screen | None = None) -> Report:
        """Send ranks an order that is not a cell.

        The caller has reserved the ranks and counts the order.

        Args:
            screen: shows the output; nothing is shown by default.
        """
        submission = Submission(ranks)
        limits = Limits(grace=self._status.defaults.grace)
        with interrupt.deferred() as interrupts, interrupts.sent_to(submission):
            return self._dispatch.send(submission, order, "", screen or Screen(), limits)

    def preview(self, spec: RunSpec) -> Manifest:
        """Return what a run would ship; nothing is written or sent."""
        return self._prepare(spec, Screen(), StopSignal(), dry_run=True)

    def _check_present(self, ranks: Sequence[int]) -> None:
        """Raise PoolStateError if the pool has released or lost some of these ranks."""
        status = self._status
        # the pool was resized while the run waited, or between a call's definition and its run
        if max(ranks, default=0) >= status.world_size:
            raise PoolStateError(
                f"pool {status.name!r} has {count(status.world_size, 'rank')} by now, and the cell "
                "was for "
                f"{rank_words(list(ranks))}: run it again",
                code="world-changed",
                names=[status.name],
            )
        agents = self._resources.agents
        if status.state is State.LOST:
            raise PoolStateError(
                f"{'; '.join(agents.gone.values())}; {messages.suggest_after_loss(status.name)}",
                code="node-lost",
                names=[status.name],
            )
        if status.state is not State.DEGRADED:
            return
        lost = [rank for rank, state in agents.ranks.items() if not state.ready]
        if {*ranks} & {*lost}:
            reasons = "; ".join(agents.gone.values()) or "they did not come back"
            loss = f"{rank_words(lost)} {verb_form(len(lost), 'is', 'are')} gone"
            remedies = messages.suggestions_without_ranks(lost, status.world_size)
            raise PoolStateError(
                "\n".join([f"{loss} ({reasons})", *remedies]),
                code="ranks-lost",
                names=[status.name],
            )

    @contextlib.contextmanager
    def count_run(self) -> Iterator[None]:
        """Count a run for the duration of the block; the pool is "running" while there is any."""
        # Runs on disjoint ranks overlap: the first one moves the pool to "running", the last one
        # moves it back.
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
                    # DONE leads to "ready", but a pool that goes on without a machine is degraded
                    if self._resources.agents.gone:
                        self._status.move(PoolEvent.DEGRADE)

    def _prepare(
        self, spec: RunSpec, screen: Screen, stop: StopSignal, *, dry_run: bool = False
    ) -> Manifest:
        """Write what the run needs on its ranks into the store.

        Before that, the nodes get the packages that the run needs.
        """
        # Which modules a cell needs is known only once its functions were found, and a package that
        # was installed may need further ones. Each round settles the modules that it names, so it
        # ends.
        while True:
            try:
                return self._prepare_once(spec, screen, dry_run=dry_run)
            except ModulesNeeded as needed:
                self._packages.settle(needed, screen, lambda: stop.sent > 0)

    def _prepare_once(self, spec: RunSpec, screen: Screen, *, dry_run: bool = False) -> Manifest:
        """Make one attempt at `_prepare`, with a progress line if it takes long.

        Raises ModulesNeeded if packages are missing.
        """
        progress = ShippingProgress(screen)

        def note(text: str) -> None:
            screen.note(f"[{text}]\n")

        with progress:
            return self._resources.shipper.prepare(
                spec.source_without_magics,
                spec.ranks,
                push=spec.push,
                gather=spec.order.gather,
                no_push=spec.no_push,
                fresh=spec.fresh,
                extra=spec.extra,
                compiler_flags=spec.order.compiler_flags,
                dry_run=dry_run,
                progress=progress,
                warn=note,
                note=note,
                unsettled=self._packages.unsettled if self._status.plan.remote else None,
            )

    def _carry_out(
        self, spec: RunSpec, manifest: Manifest, screen: Screen, limits: Limits, stop: StopSignal
    ) -> Report:
        order = replace(
            spec.order,
            run=next(self.numbers),
            manifest=manifest.orders,
            screen_limit=self._status.defaults.screen_limit,
        )
        # a stop during the shipping; from `attach` on, the submission receives it
        if stop.sent:
            raise RunInterrupted(STOPPED_WAITING)
        submission = Submission(spec.ranks, order.run, self._metrics(spec))
        stop.attach(submission)
        debug_log.protect()  # an earlier cell of the notebook may have configured logging
        logger.info(
            "run begins: pool=%s run=%s cell=%s ranks=%s job=%s bytes=%s",
            self._status.name,
            order.run,
            order.execution_count,
            list(order.ranks),
            order.job,
            manifest.nbytes,
        )
        with interrupt.deferred() as interrupts, interrupts.sent_to(submission):
            report = self._dispatch.send(submission, order, spec.source, screen, limits)
        logger.info(
            "run ends: pool=%s run=%s good=%s interrupted=%s timed_out=%s freed=%s died=%s",
            self._status.name,
            order.run,
            report.succeeded,
            report.interrupted,
            report.timed_out,
            report.freed,
            [number for number, rank in report.ranks.items() if rank.died],
        )
        shipper = self._resources.shipper
        for number, rank in report.ranks.items():
            outcome = rank.outcome
            # a rank that died: its successor starts without values, and the recovery records that
            if outcome is None or (changes := outcome.changes) is None:
                continue
            # also if the cell failed: the values were bound before it began
            if outcome.bound:
                shipper.bound(
                    manifest,
                    number,
                    changes.rebound,
                    changes.deleted,
                    completed=outcome.succeeded,
                )
            shipper.record_losses(number, changes.unlinked, changes.lost)
            if changes.reads is not None:
                shipper.reads(number, changes.reads.digest, changes.reads.names)
        return report

    def _metrics(self, spec: RunSpec) -> Metrics:
        """Create the metrics of a run and add them to the pool's.

        The oldest metrics are dropped if there are too many numbers.
        """
        metrics = Metrics(spec.order.execution_count)
        with self._lock:
            self.reported = [*newest_within(self.reported, MOST_NUMBERS), metrics]
        return metrics


def _note_waiting(spec: RunSpec, before: Sequence[RunSpec]) -> None:
    """Show the other cells that a run waits for.

    Raises PoolStateError for a run that must not wait.
    """
    # one cell may start several runs, for example through joblib: they are no surprise to its user
    runs_before = {
        other.order.execution_count: other
        for other in before
        if other.order.execution_count != spec.order.execution_count
    }
    if runs_before and not spec.waits:
        raise PoolStateError(
            "; ".join(_busy(number, other) for number, other in runs_before.items()),
            code="pool-busy",
        )
    # A background cell returns to the notebook while it waits: its values are taken when its turn
    # comes, and the next cells queue up behind it.
    spec.taken()
    for number, other in runs_before.items():
        remedy = (
            f"; to stop that one, stop this cell, then Out[{number}].cancel()"
            if other.beside
            else ""
        )
        print_note(f"[waits for cell {number} on {rank_words(other.ranks)}{remedy}]")


def _busy(number: int, other: RunSpec) -> str:
    """Explain why a run that must not wait is refused."""
    remedy = (
        f": Out[{number}].cancel() stops it, Out[{number}].wait() waits for it"
        if other.beside
        else ""
    )
    return f"cell {number} is running on {rank_words(other.ranks)}{remedy}"


# -- runs of another notebook ---------------------------------------------------------------------


@dataclass(frozen=True)
class UnfinishedRun:
    """Run that another notebook started and whose end its user has not seen.

    Attributes:
        run: number of the run in the pool.
        over: True if the run has ended on all of its ranks.
        seconds: duration of the run, or how long it had been running when its ranks were asked.
    """

    run: int
    spec: RunSpec
    over: bool
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """The run and its state: "[cell 11 on ranks 0, 1 is still running; …]"."""
        cell = f"cell {self.spec.order.execution_count} on {rank_words(self.spec.ranks)}"
        # Output counts as shown once the earlier kernel has sent it, even if its page was closed.
        is_cell = self.spec.order.job == "cell"
        earlier = f"; earlier output: %sky_logs --run {self.run}" if is_cell else ""
        return f"[{cell} {'had ended' if self.over else 'is still running'}{earlier}]"


@dataclass(eq=False, repr=False)
class Attaching:
    """Takeover of a pool that another notebook has left."""

    _status: SharedStatus
    _resources: PoolResources
    _recovery: Recovery
    _runs: PoolRuns
    _node_lost: Callable[[int, str], None]
    """Called with the index of a node that is gone, and the reason."""

    def attach(
        self, nodes: Sequence[Node], connect: Callable[[Sequence[Node]], Agents], key: PoolKey
    ) -> list[UnfinishedRun]:
        """Attach to the pool; a failure leaves everything as it was.

        Some nodes may be gone, but not all; their ranks are lost.

        Returns:
            The runs that the user must be informed of, the oldest first.

        Raises:
            ProvisionError: all nodes are gone, a node does not answer, or another notebook
                attaches too.
        """
        # The machines have agreed on these addresses when the pool started. They are not determined
        # anew: the ranks' process groups use them.
        met_nodes = [
            replace(node, address=address, hostname=hostname)
            for node, (address, hostname) in zip(nodes, key.addresses, strict=True)
        ]
        self._status.move(PoolEvent.START)
        try:
            dead = self._resources.attach(met_nodes, connect, key.port)
            agents = self._resources.agents
            # A rank that does not answer counts as one that remembers nothing: it may be in native
            # code, and is followed by its agent's messages.
            answers = agents.ask(range(self._status.world_size), RECALL, RECALL_TIMEOUT)
            recollections = {rank: recalled or Recollection() for rank, recalled in answers.items()}
            if refusals := [reason for reason in agents.gone.values() if REPLACED in reason]:
                raise ProvisionError(refusals[0])
        # also an interrupt: the pool continues as if nobody had tried
        except BaseException as problem:
            self._resources.leave()
            self._status.move(PoolEvent.STOPPED)
            if isinstance(problem, ProvisionError) and self._all_lost():
                raise ProvisionError(
                    f"{problem}; the ranks' variables and uncollected results are lost; recreate "
                    "the pool with %sky_pool"
                ) from problem
            raise
        self._status.move(PoolEvent.STARTED)
        lost_ranks = {rank for index in agents.gone for rank in agents.ranks_of(index)}
        for index, reason in sorted(agents.gone.items()):
            self._node_lost(index, reason)
        unfinished = [
            item
            for item in unfinished_runs(recollections)
            if not (item.over and self._was_delivered(item))
        ]
        for text in interrupted_runs(recollections, {item.run for item in unfinished}):
            self._status.note(text)
        # Numbers are unique in the pool's life, because logs and displays are found by them. The
        # same holds for generations: a process group of an earlier one must not be joined.
        self._runs.numbers = itertools.count(
            1 + max((recalled.run for recalled in recollections.values()), default=0)
        )
        self._recovery.generation = max(
            (recalled.generation for recalled in recollections.values()), default=0
        )
        # these runs report their ranks' deaths themselves
        followed = {rank for item in unfinished for rank in item.spec.ranks}
        if dead_ranks := sorted({*dead} - followed - lost_ranks):
            self._status.note(
                f"{rank_words(dead_ranks)} had died; "
                f"{verb_form(len(dead_ranks), 'it is', 'they are')} restarted without variables"
            )
            self._recovery.begin(dead_ranks)
        return unfinished

    def _was_delivered(self, unfinished: UnfinishedRun) -> bool:
        """Return True if an earlier notebook has delivered the results of this run."""
        request, ranks = request_of_run(unfinished.run), self._resources.agents.ranks
        # Any rank suffices: all of a run are delivered at once, and a lost node reports nothing.
        return any(ranks[rank].delivered == request for rank in unfinished.spec.ranks)

    def _all_lost(self) -> bool:
        if not self._resources.has_agents:
            return False
        agents = self._resources.agents
        is_taken = any(REPLACED in reason for reason in agents.gone.values())
        return len(agents.gone) == len(agents.nodes) and not is_taken


def unfinished_runs(recollections: Mapping[int, Recollection]) -> list[UnfinishedRun]:
    """Return the last runs of these ranks, the oldest first; pure.

    Args:
        recollections: rank → what it remembers.
    """
    # all ranks of a run have the same order, so it does not matter whose is kept
    orders = {
        recalled.run: recalled.order
        for recalled in recollections.values()
        if recalled.order is not None
    }
    runs = []
    for run, order in sorted(orders.items()):
        if any(recollections[rank].run > run for rank in order.ranks if rank in recollections):
            continue  # one of its ranks has begun another run, so its user has seen its end
        of_run = [recalled for recalled in recollections.values() if recalled.run == run]
        over = all(recalled.outcome is not None for recalled in of_run)
        seconds = max(recalled.seconds for recalled in of_run)
        # Without the cell's text, which ranks do not remember, and without profiles, which belong
        # to the folder of the notebook that has asked for them.
        runs.append(UnfinishedRun(run, RunSpec(replace(order, profile=())), over, seconds))
    return runs


def interrupted_runs(
    recollections: Mapping[int, Recollection], followed: Collection[int]
) -> list[str]:
    """Return a line for each of the ranks' last runs that was interrupted: cell, time, and place.

    Only runs whose end was shown. A front end may interrupt a cell before it restarts the kernel.
    Without this line, the next notebook would only notice that the cell's variables are missing.

    Args:
        recollections: as in `unfinished_runs`.
        followed: runs that report their end themselves.
    """
    by_run: dict[int, dict[int, Recollection]] = {}
    for rank, recalled in sorted(recollections.items()):
        if recalled.outcome is not None and recalled.outcome.interrupted:
            by_run.setdefault(recalled.run, {})[rank] = recalled
    return [
        _describe_interrupted(by_rank)
        for run, by_rank in sorted(by_run.items())
        if run not in followed
    ]


def _describe_interrupted(by_rank: Mapping[int, Recollection]) -> str:
    """Describe an interrupted run, as its ranks remember it."""
    first = next(iter(by_rank.values()))
    order = first.order
    # there is an outcome, so there was an order
    assert order is not None
    ended = time.strftime("%H:%M:%S", time.localtime(first.ended_at))
    step = f", after step {first.step:g}" if first.step is not None else ""
    position = positions(
        {
            rank: recalled.outcome.stopped_at
            for rank, recalled in by_rank.items()
            if recalled.outcome is not None
        }
    )
    names = [name for name in (order.output, *order.gather) if name]
    unset = f": {', '.join(names)} {verb_form(len(names), 'was', 'were')} not set" if names else ""
    location = f" ({position})" if position else ""
    return (
        f"cell {order.execution_count} on {rank_words(list(by_rank))} was interrupted at "
        f"{ended}{step}{location}{unset}"
    )
