"""Namespace of a rank: binds the values that a cell needs, and packs those to send back."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import linecache
import os
import platform
import secrets
import sys
import types
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from skymagic.content.store import NodeStore
from skymagic.data.bundle import part_fields, read_parts, write_parts
from skymagic.data.namespace import Namespace
from skymagic.data.values import pickling, rebuild, shards
from skymagic.data.values.exceptions import without_locals
from skymagic.data.values.kinds import type_name
from skymagic.data.values.pickled import Pickled
from skymagic.data.values.pickling import Accompanied
from skymagic.data.values.shards import REFUSED, Shards
from skymagic.kernels.rank.importer import RemoteImporter
from skymagic.kernels.rank.missing import missing_name
from skymagic.kernels.rank.object_table import GONE, CodeReads, ObjectTable
from skymagic.kernels.rank.snapshot import NameSnapshot
from skymagic.wire.order import LAST_VALUE
from skymagic.wire.outcome import NameChanges
from skymagic.wire.values import BindOrder, PackedBundle, PackedValue

_SMALL_CONSTANT = 1 << 10
"""Maximum bytes of a number or string that is sent along with the code that uses it."""


class BindError(Exception):
    """A value cannot be rebuilt on this rank.

    Attributes:
        name: the variable, or variables separated by commas.
        reason: description of the error.
        package: the missing or differing package; "" if no package is to blame.
    """

    def __init__(self, name: str, reason: str, package: str = "") -> None:
        super().__init__(f"{name} cannot be rebuilt on this rank: {reason}")
        self.name = name
        self.reason = reason
        self.package = package

    def __reduce__(self) -> tuple[type[BindError], tuple[str, str, str]]:
        return type(self), (self.name, self.reason, self.package)


class RankNamespace:
    """Variables of a rank for the data plane, which binds sent values and reads returned ones.

    Args:
        variables: the rank's global names.
        store_directory: the node's store.
        rank: this rank.
        node: the node that it is on.
    """

    def __init__(
        self, variables: Namespace, store_directory: str, rank: int, node: int = 0
    ) -> None:
        self.variables = variables
        self.rank = rank
        self.node = node
        self.store = NodeStore(store_directory)
        self.importer = RemoteImporter()
        self.held = ObjectTable()
        self.reads = CodeReads(variables)
        # functions that are rebuilt from sent values count as code of this rank
        rebuild.current_context.function_made = self.reads.add
        self._known_reads: Sequence[str] = ()
        self._before = NameSnapshot()
        """The names at the start of the cell."""
        self._shipped: set[str] = set()
        """Names that the notebook has bound here and no cell has rebound since."""

    def bind(self, orders: BindOrder) -> None:
        """Bind every name in the orders for this rank; on an error, bind none.

        Raises:
            BindError: a value or a module cannot be rebuilt here.
        """
        for name, value in orders.environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for name, text in orders.sources.items():
            # no modification time: otherwise `linecache.checkcache` would drop it, as it is no file
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        self._modules(orders)
        own_bundles = [bundle for bundle in orders.bundles if self._is_for_this_rank(bundle.ranks)]
        if orders.fresh:
            rebuild.forget_classes()
        with self._all_or_none([name for bundle in own_bundles for name in bundle.names]):
            self._bind_in_order(own_bundles, orders)
        self._shipped.update(name for bundle in own_bundles for name in bundle.names)
        for name in orders.unbound:
            self.variables.pop(name, None)
        self._known_reads = orders.reads
        self._before = NameSnapshot(self.variables)
        self.held.begin_cell()

    @contextlib.contextmanager
    def _all_or_none(self, names: list[str]) -> Iterator[None]:
        """Restore the previous values of these names on an error."""
        before = {name: self.variables[name] for name in names if name in self.variables}
        try:
            yield
        except BaseException:
            for name in names:
                self.variables.pop(name, None)
            self.variables.update(before)
            raise

    def _bind_in_order(self, bundles: list[PackedBundle], orders: BindOrder) -> None:
        """Bind each value at once, because the code that rebuilds the next may use it."""
        problems: list[BindError] = []
        opened: list[_Opened] = []
        # find all referenced objects before anything changes
        linked = [
            (bundle, [self.held.find((link.table, link.number)) for link in bundle.links])
            for bundle in bundles
        ]
        for bundle, links in linked:
            try:
                opened.append(self._open(bundle, links, orders))
                self.variables.update(opened[-1].values)
            except BindError as problem:
                problems.append(problem)
        if len(problems) > 1:
            names = ", ".join(problem.name for problem in problems)
            reasons = "; ".join(dict.fromkeys(problem.reason for problem in problems))
            raise BindError(names, reasons, problems[0].package) from problems[0]
        if problems:
            raise problems[0]
        # emptied before `settle`, which counts references: `opened` would hold all objects
        while opened:
            self.held.keep(*opened.pop())
        self.held.settle()

    def drop_temporary(self, orders: BindOrder) -> None:
        """Delete names that only the finished cell needed."""
        for name in orders.temporary:
            self.variables.pop(name, None)

    def changes(self, bound: Container[str] = ()) -> NameChanges:
        """Return the names that a cell has rebound or deleted since `bind`, compared by identity.

        Source code could not answer this: it does not show which assignments ran, nor the names
        that ``%run`` or ``globals()`` bind.

        Args:
            bound: names that the cell has bound, possibly to the same objects as before.
        """
        self.held.end_cell()
        before, self._before = self._before, NameSnapshot()
        rebound = [
            name
            for name, value in self.variables.items()
            if name in bound or not before.has(name, value)
        ]
        deleted = [name for name in before if name not in self.variables]
        self._shipped.difference_update(rebound, deleted)
        self.reads.bound(self.variables[name] for name in rebound)
        reads = self.reads.report(self._known_reads)
        unlinked, lost = self.held.report(self.variables)
        return NameChanges(tuple(rebound), tuple(deleted), unlinked, lost, reads)

    def missing(self, problem: BaseException | None) -> str:
        """Return the name that a cell did not find here.

        The result is "" if the cell failed for another reason or deleted the name itself.
        """
        name = missing_name(problem, self.variables)
        return "" if name in self._before else name

    @contextlib.contextmanager
    def gathered(self, values: Mapping[str, object], sent: Container[str]) -> Iterator[Shards]:
        """Gather values that are complete only across several ranks, for `pack`.

        Runs on all participating ranks, even on those that do not pack.
        """
        with shards.gathered_shards(
            values, lambda value, found: pickling.dumps(value, self.variables, parts=found), sent
        ) as parts:
            yield parts

    def pack(self, values: Mapping[str, object], parts: Shards = REFUSED) -> dict[str, PackedValue]:
        """Pickle values for the notebook.

        Small ones go into the reference, others into a file of the store.

        Args:
            parts: result of `gathered`.
        """
        refs: dict[str, PackedValue] = {}
        pickles: dict[str, Pickled] = {}
        for name, value in values.items():
            try:
                pickles[name] = pickling.dumps(value, self.variables, parts=parts)
            except Exception as problem:
                refs[name] = PackedValue(error=_pickling_problem(name, value, problem, parts))
        names = list(pickles)
        for group in pickling.group_by_shared_objects(list(pickles.values())):
            refs.update(self._pack([names[index] for index in group], values, pickles, parts))
        return {name: replace(ref, type=type_name(values[name])) for name, ref in refs.items()}

    def pack_exception(self, problem: BaseException) -> PackedValue:
        """Pickle an exception for the notebook.

        Unpicklable parts, such as a lock among its attributes, are left out.
        """
        packed = self.pack({"exception": problem})["exception"]
        if packed.error:
            with contextlib.suppress(Exception):
                packed = self.pack({"exception": without_locals(problem, self._travels)})[
                    "exception"
                ]
        return packed

    def _travels(self, value: object) -> bool:
        try:
            pickling.dumps(value, self.variables)
        except Exception:
            return False
        return True

    def _is_for_this_rank(self, ranks: tuple[int, ...] | None) -> bool:
        return ranks is None or self.rank in ranks

    def _modules(self, orders: BindOrder) -> None:
        own_modules = [sent.module for sent in orders.modules if self._is_for_this_rank(sent.ranks)]
        try:
            self.importer.install(own_modules)
        except Exception as problem:
            names = ", ".join(module.name for module in own_modules)
            raise BindError(
                names, f"the module's code raised {type(problem).__name__}: {problem}"
            ) from problem

    def _fallback_objects(
        self, bundle: PackedBundle, links: list[object], orders: BindOrder
    ) -> list[object]:
        """Return the objects that a bundle refers to, replacing those that are gone by copies."""
        if all(linked is not GONE for linked in links):
            return links
        rebuilt: dict[int, object] = {}
        if bundle.fallback is not None:
            header, buffers = read_parts(
                bundle.fallback, lambda number: self.store.map(orders.files[number])
            )
            value = pickling.loads(header, buffers, self.variables, memo=rebuilt)
            rebuilt.update(
                {
                    -1 - index: linked
                    for index, linked in enumerate(_by_name(bundle, value).values())
                }
            )
        objects: list[object] = []
        for link, linked in zip(bundle.links, links, strict=True):
            if linked is not GONE:
                objects.append(linked)
            elif link.fallback_number is not None and link.fallback_number in rebuilt:
                objects.append(rebuilt[link.fallback_number])
            else:
                raise LookupError(
                    "the rank has just dropped an object that it refers to; run the cell again"
                )
        return objects

    def _open(self, bundle: PackedBundle, links: list[object], orders: BindOrder) -> _Opened:
        names = list(bundle.names)
        memo: dict[int, object] | None = {} if bundle.table is not None else None
        try:
            notebook_version, own_version = orders.python, platform.python_version()
            # another version's code would crash this interpreter
            if bundle.code and notebook_version.split(".")[:2] != own_version.split(".")[:2]:
                raise _OtherPython(
                    "functions and classes of a notebook travel between equal versions "
                    "of Python only: "
                    f"{notebook_version} there, {own_version} here"
                )
            for module in bundle.imports:
                importlib.import_module(module)
            header, buffers = read_parts(
                bundle, lambda number: self.store.map(orders.files[number])
            )
            objects = self._fallback_objects(bundle, links, orders)
            value = pickling.loads(header, buffers, self.variables, links=objects, memo=memo)
        except Exception as problem:
            raise self._bind_error(names, problem, bundle) from problem
        return _Opened(bundle, _by_name(bundle, value), memo or {})

    def _bind_error(
        self,
        names: list[str],
        problem: Exception,
        bundle: PackedBundle,
    ) -> BindError:
        name = ", ".join(names)
        if isinstance(problem, _OtherPython):
            return BindError(name, str(problem), "python")
        if isinstance(problem, ModuleNotFoundError) and problem.name:
            package = problem.name.partition(".")[0]
            notebook_version = bundle.versions.get(package) or ""
            requirement = f"{package} {notebook_version}".strip()
            return BindError(
                name, f"{package} is not installed here; the notebook has {requirement}", package
            )
        # imported on demand, because it reads the environment
        from skymagic.data.capture.installed import (
            version,
        )

        skew = [
            (package, notebook_version, version(package))
            for package, notebook_version in bundle.versions.items()
            if notebook_version and version(package) != notebook_version
        ]
        text = f"{type(problem).__name__}: {problem}"
        if skew:
            versions = ", ".join(
                f"{name} {notebook_version} there and {own_version or 'none'} here"
                for name, notebook_version, own_version in skew
            )
            return BindError(name, f"{text} (versions differ: {versions})", skew[0][0])
        return BindError(name, text)

    def _pack(
        self,
        names: list[str],
        values: Mapping[str, object],
        pickles: Mapping[str, Pickled],
        parts: Shards,
    ) -> dict[str, PackedValue]:
        """Pack values that share objects into one pickle, and return a reference for each."""
        pickled = pickles[names[0]]
        try:
            together = tuple(values[name] for name in names)
            used = self._used_to_rebuild([pickles[name] for name in names])
            if len(names) > 1 or used:
                value = together if len(names) > 1 else together[0]
                pickled = pickling.dumps(
                    Accompanied(used, value) if used else value, self.variables, parts=parts
                )
            ref = self.write(pickled)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
            return {name: PackedValue(error=error) for name in names}
        if len(names) == 1:
            return {names[0]: ref}
        ref = replace(ref, group=secrets.token_hex(8), count=len(names))
        return {name: replace(ref, index=index) for index, name in enumerate(names)}

    def _used_to_rebuild(self, pickles: list[Pickled]) -> dict[str, object]:
        """Return code and constants of this rank's own cells that rebuilding the values may use."""
        todo = {name for pickled in pickles if pickled.active for name in pickled.uses}
        passive: dict[str, object] = {}
        active: dict[str, object] = {}
        while todo:
            name = todo.pop()
            value = self.variables.get(name)
            from_notebook = name in self._shipped and self._before.has(name, value)
            if (
                name in passive
                or name in active
                or from_notebook
                or not is_own_code(value, self.variables)
            ):
                continue
            try:
                pickled = pickling.dumps(value, self.variables)
            except Exception:
                continue
            (active if pickled.active else passive)[name] = value
            todo.update(pickled.uses)
        return {**passive, **active}

    def write(self, pickled: Pickled) -> PackedValue:
        """Write a pickle for the notebook or another rank, and return its location."""
        file, locations = write_parts([*pickled.pieces, *pickled.buffers], self.store.give)
        header, buffers = part_fields(locations, len(pickled.pieces))
        return PackedValue(header, buffers, file, self.node, pickled.nbytes)


