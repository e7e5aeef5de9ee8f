"""Values on the wire: where the parts of a pickle are, and what rebuilding it needs."""

from __future__ import annotations

from dataclasses import field
from typing import Protocol

from skymagic.wire.codec import FrozenMessage

Location = str | list[int]
"""A part of a pickle: inline in base64, or [file, offset, length] in a file of a store."""


class PickleParts(Protocol):
    """Parts of one pickle."""

    @property
    def header(self) -> tuple[Location, ...]:
        """Locations of the pickle stream."""

    @property
    def buffers(self) -> tuple[Location, ...]:
        """Locations of the out-of-band buffers."""


class PackedValue(FrozenMessage):
    """A value that a rank sends: its pickle, or the reason why there is none."""

    header: tuple[Location, ...] = ()
    buffers: tuple[Location, ...] = ()
    file: str | None = None
    """File of the parts that are not inline, in the node's store."""
    node: int = 0
    nbytes: int = 0
    type: str = ""
    """Name of the value's type."""
    error: str = ""
    """Reason why the value cannot be sent."""
    group: str = ""
    """Identity of a pickle that holds several values; "" for a pickle of its own."""
    index: int = 0
    """Position in such a pickle."""
    count: int = 0
    """Number of values in such a pickle."""


class LentNames(FrozenMessage):
    """Names of a rank for other ranks, as one pickle; without one if some cannot be sent."""

    value: PackedValue | None = None
    names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    """Modules that travel as source."""
    sources: dict[str, str] = field(default_factory=dict)
    """File name → source of the cells that defined functions."""
    code: bool = False
    """True if the pickle has code, which travels between equal versions of Python only."""
    wrappers: bool = False
    """True if it has wrappers around the process group."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Names that functions use and that cannot be sent, with the reasons."""
    missing: tuple[str, ...] = ()
    """Names that the rank does not have."""
    refused: dict[str, str] = field(default_factory=dict)
    """Requested names that cannot be sent, with the reasons."""
