"""Pickle the values that a run needs, and follow the names that their functions use."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from skymagic.data.bundle import INLINE
from skymagic.data.capture.code import is_type
from skymagic.data.capture.names import CellNames, is_interactive_name, is_output, needed_names
from skymagic.data.namespace import Namespace
from skymagic.data.shipping.bindings import Bindings, ManifestItem
from skymagic.data.shipping.bundles import Progress, Variable
from skymagic.data.shipping.links import SentLinks
from skymagic.data.shipping.unpicklable import (
    Refusal,
    explain_refusal,
    refusal_message,
    was_raised_by_value,
)
from skymagic.data.values import pickling
from skymagic.data.values.kinds import kind_name
from skymagic.data.values.pickled import FIXED_TYPES, Pickled
from skymagic.data.values.snapshots import LEAST, Snapshot
from skymagic.errors import CaptureError
from skymagic.wire.values import ModuleSource


@dataclass(frozen=True, eq=False)
class ShippingRequest:
    """Arguments of one `Shipper.prepare` call."""

    names: CellNames
    ranks: Sequence[int]
    space: Mapping[str, object]
    """Names that the cell sees: those of the notebook and those for this cell only."""
    temporary: frozenset[str] = frozenset()
    """Names for this cell only."""
    push: Sequence[str] = ()
    gather: Sequence[str] = ()
    """Names to bring back: those that the cell does not use are taken as the ranks have them."""
    no_push: bool = False
    """True if only `push` and `temporary` travel."""
    local_names: frozenset[str] = frozenset()
    """Names that stay in the notebook."""
    fresh: bool = False
    dry_run: bool = False
    progress: Progress | None = None
    warn: Callable[[str], None] | None = None
    note: Callable[[str], None] | None = None

    @property
    def required_names(self) -> set[str]:
        """Names that must travel."""
        return {
            *(() if self.no_push else self.names.loads),
            *self.push,
            *self.temporary,
        } - self.local_names

    @property
    def hints(self) -> set[str]:
        """Names that are left out if they cannot travel."""
        if self.no_push:
            return set()
        types = {name for name in self.names.hints if is_type(self.space.get(name))}
        return types.union(self.names.probes) - self.local_names


@dataclass(eq=False)
class Needs:
    """Values and modules that a run needs, and which ranks lack them."""

    values: dict[str, Variable]
    why: dict[str, str]
    """Reason by name: `"the cell"`, `"used by train"` or `"--push"`."""
    lacking: dict[str, list[int]] = field(default_factory=dict)
    """By name: ranks that must receive the value."""
    sources: Mapping[str, ModuleSource] = field(default_factory=dict)
    """The user's own modules."""
    staying: frozenset[str] = frozenset()
    """Names that are not sent because their values came from the ranks."""

    @property
    def to_send(self) -> list[Variable]:
        """Values that some rank must receive."""
        if not any(self.lacking.values()):  # the common case, and quick to check
            return []
        return [value for name, value in self.values.items() if self.lacking[name]]

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of the modules by name."""
        return {name: module.hash for name, module in self.sources.items()}

    def items(self, values: Iterable[Variable]) -> tuple[ManifestItem, ...]:
        """Return the manifest's rows for these values, as shown by `--dry-run`."""
        return tuple(
            ManifestItem(
                value.name,
                self.why[value.name],
                value.pickled.nbytes,
                bool(self.lacking[value.name]),
                kind_name(type(value.value)),
                value.name in self.staying,
            )
            for value in values
        )


