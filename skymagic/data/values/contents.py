"""Content hash of a value: equal for equal contents, regardless of how they were built.

A pickle depends on more than the contents: which strings are the same object, the order of
insertion into a set, the caches of a frame. All of this may change although the user has not
changed the value. Here a value is taken apart as for pickling, and only its meaning is hashed.
Which mutable objects are identical and which arrays share memory is part of the meaning.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import marshal
import pickle
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import xxhash

from skymagic.content.base import Content
from skymagic.content.chunks import digest
from skymagic.content.store import LARGE
from skymagic.data.values.kinds import changeable, is_a
from skymagic.data.values.memory import Leaf, Span, clusters, overlap

_ATOMS = frozenset((int, float, complex, str, bytes, bool, type(None), type(...)))
_NESTED = frozenset((list, dict, tuple, set, frozenset))
_MOST_OBJECTS = 100_000
"""Limit of objects visited one by one; values with more are compared by their pickles."""
_CACHES = {
    "pandas": frozenset(("_cache", "_readonly")),
    "scipy": frozenset(("_has_sorted_indices", "_has_canonical_format")),
    "functools": frozenset(("_method_cache",)),
}
"""By package: attributes that are caches, filled when an object is read."""

Form = Callable[["Contents", Any], None]
"""Adds an object of some type to the hash: plain values by `add_plain`, its parts by `add`."""


Reduce = Callable[[Any], Any]
"""Takes an object apart as `__reduce_ex__` does; NotImplemented for objects pickled by name."""

Hashes = Callable[[Content], str | None]
"""Returns the hash of memory or bytes if it is already known, to avoid reading them twice."""


class Unknown(Exception):
    """Raised for a value whose contents cannot be hashed."""


_NO_LEAVES: Mapping[int, Leaf] = types.MappingProxyType({})


def contents_hash(
    value: Any,
    reduce: Reduce,
    form: Callable[[type], Form | None],
    hashes: Hashes,
    leaves: Mapping[int, Leaf] = _NO_LEAVES,
) -> str:
    """Return the hash of a value's contents.

    Args:
        form: returns how objects of a type are added, or None for types that are taken apart.
        leaves: small arrays and tensors known from the value's pickler, by identity; they save time
            and do not change the hash.

    Raises:
        Unknown: the value has too many objects.
    """
    if type(value) in _NESTED and _is_tree(value):
        # Version 2 of the format, here and below: later ones mark objects that occur twice, so that
        # the bytes depend on which equal strings are identical.
        return xxhash.xxh3_128_hexdigest(marshal.dumps(value, 2))
    return Contents(reduce, form, hashes, leaves).of(value)


class Contents:
    """Hash of one value's contents, built step by step; see `contents_hash`."""

    def __init__(
        self,
        reduce: Reduce,
        form: Callable[[type], Form | None],
        hashes: Hashes,
        leaves: Mapping[int, Leaf] = _NO_LEAVES,
    ) -> None:
        self._reduce = reduce
        self._form = form
        self._hashes = hashes
        self._leaves = leaves
        self._state = xxhash.xxh3_128()
        self._numbers: dict[int, int] = {}
        self._keep: list[Any] = []  # keeps objects alive, so that no address is reused
        self._spans: list[Span] | None = []
        self._kinds: dict[type, tuple[bool, Form | None]] = {}
        self._caches: dict[type, frozenset[str]] = {}
        self._left = _MOST_OBJECTS

    def of(self, value: Any) -> str:
        """Return the hash of a value."""
        self.add(value)
        self._add_shared_memory()
        return str(self._state.hexdigest())

    def add_plain(self, *facts: Any) -> None:
        """Add numbers, strings and tuples to the hash."""
        # No marshalled value starts with this byte.
        self._state.update(b"!" + marshal.dumps(facts, 2))

    def add(self, value: Any) -> None:
        """Add a value."""
        kind = type(value)
        if kind in _ATOMS:
            self._atom(value)
            return
        self._left -= 1
        if self._left < 0:
            raise Unknown("too many objects")
        if kind not in self._kinds:
            self._kinds[kind] = (_has_identity(kind), _own_form(kind) or self._form(kind))
        has_identity, form = self._kinds[kind]
        if has_identity and self.add_repeated(value):
            return
        if form is not None:
            form(self, value)
        else:
            self.add_parts(value)

    def add_repeated(self, value: Any) -> bool:
        """Return True if an object was added before, and hash its number in that case.

        A new object is only given a number.
        """
        next_number = len(self._numbers)
        number = self._numbers.setdefault(id(value), next_number)
        if number < next_number:
            self.add_plain("again", number)
            return True
        self._keep.append(value)
        return False

    def sequence(self, values: Sequence[Any]) -> None:
        """Add values in their order."""
        kinds = set(map(type, values))
        # Large byte strings go through `memory`: their hashes may be known already.
        large = bytes in kinds and any(
            type(value) is bytes and len(value) >= LARGE for value in values
        )
        if kinds <= _ATOMS and not large:
            self._state.update(marshal.dumps(values if type(values) is tuple else list(values), 2))
            return
        self.add_plain("values", len(values))
        if not self._add_leaves(values):
            for value in values:
                self.add(value)

    def _add_leaves(self, values: Sequence[Any]) -> bool:
        """Add small arrays and tensors that are all new, or return False without adding any.

        A state dict may hold ten thousand of them with one change: this takes 1 µs each instead of
        5 µs.
        """
        if not values or id(values[0]) not in self._leaves or len(values) > self._left:
            return False
        # Number the values as `add_repeated` would, so that the hash is the same on both paths.
        numbers = {id(value): number for number, value in enumerate(values, len(self._numbers))}
        leaves = [self._leaves[key] for key in numbers if key in self._leaves]
        if len(leaves) < len(values) or not self._numbers.keys().isdisjoint(numbers):
            return False
        self._left -= len(values)
        self._numbers.update(numbers)
        self._keep += values
        if self._spans is not None:
            self._spans += [
                Span(start, stop, at)
                for at, (start, stop, _) in enumerate(leaves, len(self._spans))
            ]
        entries = [(*facts, ctypes.string_at(start, stop - start)) for start, stop, facts in leaves]
        self._state.update(b"".join([b"!" + marshal.dumps(facts, 2) for facts in entries]))
        return True

    def unordered(self, values: Iterable[Any]) -> None:
        """Add values whose order does not matter."""
        hashed_values = [(self._separate_hash(value), value) for value in values]
        self.add_plain("unordered", len(hashed_values))
        # The order of the hashes is the same however the values were inserted.
        # Adding the values in this order numbers their objects, and so reveals shared ones.
        for _, value in sorted(hashed_values, key=lambda pair: pair[0]):
            self.add(value)

    def attributes(self, value: Any, state: dict[str, object]) -> None:
        """Add an object's attributes in any order, without those that are caches."""
        kind = type(value)
        if kind not in self._caches:
            self._caches[kind] = _caches(kind)
        names = sorted(state.keys() - self._caches[kind], key=str)
        self.sequence(names)
        self.sequence([state[name] for name in names])

    def memory(self, buffer: Content) -> None:
        """Add bytes."""
        self.hashed(len(buffer), self._hashes(buffer) or digest([buffer]))

    def hashed(self, nbytes: int, hash: str) -> None:
        """Add bytes by their known hash."""
        self.add_plain("memory", nbytes, hash)

    def span(self, start: int, stop: int, owner: object) -> None:
        """Record where an object's elements lie, because shared memory is part of the contents."""
        if self._spans is not None:
            self._keep.append(owner)
            self._spans.append(Span(start, stop, len(self._spans)))

    @contextmanager
    def unshared(self) -> Iterator[None]:
        """Ignore memory that is shared with other objects, within this context."""
        spans, self._spans = self._spans, None
        try:
            yield
        finally:
            self._spans = spans

    def add_parts(self, value: Any) -> None:
        """Add the parts that an object is pickled as."""
        reduced = self._reduce(value)
        if reduced is NotImplemented or isinstance(reduced, str):
            name = reduced if isinstance(reduced, str) else value.__qualname__
            module = pickle.whichmodule(value, name)  # type: ignore[attr-defined]
            self.add_plain("name", module, name)
            return
        # The parts may exist in this tuple alone; once freed, their addresses would be reused.
        self._keep.append(reduced)
        function, args, state, items, pairs, setter = (*reduced, None, None, None, None)[:6]
        self.add(function)
        self.add(args)
        if state is None and setter is None and hasattr(value, "__dict__"):
            # As if a cache were present: caches are not part of the contents.
            state = {}
        if isinstance(state, dict) and setter is None:
            if not self.add_repeated(state):
                self.attributes(value, state)
        # The state of an instance with slots: a pair of its `__dict__`, or None, and the slots.
        elif (
            setter is None
            and isinstance(state, tuple)
            and len(state) == 2
            and isinstance(state[1], dict)
        ):
            inner = {} if state[0] is None else state[0]
            self.attributes(
                value, {**(inner if isinstance(inner, dict) else {"": inner}), **state[1]}
            )
        else:
            self.add(state)
        if items is not None:
            self.sequence(list(items))
        if pairs is not None:
            self.sequence(list(itertools.chain.from_iterable(pairs)))

    def _separate_hash(self, value: Any) -> str:
        """Return the hash of a value on its own."""
        other = Contents(self._reduce, self._form, self._hashes, self._leaves)
        # The limit of objects holds for the whole value; memory is compared only at the top.
        other._left, other._spans = self._left, None
        other.add(value)
        self._left = other._left
        return str(other._state.hexdigest())

    def _atom(self, value: Any) -> None:
        if type(value) is bytes and len(value) >= LARGE:
            self.memory(value)
        else:
            self._state.update(marshal.dumps(value, 2))

    def _add_shared_memory(self) -> None:
        """Add which objects share memory, with their offsets in it."""
        if not overlap(self._spans or ()):
            return
        groups = []
        # Spans are numbered in the order in which the arrays were added.
        for cluster in clusters(self._spans or []):
            if len(cluster) > 1:
                groups.append(
                    # Offsets instead of addresses, which may differ for equal values.
                    sorted((span.owner, span.start - cluster[0].start) for span in cluster)
                )
        for group in sorted(groups):
            self.add_plain("shared", *group)


