"""Compare the notebook's values with those of the ranks, and detect changes.

Values that came from the ranks are not sent back by themselves.
"""

from __future__ import annotations

import builtins
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from skymagic.content.base import Content
from skymagic.content.chunks import digest
from skymagic.content.device import DeviceBytes
from skymagic.data.bundle import ContentIndex
from skymagic.data.capture import modules
from skymagic.data.capture.assignments import Assignments
from skymagic.data.capture.modules import DATA_READERS
from skymagic.data.capture.names import is_interactive_name, is_output
from skymagic.data.shipping.bindings import Bindings, Sources
from skymagic.data.shipping.bundles import Variable, groups
from skymagic.data.shipping.collecting import Collector, Needs, ShippingRequest
from skymagic.data.shipping.notes import Notes
from skymagic.data.values import pickling
from skymagic.data.values.contents import contents_hash
from skymagic.data.values.forms import form_for
from skymagic.data.values.pickled import FIXED_TYPES
from skymagic.data.values.snapshots import Snapshot


@dataclass
class Pulled:
    """Value that came from the ranks, under the name that it has there."""

    values: tuple[object, ...]
    """The value, followed by the items of a list by rank."""
    type: str
    """Type of the value on the ranks."""
    assigned: int = 0
    """Number of the last assignment before the value arrived."""
    noted: bool = False
    """True if the user was informed that the value is not sent back."""

    @classmethod
    def of(cls, value: object, type: str, assigned: int) -> Pulled:
        """Record the notebook's value of a name just after it arrived."""
        return cls((value, *(value if isinstance(value, list) else ())), type, assigned)

    def holds(self, value: object) -> bool:
        """Return True if this is the value, or one of its parts.

        If it is a part, references to the other parts are dropped.
        """
        if all(value is not part for part in self.values):
            return False
        if value is not self.values[0]:
            self.values = (value,)
        return True

    def stays(self, name: str, held: bool) -> str:
        """Return the message that the ranks keep their own value of a name.

        Args:
            held: True if any rank still has a value.
        """
        reason = f"{name}: the ranks keep their own ({self.type})"
        return (
            f"{reason if held else f'{name} came from the ranks, and none of them has it now'}"
            f"; --push {name} sends the notebook's"
        )


# -- detecting changes -----------------------------------------------------------------------------


class InspectedValue(NamedTuple):
    """Value of a name when it was last inspected."""

    stream: str | bytes
    """The value's pickle if it is small and plain, else a hash of the pickle and of the local
    modules that it refers to.
    """
    fingerprint: str
    value: Callable[[], object] | int
    """Weak reference to the value, or its identity."""
    nbytes: int
    snapshot: Snapshot | None = None
    """Contents at that time, if it is a container of many small arrays."""

    def holds(self, value: object) -> bool:
        """Return True if this is the value that was inspected."""
        return self.value == id(value) if isinstance(self.value, int) else self.value() is value


