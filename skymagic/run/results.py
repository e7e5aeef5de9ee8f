"""What the ranks sent back: values in rank order, or one error that sums up what failed and is of the type that a rank raised."""

from __future__ import annotations

import asyncio
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.data.values.exceptions import bare, fill, members, state_of
from skymagic.errors import RankDied, RankError, RunError
from skymagic.plan.masking import without_colours
from skymagic.plan.units import rank_words

_NAMED_ONLY = (SystemExit, GeneratorExit, asyncio.CancelledError, SyntaxError)
"""Types of which an error has the name and the fields alone: the first ones would end more than the cell, and IPython shows a SyntaxError
by itself, without the rank's traceback."""
PEER_ERRORS = (
    "RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "ConnectionError", "ConnectionResetError",
    "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError", "TimeoutError",
)  # fmt: skip


def rank_error(original: BaseException | None, report: Mapping[str, Any]) -> RankError:
    """A RankError that is also what the rank raised, where Python allows such a type; else one with its name.

    Args:
        original: None where it could not be rebuilt.
        report: the attributes of a RankError.
    """
    if original is not None:
        try:
            return raised_again(original, report)
        except Exception:  # the type's own metaclass or __init_subclass__, or another layout
            pass
    named = _type(report["ename"], (RankError,), {"__module__": "builtins"})
    error: RankError = named(
        report["evalue"], **{name: value for name, value in report.items() if name != "evalue"}
    )
    return error


def raised_again(original: BaseException, report: Mapping[str, Any]) -> RankError:
    """A copy of an exception as a RankError."""
    base = type(original)
    both = not issubclass(base, _NAMED_ONLY) and base not in RankError.__mro__
    # the exception's own methods and properties go first
    kind = _type(
        base.__name__,
        (base, RankError) if both else (RankError,),
        {"__module__": base.__module__, "__qualname__": base.__qualname__},
    )
    error = bare(kind, members(original) if both else ())
    fill(error, (state_of(original), None))
    assert isinstance(error, RankError)
    RankError._set_report(error, report)
    if not _says(error, report["evalue"]):
        type.__setattr__(kind, "__str__", lambda self: self._report["evalue"])
    return error


def _says(error: RankError, message: str) -> bool:
    """Whether the message is the one that it had on the rank; its ``__str__`` may use what is not here, or fail."""
    try:
        return str(error) == message
    except Exception:
        return False


def _type(name: str, bases: tuple[type, ...], members: Mapping[str, Any]) -> Any:
    own = {name: vars(RankError)[name] for name in ("_render_traceback_", "__reduce__")}
    return types.new_class(name, bases, exec_body=lambda space: space.update({**members, **own}))


PEER_TEXTS = re.compile(
    "connection closed by peer|connection reset|broken pipe|socket closed|nccl|closed by remote"
)
"""What a rank says whose peer went away: a consequence, not a cause."""


@dataclass(frozen=True)
class RankFailure:
    """A rank that did not end its cell well."""

    rank: int
    hostname: str
    ename: str
    evalue: str
    traceback: tuple[str, ...] = ()
    exception: BaseException | None = None
    freed: bool = False
    """Whether it was let out of a collective, or interrupted, because another rank had failed."""
    died: str = ""
    """How its process ended, in words; empty if it lives."""
    status: int | None = None
    tail: str = ""

    @property
    def words(self) -> str:
        """What happened, in a line."""
        if self.died:
            return (
                f"cannot be reached: {self.died}" if self.status is None else f"died: {self.died}"
            )
        return f"{self.ename}: {self.evalue.splitlines()[0]}" if self.evalue else self.ename

    def like(self, other: RankFailure) -> bool:
        """Whether another rank failed in the same way."""
        alike = (self.ename, self.evalue, self.died) == (other.ename, other.evalue, other.died)
        # one that was stopped has not failed by itself, though both may end with a KeyboardInterrupt
        return alike and self.only_stopped <= other.only_stopped

    @property
    def only_stopped(self) -> bool:
        """Whether it shows nothing of its own: another rank's failure ended it."""
        return self.freed and (
            self.ename == "KeyboardInterrupt" or is_connection_error(self.ename, self.evalue)
        )

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


def may_be_connection_error(ename: str) -> bool:
    """Whether errors of this type may say that a peer went away, in words that nobody has listed."""
    return ename in PEER_ERRORS


def is_connection_error(ename: str, evalue: str) -> bool:
    """Whether an error says that a peer went away."""
    return ename in PEER_ERRORS and PEER_TEXTS.search(evalue.lower()) is not None


def heading(cause: RankFailure, failures: Sequence[RankFailure], world: int) -> str:
    """Which ranks failed like this one."""
    where = f"[rank {cause.rank} of {world} on {cause.hostname}]"
    if cause.died:
        where = f"rank {cause.rank} on {cause.hostname} {cause.words}"
    same = [one.rank for one in failures if one.rank != cause.rank and one.like(cause)]
    return f"{where} and the same on {rank_words(same)}" if same else where


def others(cause: RankFailure, failures: Sequence[RankFailure]) -> list[str]:
    """Lines on the ranks that failed otherwise, or were stopped."""
    rest = [one for one in failures if one.rank != cause.rank and not one.like(cause)]
    alike: dict[str, list[int]] = {}
    for one in rest:
        if not one.secondary:
            alike.setdefault(without_colours(one.words), []).append(one.rank)
    lines = [f"{rank_words(ranks)}: {words}"[:200] for words, ranks in alike.items()]
    if stopped := [one.rank for one in rest if one.secondary]:
        lines.append(f"{rank_words(stopped)} had to be stopped")
    return lines


def error_of(failures: Sequence[RankFailure], world: int, notes: Sequence[str] = ()) -> RunError:
    """One error for a failed run, with what the rank raised as its cause."""
    # what the others follow from: a dead rank first, then the first that no other explains
    cause = min(failures, key=lambda failure: (not failure.died, failure.secondary))
    head, below = heading(cause, failures, world), [*others(cause, failures), *notes]
    error: RunError
    if cause.died:
        last = last_words(cause.tail)
        tail = ["the last lines of its log:", *("  " + line for line in last)] if last else []
        text = "\n".join([head, *below, *tail])
        error = RankDied(text, rank=cause.rank, hostname=cause.hostname, status=cause.status)
    else:
        error = rank_error(
            cause.exception,
            {
                "rank": cause.rank, "hostname": cause.hostname, "ename": cause.ename, "evalue": cause.evalue,
                "traceback": cause.traceback, "heading": head, "below": tuple(below),
            },
        )  # fmt: skip
    vars(error).setdefault("failures", tuple(failures))
    object.__setattr__(error, "__cause__", cause.exception)  # of a frozen dataclass too
    return error


def last_words(tail: str, lines: int = 8) -> list[str]:
    """The end of a dead rank's log; of a crash that Python reports, the frames down to the cell."""
    log = tail.splitlines()
    crash = next((i for i, line in enumerate(log) if line.startswith("Fatal Python error")), None)
    if crash is None:
        return log[-lines:]
    before, report = log[max(0, crash - 3) : crash], log[crash:]
    frames = [line for line in report if line.startswith('  File "')]
    cell = next(
        (i for i, line in enumerate(frames) if "ipykernel_" in line), len(frames[:lines]) - 1
    )
    words = [
        re.sub(
            r'File "[^"]*ipykernel_[^"]*", line (\d+) in (.*)', r"line \1 of the cell, in \2", line
        )
        for line in frames[: cell + 1]
    ]
    return [*before, report[0], *words[:lines]]