# -- Python's own types ----------------------------------------------------------------------------


def _is_tree(value: Any) -> bool:
    """Return True for built-in containers that hold only small atoms and share no containers.

    Only mutable containers count as shared. `marshal` can write such a value as a whole.
    """
    level = [value]
    changing = {id(value)}
    for _ in range(_DEEP):
        inner = gc.get_referents(*level)
        kinds = set(map(type, inner))
        if not kinds <= _PLAIN or (
            bytes in kinds and any(type(obj) is bytes and len(obj) >= LARGE for obj in inner)
        ):
            return False
        if kinds <= _ATOMS:
            return True
        level = [obj for obj in inner if type(obj) in _NESTED]
        mutable_ids = [id(obj) for obj in level if type(obj) in _CHANGING]
        count_before = len(changing)
        changing.update(mutable_ids)
        # A mutable container occurs twice, or the level is too wide to check.
        if len(changing) < count_before + len(mutable_ids) or len(level) > _WIDE:
            return False
    return False


def _has_identity(kind: type) -> bool:
    """Return True if it matters, or helps, to detect that an object was added before."""
    if issubclass(kind, (type, types.FunctionType)):
        return True  # they may refer to themselves
    return changeable(kind) and not any(is_a(kind, *type_path) for type_path in _VALUES)


