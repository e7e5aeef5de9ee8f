"""Where the parts of values are: the format of a bundle, the same on the way out and back, and the content index of a store.

A bundle is one pickle. Each of its parts is either inline, as base64 text, or ``[file, offset, length]`` in a file of a store. A bundle
says so as plain values, the parts of the pickle stream under ``header`` and the out-of-band ones under ``buffers``::

    {"header": ["gASV…"], "buffers": [[0, 0, 400000000], [0, 400000000, 2400]]}
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from skymagic.data.store.base import Buffer, Content, Store
from skymagic.data.store.device import DeviceBytes
from skymagic.data.store.store import LARGE, digest

INLINE = 64 << 10
"""Parts that are together shorter than this many bytes are inline."""

_ALIGN = 64

Location = str | list[int]


def inline(part: Content) -> str:
    """The location of a part that needs no file."""
    return base64.b64encode(bytes(part)).decode()


def align(parts: Sequence[Content]) -> tuple[list[Content], list[int], int]:
    """Parts one after the other in a file, each at a multiple of 64 bytes, as vector instructions and torch like it.

    Returns:
        What to write, the offset of each part, and the length of all in bytes.
    """
    pieces: list[Content] = []
    offsets: list[int] = []
    nbytes = 0
    for part in parts:
        offsets.append(nbytes)
        padding = -len(part) % _ALIGN
        pieces += [part, bytes(padding)]
        nbytes += len(part) + padding
    return pieces, offsets, nbytes


def write_parts(
    parts: Sequence[Content], give: Callable[[list[Content], int], str]
) -> tuple[str | None, list[Location]]:
    """Write what is not inline into one file.

    Args:
        give: writes pieces of a length in all, and says the file's name.

    Returns:
        The file's name, None where none was needed, and the location of each part.
    """
    short = [len(part) < INLINE for part in parts]
    if sum(len(part) for part, is_short in zip(parts, short, strict=True) if is_short) >= INLINE:
        short = [False] * len(parts)
    filed = [part for part, is_short in zip(parts, short, strict=True) if not is_short]
    pieces, offsets, nbytes = align(filed)
    name = give(pieces, nbytes) if filed else None
    rest = iter(offsets)
    return name, [
        inline(part) if is_short else [0, next(rest), len(part)]
        for part, is_short in zip(parts, short, strict=True)
    ]


def part_fields(locations: Sequence[Location], header_parts: int) -> dict[str, Any]:
    """The bundle of parts at these locations, of which so many are the pickle stream."""
    return {"header": list(locations[:header_parts]), "buffers": list(locations[header_parts:])}


def read_parts(
    bundle: Mapping[str, Any], open_file: Callable[[int], memoryview]
) -> tuple[list[Buffer], list[Buffer]]:
    """Header and buffers of a bundle.

    Args:
        open_file: the bytes of the file with this number, as new memory at each call.
    """
    files: dict[int, memoryview] = {}
    used: set[tuple[int, int]] = set()

    def part(location: Location) -> Buffer:
        if isinstance(location, str):
            return bytearray(base64.b64decode(location))
        number, offset, nbytes = location
        # Equal arrays lie in one place; each gets memory of its own, for they are not the same array.
        if number not in files or (number, offset) in used:
            files[number] = open_file(number)
        used.add((number, offset))
        return files[number][offset : offset + nbytes]

    return [part(each) for each in bundle["header"]], [part(each) for each in bundle["buffers"]]


# -- the content index -----------------------------------------------------------------------------


_SAMPLES = 64
_SAMPLED = 64
"""Bytes of each sample."""


class FileExtent(NamedTuple):
    """Consecutive bytes of a file: where a part is."""

    key: str
    """The file's content hash."""
    offset: int
    nbytes: int


