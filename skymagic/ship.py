"""The notebook's side of the data plane: what must travel to which rank, and values on their way back."""

from __future__ import annotations

import base64
import contextlib
import platform
import threading
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from skymagic import modules, pickling
from skymagic.capture import CellNames, cell_names, reach
from skymagic.errors import CaptureError
from skymagic.kinds import type_name
from skymagic.parcels import INLINE, Loading, Parcel, Progress, Value, bundles, groups, parts_of, submodules
from skymagic.refuse import Refusal, message, no_room, refusal
from skymagic.shelf import Shelf
from skymagic.store import NodeStore

_ATOMS = (int, float, bool, type(None), complex, str, bytes)


class Item(NamedTuple):
    """A variable that a cell needs, as ``--dry-run`` shows it."""

    name: str
    why: str
    """``"the cell"``, ``"used by train"`` or ``"--push"``."""
    nbytes: int
    """Length of the pickled value, in bytes."""
    moved: bool
    """Whether some rank has it not yet."""
    type: str


@dataclass(frozen=True, eq=False)
class Cargo:
    """What one cell needs on the ranks."""

    orders: dict[str, Any]
    """For ``Hold.bind``: plain values that JSON can hold."""
    nbytes: int
    """Bytes that were written or are sent with the orders."""
    items: tuple[Item, ...]
    prints: Mapping[str, str] = field(default_factory=dict)
    """Name → fingerprint of the notebook's value, for every name that the cell loads or stores."""
    names: CellNames = field(default_factory=CellNames)


@dataclass
class _Rank:
    """What a rank has."""

    prints: dict[str, str] = field(default_factory=dict)
    """Name → fingerprint that the notebook's value had when the rank's binding was made."""
    own: set[str] = field(default_factory=set)
    """Names that a cell has bound on the rank since they were shipped."""
    sources: dict[str, str] = field(default_factory=dict)
    """Local modules and cells that it has, with their hashes."""


