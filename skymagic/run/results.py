"""What the ranks sent back: values in rank order, or one error that sums up what failed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.errors import RankDied, RankError, RunError
from skymagic.plan.masking import without_colours
from skymagic.plan.units import rank_words

PEER_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "ConnectionError", "ConnectionResetError")
PEER_TEXTS = re.compile("connection closed by peer|connection reset|broken pipe|socket closed|nccl|closed by remote")
"""What a rank says whose peer went away: a consequence, not a cause."""


@dataclass(frozen=True)
class Failure:
    """A rank that did not end its cell well."""

    rank: int
    hostname: str
    ename: str
    evalue: str
    traceback: tuple[str, ...] = ()
    exception: BaseException | None = None
    freed: bool = False
    """It was let out of a collective, or interrupted, because another rank had failed."""
    died: str = ""
    """How its process ended, in words; empty if it lives."""
    status: int | None = None
    tail: str = ""

    @property
    def words(self) -> str:
        """What happened, in a line."""
        if self.died:
            return f"cannot be reached: {self.died}" if self.status is None else f"died: {self.died}"
        return f"{self.ename}: {self.evalue.splitlines()[0]}" if self.evalue else self.ename

    @property
    def only_stopped(self) -> bool:
        """Whether it shows nothing of its own: another rank's failure ended it."""
        return self.freed and (self.ename == "KeyboardInterrupt" or is_connection_error(self.ename, self.evalue))

    @property
    def secondary(self) -> bool:
        """Whether this only followed from another rank's failure."""
        return self.freed or (not self.died and is_connection_error(self.ename, self.evalue))


@dataclass(frozen=True)
class Unavailable:
    """Stands in the place of a value that could not come back."""

    rank: int
    reason: str

    def __repr__(self) -> str:
        return f"<unavailable: rank {self.rank}: {self.reason}>"


def is_connection_error(ename: str, evalue: str) -> bool:
    """Whether an error says that a peer went away."""
    return ename in PEER_ERRORS and PEER_TEXTS.search(evalue.lower()) is not None


def summary(cause: Failure, failures: Sequence[Failure], world: int, notes: Sequence[str] = ()) -> str:
    """The lines under the traceback: which ranks failed how, which were stopped, what is lost."""
    where = f"[rank {cause.rank} of {world} on {cause.hostname}]"
    if cause.died:
        where = f"rank {cause.rank} on {cause.hostname} {cause.words}"
    others = [f for f in failures if f.rank != cause.rank]
    kind = (cause.ename, cause.evalue, cause.died)
    # one that was stopped has not failed by itself, though both may end with a KeyboardInterrupt
    same = [f.rank for f in others if (f.ename, f.evalue, f.died) == kind and f.only_stopped <= cause.only_stopped]
    if same:
        where += f" and the same on {rank_words(same)}"
    lines = [
        where,
        *(f"rank {f.rank}: {without_colours(f.words)}"[:200] for f in others if f.rank not in same and not f.secondary),
    ]
    if freed := [f.rank for f in others if f.rank not in same and f.secondary]:
        lines.append(f"{rank_words(freed)} had to be stopped")
    return "\n".join([*lines, *notes])


def error_of(failures: Sequence[Failure], world: int, notes: Sequence[str] = ()) -> RunError:
    """One error for a failed run; raise it ``from`` its ``cause`` attribute's exception.

    The error's type is made from RankError and the type that the rank raised, so that ``except ValueError`` catches it.
    """
    # what the others follow from: a dead rank first, then the first that no other explains
    cause = min(failures, key=lambda failure: (not failure.died, failure.secondary))
    below = summary(cause, failures, world, notes)
    error: RunError
    if cause.died:
        last = last_words(cause.tail)
        tail = ["the last lines of its log:", *("  " + line for line in last)] if last else []
        error = RankDied("\n".join([below, *tail]), rank=cause.rank, hostname=cause.hostname, status=cause.status)
    else:
        message = f"{cause.evalue}\n{below}" if cause.evalue else below
        error = rank_error(cause, message, below)
    error.failures = tuple(failures)
    error.__cause__ = cause.exception
    return error


def last_words(tail: str, lines: int = 8) -> list[str]:
    """The end of a dead rank's log; of a crash that Python reports, the frames down to the cell."""
    log = tail.splitlines()
    crash = next((i for i, line in enumerate(log) if line.startswith("Fatal Python error")), None)
    if crash is None:
        return log[-lines:]
    before, report = log[max(0, crash - 3) : crash], log[crash:]
    frames = [line for line in report if line.startswith('  File "')]
    cell = next((i for i, line in enumerate(frames) if "ipykernel_" in line), len(frames[:lines]) - 1)
    words = [
        re.sub(r'File "[^"]*ipykernel_[^"]*", line (\d+) in (.*)', r"line \1 of the cell, in \2", line)
        for line in frames[: cell + 1]
    ]
    return [*before, report[0], *words[:lines]]


def rank_error(cause: Failure, message: str, below: str) -> RankError:
    """A RankError that is also an instance of what the rank raised, where Python allows such a type.

    SystemExit and its like would end the notebook's own code instead of failing a cell, and a SyntaxError IPython shows by itself.
    """
    values: Mapping[str, Any] = {
        "rank": cause.rank, "hostname": cause.hostname, "ename": cause.ename, "evalue": cause.evalue,
        "traceback": cause.traceback, "below": below,
    }  # fmt: skip
    original = type(cause.exception)
    if issubclass(original, Exception) and not (issubclass(original, SyntaxError) or issubclass(RankError, original)):
        try:
            kind = type(cause.ename, (RankError, original), {"__module__": original.__module__})
            return kind(message, **values)  # type: ignore[no-any-return]
        except Exception:  # a layout conflict, or a constructor of its own
            pass
    return RankError(message, **values)
