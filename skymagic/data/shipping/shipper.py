"""The notebook's end of the data plane: what must travel to which rank, and values on their way back."""

from __future__ import annotations

import builtins
import platform
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from skymagic.data.capture import cells, modules
from skymagic.data.capture.annotations import is_type
from skymagic.data.capture.imports import ModulesNeeded
from skymagic.data.capture.names import CellNames, cell_names, interactive, is_output, reach
from skymagic.data.capture.resources import READERS
from skymagic.data.capture.scripts import with_scripts
from skymagic.data.shipping.bindings import Bindings
from skymagic.data.shipping.bundles import Bundle, BundleWriter, Progress, Variable
from skymagic.data.shipping.fingerprints import Fingerprints
from skymagic.data.shipping.links import Inventory, SentLinks
from skymagic.data.shipping.manifest import Item, Manifest
from skymagic.data.shipping.packing import Packed, Packer
from skymagic.data.shipping.pulled import Pulled
from skymagic.data.shipping.refusal import Refusal, heavy, message, no_room, refusal
from skymagic.data.shipping.sources import Sources
from skymagic.data.shipping.unpacking import Unpacking
from skymagic.data.store.base import Store
from skymagic.data.store.bundle import INLINE
from skymagic.data.store.index import ContentIndex
from skymagic.data.values import mapped, pickling
from skymagic.data.values.kinds import kind_name
from skymagic.data.values.links import FIXED_TYPES
from skymagic.errors import CaptureError

__all__ = ["Item", "Manifest", "Shipper"]

_BUILTIN_NAMES = vars(builtins).keys()


