"""Notebook → ranks: the request that a run sends through ipyparallel, as the first line of its code.

::

    notebook                                   rank
       │  execute_request                       │
       │  #%sky ["RunCell",{…}]⏎ source  ─────▶ │  binds what came, runs the source, packs the values
       │                                        │  (its output comes by way of the node's agent: `wire.agent`)
       │ ◀─────  execute_reply, content["sky"]  │  the outcome, as plain values

To IPython the first line is a comment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skymagic.wire.codec import Codec

PREFIX = "#%sky "
FUNCTION_NAME = "_sky_call"
"""The name under which the function of a call travels; the line that calls it is no code of the user's."""
LAST_VALUE = "the value of the last expression"  # among the variables that come back; no variable can be called so
ON_GPU = "on its GPU"
"""A rank's answer when it is asked whether it leaves its cell: as soon as what runs on its GPU is over."""
PROFILE = "the profile of the cell"
"""Its name among the values that a rank sends."""
NOT_DEFINED = "is not defined"
"""Why a variable does not come back that a rank does not have."""


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What every order holds."""

    ranks: tuple[int, ...]
    """The ranks that take part."""
    run: int = 0
    visible_ranks: tuple[int, ...] = ()
    """Ranks whose output is shown."""
    screen_limit: int = 1
    """Bytes of a rank's output that may be shown; the log holds all of it."""


@dataclass(frozen=True, kw_only=True)
class RunCell(_Order):
    """Bind what travels, run the source, send values back."""

    execution_count: int
    compiler_flags: int = 0
    """Flags of ``__future__``, as the notebook's cells have set them."""
    manifest: Mapping[str, Any]
    """What is to be bound before the cell, and forgotten after it."""
    gather: tuple[str, ...] = ()
    """Variables that come back, from `gather_ranks`."""
    gather_ranks: tuple[int, ...] = ()
    value_ranks: tuple[int, ...] = ()
    """Ranks that send the value of the last expression."""
    profile: tuple[int, ...] = ()
    """Ranks that profile the cell and send back what they found."""
    job: str = "cell"
    """This and what follows ranks only keep, for another notebook: what it is (`RunSpec.job`)."""
    output: str = ""
    """The notebook's variable for those values."""
    head: bool = False
    """Whether its variables take the first rank's values alone."""


@dataclass(frozen=True, kw_only=True)
class Lend(_Order):
    """Pack names for other ranks, all of them as one, with what their functions use."""

    names: tuple[str, ...]
    held: tuple[str, ...] = ()
    """Names that the others have: they are not taken along for the functions that use them."""


@dataclass(frozen=True, kw_only=True)
class Rejoin(_Order):
    """Form the process group again, with ranks that were replaced; or only continue together after a failed cell."""

    generation: int
    form: bool = True
    """Whether groups are formed again."""
    infos: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Rank → its new place, where that changes (``InstanceInfo.plain()``)."""


@dataclass(frozen=True, kw_only=True)
class Debug(_Order):
    """Carry out a debugger's command on the frames of the error that the last cell has ended with."""

    command: str


Order = RunCell | Lend | Rejoin | Debug
CODEC: Codec[Order] = Codec(RunCell, Lend, Rejoin, Debug, max_line=1 << 30)


def encode(order: Order, source: str) -> str:
    """The code of a request."""
    return f"{PREFIX}{CODEC.encode(order).decode()}{source}"


def decode(code: str) -> tuple[Order, str]:
    """(order, source) of a request whose code begins with `PREFIX`."""
    line, _, source = code.partition("\n")
    return CODEC.decode(line.removeprefix(PREFIX).encode()), source
