"""Pickle and unpickle values; functions of the notebook travel without the notebook's variables.

A function defined in a cell is rebuilt with the *other side's* namespace as its globals: it travels
with the names that it uses, not with their values. A class defined in a cell travels by value and
keeps its identity: what returns to the process that defined the class is an instance of that very
class, and leaves the class unchanged.
"""

from __future__ import annotations

import gc
import io
import pickle
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, cast

from cloudpickle import cloudpickle as _cloud

from skymagic.content.base import Buffer, Content
from skymagic.content.device import DeviceBytes
from skymagic.data.namespace import Namespace
from skymagic.data.values import arrays, rebuild, tensors
from skymagic.data.values.contents import Contents
from skymagic.data.values.forms import form_for
from skymagic.data.values.memory import Leaf, MemoryRegion, Tracker, layout
from skymagic.data.values.pickled import (
    LISTED,
    ROOT,
    Pickled,
    PickleLinks,
    Rope,
    containers_in,
    containers_of,
    groups,
    is_flat,
    linkable,
    linkable_kinds,
    pickle_plain,
    plain_memo,
    travels_by_value,
)
from skymagic.data.values.pickler import ValuePickler, pickler_for
from skymagic.data.values.rebuild import current_context
from skymagic.data.values.shards import REFUSED, Shards

_PAUSES = threading.Lock()
_paused = 0
"""Number of threads that currently need collection to be off."""
_was_enabled = True


