"""The notebook's side of the data plane: what must travel to which rank, and values on their way back."""

from __future__ import annotations

import base64
import importlib.metadata
import platform
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from skymagic import modules, pickling
from skymagic.capture import CellNames, cell_names, reach
from skymagic.errors import CaptureError
from skymagic.pickling import LARGE, Pickled
from skymagic.refuse import Refusal, message, refusal, type_name
from skymagic.store import Buffer, NodeStore, digest

INLINE = 64 << 10
"""Values below this many bytes travel in the orders themselves."""

_INLINE_IN_ALL = 1 << 20
_ALIGN = 64
_ATOMS = (int, float, bool, type(None), complex, str, bytes)


@dataclass(frozen=True)
class Item:
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
    forgotten: frozenset[str] = frozenset()
    """Names that the cell deletes."""


class _Place(NamedTuple):
    """Where a blob lies."""

    key: str
    offset: int
    nbytes: int


@dataclass
class _Value:
    """A name's value in this cell."""

    name: str
    why: str
    value: object
    pickled: Pickled
    hashes: list[str | None]
    """Of its large pieces and buffers, in this order; None where nothing of that length was ever seen."""
    print: str | None


class Shipper:
    """Knows what the ranks of one pool hold, and makes the orders that bring them what a cell needs.

    Args:
        store: the node's store.
        namespace: the notebook's global names; read at each ``prepare``.
        folder: the notebook's folder: modules in it travel as source.
    """

    def __init__(self, store: NodeStore, namespace: dict[str, Any], folder: str) -> None:
        self.store = store
        self.namespace = namespace
        self.folder = folder
        self._lock = threading.RLock()
        self._landed: dict[int, dict[str, str]] = {}
        self._sent: dict[int, dict[str, str]] = {}
        self._atoms: dict[str, tuple[object, str]] = {}
        self._blobs: dict[str, _Place] = {}
        self._lengths: set[int] = set()
        self._needs: dict[str, set[str]] = {}
        self._gone: set[str] = set()

    # What a cell needs

    def prepare(
        self,
        source: str,
        ranks: Sequence[int],
        *,
        push: Sequence[str] = (),
        no_push: bool | Sequence[str] = False,
        fresh: bool = False,
        dry_run: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Cargo:
        """Find what a cell needs, and write what some rank has not got into the store.

        Args:
            source: the cell as plain Python.
            ranks: where it will run.
            push: names that travel though the cell does not load them.
            no_push: True: nothing travels; or names that stay here.
            fresh: send everything again.
            dry_run: only look; nothing is written and ``orders`` is empty.
            progress: called with a name, the bytes written so far, and the bytes to write.

        Raises:
            SyntaxError: the cell does not compile.
            CaptureError: variables cannot travel; names them all. Nothing has been written.
            OSError: no room in the store.
        """
        names = cell_names(source)
        with self._lock:
            kept = set() if isinstance(no_push, bool) else set(no_push)
            wanted = set() if no_push is True else {*names.loads, *push} - kept
            values, why = self._pickle(wanted, kept, push)
            sources = self._modules(names, values.values())
            hashes = {name: each.hash for name, each in sources.items()}
            for value in values.values():
                self._fingerprint(value, hashes, ranks)
            todo = {name: self._lacking(value, ranks, fresh) for name, value in values.items()}
            items = tuple(
                Item(name, why[name], value.pickled.nbytes, bool(todo[name]), type_name(value.value))
                for name, value in values.items()
            )
            if dry_run:
                return Cargo({}, 0, items)
            loading = _Loading(self, ranks, sources, progress)
            loading.load([value for name, value in values.items() if todo[name]], todo, names)
            prints = {name: value.print or "" for name, value in values.items()}
            prints.update(self._standing(names, set(values)))
            cargo = Cargo(loading.orders, loading.nbytes, items, prints, names.deletes)
            self._keep(values, prints, loading, cargo)
            return cargo

    def landed(self, cargo: Cargo, rank: int) -> None:
        """This rank has bound the cargo; twice is safe."""
        with self._lock:
            held = self._landed.setdefault(rank, {})
            held.update(cargo.prints)
            for name in cargo.forgotten:
                held.pop(name, None)
            sent = self._sent.setdefault(rank, {})
            sent.update({each["name"]: each["hash"] for each in cargo.orders.get("modules", ())})
            sent.update(dict.fromkeys(cargo.orders.get("sources", ()), ""))

    def absent(self, rank: int, names: Iterable[str]) -> None:
        """This rank has no such names after all: a cell that should have made them failed before it did."""
        with self._lock:
            for name in names:
                self._landed.get(rank, {}).pop(name, None)

    def gathered(self, names: Iterable[str], ranks: Iterable[int]) -> None:
        """The notebook's present values of these names came from these ranks, which keep their own."""
        with self._lock:
            prints = self._standing(CellNames(*[frozenset()] * 5), set(), names)
            for rank in ranks:
                self._landed.setdefault(rank, {}).update(prints)

    def forget(self, ranks: Iterable[int]) -> None:
        """These ranks were respawned and hold nothing."""
        with self._lock:
            for rank in ranks:
                self._landed.pop(rank, None)
                self._sent.pop(rank, None)

    def unpack(self, ref: Mapping[str, Any]) -> Any:
        """Rebuild a value that ``Hold.pack`` packed; its file is unlinked. The value outlives the pool.

        Raises:
            FileNotFoundError: it has been unpacked before.
            Exception: whatever the value's own reconstruction raises.
        """
        view = self.store.take(ref["file"]) if ref.get("file") else memoryview(b"")
        header = (
            [base64.b64decode(ref["header"])]
            if ref.get("header")
            else [view[a : a + n] for a, n in ref["pieces"]]
        )
        buffers = [view[offset : offset + nbytes] for offset, nbytes in ref["buffers"]]
        return pickling.loads(header[0] if len(header) == 1 else header, buffers, self.namespace)

    # Steps

    def _pickle(
        self, wanted: set[str], kept: set[str], push: Sequence[str]
    ) -> tuple[dict[str, _Value], dict[str, str]]:
        values: dict[str, _Value] = {}
        failed: dict[str, Exception] = {}

        def uses(name: str, value: object) -> Mapping[str, str]:
            if name in kept:
                return {}
            try:
                pickled = self._dumps(name, value)
            except Exception as problem:
                failed[name] = problem
                return {}
            values[name] = _Value(name, "", value, pickled, [], None)
            return {used: where for used, where in pickled.uses.items() if used not in kept}

        why = reach(wanted, self.namespace, uses)
        why.update({name: "--push" for name in push if name in why})
        missing = [name for name in push if name not in self.namespace]
        refusals = [self._refuse(name, why[name], problem) for name, problem in failed.items()]
        refusals += [
            Refusal(
                name, "no value", "--push", "nothing in this notebook has this name", "check the spelling"
            )
            for name in missing
        ]
        if refusals:
            raise CaptureError(message(refusals))
        return values, why

    def _dumps(self, name: str, value: object) -> Pickled:
        known = self._atoms.get(name)
        if known is not None and known[0] is value and type(value) in _ATOMS:
            return _unchanged(value)
        return pickling.dumps(value, self.namespace, folder=self.folder)

    def _refuse(self, name: str, why: str, problem: Exception) -> Refusal:
        def attempt(part: object) -> object:
            return pickling.dumps(part, self.namespace, folder=None)

        return refusal(name, self.namespace[name], why, problem, attempt)

    def _modules(self, names: CellNames, values: Iterable[_Value]) -> dict[str, modules.ModuleSource]:
        wanted = set(names.imports)
        for value in values:
            wanted |= value.pickled.modules
        return modules.collect(sorted(wanted), self.folder) if wanted else {}

    def _fingerprint(self, value: _Value, sources: Mapping[str, str], ranks: Sequence[int]) -> None:
        known = self._atoms.get(value.name)
        if known is not None and known[0] is value.value and value.pickled.keep is _UNCHANGED:
            value.print = known[1]
            return
        new = not any(value.name in self._landed.get(rank, ()) for rank in ranks)
        large = [*(piece for piece in value.pickled.pieces if len(piece) >= LARGE), *value.pickled.buffers]
        value.hashes = [
            None if new and len(blob) >= LARGE and len(blob) not in self._lengths else digest([blob])
            for blob in large
        ]
        if None not in value.hashes:
            value.print = self._print(value, sources)

    def _print(self, value: _Value, sources: Mapping[str, str] | None = None) -> str:
        small = [piece for piece in value.pickled.pieces if len(piece) < LARGE]
        text = [str(each).encode() for each in value.hashes]
        local = [
            sources[name].encode() for name in sorted(value.pickled.modules) if sources and name in sources
        ]
        result = digest([*small, *text, *local])
        if type(value.value) in _ATOMS and value.pickled.nbytes < INLINE:
            self._atoms[value.name] = (value.value, result)
        return result

    def _lacking(self, value: _Value, ranks: Sequence[int], fresh: bool) -> list[int]:
        if fresh or value.print is None:
            return list(ranks)
        return [rank for rank in ranks if self._landed.get(rank, {}).get(value.name) != value.print]

    def _standing(self, names: CellNames, loaded: set[str], more: Iterable[str] = ()) -> dict[str, str]:
        """Fingerprints of the notebook's values that the cell will hide behind its own."""
        prints = {}
        for name in (*(names.stores - loaded), *more):
            if name in self.namespace:
                value = self.namespace[name]
                try:
                    standing = _Value(
                        name, "", value, pickling.dumps(value, self.namespace, folder=self.folder), [], None
                    )
                    standing.hashes = [digest([blob]) for blob in _blobs(standing.pickled)]
                    local = modules.collect(standing.pickled.modules, self.folder)
                    prints[name] = self._print(standing, {each: found.hash for each, found in local.items()})
                except Exception:
                    prints[name] = f"id {id(value)}"
        return prints

    def _keep(
        self, values: Mapping[str, _Value], prints: Mapping[str, str], loading: _Loading, cargo: Cargo
    ) -> None:
        """Note which files are needed by which names, and drop those that no name needs any more."""
        for name, value in values.items():
            keys = {self._blobs[each].key for each in value.hashes if each in self._blobs}
            if loading.packs.get(name):
                keys.add(loading.packs[name])
            elif name in loading.moved:
                pass
            else:
                keys |= self._needs.get(name, set())
            self._needs[name] = keys
        gone = {name for name in self._needs if name not in self.namespace}
        for name in gone & self._gone:
            del self._needs[name]
        for name in [name for name in self._atoms if name not in self.namespace]:
            del self._atoms[name]
        self._gone = gone
        self.store.pin(loading.keys)
        weakref.finalize(cargo, _unpin, weakref.ref(self), frozenset(loading.keys)).atexit = False
        self.sweep()

    def sweep(self) -> None:
        """Unlink the files that neither a name of the notebook nor a cargo on its way needs."""
        with self._lock:
            needed = set().union(*self._needs.values())
            idle = [key for key in self.store.keys() if key not in needed and not self.store.pinned(key)]
            self.store.drop(idle)
            here = self.store.keys()
            self._blobs = {each: place for each, place in self._blobs.items() if place.key in here}


def _unpin(shipper: weakref.ref[Shipper], keys: frozenset[str]) -> None:
    alive = shipper()
    if alive is not None:
        alive.store.unpin(keys)


class _Loading:
    """Writes one cargo's values and describes them."""

    def __init__(
        self,
        shipper: Shipper,
        ranks: Sequence[int],
        sources: Mapping[str, modules.ModuleSource],
        progress: Callable[[str, int, int], None] | None,
    ) -> None:
        self.shipper = shipper
        self.ranks = ranks
        self.sources = sources
        self.progress = progress or (lambda name, done, total: None)
        self.nbytes = 0
        self.moved: set[str] = set()
        self.packs: dict[str, str] = {}
        self.keys: set[str] = set()
        self.orders: dict[str, Any] = {"python": platform.python_version()}
        self._files: dict[str, int] = {}
        self._inline = 0

    def load(self, values: list[_Value], todo: Mapping[str, list[int]], names: CellNames) -> None:
        total = sum(value.pickled.nbytes for value in values)
        parcels = []
        pending: list[tuple[dict[str, Any], list[Buffer], list[_Value]]] = []
        tokens = names.attributes.union(*(value.pickled.attributes for value in values))
        for group in _groups(values):
            self.progress(group[0].name, self.nbytes, total)
            parcel = self._parcel(group, todo, tokens, pending)
            parcels.append(parcel)
        self._pack_small(pending)
        self.orders["parcels"] = parcels
        self.orders["modules"] = self._modules()
        self.orders["sources"] = self._sources(values)
        self.orders["files"] = [self.shipper.store.name(key) for key in self._files]
        self.orders["stores"] = sorted(names.stores)
        if values:
            self.progress(values[-1].name, total, total)

    def _parcel(
        self,
        group: list[_Value],
        todo: Mapping[str, list[int]],
        tokens: frozenset[str],
        pending: list[tuple[dict[str, Any], list[Buffer], list[_Value]]],
    ) -> dict[str, Any]:
        names = [value.name for value in group]
        ranks = sorted(set().union(*(todo[name] for name in names)))
        pickled = group[0].pickled
        hashes = group[0].hashes
        if len(group) > 1:
            shipper = self.shipper
            pickled = pickling.dumps(
                tuple(value.value for value in group), shipper.namespace, folder=shipper.folder
            )
            hashes = [None] * len(_blobs(pickled))
        parcel: dict[str, Any] = {
            "names": names,
            "ranks": None if ranks == sorted(self.ranks) else ranks,
            "versions": {name: version(name) for name in sorted(pickled.packages)},
            "imports": _submodules(group, tokens),
        }
        self.moved.update(names)
        if pickled.nbytes < INLINE:
            parts = [*pickled.pieces, *pickled.buffers]
            pending.append((parcel, parts, group))
            parcel["split"] = len(pickled.pieces)
        else:
            self._blobs_of(parcel, pickled, hashes, group)
        for value in group:
            if value.print is None:
                value.hashes = (
                    [digest([blob]) for blob in _blobs(value.pickled)] if len(group) > 1 else value.hashes
                )
                value.print = self.shipper._print(
                    value, {name: each.hash for name, each in self.sources.items()}
                )
        return parcel

    def _blobs_of(
        self, parcel: dict[str, Any], pickled: Pickled, hashes: list[str | None], group: list[_Value]
    ) -> None:
        """Write the large parts as files of their own, and the rest as one."""
        shipper = self.shipper
        rest: list[Buffer] = []
        places: list[_Place | int] = []
        offset = 0
        blobs = iter(range(len(hashes)))
        for part in (*pickled.pieces, *pickled.buffers):
            is_piece = len(places) < len(pickled.pieces)
            index = next(blobs) if not is_piece or len(part) >= LARGE else None
            known = shipper._blobs.get(hashes[index] or "") if index is not None else None
            if known is not None and not shipper.store.have([known.key]):
                places.append(known)
            elif index is not None and len(part) >= LARGE:
                key = shipper.store.put(hashes[index], [part], len(part))
                place = _Place(key, 0, len(part))
                shipper._blobs[key] = place
                shipper._lengths.add(len(part))
                hashes[index] = key
                self.keys.add(key)
                self.nbytes += len(part)
                places.append(place)
            else:
                places.append(offset)
                rest += [part, bytes(-len(part) % _ALIGN)]
                offset += len(part) + -len(part) % _ALIGN
        pack = shipper.store.put(None, rest, offset) if rest else ""
        self.nbytes += offset
        if pack:
            self.keys.add(pack)
            self.packs.update({value.name: pack for value in group})
        lengths = [len(part) for part in (*pickled.pieces, *pickled.buffers)]
        described = []
        for index, place in enumerate(places):
            resolved = _Place(pack, place, lengths[index]) if isinstance(place, int) else place
            described.append([self._file(resolved.key), resolved.offset, resolved.nbytes])
        for index, buffer in enumerate(pickled.buffers):
            spot = places[len(pickled.pieces) + index]
            number = len(hashes) - len(pickled.buffers) + index
            if isinstance(spot, int):
                each = hashes[number] or digest([buffer])
                hashes[number] = each
                shipper._blobs[each] = _Place(pack, spot, len(buffer))
        parcel["header"] = described[: len(pickled.pieces)]
        parcel["buffers"] = described[len(pickled.pieces) :]

    def _pack_small(self, pending: list[tuple[dict[str, Any], list[Buffer], list[_Value]]]) -> None:
        """Put small values into the orders, or all into one file when they are many."""
        size = sum(len(part) for _, parts, _ in pending for part in parts)
        inline = size <= _INLINE_IN_ALL
        rest: list[Buffer] = []
        offset = 0
        for parcel, parts, _ in pending:
            described: list[Any] = []
            for part in parts:
                if inline:
                    described.append(base64.b64encode(part).decode())
                else:
                    described.append([0, offset, len(part)])
                    rest += [part, bytes(-len(part) % _ALIGN)]
                    offset += len(part) + -len(part) % _ALIGN
            split = parcel.pop("split")
            parcel["header"], parcel["buffers"] = described[:split], described[split:]
        self.nbytes += size
        if inline or not pending:
            return
        pack = self.shipper.store.put(None, rest, offset)
        self.keys.add(pack)
        number = self._file(pack)
        for parcel, _, group in pending:
            for place in (*parcel["header"], *parcel["buffers"]):
                place[0] = number
            self.packs.update({value.name: pack for value in group})

    def _file(self, key: str) -> int:
        self.keys.add(key)
        return self._files.setdefault(key, len(self._files))

    def _modules(self) -> list[dict[str, Any]]:
        found = []
        for name, source in self.sources.items():
            ranks = [rank for rank in self.ranks if self.shipper._sent.get(rank, {}).get(name) != source.hash]
            if ranks:
                found.append(
                    {**modules.as_plain(source), "ranks": None if len(ranks) == len(self.ranks) else ranks}
                )
        return found

    def _sources(self, values: Iterable[_Value]) -> dict[str, str]:
        files: set[str] = set().union(*(value.pickled.files for value in values))
        sent = [self.shipper._sent.get(rank, {}) for rank in self.ranks]
        return pickling.cell_sources(name for name in files if not all(name in each for each in sent))


_UNCHANGED = object()


def _unchanged(value: object) -> Pickled:
    """Stands for a value that is known by identity; pickled only when some rank needs it."""
    return pickling.dumps(value, {}, folder=None)


def _blobs(pickled: Pickled) -> list[Buffer]:
    """What is hashed on its own: large pieces, then buffers."""
    return [*(piece for piece in pickled.pieces if len(piece) >= LARGE), *pickled.buffers]


def _groups(values: list[_Value]) -> list[list[_Value]]:
    """Values that share an object or memory, together; in the order given."""
    parent = list(range(len(values)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index

    first: dict[int, int] = {}
    spans = []
    for index, value in enumerate(values):
        for mark in value.pickled.marks:
            parent[root(index)] = root(first.setdefault(mark, index))
        spans += [(span.start, span.stop, index) for span in value.pickled.spans]
    reach_, last = -1, -1
    for start, stop, index in sorted(spans):
        if start < reach_:
            parent[root(index)] = root(last)
        if stop > reach_:
            reach_, last = stop, index
    groups: dict[int, list[_Value]] = {}
    for index, value in enumerate(values):
        groups.setdefault(root(index), []).append(value)
    return list(groups.values())


def _submodules(group: list[_Value], tokens: frozenset[str]) -> list[str]:
    """Submodules that are loaded here and that the code may reach through a package."""
    found = []
    for value in group:
        if isinstance(value.value, types.ModuleType) and hasattr(value.value, "__path__"):
            prefix = value.value.__name__ + "."
            found += [
                name
                for name in list(sys.modules)
                if name.startswith(prefix) and tokens.issuperset(name[len(prefix) :].split("."))
            ]
    return sorted(found)


@lru_cache(maxsize=1024)
def version(package: str) -> str:
    """A package's version here, or an empty string."""
    known = getattr(sys.modules.get(package), "__version__", None)
    if known is not None:
        return str(known)
    if package in sys.stdlib_module_names:
        return ""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