class Fingerprints:
    """Computes fingerprints of variables: hashes of their contents, not of how they were built.

    The pickle is checked first, which is fast. Only if it changed, the contents are hashed.
    """

    def __init__(self, collector: Collector, index: ContentIndex) -> None:
        self._namespace = collector.namespace
        self._folder = collector.folder
        self._unchanged = collector.unchanged
        self._index = index
        self.known: dict[str, InspectedValue] = {}
        """By name; entries of names that the notebook deleted may be removed."""

    def recall(self, variable: Variable) -> bool:
        """Set a variable's fingerprint if a snapshot shows that it is still the same.

        Return False if it has to be taken.
        """
        previous = self.known.get(variable.name)
        if (
            previous is None
            or variable.snapshot is None
            or previous.snapshot is not variable.snapshot
        ):
            return False
        variable.fingerprint = previous.fingerprint
        return True

    def take(self, variable: Variable, modules: Mapping[str, str]) -> str:
        """Set and return a variable's fingerprint; its parts must have their hashes."""
        pickled, value = variable.pickled, variable.value
        if type(value) in FIXED_TYPES:
            variable.fingerprint = self._stream(variable, modules)
            return variable.fingerprint
        # Compare the pickle itself if hashing it would take longer.
        stream = bytes(pickled.pieces[0]) if pickled.plain else self._stream(variable, modules)
        previous = self.known.get(variable.name)
        holds = previous is not None and previous.holds(value)
        if previous is not None and previous.stream == stream:
            # Another object with the same contents: from now on this is the one to compare with.
            if not holds or variable.snapshot is not None:
                self.known[variable.name] = previous._replace(
                    value=_reference(value), snapshot=variable.snapshot
                )
            if not pickled.plain:
                self._unchanged.record(variable, changed=False)
            variable.fingerprint = previous.fingerprint
            return previous.fingerprint
        if not pickled.plain:
            self._unchanged.record(variable, changed=True)
        # If the same object now has another pickle, the pickle may be unstable.
        variable.same_object = holds
        otherwise = stream if isinstance(stream, str) else digest([stream])
        variable.fingerprint = self._contents(variable, otherwise, modules)
        self.known[variable.name] = InspectedValue(
            stream, variable.fingerprint, _reference(value), pickled.nbytes
        )
        return variable.fingerprint

    def _stream(self, variable: Variable, modules: Mapping[str, str]) -> str:
        """Return a hash of a variable's pickle and the local modules that it refers to."""
        if variable.pickled.plain:
            return digest(variable.pickled.pieces)
        parts = [(part.hash or "").encode() if part.blob else part.data for part in variable.parts]
        return digest([*parts, *_local(variable, modules)])

    def is_unstable(self, variable: Variable, modules: Mapping[str, str]) -> bool:
        """Return True if a value looks different each time, so that changes cannot be detected."""
        if variable.pickled.keep is variable.value or variable.pickled.steady:
            return False  # consists of built-in types
        pickled = pickling.dumps(variable.value, self._namespace, folder=self._folder)
        # Equal when pickled twice in a row: the pickle is stable, so the value did change.
        if pickled.header == variable.pickled.header:
            return False
        again = Variable(variable.name, variable.value, pickled)
        self._index.identify(again.parts)
        return self._contents(again, digest(pickled.pieces), modules) != variable.fingerprint

    def _contents(self, variable: Variable, otherwise: str, modules: Mapping[str, str]) -> str:
        """Return a hash of a variable's contents, or `otherwise` if it cannot be computed."""
        try:
            leaves = pickling.leaves(variable.pickled)
            reduce = pickling.reducer(self._namespace)
            contents = contents_hash(variable.value, reduce, form_for, _hashes(variable), leaves)
        except Exception:  # raised by the value's own code, which may not support a second pass
            return otherwise
        local = _local(variable, modules)
        return digest([contents.encode(), *local]) if local else contents


def _local(variable: Variable, modules: Mapping[str, str]) -> list[bytes]:
    """Return the hashes of the local modules that a variable refers to."""
    return [modules[name].encode() for name in sorted(variable.pickled.modules) if name in modules]


def _hashes(variable: Variable) -> Callable[[Content], str | None]:
    """Return a lookup of hashes that parts of a variable already have, by their memory."""
    if variable.pickled.plain:
        return lambda memory: None
    hash_by_place = {_memory_range(part.data): part.hash for part in variable.parts if part.hash}
    return (
        (lambda memory: hash_by_place.get(_memory_range(memory)))
        if hash_by_place
        else (lambda memory: None)
    )


def _memory_range(memory: Content) -> tuple[int, int]:
    """Return address and length of memory, or the object's identity for bytes."""
    if isinstance(memory, DeviceBytes):
        return memory.address_range
    # NumPy gives the address of any buffer, read-only ones included.
    numpy = sys.modules.get("numpy")
    if isinstance(memory, memoryview) and numpy is not None and memory.nbytes:
        return numpy.frombuffer(memory, numpy.uint8).__array_interface__["data"][0], memory.nbytes
    # No memory has this length, so an identity is never taken for an address.
    return id(memory), -1


def _reference(value: object) -> Callable[[], object] | int:
    # Lists and dicts cannot be referenced weakly.
    if type(value) in (list, dict):
        return id(value)
    try:
        return weakref.ref(value)
    except TypeError:
        return id(value)


def _names_to_push(request: ShippingRequest, needs: Needs) -> set[str]:
    """Return the names given with `--push`, and those whose values share objects with theirs.

    These replace all bindings on the ranks: the ranks may have bound the name or changed its value
    in place. Values that share objects with a pushed value are sent too, so that a pushed model and
    its optimizer still belong together on the ranks.
    """
    pushed = set(request.push) & needs.values.keys()
    if not pushed:
        return pushed
    # Constants share nothing that matters.
    together = groups([value for value in needs.values.values() if not value.fixed])
    names = [{value.name for value in group} for group in together]
    return pushed.union(*(group for group in names if not pushed.isdisjoint(group)))


# -- comparing with the ranks' bindings ------------------------------------------------------------


_BUILTIN_NAMES = vars(builtins).keys()
_LARGE = 1 << 20
"""Size in bytes above which a value is not read just because a hook might run in any cell.

It is read anyway if it is another object than before.
"""


