"""The notebook's end of the data plane: send values to the ranks, and rebuild returned ones."""

from __future__ import annotations

import ast
import os
import platform
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from skymagic.content.base import Store
from skymagic.data.bundle import ContentIndex, read_parts
from skymagic.data.capture import assignments
from skymagic.data.capture.assignments import set_on_modules
from skymagic.data.capture.class_attributes import class_attributes
from skymagic.data.capture.imports import ModulesNeeded
from skymagic.data.capture.names import (
    cell_names,
    cell_numbers,
    cell_sources,
    displayed_outputs,
    with_scripts,
)
from skymagic.data.capture.registrations import registrations
from skymagic.data.capture.settings import settings
from skymagic.data.namespace import Namespace
from skymagic.data.shipping.bindings import Bindings, Manifest, Sources
from skymagic.data.shipping.bundles import BundleWriter, Progress
from skymagic.data.shipping.collecting import Collector, Needs, ShippingRequest
from skymagic.data.shipping.comparison import Comparison
from skymagic.data.shipping.links import SentLinks
from skymagic.data.shipping.notes import Notes, explain_full_store
from skymagic.data.shipping.packing import Packed, Packer
from skymagic.data.values import pickling
from skymagic.errors import CaptureError
from skymagic.wire.values import BindOrder, PackedValue


@dataclass
class _PackedGroup:
    """Returned values that were packed as one pickle."""

    waiting: set[int]
    """Indices of the values that were neither unpacked nor discarded yet."""
    values: tuple[Any, ...] | None = None


