"""The notebook's end of the data plane: what must travel to which rank, and values on their way back."""

from __future__ import annotations

import ast
import os
import platform
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.data.capture import assignments
from skymagic.data.capture.assignments import set_on_modules
from skymagic.data.capture.class_attributes import class_attributes
from skymagic.data.capture.imports import ModulesNeeded
from skymagic.data.capture.names import (
    cell_names,
    cell_numbers,
    cell_sources,
    last_shown,
    with_scripts,
)
from skymagic.data.capture.registrations import registrations
from skymagic.data.capture.settings import settings
from skymagic.data.shipping.bindings import Bindings, Manifest, Sources
from skymagic.data.shipping.bundles import BundleWriter, Progress
from skymagic.data.shipping.collecting import Collector, Needs, ShippingRequest
from skymagic.data.shipping.comparison import Comparison
from skymagic.data.shipping.links import SentLinks
from skymagic.data.shipping.notes import Notes, no_room
from skymagic.data.shipping.packing import Packed, Packer
from skymagic.data.store.base import Store
from skymagic.data.store.bundle import ContentIndex, read_parts
from skymagic.data.values import pickling
from skymagic.errors import CaptureError


@dataclass
class _PackedGroup:
    """Values of one pickle, on their way back."""

    waiting: set[int]
    """Indices of the values that were neither unpacked nor discarded."""
    values: tuple[Any, ...] | None = None


class Unpacking:
    """Rebuilds what ranks have packed."""

    def __init__(self, store: Store, namespace: dict[str, Any]) -> None:
        self.store = store
        self.namespace = namespace
        self._lock = threading.RLock()
        self._groups: dict[str, _PackedGroup] = {}

    def prefetch(self, refs: Iterable[Mapping[str, Any]]) -> None:
        """Announce values that ``Namespace.pack`` packed, and that will be unpacked or discarded: let them come from all nodes at once."""
        files = dict.fromkeys((ref["file"], ref.get("node", 0)) for ref in refs if ref.get("file"))
        if len(files) > 1:
            self.store.prefetch(files)

    def unpack(self, ref: Mapping[str, Any]) -> Any:
        """Rebuild a value that ``Namespace.pack`` packed; its file is unlinked. The value outlives the pool.

        Raises:
            FileNotFoundError: it has been unpacked before.
            Exception: whatever the value's own reconstruction raises.
        """
        if "group" not in ref:
            return self._open(ref)
        # Values that share something are one pickle: opened with the first of them, forgotten with the last.
        with self._lock:
            group = self._groups.setdefault(ref["group"], _PackedGroup(set(range(ref["count"]))))
            if group.values is None:
                group.values = self._open(ref)
            value = group.values[ref["index"]]
            self._leave(ref, group)
            return value

    def discard(self, ref: Mapping[str, Any]) -> None:
        """Unlink the file of a value that ``Namespace.pack`` packed and that nobody wants; twice is safe."""
        with self._lock:
            if "group" in ref:
                group = self._groups.setdefault(
                    ref["group"], _PackedGroup(set(range(ref["count"])))
                )
                self._leave(ref, group)
                if group.waiting or group.values is not None:
                    return
            if ref.get("file"):
                self.store.discard(ref["file"], ref.get("node", 0))

    def _leave(self, ref: Mapping[str, Any], group: _PackedGroup) -> None:
        group.waiting.discard(ref["index"])
        if not group.waiting:
            self._groups.pop(ref["group"], None)

    def _open(self, ref: Mapping[str, Any]) -> Any:
        header, buffers = read_parts(
            ref, lambda _: self.store.take(ref["file"], ref.get("node", 0))
        )
        return pickling.loads(header, buffers, self.namespace)


__all__ = ["Manifest", "Shipper"]


