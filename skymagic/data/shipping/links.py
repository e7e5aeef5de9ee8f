"""What the ranks hold of values that were sent, object by object, so that a value sent later refers to it and brings no copy.

A rank keeps a table of the objects that each bundle has made there; here it is known which object of which name is where.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from skymagic.data.shipping.bundles import Variable
from skymagic.data.store.base import Buffer
from skymagic.data.values import pickling
from skymagic.data.values.memory import MemoryRegion, Span
from skymagic.data.values.pickled import ROOT, Pickled, PickleLinks, Ref, groups


class _Place(NamedTuple):
    """Where the ranks have an object."""

    ref: Ref
    shift: int = 0
    """How many bytes further the part of a storage begins that travelled."""
    length: int | None = None
    """Bytes of a storage that travelled, where they are not those of the value's own pickle."""


@dataclass(frozen=True, eq=False, slots=True)
class SentValue:
    """A value as it was sent: its pickle, and where the ranks have the objects in it."""

    stream: str | Buffer
    """Stream of the pickle that numbers the objects."""
    table: int
    places: Mapping[int, _Place] | None = None
    """By numbers; None: each number is that of the table."""
    root: int = ROOT
    """The number that the value itself has in the table, where there are no places."""

    def place(self, number: int) -> _Place | None:
        """Where the ranks have the object with this number."""
        if self.places is None:
            return _Place((self.table, self.root if number == ROOT else number))
        return self.places.get(number)


class _Seen(NamedTuple):
    """What was in a name's value when it was looked at."""

    value: int
    objects: Set[int]
    spans: tuple[Span, ...]


@dataclass
class _RankObjects:
    sent: dict[str, SentValue] = field(default_factory=dict)
    lost: set[Ref] = field(default_factory=set)
    """Objects that are gone there."""


