"""Questions to ranks' control threads, and the types of their answers.

A question travels in `wire.agent.RankRequest`, an answer in `RankReply`. Agents answer `NATIVE` and
`USAGE`; None stands for no answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from skymagic.wire.codec import FrozenMessage
from skymagic.wire.typed import reader

T = TypeVar("T")


class StackFrame(FrozenMessage):
    """A frame of a rank's main thread."""

    name: str
    """Name of the function."""
    line: int
    file: str = ""
    """Path of its file; "" for frames of cells."""
    cell: int | str | None = None
    """Number of its cell, or the cell's file name; None for other code."""
    code: str = ""
    """Text of the line; "" for libraries."""
    is_library: bool = False
    """True for Python's own modules and installed packages."""


class Stack(FrozenMessage):
    """Position of a rank's main thread, and what its process has done so far."""

    busy: bool
    """True while a cell runs."""
    frames: tuple[StackFrame, ...]
    """The user's frames, outermost first; for a cell that awaits, those of the coroutine."""
    collectives: int | None = None
    """Number of collectives started, or None if no process group counts them."""
    cpu: float = 0.0
    """CPU seconds of this process and its descendants."""
    processes: tuple[int, ...] = ()
    """Process IDs of the descendants."""
    io: int = 0
    """Bytes that all of them have read and written."""
    native: bool = False
    """True if a signal handler wrote the stack, because native code held the interpreter."""


class ThreadUsage(FrozenMessage):
    """State of a rank's main thread, as its node's kernel reports it."""

    state: str
    """Letter of ``/proc/PID/stat``: R runs or waits for the CPU, S sleeps, D waits for a disk."""
    cpu_seconds: float


class Joining(FrozenMessage):
    """State of a rank's main thread while process groups are formed."""

    waits: bool
    """True if it waits for other ranks."""
    in_cell: bool
    """True if it runs the user's code, which has replaced something that forming a group needs."""


class InstalledPackages(FrozenMessage):
    """Packages in a rank's environment."""

    versions: dict[str, str]
    """Distribution → version."""
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Query(Generic[T]):
    """Question to ranks.

    Attributes:
        method: name of the procedure on the rank.
        answer: annotation of its result.
    """

    method: str
    answer: Any

    def read(self, value: Any) -> T:
        """Return an answer from the wire.

        Raises:
            ValueError: it is not of this type.
        """
        try:
            return reader(self.answer)(value)  # type: ignore[no-any-return]
        except (TypeError, KeyError, ValueError) as problem:
            raise ValueError(f"no answer to {self.method}: {problem}") from None


STACK: Query[Stack | None] = Query("stacks", Stack | None)
NATIVE_STACK: Query[Stack | None] = Query("native", Stack | None)
"""Makes a busy rank write its stack from a signal handler."""
USAGE: Query[ThreadUsage | None] = Query("usage", ThreadUsage | None)
JOINING: Query[Joining | None] = Query("joining", Joining | None)
WAITS: Query[tuple[StackFrame, ...] | None] = Query("waits", tuple[StackFrame, ...] | None)
"""Place where a rank blocks in native code after an interrupt; empty if it does not."""
LEAVING: Query[bool | str | None] = Query("leaving", bool | str | None)
"""Whether a rank will leave its cell by itself; `wire.order.ON_GPU` once its GPU is done."""
RELEASE: Query[int | None] = Query("release", int | None)
"""Frees a rank from a collective; the answer is the number of connections that were shut down."""
INTERRUPT: Query[bool | None] = Query("interrupt", bool | None)
VARIABLES: Query[dict[str, dict[str, str]] | None] = Query(
    "variables", dict[str, dict[str, str]] | None
)
INSTALLED: Query[InstalledPackages | None] = Query("installed", InstalledPackages | None)
RESCAN: Query[tuple[str, ...] | None] = Query("rescan", tuple[str, ...] | None)
"""Makes new packages importable; the answer names the modules that were imported before."""
