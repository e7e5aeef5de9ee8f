"""From values to bundles: what shares something goes together, and refers to what a rank holds already; what one rank lends to others."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skymagic.data.shipping.bindings import Sources
from skymagic.data.shipping.bundles import (
    Bundle,
    Variable,
    groups,
    in_rebuild_order,
    merge_plain,
    parts_of,
    submodules,
)
from skymagic.data.shipping.collecting import Needs, ShippingRequest
from skymagic.data.shipping.links import SentLinks, SentValue
from skymagic.data.shipping.notes import SplitReference
from skymagic.data.store.base import Store
from skymagic.data.store.bundle import ContentIndex
from skymagic.data.values import pickling
from skymagic.data.values.pickled import LISTED, Pickled, PickleLinks, Ref
from skymagic.data.values.pickling import Named


@dataclass
class Packed:
    """What a run's ranks are sent."""

    bundles: list[Bundle] = field(default_factory=list)
    sent: list[tuple[list[int], Mapping[str, SentValue]]] = field(default_factory=list)
    """Ranks, and how values are sent to them."""
    apart: list[SplitReference] = field(default_factory=list)


@dataclass
class Packer:
    """Packs the values of one run."""

    links: SentLinks
    index: ContentIndex
    folder: str
    request: ShippingRequest
    needs: Needs
    packed: Packed = field(default_factory=Packed)

    def __post_init__(self) -> None:
        found = (value.pickled.attributes for value in self.needs.moved)
        self._attributes = self.request.names.attributes.union(*found)

    def pack(self) -> Packed:
        """Make the bundles."""
        moved = self.needs.moved
        if not moved:
            return self.packed
        held = [
            value
            for name, value in self.needs.values.items()
            if len(self.needs.lacking[name]) < len(self.request.ranks)
            and not value.fixed
            and name not in self.request.temporary
        ]
        shared = groups(moved)
        related = {}
        for group in shared if held else ():
            if found := self._related(group, held):
                related[group[0].name] = found
        for group in in_rebuild_order(
            merge_plain(shared, self.needs.lacking, related), self.needs.values
        ):
            found = next((related[value.name] for value in group if value.name in related), [])
            self._add(group, found)
        return self.packed

    def _related(self, group: list[Variable], held: Iterable[Variable]) -> list[Variable]:
        """What some ranks hold and has something in common with these values; nothing where one is for this run alone."""
        if not self.request.temporary.isdisjoint(value.name for value in group):
            return []
        mine = [value for value in group if not value.fixed]
        names = {each.name for each in mine}
        return [
            each
            for each in held
            if each.name not in names and any(self.links.share(each, one) for one in mine)
        ]

    def _add(self, group: list[Variable], related: list[Variable]) -> None:
        """A bundle for the ranks that lack the same of these values, and hold the same of what they refer to."""
        everything = {each.name: each for each in (*related, *group)}
        alike: dict[tuple[Any, ...], list[int]] = {}
        for rank in self.request.ranks:
            lacks = frozenset(each.name for each in group if rank in self.needs.lacking[each.name])
            if lacks:
                there = [
                    each
                    for each in everything.values()
                    if rank not in self.needs.lacking[each.name]
                ]
                linked = frozenset(each.name for each in there if self.links.holds(rank, each))
                own = frozenset(each.name for each in there) - linked
                alike.setdefault(
                    (lacks, linked, own, self.links.view(rank, linked) if linked else ()), []
                ).append(rank)
        for (lacks, linked, own, _), ranks in alike.items():
            links = (
                self.links.links(ranks[0], [everything[name] for name in sorted(linked)])
                if linked
                else None
            )
            mine = [each for each in group if each.name in lacks]
            self._bundle(mine, ranks, links)
            if own and not self.request.temporary.intersection(lacks):
                self._note(
                    [each for each in everything.values() if each.name in own],
                    mine,
                    links or PickleLinks(),
                )

    def _note(self, own: Sequence[Variable], group: Sequence[Variable], links: PickleLinks) -> None:
        """Note what refers to a name's value of the notebook where the ranks have their own: the name that has most of it."""
        for each in group:
            apart = {}
            for other in own:
                common = self.links.common(other, each)
                if other.name not in self.request.names.loads:
                    common -= links.objects.keys()
                apart[other.name] = len(pickling.with_state(each.pickled, common))
            most = max(apart, key=lambda name: apart[name], default=None)
            if most is not None and apart[most]:
                self.packed.apart.append(SplitReference(each.name, most))

    def _bundle(self, group: list[Variable], ranks: list[int], links: PickleLinks | None) -> None:
        first = group[0]
        pickled, parts = first.pickled, first.parts
        if len(group) > 1 or links is not None:
            value = _together(group)
            pickled = pickling.dumps(value, self.links.namespace, folder=self.folder, links=links)
            parts = parts_of(pickled)
        spare = self._spare(group) if links is not None else None
        if spare is not None:
            parts = parts + parts_of(spare)
        if parts is not first.parts:
            self.index.identify(parts, lazily=True)
        names = [each.name for each in group]
        kept = [each for each in group if not each.fixed]
        sent = (
            {}
            if self.request.temporary.intersection(names) or not kept
            else self.links.sent(group, pickled, links)
        )
        self.packed.sent.append((ranks, sent))
        self.packed.bundles.append(
            Bundle(
                names=names,
                ranks=None if len(ranks) == len(self.request.ranks) else sorted(ranks),
                pickled=pickled,
                parts=parts,
                imports=submodules((each.value for each in group), self._attributes),
                table=next((each.table for each in sent.values()), None),
                links=_numbered(links, spare) if links is not None else [],
                spare=spare,
            )
        )

    def _spare(self, group: list[Variable]) -> Pickled | None:
        """The values without references; None where they are too large to be sent again."""
        if len(group) == 1:
            pickled = group[0].pickled
        else:
            value = _together(group)
            pickled = pickling.dumps(value, self.links.namespace, folder=self.folder)
        return pickled if sum(map(len, pickled.pieces)) <= LISTED else None


