"""The notebook's values beside what the ranks have: which have changed, and which came from there and do not go back by themselves."""

from __future__ import annotations

import builtins
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from skymagic.data.capture import modules
from skymagic.data.capture.assignments import Assignments
from skymagic.data.capture.modules import DATA_READERS
from skymagic.data.capture.names import interactive, is_output
from skymagic.data.shipping.bindings import Bindings, Sources
from skymagic.data.shipping.bundles import Variable, groups
from skymagic.data.shipping.collecting import Collector, Needs, ShippingRequest
from skymagic.data.shipping.notes import Notes
from skymagic.data.store.base import Content
from skymagic.data.store.bundle import ContentIndex
from skymagic.data.store.device import DeviceBytes
from skymagic.data.store.store import digest
from skymagic.data.values import pickling
from skymagic.data.values.contents import contents_hash
from skymagic.data.values.forms import form_for
from skymagic.data.values.pickled import FIXED_TYPES


@dataclass
class Pulled:
    """A value that came from the ranks, under the name that it has there."""

    values: tuple[object, ...]
    """The value, and the items of a list by rank."""
    type: str
    """On the ranks."""
    assigned: int = 0
    """The number of the last assignment before it came."""
    noted: bool = False
    """Whether the user knows that it does not go back."""

    @classmethod
    def of(cls, value: object, type: str, assigned: int) -> Pulled:
        """The notebook's value of a name, just after it came."""
        return cls((value, *(value if isinstance(value, list) else ())), type, assigned)

    def holds(self, value: object) -> bool:
        """Whether this is the value, or a part of it; if it is a part, the others are let go of."""
        if all(value is not each for each in self.values):
            return False
        if value is not self.values[0]:
            self.values = (value,)
        return True

    def stays(self, name: str, held: bool) -> str:
        """What to say of a name whose value here is not what the ranks have; `held`: whether one of them has one."""
        theirs = f"{name}: the ranks keep their own ({self.type})"
        return f"{theirs if held else f'{name} came from the ranks, and none of them has it now'}; --push {name} sends the notebook's"


# -- whether a value has changed -------------------------------------------------------------------


