"""Event loop of one run: streams output, fails fast, and escalates from interrupt to kill.

The escalation always ends. After a rank has failed, the ranks that still execute are stopped in
steps::

    failure         SIGINT; release of       release        SIGINT          SIGKILL
       │            ranks in native code     of all         again              │
    ───┼────────────────────┼───────────────────┼──────────────┼───────────────┼──▶ time
       │◀ OTHERS_FAIL_TIME ▶│◀ interrupt_grace ▶│              │               │
       │ or ROOT_CAUSE_TIME │◀────────── grace / 2 ───────────▶│               │
                                                │◀─────────── grace ──────────▶│

The last step is repeated up to MAX_GRACE_EXTENSIONS times for ranks that are leaving their cell. An
agent that has not reported the end of killed ranks END_TIMEOUT later, and does not answer either,
is given up.

Only ranks that wait in native code, such as a collective, cannot handle the interrupt. Releasing
ranks costs all ranks their process groups, which must be formed again; if the other ranks leave
their cells in Python, the groups stay intact.

When a ``--timeout`` expires, the steps start at the first SIGINT. So they do for the stop button,
but it leaves ranks time for the user's own handling of the interrupt: ranks that wait in native
code are released WAITS_AFTER later, all others one grace period later, and all are killed
after one more grace period. A second press kills at once.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from skymagic.cluster import Agents
from skymagic.display import text as display
from skymagic.display.live import batched_output
from skymagic.display.run_line import RunState
from skymagic.display.screen import Screen
from skymagic.plan.units import rank_words
from skymagic.run.acknowledgements import Acknowledgements
from skymagic.run.results import is_connection_error
from skymagic.run.stall import Stall, stacks_of
from skymagic.run.state import Limits, RankRun, Report, state_of
from skymagic.run.submission import (
    OutputArrived,
    PoolClosed,
    PoolNote,
    RankDeath,
    RankFinished,
    RunEvent,
    StopPressed,
    Submission,
)
from skymagic.wire import agent as wire
from skymagic.wire import queries
from skymagic.wire.metrics import only_imports
from skymagic.wire.order import ON_GPU
from skymagic.wire.output import (
    Output,
    OutputComplete,
    OutputDisplay,
    OutputMetrics,
    OutputMissed,
    OutputNote,
    OutputRepeated,
    OutputSuppressed,
    OutputText,
)

logger = logging.getLogger(__name__)

OTHERS_FAIL_TIME = 0.1
"""Seconds for other ranks to fail by themselves, so that an error of all ranks is shown as such."""
ROOT_CAUSE_TIME = 0.5
"""Seconds to wait for the root cause if the first failure is a closed connection."""
MAX_GRACE_EXTENSIONS = 5
"""Maximum number of extra grace periods for a rank that is leaving its cell.

It may be in the user's ``except`` or ``finally``, or on a slow machine.
"""
GPU_GRACE = 30.0
"""Seconds after the first grace period for ranks that use a GPU to leave their cells.

Kernels and NCCL's abort are slow.
"""
WAITS_AFTER = 0.08
"""Seconds from an interrupt to the query for ranks in native code, and between such queries.

These ranks cannot handle the interrupt.
"""
KILL_HINT_DELAY = 0.7
"""Seconds from an interrupt to the hint that a second press kills."""
ANSWER_TIMEOUT = 0.5
"""Seconds for ranks to answer queries: where they are, what they wait for."""
LEAVING_TIMEOUT = 2.0
"""Seconds for ranks to say that they leave their cell, before they are killed.

Longer than `ANSWER_TIMEOUT`: a rank on a busy machine, or one that closes its process groups, would
lose its variables for a late answer.
"""
END_TIMEOUT = 3.0
"""Seconds for killed ranks to end, and for an agent to answer."""
POLL_INTERVAL = 0.2
"""Longest wait in seconds.

Python does not wake up for a signal to another thread, or for one just before the wait.
"""
RESTART_TIMEOUT = 0.3
"""Seconds from an interrupt in which a shutdown request may follow.

