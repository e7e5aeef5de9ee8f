"""Track objects of sent values that the ranks still hold, so that later values can refer to them.

Each rank keeps a table of the objects that a bundle created there; this module knows the location
of each object, by name.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from skymagic.content.base import Buffer
from skymagic.data.namespace import Namespace
from skymagic.data.shipping.bundles import Variable
from skymagic.data.values import pickling
from skymagic.data.values.memory import MemoryRegion, Span
from skymagic.data.values.pickled import ROOT, Pickled, PickleLinks, Ref, groups


class _Place(NamedTuple):
    """Location of an object on the ranks."""

    ref: Ref
    shift: int = 0
    """Offset in bytes of the part of a storage that was sent, from the part in the value's own
    pickle.
    """
    length: int | None = None
    """Bytes of a storage that were sent, if not those in the value's own pickle."""


@dataclass(frozen=True, eq=False, slots=True)
class SentValue:
    """Value as it was sent: its pickle, and the locations of its objects on the ranks."""

    stream: str | Buffer
    """Stream of the pickle that defines the numbers of the objects."""
    table: int
    locations: Mapping[int, _Place] | None = None
    """Locations by number; None if each number is that in the table."""
    root: int = ROOT
    """Number of the value itself in the table, used if `locations` is None."""

    def location(self, number: int) -> _Place | None:
        """Return where the ranks have the object with this number, or None."""
        if self.locations is None:
            return _Place((self.table, self.root if number == ROOT else number))
        return self.locations.get(number)


class _Seen(NamedTuple):
    """Objects and memory in a name's value when it was last inspected."""

    value: int
    objects: Set[int]
    spans: tuple[Span, ...]


@dataclass
class _RankObjects:
    sent: dict[str, SentValue] = field(default_factory=dict)
    lost: set[Ref] = field(default_factory=set)
    """Objects that no longer exist on the rank."""


