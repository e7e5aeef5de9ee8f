"""The bundle format, the same in both directions, and the content index of a store.

A bundle is one pickle. Each of its parts is either inline, as base64 text, or `[file, offset,
length]` in a file of a store. A bundle lists its parts as plain values, those of the pickle stream
under `header` and the out-of-band ones under `buffers`::

    {"header": ["gASV…"], "buffers": [[0, 0, 400000000], [0, 400000000, 2400]]}
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from skymagic.content.base import Buffer, Content, Store
from skymagic.content.chunks import digest
from skymagic.content.device import DeviceBytes
from skymagic.content.store import LARGE
from skymagic.wire.values import Location, PickleParts

INLINE = 64 << 10
"""Parts are inline if they are shorter than this many bytes together."""

_ALIGN = 64


def inline(part: Content) -> str:
    """Return the location of a part that needs no file."""
    return base64.b64encode(bytes(part)).decode()


def align(parts: Sequence[Content]) -> tuple[list[Content], list[int], int]:
    """Lay out parts one after the other in a file, each at a multiple of 64 bytes.

    Vector instructions and torch prefer this alignment.

    Returns:
        The pieces to write, the offset of each part, and the total length in bytes.
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
    """Write the parts that are not inline to one file.

    Args:
        give: writes pieces of a total length, and returns the file's name.

    Returns:
        The file's name, or None if none was needed, and the location of each part.
    """
    short = [len(part) < INLINE for part in parts]
    # Many short parts are too long together: write them to the file too.
    if sum(len(part) for part, is_short in zip(parts, short, strict=True) if is_short) >= INLINE:
        short = [False] * len(parts)
    filed = [part for part, is_short in zip(parts, short, strict=True) if not is_short]
    pieces, offsets, nbytes = align(filed)
    name = give(pieces, nbytes) if filed else None
    remaining_offsets = iter(offsets)
    return name, [
        inline(part) if is_short else [0, next(remaining_offsets), len(part)]
        for part, is_short in zip(parts, short, strict=True)
    ]


def part_fields(
    locations: Sequence[Location], header_parts: int
) -> tuple[tuple[Location, ...], tuple[Location, ...]]:
    """Split the locations of a pickle's parts into header and buffers.

    Args:
        header_parts: number of leading parts that form the pickle stream.
    """
    return tuple(locations[:header_parts]), tuple(locations[header_parts:])


def read_parts(
    parts: PickleParts, open_file: Callable[[int], memoryview]
) -> tuple[list[Buffer], list[Buffer]]:
    """Return header and buffers of a pickle.

    Args:
        open_file: returns the bytes of the file with this number, as new memory at each call.
    """
    files: dict[int, memoryview] = {}
    used: set[tuple[int, int]] = set()

    def part(location: Location) -> Buffer:
        if isinstance(location, str):
            # Not bytes, so that arrays over this memory are writable.
            return bytearray(base64.b64decode(location))
        number, offset, nbytes = location
        # Equal arrays have the same location. Each gets separate memory, as distinct arrays.
        if number not in files or (number, offset) in used:
            files[number] = open_file(number)
        used.add((number, offset))
        return files[number][offset : offset + nbytes]

    return [part(entry) for entry in parts.header], [part(entry) for entry in parts.buffers]


# -- the content index -----------------------------------------------------------------------------


_SAMPLES = 64
_SAMPLED = 64
"""Bytes of each sample."""


class FileExtent(NamedTuple):
    """Consecutive bytes of a file that hold a part."""

    key: str
    """Content hash of the file."""
    offset: int
    nbytes: int