@contextmanager
def to_processes(*, same_files: bool) -> Iterator[None]:
    """Set whether pickles go to processes that see the same files.

    Args:
        same_files: True if they do.
    """
    before, current_context.same_files = current_context.same_files, same_files
    try:
        yield
    finally:
        current_context.same_files = before


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keep the cycle collector from running; also usable as a decorator.

    Pickling creates many long-lived objects at once, and each full collection that they trigger
    scans the whole process. That took 0.13 s of the 0.21 s needed to compare 10,000 unchanged
    tensors.
    """
    global _paused, _was_enabled
    with _PAUSES:
        if not _paused:
            _was_enabled = gc.isenabled()
            gc.disable()
        _paused += 1
    try:
        yield
    finally:
        with _PAUSES:
            _paused -= 1
            if not _paused and _was_enabled:  # leave it off if the user disabled it
                gc.enable()


def dumps(
    value: object,
    namespace: Namespace,
    *,
    folder: str | None = None,
    between_ranks: bool = False,
    links: PickleLinks | None = None,
    parts: Shards = REFUSED,
) -> Pickled:
    """Pickle a value.

    Args:
        namespace: global names of the notebook or the rank; functions defined there travel without
            them.
        folder: the notebook's folder; modules in it are recorded. None on a rank: functions record
            where the names that they use were imported from, and nothing else of the namespace.
        between_ranks: True if another rank continues with the value: tensors go to its device,
            wrappers around the process group stay wrappers, and all modules are recorded.
        links: objects that the other side already has; records which of them the pickle refers to.
        parts: tensors that were gathered for values sharded over several ranks.

    Raises:
        Exception: any error from the value's own reduction, usually `pickle.PicklingError` or
            `TypeError`.
    """
    # `globals()` stands for the namespace of the other side, not for a copy of this one.
    if value is namespace:
        value = _NamespacePlaceholder()
    # Not with links: a list in the value may be one that the other side already has.
    plain = pickle_plain(value) if links is None else None
    if plain is not None:
        return plain
    first_pass = pickler_for(namespace, folder, links, None, between_ranks)
    first_pass.parts = parts
    first_pass.dump(value)
    shared = layout(first_pass.tracker.spans, first_pass.tracker.whole)
    if shared is None:
        return first_pass.result(value)
    # Overlapping memory is known only after one pass. The second pass pickles it as common blocks.
    second_pass = pickler_for(namespace, folder, links, shared, between_ranks)
    second_pass.parts = parts
    second_pass.before = first_pass  # keeps its objects alive, so that no address is reused
    second_pass.dump(value)
    return second_pass.result(value)


def group_by_shared_objects(pickles: Sequence[Pickled]) -> list[list[int]]:
    """Group pickles whose values share an object or memory, by index.

    The values of a group must be pickled as one to keep sharing it.
    """
    if len(pickles) == 1:
        return [[0]]  # listing the contents would take as long as pickling
    return groups(pickles, [marks(pickled) for pickled in pickles])


@collection_paused()
def loads(
    header: Sequence[Buffer],
    buffers: Iterable[Content],
    namespace: Namespace,
    *,
    links: Sequence[object] = (),
    memo: dict[int, object] | None = None,
) -> Any:
    """Rebuild a value; its functions get `namespace` as their globals.

    Args:
        header: pieces of the pickle stream.
        buffers: out-of-band buffers, in the order of the pickle.
        links: objects that the pickle refers to.
        memo: filled with the rebuilt objects by number, or left empty if there may be too many.
    """
    # Buffers that come directly from a `Pickled` may still be on a device.
    on_host = [buffer.read() if isinstance(buffer, DeviceBytes) else buffer for buffer in buffers]
    # Restored at the end, because calls may be nested.
    before, current_context.namespace = current_context.namespace, namespace
    lent, current_context.lent = current_context.lent, []
    weak, current_context.weak = current_context.weak, []
    current_context.class_hash = _class_hash
    try:
        # Objects in very large pickles have no numbers; see `LISTED`.
        if sum(map(len, header)) > LISTED:
            memo = None
        if len(header) == 1 and not links and memo is None:
            value = pickle.loads(header[0], buffers=on_host)
        else:
            value = _load(header, on_host, links, memo)
        # Everything is rebuilt now, so members that only these lists refer to are orphans.
        if current_context.weak:
            rebuild.hold(numbered=memo is not None)
        return value
    finally:
        current_context.weak = weak
        for name, value in current_context.lent:
            # Unless the code that was run meanwhile has bound the name to something else.
            if namespace.get(name) is value:
                del namespace[name]
        current_context.namespace, current_context.lent = before, lent


def _load(
    header: Sequence[Buffer],
    buffers: Iterable[Buffer],
    links: Sequence[object],
    memo: dict[int, object] | None,
) -> Any:
    stream = io.BytesIO(header[0]) if len(header) == 1 else Rope(header)
    unpickler = (
        _Linking(stream, buffers, links) if links else pickle.Unpickler(stream, buffers=buffers)
    )
    value = unpickler.load()
    if memo is not None:
        memo.update(unpickler.memo.copy())
    return value


class _Linking(pickle.Unpickler):
    """Unpickler that resolves references to objects by number."""

    def __init__(self, stream: Any, buffers: Iterable[Buffer], links: Sequence[object]) -> None:
        super().__init__(stream, buffers=buffers)
        self._links = links

    # A method, because Python 3.13.0 rejects a `persistent_load` that is set on an instance.
    def persistent_load(self, number: int) -> object:
        return self._links[number]


def reducer(namespace: Namespace) -> Callable[[Any], Any]:
    """Return a function that reduces one object as `dumps` does, in the manner of `__reduce_ex__`.

    Use it for one value only.
    """
    picklers: list[ValuePickler] = []  # created on demand: plain values need none

    def reduce(value: Any) -> Any:
        pickler = picklers[0] if picklers else ValuePickler(namespace, "", Tracker())
        picklers[:] = [pickler]
        reduced = pickler.reducer_override(value)
        if reduced is NotImplemented and not isinstance(value, (type, types.FunctionType)):
            own = pickler.dispatch_table.get(type(value))
            reduced = own(value) if own is not None else value.__reduce_ex__(5)
        return reduced

    return reduce


def _class_hash(cls: type, state: object) -> str | None:
    """Return the hash of the members received for a class, or None."""
    contents = Contents(reducer(rebuild.namespace()), form_for, lambda memory: None)
    contents.add_repeated(cls)  # methods refer to the class: ignore what it contains locally
    try:
        return contents.of(state)
    except Exception:  # raised by the members' own code
        return None


class _NamespacePlaceholder:
    """Placeholder for the whole namespace of a side."""

    def __reduce__(self) -> Any:
        return rebuild.namespace, ()


# -- contents of a pickled value -------------------------------------------------------------------


def numbers(pickled: Pickled) -> dict[int, int]:
    """Return the number of each linkable object, by identity."""
    pickler = _pickler(pickled)
    value = pickled.keep if pickler is None else pickled.keep[1]
    private = pickler.tracker.private if pickler is not None else ()
    numbers_by_id = {id(value): ROOT} if linkable(type(value)) and id(value) not in private else {}
    if pickler is None and is_flat(value):
        return numbers_by_id
    memo = _memo(pickled)
    kinds = linkable_kinds(type(obj) for _, obj in memo.values())
    functions = {types.FunctionType} & kinds
    for key, (number, obj) in memo.items():
        if (
            type(obj) in kinds
            and key not in private
            and (type(obj) not in functions or travels_by_value(cast(types.FunctionType, obj)))
        ):
            numbers_by_id.setdefault(key, number)
    return numbers_by_id


def with_state(pickled: Pickled, keys: Set[int]) -> Set[int]:
    """Return the given objects that can change: neither functions nor frozen dataclass instances.

    Objects in a function's closure or in a frozen instance are listed separately.
    """
    value = pickled.keep if _pickler(pickled) is None else pickled.keep[1]
    objects_by_id = {key: obj for key, (_, obj) in _memo(pickled).items() if key in keys}
    objects_by_id.setdefault(id(value), value)
    constant = set()
    for key, obj in objects_by_id.items():
        if type(obj) is types.FunctionType:
            constant.add(key)
        elif getattr(getattr(type(obj), "__dataclass_params__", None), "frozen", False):
            # The state that `object.__reduce_ex__` returns is the `__dict__` itself, so it has a
            # number as well.
            constant.update((key, id(getattr(obj, "__dict__", None))))
    return keys - constant


def objects(pickled: Pickled) -> Set[int]:
    """Return the identities of the linkable objects.

    The same as the keys of `numbers`, but much faster for containers of many small arrays or
    tensors.
    """
    pickler = _pickler(pickled)
    if pickler is not None and pickler.tracker.leaves and sum(map(len, pickled.pieces)) <= LISTED:
        containers = containers_of(pickled.keep[1], pickler.tracker.leaves)
        if containers is not None:
            storages = map(id, pickler.tracker.storages.values())
            return {*containers, *pickler.tracker.leaves, *storages} - pickler.tracker.private
    return numbers(pickled).keys()


def marks(pickled: Pickled) -> frozenset[int]:
    """Return the identities of the mutable objects, unless there are too many to list."""
    if pickled.marks is not None:
        return pickled.marks
    pickler = _pickler(pickled)
    return (
        containers_in(pickled.keep)
        if pickler is None
        else pickler.mutable_identities(pickled.keep[1])
    )


def storages(pickled: Pickled) -> dict[int, MemoryRegion]:
    """Return the memory of the torch storages, by their handles."""
    pickler = _pickler(pickled)
    return tensors.regions(pickler.tracker) if pickler is not None else {}


def leaves(pickled: Pickled) -> Mapping[int, Leaf]:
    """Return the small arrays and tensors by identity."""
    pickler = _pickler(pickled)
    return pickler.tracker.leaves if pickler is not None else {}


def array_regions(pickled: Pickled) -> list[MemoryRegion]:
    """Return the memory of the contiguous arrays."""
    pickler = _pickler(pickled)
    objects = [obj for _, obj in _memo(pickled).values()]
    if pickler is not None:
        objects.append(pickled.keep[1])
    candidates = ((obj, arrays.reach(obj)) for obj in objects)
    return [MemoryRegion(obj, *addresses) for obj, addresses in candidates if addresses is not None]


def classes(pickled: Pickled) -> list[type]:
    """Return the notebook's classes that travel with the value."""
    types_in_pickle = [cls for _, cls in _memo(pickled).values() if isinstance(cls, type)]
    return [cls for cls in types_in_pickle if cls in _cloud._DYNAMIC_CLASS_TRACKER_BY_CLASS]