def _numbered(links: PickleLinks, spare: Pickled | None) -> list[tuple[Ref, int | None]]:
    """Where the objects are that a pickle refers to, and their numbers in the spare."""
    numbers = pickling.numbers(spare) if spare is not None else {}
    for handle, own in (pickling.storages(spare) if spare is not None else {}).items():
        there = links.memory.storages.get(handle)
        if there is not None and (there.start, there.stop) == (own.start, own.stop):
            numbers[id(there.stands)] = numbers[id(own.stands)]
    return [(links.objects[key], numbers.get(key)) for key in links.used]


def _together(group: Sequence[Variable]) -> object:
    """What is pickled for these values: names too, where the code that rebuilds one uses another."""
    if len(group) == 1:
        return group[0].value
    named = any(value.pickled.active for value in group)
    return tuple(Named(value.name, value.value) if named else value.value for value in group)


# -- what one rank has packed for others -----------------------------------------------------------


@contextlib.contextmanager
def orders_for_lent(
    sources: Sources,
    store: Store,
    lent: Mapping[str, Any],
    ranks: Sequence[int],
    *,
    same_node: bool,
) -> Iterator[dict[str, Any]]:
    """For ``Namespace.bind`` on these ranks; inside, what the orders refer to is in their nodes' stores.

    Args:
        sources: the modules that the ranks have, and get.
        store: the node's store, or that of several nodes.
        lent: what `kernels.rank.lending.lend` packed.
        same_node: whether the ranks are on the node of the rank that lends.
    """
    found = sources.find(lent["modules"], ranks)
    with _within_reach(store, lent, same_node) as files:
        yield {
            "python": platform.python_version(),
            "files": files,
            "bundles": [
                {
                    "names": lent["names"], "ranks": None, "header": lent["header"], "buffers": lent["buffers"],
                    "imports": [], "table": None, "links": [], "spare": None, "code": lent["code"], "versions": {},
                }
            ],
            "modules": sources.lacking(found, ranks),
            "sources": lent["sources"],
            "temporary": [],
            "unbound": [],
        }  # fmt: skip


@contextlib.contextmanager
def _within_reach(store: Store, lent: Mapping[str, Any], same_node: bool) -> Iterator[list[str]]:
    """The lender's file, by the name that it has where it is needed."""
    name, node = lent["file"], lent["node"]
    if name is None:
        yield []
    elif same_node or not store.remote:
        try:
            yield [name]
        finally:
            store.discard(name, node)
    else:
        data, before = store.take(name, node), store.keys()
        key = store.put(None, [data], data.nbytes)
        store.pin([key])
        try:
            store.settle()
            yield [store.name(key)]
        finally:
            store.unpin([key])
            if key not in before:
                store.drop([key])
