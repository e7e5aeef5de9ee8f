"""Ranks without progress: stacks of ranks, stalls in a cell, hangs while a process group is formed.

A stall is reported, and nothing is stopped. A rank that hangs while the others form a group is
killed. A deadline alone would also kill a healthy rank on a busy machine, so the state of the main
thread decides: a thread that waits for the CPU or for other ranks continues when it can. A thread
that sleeps elsewhere, or runs code that a cell has substituted for a function, does not, and all
other ranks wait for it::

    rank 0   Rejoin ──▶ waits ──────────────────────────────▶ released, joins the next group
    rank 1   Rejoin ──▶ open(…), which a cell has replaced ──▶ killed
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from skymagic.cluster import Agents
from skymagic.display import text
from skymagic.plan.units import rank_words, verb_form
from skymagic.wire import queries
from skymagic.wire.processes import describe
from skymagic.wire.queries import Joining, Stack, ThreadUsage

Stacks = Mapping[int, Stack | None]
BUSY_SHARE = 0.01
"""Share of the time between two samples that counts as work if it is spent on the CPU."""
SAMPLE_COST = 0.02
"""Seconds of CPU time that a rank may need for a sample.

That is on a slow machine, or on one with many processes.
"""
LAST_SAMPLES = 5
"""Number of consecutive samples after which a rank that all others wait for counts as always last.

With equally fast ranks, the last one changes from sample to sample.
"""
COLLECTIVES = "torch/distributed/"
DDP = "torch/nn/parallel/distributed.py"
AUTOGRAD = "torch/autograd/"
BACKWARD = "a backward pass"
AWAITING = (COLLECTIVES, AUTOGRAD)
"""Parts of the innermost frame's path for a rank in a collective or in a backward pass."""
FIRST_SAMPLE = 1.0
"""Seconds until the first sample, the baseline: most cells are over by then."""
HANG_DEADLINE = 5.0
"""Seconds without a sign of life after which a rank counts as hanging."""
WATCH_INTERVAL = 0.5  # seconds between two samples; a group is formed in less than one
ANSWER_TIMEOUT = 1.0
"""Seconds for agents and ranks to answer."""
CPU_TIME = 0.05
"""Seconds of CPU time that count as a sign of life."""
# state of a Linux thread that waits for an event; R waits for the CPU or runs, D waits for a disk
SLEEPS = "S"


def stacks_of(agents: Agents, ranks: Sequence[int], timeout: float) -> Stacks:
    """Return the stacks of ranks from their control threads, else from a signal handler, else None.

    Args:
        timeout: seconds for each of the two attempts.
    """
    answers = agents.ask(ranks, queries.STACK, timeout=timeout)
    if silent := [rank for rank in ranks if answers.get(rank) is None]:
        answers |= agents.ask(silent, queries.NATIVE_STACK, timeout=timeout)
        # such a rank cannot report its CPU time, but its agent can
        for rank, usage in agents.ask(silent, queries.USAGE, timeout=timeout).items():
            if usage and (stack := answers.get(rank)):
                answers[rank] = replace(stack, cpu=usage.cpu_seconds)
    return {rank: answers.get(rank) for rank in ranks}


def variables_of(
    agents: Agents, ranks: Sequence[int], timeout: float
) -> dict[int, Mapping[str, Mapping[str, str]]]:
    """Return each rank's variables by name: type, size or shape, checksum.

    Ranks that did not answer in time are omitted.
    """
    answers = agents.ask(ranks, queries.VARIABLES, timeout=timeout)
    return {rank: names for rank, names in sorted(answers.items()) if names is not None}


@dataclass(frozen=True)
class Standstill:
    """Description of stalled ranks.

    Attributes:
        summary: the ranks and the duration, in one line.
        positions: the position of each rank, one line each.
    """

    summary: str
    positions: str


