"""What lies in a store on behalf of a notebook: parts of values by their content, and the names that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from skymagic.data.store.base import Buffer, Store
from skymagic.data.store.bundle import align
from skymagic.data.store.store import LARGE, digest


class Place(NamedTuple):
    """Where a part lies."""

    key: str
    """The file's content hash."""
    offset: int
    nbytes: int


@dataclass
class Part:
    """A piece of a pickled value."""

    data: Buffer
    blob: bool
    """Whether it is found again by its content; the others are small and travel with the orders."""
    hash: str | None = None
    """The content's hash, of a blob; None until it is needed."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return len(self.data)


class Shelf:
    """Parts in one store, each content once.

    Args:
        store: where the files go.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._known: frozenset[str] = frozenset()
        self._places: dict[str, Place] = {}
        self._lengths: set[int] = set()
        self._needs: dict[str, frozenset[str]] = {}
        self._gone: frozenset[str] = frozenset()

    def identify(self, parts: Iterable[Part], *, lazily: bool = False) -> bool:
        """Hash the blobs among the parts; whether all have a hash now.

        Args:
            lazily: leave out large blobs of a length that was never here: they cannot be here, and are hashed as they
                are written.
        """
        complete = True
        for part in parts:
            if part.blob and part.hash is None:
                if lazily and part.nbytes >= LARGE and part.nbytes not in self._lengths:
                    complete = False
                else:
                    part.hash = digest([part.data])
        return complete

    def expect(self, parts: Iterable[Part]) -> None:
        """These parts will be put, as far as they are not here."""
        large = [part for part in parts if part.blob and part.nbytes >= LARGE]
        if large and self.store.remote:
            self.identify(large)
            new = {part.hash or "": part.nbytes for part in large if self.find(part) is None}
            self._known = self.store.expect(new.items())

    def travels(self, parts: Iterable[Part]) -> dict[str, int]:
        """Content and length of the large parts that must be sent, after they were expected."""
        return {
            part.hash: part.nbytes
            for part in parts
            if part.hash and part.nbytes >= LARGE and part.hash not in self._known and self.find(part) is None
        }

    def find(self, part: Part) -> Place | None:
        """Where a part with this content lies, if it is here."""
        place = self._places.get(part.hash or "")
        return place if place is not None and not self.store.missing([place.key]) else None

    def put(self, part: Part, progress: Callable[[int], None] | None = None) -> Place:
        """Write a large part as a file of its own; its hash becomes that of the bytes that were written."""
        key = self.store.put(part.hash, [part.data], part.nbytes, progress)
        part.hash = key
        self._lengths.add(part.nbytes)
        place = self._places[key] = Place(key, 0, part.nbytes)
        return place

    def pack(self, parts: Iterable[Part]) -> list[Place]:
        """Write parts one after the other into one file."""
        parts = list(parts)
        pieces, offsets, nbytes = align([part.data for part in parts])
        key = self.store.put(None, pieces, nbytes)
        places = [Place(key, start, part.nbytes) for start, part in zip(offsets, parts, strict=True)]
        self._places.update(
            {part.hash: place for part, place in zip(parts, places, strict=True) if part.blob and part.hash}
        )
        return places

    def need(self, needs: Mapping[str, Iterable[str]], names: Iterable[str]) -> None:
        """Note which files the values of names need now, and drop the files that none does.

        A name that the notebook has lost keeps its files for one more cell: it may come back as another name.

        Args:
            needs: name → files, for the names that have new values.
            names: all names of the notebook.
        """
        self._needs.update({name: frozenset(keys) for name, keys in needs.items()})
        gone = self._needs.keys() - set(names)
        for name in gone & self._gone:
            del self._needs[name]
        self._gone = frozenset(gone)
        self.sweep()

    def sweep(self) -> None:
        """Unlink the files that neither a name nor a cargo on its way needs."""
        needed = frozenset().union(*self._needs.values())
        here = self.store.keys()
        self.store.drop(key for key in here - needed if not self.store.pinned(key))
        here = self.store.keys()
        self._places = {content: place for content, place in self._places.items() if place.key in here}