class Shipper(Unpacking):
    """Knows what the ranks of one pool hold, and makes the orders that bring them what a cell needs.

    A rank keeps its own binding of a name until the notebook's value of that name changes.

    Args:
        store: the node's store, or that of several nodes.
        namespace: the notebook's global names; read at each ``prepare``.
        folder: the notebook's folder: modules in it travel as source.
        large: bytes from which the user is told that a variable is on its way to other machines.
    """

    def __init__(self, store: Store, namespace: dict[str, Any], folder: str, *, large: int = 1_000_000_000) -> None:
        super().__init__(store, namespace)
        self.folder = folder
        self.large = large
        self.index = ContentIndex(store)
        self.fingerprints = Fingerprints(namespace, folder, self.index)
        self.bindings = Bindings()
        self.sources = Sources(folder, self.bindings, remote=store.remote)
        self.links = SentLinks(namespace)
        self._immutables: dict[str, Variable] = {}
        self._unpicklable: dict[str, tuple[object, str]] = {}
        self._warned: set[frozenset[str]] = set()
        self._pulled: dict[str, Pulled] = {}
        self._noted: set[str] = set()
        """Names of which the user knows that the ranks hold them, and the notebook does not."""
        self._unsure: set[str] = set()
        """Names of which the user knows that their values look different each time."""
        self._apart: set[tuple[str, str]] = set()
        """Names of which the user knows that the first refers to a value of the second that the ranks have not got."""

    def prepare(
        self,
        source: str,
        ranks: Sequence[int],
        *,
        push: Sequence[str] = (),
        no_push: bool | Sequence[str] = False,
        fresh: bool = False,
        extra: Mapping[str, object] | None = None,
        compiler_flags: int = 0,
        dry_run: bool = False,
        progress: Progress | None = None,
        warn: Callable[[str], None] | None = None,
        note: Callable[[str], None] | None = None,
        unsettled: Callable[[frozenset[str]], frozenset[str]] | None = None,
    ) -> Manifest:
        """Find what a cell needs, and write what some rank has not got into the store.

        Args:
            source: the cell as plain Python.
            ranks: where it will run.
            push: names that travel though the cell does not load them.
            no_push: True: nothing travels; or names that stay here.
            fresh: send everything again.
            extra: values by name that travel beside the notebook's own, always, for this cell alone: the ranks forget
                them after it. A name of the notebook gives way to them.
            compiler_flags: of ``__future__``, as the notebook's earlier cells have set them.
            dry_run: only look; nothing is written and ``orders`` is empty.
            progress: called with the bytes to write, by names, and the bytes written so far.
            warn: called with a sentence for each large variable that must travel to other machines, once per value.
            note: called with a sentence where the ranks' binding of a name may surprise, once per name.
            unsettled: called with the dotted names of all modules that must be on the nodes; those of which it is not known
                that they are.

        Raises:
            SyntaxError: the cell does not compile.
            ModulesNeeded: there are such; no rank has got anything.
            CaptureError: variables cannot travel, all of them named, or there is no room for them. No rank has got
                anything.
        """
        names = with_scripts(cell_names(source, compiler_flags))
        with self._lock, mapped.to_processes(same_files=not self.store.remote):
            kept = frozenset() if isinstance(no_push, bool) else frozenset(no_push)
            extra = extra or {}
            wanted = {*(names.loads if no_push is not True else ()), *push, *extra} - kept
            space = {**self.namespace, **extra} if extra else self.namespace
            hints: set[str] = set()
            if no_push is not True:
                hints = {name for name in names.hints if is_type(space.get(name))}.union(names.probes) - kept
            values, why = self._collect(wanted, hints, space, kept, push, ranks)
            lacking, sources, staying = self._lacking(
                names, values, ranks, fresh, push, frozenset(extra), dry_run, note
            )
            while related := self._related(values, lacking, kept, frozenset(extra), ranks):
                if not self._collect_related(related, values, why, kept, ranks):
                    break
                lacking, sources, staying = self._lacking(
                    names, values, ranks, fresh, push, frozenset(extra), dry_run, note
                )
            types = {kind: kind_name(kind) for kind in {type(value.value) for value in values.values()}}
            items = tuple(
                Item(
                    name,
                    why[name],
                    value.pickled.nbytes,
                    bool(lacking[name]),
                    types[type(value.value)],
                    name in staying,
                )
                for name, value in values.items()
            )
            if dry_run:
                return Manifest({}, 0, items, names=names)
            if unsettled is not None and (needed := unsettled(self._required(names, values, lacking))):
                raise ModulesNeeded(needed, frozenset(sources))
            unbound = self._shadowed(ranks)
            if note is not None:
                self._note_deleted(names, ranks, note)
            packed = self._pack(names, ranks, values, lacking, frozenset(extra))
            if note is not None:
                self._note_apart(packed, note)
                self._note_maps(values, lacking, note)
            manifest = self._load(
                names, ranks, values, lacking, packed, sources, items, frozenset(extra), unbound, progress, warn
            )
            for name in staying:  # the ranks have not seen it: something equal that is assigned is new to them
                manifest.fingerprints.pop(name, None)
            return manifest

    def bound(
        self,
        manifest: Manifest,
        rank: int,
        rebound: Iterable[str] = (),
        deleted: Iterable[str] = (),
        *,
        completed: bool,
    ) -> None:
        """This rank has bound the manifest and run its cell; twice is safe.

        Args:
            rebound, deleted: names that the cell has bound and unbound, as the rank found by looking before and after.
            completed: whether the cell came to its end. Then it has bound what it binds on every path, also where the rank
                could not see it: small numbers, True and None are one object each, however often they are bound.
        """
        names = {*rebound, *(manifest.names.certain if completed else ())}
        with self._lock:
            # once for all ranks: it looks at all bytes of the notebook's values
            manifest.stored.update(self._fingerprints(names - manifest.fingerprints.keys() - manifest.stored.keys()))
            known = {name: manifest.fingerprints.get(name, manifest.stored.get(name)) for name in names}
            self.bindings.bound(manifest, rank, known, deleted)
            for bound_ranks, sent in manifest.sent:
                if rank in bound_ranks:
                    self.links.bound(rank, sent)

    def gathered(self, types: Mapping[str, str], ranks: Iterable[int]) -> None:
        """The notebook's present values of these names came from these ranks, which keep their own.

        Args:
            types: name → type of the value on a rank.
        """
        with self._lock:
            fingerprints = self._fingerprints(types)
            for rank in ranks:
                self.bindings.set_fingerprints(rank, fingerprints)
            self._pulled.update({name: Pulled.of(self.namespace[name], kind) for name, kind in types.items()})

    def names(self) -> frozenset[str]:
        """Names that the ranks hold, as far as is known."""
        with self._lock:
            ranks = self.bindings.known()
            return frozenset(name for rank in ranks for name in self.bindings.names(rank) if name[:1] != "_")

    def cloned(self, names: Iterable[str], source: int, ranks: Iterable[int]) -> None:
        """These ranks have got a rank's own values of these names."""
        with self._lock:
            self.bindings.cloned(names, source, ranks)

    def forget(self, ranks: Iterable[int]) -> None:
        """These ranks were started anew and hold nothing."""
        with self._lock:
            self.bindings.forget(ranks)
            self.links.forget(ranks)

    def gone(self, rank: int, unlinked: Iterable[str], lost: Iterable[Sequence[int]]) -> None:
        """This rank says what it holds no more of the objects that it made of the notebook's values; `Held.report`."""
        with self._lock:
            self.links.gone(rank, unlinked, lost)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _collect(
        self,
        wanted: set[str],
        hints: set[str],
        space: Mapping[str, object],
        kept: frozenset[str],
        push: Sequence[str],
        ranks: Sequence[int],
    ) -> tuple[dict[str, Variable], dict[str, str]]:
        """Pickle the names that a cell needs, and follow the functions in them to further names of `space`.

        Args:
            hints: names that may be left out where they cannot travel.
        """
        needed = set(wanted)
        values: dict[str, Variable] = {}
        failed: dict[str, BaseException] = {}

        def uses(name: str, value: object) -> Mapping[str, str]:
            if is_output(name) and self._ranks_keep_theirs(name, value, ranks):
                return {}
            try:
                values[name] = variable = self._variable(name, value)
            except Exception as problem:
                if not self._ranks_keep_theirs(name, value, ranks):
                    failed[name] = problem
                return {}
            found, annotated = variable.pickled.uses, variable.pickled.hints
            if not found and not annotated:
                return found
            needed.update(found)
            if annotated:
                found = {**{each: f"an annotation of {where}" for each, where in annotated.items()}, **found}
            return {used: where for used, where in found.items() if used not in kept} if kept else found

        why = reach(wanted | hints, space, uses)
        why.update({name: "--push" for name in push if name in why})
        refusals = [
            refusal(name, space[name], why[name], problem, self._attempt)
            for name, problem in failed.items()
            if name in needed
        ]
        refusals += [Refusal.missing(name) for name in push if name not in self.namespace]
        failed.clear()  # the tracebacks hold the values
        if refusals:
            raise CaptureError(message(refusals))
        return values, why

    def _variable(self, name: str, value: object) -> Variable:
        known = self._immutables.get(name)
        if known is not None and known.value is value:
            return known
        made = Variable(name, value, pickling.dumps(value, self.namespace, folder=self.folder))
        if type(value) in FIXED_TYPES and made.pickled.nbytes < INLINE:
            self._immutables[name] = made
        return made

    def _attempt(self, part: object) -> object:
        return pickling.dumps(part, self.namespace, folder=self.folder)

    def _ranks_keep_theirs(self, name: str, value: object, ranks: Sequence[int]) -> bool:
        """Whether all ranks have their own binding of a name whose value here cannot travel, and is the same still."""
        known = self._unpicklable.get(name)
        if known is None or known[0] is not value:
            return False
        return all(self.bindings.fingerprints(rank).get(name) == known[1] for rank in ranks)

    def _identify(
        self,
        values: Mapping[str, Variable],
        ranks: Sequence[int],
        hashes: Mapping[str, str],
        temporary: Container[str],
    ) -> None:
        """Give all values their fingerprints, except those that nobody can have, and those that travel anyhow."""
        held = [self.bindings.fingerprints(rank) for rank in ranks]
        for name, value in values.items():
            if value.fingerprint is not None or name in temporary:
                continue
            if value.pickled.plain or self.index.identify(value.parts, lazily=not any(name in each for each in held)):
                self.fingerprints.take(value, hashes)

    def _unstable(self, values: Mapping[str, Variable], ranks: Sequence[int], hashes: Mapping[str, str]) -> set[str]:
        """Names whose values seem to have changed, but are the same objects and look different each time."""
        held = [self.bindings.fingerprints(rank) for rank in ranks]
        return {
            name
            for name, value in values.items()
            if value.same_object
            and any(known.get(name, value.fingerprint) != value.fingerprint for known in held)
            and self.fingerprints.is_unstable(value, hashes)
        }

    def _lacking(
        self,
        names: CellNames,
        values: Mapping[str, Variable],
        ranks: Sequence[int],
        fresh: bool,
        push: Sequence[str],
        extra: frozenset[str],
        dry_run: bool,
        note: Callable[[str], None] | None,
    ) -> tuple[dict[str, list[int]], dict[str, modules.ModuleSource], set[str]]:
        """For each name, the ranks that must get its value.

        Returns:
            Beside them the notebook's own modules that are needed, and the names that ranks do not get because their values
            came from there.
        """
        pickles = [value.pickled for value in values.values() if not value.pickled.plain]
        imported = names.imports.union(*(each.modules | (each.packages & READERS) for each in pickles))
        sources = self.sources.find(imported, ranks, dry_run=dry_run, note=note)
        note = None if dry_run else note
        hashes = {name: module.hash for name, module in sources.items()}
        self._identify(values, ranks, hashes, extra)
        fingerprints = {name: value.fingerprint for name, value in values.items()}
        pulled = {name for name in self._pulled.keys() & values.keys() if self._is_pulled(name, values[name].value)}
        pulled -= extra
        unstable = set() if fresh else self._unstable(values, ranks, hashes) - extra
        sent = values if fresh else {*extra, *((pulled | unstable) & set(push))}
        lacking = self.bindings.ranks_without_value(fingerprints, ranks, sent)
        for name in unstable.difference(sent):
            lacking[name] = [rank for rank in lacking[name] if name not in self.bindings.fingerprints(rank)]
            if note is not None and name not in self._unsure:
                self._unsure.add(name)
                note(
                    f"{name} looks different each time, so nobody can say whether it has changed: the ranks keep "
                    f"their own; --push {name} sends the notebook's"
                )
        staying = {name for name in pulled.difference(sent) if lacking[name]}
        for name in sorted(staying):  # what came from the ranks does not go back by itself
            if note is not None and not self._pulled[name].noted:
                self._pulled[name].noted = True
                note(self._pulled[name].stays(name, any(name in self.bindings.names(rank) for rank in ranks)))
            lacking[name] = []
        return lacking, sources, staying

    def _required(
        self, names: CellNames, values: Mapping[str, Variable], lacking: Mapping[str, list[int]]
    ) -> frozenset[str]:
        """Dotted names of modules that must be on the nodes, the notebook's own among them."""
        moved = (value.pickled.required for name, value in values.items() if lacking[name])
        return names.required.union(self.sources.required, *moved)

    def _related(
        self,
        values: Mapping[str, Variable],
        lacking: Mapping[str, list[int]],
        kept: frozenset[str],
        extra: frozenset[str],
        ranks: Sequence[int],
    ) -> dict[str, str]:
        """Names of which ranks hold something that values refer to which are about to travel: name → one that does."""
        moved = [Inventory(value) for name, value in values.items() if lacking[name] and name not in extra | kept]
        moved = [each for each in moved if not each.variable.fixed]
        if not moved:
            return {}
        held = set().union(*(self.bindings.fingerprints(rank) for rank in ranks)) - values.keys() - kept
        # what the ranks have shown themselves is theirs: their `_5` has nothing to do with the notebook's
        held -= {name for name in held if is_output(name) and any(self.bindings.has_rebound(r, name) for r in ranks)}
        names = [name for name in sorted(held & self.namespace.keys()) if type(self.namespace[name]) not in FIXED_TYPES]

        def open(name: str) -> Variable | None:
            try:
                return self._variable(name, self.namespace[name])
            except Exception:
                return None

        return self.links.related(moved, names, open)

    def _collect_related(
        self,
        related: Mapping[str, str],
        values: dict[str, Variable],
        why: dict[str, str],
        kept: frozenset[str],
        ranks: Sequence[int],
    ) -> bool:
        """Take these names in as if the cell used them; whether there are more of them now."""
        try:
            more, reasons = self._collect(set(related), set(), self.namespace, kept, (), ranks)
        except CaptureError:  # the cell did not ask for them
            return False
        new = more.keys() - values.keys()
        for name in new:
            values[name] = more[name]
            why[name] = f"used by {related[name]}" if name in related else reasons[name]
        return bool(new)

    def _pack(
        self,
        names: CellNames,
        ranks: Sequence[int],
        values: Mapping[str, Variable],
        lacking: Mapping[str, list[int]],
        temporary: frozenset[str],
    ) -> Packed:
        moved = [value for name, value in values.items() if lacking[name]]
        attributes = names.attributes.union(*(value.pickled.attributes for value in moved))
        return Packer(
            self.links, self.index, self.folder, ranks, values, lacking, names.loads, temporary, attributes
        ).pack()

    def _note_maps(
        self, values: Mapping[str, Variable], lacking: Mapping[str, list[int]], note: Callable[[str], None]
    ) -> None:
        for name, value in values.items():
            if lacking[name] and (why := mapped.why_as_array(value.value)):
                note(f"{name}: its contents travel as an array, for {why}")

    def _note_apart(self, packed: Packed, note: Callable[[str], None]) -> None:
        for name, other in packed.apart:
            if (name, other) not in self._apart:
                self._apart.add((name, other))
                note(
                    f"{name} refers to the notebook's {other}, and the ranks have their own {other}: make {name} in a "
                    "broadcast cell, or send both with --fresh"
                )

    def _load(
        self,
        names: CellNames,
        ranks: Sequence[int],
        values: dict[str, Variable],
        lacking: Mapping[str, list[int]],
        packed: Packed,
        sources: Mapping[str, modules.ModuleSource],
        items: tuple[Item, ...],
        temporary: frozenset[str],
        unbound: frozenset[str],
        progress: Progress | None,
        warn: Callable[[str], None] | None,
    ) -> Manifest:
        """Write what is lacking, and make the orders."""
        moved = [value for name, value in values.items() if lacking[name]]
        bundles = packed.bundles
        writer = BundleWriter(self.index, progress)
        try:
            writer.expect(bundles)
            if warn is not None and self.store.remote:
                self._warn(bundles, warn)
            for bundle in bundles:
                writer.add(bundle)
            writer.finish()
            hashes = {name: module.hash for name, module in sources.items()}
            for value in moved:
                if not value.pickled.plain and value.name not in temporary:
                    self.index.identify(value.parts)
                    self.fingerprints.take(value, hashes)
            fingerprints = {name: value.fingerprint or "" for name, value in values.items() if name not in temporary}
            stored = self._fingerprints(names.stores - set(values))
            texts = self._lacking_cells(moved, ranks)
            orders = {
                "python": platform.python_version(),
                "files": writer.files,
                "bundles": [bundle.plain() for bundle in bundles],
                "modules": self.sources.lacking(sources, ranks),
                "sources": texts,
                "cells": cells.numbers(texts),
                "temporary": sorted(temporary),
                "unbound": sorted(unbound),
            }
        except BaseException as problem:
            self.store.unpin(writer.keys)
            self.index.sweep()
            if isinstance(problem, OSError):
                raise CaptureError(no_room(problem, [(item.name, item.nbytes) for item in items])) from problem
            raise
        manifest = Manifest(orders, writer.nbytes, items, fingerprints, stored, names, unbound, packed.sent)
        weakref.finalize(manifest, self.store.unpin, writer.keys).atexit = False
        self.index.set_needs(writer.needs, {*self.namespace, *temporary})
        self._forget_lost_names()
        return manifest

    def _warn(self, bundles: Iterable[Bundle], warn: Callable[[str], None]) -> None:
        """Say which large values are about to travel."""
        for bundle in bundles:
            parts = self.index.to_send(bundle.parts)
            value = frozenset(parts)
            if sum(parts.values()) > self.large and value not in self._warned:
                self._warned.add(value)
                warn(heavy(", ".join(bundle.names), sum(parts.values())))

    def _fingerprints(self, names: Iterable[str]) -> dict[str, str]:
        """Fingerprints of the notebook's present values of names that ranks bind themselves."""
        fingerprints = {}
        for name in names:
            if name not in self.namespace or interactive(name, self.namespace[name]):
                continue
            value = self.namespace[name]
            if is_output(name):  # of whatever size, and another with every cell
                fingerprints[name] = self._identity(name, value)
                continue
            try:
                variable = self._variable(name, value)
                if variable.fingerprint is None:
                    self.index.identify(variable.parts)
                    local = modules.collect(variable.pickled.modules, self.folder)
                    self.fingerprints.take(variable, {each: module.hash for each, module in local.items()})
                fingerprints[name] = variable.fingerprint or ""
            except Exception:  # it cannot travel, so its identity must do
                fingerprints[name] = self._identity(name, value)
        return fingerprints

    def _identity(self, name: str, value: object) -> str:
        """A fingerprint of a value whose contents are not looked at."""
        known = self._unpicklable.get(name)
        if known is None or known[0] is not value:
            known = self._unpicklable[name] = (value, f"object {id(value)}")
        return known[1]

    def _is_pulled(self, name: str, value: object) -> bool:
        """Whether the notebook's value of a name is what came from the ranks under this name, changed or not, or a part of it."""
        known = self._pulled.get(name)
        if known is not None and not known.holds(value):
            del self._pulled[name]
            known = None
        return known is not None

    def _shadowed(self, ranks: Sequence[int]) -> frozenset[str]:
        """Names of Python's own that the notebook has taken back, and ranks have from it: `list` after ``list = 5; del list``."""
        return frozenset(
            name
            for rank in ranks
            for name in self.bindings.fingerprints(rank).keys() & _BUILTIN_NAMES
            if name not in self.namespace and not self.bindings.has_rebound(rank, name)
        )

    def _note_deleted(self, names: CellNames, ranks: Sequence[int], note: Callable[[str], None]) -> None:
        self._noted = {name for name in self._noted if name not in self.namespace}
        for name in sorted(names.loads - self.namespace.keys() - _BUILTIN_NAMES - self._noted):
            if any(name in self.bindings.fingerprints(rank) for rank in ranks):
                self._noted.add(name)
                note(f"{name} is deleted here, the ranks still hold it")

    def _lacking_cells(self, values: Iterable[Variable], ranks: Sequence[int]) -> dict[str, str]:
        files = frozenset().union(*(value.pickled.files for value in values))
        return cells.sources(name for name in files if self.bindings.ranks_without_source(name, "", ranks))

    def _forget_lost_names(self) -> None:
        """Forget names that the notebook has lost."""
        self._unsure &= self.namespace.keys()
        self.links.forget_names()
        for known in (self._immutables, self._unpicklable, self.fingerprints.known):
            for name in [name for name in known if name not in self.namespace]:
                del known[name]
