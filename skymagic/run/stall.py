"""Ranks that make no progress: where ranks are, by their control threads; stalls in a cell; and ranks that hang by themselves while others
form a process group with them.

A stall is told, and nothing is stopped. A rank that hangs while a group is formed is killed. A deadline alone would kill a healthy rank on
a busy machine too. What tells them apart is the main thread: one that waits for its turn on the processor, or for the other ranks, continues
when it can; one that sleeps elsewhere, or runs what a cell has put in the place of a function, does not, and all others wait for it::

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
from dataclasses import dataclass, field
from typing import Any

from skymagic.cluster import Agents
from skymagic.display import text
from skymagic.plan.units import agreeing, rank_words
from skymagic.wire.processes import describe

Stacks = Mapping[int, Mapping[str, Any] | None]
BUSY_SHARE = 0.01
"""Share of the time between two samples which, on the processor, counts as work."""
SAMPLE_COST = 0.02
"""Seconds on the processor that a rank may need to tell a sample, where the machine is slow or has many processes."""
LAST_SAMPLES = 5
"""Samples in a row at which the others wait for the same rank, from which it is always last: of ranks alike it is each time another."""
COLLECTIVES = "torch/distributed/"
DDP = "torch/nn/parallel/distributed.py"
AUTOGRAD = "torch/autograd/"
BACKWARD = "a backward pass"
AWAITING = (COLLECTIVES, AUTOGRAD)
"""In the path of the innermost frame of a rank that is in a collective, or in a backward pass."""
FIRST_SAMPLE = 1.0
"""Seconds until the first sample, from which it is counted: most cells are over by then."""
HANG_DEADLINE = 5.0
"""Seconds without a sign of life after which a rank counts as hanging."""
WATCH_INTERVAL = 0.5  # seconds between two samples; a group is formed in less than one
ANSWER_TIMEOUT = 1.0
"""Seconds in which agents and ranks answer."""
CPU_TIME = 0.05
"""Seconds of processor time that are a sign of life."""
SLEEPS = "S"  # the state of a Linux thread that waits for an event; one that waits for its turn is R, for a disk D


def stacks_of(agents: Agents, ranks: Sequence[int], timeout: float) -> Stacks:
    """Stacks of ranks: as their control threads tell, else as a signal handler does; None of those that do neither.

    Args:
        timeout: seconds for each of the two.
    """
    answers = agents.ask(ranks, "stacks", timeout=timeout)
    if silent := [rank for rank in ranks if answers.get(rank) is None]:
        answers |= agents.ask(silent, "native", timeout=timeout)
        # such a rank cannot tell how much it computes, but its agent can
        for rank, used in agents.ask(silent, "usage", timeout=timeout).items():
            if used and (stack := answers.get(rank)):
                answers[rank] = {**stack, "cpu": used[1]}
    return {rank: answers.get(rank) for rank in ranks}


def variables_of(
    agents: Agents, ranks: Sequence[int], timeout: float
) -> dict[int, Mapping[str, Mapping[str, str]]]:
    """By rank and name what it holds: its type, size or shape, checksum; without ranks that did not answer in time."""
    answers = agents.ask(ranks, "variables", timeout=timeout)
    return {rank: names for rank, names in sorted(answers.items()) if names is not None}


@dataclass(frozen=True)
class Standstill:
    """What to tell the user of ranks on which nothing changes.

    Attributes:
        summary: in one line, who stands still and for how long.
        places: where each rank is, in a line each.
    """

    summary: str
    places: str


class Stall:
    """Detector of ranks that stand still, from samples of their stacks. Pure: the caller brings stacks and time.

    Attributes:
        standing: what to tell the user while nothing changes on any rank; None as soon as something does.

    Args:
        after: seconds without any change until it is told; infinite for never.
        now: monotonic seconds.
    """

    SAMPLES = 5
    """Samples in the time that must pass."""

    def __init__(self, after: float, now: float) -> None:
        self._after = after
        self._interval = after / self.SAMPLES
        self._last: Stacks = {}
        self._last_at = self._since = now
        self._moved = False
        self.standing: Standstill | None = None
        self.deserted: dict[str, list[int]] = {}
        """By a collective's name, ranks that were in the same one at the last two samples while others had ended."""
        self.apart: dict[str, list[int]] = {}
        """All ranks by the collective that they were in at the last two samples, if that is not the same one for all."""
        self._behind: deque[frozenset[int]] = deque(maxlen=LAST_SAMPLES)
        self.due: float | None = (
            now + min(FIRST_SAMPLE, self._interval) if after < math.inf else None
        )

    @property
    def waiting(self) -> list[int]:
        """Ranks that were in a collective, at the last sample, to which others had not come."""
        behind = those_behind(self._last)
        return [
            rank
            for rank, stack in self._last.items()
            if behind and rank not in behind and stack and waits(stack)
        ]

    def moved(self) -> None:
        """Note that a rank has shown or reported something since the last sample."""
        self._moved = True
        if self.standing is not None:
            self.due = self._last_at  # withdraw it now

    def hasten(self, now: float) -> None:
        """A rank has ended: whether others wait for it is to be seen soon."""
        if self.due is not None:
            self.due = min(self.due, now + FIRST_SAMPLE / 2)

    @property
    def always_last(self) -> list[int]:
        """Ranks for which all others have waited in a collective at each of the last samples, though the collectives went on."""
        if len(self._behind) < LAST_SAMPLES:
            return []
        return sorted(frozenset.intersection(*self._behind))

    def observe(self, ended: Sequence[int], stacks: Stacks, now: float) -> None:
        """Take one sample.

        Args:
            ended: ranks whose cell is over.
            stacks: of all others, as ranks tell them: frames, and the number of collectives begun.
        """
        before, self._last = self._last, stacks
        working = BUSY_SHARE * (now - self._last_at) + SAMPLE_COST
        self._last_at = now
        inside = {rank: name for rank in stacks if (name := collective(stacks[rank]))}
        staying: dict[str, list[int]] = {}
        for rank, name in inside.items():
            if stays(before.get(rank), stacks[rank], working):
                staying.setdefault(name, []).append(rank)
        self.deserted = staying if ended else {}
        all_stay = sum(map(len, staying.values())) == len(stacks)
        self.apart = staying if all_stay and len(staying) > 1 and not ended else {}
        suspect = bool(inside) and (
            bool(ended) or (len(inside) == len(stacks) and len(set(inside.values())) > 1)
        )
        behind = those_behind(stacks)
        self._behind.append(
            frozenset(behind)
            if went_on(before, stacks) and awaited(behind, stacks)
            else frozenset()
        )
        still = bool(before) and not self._moved and stand_still(before, stacks, working)
        self._moved = False
        if not still:
            self._since, self.standing = now, None
        elif self.standing is None and now - self._since >= self._after:
            self.standing = self._standstill(ended, behind, stacks)
        self.due = now + (min(FIRST_SAMPLE, self._interval) if suspect else self._interval)
        if still and self.standing is None:
            self.due = min(self.due, self._since + self._after)

    def _standstill(
        self, ended: Sequence[int], behind: Sequence[int], stacks: Stacks
    ) -> Standstill:
        stays_for = f"no progress for {self._after:g} s"
        if in_vain := self.in_vain(ended):
            return Standstill(f"{stays_for}: {in_vain}", text.stacks(stacks))
        ranks = sorted(behind or stacks)
        how = "behind" if behind else "not advancing"
        words = f"{rank_words(ranks)} {agreeing(len(ranks), 'is', 'are')} {how}"
        if ended:
            words += f", {ended_words(ended)}"
        return Standstill(f"{stays_for}: {words}", text.stacks(stacks))

    def in_vain(self, ended: Sequence[int]) -> str:
        """Return who waits for ranks that will not come, as a part of a line; "" for nobody.

        Args:
            ended: ranks whose cell is over now.
        """
        return deserted_words(self.deserted, ended) or apart_words(self.apart)


