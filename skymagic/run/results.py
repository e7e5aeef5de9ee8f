"""Results of the ranks: values in rank order, or one error that summarizes the failures.

The error also has the type that a rank raised.
"""

from __future__ import annotations

import asyncio
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.data.capture.numbering import CELL_FILE
from skymagic.data.values.exceptions import bare, fill, members, state_of
from skymagic.errors import RankDied, RankError, RankReport, RunError
from skymagic.plan.masking import without_colours
from skymagic.plan.units import rank_words, verb_form

_NAMED_ONLY = (SystemExit, GeneratorExit, asyncio.CancelledError, SyntaxError)
"""Types that an error only names instead of deriving from them.

The first ones would end more than the cell, and IPython shows a SyntaxError itself, without the
rank's traceback.
"""
PEER_ERRORS = (
    "RuntimeError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "DistError",
    "ConnectionError",
    "ConnectionResetError",
    "ConnectionRefusedError",
    "ConnectionAbortedError",
    "BrokenPipeError",
    "TimeoutError",
)


def rank_error(original: BaseException | None, report: RankReport) -> RankError:
    """Create a RankError that is also of the rank's exception type, if Python allows such a type.

    Otherwise the error only has the name of that type.

    Args:
        original: the rank's exception, or None if it could not be rebuilt.
        report: attributes of the error.
    """
    if original is not None:
        try:
            return as_rank_error(original, report)
        except Exception:  # the type's own metaclass or __init_subclass__, or another layout
            pass
    named: type[RankError] = _type(report.ename, (RankError,), {"__module__": "builtins"})
    return named._from_report(report)


def as_rank_error(original: BaseException, report: RankReport) -> RankError:
    """Copy an exception as a RankError."""
    base = type(original)
    both = not issubclass(base, _NAMED_ONLY) and base not in RankError.__mro__
    # the exception's own methods and properties take precedence
    kind = _type(
        base.__name__,
        (base, RankError) if both else (RankError,),
        {"__module__": base.__module__, "__qualname__": base.__qualname__},
    )
    error = bare(kind, members(original) if both else ())
    fill(error, (state_of(original), None))
    assert isinstance(error, RankError)
    RankError._set_report(error, report)
    if not _has_message(error, report.evalue):
        # Not `setattr`, which the exception's own metaclass may override.
        type.__setattr__(kind, "__str__", lambda self: self._report.evalue)
    return error


def _has_message(error: RankError, message: str) -> bool:
    """Return True if the error's message is the one it had on the rank.

    Its ``__str__`` may need something that only exists on the rank, or fail.
    """
    try:
        return str(error) == message
    except Exception:
        return False


def _type(name: str, bases: tuple[type, ...], members: Mapping[str, object]) -> Any:
    # RankError's rendering and pickling override those of the exception
    methods = {name: vars(RankError)[name] for name in ("_render_traceback_", "__reduce__")}
    return types.new_class(
        name, bases, exec_body=lambda space: space.update({**members, **methods})
    )


PEER_TEXTS = re.compile(
    "connection closed by peer|connection reset|broken pipe|socket closed|nccl|closed by remote"
)
"""Messages of ranks whose peer went away: a consequence, not a cause."""
KILLED = "Killed"
"""Name of the error of a rank that did not stop, although another rank had failed."""


@dataclass(frozen=True)
class RankFailure:
    """A rank whose cell failed."""

    rank: int
    hostname: str
    ename: str
    evalue: str
    traceback: tuple[str, ...] = ()
    exception: BaseException | None = None
    freed: bool = False
    """True if it was released from a collective or interrupted because another rank failed."""
    died: str = ""
    """Description of how its process ended; empty if it is alive."""
    status: int | None = None
    tail: str = ""

    @property
    def summary(self) -> str:
        """Description of the failure, in a line."""
        if self.died:
            return (
                f"cannot be reached: {self.died}" if self.status is None else f"died: {self.died}"
            )
        return f"{self.ename}: {self.evalue.splitlines()[0]}" if self.evalue else self.ename

    def is_like(self, other: RankFailure) -> bool:
        """Return True if another rank failed in the same way."""
        alike = (self.ename, self.evalue, self.died) == (other.ename, other.evalue, other.died)
        # a stopped rank did not fail by itself, although both may end with a KeyboardInterrupt
        return alike and self.was_only_stopped <= other.was_only_stopped

    @property
    def was_only_stopped(self) -> bool:
        """True if the rank was only stopped because of another rank's failure."""
        return self.freed and (
            self.ename == "KeyboardInterrupt" or is_connection_error(self.ename, self.evalue)
        )

    @property
    def is_secondary(self) -> bool:
        """True if this failure only followed from another rank's failure."""
        return self.freed or (not self.died and is_connection_error(self.ename, self.evalue))


