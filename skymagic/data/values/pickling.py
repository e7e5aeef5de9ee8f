"""Values as a pickle and its buffers; functions of the notebook travel without the notebook's variables.

A function defined in a cell is rebuilt with the *other side's* namespace as its globals: the names that it uses
travel as names. A class defined in a cell travels by value and keeps its identity: what comes back to where the class
was defined is an instance of that very class, and does not change it.
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

from skymagic.data.store.base import Buffer, Content
from skymagic.data.store.device import DeviceBytes
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
    plain_memo,
    plainly,
    travels,
)
from skymagic.data.values.pickler import ValuePickler, pickler_for
from skymagic.data.values.rebuild import here
from skymagic.data.values.shards import REFUSED, Shards

_PAUSES = threading.Lock()
_paused = 0
"""How many threads want no collection now."""
_was_enabled = True


@contextmanager
def to_processes(*, same_files: bool) -> Iterator[None]:
    """Within: what is pickled goes to processes that see the same files, or not."""
    before, here.same_files = here.same_files, same_files
    try:
        yield
    finally:
        here.same_files = before


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keep the cycle collector from running: also a decorator.

    Pickling makes many objects at once that live on: each full collection that they cause looks at everything in the process. That was
    0.13 s of the 0.21 s in which 10,000 unchanged tensors were compared.
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
            if not _paused and _was_enabled:  # who has switched it off keeps it off
                gc.enable()


def dumps(
    value: object,
    namespace: dict[str, Any],
    *,
    folder: str | None = None,
    between_ranks: bool = False,
    links: PickleLinks | None = None,
    parts: Shards = REFUSED,
) -> Pickled:
    """Pickle a value.

    Args:
        namespace: the notebook's or the rank's global names; functions defined there do not take them along.
        folder: the notebook's folder; modules in it are recorded. None on a rank: functions take along where the names
            that they use were imported from, and nothing else of the namespace.
        between_ranks: another rank continues with the value: tensors go to its device, and wrappers around the process
            group stay wrappers. All modules are recorded.
        links: objects that the other side has already; it notes which of them the pickle refers to.
        parts: what was gathered of values whose parts lie on several ranks.

    Raises:
        Exception: whatever the value's own reduction raises; pickle.PicklingError and TypeError most often.
    """
    if value is namespace:
        value = _Namespace()
    known = plainly(value) if links is None else None
    if known is not None:
        return known
    first = pickler_for(namespace, folder, links, None, between_ranks)
    first.parts = parts
    first.dump(value)
    shared = layout(first.tracker.spans, first.tracker.whole)
    if shared is None:
        return first.result(value)
    second = pickler_for(namespace, folder, links, shared, between_ranks)
    second.parts = parts
    second.before = first  # its objects live on, so that no address means two things
    second.dump(value)
    return second.result(value)


def together(pickles: Sequence[Pickled]) -> list[list[int]]:
    """Indices of pickles whose values share an object or memory, in groups; they must be pickled as one to stay so."""
    if len(pickles) == 1:
        return [[0]]  # what is in it takes as long to list as to pickle
    return groups(pickles, [marks(each) for each in pickles])


@collection_paused()
def loads(
    header: Sequence[Buffer],
    buffers: Iterable[Content],
    namespace: dict[str, Any],
    *,
    links: Sequence[object] = (),
    memo: dict[int, object] | None = None,
) -> Any:
    """Rebuild a value; its functions get ``namespace`` as their globals.

    Args:
        header: the pieces of the pickle stream.
        links: the objects that it refers to.
        memo: gets the objects that were made, by their numbers; nothing where there may be too many.
    """
    on_host = [each.read() if isinstance(each, DeviceBytes) else each for each in buffers]
    before, here.namespace = here.namespace, namespace
    lent, here.lent = here.lent, []
    weak, here.weak = here.weak, []
    here.class_hash = _class_hash
    try:
        if sum(map(len, header)) > LISTED:
            memo = None
        if len(header) == 1 and not links and memo is None:
            value = pickle.loads(header[0], buffers=on_host)
        else:
            value = _load(header, on_host, links, memo)
        if here.weak:
            rebuild.hold(numbered=memo is not None)
        return value
    finally:
        here.weak = weak
        for name, value in here.lent:
            if namespace.get(name) is value:
                del namespace[name]
        here.namespace, here.lent = before, lent


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
    """Has the objects that a stream refers to by number."""

    def __init__(self, stream: Any, buffers: Iterable[Buffer], links: Sequence[object]) -> None:
        super().__init__(stream, buffers=buffers)
        self._links = links

    def persistent_load(
        self, number: int
    ) -> object:  # Python 3.13.0 refuses one that is set on an instance
        return self._links[number]


def reducer(namespace: dict[str, Any]) -> Callable[[Any], Any]:
    """How ``dumps`` takes an object apart: a function that does so with one, as ``__reduce_ex__`` does; for one value."""
    made: list[ValuePickler] = []  # when it is needed: plain values need none

    def reduce(value: Any) -> Any:
        pickler = made[0] if made else ValuePickler(namespace, "", Tracker())
        made[:] = [pickler]
        reduced = pickler.reducer_override(value)
        if reduced is NotImplemented and not isinstance(value, (type, types.FunctionType)):
            own = pickler.dispatch_table.get(type(value))
            reduced = own(value) if own is not None else value.__reduce_ex__(5)
        return reduced

    return reduce


def _class_hash(cls: type, state: object) -> str | None:
    """The hash of the members that come for a class."""
    contents = Contents(reducer(rebuild.namespace()), form_for, lambda memory: None)
    contents.again(cls)  # methods refer to it: what it has here is none of what came
    try:
        return contents.of(state)
    except Exception:  # of the members' own code
        return None


class _Namespace:
    """Stands for all the names of a side."""

    def __reduce__(self) -> Any:
        return rebuild.namespace, ()


# -- what is in a value that was pickled here ------------------------------------------------------


def numbers(pickled: Pickled) -> dict[int, int]:
    """Identity → number of each linkable object."""
    pickler = _pickler(pickled)
    value = pickled.keep if pickler is None else pickled.keep[1]
    private = pickler.tracker.private if pickler is not None else ()
    found = {id(value): ROOT} if linkable(type(value)) and id(value) not in private else {}
    if pickler is None and is_flat(value):
        return found
    memo = _memo(pickled)
    kinds = linkable_kinds(type(each) for _, each in memo.values())
    functions = {types.FunctionType} & kinds
    for key, (number, each) in memo.items():
        if (
            type(each) in kinds
            and key not in private
            and (type(each) not in functions or travels(cast(types.FunctionType, each)))
        ):
            found.setdefault(key, number)
    return found


def with_state(pickled: Pickled, keys: Set[int]) -> Set[int]:
    """Return those of these objects in a pickle that can change: neither functions nor instances of frozen dataclasses.

    What a function's closure or a frozen instance holds is listed by itself.
    """
    value = pickled.keep if _pickler(pickled) is None else pickled.keep[1]
    found = {key: each for key, (_, each) in _memo(pickled).items() if key in keys}
    found.setdefault(id(value), value)
    constant = set()
    for key, each in found.items():
        if type(each) is types.FunctionType:
            constant.add(key)
        elif getattr(getattr(type(each), "__dataclass_params__", None), "frozen", False):
            constant.update((key, id(getattr(each, "__dict__", None))))
    return keys - constant


def objects(pickled: Pickled) -> Set[int]:
    """Identities of the linkable objects: those of `numbers`, and much faster for containers of many small arrays or tensors."""
    pickler = _pickler(pickled)
    if pickler is not None and pickler.tracker.leaves and sum(map(len, pickled.pieces)) <= LISTED:
        containers = containers_of(pickled.keep[1], pickler.tracker.leaves)
        if containers is not None:
            storages = map(id, pickler.tracker.storages.values())
            return {*containers, *pickler.tracker.leaves, *storages} - pickler.tracker.private
    return numbers(pickled).keys()


def marks(pickled: Pickled) -> frozenset[int]:
    """Identities of the changeable objects, as far as it is worth while to list them."""
    if pickled.marks is not None:
        return pickled.marks
    pickler = _pickler(pickled)
    return containers_in(pickled.keep) if pickler is None else pickler.found_marks(pickled.keep[1])


def storages(pickled: Pickled) -> dict[int, MemoryRegion]:
    """The torch storages, by their handles."""
    pickler = _pickler(pickled)
    return tensors.regions(pickler.tracker) if pickler is not None else {}


def leaves(pickled: Pickled) -> Mapping[int, Leaf]:
    """The small arrays and tensors, by their identities."""
    pickler = _pickler(pickled)
    return pickler.tracker.leaves if pickler is not None else {}


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
    return plain_memo(pickled.keep) if pickler is None else pickler.memo.copy()


def _pickler(pickled: Pickled) -> ValuePickler | None:
    """The pickler of a value that is not plain."""
    keep = pickled.keep
    return (
        keep[0] if isinstance(keep, tuple) and keep and isinstance(keep[0], ValuePickler) else None
    )


# -- values that have their names before others are rebuilt ----------------------------------------


class Named:
    """A value that is bound to its name as soon as it is rebuilt: what is rebuilt after it may use it."""

    def __init__(self, name: str, value: object) -> None:
        self.name, self.value = name, value

    def __reduce__(self) -> Any:
        return rebuild.bound, (self.name, self.value)


class Accompanied:
    """A value with what its code uses to rebuild it, for a side that has nothing of these names."""

    def __init__(self, names: Mapping[str, object], value: object) -> None:
        self.names, self.value = names, value

    def __reduce__(self) -> Any:
        return rebuild.accompanied, tuple(_Lent(*each) for each in self.names.items()) + (
            self.value,
        )


class _Lent(Named):
    def __reduce__(self) -> Any:
        return rebuild.lent, (self.name, self.value)