class Stall:
    """Detector of stalled ranks from samples of their stacks.

    Pure: the caller passes stacks and time.

    Attributes:
        standing: what to show the user while nothing changes on any rank; None as soon as something
            does.

    Args:
        after: seconds without any change until a stall is reported; infinite for never.
        now: monotonic seconds.
    """

    SAMPLES = 5
    """Number of samples within `after` seconds."""

    def __init__(self, after: float, now: float) -> None:
        self._after = after
        self._interval = after / self.SAMPLES
        self._last: Stacks = {}
        self._last_at = self._since = now
        self._moved = False
        self.standing: Standstill | None = None
        self.deserted: dict[str, list[int]] = {}
        """Collective → ranks that stayed in it for the last two samples while others had ended."""
        self.apart: dict[str, list[int]] = {}
        """Collective → its ranks at the last two samples, if all ranks are in collectives.

        Empty if all of them are in the same one.
        """
        self._behind: deque[frozenset[int]] = deque(maxlen=LAST_SAMPLES)
        self.due: float | None = (
            now + min(FIRST_SAMPLE, self._interval) if after < math.inf else None
        )

    @property
    def waiting(self) -> list[int]:
        """Ranks that were in a collective at the last sample while others had not reached it."""
        behind = ranks_behind(self._last)
        return [
            rank
            for rank, stack in self._last.items()
            if behind and rank not in behind and stack and is_in_collective(stack)
        ]

    def record_activity(self) -> None:
        """Record that a rank has shown or reported something since the last sample."""
        self._moved = True
        if self.standing is not None:
            self.due = self._last_at  # take a sample now, which withdraws the report

    def sample_soon(self, now: float) -> None:
        """Schedule a sample soon because a rank has ended and others may wait for it."""
        if self.due is not None:
            self.due = min(self.due, now + FIRST_SAMPLE / 2)

    @property
    def constant_stragglers(self) -> list[int]:
        """Ranks that all others waited for at each recent sample while collectives progressed."""
        if len(self._behind) < LAST_SAMPLES:
            return []
        return sorted(frozenset.intersection(*self._behind))

    def observe(self, ended: Sequence[int], stacks: Stacks, now: float) -> None:
        """Add a sample.

        Args:
            ended: ranks whose cell is over.
            stacks: stacks of all other ranks: frames, and the number of collectives begun.
        """
        previous, self._last = self._last, stacks
        cpu_threshold = BUSY_SHARE * (now - self._last_at) + SAMPLE_COST
        self._last_at = now
        collectives = {rank: name for rank in stacks if (name := collective(stacks[rank]))}
        # ranks that are in the same collective as at the previous sample
        staying: dict[str, list[int]] = {}
        for rank, name in collectives.items():
            if is_in_same_collective(previous.get(rank), stacks[rank], cpu_threshold):
                staying.setdefault(name, []).append(rank)
        self.deserted = staying if ended else {}
        all_stay = sum(map(len, staying.values())) == len(stacks)
        self.apart = staying if all_stay and len(staying) > 1 and not ended else {}
        is_suspect = bool(collectives) and (
            bool(ended) or (len(collectives) == len(stacks) and len(set(collectives.values())) > 1)
        )
        # A rank that all others wait for, while collectives progress, is slow rather than stuck.
        behind = ranks_behind(stacks)
        self._behind.append(
            frozenset(behind)
            if all_progressed(previous, stacks) and are_only_ones_outside(behind, stacks)
            else frozenset()
        )
        is_still = (
            bool(previous)
            and not self._moved
            and is_standing_still(previous, stacks, cpu_threshold)
        )
        self._moved = False
        # a stall is reported once nothing has changed for `after` seconds
        if not is_still:
            self._since, self.standing = now, None
        elif self.standing is None and now - self._since >= self._after:
            self.standing = self._standstill(ended, behind, stacks)
        # sample again soon if ranks may be waiting in vain
        self.due = now + (min(FIRST_SAMPLE, self._interval) if is_suspect else self._interval)
        if is_still and self.standing is None:
            self.due = min(self.due, self._since + self._after)

    def _standstill(
        self, ended: Sequence[int], behind: Sequence[int], stacks: Stacks
    ) -> Standstill:
        duration = f"no progress for {self._after:g} s"
        if in_vain := self.vain_wait_text(ended):
            return Standstill(f"{duration}: {in_vain}", text.stacks(stacks))
        ranks = sorted(behind or stacks)
        state = "behind" if behind else "not advancing"
        description = f"{rank_words(ranks)} {verb_form(len(ranks), 'is', 'are')} {state}"
        if ended:
            description += f", {ended_text(ended)}"
        return Standstill(f"{duration}: {description}", text.stacks(stacks))

    def vain_wait_text(self, ended: Sequence[int]) -> str:
        """Describe ranks that wait for ranks that will not come, as a part of a line; "" for none.

        Args:
            ended: ranks whose cell is over now.
        """
        return deserted_text(self.deserted, ended) or diverged_text(self.apart)


