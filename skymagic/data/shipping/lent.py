"""Values that one rank has packed for others: the orders that bring them there, by way of the nodes' stores."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skymagic.data.shipping.shipper import Shipper
from skymagic.data.store.base import Store


@contextlib.contextmanager
def orders(
    shipper: Shipper, lent: Mapping[str, Any], ranks: Sequence[int], *, same_node: bool
) -> Iterator[dict[str, Any]]:
    """For ``Namespace.bind`` on these ranks; inside, what the orders refer to is in their nodes' stores.

    Args:
        lent: what `kernels.rank.lending.lend` packed.
        same_node: whether the ranks are on the node of the rank that lends.
    """
    sources = shipper.sources.find(lent["modules"], ranks)
    with _within_reach(shipper.store, lent, same_node) as files:
        yield {
            "python": platform.python_version(),
            "files": files,
            "bundles": [
                {
                    "names": lent["names"], "ranks": None, "header": lent["header"], "buffers": lent["buffers"],
                    "imports": [], "table": None, "links": [], "spare": None, "code": lent["code"], "versions": {},
                }
            ],
            "modules": shipper.sources.lacking(sources, ranks),
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
