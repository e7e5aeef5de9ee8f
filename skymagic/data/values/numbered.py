"""What is in a value that was pickled here: its objects with their numbers, storages and classes; as long as ``keep`` lives."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import cast

from cloudpickle import cloudpickle as _cloud

from skymagic.data.values import arrays, plain, tensors
from skymagic.data.values.links import LISTED, ROOT, linkable, linkable_kinds, travels
from skymagic.data.values.memory import MemoryRegion
from skymagic.data.values.pickled import Pickled
from skymagic.data.values.pickler import ValuePickler


def numbers(pickled: Pickled) -> dict[int, int]:
    """Identity → number of each linkable object."""
    pickler = _pickler(pickled)
    value = pickled.keep if pickler is None else pickled.keep[1]
    found = {id(value): ROOT} if linkable(type(value)) else {}
    if pickler is None and plain.flat(value):
        return found
    memo = _memo(pickled)
    kinds = linkable_kinds({key: each for key, (_, each) in memo.items()})
    functions = {types.FunctionType} & kinds
    private = pickler.tracker.private if pickler is not None else ()
    for key, (number, each) in memo.items():
        if (
            type(each) in kinds
            and key not in private
            and (type(each) not in functions or travels(cast(types.FunctionType, each)))
        ):
            found.setdefault(key, number)
    return found


def marks(pickled: Pickled) -> frozenset[int]:
    """Identities of the changeable objects, as far as it is worth while to list them."""
    if pickled.marks is not None:
        return pickled.marks
    pickler = _pickler(pickled)
    return plain.containers(pickled.keep) if pickler is None else pickler.found_marks(pickled.keep[1])


def storages(pickled: Pickled) -> dict[int, MemoryRegion]:
    """The torch storages, by their handles."""
    pickler = _pickler(pickled)
    return tensors.regions(pickler.tracker) if pickler is not None else {}


def array_regions(pickled: Pickled) -> list[MemoryRegion]:
    """The arrays without gaps."""
    pickler = _pickler(pickled)
    objects = [each for _, each in _memo(pickled).values()]
    if pickler is not None:
        objects.append(pickled.keep[1])
    reached = ((each, arrays.reach(each)) for each in objects)
    return [MemoryRegion(each, *addresses) for each, addresses in reached if addresses is not None]


def classes(pickled: Pickled) -> list[type]:
    """The classes of the notebook that travel with it."""
    found = [each for _, each in _memo(pickled).values() if isinstance(each, type)]
    return [each for each in found if each in _cloud._DYNAMIC_CLASS_TRACKER_BY_CLASS]


def _memo(pickled: Pickled) -> Mapping[int, tuple[int, object]]:
    if sum(map(len, pickled.pieces)) > LISTED:
        return {}
    pickler = _pickler(pickled)
    return plain.memo(pickled.keep) if pickler is None else pickler.memo.copy()


def _pickler(pickled: Pickled) -> ValuePickler | None:
    """The pickler of a value that is not plain."""
    keep = pickled.keep
    return keep[0] if isinstance(keep, tuple) and keep and isinstance(keep[0], ValuePickler) else None