class Shipper:
    """Knows what the ranks of one pool hold, and makes the orders that bring them what a cell needs.

    A rank keeps its own binding of a name until the notebook's value of that name changes.

    Args:
        store: the node's store.
        namespace: the notebook's global names; read at each ``prepare``.
        folder: the notebook's folder: modules in it travel as source.
    """

    def __init__(self, store: NodeStore, namespace: dict[str, Any], folder: str) -> None:
        self.store = store
        self.namespace = namespace
        self.folder = folder
        self.shelf = Shelf(store)
        self._lock = threading.RLock()
        self._ranks: dict[int, _Rank] = {}
        self._atoms: dict[str, Value] = {}
        self._odd: dict[str, tuple[object, str]] = {}
        self._opened: dict[str, dict[int, Any]] = {}

    def prepare(
        self,
        source: str,
        ranks: Sequence[int],
        *,
        push: Sequence[str] = (),
        no_push: bool | Sequence[str] = False,
        fresh: bool = False,
        extra: Mapping[str, object] | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> Cargo:
        """Find what a cell needs, and write what some rank has not got into the store.

        Args:
            source: the cell as plain Python.
            ranks: where it will run.
            push: names that travel though the cell does not load them.
            no_push: True: nothing travels; or names that stay here.
            fresh: send everything again.
            extra: values by name that travel beside the notebook's own, always, for this cell alone: the ranks forget
                them after it. A name of the notebook gives way to them.
            dry_run: only look; nothing is written and ``orders`` is empty.
            progress: called with a name, the bytes written so far, and the bytes to write.

        Raises:
            SyntaxError: the cell does not compile.
            CaptureError: variables cannot travel, all of them named, or there is no room for them. No rank has got
                anything.
        """
        names = cell_names(source)
        with self._lock:
            kept = frozenset() if isinstance(no_push, bool) else frozenset(no_push)
            extra = extra or {}
            wanted = {*(names.loads if no_push is not True else ()), *push, *extra} - kept
            values, why = self._collect(
                wanted, {**self.namespace, **extra} if extra else self.namespace, kept, push, ranks
            )
            sources = self._modules(names, values.values())
            hashes = {name: module.hash for name, module in sources.items()}
            lacking = self._lacking(values, ranks, values if fresh else extra, hashes)
            items = tuple(
                Item(name, why[name], value.pickled.nbytes, bool(lacking[name]), type_name(value.value))
                for name, value in values.items()
            )
            if dry_run:
                return Cargo({}, 0, items, names=names)
            return self._load(names, ranks, values, lacking, sources, items, frozenset(extra), progress)

    def landed(self, cargo: Cargo, rank: int) -> None:
        """This rank has bound the cargo, and is running or has run its cell; twice is safe."""
        with self._lock:
            state = self._ranks.setdefault(rank, _Rank())
            for parcel in cargo.orders.get("parcels", ()):
                if parcel["ranks"] is None or rank in parcel["ranks"]:
                    state.own.difference_update(parcel["names"])
            state.prints.update(cargo.prints)
            state.own |= cargo.names.stores
            for name in cargo.names.deletes:
                state.prints.pop(name, None)
            state.sources.update({each["name"]: each["hash"] for each in cargo.orders.get("modules", ())})
            state.sources.update(dict.fromkeys(cargo.orders.get("sources", ()), ""))

    def absent(self, rank: int, names: Iterable[str]) -> None:
        """This rank has no such names after all: a cell that should have made them failed before it did."""
        with self._lock:
            for name in names:
                self._ranks.setdefault(rank, _Rank()).prints.pop(name, None)

    def gathered(self, names: Iterable[str], ranks: Iterable[int]) -> None:
        """The notebook's present values of these names came from these ranks, which keep their own."""
        with self._lock:
            prints = self._standing(names)
            for rank in ranks:
                self._ranks.setdefault(rank, _Rank()).prints.update(prints)

    def forget(self, ranks: Iterable[int]) -> None:
        """These ranks were started anew and hold nothing."""
        with self._lock:
            for rank in ranks:
                self._ranks.pop(rank, None)

    def unpack(self, ref: Mapping[str, Any]) -> Any:
        """Rebuild a value that ``Hold.pack`` packed; its file is unlinked. The value outlives the pool.

        Raises:
            FileNotFoundError: it has been unpacked before.
            Exception: whatever the value's own reconstruction raises.
        """
        group = ref.get("group")
        if group is None:
            return self._open(ref)
        # Values that share something are one pickle: opened with the first of them, forgotten with the last.
        with self._lock:
            values = self._opened[group] = self._opened.get(group) or dict(enumerate(self._open(ref)))
            value = values.pop(ref["index"])
            if not values:
                del self._opened[group]
            return value

    def _open(self, ref: Mapping[str, Any]) -> Any:
        view = self.store.take(ref["file"]) if ref["file"] else memoryview(b"")
        parts = [
            base64.b64decode(spot) if isinstance(spot, str) else view[spot[0] : spot[0] + spot[1]]
            for spot in ref["parts"]
        ]
        return pickling.loads(parts[: ref["pieces"]], parts[ref["pieces"] :], self.namespace)

    def discard(self, ref: Mapping[str, Any]) -> None:
        """Unlink the file of a value that ``Hold.pack`` packed and that nobody wants; twice is safe."""
        with contextlib.suppress(FileNotFoundError):
            if ref.get("file"):
                self.store.take(ref["file"])

    # -- steps -------------------------------------------------------------------------------------------------------

    def _collect(
        self,
        wanted: set[str],
        space: Mapping[str, object],
        kept: frozenset[str],
        push: Sequence[str],
        ranks: Sequence[int],
    ) -> tuple[dict[str, Value], dict[str, str]]:
        """Pickle the names that a cell needs, and follow the functions in them to further names of `space`."""
        values: dict[str, Value] = {}
        failed: dict[str, BaseException] = {}

        def uses(name: str, value: object) -> Mapping[str, str]:
            try:
                values[name] = self._value(name, value)
            except Exception as problem:
                if not self._stands(name, value, ranks):
                    failed[name] = problem
                return {}
            found = values[name].pickled.uses
            return {used: where for used, where in found.items() if used not in kept} if kept else found

        why = reach(wanted, space, uses)
        why.update({name: "--push" for name in push if name in why})
        refusals = [
            refusal(name, space[name], why[name], problem, self._attempt) for name, problem in failed.items()
        ]
        refusals += [Refusal.missing(name) for name in push if name not in self.namespace]
        failed.clear()  # the tracebacks hold the values
        if refusals:
            raise CaptureError(message(refusals))
        return values, why

    def _value(self, name: str, value: object) -> Value:
        known = self._atoms.get(name)
        if known is not None and known.value is value:
            return known
        made = Value(name, value, pickling.dumps(value, self.namespace, folder=self.folder))
        if type(value) in _ATOMS and made.pickled.nbytes < INLINE:
            self._atoms[name] = made
        return made

    def _attempt(self, part: object) -> object:
        return pickling.dumps(part, self.namespace)

    def _stands(self, name: str, value: object, ranks: Sequence[int]) -> bool:
        """Whether all ranks have their own binding of a name whose value here cannot travel, and is the same still."""
        known = self._odd.get(name)
        if known is None or known[0] is not value:
            return False
        return all(self._print_on(rank, name) == known[1] for rank in ranks)

    def _print_on(self, rank: int, name: str) -> str | None:
        state = self._ranks.get(rank)
        return None if state is None else state.prints.get(name)

    def _modules(self, names: CellNames, values: Iterable[Value]) -> dict[str, modules.ModuleSource]:
        wanted = names.imports.union(*(value.pickled.modules for value in values))
        return modules.collect(sorted(wanted), self.folder) if wanted else {}

    def _lacking(
        self,
        values: Mapping[str, Value],
        ranks: Sequence[int],
        fresh: Container[str],
        hashes: Mapping[str, str],
    ) -> dict[str, list[int]]:
        """For each name, the ranks that have not got the notebook's value."""
        held = [(rank, self._ranks[rank].prints if rank in self._ranks else {}) for rank in ranks]
        lacking = {}
        for name, value in values.items():
            if value.print is None:
                new = name in fresh or not any(name in prints for _, prints in held)
                if value.pickled.plain or self.shelf.identify(value.parts, lazily=new):
                    value.seal(hashes)
            if value.print is None or name in fresh:
                lacking[name] = list(ranks)
            else:
                lacking[name] = [rank for rank, prints in held if prints.get(name) != value.print]
        return lacking

    def _load(
        self,
        names: CellNames,
        ranks: Sequence[int],
        values: dict[str, Value],
        lacking: Mapping[str, list[int]],
        sources: Mapping[str, modules.ModuleSource],
        items: tuple[Item, ...],
        passing: frozenset[str],
        progress: Progress | None,
    ) -> Cargo:
        """Write what is lacking, and make the orders."""
        moved = [value for name, value in values.items() if lacking[name]]
        attributes = names.attributes.union(*(value.pickled.attributes for value in moved))
        loading = Loading(self.shelf, progress, sum(value.pickled.nbytes for value in moved))
        try:
            parcels = []
            held: dict[int, str] = {}
            if moved:
                held = {
                    id(value.value): name
                    for name, value in values.items()
                    if not lacking[name] and type(value.value) not in _ATOMS
                }
            for group in bundles(groups(moved), lacking, held):
                parcel = self._parcel(group, ranks, held, lacking, attributes)
                loading.add(parcel)
                parcels.append(parcel)
            loading.finish()
            hashes = {name: module.hash for name, module in sources.items()}
            for value in moved:
                if not value.pickled.plain:
                    self.shelf.identify(value.parts)
                    value.seal(hashes)
            prints = {name: value.print or "" for name, value in values.items() if name not in passing}
            prints.update(self._standing(names.stores - set(values)))
            orders = {
                "python": platform.python_version(),
                "files": loading.files,
                "parcels": [parcel.plain() for parcel in parcels],
                "modules": self._lacking_modules(sources, ranks),
                "sources": self._lacking_cells(moved, ranks),
                "stores": sorted(names.stores),
                "passing": sorted(passing),
            }
        except BaseException as problem:
            self.store.unpin(loading.keys)
            self.shelf.sweep()
            if isinstance(problem, OSError):
                raise CaptureError(
                    no_room(problem, [(item.name, item.nbytes) for item in items])
                ) from problem
            raise
        cargo = Cargo(orders, loading.nbytes, items, prints, names)
        weakref.finalize(cargo, self.store.unpin, loading.keys).atexit = False
        self.shelf.need(loading.needs, {*self.namespace, *passing})
        self._tidy()
        return cargo

    def _parcel(
        self,
        group: list[Value],
        ranks: Sequence[int],
        held: Mapping[int, str],
        lacking: Mapping[str, list[int]],
        attributes: frozenset[str],
    ) -> Parcel:
        pickled, parts = group[0].pickled, group[0].parts
        if len(group) > 1:
            together = tuple(value.value for value in group)
            pickled = pickling.dumps(together, self.namespace, folder=self.folder)
            parts = parts_of(pickled)
            self.shelf.identify(parts, lazily=True)
        needed = sorted(set().union(*(lacking[value.name] for value in group)))
        return Parcel(
            names=[value.name for value in group],
            ranks=None if needed == sorted(ranks) else needed,
            pickled=pickled,
            parts=parts,
            imports=submodules((value.value for value in group), attributes),
            same=self._same(group, needed, held),
        )

    def _same(self, group: list[Value], needed: list[int], held: Mapping[int, str]) -> str | None:
        """A name for the same object that the ranks have from the notebook, and have not rebound."""
        name = held.get(id(group[0].value))
        if len(group) > 1 or name is None or any(name in self._ranks[rank].own for rank in needed):
            return None
        return name

    def _standing(self, names: Iterable[str]) -> dict[str, str]:
        """Fingerprints of the notebook's present values of names that ranks bind themselves."""
        prints = {}
        for name in names:
            if name not in self.namespace:
                continue
            value = self.namespace[name]
            try:
                standing = self._value(name, value)
                if standing.print is None:
                    self.shelf.identify(standing.parts)
                    local = modules.collect(standing.pickled.modules, self.folder)
                    standing.seal({each: module.hash for each, module in local.items()})
                prints[name] = standing.print or ""
            except Exception:  # it cannot travel, so its identity must do
                known = self._odd.get(name)
                if known is None or known[0] is not value:
                    known = self._odd[name] = (value, f"object {id(value)}")
                prints[name] = known[1]
        return prints

    def _lacking_modules(
        self, sources: Mapping[str, modules.ModuleSource], ranks: Sequence[int]
    ) -> list[dict[str, Any]]:
        found = []
        for name, module in sources.items():
            need = [rank for rank in ranks if self._sources_on(rank).get(name) != module.hash]
            if need:
                found.append({**modules.as_plain(module), "ranks": None if len(need) == len(ranks) else need})
        return found

    def _lacking_cells(self, values: Iterable[Value], ranks: Sequence[int]) -> dict[str, str]:
        files = frozenset().union(*(value.pickled.files for value in values))
        known = [self._sources_on(rank) for rank in ranks]
        return pickling.cell_sources(name for name in files if not all(name in each for each in known))

    def _sources_on(self, rank: int) -> Mapping[str, str]:
        state = self._ranks.get(rank)
        return {} if state is None else state.sources

    def _tidy(self) -> None:
        """Forget names that the notebook has lost."""
        for known in (self._atoms, self._odd):
            for name in [name for name in known if name not in self.namespace]:
                del known[name]