class Unpacking:
    """Rebuilds values that ranks packed."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self.store = store
        self.namespace = namespace
        self._lock = threading.RLock()
        self._groups: dict[str, _PackedGroup] = {}

    def prefetch(self, refs: Iterable[PackedValue]) -> None:
        """Announce values packed by `RankNamespace.pack`, to fetch them from all nodes in parallel.

        Each of them must be unpacked or discarded later.
        """
        files = dict.fromkeys((ref.file, ref.node) for ref in refs if ref.file)
        if len(files) > 1:
            self.store.prefetch(files)

    def unpack(self, ref: PackedValue) -> Any:
        """Rebuild a value packed by `RankNamespace.pack` and unlink its file.

        The value outlives the pool.

        Raises:
            FileNotFoundError: the value was unpacked before.
            Exception: any error from the value's own reconstruction.
        """
        if not ref.group:
            return self._open(ref)
        # Values that share objects are one pickle: it is opened for the first of them, and
        # forgotten with the last.
        with self._lock:
            group = self._groups.setdefault(ref.group, _PackedGroup(set(range(ref.count))))
            # All values of the group are rebuilt at once, to keep their shared objects.
            if group.values is None:
                group.values = self._open(ref)
            value = group.values[ref.index]
            self._leave(ref, group)
            return value

    def discard(self, ref: PackedValue) -> None:
        """Unlink the file of a packed value that is not needed; safe to call twice."""
        with self._lock:
            if ref.group:
                group = self._groups.setdefault(ref.group, _PackedGroup(set(range(ref.count))))
                self._leave(ref, group)
                # Other values of the group still need the file, or opening the group has unlinked
                # it.
                if group.waiting or group.values is not None:
                    return
            if ref.file:
                self.store.discard(ref.file, ref.node)

    def _leave(self, ref: PackedValue, group: _PackedGroup) -> None:
        group.waiting.discard(ref.index)
        if not group.waiting:
            self._groups.pop(ref.group, None)

    def _open(self, ref: PackedValue) -> Any:
        def take(_: int) -> memoryview:
            assert ref.file is not None
            return self.store.take(ref.file, ref.node)

        header, buffers = read_parts(ref, take)
        return pickling.loads(header, buffers, self.namespace)


__all__ = ["Manifest", "Shipper"]


class Shipper(Unpacking):
    """State of one pool's ranks as known to the notebook; creates the orders for a cell.

    A rank keeps its own binding of a name until the notebook assigns that name or changes its
    value. A cell needs the names in its text, and those read by functions that it may call.

    Args:
        store: store of the node, or of several nodes.
        namespace: the notebook's global names; read at each `prepare`.
        folder: the notebook's folder; modules in it travel as source.
        large: size in bytes above which the user is warned that a variable travels to other
            machines.
        assigned: assignments of the notebook's cells, if not those that IPython reports.
    """

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
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
        self.assigned = assigned or assignments.assignments_of(namespace)
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
        """Find the values that a cell needs, and write to the store those that some rank lacks.

        Args:
            source: the cell as plain Python.
            ranks: ranks that will run the cell.
            push: names to send although the cell does not load them; they replace the ranks'
                values.
            gather: names to bring back after the cell.
            no_push: True to send nothing, or names that stay here.
            fresh: True to send everything again.
            extra: additional values by name for this cell only. They always travel, hide the
                notebook's names, and are forgotten by the ranks afterwards.
            compiler_flags: flags of `__future__` imports in the notebook's earlier cells.
            dry_run: True to write nothing and leave `orders` empty.
            progress: called with the bytes to write, by names, and the bytes written so far.
            warn: called with a sentence for each large variable that must travel to other machines,
                once per value.
            note: called with a sentence where the ranks' binding of a name may surprise, once per
                name.
            unsettled: called with the dotted names of all modules that the nodes must have; returns
                those not known to be there.

        Raises:
            SyntaxError: the cell does not compile.
            ModulesNeeded: modules may be missing on the nodes. Nothing was sent to any rank.
            CaptureError: variables cannot travel (the message names all of them), or the store is
                full. Nothing was sent to any rank.
        """
        names = with_scripts(cell_names(source, compiler_flags))
        # A pickle of many objects is freed before the collector would visit all of them. Not while
        # values cross a network, which may take minutes.
        paused = nullcontext() if self.store.remote else pickling.collection_paused()
        with self._lock, pickling.to_processes(same_files=not self.store.remote), paused:
            # Assignments that the notebook's current cell has made so far come before this run.
            self.assigned.record_so_far()
            request = ShippingRequest(
                names=names,
                ranks=ranks,
                space={**self.namespace, **extra} if extra else self.namespace,
                temporary=frozenset(extra or ()),
                push=push,
                gather=gather,
                no_push=no_push is True,
                local_names=frozenset() if isinstance(no_push, bool) else frozenset(no_push),
                fresh=fresh,
                dry_run=dry_run,
                progress=progress,
                warn=warn,
                note=note,
            )
            with pickling.collection_paused():
                needs = self._needs(request)
            if dry_run:
                return Manifest(BindOrder(), 0, needs.items(needs.values.values()), names=names)
            if unsettled is not None:
                required = (
                    self.sources.required,
                    *(value.pickled.required for value in needs.to_send),
                )
                if needed := unsettled(request.names.required.union(*required)):
                    raise ModulesNeeded(needed, frozenset(needs.sources))
            if note is not None:
                self.notes.report_deleted(self.comparison.deleted(request), note)
                used = self.comparison.modules(request, needs)
                self._report_unsent_modules(request, needs, used, source, note)
            with pickling.collection_paused():
                packed = Packer(self.links, self.index, self.folder, request, needs).pack()
            if note is not None:
                self.notes.report_shared_references(packed.split_references, note)
                self.notes.report_memory_maps(needs.values, needs.lacking, note)
            manifest = self._load(request, needs, packed)
            del needs, packed
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
        """Record that a rank bound the manifest and ran its cell; safe to call twice.

        Args:
            rebound, deleted: names that the cell bound and unbound, found by the rank by comparison
                of the namespace before and after.
            completed: True if the cell ran to its end. Then it has bound all names that it binds on
                every path, even those the rank could not detect: small numbers, True and None are
                the same object however often they are bound.
        """
        names = {*rebound, *(manifest.names.certain if completed else ())}
        with self._lock:
            # Done once for all ranks, because it reads all bytes of the notebook's values.
            manifest.stored.update(
                self.comparison.present(
                    names - manifest.fingerprints.keys() - manifest.stored.keys()
                )
            )
            fingerprints = {
                name: manifest.fingerprints.get(name, manifest.stored.get(name)) for name in names
            }
            self.bindings.bound(manifest, rank, fingerprints, deleted)
            for bound_ranks, sent in manifest.sent:
                if rank in bound_ranks:
                    self.links.bound(rank, sent)

    def gathered(self, types: Mapping[str, str], ranks: Iterable[int]) -> None:
        """Record that the notebook's values of these names came from these ranks.

        The ranks keep their own values.

        Args:
            types: maps each name to the type of the value on a rank.
        """
        with self._lock:
            self.assigned.record_received(types)
            fingerprints = self.comparison.present(types)
            for rank in ranks:
                self.bindings.set_fingerprints(rank, fingerprints)
            self.comparison.gathered(types)

    def names(self) -> frozenset[str]:
        """Return the names that the ranks are known to hold."""
        with self._lock:
            ranks = self.bindings.recorded_ranks()
            return frozenset(
                name for rank in ranks for name in self.bindings.names(rank) if name[:1] != "_"
            )

    def record_clone(self, names: Iterable[str], source: int, ranks: Iterable[int]) -> None:
        """Record that these ranks received another rank's values of these names."""
        with self._lock:
            self.bindings.record_clone(names, source, ranks)

    def forget(self, ranks: Iterable[int]) -> None:
        """Forget what these ranks held, because they were restarted."""
        with self._lock:
            self.bindings.forget(ranks)
            self.links.forget(ranks)

    def reads(self, rank: int, digest: str, names: Mapping[str, Sequence[str]] | None) -> None:
        """Record which global names a rank's functions and classes read; see `Reads.report`."""
        with self._lock:
            self.bindings.set_reads(rank, digest, names)

    def record_losses(
        self, rank: int, unlinked: Iterable[str], lost: Iterable[Sequence[int]]
    ) -> None:
        """Record which objects of sent values a rank no longer holds; see `Held.report`."""
        with self._lock:
            self.links.record_losses(rank, unlinked, lost)

    # -- steps -------------------------------------------------------------------------------------

    def _needs(self, request: ShippingRequest) -> Needs:
        """Return the values needed by a run.

        This includes values that share objects with those, if ranks hold the shared objects.
        """
        needs = self.collector.collect(request, self.comparison.names_read_by_functions(request))
        self.comparison.compare(request, needs)
        # Added values may in turn share objects with further ones.
        while related := self.collector.related_names(request, needs, self.links):
            if not self.collector.add(request, needs, related):
                break
            self.comparison.compare(request, needs)
        return needs

    def _report_unsent_modules(
        self,
        request: ShippingRequest,
        needs: Needs,
        modules: frozenset[str],
        source: str,
        note: Callable[[str], None],
    ) -> None:
        """Report changes to modules that the cell uses and that no value carries to the ranks."""
        pickles = [value.facts for value in needs.values.values()]
        used = modules.union(*(pickled.packages | pickled.modules for pickled in pickles))
        packages = frozenset(module.partition(".")[0] for module in used)
        attributes = request.names.attributes.union(*(pickled.attributes for pickled in pickles))
        # What the cell itself sets or registers happens on the ranks too, and needs no note.
        tree = ast.parse(source)
        own = set_on_modules(tree, self.namespace, has_run=False)
        self.notes.report_module_attributes(self.assigned.on_modules, modules, own, note)
        reached_packages = packages | {module.partition(".")[0] for module in self.sources.imported}
        self.notes.report_settings(
            self.assigned.settings, reached_packages, settings(tree, self.namespace), note
        )
        calls = registrations(tree, self.namespace)
        self.notes.report_registrations(self.assigned.registered, packages, calls, note)
        changed = class_attributes(tree, self.namespace)
        reached = {
            attribute for attribute in self.assigned.on_classes if attribute.name in attributes
        }
        self.notes.report_class_attributes(reached, packages, changed, note)

    def _load(self, request: ShippingRequest, needs: Needs, packed: Packed) -> Manifest:
        """Write the missing values and create the orders."""
        bundles = packed.bundles
        unbound = self.comparison.shadowed_builtins(request.ranks)
        environ = self._environ(request)
        items = needs.items(needs.to_send)
        writer = BundleWriter(self.index, request.progress)
        try:
            writer.expect(bundles)
            if request.warn is not None and self.store.remote:
                self.notes.warn_large_values(bundles, self.index, self.large, request.warn)
            for bundle in bundles:
                writer.add(bundle)
            writer.finish()
            fingerprints = self.comparison.finish(request, needs)
            stored = self.comparison.present(request.names.stores - needs.values.keys())
            files = frozenset().union(*(value.pickled.files for value in needs.to_send))
            texts = cell_sources(
                name
                for name in files
                if self.bindings.ranks_without_source(name, "", request.ranks)
            )
            moved_names = [value.name for value in needs.to_send]
            orders = BindOrder(
                python=platform.python_version(),
                files=tuple(writer.files),
                bundles=tuple(bundle.message() for bundle in bundles),
                modules=self.sources.missing_modules(needs.sources, request.ranks),
                sources=texts,
                cells=cell_numbers(texts),
                temporary=tuple(sorted(request.temporary)),
                shown=tuple(displayed_outputs(moved_names, self.namespace)),
                unbound=tuple(sorted(unbound)),
                fresh=request.fresh,
                environ=environ,
                reads=tuple(self.bindings.digests_with_known_names()),
            )
        except BaseException as problem:
            self.store.unpin(writer.keys)
            # Files written before the failure are not needed.
            self.index.sweep()
            if isinstance(problem, OSError):
                raise CaptureError(
                    explain_full_store(problem, [(item.name, item.nbytes) for item in items])
                ) from problem
            raise
        # The ranks have not seen these values: an equal value assigned later is new to them.
        for name in needs.staying:
            fingerprints.pop(name, None)
        manifest = Manifest(
            orders, writer.nbytes, items, fingerprints, stored, request.names, unbound, packed.sent
        )
        # The files stay pinned as long as the manifest exists.
        weakref.finalize(manifest, self.store.unpin, writer.keys).atexit = False
        self.index.set_needs(writer.needs, {*self.namespace, *request.temporary})
        for component in (self.collector, self.comparison, self.notes, self.links):
            component.forget_names(self.namespace)
        return manifest

    def _environ(self, request: ShippingRequest) -> dict[str, str | None]:
        """Return changed environment variables of the notebook that some ranks lack."""
        changed = assignments.changed_environment()
        secret = {name for name in changed if assignments.is_secret_variable(name)}
        if request.note is not None:
            self.notes.report_secrets(secret, request.note)
        # A variable that was sent and has since been deleted, or reset to its value from when
        # skymagic was loaded, is reset on the ranks too.
        restored = self.bindings.sent_environ(request.ranks) - changed.keys()
        current = {
            **{name: value for name, value in changed.items() if name not in secret},
            **{name: os.environ.get(name) for name in restored},
        }
        return self.bindings.missing_environ(current, request.ranks)
