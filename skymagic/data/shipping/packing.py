"""Pack values into bundles: group those that share objects, and refer to objects ranks hold.

Also creates orders for values that one rank lends to others.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skymagic.content.base import Store
from skymagic.data.bundle import ContentIndex
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
from skymagic.data.values import pickling
from skymagic.data.values.pickled import LISTED, Pickled, PickleLinks, Ref
from skymagic.data.values.pickling import Named
from skymagic.wire.values import BindOrder, LentNames, PackedBundle, PackedValue


@dataclass
class Packed:
    """Bundles for a run's ranks, and how values are sent."""

    bundles: list[Bundle] = field(default_factory=list)
    sent: list[tuple[list[int], Mapping[str, SentValue]]] = field(default_factory=list)
    """Pairs of ranks and the values sent to them."""
    split_references: list[SplitReference] = field(default_factory=list)


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
        attributes = (value.pickled.attributes for value in self.needs.to_send)
        self._attributes = self.request.names.attributes.union(*attributes)

    def pack(self) -> Packed:
        """Create the bundles."""
        moved = self.needs.to_send
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
        # If no rank holds any value, nothing can be referred to.
        for group in shared if held else ():
            if related_values := self._related(group, held):
                related[group[0].name] = related_values
        for group in in_rebuild_order(
            merge_plain(shared, self.needs.lacking, related), self.needs.values
        ):
            related_values = next(
                (related[value.name] for value in group if value.name in related), []
            )
            self._add(group, related_values)
        return self.packed

    def _related(self, group: list[Variable], held: Iterable[Variable]) -> list[Variable]:
        """Return values on some ranks that share objects with this group.

        Empty if the group holds a value for this run only.
        """
        if not self.request.temporary.isdisjoint(value.name for value in group):
            return []
        group_values = [value for value in group if not value.fixed]
        names = {value.name for value in group_values}
        return [
            held_value
            for held_value in held
            if held_value.name not in names
            and any(self.links.share(held_value, value) for value in group_values)
        ]

    def _add(self, group: list[Variable], related: list[Variable]) -> None:
        """Create one bundle per set of ranks that can be sent the same.

        Such ranks lack the same values of the group, and hold the same objects that these refer to.
        """
        values_by_name = {value.name: value for value in (*related, *group)}
        ranks_by_state: dict[tuple[Any, ...], list[int]] = {}
        for rank in self.request.ranks:
            lacks = frozenset(
                value.name for value in group if rank in self.needs.lacking[value.name]
            )
            if lacks:
                present = [
                    value
                    for value in values_by_name.values()
                    if rank not in self.needs.lacking[value.name]
                ]
                linked = frozenset(value.name for value in present if self.links.holds(rank, value))
                own = frozenset(value.name for value in present) - linked
                ranks_by_state.setdefault(
                    (lacks, linked, own, self.links.view(rank, linked) if linked else ()), []
                ).append(rank)
        for (lacks, linked, own, _), ranks in ranks_by_state.items():
            links = (
                self.links.links(ranks[0], [values_by_name[name] for name in sorted(linked)])
                if linked
                else None
            )
            missing = [value for value in group if value.name in lacks]
            self._bundle(missing, ranks, links)
            # The ranks' own values stay separate from the notebook's: tell the user.
            if own and not self.request.temporary.intersection(lacks):
                self._note(
                    [value for value in values_by_name.values() if value.name in own],
                    missing,
                    links or PickleLinks(),
                )

    def _note(self, own: Sequence[Variable], group: Sequence[Variable], links: PickleLinks) -> None:
        """Record values that refer to the notebook's value of a name bound by the ranks themselves.

        Of several such names, the one with most objects in common is recorded.
        """
        for value in group:
            common_counts = {}
            for other in own:
                common = self.links.common(other, value)
                if other.name not in self.request.names.loads:
                    common -= links.objects.keys()
                common_counts[other.name] = len(pickling.with_state(value.pickled, common))
            closest = max(common_counts, key=lambda name: common_counts[name], default=None)
            if closest is not None and common_counts[closest]:
                self.packed.split_references.append(SplitReference(value.name, closest))

    def _bundle(self, group: list[Variable], ranks: list[int], links: PickleLinks | None) -> None:
        first = group[0]
        pickled, parts = first.pickled, first.parts
        # A single value without links is sent as it was pickled for the comparison.
        if len(group) > 1 or links is not None:
            value = _object_to_pickle(group)
            pickled = pickling.dumps(value, self.links.namespace, folder=self.folder, links=links)
            parts = parts_of(pickled)
        fallback = self._spare(group) if links is not None else None
        if fallback is not None:
            parts = parts + parts_of(fallback)
        # Parts of a single variable already have their hashes.
        if parts is not first.parts:
            self.index.identify(parts, lazily=True)
        names = [variable.name for variable in group]
        linkable = [variable for variable in group if not variable.fixed]
        sent = (
            {}
            if self.request.temporary.intersection(names) or not linkable
            else self.links.sent_values(group, pickled, links)
        )
        self.packed.sent.append((ranks, sent))
        self.packed.bundles.append(
            Bundle(
                names=names,
                ranks=None if len(ranks) == len(self.request.ranks) else sorted(ranks),
                pickled=pickled,
                parts=parts,
                imports=submodules((variable.value for variable in group), self._attributes),
                table=next((value.table for value in sent.values()), None),
                links=_numbered(links, fallback) if links is not None else [],
                fallback=fallback,
            )
        )

    def _spare(self, group: list[Variable]) -> Pickled | None:
        """Pickle the group without references, or return None if it is too large to resend."""
        if len(group) == 1:
            pickled = group[0].pickled
        else:
            value = _object_to_pickle(group)
            pickled = pickling.dumps(value, self.links.namespace, folder=self.folder)
        return pickled if sum(map(len, pickled.pieces)) <= LISTED else None