class SentLinks:
    """Objects that each rank holds, by name."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self._ranks: defaultdict[int, _RankObjects] = defaultdict(_RankObjects)
        self._seen: dict[str, _Seen] = {}
        self._tables = itertools.count(1)

    # -- held objects ------------------------------------------------------------------------------

    def bound(self, rank: int, sent: Mapping[str, SentValue]) -> None:
        """Record that a rank bound names to these sent values."""
        self._ranks[rank].sent.update(sent)

    def record_losses(
        self, rank: int, unlinked: Iterable[str], lost: Iterable[Sequence[int]]
    ) -> None:
        """Record names that a rank no longer holds, and objects that are lost there."""
        state = self._ranks[rank]
        for name in unlinked:
            state.sent.pop(name, None)
        state.lost.update((table, number) for table, number in lost)
        if state.lost:
            tables = {table for value in state.sent.values() for table in _tables(value)}
            # Forget lost objects of tables that no name refers to any more.
            state.lost = {ref for ref in state.lost if ref[0] in tables}

    def forget(self, ranks: Iterable[int]) -> None:
        """Forget what these ranks held."""
        for rank in ranks:
            self._ranks.pop(rank, None)

    def holds(self, rank: int, contents: Variable) -> bool:
        """Return True if a rank holds this value's objects as they were sent."""
        sent = self._ranks[rank].sent.get(contents.name)
        # Only equal pickles number their objects alike.
        return sent is not None and sent.stream == contents.stream

    def view(self, rank: int, names: Iterable[str]) -> tuple[Any, ...]:
        """Return what a rank holds under these names.

        Ranks with equal views can be sent the same.
        """
        state = self._ranks[rank]
        return (*((name, state.sent.get(name)) for name in sorted(names)), frozenset(state.lost))

    def links(self, rank: int, held: Iterable[Variable]) -> PickleLinks:
        """Return the objects that a value can refer to on a rank that holds these variables."""
        pickle_links = PickleLinks()
        state = self._ranks[rank]
        for contents in held:
            sent = state.sent[contents.name]
            regions = pickling.storages(contents.pickled)
            by_object = {id(region.stands): (handle, region) for handle, region in regions.items()}
            for key, number in contents.numbers.items():
                location = sent.location(number)
                if location is None or location.ref in state.lost:
                    continue
                pickle_links.objects.setdefault(key, location.ref)
                if key in by_object:
                    # A storage may have travelled only in part.
                    handle, region = by_object[key]
                    start = region.start + location.shift
                    length = (
                        region.stop - region.start if location.length is None else location.length
                    )
                    pickle_links.memory.storages.setdefault(
                        handle, MemoryRegion(region.stands, start, start + length)
                    )
            arrays = pickling.array_regions(contents.pickled)
            pickle_links.memory.arrays += [
                region for region in arrays if id(region.stands) in pickle_links.objects
            ]
        return pickle_links

    # -- shared objects ----------------------------------------------------------------------------

    def related_names(
        self,
        moved: Sequence[Variable],
        names: Iterable[str],
        open: Callable[[str], Variable | None],
    ) -> dict[str, str]:
        """Find names whose values have objects in common with values about to travel.

        Args:
            open: pickles a name's value, or returns None if it cannot travel.

        Returns:
            Maps each such name to the name of one of the values.
        """
        names = list(names)
        objects = frozenset().union(*(value.objects for value in moved)) if names else frozenset()
        if not objects:
            return {}
        spans = [span for value in moved for span in value.pickled.spans]
        users = {}
        for name in names:
            last_seen = self._seen.get(name)
            if (
                last_seen is not None
                and last_seen.value == id(self.namespace[name])
                and objects.isdisjoint(last_seen.objects)
                and not _overlap(spans, last_seen.spans)
            ):
                continue
            variable = open(name)
            if variable is None:
                continue
            self.see(variable)
            user = next((value.name for value in moved if self.share(variable, value)), None)
            if user is not None:
                users[name] = user
        return users

    def share(self, variable: Variable, other: Variable) -> bool:
        """Return True if two values refer to a common object or to common memory.

        A value that contains the other one counts too, even if it does so only because a class
        lists its instances.
        """
        inside = id(variable.value) in other.numbers or id(other.value) in variable.numbers
        return (
            inside
            or bool(self.common(variable, other))
            or _overlap(variable.pickled.spans, other.pickled.spans)
        )

    def common(self, variable: Variable, other: Variable) -> set[int]:
        """Return the identities of the objects that two values have in common.

        Objects in the classes of their instances do not count.
        """
        common = variable.numbers.keys() & other.numbers.keys()
        if common:
            # Instances of one class share its members, which says nothing about the instances.
            classes = {*pickling.classes(variable.pickled)} & {*pickling.classes(other.pickled)}
            if classes:
                common -= pickling.numbers(pickling.dumps(tuple(classes), self.namespace)).keys()
        return common

    def see(self, variable: Variable) -> None:
        """Remember the objects and memory in a value."""
        self._seen[variable.name] = _Seen(
            id(variable.value), variable.objects, variable.pickled.spans
        )

    def forget_names(self, namespace: Container[str]) -> None:
        """Forget names that no longer exist in the notebook."""
        for name in [name for name in self._seen if name not in namespace]:
            del self._seen[name]

    # -- sending -----------------------------------------------------------------------------------

    def sent_values(
        self, group: Sequence[Variable], pickled: Pickled, links: PickleLinks | None
    ) -> dict[str, SentValue]:
        """Return how values are sent in one pickle, by name.

        Empty if nothing can refer to them later.
        """
        # Each pickle gets a table of its own on the ranks.
        table = next(self._tables)
        if len(group) == 1 and links is None:
            variable = group[0]
            self.see(variable)
            return {variable.name: SentValue(variable.stream, table)} if variable.objects else {}
        sent_values = {}
        nested: list[tuple[int, Variable]] = []
        # The values of a group have the numbers -1, -2, … in its table.
        for index, variable in enumerate(group):
            if not variable.fixed:
                self.see(variable)
                if links is None and variable.is_isolated:
                    sent_values[variable.name] = SentValue(variable.stream, table, root=-1 - index)
                elif variable.numbers:
                    nested.append((-1 - index, variable))
        if nested:
            inside, regions, links = (
                pickling.numbers(pickled),
                pickling.storages(pickled),
                links or PickleLinks(),
            )
            for root, variable in nested:
                sent_values[variable.name] = SentValue(
                    variable.stream, table, _places(variable, inside, root, regions, table, links)
                )
        return sent_values


def _places(
    contents: Variable,
    inside: Mapping[int, int],
    root: int,
    regions: Mapping[int, MemoryRegion],
    table: int,
    links: PickleLinks,
) -> dict[int, _Place]:
    """Return the location of each object in one value, by the numbers in its own pickle."""
    locations = {}
    for key, number in contents.numbers.items():
        if key in links.objects:
            locations[number] = _Place(links.objects[key])
        elif number == ROOT:
            locations[number] = _Place((table, root))
        elif key in inside:
            locations[number] = _Place((table, inside[key]))
    for handle, region in pickling.storages(contents.pickled).items():
        number = contents.numbers.get(id(region.stands), ROOT)
        if number == ROOT:
            continue  # the pickle is too large for its objects to have numbers
        if handle in links.memory.storages:
            held, start, stop = links.memory.storages[handle]
            locations[number] = _Place(links.objects[id(held)], start - region.start, stop - start)
        elif handle in regions and id(regions[handle].stands) in inside:
            sent_region = regions[handle]
            locations[number] = _Place(
                (table, inside[id(sent_region.stands)]),
                sent_region.start - region.start,
                sent_region.stop - sent_region.start,
            )
    return locations


def _tables(sent: SentValue) -> set[int]:
    return {sent.table, *(location.ref[0] for location in (sent.locations or {}).values())}


def _overlap(first: Sequence[Span], second: Sequence[Span]) -> bool:
    if not first or not second:
        return False
    # Two values with common memory form one group.
    both = [Pickled((), (), spans=tuple(spans)) for spans in (first, second)]
    return len(groups(both, [frozenset(), frozenset()])) == 1