def deserted_text(deserted: Mapping[str, Sequence[int]], ended: Sequence[int]) -> str:
    """Describe ranks that wait for ended ranks: "rank 0 waits in all_reduce, rank 1 has ended".

    Return "" for none.
    """
    waiting = {
        name: remaining
        for name, ranks in deserted.items()
        if (remaining := [rank for rank in ranks if rank not in ended])
    }
    return f"{_waiting_words(waiting)}, {ended_text(ended)}" if waiting else ""


def diverged_text(apart: Mapping[str, Sequence[int]]) -> str:
    """Describe ranks in different collectives: "rank 0 waits in all_reduce, rank 1 in broadcast".

    Return "" for none.
    """
    return _waiting_words(apart) if apart else ""


def ended_text(ended: Sequence[int]) -> str:
    """Describe ranks whose cell is over: "rank 1 has ended"."""
    return f"{rank_words(list(ended))} {verb_form(len(ended), 'has', 'have')} ended"


def _waiting_words(waiting: Mapping[str, Sequence[int]]) -> str:
    """List ranks by the collective that they wait in; the verb is used once."""
    (first, ranks), *more = waiting.items()
    verb = verb_form(len(ranks), "waits", "wait")
    parts = [f"{rank_words(list(ranks))} {verb} in {first}"]
    parts += [f"{rank_words(list(ranks))} in {name}" for name, ranks in more]
    return ", ".join(parts)


def ranks_behind(stacks: Stacks) -> list[int]:
    """Return the ranks that have begun fewer collectives than others."""
    counts_by_rank = _collective_counts(stacks)
    counts = {count for count in counts_by_rank.values() if count is not None}
    return [
        rank for rank, count in counts_by_rank.items() if len(counts) > 1 and count == min(counts)
    ]


def are_only_ones_outside(behind: Sequence[int], stacks: Stacks) -> bool:
    """Return True if exactly these ranks are outside of collectives and backward passes.

    A backward pass counts because it contains DDP's collectives.
    """

    def within(stack: Stack | None) -> bool:
        frames = () if stack is None else stack.frames
        return bool(frames) and any(part in frames[-1].file for part in AWAITING)

    return bool(behind) and all(
        within(stack) is (rank not in behind) for rank, stack in stacks.items()
    )


def collective(stack: Stack | None) -> str:
    """Return the collective that a rank is in, or the pass of DDP that contains some; else ""."""
    if stack is None or not stack.frames:
        return ""
    innermost = stack.frames[-1]
    file = innermost.file
    # DDP's own frames call the model in another file, so an innermost frame here synchronizes
    if file.endswith(DDP):
        return "the forward pass of DDP"
    if AUTOGRAD in file:
        return BACKWARD
    return innermost.name if COLLECTIVES in file else ""


def is_in_same_collective(before: Stack | None, now: Stack | None, working: float) -> bool:
    """Return True if a rank is in the same collective as at the previous sample.

    A backward pass may compute as well as wait: it only counts if it used no CPU time.

    Args:
        working: seconds of CPU time that count as work.
    """
    if before is None or now is None:
        return before is now
    if (before.frames, before.collectives) != (now.frames, now.collectives):
        return False
    # a backward pass may compute as well as wait
    return now.cpu - before.cpu < working or collective(now) != BACKWARD


def _collective_counts(stacks: Stacks) -> dict[int, int | None]:
    """Return how many collectives each rank has begun."""
    return {rank: None if stack is None else stack.collectives for rank, stack in stacks.items()}


def all_progressed(before: Stacks, now: Stacks) -> bool:
    """Return True if all ranks have begun collectives between two samples."""
    counts, earlier = _collective_counts(now), _collective_counts(before)
    return all(
        count is not None and count != earlier.get(rank, count) for rank, count in counts.items()
    )


def is_in_collective(stack: Stack) -> bool:
    """Return True if a stack is in a collective."""
    return any("distributed" in frame.file for frame in stack.frames)