def _numbered(links: PickleLinks, fallback: Pickled | None) -> list[tuple[Ref, int | None]]:
    """Return the locations of the objects a pickle refers to, and their numbers in the spare."""
    numbers = pickling.numbers(fallback) if fallback is not None else {}
    for handle, region in (pickling.storages(fallback) if fallback is not None else {}).items():
        linked = links.memory.storages.get(handle)
        # The storage of the fallback can stand for the rank's only if both hold the same bytes.
        if linked is not None and (linked.start, linked.stop) == (region.start, region.stop):
            numbers[id(linked.stands)] = numbers[id(region.stands)]
    # In the order of the indices that `PickleLinks.number` has given.
    return [(links.objects[key], numbers.get(key)) for key in links.used]


def _object_to_pickle(group: Sequence[Variable]) -> object:
    """Return the object to pickle for a group of values.

    It includes their names if code that rebuilds one of them may use another.
    """
    if len(group) == 1:
        return group[0].value
    named = any(value.pickled.active for value in group)
    return tuple(Named(value.name, value.value) if named else value.value for value in group)


# -- values lent by another rank -------------------------------------------------------------------


@contextlib.contextmanager
def bind_orders_for_lent_names(
    sources: Sources,
    store: Store,
    lent: LentNames,
    ranks: Sequence[int],
    *,
    same_node: bool,
) -> Iterator[BindOrder]:
    """Yield an order for `RankNamespace.bind` on these ranks.

    Within the context, the files that the order refers to are in the stores of the ranks' nodes.

    Args:
        sources: modules that the ranks have, or receive.
        store: store of the node, or of several nodes.
        lent: result of `kernels.rank.variable_export.pack_for_ranks`.
        same_node: True if the ranks are on the lender's node.
    """
    assert lent.value is not None
    modules = sources.find(lent.modules, ranks)
    with _linked_on_nodes(store, lent.value, same_node) as files:
        yield BindOrder(
            python=platform.python_version(),
            files=tuple(files),
            bundles=(
                PackedBundle(
                    names=lent.names,
                    ranks=None,
                    header=lent.value.header,
                    buffers=lent.value.buffers,
                    code=lent.code,
                ),
            ),
            modules=sources.missing_modules(modules, ranks),
            sources=lent.sources,
        )


@contextlib.contextmanager
def _linked_on_nodes(store: Store, lent: PackedValue, same_node: bool) -> Iterator[list[str]]:
    """Yield the lender's file under its name on the nodes that need it."""
    # None if all parts are inline in the orders.
    name, node = lent.file, lent.node
    if name is None:
        yield []
    elif same_node or not store.remote:
        try:
            yield [name]
        finally:
            store.discard(name, node)
    else:
        # The nodes have no common store, so the file goes through the notebook.
        data, before = store.take(name, node), store.keys()
        key = store.put(None, [data], data.nbytes)
        store.pin([key])
        try:
            store.settle()
            yield [store.name(key)]
        finally:
            store.unpin([key])
            # Keep the file if the store already had the same contents for another reason.
            if key not in before:
                store.drop([key])