@dataclass
class Part:
    """A piece of a pickled value."""

    data: Content
    blob: bool
    """Whether it is found again by its content; the others are small and travel with the orders."""
    hash: str | None = None
    """The content's hash, of a blob; None until it is needed."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return len(self.data)


class ContentIndex:
    """Deduplicates parts of values in one store, and removes the files that no name needs any more."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._extents: dict[str, FileExtent] = {}
        self._samples: set[bytes] = set()  # samples of the large parts that were put
        self._devices: dict[tuple[int, int], tuple[tuple[object, ...] | None, str]] = {}
        """By the place of a device's bytes: `DeviceBytes.mark`, and the content's hash."""
        self._needs: dict[str, frozenset[str]] = {}
        self._gone: frozenset[str] = frozenset()

    def identify(self, parts: Iterable[Part], *, lazily: bool = False) -> bool:
        """Hash the blobs among the parts; whether all have a hash now.

        Args:
            lazily: leave out large blobs whose sample was never here: they cannot be here, and are hashed as they are
                written.
        """
        complete = True
        for part in parts:
            if part.blob and part.hash is None:
                if isinstance(part.data, DeviceBytes):
                    complete = self._identify_on_device(part, part.data, lazily) and complete
                elif lazily and part.nbytes >= LARGE and _sample(part.data) not in self._samples:
                    complete = False
                else:
                    part.hash = digest([part.data])
        return complete

    def _identify_on_device(self, part: Part, data: DeviceBytes, lazily: bool) -> bool:
        """Hash a device's bytes, with one copy where they have changed and none where they have not; whether there is a hash."""
        if part.nbytes < LARGE:
            part.data = data.read()
            part.hash = digest([part.data])
            return True
        mark = data.mark
        before, hash = self._devices.get(data.place, (None, ""))
        if mark is not None and mark == before:
            part.hash = hash
        elif lazily:
            return False
        elif self.store.remote:
            part.data = data.read()
            part.hash = digest([part.data])
            self._devices[data.place] = (mark, part.hash)
        else:
            self.put(part)  # hashed as it is written: the next sweep takes what nobody needs
        return True

    def expect(self, parts: Iterable[Part]) -> None:
        """Hash parts that will be put, where sending them costs much more than that."""
        if self.store.remote:
            self.identify(part for part in parts if part.blob and part.nbytes >= LARGE)

    def to_send(self, parts: Iterable[Part]) -> dict[str, Part]:
        """Content and part of the large parts that must be sent, after they were expected."""
        return {
            part.hash: part
            for part in parts
            if part.hash and part.nbytes >= LARGE and self.find(part) is None
        }

    def find(self, part: Part) -> FileExtent | None:
        """Where a part with this content lies, if it is here."""
        extent = self._extents.get(part.hash or "")
        return extent if extent is not None and not self.store.missing([extent.key]) else None

    def put(self, part: Part, progress: Callable[[int], None] | None = None) -> FileExtent:
        """Write a large part as a file of its own; its hash becomes that of the bytes that were written."""
        mark = (
            part.data.mark if isinstance(part.data, DeviceBytes) else None
        )  # before its bytes are read
        key = self.store.put(part.hash, [part.data], part.nbytes, progress)
        part.hash = key
        if isinstance(part.data, DeviceBytes):
            self._devices[part.data.place] = (mark, key)
        else:
            self._samples.add(_sample(part.data))
        extent = self._extents[key] = FileExtent(key, 0, part.nbytes)
        return extent

    def pack(self, parts: Iterable[Part]) -> list[FileExtent]:
        """Write parts one after the other into one file."""
        parts = list(parts)
        pieces, offsets, nbytes = align([part.data for part in parts])
        key = self.store.put(None, pieces, nbytes)
        extents = [
            FileExtent(key, start, part.nbytes) for start, part in zip(offsets, parts, strict=True)
        ]
        self._extents.update(
            {
                part.hash: extent
                for part, extent in zip(parts, extents, strict=True)
                if part.blob and part.hash
            }
        )
        return extents

    def set_needs(self, needs: Mapping[str, frozenset[str]], names: Iterable[str]) -> None:
        """Note which files the values of names need now, and drop the files that none does.

        A name that the notebook has lost keeps its files for one more cell: it may come back as another name.

        Args:
            needs: name → files, for the names that have new values.
            names: all names of the notebook.
        """
        self._needs.update(needs)
        gone = self._needs.keys() - set(names)
        for name in gone & self._gone:
            del self._needs[name]
        self._gone = frozenset(gone)
        self.sweep()

    def sweep(self) -> None:
        """Unlink the files that neither a name nor a manifest on its way needs."""
        needed = frozenset().union(*self._needs.values())
        here = self.store.keys()
        if unneeded := [key for key in here - needed if not self.store.pinned(key)]:
            self.store.drop(unneeded)
        here = self.store.keys()
        self._extents = {
            content: extent for content, extent in self._extents.items() if extent.key in here
        }
        self._devices = {
            place: known for place, known in self._devices.items() if known[1] in self._extents
        }


def _sample(data: Buffer) -> bytes:
    """A hash of a few bytes from all over: contents where it differs are different ones."""
    view = memoryview(data)
    step = view.nbytes // _SAMPLES
    picked = b"".join(view[start : start + _SAMPLED] for start in range(0, view.nbytes, step))
    return xxhash.xxh3_128_digest(picked + view.nbytes.to_bytes(8, "little"))
