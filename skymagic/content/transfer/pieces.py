"""Files as encoded messages of `wire.files`, and pieces of a file that are already present.

A file's digest is the concatenation of its chunks' hashes (`content.chunks`). For a large file that
has changed they show which chunks need not be sent: those in the file to be replaced, and in the
part that a lost connection left. For a changed part, an appended log, or the rest of half a file,
only the missing chunks are sent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from hashlib import sha256
from itertools import zip_longest
from types import MappingProxyType

from skymagic.content.chunks import HASH_BYTES, ChunkIndex, chunk_hash, split_hashes
from skymagic.content.transfer.folders import OWN_PREFIX, FilePlace, Folders, ListedFiles
from skymagic.content.transfer.listing import Entry, error_text
from skymagic.wire.codec import CHUNK
from skymagic.wire.files import (
    EndOfFiles,
    FileChunk,
    FileFailed,
    FilePiece,
    FileStart,
    encode,
)

LARGE = 8 * CHUNK
"""Bytes above which pieces of a file are compared, and a partial file is kept when the connection
is lost.
"""


def part_name(path: str) -> str:
    """Return the temporary name of an incomplete file.

    It is the same each time, so that the next copy finds the part that a lost connection left.
    """
    return f"{OWN_PREFIX}{sha256(os.fsencode(path.rpartition('/')[2])).hexdigest()[:16]}.part"


def lock(descriptor: int, kind: int) -> bool:
    """Lock a part without waiting (``LOCK_EX`` to write, ``LOCK_SH`` to read).

    Return True if nothing else writes it.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:  # locked, or a file system without locks
        return False
    return True