class Known(NamedTuple):
    """What a name's value was when it was looked at last."""

    stream: str | bytes
    """A value's pickle, if that is small and plain; else a hash of it, with the local modules that it refers to."""
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
    """

    def __init__(self, namespace: dict[str, Any], folder: str, index: ContentIndex) -> None:
        self._namespace = namespace
        self._folder = folder
        self._index = index
        self.known: dict[str, Known] = {}
        """By name; what the notebook has lost may be taken out."""

    def take(self, variable: Variable, modules: Mapping[str, str]) -> str:
        """Give a variable its fingerprint; its parts have their hashes."""
        pickled, value = variable.pickled, variable.value
        if type(value) in FIXED_TYPES:
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
        self.known[variable.name] = Known(
            stream, variable.fingerprint, _reference(value), pickled.nbytes
        )
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
            leaves = pickling.leaves(variable.pickled)
            reduce = pickling.reducer(self._namespace)
            found = contents_hash(variable.value, reduce, form_for, _hashes(variable), leaves)
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


def _pushed(request: ShippingRequest, needs: Needs) -> set[str]:
    """Return the names given with ``--push``, and those whose values share objects with theirs.

    These replace whatever the ranks have: the ranks may have bound the name or changed its value in place. What shares objects
    with a pushed value goes along, so that a pushed model and its optimizer still belong together on the ranks.
    """
    pushed = set(request.push) & needs.values.keys()
    if not pushed:
        return pushed
    together = groups([value for value in needs.values.values() if not value.fixed])
    names = [{value.name for value in group} for group in together]
    return pushed.union(*(group for group in names if not pushed.isdisjoint(group)))


# -- the notebook's values beside what the ranks have ----------------------------------------------


_BUILTIN_NAMES = vars(builtins).keys()
_LARGE = 1 << 20
"""Bytes of a value that is not looked at for the sake of a hook that may run in any cell, unless it is another object."""


class Comparison:
    """Takes fingerprints of the notebook's values, and compares them with those of the ranks' bindings."""

    def __init__(
        self,
        collector: Collector,
        index: ContentIndex,
        sources: Sources,
        notes: Notes,
        assigned: Assignments,
    ) -> None:
        self._namespace = collector.namespace
        self._folder = collector.folder
        self._bindings: Bindings = collector.bindings
        self._collector = collector
        self._index = index
        self._sources = sources
        self._notes = notes
        self._assigned = assigned
        self._fingerprints = Fingerprints(collector.namespace, collector.folder, index)
        self._pulled: dict[str, Pulled] = {}

    def read_by_functions(self, request: ShippingRequest) -> dict[str, str]:
        """Names that functions on the ranks read and the cell may need, each with the reason.

        Those that the cell names may run, and so may what these read. Of others nobody can say: what a cell has bound on a rank may
        hold any function, and hooks and callbacks run by themselves. So the names that the ranks have got are looked at again. If the
        cell uses something that the ranks have bound, such as a dict that holds a function, all their bytes are looked at, and
        names that the notebook defined after the function was made travel too.
        """
        if request.no_push:
            return {}
        found = self._bound_by_cell(request)
        readers = self._bindings.readers(request.ranks)
        if not readers.names:
            return found
        todo = sorted(request.wanted)
        seen = set(todo)
        while todo:
            function = todo.pop()
            new = readers.names.get(function, frozenset()) - seen
            found.update(dict.fromkeys(sorted(new), f"used by {function}"))
            seen |= new
            todo += sorted(new)
        if request.names.runs and not request.fresh:
            every = any(
                self._bindings.has_rebound(rank, name)
                for rank in request.ranks
                for name in request.wanted
            )
            names = (readers.first.keys() & self._namespace.keys()) - seen.union(request.gather)
            if not every:
                held = [self._bindings.fingerprints(rank) for rank in request.ranks]
                sent = frozenset().union(*(each.keys() & names for each in held))
                names = {name for name in sent if not self._settled(held, name)}
            found.update({name: f"used by {readers.first[name]}" for name in sorted(names)})
        return {name: reason for name, reason in found.items() if name not in request.kept}

    def _bound_by_cell(self, request: ShippingRequest) -> dict[str, str]:
        """Return the constants that a cell may bind without reading them, and that ranks hold.

        A rank tells by identity what a run has bound. It cannot see an assignment of the object that the name has already, such as
        ``d = 1`` over 1 on a path that need not be taken. With the notebook's latest value on the rank this makes no difference.
        """
        names = request.names.stores - request.wanted - request.kept - self._pulled.keys()
        held = frozenset().union(*(self._bindings.names(rank) for rank in request.ranks))
        return {
            name: "assigned in the cell"
            for name in sorted(names & held)
            if type(self._namespace.get(name, self)) in FIXED_TYPES
        }

    def compare(self, request: ShippingRequest, needs: Needs) -> None:
        """Find which ranks lack which of the values, and the modules that are needed."""
        values, ranks = needs.values, request.ranks
        pickles = [value.pickled for value in values.values() if not value.pickled.plain]
        imported = request.names.imports.union(
            *(each.modules | (each.packages & DATA_READERS) for each in pickles)
        )
        needs.sources = self._sources.find(
            imported, ranks, dry_run=request.dry_run, note=request.note
        )
        note = None if request.dry_run else request.note
        self._identify(request, needs)
        pulled = {
            name
            for name in self._pulled.keys() & values.keys()
            if self._is_pulled(name, values[name].value)
        }
        pulled -= request.temporary
        unstable = set() if request.fresh else self._unstable(request, needs)
        always = values if request.fresh else {*request.temporary, *_pushed(request, needs)}
        fingerprints = {
            name: self._marked(name, value.fingerprint) for name, value in values.items()
        }
        lacking = self._bindings.ranks_without_value(fingerprints, ranks, always)
        for name in unstable.difference(always):
            lacking[name] = [
                rank for rank in lacking[name] if name not in self._bindings.fingerprints(rank)
            ]
        if note is not None:
            self._notes.unstable(unstable.difference(always), note)
        staying = {name for name in pulled.difference(always) if lacking[name]}
        for name in sorted(staying):  # what came from the ranks does not go back by itself
            if note is not None and not self._pulled[name].noted:
                self._pulled[name].noted = True
                note(
                    self._pulled[name].stays(
                        name, any(name in self._bindings.names(rank) for rank in ranks)
                    )
                )
            lacking[name] = []
        needs.lacking, needs.staying = lacking, frozenset(staying)

    def finish(self, request: ShippingRequest, needs: Needs) -> dict[str, str]:
        """Fingerprints of all values by name, once those that travel are written and have their hashes."""
        hashes = needs.hashes
        for value in needs.moved:
            if not value.pickled.plain and value.name not in request.temporary:
                self._index.identify(value.parts)
                self._fingerprints.take(value, hashes)
        return {
            name: self._marked(name, value.fingerprint or "")
            for name, value in needs.values.items()
            if name not in request.temporary
        }

    def present(self, names: Iterable[str]) -> dict[str, str]:
        """Fingerprints of the notebook's present values of names that ranks bind themselves."""
        fingerprints = {}
        for name in names:
            if name not in self._namespace or interactive(name, self._namespace[name]):
                continue
            value = self._namespace[name]
            if is_output(name):  # of whatever size, and another with every cell
                fingerprints[name] = self._collector.identity(name, value)
                continue
            try:
                variable = self._collector.variable(name, value)
                if variable.fingerprint is None:
                    self._index.identify(variable.parts)
                    local = modules.search(variable.pickled.modules, self._folder).sources
                    self._fingerprints.take(
                        variable, {each: module.hash for each, module in local.items()}
                    )
                fingerprints[name] = self._marked(name, variable.fingerprint or "")
            except Exception:  # it cannot travel, so its identity must do
                fingerprints[name] = self._collector.identity(name, value)
        return fingerprints

    def gathered(self, types: Mapping[str, str]) -> None:
        """The notebook's present values of these names came from the ranks: name → type there."""
        now = self._assigned.now
        self._pulled.update(
            {name: Pulled.of(self._namespace[name], kind, now) for name, kind in types.items()}
        )

    def shadowed(self, ranks: Sequence[int]) -> frozenset[str]:
        """Names of Python's own that the notebook has taken back, and ranks have from it: `list` after ``list = 5; del list``."""
        return frozenset(
            name
            for rank in ranks
            for name in self._bindings.fingerprints(rank).keys() & _BUILTIN_NAMES
            if name not in self._namespace and not self._bindings.has_rebound(rank, name)
        )

    def modules(self, request: ShippingRequest, needs: Needs) -> frozenset[str]:
        """Dotted names of the modules that a cell uses."""
        values = (
            value.value.__name__
            for value in needs.values.values()
            if isinstance(value.value, ModuleType)
        )
        return request.names.imports.union(needs.sources, values)

    def deleted(self, request: ShippingRequest) -> frozenset[str]:
        """Names that the cell uses, that some rank holds, and that the notebook has not."""
        held = set().union(*(self._bindings.fingerprints(rank) for rank in request.ranks))
        return (request.names.loads & held) - self._namespace.keys() - _BUILTIN_NAMES

    def forget_names(self, namespace: Container[str]) -> None:
        """Forget names that the notebook has lost."""
        known = self._fingerprints.known
        for name in [name for name in known if name not in namespace]:
            del known[name]

    def _identify(self, request: ShippingRequest, needs: Needs) -> None:
        """Give all values their fingerprints, except those that nobody can have, and those that travel anyhow."""
        held = [self._bindings.fingerprints(rank) for rank in request.ranks]
        hashes = needs.hashes
        for name, value in needs.values.items():
            if value.fingerprint is not None or name in request.temporary:
                continue
            if value.pickled.plain or self._index.identify(
                value.parts, lazily=not any(name in each for each in held)
            ):
                self._fingerprints.take(value, hashes)

    def _unstable(self, request: ShippingRequest, needs: Needs) -> set[str]:
        """Names whose values seem to have changed, but are the same objects and look different each time."""
        held = [self._bindings.fingerprints(rank) for rank in request.ranks]
        return {
            name
            for name, value in needs.values.items()
            if value.same_object
            and name not in request.temporary
            and any(
                self._differs(known.get(name), self._marked(name, value.fingerprint))
                for known in held
            )
            and self._fingerprints.is_unstable(value, needs.hashes)
        }

    def _settled(self, held: Iterable[Mapping[str, str]], name: str) -> bool:
        """Whether a large value is the object that was looked at when the ranks got it."""
        known = self._fingerprints.known.get(name)
        if known is None or known.nbytes < _LARGE or not known.holds(self._namespace[name]):
            return False
        mark = self._marked(name, known.fingerprint)
        return all(each.get(name, mark) == mark for each in held)

    def _differs(self, known: str | None, mark: str | None) -> bool:
        """Whether a value that ranks have, and that no cell has assigned since, looks different."""
        return (
            known is not None
            and mark is not None
            and known != mark
            and known.partition("@")[2] == mark.partition("@")[2]
        )

    def _is_pulled(self, name: str, value: object) -> bool:
        """Whether the notebook's value of a name is what came from the ranks under this name, changed or not, or a part of it."""
        known = self._pulled.get(name)
        if known is None:
            return False
        # ``n = 3`` makes the very object that came: only what the cell has made of the name is a part of it
        typed = type(value) in FIXED_TYPES and self._assigned.typed_since(name, known.assigned)
        if typed or not known.holds(value):
            del self._pulled[name]
            return False
        return True

    def _marked(self, name: str, fingerprint: Any) -> Any:
        """A fingerprint of a name's value, which is another one once a cell has assigned the name again; None stays None."""
        number = self._assigned.last(name)
        return f"{fingerprint}@{number}" if number and fingerprint is not None else fingerprint
