"""Values on the wire: where the parts of a pickle are, and what rebuilding it needs."""

from __future__ import annotations

from dataclasses import field
from typing import Protocol

from skymagic.wire.codec import FrozenMessage

# A list rather than a tuple: JSON makes lists, and `wire.typed` converts nothing in a union of
# several types.
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


class PackedParts(FrozenMessage):
    """Parts of one pickle, in files that a `BindOrder` lists."""

    header: tuple[Location, ...]
    buffers: tuple[Location, ...]


class ObjectLink(FrozenMessage):
    """Reference to an object that the rank has from an earlier pickle."""

    table: int
    """Number of that pickle's table on the rank."""
    number: int
    """Number of the object in the table."""
    fallback_number: int | None
    """Number of the object in the bundle's fallback pickle; None if it has none."""


class PackedBundle(FrozenMessage):
    """Values that a rank rebuilds together, from one pickle."""

    names: tuple[str, ...]
    ranks: tuple[int, ...] | None
    """Ranks that receive it; None for all."""
    header: tuple[Location, ...]
    buffers: tuple[Location, ...]
    imports: tuple[str, ...] = ()
    """Modules to import before."""
    table: int | None = None
    """Number of the rank's table for the bundle's objects; None if none is needed."""
    links: tuple[ObjectLink, ...] = ()
    fallback: PackedParts | None = None
    """The same values without references, for a rank that has just dropped one of the objects."""
    code: bool = False
    """True if the pickle has code, which travels between equal versions of Python only."""
    versions: dict[str, str | None] = field(default_factory=dict)
    """Package → version in the notebook's environment, for messages."""


class ModuleSource(FrozenMessage):
    """Module that travels as source."""

    name: str
    """Name as imported: `package.module`."""
    source: str
    """Empty for a namespace package."""
    package: bool
    origin: str
    """File that it was read from; also `__file__` on the ranks."""
    hash: str
    data: str = ""
    """The package's data files from `data.capture.modules.packed_data`; empty if the rank can
    access the package's folder.
    """


class SentModule(FrozenMessage):
    """A module, and the ranks that need it."""

    module: ModuleSource
    ranks: tuple[int, ...] | None
    """Ranks that need it; None for all ranks."""


class BindOrder(FrozenMessage):
    """Data that ranks need before a cell: variables, modules, sources, environment."""

    python: str = ""
    """Version of the notebook's Python."""
    files: tuple[str, ...] = ()
    """Files of the node's store, by the number that a `Location` has."""
    bundles: tuple[PackedBundle, ...] = ()
    """Values in the order of their reconstruction."""
    modules: tuple[SentModule, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)
    """File name → source of the cells that defined functions, for tracebacks."""
    cells: dict[str, int] = field(default_factory=dict)
    """File name → number of the cell."""
    temporary: tuple[str, ...] = ()
    """Names that are deleted after the cell."""
    shown: tuple[str, ...] = ()
    """Names such as ``_`` whose values the notebook has shown."""
    unbound: tuple[str, ...] = ()
    """Names that refer to Python's builtins again."""
    fresh: bool = False
    """True if classes are replaced instead of updated."""
    environ: dict[str, str | None] = field(default_factory=dict)
    """Changed environment variables; None deletes one."""
    reads: tuple[str, ...] = ()
    """Digests of `wire.outcome.NamesRead` that the notebook knows."""


class PackedValue(FrozenMessage):
    """A value that a rank sends: its pickle, or the reason why it has none."""

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
    """Identity of a pickle that holds several values; "" for a separate pickle."""
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
