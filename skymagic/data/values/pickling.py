"""Values as a pickle and its buffers; functions of the notebook travel without the notebook's variables.

A function defined in a cell is rebuilt with the *other side's* namespace as its globals: the names that it uses
travel as names. A class defined in a cell travels by value and keeps its identity: what comes back to where the class
was defined is an instance of that very class, and does not change it.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from skymagic.data.store.base import Buffer, Content
from skymagic.data.store.device import DeviceBytes
from skymagic.data.values import numbered, plain, rebuild
from skymagic.data.values.contents import Contents
from skymagic.data.values.forms import form_for
from skymagic.data.values.links import LISTED, PickleLinks
from skymagic.data.values.memory import Tracker, layout
from skymagic.data.values.pickled import Pickled, groups
from skymagic.data.values.pickler import ValuePickler, pickler_for
from skymagic.data.values.rebuild import here
from skymagic.data.values.rope import Rope
from skymagic.data.values.shards import REFUSED, Shards


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
        between_ranks: another rank is to go on with the value: tensors go to its device, and wrappers around the process
            group stay wrappers. All modules are recorded.
        links: objects that the other side has already; it notes which of them the pickle refers to.
        parts: what was gathered of values whose parts lie on several ranks.

    Raises:
        Exception: whatever the value's own reduction raises; pickle.PicklingError and TypeError most often.
    """
    if value is namespace:
        value = _Namespace()
    known = plain.plainly(value) if links is None else None
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
    return groups(pickles, [numbered.marks(each) for each in pickles])


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
    header: Sequence[Buffer], buffers: Iterable[Buffer], links: Sequence[object], memo: dict[int, object] | None
) -> Any:
    stream = io.BytesIO(header[0]) if len(header) == 1 else Rope(header)
    unpickler = pickle.Unpickler(stream, buffers=buffers)
    if links:
        unpickler.persistent_load = links.__getitem__  # type: ignore[method-assign]
    value = unpickler.load()
    if memo is not None:
        memo.update(unpickler.memo.copy())
    return value


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
