"""What a run asks for, and the values that it needs: pickled, and followed to the further names that functions in them use."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from skymagic.data.capture.code import is_type
from skymagic.data.capture.modules import ModuleSource
from skymagic.data.capture.names import CellNames, interactive, is_output, reach
from skymagic.data.shipping.bindings import Bindings, ManifestItem
from skymagic.data.shipping.bundles import Progress, Variable
from skymagic.data.shipping.links import SentLinks
from skymagic.data.shipping.notes import Refusal, message, raised_by_value, refusal
from skymagic.data.store.bundle import INLINE
from skymagic.data.values import pickling
from skymagic.data.values.kinds import kind_name
from skymagic.data.values.pickled import FIXED_TYPES
from skymagic.errors import CaptureError


@dataclass(frozen=True, eq=False)
class ShippingRequest:
    """What `Shipper.prepare` was asked for."""

    names: CellNames
    ranks: Sequence[int]
    space: Mapping[str, object]
    """The names that the cell sees: the notebook's, and those for this cell alone."""
    temporary: frozenset[str] = frozenset()
    """Names for this cell alone."""
    push: Sequence[str] = ()
    gather: Sequence[str] = ()
    """Names that come back: those that the cell does not use come as the ranks have them."""
    no_push: bool = False
    """Whether only `push` and `temporary` travel."""
    kept: frozenset[str] = frozenset()
    """Names that stay here."""
    fresh: bool = False
    dry_run: bool = False
    progress: Progress | None = None
    warn: Callable[[str], None] | None = None
    note: Callable[[str], None] | None = None

    @property
    def wanted(self) -> set[str]:
        """Names that must travel."""
        return {
            *(() if self.no_push else self.names.loads),
            *self.push,
            *self.temporary,
        } - self.kept

    @property
    def hints(self) -> set[str]:
        """Names that may be left out where they cannot travel."""
        if self.no_push:
            return set()
        types = {name for name in self.names.hints if is_type(self.space.get(name))}
        return types.union(self.names.probes) - self.kept


