"""One run as an event loop: output as it comes, fail fast, and an escalation from interrupt to kill that always ends.

When a rank has failed, the ranks whose cell goes on are stopped in steps::

    failure            SIGINT, and those released     all released       SIGINT again        SIGKILL
       │               that wait in native code             │                 │                 │
    ───┼────────────────────────────┼───────────────────────┼─────────────────┼─────────────────┼──▶ time
       │◀─── OTHERS_FAIL_TIME, ────▶│◀── interrupt_grace ──▶│                 │                 │
       │     or ROOT_CAUSE_TIME     │◀──────────────── grace / 2 ────────────▶│                 │
                                                            │◀───────────── grace ─────────────▶│  and again, for ranks that leave their
                                                                                                   cell: MAX_GRACE_EXTENSIONS times

An agent that has not told their end END_TIMEOUT after that, and does not answer either, is given up.

Only ranks that wait in native code, such as a collective, cannot take the interrupt. Releasing costs all ranks their process groups, which
are formed anew: where the others leave their cells in Python, the groups stay.

The end of ``--timeout`` enters at the first SIGINT. So does the stop button, but it leaves ranks time for what the user's code does
upon an interrupt: ranks that wait in native code are released WAITS_AFTER it; all others one grace period after it, and killed after one
more. A second press kills at once.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skymagic.cluster import Agents
from skymagic.display import text as display
from skymagic.display.live import together
from skymagic.display.run_line import RunState
from skymagic.display.screen import Screen, Settling
from skymagic.plan.units import rank_words
from skymagic.run.report import Limits, RankRun, Report, state_of
from skymagic.run.results import is_connection_error
from skymagic.run.stall import Stall, stacks_of
from skymagic.run.submission import RunEvent, Submission
from skymagic.wire import agent as wire
from skymagic.wire.metrics import only_imports
from skymagic.wire.order import ON_GPU

logger = logging.getLogger(__name__)

OTHERS_FAIL_TIME = 0.1
"""Seconds that other ranks have to fail by themselves, so that an error that all of them raise is told as such."""
ROOT_CAUSE_TIME = (
    0.5  # seconds to wait for the cause when the first news is that a connection closed
)
MAX_GRACE_EXTENSIONS = 5
"""How often a rank that is leaving its cell (an ``except`` or ``finally`` of the user's, a slow machine) gets the grace period again."""
GPU_GRACE = 30.0
"""Seconds from the first grace period's end in which ranks that use a GPU may leave their cells: kernels, and NCCL's abort, take their time."""
WAITS_AFTER = 0.08
"""Seconds after an interrupt until it is asked which ranks wait in native code and cannot take it; and between such questions."""
KILL_HINT_DELAY = 0.7
"""Seconds after an interrupt until the user is told of the second press."""
ANSWER_TIMEOUT = 0.5
"""Seconds in which ranks answer what they are asked: where they are, whether they leave their cell."""
END_TIMEOUT = 3.0
"""Seconds that ranks that were killed have to end, and an agent to say that it is there."""
POLL_INTERVAL = 0.2
"""Longest wait: Python does not wake for a signal that comes just before it waits, or to another thread."""
RESTART_TIMEOUT = 0.3
"""Seconds after an interrupt in which a kernel hears that it is to end: Jupyter's menu interrupts a kernel first, and asks it then."""
ACTIVITY = frozenset({"stream", "display_data", "update_display_data", "clear_output", "numbers"})
"""Kinds of content that show that a rank goes on."""
DRAIN_TIMEOUT = 5.0
"""Seconds to wait until what was sent to ranks that have ended their cells has reached them."""


class RunLoop:
    """The event loop of one submission: events, deadlines, and the escalation from interrupt to kill, through the agents.

    Args:
        begin: called with a rank and the number of a content before it is written to the screen.
        mark: called with the same when it counts as shown (`Settling`).
        left: whether this process ends and leaves the run to its ranks; None where runs end with it.
    """

    def __init__(
        self,
        submission: Submission,
        agents: Agents,
        screen: Screen,
        limits: Limits,
        begin: Callable[[int, int], None] = lambda rank, seq: None,
        mark: Callable[[int, int], None] = lambda rank, seq: None,
        left: Callable[[], bool] | None = None,
    ) -> None:
        self._submission = submission
        self._begin, self._settling = begin, Settling(mark)
        self._agents = agents
        self._left, self._held_stop = left, False
        self._screen = screen
        self._limits = limits
        self._stopping = False  # something went wrong, or the user pressed stop: the run is being brought to its end
        now = time.monotonic()
        steps = (
            RunLoop._stop_others, RunLoop._release_waiting, RunLoop._release, RunLoop._kill_stuck, RunLoop._show_kill_hint, RunLoop._interrupt_again,
            RunLoop._give_up, RunLoop._stop,
        )  # fmt: skip
        self._due: dict[Callable[[RunLoop], None], float | None] = dict.fromkeys(steps)
        """When each step is taken; None for never."""
        self._due[RunLoop._time_out] = None if limits.timeout is None else now + limits.timeout
        self._grace_extensions = 0
        self._gpu_deadline: float | None = None
        self._disturbed: set[int] = set()  # ranks that were sent signals or other disturbances
        self._stall = Stall(limits.stall_after, now)
        ranks = {rank: RankRun() for rank in submission.ranks}
        self.report = Report(ranks, submission.number, metrics=submission.metrics)

    def wait(self) -> Report:
        """Wait until every rank has settled, or the pool is ended. What the user does with the stop button becomes part of the report."""
        self._screen.progress(self._state)
        while not all(rank.settled for rank in self.report.ranks.values()):
            self._step()
            if self.report.closed or self.report.left:
                return self.report
        if killed := [
            number for number, rank in self.report.ranks.items() if rank.died and not rank.killed
        ]:
            for node, fate in self._agents.taken_back(killed).items():
                self._agents.lose(node, f"{self._agents.nodes[node].name} is gone", fate)
                for event in self._submission.news():
                    self._handle(event)
        if not self._stopping:
            self._screen.standstill("")
        if self._disturbed:
            # what is still on its way there must not fall into the next cell; the answer comes after it
            self._agents.ask(self._disturbed, "leaving", timeout=DRAIN_TIMEOUT)
        ranks = self.report.ranks.values()
        if self.report.interrupted and not any(rank.failed for rank in ranks):
            self.report.interrupted = False  # it ended well in spite of it
            if not any(rank.outcome and rank.outcome.get("interrupted") for rank in ranks):
                self._submission.stop_was_late()  # the interrupt came too late everywhere; else the cell took it as it liked
        return self.report

    # -- one step ----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        # news first: a rank that has ended must not be interrupted by a step that is due at the same moment
        if (event := self._submission.read(self._next_timeout())) is not None:
            self._handle(event)
        self._screen.refresh()
        self._screen.progress(self._state)
        now = time.monotonic()
        self._settling.settle(now)
        for act in [act for act, when in self._due.items() if when is not None and when <= now]:
            self._due[act] = None
            act(self)
        for rank in self.report.ranks.values():
            if (when := rank.output_deadline) is not None and now >= when:
                rank.ended = True
        self._check_stall(now)

    def _state(self) -> RunState:
        ended = [number for number, rank in self.report.ranks.items() if rank.over]
        stall = self._stall
        return state_of(self.report, stall.waiting, stall.always_last, stall.in_vain(ended))

    def _next_timeout(self) -> float:
        now = time.monotonic()
        times = [
            *self._due.values(),
            *(rank.output_deadline for rank in self.report.ranks.values()),
        ]
        if not self._stopping:
            times.append(self._stall.due)
        return max(
            0.0, min(when for when in [*times, now + POLL_INTERVAL] if when is not None) - now
        )

    def _handle(self, event: RunEvent) -> None:
        if event.kind == "stop":
            self._stop_requested()
            return
        if event.kind == "closed":
            self.report.closed = True
            return
        if event.kind == "note":
            self._screen.note(f"[{event.content['text']}]\n")
        rank = self.report.ranks.get(event.rank)
        if rank is None:
            return
        rank.last_event_at = time.monotonic()
        if event.kind == "output":
            self._show(event.rank, rank, event.content)
        elif (
            event.kind == "outcome" and not rank.killed
        ):  # else its end comes, too late for any other
            rank.outcome = event.content
            self._stall.hasten(time.monotonic())
        elif event.kind == "died" and rank.outcome is None:
            rank.died, rank.died_at = event.content["exited"], time.monotonic()
        if rank.failed and self.report.unfinished():
            outcome = rank.outcome or {}
            follows = is_connection_error(str(outcome.get("ename")), str(outcome.get("evalue")))
            default = ROOT_CAUSE_TIME if follows else OTHERS_FAIL_TIME
            stop_at = time.monotonic() + (outcome.get("cause_timeout") or default)
            before = self._due[RunLoop._stop_others]
            if not self._stopping:
                self._stopping, self._due[RunLoop._stop_others] = True, stop_at
            elif before is not None:  # this one may be the cause for which the first was given time
                self._due[RunLoop._stop_others] = min(before, stop_at)

    def _show(self, number: int, rank: RankRun, content: Mapping[str, Any]) -> None:
        kind = content["kind"]
        # an import that hangs is told of each second, and is none
        if kind in ACTIVITY and not (kind == "numbers" and only_imports(content["batches"])):
            self._stall.moved()
        if kind == "numbers":
            self.report.metrics.add(number, content["batches"])
        rank.ended = rank.ended or kind == "end"
        self.report.incomplete = self.report.incomplete or kind in ("held_back", "missed")
        if (seq := content.get("seq")) is None:
            show_content(self._screen, number, content)
            return
        # a notebook that attaches after this one was killed in between shows it again, and says that it may have been seen
        self._begin(number, seq)
        with together():
            show_content(self._screen, number, content)
        self._settling.add(number, seq, time.monotonic())

    # -- ending early ------------------------------------------------------------------------------------------------

    def _stop_others(self) -> None:
        """A rank has failed: interrupt the others, and release those that wait for it in a collective."""
        self._interrupt()
        now = time.monotonic()
        self._due[RunLoop._release_waiting], self._due[RunLoop._release] = (
            now,
            now + self._limits.interrupt_grace,
        )
        self._due[RunLoop._interrupt_again] = now + self._limits.grace / 2

    def _interrupt(self) -> None:
        open_ranks = self.report.unfinished()
        for number in open_ranks:
            self.report.ranks[number].stopped = True
        self._disturbed.update(open_ranks)
        self._agents.signal(open_ranks, signal.SIGINT)

    def _interrupt_again(self) -> None:
        """Python may lose the first interrupt, in a destructor or a fork."""
        self._agents.ask(self.report.unfinished(), "interrupt", timeout=0.0)

    def _release_waiting(self) -> None:
        """Release the ranks that wait in native code: an interrupt does not reach them, so that a grace period would be lost on them."""
        ranks = self.report.ranks
        if open_ranks := [
            number for number in self.report.unfinished() if not ranks[number].waited_at
        ]:
            places = self._agents.ask(open_ranks, "waits", timeout=ANSWER_TIMEOUT)
            waiting = [number for number, place in places.items() if place]
            for number in waiting:
                ranks[number].waited_at = places[number]
            self._shut_down(waiting)
            self._due[RunLoop._release_waiting] = time.monotonic() + WAITS_AFTER

    def _release(self) -> None:
        self._due[RunLoop._release] = self._due[RunLoop._release_waiting] = None
        open_ranks = self.report.unfinished()
        if open_ranks:
            self._shut_down(open_ranks)
            self._due[RunLoop._kill_stuck] = time.monotonic() + self._limits.grace

    def _shut_down(self, chosen: Sequence[int]) -> None:
        """Shut down the connections of these ranks' process groups."""
        answers = self._agents.ask(chosen, "release", timeout=ANSWER_TIMEOUT)
        self.report.freed = self.report.freed or any(answers.values())

    def _kill_stuck(self) -> None:
        """The grace period is over: kill, but leave ranks that are on their way out of the cell a little longer."""
        open_ranks = self.report.unfinished()
        leaving = self._agents.ask(open_ranks, "leaving", timeout=ANSWER_TIMEOUT)
        now = time.monotonic()
        self._gpu_deadline = self._gpu_deadline or now + GPU_GRACE

        def may_leave(answer: bool | str) -> bool:
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
            self._shut_down(
                [rank for rank in open_ranks if rank not in stuck]
            )  # a collective that has begun since
        self._kill(stuck)

    def _kill(self, open_ranks: Sequence[int]) -> None:
        unknown = [number for number in open_ranks if not self.report.ranks[number].waited_at]
        if self.report.interrupted and unknown:
            # the last moment to find out where they are, where the user is to hear of it: a signal handler tells
            for number, stack in self._agents.ask(
                unknown, "native", timeout=4 * ANSWER_TIMEOUT
            ).items():
                self.report.ranks[number].waited_at = (stack or {}).get("frames", ())
        for (
            event
        ) in self._submission.news():  # while they were asked, some may have ended their cells
            self._handle(event)
        open_ranks = [number for number in open_ranks if number in self.report.unfinished()]
        for number in open_ranks:
            self.report.ranks[number].killed = True
        self._disturbed.update(open_ranks)
        self._agents.signal(open_ranks, signal.SIGKILL)
        self._due[RunLoop._give_up] = time.monotonic() + END_TIMEOUT
        for number in filter(self._agents.is_away, open_ranks):  # nobody can tell when it has ended
            reason = "its node is not connected; it is stopped there once it reconnects"
            self.report.ranks[number].died = wire.RankExited(number, 0, None, True, tail=reason)
            self.report.ranks[number].died_at = time.monotonic()

    def _give_up(self) -> None:
        """The end of ranks that were killed is not told: an agent that does not answer is lost, and says nothing any more."""
        if open_ranks := self.report.unfinished():
            self._agents.drop_silent(open_ranks, END_TIMEOUT)
            self._due[RunLoop._give_up] = time.monotonic() + END_TIMEOUT

    def _stop_requested(self) -> None:
        """The stop button: once interrupts, and releases after the grace period, or at once what waits in native code; twice kills."""
        open_ranks = self.report.unfinished()
        if not open_ranks:  # the cell is over, and only its last output is to come
            self._submission.stop_was_late()
            return
        if self.report.interrupted:
            self._kill(open_ranks)
            return
        if self._left is not None and not self._held_stop:
            self._held_stop = True
            self._due[RunLoop._stop] = time.monotonic() + RESTART_TIMEOUT
            return
        self._stop()
        if self._held_stop:  # the second press came before the first was passed on
            self._stop_requested()

    def _stop(self) -> None:
        """Interrupt the ranks, because the user has pressed stop; unless it was the kernel's end that has interrupted it."""
        self._due[RunLoop._stop] = None
        if self._left is not None and self._left():
            self.report.left = True
            return
        open_ranks = self.report.unfinished()
        if not open_ranks:
            self._submission.stop_was_late()
            return
        self.report.interrupted = self._stopping = True
        self._interrupt()
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
        self.report.timed_out = self._stopping = True
        self.report.stacks = stacks_of(self._agents, open_ranks, ANSWER_TIMEOUT)
        self._stop_others()

    def _check_stall(self, now: float) -> None:
        """Show who waits where while nothing changes on any rank, and withdraw that once something does. Nothing is stopped."""
        if self._stopping or self._stall.due is None or now < self._stall.due:
            return
        waiting = self.report.unfinished()
        if len(self.report.ranks) < 2 or not waiting:  # one rank alone waits as a plain cell does
            self._stall.due = None
            self._screen.standstill("")
            return
        ended = [number for number in self.report.ranks if number not in waiting]
        before = self._stall.standing
        self._stall.observe(ended, stacks_of(self._agents, waiting, ANSWER_TIMEOUT), now)
        if (standing := self._stall.standing) is not before:
            if standing is None:
                self._screen.standstill("")
            else:
                logger.info("run=%d %s", self._submission.number, standing.summary)
                self._screen.standstill(standing.summary, standing.places)


def show_content(screen: Screen, rank: int, content: Mapping[str, Any]) -> None:
    """Put what a rank shows on a screen; its end, and its numbers as they are, are not to be seen."""
    kind = content["kind"]
    if content.get("maybe_seen"):
        screen.note(display.maybe_seen(rank, content))
    if kind == "stream":
        screen.text(rank, content["name"], content["text"])
    elif kind == "numbers":
        if content["dropped"]:
            screen.note(display.numbers_dropped(rank, content["dropped"]))
    elif kind == "held_back":
        screen.note(display.held_back(rank, content["nbytes"]))
    elif kind == "note":
        screen.note(content["text"])
    elif kind == "missed":
        screen.note(display.missed(rank, content["count"]))
    elif kind != "end":
        screen.rich(rank, kind, content)
