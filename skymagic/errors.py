"""Everything that skymagic raises.

::

    SkyError                     what happened, where, and what to do next
    ├── RequestError             bad input, refused before anything starts; holds all mistakes
    ├── CellSyntaxError          a cell that is not Python, refused before anything is sent
    ├── CaptureError             names that cannot travel, or cannot be bound on a rank
    ├── PoolError                a pool cannot be made, found or used
    │   ├── ProvisionError       machines or ranks did not come up
    │   │   ├── HostError        a host could not be reached or used: which, why, and what to try
    │   │   └── HostsError       several hosts at once; holds one HostError for each
    │   └── PoolStateError       the pool is not in a state that allows this
    ├── FilesError               files could not be copied
    └── RunError                 a cell failed on the ranks
        ├── RankError            a rank raised; the original exception is ``__cause__`` where it can be rebuilt
        ├── RankDied             a rank's process ended: signal or exit status
        ├── ScriptError          a shell script failed on a node
        ├── RunTimeout           the time given with ``--timeout`` is over
        ├── RunInterrupted       the user pressed stop (also a KeyboardInterrupt)
        └── ResultError          a value could not come back

A RunError renders as the rank's own traceback; every other error renders as its message alone, without internal frames.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class SkyError(Exception):
    """Base of all errors of skymagic."""

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython shows: the message alone, for internal frames tell the user nothing."""
        return [f"{type(self).__name__}: {self}"]


class RequestError(SkyError):
    """A request that cannot be met as written.

    Args:
        mistakes: one sentence for each mistake, in the user's words; at least one.
    """

    def __init__(self, mistakes: Sequence[str] | str) -> None:
        self.mistakes: tuple[str, ...] = (mistakes,) if isinstance(mistakes, str) else tuple(mistakes)
        super().__init__("; ".join(self.mistakes))

    def __reduce__(self) -> tuple[type[RequestError], tuple[tuple[str, ...]]]:
        return type(self), (self.mistakes,)


class CellSyntaxError(SkyError):
    """A cell that is not Python; the message shows the line."""


class CaptureError(SkyError):
    """Variables that cannot travel to the ranks; the message names each with its type and a remedy."""


class PoolError(SkyError):
    """A pool cannot be made, found or used."""


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
        self.host, self.reason, self.remedy = host, reason, remedy
        super().__init__(f"{host}: {reason}" + (f"\n  {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[type[HostError], tuple[str, str, str]]:
        return type(self), (self.host, self.reason, self.remedy)


class HostsError(ProvisionError):
    """Several hosts could not be reached or used.

    Args:
        failures: one for each host, in the user's order; at least one.
        asked: how many hosts there were in all.
    """

    def __init__(self, failures: Sequence[HostError], asked: int) -> None:
        self.failures, self.asked = tuple(failures), asked
        lines = [f"{len(self.failures)} of {asked} hosts could not be used", *map(str, self.failures)]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[HostsError], tuple[tuple[HostError, ...], int]]:
        return type(self), (self.failures, self.asked)


class PoolStateError(PoolError):
    """The pool's state does not allow what was asked."""


class FilesError(SkyError):
    """Files that could not be copied; the message names each, with its node and the reason."""


class RunError(SkyError):
    """A cell failed on the ranks.

    Attributes:
        failures: what each failed rank reported, in rank order (``results.Failure``).
    """

    failures: tuple[object, ...] = ()


class RankError(RunError):
    """A rank raised an exception.

    Attributes:
        rank: the first rank that failed.
        hostname: the machine that it runs on.
        ename: the name of the exception's type, as it was on the rank.
        evalue: the exception's message.
        traceback: the rank's traceback as coloured lines, with the cell's own line numbers.
        below: what is shown under the traceback: which ranks, what became of the others.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        hostname: str,
        ename: str,
        evalue: str,
        traceback: Sequence[str] = (),
        below: str = "",
    ) -> None:
        Exception.__init__(self, message)
        self.message = message
        self.rank = rank
        self.hostname = hostname
        self.ename = ename
        self.evalue = evalue
        self.traceback = tuple(traceback)
        self.below = below

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        values = {key: vars(self)[key] for key in ("rank", "hostname", "ename", "evalue", "traceback", "below")}
        return partial(RankError, **values), (self.message,)

    def _render_traceback_(self) -> list[str]:
        shown = [*(self.traceback or (f"{self.ename}: {self.evalue}",))]
        if self.below:  # above the message, which is to be the last that one sees
            last = [i for i, line in enumerate(shown) if _COLOURS.sub("", line).startswith(self.ename)][1:]
            shown.insert(last[-1] if last else len(shown), self.below)
        return shown


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
        return partial(RankDied, rank=self.rank, hostname=self.hostname, status=self.status), (str(self),)


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
        return partial(ScriptError, node=self.node, hostname=self.hostname, status=self.status), (str(self),)


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
        values: the values that did come back, ``None`` in the place of the others.
    """

    values: object = None
