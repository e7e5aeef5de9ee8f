"""Bundles of variables: group values that share objects, write them to a store, describe them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from skymagic.content.base import Buffer
from skymagic.content.chunks import digest
from skymagic.content.store import LARGE
from skymagic.data.bundle import (
    INLINE,
    ContentIndex,
    FileExtent,
    Part,
    inline,
    part_fields,
)
from skymagic.data.capture import installed
from skymagic.data.values import pickling
from skymagic.data.values.pickled import FIXED_TYPES, LISTED, ROOT, Pickled, Ref
from skymagic.data.values.snapshots import Snapshot
from skymagic.wire.values import Location, ObjectLink, PackedBundle, PackedParts

_version = lru_cache(maxsize=1024)(installed.version)
_SHORT = 128
"""Pickles shorter than this many bytes are compared directly instead of by hash."""
INLINE_IN_ALL = 1 << 20
"""If all small values together exceed this many bytes, they are written to one file."""

Progress = Callable[[Mapping[str, int], int], None]
"""Called with the bytes to write, by names of variables, and the bytes written so far."""


@dataclass
class Variable:
    """Variable of the notebook with its current value."""

    name: str
    value: object
    facts: Pickled
    """The pickle; without its bytes and objects if the value is known to be unchanged."""
    fingerprint: str | None = None
    """Hash of the value's contents; None until all its parts are hashed."""
    same_object: bool = False
    """True if the name had this same object when its previous fingerprint was taken."""
    snapshot: Snapshot | None = None
    """Contents just before it was pickled, if it is a container of many small arrays."""
    pickle: Callable[[], Pickled] | None = None
    """Pickles an unchanged value, which may have to travel after all; None if `facts` is whole."""

    @property
    def pickled(self) -> Pickled:
        """The whole pickle."""
        if self.pickle is not None:
            self.facts, self.pickle = self.pickle(), None
        return self.facts

    @property
    def fixed(self) -> bool:
        """True for a number or a text: its identity does not matter."""
        return type(self.value) in FIXED_TYPES

    @cached_property
    def parts(self) -> list[Part]:
        """Pieces of the pickle, followed by the buffers."""
        return parts_of(self.pickled)

    @cached_property
    def numbers(self) -> dict[int, int]:
        """Number of each linkable object in the variable, by identity."""
        return pickling.numbers(self.pickled)

    @cached_property
    def objects(self) -> Set[int]:
        """Identities of the linkable objects in the variable."""
        return pickling.objects(self.pickled)

    @property
    def is_isolated(self) -> bool:
        """True if only the value itself can be referred to, and nothing in it."""
        return len(self.numbers) == 1 and ROOT in self.numbers.values()

    @cached_property
    def stream(self) -> str | Buffer:
        """Pickle or its hash; empty if it is too large for its objects to be numbered."""
        pieces = self.pickled.pieces
        if len(pieces) == 1 and len(pieces[0]) < _SHORT:
            return pieces[0]
        return digest(pieces) if sum(map(len, pieces)) <= LISTED else ""


def parts_of(pickled: Pickled) -> list[Part]:
    """Return the pieces of a pickle, followed by its buffers."""
    pieces = [Part(piece, len(piece) >= LARGE) for piece in pickled.pieces]
    return pieces + [Part(buffer, True) for buffer in pickled.buffers]


def groups(values: Sequence[Variable]) -> list[list[Variable]]:
    """Group values that share an object or memory, preserving the order."""
    return [
        [values[index] for index in group]
        for group in pickling.group_by_shared_objects([value.pickled for value in values])
    ]


def merge_plain(
    shared: Iterable[list[Variable]], lacking: Mapping[str, list[int]], apart: Container[str]
) -> list[list[Variable]]:
    """Merge the groups of plain values that the same ranks lack.

    A thousand numbers become one pickle.

    Args:
        apart: names of values that must not be merged with others.
    """
    separate: list[list[Variable]] = []
    plain: dict[tuple[int, ...], list[Variable]] = {}
    for group in shared:
        ranks = tuple(lacking[group[0].name])
        if (
            all(value.pickled.plain and tuple(lacking[value.name]) == ranks for value in group)
            and group[0].name not in apart
        ):
            # Groups share no objects with one another, so one pickle changes no identities.
            plain.setdefault(ranks, []).extend(group)
        else:
            separate.append(group)
    return [*separate, *plain.values()]