class PresentPieces:
    """The pieces of a file that are present, by number: in the existing file, and in a partial one.

    Args:
        folders: below the base.
        path: the file's, below it.

    Raises:
        OSError: its folder does not exist.
    """

    def __init__(self, folders: Folders, path: str) -> None:
        self._descriptors: list[int] = []
        # file name, descriptor and offset of each piece
        self._places: list[tuple[str, int, int]] = []
        self.left = 0  # bytes of the partial file
        above, part = path[: len(path) - len(path.rpartition("/")[2])], part_name(path)
        for name in (path.rpartition("/")[2], part):
            with contextlib.suppress(OSError):
                descriptor = folders.open(above + name, os.O_RDONLY)
                self._descriptors.append(descriptor)
                # Others may be writing the same file, from this machine or another one: their part
                # is left out.
                if name == part and not (
                    lock(descriptor, fcntl.LOCK_SH) and lock(descriptor, fcntl.LOCK_UN)
                ):
                    continue
                state = os.fstat(descriptor)
                if stat.S_ISREG(state.st_mode):
                    self._places += (
                        (name, descriptor, offset)
                        for offset in range(0, max(state.st_size, 1), CHUNK)
                    )
                    self.left = state.st_size if name == part else 0

    def digests(self, stopped: Callable[[], bool] = lambda: False) -> str:
        """Return the xxh3-128 of each piece in hex, concatenated; "" without pieces."""
        return _digests(((descriptor, offset) for _, descriptor, offset in self._places), stopped)

    def read(self, number: int, digest: str) -> bytes:
        """Return a piece.

        Raises:
            ValueError: the piece does not exist.
            OSError: it has changed.
        """
        if not 0 <= number < len(self._places):
            raise ValueError("a piece that is not there")
        _, descriptor, offset = self._places[number]
        data = os.pread(descriptor, CHUNK, offset)
        if chunk_hash(data).hex() != digest:
            raise OSError(0, "the partial copy changed in the meantime; copy it again")
        return data

    def is_at(self, number: int, name: str, offset: int) -> bool:
        """Return True if a piece is in the file of this name, at this offset."""
        file_name, _, start = self._places[number]
        return (file_name, start) == (name, offset)

    def close(self) -> None:
        """Close the files. Safe to call twice."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def _digests(spans: Iterable[tuple[int, int]], stopped: Callable[[], bool]) -> str:
    """Return digests of the pieces at these offsets in open files."""
    digests = []
    for descriptor, offset in spans:
        if stopped():
            break
        digests.append(chunk_hash(os.pread(descriptor, CHUNK, offset)).hex())
    return "".join(digests)


def listed_digests(
    entries: Iterable[FilePlace], stopped: Callable[[], bool] = lambda: False
) -> list[str]:
    """Return the digest of each listed file; "" for one that cannot be read."""
    digests = []
    with closing(ListedFiles()) as listed:
        for file_place in entries:
            text = ""
            with (
                contextlib.suppress(OSError),
                open(listed.open(file_place), "rb", buffering=0) as file,
            ):
                size = os.fstat(file.fileno()).st_size
                text = _digests(
                    ((file.fileno(), offset) for offset in range(0, max(size, 1), CHUNK)), stopped
                )
            digests.append(text)
    return digests


def equal(local: str, remote: str) -> bool:
    """Return True if two files of one length are equal, by one's digest and the other's
    `PresentPieces`. Pure.
    """
    return bool(local) and remote.startswith(local)


def common(texts: Collection[str]) -> str:
    """Return the part of several nodes' `PresentPieces` texts that agrees, with zeros for the rest.

    Pure.
    """
    step = 2 * HASH_BYTES
    columns = zip_longest(
        *([text[start : start + step] for start in range(0, len(text), step)] for text in texts)
    )
    return "".join(column[0] if len(set(column)) == 1 else "0" * step for column in columns)


# -- files as messages -----------------------------------------------------------------------------


OnBytes = Callable[[str, int], None]
"""Called with the path of a file and the number of its bytes being sent."""


def encoded_files(
    files: Iterable[tuple[int, Entry, FilePlace]],
    on_bytes: OnBytes = lambda name, count: None,
    remote_digests: Mapping[int, str] = MappingProxyType({}),
) -> Iterator[bytes]:
    """Yield frames for files, each given as its number, its entry, and its local place.

    A file that grows while it is read is sent at its original length; one that shrinks, at its new
    length. The modification time is from before the read, so the next copy notices a change in
    between.

    Args:
        remote_digests: the receiver's `PresentPieces` text of a file, by number: these pieces are
            referenced rather than sent.
    """
    with closing(ListedFiles()) as listed:
        for number, entry, file_place in files:
            try:
                with open(listed.open(file_place), "rb", buffering=0) as file:
                    state = os.fstat(file.fileno())
                    remaining, started, present = state.st_size, False, ChunkIndex()
                    present.add("", split_hashes(bytes.fromhex(remote_digests.get(number, ""))))
                    # the start is sent first, because the first piece may be referenced
                    if present:
                        yield encode(FileStart(number, state.st_mtime_ns, state.st_size, False, 0))
                        started = True
                    while remaining or not started:
                        piece = _read(file.fileno(), min(remaining, CHUNK))
                        remaining = remaining - len(piece) if piece else 0
                        last, nbytes = remaining == 0, len(piece)
                        start = FileStart(number, state.st_mtime_ns, state.st_size, last, nbytes)
                        piece_hash = chunk_hash(piece) if present else b""
                        if (location := present.find([piece_hash])[0]) is not None:
                            yield encode(FilePiece(location[1] // CHUNK, piece_hash.hex(), last))
                        else:
                            yield encode(FileChunk(last, nbytes) if started else start, piece)
                        started = True
                        on_bytes(entry.path, len(piece))
            except OSError as problem:
                yield encode(FileFailed(number, error_text(file_place.path, problem)))
    yield encode(EndOfFiles())


def _read(descriptor: int, count: int) -> bytes:
    """Read `count` bytes, or fewer at the end of the file."""
    pieces = []
    while count and (piece := os.read(descriptor, count)):
        pieces.append(piece)
        count -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