def _memo(pickled: Pickled) -> Mapping[int, tuple[int, object]]:
    if sum(map(len, pickled.pieces)) > LISTED:
        return {}
    pickler = _pickler(pickled)
    return plain_memo(pickled.keep) if pickler is None else pickler.memo.copy()


def _pickler(pickled: Pickled) -> ValuePickler | None:
    """Return the pickler of a value, or None if the value is plain."""
    keep = pickled.keep
    return (
        keep[0] if isinstance(keep, tuple) and keep and isinstance(keep[0], ValuePickler) else None
    )


# -- names bound while a value is rebuilt ----------------------------------------------------------


class Named:
    """Value that is bound to its name as soon as it is rebuilt, for use by later ones."""

    def __init__(self, name: str, value: object) -> None:
        self.name, self.value = name, value

    def __reduce__(self) -> Any:
        return rebuild.bound, (self.name, self.value)


class Accompanied:
    """Value with the names that its rebuilding needs, for a side that does not have them."""

    def __init__(self, names: Mapping[str, object], value: object) -> None:
        self.names, self.value = names, value

    def __reduce__(self) -> Any:
        # The unpickler rebuilds arguments in their order: the names are bound before the value
        # needs them.
        return rebuild.accompanied, tuple(_Lent(*item) for item in self.names.items()) + (
            self.value,
        )


class _Lent(Named):
    def __reduce__(self) -> Any:
        return rebuild.lent, (self.name, self.value)