def in_rebuild_order(
    shared: list[list[Variable]], values: Mapping[str, Variable]
) -> list[list[Variable]]:
    """Sort groups, and the values in each, so that names are bound before rebuilding uses them.

    Args:
        values: all values that the cell needs, including those that do not travel.
    """
    # Nothing runs code while it is rebuilt, so any order works.
    if not any(value.pickled.active for group in shared for value in group):
        return shared
    uses = {name: value.facts.uses for name, value in values.items()}
    sorted_groups = []
    for group in shared:
        order = rebuild_order(
            [[value.name] for value in group], [value.pickled.active for value in group], uses
        )
        sorted_groups.append([group[index] for index in order])
    names = [[value.name for value in group] for group in sorted_groups]
    active = [any(value.pickled.active for value in group) for group in sorted_groups]
    return [sorted_groups[index] for index in rebuild_order(names, active, uses)]


@dataclass
class Bundle:
    """Values that are rebuilt together."""

    names: list[str]
    ranks: list[int] | None
    """Ranks that receive it, or None for all ranks of the orders."""
    pickled: Pickled
    parts: list[Part]
    imports: list[str] = field(default_factory=list)
    table: int | None = None
    """Number of the ranks' table for the bundle's objects, or None if none is needed."""
    links: list[tuple[Ref, int | None]] = field(default_factory=list)
    """Locations of the objects that the bundle refers to, and their numbers in the spare."""
    fallback: Pickled | None = None
    """The same values without references, for a rank that has just dropped one of the objects."""
    locations: list[Location] = field(default_factory=list)
    """Locations of the parts, set when they are written."""

    def message(self) -> PackedBundle:
        """Return the bundle as ranks receive it."""
        own = len(self.pickled.pieces) + len(self.pickled.buffers)
        header, buffers = part_fields(self.locations[:own], len(self.pickled.pieces))
        spare = None
        if self.fallback is not None:
            spare_parts = part_fields(self.locations[own:], len(self.fallback.pieces))
            spare = PackedParts(*spare_parts)
        return PackedBundle(
            names=tuple(self.names),
            ranks=None if self.ranks is None else tuple(self.ranks),
            header=header,
            buffers=buffers,
            imports=tuple(self.imports),
            table=self.table,
            links=tuple(ObjectLink(*ref, number) for ref, number in self.links),
            fallback=spare,
            code=self.pickled.code,
            versions={name: _version(name) for name in sorted(self.pickled.packages)},
        )


