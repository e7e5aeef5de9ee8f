"""Everything that skymagic raises.

::

    SkyError                     what happened, where, and what to do next
    ├── RequestError             bad input, refused before anything starts; holds all mistakes
    ├── CellSyntaxError          a cell that is not Python, refused before anything is sent
    ├── CaptureError             names that cannot travel, or cannot be bound on a rank
    ├── PackagesError            packages that a cell needs are missing on nodes, and cannot be installed there
    ├── PoolError                a pool cannot be made, found or used, or was ended while something ran on it
    │   ├── ProvisionError       machines or ranks did not come up
    │   │   ├── HostError        a host could not be reached or used: which, why, and what to try
    │   │   ├── HostsError       several hosts at once; holds one HostError for each
    │   │   └── CloudError       a cloud has refused, or does not answer: which permission or quota, and what to do
    │   └── PoolStateError       the pool is not in a state that allows this
    ├── FilesError               files could not be copied
    └── RunError                 a cell failed on the ranks
        ├── RankError            a rank raised; also of the type raised there, with that exception as ``__cause__``
        ├── RankDied             a rank's process ended: signal or exit status
        ├── ScriptError          a shell script failed on a node
        ├── RunTimeout           the time given with ``--timeout`` is over
        ├── RunInterrupted       the user pressed stop (also a KeyboardInterrupt)
        └── ResultError          a value could not come back

A RunError renders as the rank's own traceback; every other error renders as its message alone, without internal frames.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from skymagic.wire.untrusted import sanitized, sanitized_line

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class SkyError(Exception):
    """Base of all errors of skymagic."""

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython shows: the message alone, for internal frames tell the user nothing."""
        return [f"{type(self).__name__}: {self}"]


class _QuotingError(SkyError):
    """Base of errors whose message may quote another machine: a login shell, a scheduler, a host's name."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(sanitized(one) if isinstance(one, str) else one for one in arguments))


class RequestError(_QuotingError):
    """A request that cannot be met as written.

    Args:
        mistakes: one sentence for each mistake, in the user's words; at least one.
    """

    def __init__(self, mistakes: Sequence[str] | str) -> None:
        self.mistakes: tuple[str, ...] = (
            (sanitized(mistakes),) if isinstance(mistakes, str) else tuple(map(sanitized, mistakes))
        )
        super().__init__("; ".join(self.mistakes))

    def __reduce__(self) -> tuple[type[RequestError], tuple[tuple[str, ...]]]:
        return type(self), (self.mistakes,)


@contextmanager
def noted_in(mistakes: list[str], before: str = "") -> Iterator[None]:
    """Add what a block raises as RequestError to these mistakes, which are raised together later; `before` stands before each."""
    try:
        yield
    except RequestError as wrong:
        mistakes += [before + mistake for mistake in wrong.mistakes]


class CellSyntaxError(SkyError):
    """A cell that is not Python; the message shows the line."""


class CaptureError(SkyError):
    """Variables that cannot travel to the ranks; the message names each with its type and a remedy."""


class PackagesError(_QuotingError):
    """Packages are missing on nodes and were not installed there; the message says why, and how it is done. Nothing was sent."""


class PoolError(_QuotingError):
    """A pool cannot be made, found or used, or was ended while something ran on it."""


class ProvisionError(PoolError):
    """Machines or ranks did not come up; what had been started is released."""


class HostError(ProvisionError):
    """A host could not be reached or used.

    Args:
        host: as the user named it.
        reason: what happened, without the host's name.
        remedy: what to try next; may be empty.
    """

    def __init__(self, host: str, reason: str, remedy: str = "") -> None:
        self.host = sanitized_line(host)
        self.reason, self.remedy = sanitized(reason), sanitized(remedy)
        super().__init__(f"{host}: {reason}" + (f"\n  {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[type[HostError], tuple[str, str, str]]:
        return type(self), (self.host, self.reason, self.remedy)


class HostGone(HostError):
    """A host is gone for certain, with all that ran there: nobody has to try it again."""


class HostsError(ProvisionError):
    """Several hosts could not be reached or used.

    Args:
        failures: one for each host, in the user's order; at least one.
        asked: how many hosts there were in all.
    """

    def __init__(self, failures: Sequence[HostError], asked: int) -> None:
        self.failures, self.asked = tuple(failures), asked
        lines = [
            f"{len(self.failures)} of {asked} hosts could not be used",
            *map(str, self.failures),
        ]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[HostsError], tuple[tuple[HostError, ...], int]]:
        return type(self), (self.failures, self.asked)


class CloudError(ProvisionError):
    """A cloud has refused a call, or has not answered it.

    Args:
        kind: what it means: ``capacity``, ``quota``, ``permission``, ``credentials``, ``throttled``, …
        code: the cloud's own name of it.
        reason: what happened. remedy: what to do about it; may be empty.
    """

    def __init__(self, kind: str, code: str, reason: str, remedy: str = "") -> None:
        self.kind, self.code = kind, code
        self.reason, self.remedy = sanitized(reason), sanitized(remedy)
        super().__init__(reason + (f"\n  {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[type[CloudError], tuple[str, str, str, str]]:
        return type(self), (self.kind, self.code, self.reason, self.remedy)


class PoolStateError(PoolError):
    """The pool's state does not allow what was asked."""