class Shipper(Unpacking):
    """Knows what the ranks of one pool hold, and makes the orders that bring them what a cell needs.

    A rank keeps its own binding of a name until the notebook assigns that name or changes its value. A cell uses the names in its
    text, and those that the functions which it may run read.

    Args:
        store: the node's store, or that of several nodes.
        namespace: the notebook's global names; read at each ``prepare``.
        folder: the notebook's folder: modules in it travel as source.
        large: bytes from which the user is told that a variable is on its way to other machines.
        assigned: the assignments of the notebook's cells, if not those that IPython reports.
    """

    def __init__(
        self,
        store: Store,
        namespace: dict[str, Any],
        folder: str,
        *,
        large: int = 1_000_000_000,
        assigned: assignments.Assignments | None = None,
    ) -> None:
        super().__init__(store, namespace)
        self.folder = folder
        self.large = large
        self.index = ContentIndex(store)
        self.bindings = Bindings()
        self.assigned = assigned or assignments.of(namespace)
        self.sources = Sources(folder, self.bindings, remote=store.remote)
        self.links = SentLinks(namespace)
        self.notes = Notes()
        self.collector = Collector(namespace, folder, self.bindings)
        self.comparison = Comparison(
            self.collector, self.index, self.sources, self.notes, self.assigned
        )

    def prepare(
        self,
        source: str,
        ranks: Sequence[int],
        *,
        push: Sequence[str] = (),
        gather: Sequence[str] = (),
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
            push: names that travel though the cell does not load them; their values replace what the ranks have.
            gather: names that come back after it.
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
        with self._lock, pickling.to_processes(same_files=not self.store.remote):
            self.assigned.look()
            request = ShippingRequest(
                names=names,
                ranks=ranks,
                space={**self.namespace, **extra} if extra else self.namespace,
                temporary=frozenset(extra or ()),
                push=push,
                gather=gather,
                no_push=no_push is True,
                kept=frozenset() if isinstance(no_push, bool) else frozenset(no_push),
                fresh=fresh,
                dry_run=dry_run,
                progress=progress,
                warn=warn,
                note=note,
            )
            with pickling.collection_paused():
                needs = self._needs(request)
            if dry_run:
                return Manifest({}, 0, needs.items(needs.values.values()), names=names)
            if unsettled is not None:
                required = (
                    self.sources.required,
                    *(value.pickled.required for value in needs.moved),
                )
                if needed := unsettled(request.names.required.union(*required)):
                    raise ModulesNeeded(needed, frozenset(needs.sources))
            if note is not None:
                self.notes.deleted(self.comparison.deleted(request), note)
                used = self.comparison.modules(request, needs)
                self._unsent(request, needs, used, source, note)
            with pickling.collection_paused():
                packed = Packer(self.links, self.index, self.folder, request, needs).pack()
            if note is not None:
                self.notes.apart(packed.apart, note)
                self.notes.maps(needs.values, needs.lacking, note)
            return self._load(request, needs, packed)

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
            manifest.stored.update(
                self.comparison.present(
                    names - manifest.fingerprints.keys() - manifest.stored.keys()
                )
            )
            known = {
                name: manifest.fingerprints.get(name, manifest.stored.get(name)) for name in names
            }
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
            self.assigned.brought(types)
            fingerprints = self.comparison.present(types)
            for rank in ranks:
                self.bindings.set_fingerprints(rank, fingerprints)
            self.comparison.gathered(types)

    def names(self) -> frozenset[str]:
        """Names that the ranks hold, as far as is known."""
        with self._lock:
            ranks = self.bindings.known()
            return frozenset(
                name for rank in ranks for name in self.bindings.names(rank) if name[:1] != "_"
            )

    def cloned(self, names: Iterable[str], source: int, ranks: Iterable[int]) -> None:
        """Note that these ranks have got a rank's own values of these names."""
        with self._lock:
            self.bindings.cloned(names, source, ranks)

    def forget(self, ranks: Iterable[int]) -> None:
        """Forget what these ranks held: they were started again."""
        with self._lock:
            self.bindings.forget(ranks)
            self.links.forget(ranks)

    def reads(self, rank: int, digest: str, names: Mapping[str, Sequence[str]] | None) -> None:
        """This rank says which global names its functions and classes read; `Reads.report`."""
        with self._lock:
            self.bindings.set_reads(rank, digest, names)

    def gone(self, rank: int, unlinked: Iterable[str], lost: Iterable[Sequence[int]]) -> None:
        """This rank says what it holds no more of the objects that it made of the notebook's values; `Held.report`."""
        with self._lock:
            self.links.gone(rank, unlinked, lost)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _needs(self, request: ShippingRequest) -> Needs:
        """The values that a run needs, with those of which ranks hold a part that must be the same object."""
        needs = self.collector.collect(request, self.comparison.read_by_functions(request))
        self.comparison.compare(request, needs)
        while related := self.collector.related(request, needs, self.links):
            if not self.collector.add(request, needs, related):
                break
            self.comparison.compare(request, needs)
        return needs

    def _unsent(
        self,
        request: ShippingRequest,
        needs: Needs,
        modules: frozenset[str],
        source: str,
        note: Callable[[str], None],
    ) -> None:
        """Name what the notebook has changed in modules that the cell uses, and that no value brings along."""
        pickles = [value.pickled for value in needs.values.values()]
        used = modules.union(*(each.packages | each.modules for each in pickles))
        packages = frozenset(each.partition(".")[0] for each in used)
        attributes = request.names.attributes.union(*(each.attributes for each in pickles))
        tree = ast.parse(source)
        own = set_on_modules(tree, self.namespace, has_run=False)
        self.notes.set_on_modules(self.assigned.on_modules, modules, own, note)
        reached_packages = packages | {each.partition(".")[0] for each in self.sources.imported}
        self.notes.settings(
            self.assigned.settings, reached_packages, settings(tree, self.namespace), note
        )
        calls = registrations(tree, self.namespace)
        self.notes.registered(self.assigned.registered, packages, calls, note)
        changed = class_attributes(tree, self.namespace)
        reached = {each for each in self.assigned.on_classes if each.name in attributes}
        self.notes.set_on_classes(reached, packages, changed, note)

    def _load(self, request: ShippingRequest, needs: Needs, packed: Packed) -> Manifest:
        """Write what is lacking, and make the orders."""
        bundles = packed.bundles
        unbound = self.comparison.shadowed(request.ranks)
        environ = self._environ(request)
        items = needs.items(needs.moved)
        writer = BundleWriter(self.index, request.progress)
        try:
            writer.expect(bundles)
            if request.warn is not None and self.store.remote:
                self.notes.heavy(bundles, self.index, self.large, request.warn)
            for bundle in bundles:
                writer.add(bundle)
            writer.finish()
            fingerprints = self.comparison.finish(request, needs)
            stored = self.comparison.present(request.names.stores - needs.values.keys())
            files = frozenset().union(*(value.pickled.files for value in needs.moved))
            texts = cell_sources(
                name
                for name in files
                if self.bindings.ranks_without_source(name, "", request.ranks)
            )
            orders = {
                "python": platform.python_version(),
                "files": writer.files,
                "bundles": [bundle.plain() for bundle in bundles],
                "modules": self.sources.lacking(needs.sources, request.ranks),
                "sources": texts,
                "cells": cell_numbers(texts),
                "temporary": sorted(request.temporary),
                "shown": last_shown([value.name for value in needs.moved], self.namespace),
                "unbound": sorted(unbound),
                "fresh": request.fresh,
                "environ": environ,
                "reads": self.bindings.known_reads(),
            }
        except BaseException as problem:
            self.store.unpin(writer.keys)
            self.index.sweep()
            if isinstance(problem, OSError):
                raise CaptureError(
                    no_room(problem, [(item.name, item.nbytes) for item in items])
                ) from problem
            raise
        for name in (
            needs.staying
        ):  # the ranks have not seen it: something equal that is assigned is new to them
            fingerprints.pop(name, None)
        manifest = Manifest(
            orders, writer.nbytes, items, fingerprints, stored, request.names, unbound, packed.sent
        )
        weakref.finalize(manifest, self.store.unpin, writer.keys).atexit = False
        self.index.set_needs(writer.needs, {*self.namespace, *request.temporary})
        for each in (self.collector, self.comparison, self.notes, self.links):
            each.forget_names(self.namespace)
        return manifest

    def _environ(self, request: ShippingRequest) -> dict[str, str | None]:
        """What the notebook has changed in its environment and some of the ranks have not got."""
        changed = assignments.changed_environment()
        secret = {name for name in changed if assignments.is_secret_variable(name)}
        if request.note is not None:
            self.notes.secret(secret, request.note)
        # what was sent and is deleted, or again as it was when skymagic was loaded, is so on the ranks too
        restored = self.bindings.sent_environ(request.ranks) - changed.keys()
        wanted = {
            **{name: value for name, value in changed.items() if name not in secret},
            **{name: os.environ.get(name) for name in restored},
        }
        return self.bindings.lacking_environ(wanted, request.ranks)