def deserted_words(deserted: Mapping[str, Sequence[int]], ended: Sequence[int]) -> str:
    """Ranks that wait for others which have ended: "rank 0 waits in all_reduce, rank 1 has ended"; "" for none."""
    waiting = {
        name: left
        for name, ranks in deserted.items()
        if (left := [rank for rank in ranks if rank not in ended])
    }
    return f"{_waiting_words(waiting)}, {ended_words(ended)}" if waiting else ""


def apart_words(apart: Mapping[str, Sequence[int]]) -> str:
    """Ranks in different collectives: "rank 0 waits in all_reduce, rank 1 in broadcast"; "" for none."""
    return _waiting_words(apart) if apart else ""


def ended_words(ended: Sequence[int]) -> str:
    """Ranks whose cell is over: "rank 1 has ended"."""
    return f"{rank_words(list(ended))} {agreeing(len(ended), 'has', 'have')} ended"


def _waiting_words(waiting: Mapping[str, Sequence[int]]) -> str:
    """Which ranks wait in which collective; the verb stands once."""
    (first, ranks), *others = waiting.items()
    verb = agreeing(len(ranks), "waits", "wait")
    words = [f"{rank_words(list(ranks))} {verb} in {first}"]
    words += [f"{rank_words(list(ranks))} in {name}" for name, ranks in others]
    return ", ".join(words)


def those_behind(stacks: Stacks) -> list[int]:
    """The ranks that have begun fewer collectives than others."""
    begun = {rank: (stack or {}).get("collectives") for rank, stack in stacks.items()}
    counts = {count for count in begun.values() if count is not None}
    return [rank for rank, count in begun.items() if len(counts) > 1 and count == min(counts)]


def awaited(behind: Sequence[int], stacks: Stacks) -> bool:
    """Whether all other ranks are in a collective, or in a backward pass, which has DDP's in it, and these are in neither."""

    def within(stack: Mapping[str, Any] | None) -> bool:
        frames = [] if stack is None else stack["frames"]
        return bool(frames) and any(part in str(frames[-1].get("file")) for part in AWAITING)

    return bool(behind) and all(
        within(stack) is (rank not in behind) for rank, stack in stacks.items()
    )