def is_standing_still(before: Stacks, now: Stacks, working: float) -> bool:
    """Return True if nothing has changed on any rank between two samples.

    Changes are another frame, a collective, CPU time, bytes read or written, and a process that was
    started or has ended. The CPU time of a rank that waits in a collective does not count, because
    it may poll.

    Args:
        working: seconds of CPU time that count as work.
    """

    def same(first: Stack | None, second: Stack | None) -> bool:
        if first is None or second is None:
            return first is second
        if (first.frames, first.collectives) != (second.frames, second.collectives):
            return False
        if is_in_collective(second):  # it may poll, so its CPU time does not count
            return True
        if (first.processes, first.io) != (second.processes, second.io):
            return False
        return second.cpu - first.cpu < working

    return before.keys() == now.keys() and all(same(before[rank], now[rank]) for rank in now)


class SignsOfLife:
    """Last sign of life of each rank.

    Signs of life are: waiting for others, CPU time of the main thread, waiting for the CPU, and
    waiting for a disk. A rank that executes a cell's code while no cell is running shows none: a
    cell has substituted that code for a function.
    """

    def __init__(self) -> None:
        # rank → (time of its last sign of life, its CPU time then)
        self._last: dict[int, tuple[float, float]] = {}

    def hanging(
        self,
        now: float,
        usage: Mapping[int, ThreadUsage | None],
        joining: Mapping[int, Joining | None],
    ) -> list[int]:
        """Return ranks that others wait for, without a sign of life for `HANG_DEADLINE` seconds.

        Args:
            usage: state and CPU time of each rank's main thread, as its agent reports it; None if
                unknown.
            joining: reports of the ranks' control threads that answer.
        """
        reports = {rank: joining.get(rank) or Joining(False, False) for rank in usage}
        for rank, thread in usage.items():
            # An unknown state counts as alive: a rank must not be killed because its agent is slow.
            state, cpu = (thread.state, thread.cpu_seconds) if thread is not None else ("", 0.0)
            _, before = self._last.setdefault(rank, (now, cpu))
            is_alive = reports[rank].waits or state != SLEEPS or cpu - before > CPU_TIME
            if is_alive and not reports[rank].in_cell:
                self._last[rank] = now, cpu
        # only a rank that others wait for counts as hanging
        if not any(report.waits for report in reports.values()):
            return []
        return [rank for rank in usage if now - self._last[rank][0] >= HANG_DEADLINE]


@dataclass
class HangWatch:
    """Samples ranks while the block runs, and kills those that hang.

    If a restarted rank fails, the watch releases the others.

    Args:
        pending: returns the ranks that are still executing the order.
        starting: restarted ranks, which join the group as part of their start.
    """

    _agents: Agents
    _pending: Callable[[], Collection[int]]
    _starting: Collection[int] = ()
    problems: dict[int, str] = field(default_factory=dict)
    """Ranks that were killed or could not start, with the reasons."""
    _signs: SignsOfLife = field(default_factory=SignsOfLife)
    _over: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __enter__(self) -> HangWatch:
        threading.Thread(target=self._run, name="skymagic-hanging", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._over, WATCH_INTERVAL):
                    return
            failed, hanging = self._failed(), self._hanging()
            with self._changed:
                # The order may have ended during the queries: its ranks must not be killed now.
                if self._over:
                    return
                self.problems |= failed | dict.fromkeys(
                    hanging, f"it hung for {HANG_DEADLINE:.0f} s"
                )
                self._agents.signal(hanging, signal.SIGKILL)
                # a restarted rank that failed cannot join: release the ranks that wait for it
                if not self.problems.keys().isdisjoint(self._starting):
                    self._agents.ask(self._pending(), queries.RELEASE, timeout=0.0)

    def _failed(self) -> dict[int, str]:
        states = {
            rank: self._agents.ranks[rank] for rank in self._starting if rank not in self.problems
        }
        failed = {
            rank: f"{state.failed.ename}: {state.failed.evalue}"
            for rank, state in states.items()
            if state.failed
        }
        return failed | {
            rank: describe(state.exited) for rank, state in states.items() if state.exited
        }

    def _hanging(self) -> list[int]:
        # A rank whose node is not connected could show no sign of life.
        ranks = [rank for rank in self._pending() if not self._agents.is_away(rank)]
        usage = self._agents.ask(ranks, queries.USAGE, ANSWER_TIMEOUT)
        joining = self._agents.ask(ranks, queries.JOINING, ANSWER_TIMEOUT)
        return self._signs.hanging(
            time.monotonic(), {rank: usage.get(rank) for rank in ranks}, joining
        )