class FilesError(_QuotingError):
    """Files that could not be copied; the message names each, with its node and the reason."""


class RunError(SkyError):
    """A cell failed on the ranks.

    Attributes:
        failures: what each failed rank reported, in rank order (``results.Failure``).
    """

    failures: tuple[object, ...] = ()


class RankError(RunError):
    """A rank raised an exception.

    What is raised has the type of that exception too, and its arguments, fields, attributes and message, unchanged; the rank
    and its host are in its notes. An attribute of the exception's own goes before one that is listed here.

    Attributes:
        rank: the first rank that failed.
        hostname: the machine that it runs on.
        ename: the name of the exception's type, as it was on the rank.
        evalue: the exception's message.
        traceback: the rank's traceback as coloured lines, with the cell's own line numbers.
        heading: what is shown above the traceback: which ranks.
        below: lines that are shown under it: what became of the others.
    """

    rank: int
    hostname: str
    ename: str
    evalue: str
    traceback: tuple[str, ...]
    heading: str
    below: tuple[str, ...]
    _report: dict[str, Any]
    """All of these, whatever the exception itself calls so."""
    _shown_notes: int
    """How many of the notes are not shown under the traceback: the exception's own stand in it, the first of ours above it."""

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        hostname: str,
        ename: str,
        traceback: Sequence[str] = (),
        heading: str = "",
        below: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self._set_report(
            {
                "rank": rank,
                "hostname": hostname,
                "ename": ename,
                "evalue": message,
                "traceback": tuple(traceback),
                "heading": heading,
                "below": tuple(below),
            }
        )

    def _set_report(self, report: Mapping[str, Any]) -> None:
        """Take up what is known of the rank, beside what the exception has of its own."""
        own = vars(self)
        notes = [*own.get("__notes__", ()), *filter(None, (report["heading"], *report["below"]))]
        shown = {"_shown_notes": len(own.get("__notes__", ())) + bool(report["heading"])}
        own.update({**report, **own, "_report": dict(report), **shown, "__notes__": notes})

    def __reduce__(self) -> tuple[object, ...]:
        report = {name: value for name, value in self._report.items() if name != "evalue"}
        return (
            partial(RankError, **report),
            (self._report["evalue"],),
            {"__notes__": self.__notes__},
        )

    def _render_traceback_(self) -> list[str]:
        report = self._report
        line = f"{report['ename']}: {report['evalue']}" if report["evalue"] else report["ename"]
        shown = [*(report["traceback"] or (line,))]
        if notes := self.__notes__[
            self._shown_notes :
        ]:  # above the message, which is to be the last that one sees
            last = [
                i
                for i, text in enumerate(shown)
                if _COLOURS.sub("", text).startswith(report["ename"])
            ][1:]
            shown.insert(last[-1] if last else len(shown), "\n".join(notes))
        return [*filter(None, [report["heading"]]), *shown]


class RankDied(RunError):
    """A rank's process ended while it was needed.

    Attributes:
        rank: which rank.
        hostname: the machine that it ran on.
        status: its wait status: negative for a signal, else the exit code.
    """

    def __init__(self, message: str, *, rank: int, hostname: str, status: int | None) -> None:
        super().__init__(message)
        self.rank = rank
        self.hostname = hostname
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        return partial(RankDied, rank=self.rank, hostname=self.hostname, status=self.status), (
            str(self),
        )


class ScriptError(RunError):
    """A script of ``%%sky_sh`` failed on a node; the message tells the cause, or its last lines.

    Attributes:
        node: which node.
        hostname: the machine.
        status: the script's exit code; negative for a signal; None when it could not be started.
    """

    def __init__(self, message: str, *, node: int, hostname: str, status: int | None) -> None:
        super().__init__(message)
        self.node = node
        self.hostname = hostname
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        return partial(ScriptError, node=self.node, hostname=self.hostname, status=self.status), (
            str(self),
        )


class RunTimeout(RunError):
    """The cell took longer than ``--timeout`` allows; the message shows where each rank was."""


class RunInterrupted(RunError, KeyboardInterrupt):
    """The user interrupted the cell; also a KeyboardInterrupt, so that ``except Exception`` in a loop does not swallow it.

    Attributes:
        values: the values by rank of a function that had ended everywhere when the stop button was pressed, else None.
    """

    values: object = None


class ResultError(RunError):
    """Values that could not come back; the others are kept in ``values``.

    Attributes:
        values: what did come back: ``values.value`` by rank, and ``values.variables`` by name; in the place of what
            did not stands an object that says why.
    """

    values: object = None