Jupyter's menu interrupts a kernel before it asks the kernel to shut down.
"""
ACTIVITY = (OutputText, OutputDisplay, OutputMetrics)
"""Kinds of output that show that a rank is making progress."""
DRAIN_TIMEOUT = 5.0
"""Seconds to wait until signals and requests to ranks that have ended their cells have arrived."""


class RunLoop:
    """Event loop of one submission: events, deadlines, and the escalation from interrupt to kill.

    Args:
        acknowledge: called with rank → number of the last piece of its output that the user has
            seen; None if no other notebook can continue the run.
        is_left: returns True if this process ends and leaves the run to its ranks; None if runs end
            with it.
    """

    def __init__(
        self,
        submission: Submission,
        agents: Agents,
        screen: Screen,
        limits: Limits,
        acknowledge: Callable[[Mapping[int, int]], object] | None = None,
        is_left: Callable[[], bool] | None = None,
    ) -> None:
        self._submission = submission
        self._acknowledgements = Acknowledgements(acknowledge) if acknowledge else None
        self._agents = agents
        self._left, self._held_stop = is_left, False
        self._screen = screen
        self._limits = limits
        self._stopping = False  # True after a failure, a timeout or a press of stop
        now = time.monotonic()
        # the steps of the escalation; if several are due at once, they run in this order
        steps = (
            RunLoop._stop_others,
            RunLoop._release_waiting,
            RunLoop._release,
            RunLoop._kill_stuck,
            RunLoop._show_kill_hint,
            RunLoop._interrupt_again,
            RunLoop._give_up,
            RunLoop._stop,
        )
        self._due: dict[Callable[[RunLoop], None], float | None] = dict.fromkeys(steps)
        """Step → its deadline; None for never."""
        self._due[RunLoop._time_out] = None if limits.timeout is None else now + limits.timeout
        self._grace_extensions = 0
        self._gpu_deadline: float | None = None
        self._disturbed: set[int] = set()  # ranks that got signals or requests
        self._stall = Stall(limits.stall_after, now)
        ranks = {rank: RankRun() for rank in submission.ranks}
        self.report = Report(ranks, submission.number, metrics=submission.metrics)

    def wait(self) -> Report:
        """Wait until every rank has settled, or the pool is ended.

        The report includes the effects of the stop button.
        """
        number, open_ranks = self._submission.number, list(self.report.ranks)
        logger.debug("run is awaited: run=%s ranks=%s", number, open_ranks)
        self._screen.progress(self._state)
        while not all(rank.settled for rank in self.report.ranks.values()):
            self._step()
            if self.report.closed or self.report.left_running:
                return self.report
        if killed := [
            number for number, rank in self.report.ranks.items() if rank.died and not rank.killed
        ]:
            # Treat the machines of dead ranks as lost if the provider has taken them back.
            for node, fate in self._agents.reclaimed_nodes(killed).items():
                self._agents.lose(node, f"{self._agents.nodes[node].name} is gone", fate)
                for event in self._submission.news():
                    self._handle(event)
        if not self._stopping:
            self._screen.standstill("")
        if self._disturbed:
            # Signals in transit must not hit the next cell. The answer to this query arrives after
            # them.
            self._agents.ask(self._disturbed, queries.LEAVING, timeout=DRAIN_TIMEOUT)
        ranks = self.report.ranks.values()
        if self.report.interrupted and not any(rank.failed for rank in ranks):
            self.report.interrupted = False  # all ranks succeeded in spite of the interrupt
            if not any(rank.interrupted for rank in ranks):
                # the interrupt came too late on all ranks; otherwise the cell has handled it
                self._submission.stop_was_late()
        return self.report

    # -- one step ---------------------------------------------------------------------------------

    def _step(self) -> None:
        # Events first: a rank that has ended must not be interrupted by a step that is due at the
        # same moment.
        if (event := self._submission.read(self._next_timeout())) is not None:
            self._handle(event)
        self._screen.refresh()
        self._screen.progress(self._state)
        now = time.monotonic()
        if self._acknowledgements is not None:
            self._acknowledgements.update(now)
        for step in [
            step for step, deadline in self._due.items() if deadline is not None and deadline <= now
        ]:
            self._due[step] = None
            step(self)
        for rank in self.report.ranks.values():
            if (deadline := rank.output_deadline) is not None and now >= deadline:
                rank.ended = True
        self._check_stall(now)

    def _state(self) -> RunState:
        ended = [number for number, rank in self.report.ranks.items() if rank.over]
        stall = self._stall
        return state_of(
            self.report, stall.waiting, stall.constant_stragglers, stall.vain_wait_text(ended)
        )

    def _next_timeout(self) -> float:
        now = time.monotonic()
        times = [
            *self._due.values(),
            *(rank.output_deadline for rank in self.report.ranks.values()),
        ]
        if not self._stopping:
            times.append(self._stall.due)
        # POLL_INTERVAL bounds the wait: a signal just before it does not wake it up
        return max(
            0.0, min(when for when in [*times, now + POLL_INTERVAL] if when is not None) - now
        )

    def _handle(self, event: RunEvent) -> None:
        match event:
            case StopPressed():
                self._stop_requested()
                return
            case PoolClosed():
                self.report.closed = True
                return
            case PoolNote():
                self._screen.note(f"[{event.text}]\n")
                return
        rank = self.report.ranks.get(event.rank)
        if rank is None:
            return
        rank.last_event_at = time.monotonic()
        match event:
            case OutputArrived():
                self._show(rank, event.output)
            # The outcome of a killed rank comes too late: the rank is about to be reported dead.
            case RankFinished() if not rank.killed:
                rank.outcome = event.outcome
                self._stall.sample_soon(time.monotonic())
            case RankDeath():
                if rank.outcome is None:
                    rank.died = event.exited
                rank.ended = rank.ended or not event.output_follows
        if rank.failed and self.report.unfinished():
            failure = rank.failure
            is_consequence = failure is not None and is_connection_error(
                failure.ename, failure.evalue
            )
            default = ROOT_CAUSE_TIME if is_consequence else OTHERS_FAIL_TIME
            # A closed connection is only a consequence: wait for the root cause, to report that.
            patience = failure.cause_timeout if failure is not None else 0.0
            stop_at = time.monotonic() + (patience or default)
            previous = self._due[RunLoop._stop_others]
            if not self._stopping:
                logger.info(
                    "other ranks are stopped after a failure: run=%s rank=%s",
                    self._submission.number,
                    event.rank,
                )
                self._stopping, self._due[RunLoop._stop_others] = True, stop_at
            elif previous is not None:
                # this failure may be the root cause that the first one waited for
                self._due[RunLoop._stop_others] = min(previous, stop_at)

    def _show(self, rank: RankRun, output: Output) -> None:
        # an import is reported every second even if it hangs, so it is no sign of activity
        if isinstance(output, ACTIVITY) and not (
            isinstance(output, OutputMetrics) and only_imports(output.batches)
        ):
            self._stall.record_activity()
        if isinstance(output, OutputMetrics):
            self.report.metrics.add(output.rank, output.batches)
        rank.ended = rank.ended or isinstance(output, OutputComplete)
        if isinstance(output, OutputSuppressed | OutputMissed):
            self.report.incomplete = True
        with batched_output():
            show_output(self._screen, output)
        if self._acknowledgements is not None and output.seq:
            self._acknowledgements.passed(output.rank, output.seq, time.monotonic())

    # -- escalation -------------------------------------------------------------------------------

    def _stop_others(self) -> None:
        """Interrupt the other ranks after a failure, and release those in native code."""
        self._interrupt()
        now = time.monotonic()
        self._due[RunLoop._release_waiting], self._due[RunLoop._release] = (
            now,
            now + self._limits.interrupt_grace,
        )
        self._due[RunLoop._interrupt_again] = now + self._limits.grace / 2

    def _interrupt(self) -> None:
        open_ranks = self.report.unfinished()
        logger.info("ranks are interrupted: run=%s ranks=%s", self._submission.number, open_ranks)
        for number in open_ranks:
            self.report.ranks[number].stopped = True
        self._disturbed.update(open_ranks)
        self._agents.signal(open_ranks, signal.SIGINT)

    def _interrupt_again(self) -> None:
        """Repeat the interrupt: Python may lose the first one in a destructor or a fork."""
        # Not another signal: only the rank knows if it is cleaning up already, and a second SIGINT
        # would cut that short.
        self._agents.ask(self.report.unfinished(), queries.INTERRUPT, timeout=0.0)

    def _release_waiting(self) -> None:
        """Release the ranks that wait in native code.

        An interrupt does not reach them, so that a grace period would be wasted on them.
        """
        ranks = self.report.ranks
        if open_ranks := [
            number for number in self.report.unfinished() if not ranks[number].waited_at
        ]:
            frames = self._agents.ask(open_ranks, queries.WAITS, timeout=ANSWER_TIMEOUT)
            waiting = {rank: stack for rank, stack in frames.items() if stack}
            for rank, stack in waiting.items():
                ranks[rank].waited_at = stack
            self._shut_down(list(waiting))
            self._due[RunLoop._release_waiting] = time.monotonic() + WAITS_AFTER

    def _release(self) -> None:
        self._due[RunLoop._release] = self._due[RunLoop._release_waiting] = None
        open_ranks = self.report.unfinished()
        # Releasing ranks costs all ranks their process groups, so this is not the first step.
        if open_ranks:
            self._shut_down(open_ranks)
            self._due[RunLoop._kill_stuck] = time.monotonic() + self._limits.grace

    def _shut_down(self, ranks: Sequence[int]) -> None:
        """Shut down the connections of these ranks' process groups."""
        answers = self._agents.ask(ranks, queries.RELEASE, timeout=ANSWER_TIMEOUT)
        if ranks:
            logger.info(
                "ranks are released from collectives: run=%s ranks=%s",
                self._submission.number,
                list(ranks),
            )
        self.report.freed = self.report.freed or any(answers.values())

    def _kill_stuck(self) -> None:
        """Kill ranks after the grace period; give those leaving the cell a little longer."""
        open_ranks = self.report.unfinished()
        leaving = self._agents.ask(open_ranks, queries.LEAVING, timeout=LEAVING_TIMEOUT)
        now = time.monotonic()
        self._gpu_deadline = self._gpu_deadline or now + GPU_GRACE

        def may_leave(answer: bool | str | None) -> bool:
            # kernels and NCCL's abort may need longer than the grace period
            if answer == ON_GPU:
                return self._gpu_deadline is not None and now < self._gpu_deadline
            return bool(answer) and self._grace_extensions < MAX_GRACE_EXTENSIONS

        stuck = [
            rank
            for rank in open_ranks
            if not may_leave(leaving.get(rank, self._limits.silent_may_leave))
        ]
        self._grace_extensions += 1
        if len(stuck) < len(open_ranks):
            self._due[RunLoop._kill_stuck] = time.monotonic() + self._limits.grace
            # ranks that are leaving may have begun another collective since the last release
            self._shut_down([rank for rank in open_ranks if rank not in stuck])
        self._kill(stuck)

    def _kill(self, open_ranks: Sequence[int]) -> None:
        without_frames = [
            number for number in open_ranks if not self.report.ranks[number].waited_at
        ]
        if self.report.interrupted and without_frames:
            # last chance to find out where the ranks are, for the user: a signal handler reports it
            for number, stack in self._agents.ask(
                without_frames, queries.NATIVE_STACK, timeout=4 * ANSWER_TIMEOUT
            ).items():
                self.report.ranks[number].waited_at = () if stack is None else stack.frames
        # some ranks may have ended their cells during the query
        for event in self._submission.news():
            self._handle(event)
        open_ranks = [number for number in open_ranks if number in self.report.unfinished()]
        if open_ranks:
            logger.warning("ranks are killed: run=%s ranks=%s", self._submission.number, open_ranks)
        for number in open_ranks:
            self.report.ranks[number].killed = True
        self._disturbed.update(open_ranks)
        self._agents.signal(open_ranks, signal.SIGKILL)
        self._due[RunLoop._give_up] = time.monotonic() + END_TIMEOUT
        # a disconnected agent cannot report when the rank has ended
        for number in filter(self._agents.is_away, open_ranks):
            reason = "its node is not connected; it is stopped there once it reconnects"
            self.report.ranks[number].died = wire.RankExited(number, 0, None, True, tail=reason)
            self.report.ranks[number].ended = True

    def _give_up(self) -> None:
        """Treat an agent as lost if it neither reports the end of killed ranks nor answers."""
        if open_ranks := self.report.unfinished():
            logger.warning(
                "end of killed ranks was not reported: run=%s ranks=%s",
                self._submission.number,
                open_ranks,
            )
            self._agents.drop_silent(open_ranks, END_TIMEOUT)
            self._due[RunLoop._give_up] = time.monotonic() + END_TIMEOUT

    def _stop_requested(self) -> None:
        """Handle a press of the stop button.

        The first press interrupts; ranks are released after the grace period, or at once if they
        wait in native code. The second press kills.
        """
        open_ranks = self.report.unfinished()
        logger.info("stop requested: run=%s ranks=%s", self._submission.number, open_ranks)
        if not open_ranks:  # the cell is over, and only its last output is still to arrive
            self._submission.stop_was_late()
            return
        if self.report.interrupted:  # the second press
            self._kill(open_ranks)
            return
        if self._left is not None and not self._held_stop:
            # Jupyter interrupts a kernel before it asks the kernel to shut down. Wait briefly to
            # tell the two apart: a shutdown leaves the run to its ranks.
            self._held_stop = True
            self._due[RunLoop._stop] = time.monotonic() + RESTART_TIMEOUT
            return
        self._stop()
        if self._held_stop:  # the second press came before the first one took effect
            self._stop_requested()

    def _stop(self) -> None:
        """Interrupt the ranks because of the stop button.

        If the kernel's shutdown caused the interrupt, leave the run to its ranks instead.
        """
        self._due[RunLoop._stop] = None
        if self._left is not None and self._left():
            logger.info("run is left to its ranks: run=%s", self._submission.number)
            self.report.left_running = True
            return
        open_ranks = self.report.unfinished()
        if not open_ranks:
            self._submission.stop_was_late()
            return
        self.report.interrupted = self._stopping = True
        self._interrupt()
        # The user's code gets a grace period to handle the interrupt. Ranks in native code are
        # released earlier, because they cannot handle it.
        now = time.monotonic()
        self._due[RunLoop._stop_others] = None
        self._due[RunLoop._release_waiting] = now + WAITS_AFTER
        self._due[RunLoop._interrupt_again] = now + self._limits.grace / 2
        self._due[RunLoop._release] = now + self._limits.grace
        self._due[RunLoop._show_kill_hint] = now + KILL_HINT_DELAY

    def _show_kill_hint(self) -> None:
        if open_ranks := self.report.unfinished():
            self._screen.note(f"[{rank_words(open_ranks)} did not stop yet; press again to kill]\n")

    def _time_out(self) -> None:
        open_ranks = self.report.unfinished()
        if self._stopping or not open_ranks:
            return
        logger.warning(
            "time limit reached: run=%s ranks=%s limit=%s",
            self._submission.number,
            open_ranks,
            self._limits.timeout,
        )
        self.report.timed_out = self._stopping = True
        # before the ranks are interrupted, to show where they were
        self.report.stacks = stacks_of(self._agents, open_ranks, ANSWER_TIMEOUT)
        self._stop_others()

    def _check_stall(self, now: float) -> None:
        """Show which ranks wait where while nothing changes on any rank; stop nothing."""
        if self._stopping or self._stall.due is None or now < self._stall.due:
            return
        waiting = self.report.unfinished()
        if len(self.report.ranks) < 2 or not waiting:  # a single rank waits like a plain cell
            self._stall.due = None
            self._screen.standstill("")
            return
        ended = [number for number in self.report.ranks if number not in waiting]
        previous = self._stall.standing
        self._stall.observe(ended, stacks_of(self._agents, waiting, ANSWER_TIMEOUT), now)
        if (standing := self._stall.standing) is not previous:
            if standing is None:
                logger.info("run makes progress again: run=%s", self._submission.number)
                self._screen.standstill("")
            else:
                logger.warning(
                    "run makes no progress: run=%s waiting=%s ended=%s",
                    self._submission.number,
                    waiting,
                    ended,
                )
                self._screen.standstill(standing.summary, standing.positions)


def show_output(screen: Screen, output: Output) -> None:
    """Show output of a rank on a screen. Its end, and metrics, are invisible."""
    rank = output.rank
    match output:
        case OutputText():
            screen.text(rank, output.name, output.text)
        case OutputMetrics():
            if output.dropped:
                screen.note(display.numbers_dropped(rank, output.dropped))
        case OutputRepeated():
            screen.note(display.possibly_repeated(rank, output.lines, output.displays))
        case OutputSuppressed():
            screen.note(display.suppressed_lines(rank, output.nbytes))
        case OutputNote():
            screen.note(output.text)
        case OutputMissed():
            screen.note(display.missed_lines(rank, output.count))
        case OutputDisplay():
            screen.rich(rank, output.kind, output.content)
