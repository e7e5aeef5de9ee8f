"""Everything that skymagic raises.

::

    SkyError                 what happened, where, and what to do next
    ├── RequestError         bad input, refused before anything starts; holds all mistakes
    ├── CellSyntaxError      a cell that is not Python, refused before anything is sent
    ├── CaptureError         variables that cannot be sent, or cannot be bound on a rank
    ├── PackagesError        packages of a cell are missing on nodes, and cannot be installed
    ├── PoolError            a pool cannot be created, found or used, or was ended during a run
    │   ├── ProvisionError   machines or ranks did not start
    │   │   ├── HostError    a host could not be reached or used: which, why, and what to try
    │   │   ├── HostsError   several hosts at once; holds one HostError for each
    │   │   └── CloudError   a cloud refused or did not answer: permission or quota, and a remedy
    │   └── PoolStateError   the pool is not in a state that allows this
    ├── FilesError           files could not be copied
    └── RunError             a cell failed on the ranks
        ├── RankError        a rank raised; also has the type raised there, and it as ``__cause__``
        ├── RankDied         a rank's process ended: signal or exit status
        ├── ScriptError      a shell script failed on a node
        ├── RunTimeout       the time given with ``--timeout`` is over
        ├── RunInterrupted   the user pressed stop (also a KeyboardInterrupt)
        └── ResultError      a value could not be returned

A RunError renders as the rank's own traceback; every other error renders as its message alone,
without internal frames.
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
        """Return the lines that IPython shows: only the message, because internal frames are of no
        use to the user.
        """
        return [f"{type(self).__name__}: {self}"]


class _QuotingError(SkyError):
    """Base of errors whose message may quote another machine: a login shell, a scheduler, a host's
    name.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(
            *(
                sanitized(argument) if isinstance(argument, str) else argument
                for argument in arguments
            )
        )


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
def collect_mistakes(mistakes: list[str], before: str = "") -> Iterator[None]:
    """Add the mistakes of a RequestError in the block to `mistakes`, to be raised together later.

    Args:
        before: prefix for each of them.
    """
    try:
        yield
    except RequestError as wrong:
        mistakes += [before + mistake for mistake in wrong.mistakes]


class CellSyntaxError(SkyError):
    """A cell that is not Python; the message shows the line."""


class CaptureError(SkyError):
    """Variables that cannot be sent to the ranks.

    The message names each with its type and a remedy.
    """


class PackagesError(_QuotingError):
    """Packages that are missing on nodes and were not installed.

    The message gives the reason and a remedy.

    Nothing was sent.
    """


class PoolError(_QuotingError):
    """A pool cannot be created, found or used, or was ended while something ran on it."""


class ProvisionError(PoolError):
    """Machines or ranks did not start; everything started so far has been released."""


class HostError(ProvisionError):
    """A host could not be reached or used.

    Args:
        host: as the user named it.
        reason: the problem, without the host's name.
        remedy: what to try next; may be empty.
    """

    def __init__(self, host: str, reason: str, remedy: str = "") -> None:
        self.host = sanitized_line(host)
        self.reason, self.remedy = sanitized(reason), sanitized(remedy)
        super().__init__(f"{host}: {reason}" + (f"\n  {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[type[HostError], tuple[str, str, str]]:
        return type(self), (self.host, self.reason, self.remedy)


class HostGone(HostError):
    """A host is gone for certain, with everything that ran there; retrying is pointless."""


class HostsError(ProvisionError):
    """Several hosts could not be reached or used.

    Args:
        failures: one for each host, in the user's order; at least one.
        asked: total number of hosts.
    """

    def __init__(self, failures: Sequence[HostError], host_count: int) -> None:
        self.failures, self.asked = tuple(failures), host_count
        lines = [
            f"{len(self.failures)} of {host_count} hosts could not be used",
            *map(str, self.failures),
        ]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[HostsError], tuple[tuple[HostError, ...], int]]:
        return type(self), (self.failures, self.asked)


class CloudError(ProvisionError):
    """A cloud refused a call, or did not answer it.

    Args:
        kind: category: ``capacity``, ``quota``, ``permission``, ``credentials``, ``throttled``, …
        code: the cloud's name of the error.
        reason: the problem.
        remedy: what to do about it; may be empty.
    """

    def __init__(self, kind: str, code: str, reason: str, remedy: str = "") -> None:
        self.kind, self.code = kind, code
        self.reason, self.remedy = sanitized(reason), sanitized(remedy)
        super().__init__(reason + (f"\n  {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[type[CloudError], tuple[str, str, str, str]]:
        return type(self), (self.kind, self.code, self.reason, self.remedy)


class PoolStateError(PoolError):
    """The pool's state does not allow the operation."""


class FilesError(_QuotingError):
    """Files that could not be copied; the message names each, with its node and the reason."""


class RunError(SkyError):
    """A cell failed on the ranks.

    Attributes:
        failures: the report of each failed rank, in rank order (``results.Failure``).
    """

    failures: tuple[object, ...] = ()


class RankError(RunError):
    """A rank raised an exception.

    The error raised also has the type of that exception, and its arguments, fields, attributes and
    message, unchanged; the rank and its host are in its notes. The exception's own attributes take
    precedence over those listed here.

    Attributes:
        rank: the first rank that failed.
        hostname: its machine.
        ename: the name of the exception's type, as on the rank.
        evalue: the exception's message.
        traceback: the rank's traceback as coloured lines, with the cell's own line numbers.
        heading: text above the traceback: the ranks that failed.
        below: lines under the traceback: what happened to the other ranks.
    """

    rank: int
    hostname: str
    ename: str
    evalue: str
    traceback: tuple[str, ...]
    heading: str
    below: tuple[str, ...]
    _report: dict[str, Any]
    """All of these, even if the exception has attributes of the same names."""
    _shown_notes: int
    """Number of notes that are not shown under the traceback: the exception's own are in it, and
    skymagic's first is above it.
    """

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
        """Add the report on the rank to the exception's own attributes and notes."""
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
        # above the message, which should be the last thing the user sees
        if notes := self.__notes__[self._shown_notes :]:
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
        rank: the rank.
        hostname: its machine.
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
    """A ``%%sky_sh`` script failed on a node; the message gives the cause, or its last lines.

    Attributes:
        node: the node.
        hostname: its machine.
        status: the script's exit code; negative for a signal; None if it could not be started.
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
    """The user interrupted the cell.

    It is also a KeyboardInterrupt, so that ``except Exception`` in a loop does not swallow it.

    Attributes:
        values: values by rank, if the function had already finished on all ranks when the stop
            button was pressed; else None.
    """

    values: object = None


class ResultError(RunError):
    """Values that could not be returned; the others are in ``values``.

    Attributes:
        values: the returned values: ``values.value`` by rank, and ``values.variables`` by name; a
            missing one is replaced by an object with the reason.
    """

    values: object = None