class BundleWriter:
    """Writes the parts of bundles to a store, each content once, and records their locations."""

    def __init__(self, index: ContentIndex, progress: Progress | None = None) -> None:
        self.index = index
        self.nbytes = 0
        self.needs: dict[str, frozenset[str]] = {}
        self._files: dict[str, int] = {}
        self._small: list[tuple[Bundle, int]] = []
        self._progress = progress
        self._weights: dict[str, int] = {}  # bytes to write, by names of variables
        self._done = 0

    @property
    def keys(self) -> frozenset[str]:
        """Files that contain the bundles."""
        return frozenset(self._files)

    @property
    def files(self) -> list[str]:
        """Names of the files, in the order of their numbers."""
        return [self.index.store.name(key) for key in self._files]

    def expect(self, bundles: Iterable[Bundle]) -> None:
        """Announce bundles that will be added."""
        bundles = list(bundles)
        self.index.expect(part for bundle in bundles for part in bundle.parts)
        if self._progress is not None:
            for bundle in bundles:
                # Only bytes that are not stored yet count as progress.
                weight = sum(
                    part.nbytes
                    for part in bundle.parts
                    if not (part.blob and self.index.find(part))
                )
                if weight:
                    self._weights[" + ".join(bundle.names)] = weight

    def add(self, bundle: Bundle) -> None:
        """Write a bundle's large parts; the small ones are written by `finish`."""
        self.needs.update(dict.fromkeys(bundle.names, frozenset()))
        bundle.locations = [""] * len(bundle.parts)
        small = []
        for index, part in enumerate(bundle.parts):
            # Again, because an equal part may just have been written.
            self.index.identify([part], lazily=True)
            extent = self.index.find(part) if part.blob else None
            if extent is None and part.blob and part.nbytes >= LARGE:
                extent = self.index.put(part, self._report)
                self.nbytes += part.nbytes
                self._done += part.nbytes
            if extent is None:
                small.append(index)
            else:
                bundle.locations[index] = self._locate(bundle, extent)
        self._report(0)
        # A few small parts are collected over all bundles; many go to a file right away.
        if sum(bundle.parts[index].nbytes for index in small) < INLINE:
            self._small += [(bundle, index) for index in small]
        else:
            self._pack([(bundle, index) for index in small])

    def finish(self) -> None:
        """Put small parts into the orders, or into one file if they are many, and settle the store.

        Returns once all parts are on the nodes.
        """
        size = sum(bundle.parts[index].nbytes for bundle, index in self._small)
        if size > INLINE_IN_ALL:
            self._pack(self._small)
        else:
            self.nbytes += size
            for bundle, index in self._small:
                bundle.locations[index] = inline(bundle.parts[index].data)
        # Ranks must not receive the orders before the files are on their nodes.
        self.index.store.settle()

    def _pack(self, parts: list[tuple[Bundle, int]]) -> None:
        extents = self.index.pack(bundle.parts[index] for bundle, index in parts)
        for (bundle, index), extent in zip(parts, extents, strict=True):
            bundle.locations[index] = self._locate(bundle, extent)
            self.nbytes += extent.nbytes

    def _locate(self, bundle: Bundle, extent: FileExtent) -> Location:
        key, offset, nbytes = extent
        if key not in self._files:
            self.index.store.pin([key])  # until the manifest is freed, or writing fails
        for name in bundle.names:
            self.needs[name] |= {key}
        return [self._files.setdefault(key, len(self._files)), offset, nbytes]

    def _report(self, done: int) -> None:
        if self._progress is not None and self._weights:
            self._progress(self._weights, min(self._done + done, sum(self._weights.values())))


def submodules(values: Iterable[object], attributes: frozenset[str]) -> list[str]:
    """Return loaded submodules that code with these attributes may reach through a package."""
    packages = [
        value
        for value in values
        # Not `hasattr`: torch.ops creates a namespace for any attribute that is looked up.
        if isinstance(value, types.ModuleType) and "__path__" in vars(value)
    ]
    prefixes = tuple(f"{package.__name__}." for package in packages)
    if not prefixes:
        return []
    return sorted(
        name
        for name in list(sys.modules)
        if name.startswith(prefixes)
        for prefix in prefixes
        if name.startswith(prefix) and attributes.issuperset(name[len(prefix) :].split("."))
    )


# -- order of rebuilding ---------------------------------------------------------------------------


def rebuild_order(
    units: Sequence[Collection[str]], active: Sequence[bool], uses: Mapping[str, Iterable[str]]
) -> list[int]:
    """Return the order of rebuilding for units (values rebuilt as one), as their indices.

    Functions and classes call nothing while they are rebuilt, so they come first. Of any two other
    units, the one that the other reaches comes first: it reaches fewer names, unless they reach
    each other, and then no order works.

    Args:
        units: names in each unit.
        active: for each unit, True if it may run code of the notebook.
        uses: maps each name to the names that its code uses, including names that do not travel.
    """
    # `sorted` is stable: units that reach equally many names keep their order.
    return sorted(
        range(len(units)),
        key=lambda index: len(_reachable_names(units[index], uses)) if active[index] else 0,
    )


def _reachable_names(names: Iterable[str], uses: Mapping[str, Iterable[str]]) -> set[str]:
    """Return the given names and all names that their code uses, directly or indirectly."""
    reached: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += uses.get(name, ())
    return reached