def collective(stack: Mapping[str, Any] | None) -> str:
    """The collective that a rank is in, or the pass of DDP that has some in it; "" for none."""
    innermost = stack["frames"][-1] if stack is not None and stack["frames"] else {}
    file = str(innermost.get("file"))
    if file.endswith(DDP):  # it calls the model elsewhere: what it does itself is to synchronise
        return "the forward pass of DDP"
    if AUTOGRAD in file:
        return BACKWARD
    return str(innermost["name"]) if COLLECTIVES in file else ""


def stays(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None, working: float) -> bool:
    """Whether a rank is in the same collective as at the sample before.

    A backward pass may compute as well as wait: there it must have used no processor time.

    Args:
        working: seconds on the processor that count.
    """
    if _at(before) != _at(now):
        return False
    idle = (now or {}).get("cpu", 0.0) - (before or {}).get("cpu", 0.0) < working
    return idle or collective(now) != BACKWARD


def _at(stack: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """Where a rank is, and how many collectives it has begun."""
    return (None, None) if stack is None else (stack["frames"], stack["collectives"])


def went_on(before: Stacks, now: Stacks) -> bool:
    """Whether all ranks have begun collectives between two samples."""
    counts = {rank: (stack or {}).get("collectives") for rank, stack in now.items()}
    earlier = {rank: (stack or {}).get("collectives") for rank, stack in before.items()}
    return all(
        count is not None and count != earlier.get(rank, count) for rank, count in counts.items()
    )


def waits(stack: Mapping[str, Any]) -> bool:
    """Whether a stack is in a collective."""
    return any("distributed" in str(frame.get("file")) for frame in stack["frames"])


def stand_still(before: Stacks, now: Stacks, working: float) -> bool:
    """Whether nothing has changed on any rank between two samples.

    A change is another frame, a collective, processor time, bytes read or written, a process that was started or has ended.
    The processor time of a rank that waits in a collective does not count: it may poll.

    Args:
        working: seconds on the processor that count.
    """

    def same(one: Mapping[str, Any] | None, two: Mapping[str, Any] | None) -> bool:
        if one is None or two is None:
            return one is two
        if any(one.get(part) != two.get(part) for part in ("frames", "collectives")):
            return False
        if waits(two):
            return True
        if any(one.get(part) != two.get(part) for part in ("processes", "io")):
            return False
        return bool(two.get("cpu", 0.0) - one.get("cpu", 0.0) < working)

    return before.keys() == now.keys() and all(same(before[rank], now[rank]) for rank in now)


class SignsOfLife:
    """The last sign of life of each rank: it waits for others, or its main thread has worked, or waits for its turn or a disk.

    One that runs code of a cell, though no cell runs, gives none: a cell has put that in the place of a function.
    """

    def __init__(self) -> None:
        self._last: dict[
            int, tuple[float, float]
        ] = {}  # by rank: when, and its processor time then

    def hanging(
        self, now: float, usage: Mapping[int, Any], joining: Mapping[int, Any]
    ) -> list[int]:
        """The ranks for which others wait, and which have given no sign of life for `HANG_DEADLINE`.

        Args:
            usage: state and processor time of each rank's main thread, as agents tell it; None where nobody can.
            joining: what its control thread says, if it can.
        """
        said = {rank: joining.get(rank) or {} for rank in usage}
        for rank, seen in usage.items():
            state, cpu = seen or ("", 0.0)
            _, before = self._last.setdefault(rank, (now, cpu))
            lives = said[rank].get("waits") or state != SLEEPS or cpu - before > CPU_TIME
            if lives and not said[rank].get("in_cell"):
                self._last[rank] = now, cpu
        if not any(each.get("waits") for each in said.values()):
            return []
        return [rank for rank in usage if now - self._last[rank][0] >= HANG_DEADLINE]


@dataclass
class HangWatch:
    """Samples ranks while the block runs, and kills those that hang. Where one that is started anew fails, it releases the others.

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
                if self._over:
                    return
                self.found |= failed | dict.fromkeys(hanging, f"it hung for {HANG_DEADLINE:.0f} s")
                self._agents.signal(hanging, signal.SIGKILL)
                if not self.found.keys().isdisjoint(self._starting):
                    self._agents.ask(self._pending(), "release", timeout=0.0)

    def _failed(self) -> dict[int, str]:
        states = {
            rank: self._agents.ranks[rank] for rank in self._starting if rank not in self.found
        }
        failed = {
            rank: f"{one.failed.ename}: {one.failed.evalue}"
            for rank, one in states.items()
            if one.failed
        }
        return failed | {rank: describe(one.exited) for rank, one in states.items() if one.exited}

    def _hanging(self) -> list[int]:
        ranks = [rank for rank in self._pending() if not self._agents.is_away(rank)]
        usage = self._agents.ask(ranks, "usage", ANSWER_TIMEOUT)
        joining = self._agents.ask(ranks, "joining", ANSWER_TIMEOUT)
        return self._signs.hanging(
            time.monotonic(), {rank: usage.get(rank) for rank in ranks}, joining
        )