@dataclass(eq=False)
class Needs:
    """What a run needs, and which of it is where."""

    values: dict[str, Variable]
    why: dict[str, str]
    """Name → ``"the cell"``, ``"used by train"`` or ``"--push"``."""
    lacking: dict[str, list[int]] = field(default_factory=dict)
    """Name → ranks that must get its value."""
    sources: Mapping[str, ModuleSource] = field(default_factory=dict)
    """The notebook's own modules."""
    staying: frozenset[str] = frozenset()
    """Names that ranks do not get because their values came from there."""

    @property
    def moved(self) -> list[Variable]:
        """Values that some rank must get."""
        if not any(self.lacking.values()):  # which is so nearly always, and seen at once
            return []
        return [value for name, value in self.values.items() if self.lacking[name]]

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of the modules, by name."""
        return {name: module.hash for name, module in self.sources.items()}

    def items(self, values: Iterable[Variable]) -> tuple[ManifestItem, ...]:
        """Rows of the manifest for these values, as ``--dry-run`` shows them."""
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


# -- the values that a run needs -------------------------------------------------------------------


class Collector:
    """Pickles the notebook's values."""

    def __init__(self, namespace: dict[str, Any], folder: str, bindings: Bindings) -> None:
        self.namespace = namespace
        self.folder = folder
        self.bindings = bindings
        self._immutables: dict[str, Variable] = {}
        self._unpicklable: dict[str, tuple[object, str]] = {}

    def collect(
        self, request: ShippingRequest, read: Mapping[str, str] = MappingProxyType({})
    ) -> Needs:
        """Pickle the names that a cell needs, and follow the functions in them to further names.

        Args:
            read: names that functions on the ranks read, with the reason: they travel if they can.

        Raises:
            CaptureError: variables cannot travel.
        """
        needed = request.wanted
        values: dict[str, Variable] = {}
        failed: dict[str, BaseException] = {}

        def uses(name: str, value: object) -> Mapping[str, str]:
            if is_output(name) and self._ranks_keep_theirs(name, value, request.ranks):
                return {}
            try:
                values[name] = variable = self.variable(name, value)
            except BaseException as problem:
                if isinstance(problem, KeyboardInterrupt) and not raised_by_value(problem):
                    raise  # the stop button
                if not self._ranks_keep_theirs(name, value, request.ranks):
                    failed[name] = problem
                return {}
            found, annotated = variable.pickled.uses, variable.pickled.hints
            if not found and not annotated:
                return found
            if name in needed:
                needed.update(found)
            if annotated:
                found = {
                    **{each: f"an annotation of {where}" for each, where in annotated.items()},
                    **found,
                }
            return {used: where for used, where in found.items() if used not in request.kept}

        why = reach(request.wanted | request.hints, request.space, uses, read)
        why.update({name: "--push" for name in request.push if name in why})
        refusals = [
            refusal(name, request.space[name], why[name], problem, self._attempt)
            for name, problem in failed.items()
            if name in needed
        ]
        if missing := [name for name in request.push if name not in self.namespace]:
            of_user = [one for one, value in self.namespace.items() if not interactive(one, value)]
            refusals += [Refusal.missing(name, of_user) for name in missing]
        failed.clear()  # the tracebacks hold the values
        if refusals:
            raise CaptureError(message(refusals))
        return Needs(values, why)

    def add(self, request: ShippingRequest, needs: Needs, related: Mapping[str, str]) -> bool:
        """Take in further names as if the cell used them; whether there are more of them now.

        Args:
            related: name → that of a value which has something in common with it.
        """
        try:
            names = CellNames(loads=frozenset(related))
            more = self.collect(
                ShippingRequest(names, request.ranks, self.namespace, kept=request.kept)
            )
        except CaptureError:  # the cell did not ask for them
            return False
        new = more.values.keys() - needs.values.keys()
        for name in new:
            needs.values[name] = more.values[name]
            needs.why[name] = f"used by {related[name]}" if name in related else more.why[name]
        return bool(new)

    def related(self, request: ShippingRequest, needs: Needs, links: SentLinks) -> dict[str, str]:
        """Names of which ranks hold something that values refer to which are about to travel: name → one that does."""
        moved = [
            value
            for value in needs.moved
            if not value.fixed and value.name not in request.temporary | request.kept
        ]
        if not moved:
            return {}
        ranks = request.ranks
        held = (
            set().union(*(self.bindings.fingerprints(rank) for rank in ranks))
            - needs.values.keys()
            - request.kept
        )
        # what the ranks have shown themselves is theirs: their `_5` has nothing to do with the notebook's
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

        return links.related(moved, names, open)

    def variable(self, name: str, value: object) -> Variable:
        """A value, pickled.

        Raises:
            Exception: it cannot be.
        """
        known = self._immutables.get(name)
        if known is not None and known.value is value:
            return known
        made = Variable(name, value, pickling.dumps(value, self.namespace, folder=self.folder))
        if type(value) in FIXED_TYPES and made.pickled.nbytes < INLINE:
            self._immutables[name] = made
        return made

    def identity(self, name: str, value: object) -> str:
        """A fingerprint of a value whose contents are not looked at."""
        known = self._unpicklable.get(name)
        if known is None or known[0] is not value:
            known = self._unpicklable[name] = (value, f"object {id(value)}")
        return known[1]

    def forget_names(self, namespace: Container[str]) -> None:
        """Forget names that the notebook has lost."""
        for known in (self._immutables, self._unpicklable):
            for name in [name for name in known if name not in namespace]:
                del known[name]

    def _attempt(self, part: object) -> object:
        return pickling.dumps(part, self.namespace, folder=self.folder)

    def _ranks_keep_theirs(self, name: str, value: object, ranks: Sequence[int]) -> bool:
        """Whether all ranks have their own binding of a name whose value here cannot travel, and is the same still."""
        known = self._unpicklable.get(name)
        if known is None or known[0] is not value:
            return False
        return all(self.bindings.fingerprints(rank).get(name) == known[1] for rank in ranks)