class SentLinks:
    """What each rank holds, by name."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self._ranks: defaultdict[int, _RankObjects] = defaultdict(_RankObjects)
        self._seen: dict[str, _Seen] = {}
        self._tables = itertools.count(1)

    # -- what is held ------------------------------------------------------------------------------------------------

    def bound(self, rank: int, sent: Mapping[str, SentValue]) -> None:
        """A rank has bound names with these objects."""
        self._ranks[rank].sent.update(sent)

    def gone(self, rank: int, unlinked: Iterable[str], lost: Iterable[Sequence[int]]) -> None:
        """A rank says what names hold no more, and which objects are gone."""
        state = self._ranks[rank]
        for name in unlinked:
            state.sent.pop(name, None)
        state.lost.update((table, number) for table, number in lost)
        if state.lost:
            tables = {table for each in state.sent.values() for table in _tables(each)}
            state.lost = {ref for ref in state.lost if ref[0] in tables}

    def forget(self, ranks: Iterable[int]) -> None:
        """Forget what these ranks held."""
        for rank in ranks:
            self._ranks.pop(rank, None)

    def holds(self, rank: int, contents: Variable) -> bool:
        """Whether a rank has what this value consists of, as it was sent."""
        sent = self._ranks[rank].sent.get(contents.name)
        return sent is not None and sent.stream == contents.stream

    def view(self, rank: int, names: Iterable[str]) -> tuple[Any, ...]:
        """What a rank holds under these names; ranks where this is equal can be sent the same."""
        state = self._ranks[rank]
        return (*((name, state.sent.get(name)) for name in sorted(names)), frozenset(state.lost))

    def links(self, rank: int, held: Iterable[Variable]) -> PickleLinks:
        """What a value can refer to on a rank that holds these."""
        found = PickleLinks()
        state = self._ranks[rank]
        for contents in held:
            sent = state.sent[contents.name]
            regions = pickling.storages(contents.pickled)
            by_object = {id(region.stands): (handle, region) for handle, region in regions.items()}
            for key, number in contents.numbers.items():
                place = sent.place(number)
                if place is None or place.ref in state.lost:
                    continue
                found.objects.setdefault(key, place.ref)
                if key in by_object:
                    handle, region = by_object[key]
                    start = region.start + place.shift
                    length = region.stop - region.start if place.length is None else place.length
                    found.memory.storages.setdefault(
                        handle, MemoryRegion(region.stands, start, start + length)
                    )
            arrays = pickling.array_regions(contents.pickled)
            found.memory.arrays += [each for each in arrays if id(each.stands) in found.objects]
        return found

    # -- what refers to what -----------------------------------------------------------------------------------------

    def related(
        self,
        moved: Sequence[Variable],
        names: Iterable[str],
        open: Callable[[str], Variable | None],
    ) -> dict[str, str]:
        """Names that have something in common with values that are about to travel: name → one of those.

        Args:
            open: pickles a name's value; None where it cannot travel.
        """
        names = list(names)
        objects = frozenset().union(*(each.objects for each in moved)) if names else frozenset()
        if not objects:
            return {}
        spans = [span for each in moved for span in each.pickled.spans]
        found = {}
        for name in names:
            seen = self._seen.get(name)
            if (
                seen is not None
                and seen.value == id(self.namespace[name])
                and objects.isdisjoint(seen.objects)
                and not _overlap(spans, seen.spans)
            ):
                continue
            variable = open(name)
            if variable is None:
                continue
            self.see(variable)
            user = next((each.name for each in moved if self.share(variable, each)), None)
            if user is not None:
                found[name] = user
        return found

    def share(self, one: Variable, other: Variable) -> bool:
        """Whether two values refer to one object or memory; one that is in the other is so also where a class lists its instances."""
        inside = id(one.value) in other.numbers or id(other.value) in one.numbers
        return (
            inside
            or bool(self.common(one, other))
            or _overlap(one.pickled.spans, other.pickled.spans)
        )

    def common(self, one: Variable, other: Variable) -> set[int]:
        """Identities of the objects in both of two values, without what is in the classes of their instances."""
        common = one.numbers.keys() & other.numbers.keys()
        if common:
            classes = {*pickling.classes(one.pickled)} & {*pickling.classes(other.pickled)}
            if classes:
                common -= pickling.numbers(pickling.dumps(tuple(classes), self.namespace)).keys()
        return common

    def see(self, variable: Variable) -> None:
        """Remember what is in a value."""
        self._seen[variable.name] = _Seen(
            id(variable.value), variable.objects, variable.pickled.spans
        )

    def forget_names(self, namespace: Container[str]) -> None:
        """Forget names that the notebook has lost."""
        for name in [name for name in self._seen if name not in namespace]:
            del self._seen[name]

    # -- what is sent ------------------------------------------------------------------------------------------------

    def sent(
        self, group: Sequence[Variable], pickled: Pickled, links: PickleLinks | None
    ) -> dict[str, SentValue]:
        """How values are sent in one pickle; empty where nothing can refer to them."""
        table = next(self._tables)
        if len(group) == 1 and links is None:
            each = group[0]
            self.see(each)
            return {each.name: SentValue(each.stream, table)} if each.objects else {}
        found = {}
        nested: list[tuple[int, Variable]] = []
        for index, each in enumerate(group):
            if not each.fixed:
                self.see(each)
                if links is None and each.alone:
                    found[each.name] = SentValue(each.stream, table, root=-1 - index)
                elif each.numbers:
                    nested.append((-1 - index, each))
        if nested:
            inside, regions, links = (
                pickling.numbers(pickled),
                pickling.storages(pickled),
                links or PickleLinks(),
            )
            for root, each in nested:
                found[each.name] = SentValue(
                    each.stream, table, _places(each, inside, root, regions, table, links)
                )
        return found


def _places(
    contents: Variable,
    inside: Mapping[int, int],
    root: int,
    regions: Mapping[int, MemoryRegion],
    table: int,
    links: PickleLinks,
) -> dict[int, _Place]:
    """Where the objects of one value are, by the numbers of its own pickle."""
    places = {}
    for key, number in contents.numbers.items():
        if key in links.objects:
            places[number] = _Place(links.objects[key])
        elif number == ROOT:
            places[number] = _Place((table, root))
        elif key in inside:
            places[number] = _Place((table, inside[key]))
    for handle, own in pickling.storages(contents.pickled).items():
        number = contents.numbers.get(id(own.stands), ROOT)
        if number == ROOT:
            continue  # too large a pickle for its objects to have numbers
        if handle in links.memory.storages:
            there, start, stop = links.memory.storages[handle]
            places[number] = _Place(links.objects[id(there)], start - own.start, stop - start)
        elif handle in regions and id(regions[handle].stands) in inside:
            region = regions[handle]
            places[number] = _Place(
                (table, inside[id(region.stands)]),
                region.start - own.start,
                region.stop - region.start,
            )
    return places


def _tables(sent: SentValue) -> set[int]:
    return {sent.table, *(place.ref[0] for place in (sent.places or {}).values())}


def _overlap(one: Sequence[Span], other: Sequence[Span]) -> bool:
    if not one or not other:
        return False
    both = [Pickled((), (), spans=tuple(each)) for each in (one, other)]
    return len(groups(both, [frozenset(), frozenset()])) == 1