class UnchangedValues:
    """Containers of many small arrays that did not change, and so are not pickled for a while."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[Snapshot, Pickled] | None] = {}
        """By name: contents, and facts about the pickle; None if the next cell takes a snapshot."""

    def inspect(self, name: str, value: object) -> tuple[Snapshot | None, Pickled | None]:
        """Return a snapshot of a known value, and facts about its pickle if it has not changed."""
        known, snapshot = self.known[name], Snapshot.take(value)
        return known if known is not None and known[0] == snapshot else (snapshot, None)

    def record(self, variable: Variable, *, changed: bool) -> None:
        """Record whether a value equals the one before it."""
        pickled = variable.pickled
        if changed or pickled.modules or len(pickling.leaves(pickled)) < LEAST:
            self.known.pop(variable.name, None)
        elif variable.snapshot is not None:
            # The snapshot must not keep the value alive.
            facts = pickled._replace(pieces=(), buffers=(), marks=frozenset(), spans=(), keep=None)
            self.known[variable.name] = variable.snapshot, facts
        else:
            self.known[variable.name] = None


# -- collecting ------------------------------------------------------------------------------------


class Collector:
    """Pickles the notebook's values."""

    def __init__(self, namespace: Namespace, folder: str, bindings: Bindings) -> None:
        self.namespace = namespace
        self.folder = folder
        self.bindings = bindings
        self.unchanged = UnchangedValues()
        self._immutables: dict[str, Variable] = {}
        self._unpicklable: dict[str, tuple[object, str]] = {}

    def collect(
        self, request: ShippingRequest, read: Mapping[str, str] = MappingProxyType({})
    ) -> Needs:
        """Pickle the names that a cell needs, and follow their functions to further names.

        Args:
            read: names that functions on the ranks read, with the reason: they travel if they can.

        Raises:
            CaptureError: variables cannot travel.
        """
        needed = request.required_names
        values: dict[str, Variable] = {}
        failed: dict[str, BaseException] = {}

        def uses(name: str, value: object) -> Mapping[str, str]:
            if is_output(name) and self._ranks_keep_theirs(name, value, request.ranks):
                return {}
            try:
                values[name] = variable = self.variable(name, value)
            # A value's own code may raise anything.
            except BaseException as problem:
                if isinstance(problem, KeyboardInterrupt) and not was_raised_by_value(problem):
                    raise  # the user interrupted the notebook
                if not self._ranks_keep_theirs(name, value, request.ranks):
                    failed[name] = problem
                return {}
            used_names, annotated = variable.facts.uses, variable.facts.hints
            if not used_names and not annotated:
                return used_names
            # What an optional value uses remains optional.
            if name in needed:
                needed.update(used_names)
            # As the reason, a real use takes precedence over an annotation.
            if annotated:
                used_names = {
                    **{hint: f"an annotation of {owner}" for hint, owner in annotated.items()},
                    **used_names,
                }
            return {
                used: user for used, user in used_names.items() if used not in request.local_names
            }

        why = needed_names(request.required_names | request.hints, request.space, uses, read)
        why.update({name: "--push" for name in request.push if name in why})
        refusals = [
            explain_refusal(name, request.space[name], why[name], problem, self._attempt)
            for name, problem in failed.items()
            if name in needed
        ]
        if missing := [name for name in request.push if name not in self.namespace]:
            of_user = [
                candidate
                for candidate, value in self.namespace.items()
                if not is_interactive_name(candidate, value)
            ]
            refusals += [Refusal.missing(name, of_user) for name in missing]
        failed.clear()  # the tracebacks hold the values
        if refusals:
            raise CaptureError(
                refusal_message(refusals), names=[refused.name for refused in refusals]
            )
        return Needs(values, why)

    def add(self, request: ShippingRequest, needs: Needs, related: Mapping[str, str]) -> bool:
        """Add further names as if the cell used them, and return True if there were new ones.

        Args:
            related: maps each name to the name of a value that shares objects with it.
        """
        try:
            names = CellNames(loads=frozenset(related))
            additional = self.collect(
                ShippingRequest(
                    names, request.ranks, self.namespace, local_names=request.local_names
                )
            )
        except CaptureError:  # ignored, because the cell does not use them
            return False
        new = additional.values.keys() - needs.values.keys()
        for name in new:
            needs.values[name] = additional.values[name]
            needs.why[name] = (
                f"used by {related[name]}" if name in related else additional.why[name]
            )
        return bool(new)

    def related_names(
        self, request: ShippingRequest, needs: Needs, links: SentLinks
    ) -> dict[str, str]:
        """Find names held by ranks that share objects with values about to travel.

        Returns:
            Maps each such name to the name of one of the values.
        """
        moved = [
            value
            for value in needs.to_send
            if not value.fixed and value.name not in request.temporary | request.local_names
        ]
        if not moved:
            return {}
        ranks = request.ranks
        # Only names that ranks already hold can share objects with the new values there.
        held = (
            set().union(*(self.bindings.fingerprints(rank) for rank in ranks))
            - needs.values.keys()
            - request.local_names
        )
        # Outputs that the ranks displayed themselves are their own: their `_5` is unrelated to the
        # notebook's.
        held -= {
            name
            for name in held
            if is_output(name) and any(self.bindings.has_rebound(r, name) for r in ranks)
        }
        names = [
            name
            for name in sorted(held & self.namespace.keys())
            if type(self.namespace[name]) not in FIXED_TYPES
        ]

        def open(name: str) -> Variable | None:
            try:
                return self.variable(name, self.namespace[name])
            except Exception:
                return None

        return links.related_names(moved, names, open)

    def variable(self, name: str, value: object) -> Variable:
        """Pickle a value.

        Raises:
            Exception: the value cannot be pickled.
        """
        cached = self._immutables.get(name)
        # By identity: an equal constant may have another type, as 1 and True do.
        if cached is not None and cached.value is value:
            return cached
        # Before it is pickled: if another thread changes it in between, the next cell sees that.
        snapshot = None
        if name in self.unchanged.known:
            snapshot, facts = self.unchanged.inspect(name, value)
            if facts is not None:
                pickle = partial(pickling.dumps, value, self.namespace, folder=self.folder)
                return Variable(name, value, facts, snapshot=snapshot, pickle=pickle)
        pickled = pickling.dumps(value, self.namespace, folder=self.folder)
        variable = Variable(name, value, pickled, snapshot=snapshot)
        # Constants cannot change, so their pickles are kept.
        if type(value) in FIXED_TYPES and variable.pickled.nbytes < INLINE:
            self._immutables[name] = variable
        return variable

    def identity(self, name: str, value: object) -> str:
        """Return a fingerprint of a value based on its identity alone."""
        entry = self._unpicklable.get(name)
        # The entry keeps the value alive, so that no other object gets its id.
        if entry is None or entry[0] is not value:
            entry = self._unpicklable[name] = (value, f"object {id(value)}")
        return entry[1]

    def forget_names(self, namespace: Container[str]) -> None:
        """Forget names that no longer exist in the notebook."""
        for cache in (self._immutables, self._unpicklable, self.unchanged.known):
            for name in [name for name in cache if name not in namespace]:
                del cache[name]

    def _attempt(self, part: object) -> object:
        return pickling.dumps(part, self.namespace, folder=self.folder)

    def _ranks_keep_theirs(self, name: str, value: object, ranks: Sequence[int]) -> bool:
        """Return True if all ranks bind a name themselves and the notebook's value cannot travel.

        The notebook's value must also be the same object as before.
        """
        entry = self._unpicklable.get(name)
        if entry is None or entry[0] is not value:
            return False
        return all(self.bindings.fingerprints(rank).get(name) == entry[1] for rank in ranks)