@dataclass(frozen=True)
class Unavailable:
    """Placeholder for a value that could not be sent back."""

    rank: int
    reason: str

    def __repr__(self) -> str:
        return f"<unavailable: rank {self.rank}: {self.reason}>"


def may_be_connection_error(ename: str) -> bool:
    """Return True if errors of this type may mean a lost peer, even with an unknown message."""
    return ename in PEER_ERRORS


def is_connection_error(ename: str, evalue: str) -> bool:
    """Return True if an error means that a peer went away."""
    return ename in PEER_ERRORS and PEER_TEXTS.search(evalue.lower()) is not None


def heading(cause: RankFailure, failures: Sequence[RankFailure], world: int) -> str:
    """Name the rank that failed, and the ranks that failed in the same way."""
    text = f"[rank {cause.rank} of {world} on {cause.hostname}]"
    if cause.died:
        text = f"rank {cause.rank} on {cause.hostname} {cause.summary}"
    same_ranks = [
        failure.rank
        for failure in failures
        if failure.rank != cause.rank and failure.is_like(cause)
    ]
    return f"{text} and the same on {rank_words(same_ranks)}" if same_ranks else text


def other_failure_lines(cause: RankFailure, failures: Sequence[RankFailure]) -> list[str]:
    """Return lines on ranks that failed in other ways, or were stopped."""
    other_failures = [
        failure for failure in failures if failure.rank != cause.rank and not failure.is_like(cause)
    ]
    ranks_by_words: dict[str, list[int]] = {}
    for failure in other_failures:
        if not failure.is_secondary:
            ranks_by_words.setdefault(without_colours(failure.summary), []).append(failure.rank)
    lines = [f"{rank_words(ranks)}: {summary}"[:200] for summary, ranks in ranks_by_words.items()]
    # Failures that only follow from another one are summed up in a line. Killed ranks have one of
    # their own, with what becomes of them.
    stopped = [item.rank for item in other_failures if item.is_secondary and item.ename != KILLED]
    if stopped:
        are_intact = not any(item.died or item.ename == KILLED for item in failures)
        lines.append(_stopped_words(stopped, cause, are_intact))
    return lines


def _stopped_words(ranks: Sequence[int], cause: RankFailure, are_intact: bool) -> str:
    """Return why ranks were stopped, and what to do next if no rank has to be restarted."""
    number, failed = len(ranks), "failed"
    if cause.died:
        failed = "died" if cause.status is not None else "cannot be reached"
    was = verb_form(number, "was", "were")
    text = f"{rank_words(ranks)} {was} stopped because rank {cause.rank} {failed}"
    if not are_intact:
        return text
    keep = verb_form(number, "it keeps its variables", "they keep their variables")
    return f"{text}; {keep}: correct the error and run the cell again"


def error_of(failures: Sequence[RankFailure], world: int, notes: Sequence[str] = ()) -> RunError:
    """Create one error for a failed run, with the rank's exception as its cause."""
    # the root cause: a dead rank first, then the first failure that no other failure explains
    cause = min(failures, key=lambda failure: (not failure.died, failure.is_secondary))
    title, below = heading(cause, failures, world), [*other_failure_lines(cause, failures), *notes]
    error: RunError
    if cause.died:
        last_lines = log_end(cause.tail)
        log_lines = (
            ["the last lines of its log:", *("  " + line for line in last_lines)]
            if last_lines
            else []
        )
        text = "\n".join([title, *below, *log_lines])
        error = RankDied(text, rank=cause.rank, hostname=cause.hostname, status=cause.status)
    else:
        error = rank_error(
            cause.exception,
            RankReport(
                rank=cause.rank,
                hostname=cause.hostname,
                ename=cause.ename,
                evalue=cause.evalue,
                traceback=tuple(cause.traceback),
                heading=title,
                below=tuple(below),
            ),
        )
    # Keep an attribute of this name that the exception had on its rank.
    vars(error).setdefault("failures", tuple(failures))
    object.__setattr__(error, "__cause__", cause.exception)  # works for frozen dataclasses too
    return error


def log_end(tail: str, lines: int = 8) -> list[str]:
    """Return the end of a dead rank's log, or a crash report's frames down to the cell."""
    log = tail.splitlines()
    crash = next((i for i, line in enumerate(log) if line.startswith("Fatal Python error")), None)
    if crash is None:
        return log[-lines:]
    before, report = log[max(0, crash - 3) : crash], log[crash:]
    frames = [line for line in report if line.startswith('  File "')]
    cell = next(
        (i for i, line in enumerate(frames) if CELL_FILE.search(line)), len(frames[:lines]) - 1
    )
    frame_lines = [
        re.sub(
            rf'File "[^"]*(?:{CELL_FILE.pattern})[^"]*", line (\d+) in (.*)',
            r"line \1 of the cell, in \2",
            line,
        )
        for line in frames[: cell + 1]
    ]
    return [*before, report[0], *frame_lines[:lines]]
