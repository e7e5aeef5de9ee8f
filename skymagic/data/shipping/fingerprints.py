"""Fingerprints of the notebook's values: whether one has changed since some rank got it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from skymagic.data.shipping.bundles import Variable
from skymagic.data.store.base import Content
from skymagic.data.store.device import DeviceBytes
from skymagic.data.store.index import ContentIndex
from skymagic.data.store.store import digest
from skymagic.data.values import pickling
from skymagic.data.values.contents import contents_hash
from skymagic.data.values.forms import form_for

_IMMUTABLE_TYPES = (int, float, bool, type(None), complex, str, bytes)


class Known(NamedTuple):
    """What a name's value was when it was looked at last."""

    stream: str | bytes
    """Its pickle, if that is small and plain; else a hash of it, with the local modules that it refers to."""
    fingerprint: str
    value: Callable[[], object] | int
    """A weak reference to it, or its identity."""
    nbytes: int

    def holds(self, value: object) -> bool:
        """Whether this is the value that was looked at."""
        return self.value == id(value) if isinstance(self.value, int) else self.value() is value


class Fingerprints:
    """Takes fingerprints of variables: hashes of what they contain, not of how they came to be.

    The pickle is looked at first, which is fast; only where it is new, the value is.

    Args:
        namespace: the notebook's global names.
        folder: the notebook's folder.
        index: hashes the parts of pickles.
    """

    def __init__(self, namespace: dict[str, Any], folder: str, index: ContentIndex) -> None:
        self._namespace = namespace
        self._folder = folder
        self._index = index
        self.known: dict[str, Known] = {}
        """By name; what the notebook has lost may be taken out."""

    def take(self, variable: Variable, modules: Mapping[str, str]) -> str:
        """Give a variable its fingerprint; its parts have their hashes.

        Args:
            modules: local modules and their hashes.
        """
        pickled, value = variable.pickled, variable.value
        if type(value) in _IMMUTABLE_TYPES:
            variable.fingerprint = self._stream(variable, modules)
            return variable.fingerprint
        # the pickle itself, where hashing it would take longer than to compare it
        stream = bytes(pickled.pieces[0]) if pickled.plain else self._stream(variable, modules)
        known = self.known.get(variable.name)
        holds = known is not None and known.holds(value)
        if known is not None and known.stream == stream:
            if not holds:
                self.known[variable.name] = known._replace(value=_reference(value))
            variable.fingerprint = known.fingerprint
            return known.fingerprint
        variable.same_object = holds
        otherwise = stream if isinstance(stream, str) else digest([stream])
        variable.fingerprint = self._contents(variable, otherwise, modules)
        self.known[variable.name] = Known(stream, variable.fingerprint, _reference(value), pickled.nbytes)
        return variable.fingerprint

    def _stream(self, variable: Variable, modules: Mapping[str, str]) -> str:
        """A hash of a variable's pickle, with the local modules that it refers to."""
        if variable.pickled.plain:
            return digest(variable.pickled.pieces)
        parts = [(part.hash or "").encode() if part.blob else part.data for part in variable.parts]
        return digest([*parts, *_local(variable, modules)])

    def is_unstable(self, variable: Variable, modules: Mapping[str, str]) -> bool:
        """Whether a value looks different each time, so that nobody can say whether it has changed."""
        if variable.pickled.keep is variable.value or variable.pickled.steady:
            return False  # of Python's own types
        pickled = pickling.dumps(variable.value, self._namespace, folder=self._folder)
        if pickled.header == variable.pickled.header:
            return False
        again = Variable(variable.name, variable.value, pickled)
        self._index.identify(again.parts)
        return self._contents(again, digest(pickled.pieces), modules) != variable.fingerprint

    def _contents(self, variable: Variable, otherwise: str, modules: Mapping[str, str]) -> str:
        """What a variable contains; `otherwise` where that cannot be said."""
        try:
            found = contents_hash(variable.value, pickling.reducer(self._namespace), form_for, _hashes(variable))
        except Exception:  # of the value's own code, which need not expect to be looked at twice
            return otherwise
        local = _local(variable, modules)
        return digest([found.encode(), *local]) if local else found


def _local(variable: Variable, modules: Mapping[str, str]) -> list[bytes]:
    """Hashes of the local modules that a variable refers to."""
    return [modules[name].encode() for name in sorted(variable.pickled.modules) if name in modules]


def _hashes(variable: Variable) -> Callable[[Content], str | None]:
    """The hashes that parts of a variable have already, by their memory."""
    if variable.pickled.plain:
        return lambda memory: None
    known = {_place(part.data): part.hash for part in variable.parts if part.hash}
    return (lambda memory: known.get(_place(memory))) if known else (lambda memory: None)


def _place(memory: Content) -> tuple[int, int]:
    """Address and length, or an object's identity for bytes."""
    if isinstance(memory, DeviceBytes):
        return memory.place
    numpy = sys.modules.get("numpy")
    if isinstance(memory, memoryview) and numpy is not None and memory.nbytes:
        return numpy.frombuffer(memory, numpy.uint8).__array_interface__["data"][0], memory.nbytes
    return id(memory), -1


def _reference(value: object) -> Callable[[], object] | int:
    if type(value) in (list, dict):
        return id(value)
    try:
        return weakref.ref(value)
    except TypeError:
        return id(value)