def _pickling_problem(name: str, value: object, problem: Exception, parts: Shards) -> str:
    """Explain why a value cannot be pickled; our own refusals are complete sentences."""
    if isinstance(parts, shards.GatheredShards) and name in parts.problems:
        return parts.problems[name]
    if isinstance(problem, shards.PartlyElsewhere):
        return str(problem)
    if isinstance(value, types.GeneratorType):
        items = "list(…)" if name == LAST_VALUE else f"{name} = list({name})"
        return f"a generator cannot be sent to the notebook; end the cell with {items}"
    if isinstance(value, types.AsyncGeneratorType):
        return (
            "an asynchronous generator cannot be sent to the notebook; "
            "collect its items: [item async for item in …]"
        )
    reason = f"{type(problem).__name__}: {problem}"
    remedy = "; put list(…) in its place" if "generator' object" in reason else ""
    return f"{reason}{remedy}"


def is_own_code(value: object, variables: Namespace) -> bool:
    """Return True if a value is code of a cell, or small and plain."""
    if isinstance(value, types.FunctionType | type):
        return value.__module__ == variables.get("__name__")
    return (
        isinstance(value, (int, float, complex, str, bytes))
        and sys.getsizeof(value) < _SMALL_CONSTANT
    )


class _Opened(NamedTuple):
    """Contents of a bundle."""

    bundle: PackedBundle
    values: Namespace
    memo: dict[int, object]


def _by_name(bundle: PackedBundle, value: Any) -> Namespace:
    names = bundle.names
    return {names[0]: value} if len(names) == 1 else dict(zip(names, value, strict=True))


class _OtherPython(Exception):
    """Code from another version of Python, which would crash this one."""