def _caches(kind: type) -> frozenset[str]:
    """Return the names of attributes that are caches."""
    return _CACHES.get(kind.__module__.partition(".")[0], frozenset()) | frozenset(
        name
        for base in kind.__mro__
        for name, member in vars(base).items()
        if isinstance(member, functools.cached_property)
    )


def _own_form(kind: type) -> Form | None:
    if issubclass(kind, (set, frozenset, weakref.WeakSet)):
        return _set
    return _OWN.get(kind)


def _set(contents: Contents, value: Any) -> None:
    contents.add(type(value))
    contents.unordered(value)
    if type(value) not in (set, frozenset, weakref.WeakSet):
        contents.attributes(value, getattr(value, "__dict__", {}))


def _list(contents: Contents, value: list[Any]) -> None:
    contents.add_plain("list")
    contents.sequence(value)


def _dict(contents: Contents, value: dict[Any, Any]) -> None:
    contents.add_plain("dict")
    # In the order of insertion, which code that iterates over the dict sees.
    contents.sequence(list(value))
    contents.sequence(list(value.values()))


def _bytearray(contents: Contents, value: bytearray) -> None:
    contents.add_plain("bytearray")
    contents.memory(bytes(value))


def _buffer(contents: Contents, value: pickle.PickleBuffer) -> None:
    contents.memory(value.raw())


def _code(contents: Contents, code: types.CodeType) -> None:
    """Add what code does, but not its position in the source: editing comments changes nothing."""
    contents.add_plain(
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags,
        code.co_code,
    )
    contents.add_plain(
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_name,
        code.co_qualname,
    )
    contents.add_plain(code.co_exceptiontable)
    contents.sequence(code.co_consts)


def _function(contents: Contents, function: types.FunctionType) -> None:
    if function.__globals__ is vars(functools):  # the cache of `singledispatch` is no content
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            # Cell and contents count as added before, so that only their numbers are hashed.
            if name in ("dispatch_cache", "cache_token") and not contents.add_repeated(cell):
                contents.add_repeated(cell.cell_contents)
    contents.add_parts(function)


_PLAIN = _ATOMS | _NESTED
_CHANGING = frozenset((list, dict, set))
_DEEP = 500
_WIDE = 3_000_000
_VALUES = (
    ("numpy", "generic"),
    ("datetime", "date"),
    ("datetime", "timedelta"),
    ("pandas", "Index"),
)
"""Immutable types, including their subclasses."""

_OWN: dict[type, Form] = {
    list: _list,
    tuple: Contents.sequence,
    dict: _dict,
    bytearray: _bytearray,
    pickle.PickleBuffer: _buffer,
    types.CodeType: _code,
    types.FunctionType: _function,
}