@dataclass
class Part:
    """Piece of a pickled value."""

    data: Content
    blob: bool
    """True if it is deduplicated by its content; other parts are small and go with the orders."""
    hash: str | None = None
    """Content hash of a blob; None until it is needed."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return len(self.data)


class ContentIndex:
    """Deduplicates parts of values in one store, and removes files that no name needs any more."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._extents: dict[str, FileExtent] = {}
        self._samples: set[bytes] = set()  # samples of large parts that were put
        self._devices: dict[tuple[int, int], tuple[tuple[object, ...] | None, str]] = {}
        """By `DeviceBytes.address_range`: the fingerprint of the memory, and the content hash."""
        self._needs: dict[str, frozenset[str]] = {}
        self._gone: frozenset[str] = frozenset()

    def identify(self, parts: Iterable[Part], *, lazily: bool = False) -> bool:
        """Hash the blobs among the parts, and return True if all of them have a hash now.

        Args:
            lazily: True to skip large blobs with an unknown sample: they cannot be stored yet, and
                are hashed while they are written.
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
        """Hash bytes on a device, and return True if they have a hash now.

        They are copied once if they changed, and not at all otherwise.
        """
        if part.nbytes < LARGE:
            part.data = data.read()
            part.hash = digest([part.data])
            return True
        fingerprint = data.fingerprint
        before, hash = self._devices.get(data.address_range, (None, ""))
        if fingerprint is not None and fingerprint == before:
            part.hash = hash
        elif lazily:
            return False
        elif self.store.remote:
            part.data = data.read()
            part.hash = digest([part.data])
            self._devices[data.address_range] = (fingerprint, part.hash)
        else:
            self.put(part)  # hashed while written; the next sweep removes it if it is not needed
        return True

    def expect(self, parts: Iterable[Part]) -> None:
        """Hash parts that will be put, if sending them costs much more than hashing."""
        if self.store.remote:
            self.identify(part for part in parts if part.blob and part.nbytes >= LARGE)

    def to_send(self, parts: Iterable[Part]) -> dict[str, Part]:
        """Return the large parts that must be sent, by content hash; call `expect` first."""
        return {
            part.hash: part
            for part in parts
            if part.hash and part.nbytes >= LARGE and self.find(part) is None
        }

    def find(self, part: Part) -> FileExtent | None:
        """Return the location of a part with this content if it is stored."""
        extent = self._extents.get(part.hash or "")
        # `missing` also marks the file as used.
        return extent if extent is not None and not self.store.missing([extent.key]) else None

    def put(self, part: Part, progress: Callable[[int], None] | None = None) -> FileExtent:
        """Write a large part as a separate file, and set its hash to that of the written bytes."""
        # Taken before the bytes are read: a change during the read must alter the fingerprint.
        fingerprint = part.data.fingerprint if isinstance(part.data, DeviceBytes) else None
        key = self.store.put(part.hash, [part.data], part.nbytes, progress)
        part.hash = key
        if isinstance(part.data, DeviceBytes):
            self._devices[part.data.address_range] = (fingerprint, key)
        else:
            # Later parts with another sample need not be hashed to know that they are new.
            self._samples.add(_sample(part.data))
        extent = self._extents[key] = FileExtent(key, 0, part.nbytes)
        return extent

    def pack(self, parts: Iterable[Part]) -> list[FileExtent]:
        """Write parts one after the other to one file."""
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
        """Record which files the values of names need now, and drop files that are not needed.

        A name deleted in the notebook keeps its files for one more cell: the value may return under
        another name.

        Args:
            needs: files by name, for names with new values.
            names: all names of the notebook.
        """
        self._needs.update(needs)
        # Drop the files of names that were missing for the previous cell too.
        gone = self._needs.keys() - set(names)
        for name in gone & self._gone:
            del self._needs[name]
        self._gone = frozenset(gone)
        self.sweep()

    def sweep(self) -> None:
        """Unlink files that are needed neither by a name nor by a manifest in progress."""
        needed = frozenset().union(*self._needs.values())
        stored = self.store.keys()
        # Pinned files belong to a manifest that some rank may still have to read.
        if unneeded := [key for key in stored - needed if not self.store.pinned(key)]:
            self.store.drop(unneeded)
        stored = self.store.keys()
        self._extents = {
            content: extent for content, extent in self._extents.items() if extent.key in stored
        }
        self._devices = {
            span: entry for span, entry in self._devices.items() if entry[1] in self._extents
        }


def _sample(data: Buffer) -> bytes:
    """Return a hash of a few bytes spread over the data.

    Different samples mean different contents.
    """
    view = memoryview(data)
    step = view.nbytes // _SAMPLES
    picked = b"".join(view[start : start + _SAMPLED] for start in range(0, view.nbytes, step))
    return xxhash.xxh3_128_digest(picked + view.nbytes.to_bytes(8, "little"))
