"""Orders from the notebook to its ranks: what to bind, run and send back.

::

    notebook                    agent                    rank
       │  Request: order, source  │                        │
       │ ───────────────────────▶ │  to each of its ranks  │
       │                          │ ─────────────────────▶ │  binds variables, runs the source,
       │                          │ ◀ ─ ─ ─ text, displays │  packs values
       │ ◀ ─ ─ ─ ─ ─ ─ Output…    │                        │
       │                          │ ◀───────────────────── │
       │ ◀─────── OrderFinished   │  `wire.outcome`        │

The messages around an order are those of `wire.agent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skymagic.wire.codec import Codec
from skymagic.wire.typed import JsonObject
from skymagic.wire.values import BindOrder

FUNCTION_NAME = "_sky_call"
"""Name that the function of a function call has on the ranks.

The line that calls it is skymagic's, not the user's.
"""
SOURCE_NAME = "_sky_source"
"""Temporary variable with the source of a long cell, which travels as a value does: once to the
nodes, and from there from node to node.
"""
LONGEST_SOURCE = 64 << 10
"""Maximum characters of a source that is sent within the request, from the notebook to each node.

A longer one is sent as the variable `SOURCE_NAME`.
"""
# A key among the variables that come back. It contains blanks, so no variable can have this name.
LAST_VALUE = "the value of the last expression"
ON_GPU = "on its GPU"
"""Answer of a rank asked to leave its cell while work runs on its GPU: it leaves once that is done.
"""
NOT_DEFINED = "is not defined"
"""Reason for a missing value if the rank has no such variable."""


@dataclass(frozen=True, kw_only=True)
class _Order:
    """Base of all orders."""

    ranks: tuple[int, ...]
    """Ranks that take part."""
    run: int = 0
    visible_ranks: tuple[int, ...] = ()
    """Ranks whose output is shown."""
    screen_limit: int = 1
    """Maximum bytes of a rank's output that may be shown at once; the log holds all of it."""


@dataclass(frozen=True, kw_only=True)
class RunCell(_Order):
    """Order to bind variables, run the source, and send values back."""

    execution_count: int
    compiler_flags: int = 0
    """Flags of ``__future__`` imports in the notebook's cells."""
    manifest: BindOrder = field(default_factory=BindOrder)
    """Variables to bind before the cell and to drop after it."""
    gather: tuple[str, ...] = ()
    """Variables to return from `gather_ranks`."""
    gather_ranks: tuple[int, ...] = ()
    value_ranks: tuple[int, ...] = ()
    """Ranks that send the value of the last expression."""
    profile: tuple[int, ...] = ()
    """Ranks that profile the cell and send back the profile."""
    job: str = "cell"
    """Kind of run: ``cell``, ``script`` or ``call``.

    Ranks only store this and the following fields, for another notebook.
    """
    output: str = ""
    """Variable in the notebook that receives the values of the last expression."""
    head: bool = False
    """True if the notebook's variables take the first rank's values only."""


@dataclass(frozen=True, kw_only=True)
class Lend(_Order):
    """Pack names for other ranks as one object, with everything that their functions use."""

    names: tuple[str, ...]
    held: tuple[str, ...] = ()
    """Names that the other ranks already have; they are not packed only because a function uses
    them.
    """


@dataclass(frozen=True, kw_only=True)
class Rejoin(_Order):
    """Form the process group again with replaced ranks, or only settle after a failed cell."""

    generation: int
    form: bool = True
    """True to form process groups again."""
    infos: Mapping[int, JsonObject] = field(default_factory=dict)
    """Rank → its new ``InstanceInfo.plain()``, for ranks whose info changes."""


@dataclass(frozen=True, kw_only=True)
class Debug(_Order):
    """Run a debugger command on the frames of the error that ended the last cell."""

    command: str


Order = RunCell | Lend | Rejoin | Debug
CODEC: Codec[Order] = Codec(RunCell, Lend, Rejoin, Debug, max_line=1 << 30)


def packed_order(order: Order) -> list[Any]:
    """Return an order as a JSON value, for `wire.agent.Request`."""
    return CODEC.to_plain(order)


def unpacked_order(value: list[Any]) -> Order:
    """Return the order that `packed_order` has packed.

    Raises:
        ValueError: it is no order of this version.
    """
    return CODEC.from_plain(value)