class Comparison:
    """Computes fingerprints of the notebook's values and compares them with the ranks' bindings."""

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
        self._fingerprints = Fingerprints(collector, index)
        self._pulled: dict[str, Pulled] = {}

    def names_read_by_functions(self, request: ShippingRequest) -> dict[str, str]:
        """Return names read by functions on the ranks that the cell may call, with the reason.

        Functions that the cell names may run, and so may all functions that these read. For other
        functions this is undecidable: an object bound by a cell on a rank may hold any function,
        and hooks and callbacks run by themselves. So all names that the ranks received are compared
        again. If the cell uses an object that the ranks have bound, such as a dict that holds a
        function, all bytes of these values are read, and names that the notebook defined after the
        function travel too.
        """
        if request.no_push:
            return {}
        reasons = self._bound_by_cell(request)
        readers = self._bindings.readers(request.ranks)
        if not readers.names:
            return reasons
        pending = sorted(request.required_names)
        visited = set(pending)
        while pending:
            function = pending.pop()
            new = readers.names.get(function, frozenset()) - visited
            reasons.update(dict.fromkeys(sorted(new), f"used by {function}"))
            visited |= new
            pending += sorted(new)
        # Functions on the ranks may run by themselves, as hooks do, whenever a cell does anything.
        if request.names.has_effect and not request.fresh:
            uses_rank_objects = any(
                self._bindings.has_rebound(rank, name)
                for rank in request.ranks
                for name in request.required_names
            )
            names = (readers.first.keys() & self._namespace.keys()) - visited.union(request.gather)
            # Otherwise a function that the notebook cannot know of may read any of these names.
            if not uses_rank_objects:
                held = [self._bindings.fingerprints(rank) for rank in request.ranks]
                sent = frozenset().union(*(fingerprints.keys() & names for fingerprints in held))
                names = {name for name in sent if not self._is_same_large_object(held, name)}
            reasons.update({name: f"used by {readers.first[name]}" for name in sorted(names)})
        return {name: reason for name, reason in reasons.items() if name not in request.local_names}

    def _bound_by_cell(self, request: ShippingRequest) -> dict[str, str]:
        """Return constants that ranks hold and that a cell may bind without reading them.

        A rank detects by identity which names a run has bound. It cannot detect the assignment of
        an object that the name already has, such as `d = 1` over 1, on a path that need not be
        taken. With the notebook's latest value on the rank this makes no difference.
        """
        names = (
            request.names.stores
            - request.required_names
            - request.local_names
            - self._pulled.keys()
        )
        held = frozenset().union(*(self._bindings.names(rank) for rank in request.ranks))
        return {
            name: "assigned in the cell"
            for name in sorted(names & held)
            # A default of no fixed type: None would count as a constant.
            if type(self._namespace.get(name, self)) in FIXED_TYPES
        }

    def compare(self, request: ShippingRequest, needs: Needs) -> None:
        """Find the values that each rank lacks, and the modules that are needed."""
        values, ranks = needs.values, request.ranks
        pickles = [value.facts for value in values.values() if not value.facts.plain]
        imported = request.names.imports.union(
            *(pickled.modules | (pickled.packages & DATA_READERS) for pickled in pickles)
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
        # Names that all ranks receive, regardless of what they have.
        always = values if request.fresh else {*request.temporary, *_names_to_push(request, needs)}
        fingerprints = {
            name: self._assignment_fingerprint(name, value.fingerprint)
            for name, value in values.items()
        }
        lacking = self._bindings.ranks_without_value(fingerprints, ranks, always)
        # Unstable values are sent only to ranks that have none at all.
        for name in unstable.difference(always):
            lacking[name] = [
                rank for rank in lacking[name] if name not in self._bindings.fingerprints(rank)
            ]
        if note is not None:
            self._notes.report_unstable(unstable.difference(always), note)
        staying = {name for name in pulled.difference(always) if lacking[name]}
        # Values that came from the ranks are not sent back by themselves.
        for name in sorted(staying):
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
        """Return all fingerprints by name, once the values that travel are written and hashed."""
        hashes = needs.hashes
        for value in needs.to_send:
            if not value.pickled.plain and value.name not in request.temporary:
                self._index.identify(value.parts)
                self._fingerprints.take(value, hashes)
        return {
            name: self._assignment_fingerprint(name, value.fingerprint or "")
            for name, value in needs.values.items()
            if name not in request.temporary
        }

    def present(self, names: Iterable[str]) -> dict[str, str]:
        """Return fingerprints of the notebook's values for names that ranks bind themselves."""
        fingerprints = {}
        for name in names:
            if name not in self._namespace or is_interactive_name(name, self._namespace[name]):
                continue
            value = self._namespace[name]
            if is_output(name):  # may be large, and changes with every cell
                fingerprints[name] = self._collector.identity(name, value)
                continue
            try:
                variable = self._collector.variable(name, value)
                if variable.fingerprint is None and not self._fingerprints.recall(variable):
                    self._index.identify(variable.parts)
                    local = modules.search(variable.pickled.modules, self._folder).sources
                    self._fingerprints.take(
                        variable, {key: module.hash for key, module in local.items()}
                    )
                fingerprints[name] = self._assignment_fingerprint(name, variable.fingerprint or "")
            except Exception:  # the value cannot travel, so use its identity
                fingerprints[name] = self._collector.identity(name, value)
        return fingerprints

    def gathered(self, types: Mapping[str, str]) -> None:
        """Record that the notebook's values of these names came from the ranks."""
        now = self._assigned.now
        self._pulled.update(
            {name: Pulled.of(self._namespace[name], kind, now) for name, kind in types.items()}
        )

    def shadowed_builtins(self, ranks: Sequence[int]) -> frozenset[str]:
        """Return builtin names that ranks still shadow with a value that the notebook has deleted.

        For example `list` after `list = 5; del list`.
        """
        return frozenset(
            name
            for rank in ranks
            for name in self._bindings.fingerprints(rank).keys() & _BUILTIN_NAMES
            if name not in self._namespace and not self._bindings.has_rebound(rank, name)
        )

    def modules(self, request: ShippingRequest, needs: Needs) -> frozenset[str]:
        """Return the dotted names of the modules that a cell uses."""
        values = (
            value.value.__name__
            for value in needs.values.values()
            if isinstance(value.value, ModuleType)
        )
        return request.names.imports.union(needs.sources, values)

    def deleted(self, request: ShippingRequest) -> frozenset[str]:
        """Return names that the cell uses and some rank holds, but not the notebook."""
        held = set().union(*(self._bindings.fingerprints(rank) for rank in request.ranks))
        return (request.names.loads & held) - self._namespace.keys() - _BUILTIN_NAMES

    def forget_names(self, namespace: Container[str]) -> None:
        """Forget names that no longer exist in the notebook."""
        fingerprints = self._fingerprints.known
        for name in [name for name in fingerprints if name not in namespace]:
            del fingerprints[name]

    def _identify(self, request: ShippingRequest, needs: Needs) -> None:
        """Set all fingerprints, except for values that no rank can have, or that always travel."""
        held = [self._bindings.fingerprints(rank) for rank in request.ranks]
        hashes = needs.hashes
        for name, value in needs.values.items():
            if (
                value.fingerprint is not None
                or name in request.temporary
                or (value.snapshot is not None and self._fingerprints.recall(value))
            ):
                continue
            if value.facts.plain or self._index.identify(
                value.parts, lazily=not any(name in fingerprints for fingerprints in held)
            ):
                self._fingerprints.take(value, hashes)

    def _unstable(self, request: ShippingRequest, needs: Needs) -> set[str]:
        """Return names whose values seem changed, but are the same objects and pickle unstably."""
        held = [self._bindings.fingerprints(rank) for rank in request.ranks]
        return {
            name
            for name, value in needs.values.items()
            if value.same_object
            and name not in request.temporary
            and any(
                self._differs(
                    fingerprints.get(name), self._assignment_fingerprint(name, value.fingerprint)
                )
                for fingerprints in held
            )
            and self._fingerprints.is_unstable(value, needs.hashes)
        }

    def _is_same_large_object(self, held: Iterable[Mapping[str, str]], name: str) -> bool:
        """Return True if a large value is the same object as when the ranks received it."""
        last = self._fingerprints.known.get(name)
        if last is None or last.nbytes < _LARGE or not last.holds(self._namespace[name]):
            return False
        mark = self._assignment_fingerprint(name, last.fingerprint)
        # A rank without the value cannot have an outdated one.
        return all(fingerprints.get(name, mark) == mark for fingerprints in held)

    def _differs(self, previous: str | None, mark: str | None) -> bool:
        """Return True if a value on the ranks differs although no cell has assigned it since."""
        # The number of the last assignment follows the `@`; see `_assignment_fingerprint`.
        return (
            previous is not None
            and mark is not None
            and previous != mark
            and previous.partition("@")[2] == mark.partition("@")[2]
        )

    def _is_pulled(self, name: str, value: object) -> bool:
        """Return True if the notebook's value of a name came from the ranks under this name.

        The value may have changed since, or be a part of the original.
        """
        pulled = self._pulled.get(name)
        if pulled is None:
            return False
        # `n = 3` yields the very object that arrived, so a constant is not the pulled value if a
        # cell has assigned the name since without reading it.
        typed = type(value) in FIXED_TYPES and self._assigned.typed_since(name, pulled.assigned)
        if typed or not pulled.holds(value):
            del self._pulled[name]
            return False
        return True

    def _assignment_fingerprint(self, name: str, fingerprint: Any) -> Any:
        """Return a fingerprint of a name's value that changes whenever a cell assigns the name.

        None stays None.
        """
        number = self._assigned.last(name)
        return f"{fingerprint}@{number}" if number and fingerprint is not None else fingerprint
