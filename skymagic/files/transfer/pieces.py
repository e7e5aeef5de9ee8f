"""Files as encoded messages of `wire.files`, and pieces of a file that are there already.

A file's digest is those of its pieces, one after the other. Of a large file that has changed they say what need not be sent: pieces of
the file that is replaced, and of what a cut connection has left of it. They are of fixed length, as a value's are
(`data.remote.remote_store`): a changed part, an appended log, and the rest of half a file move as the pieces that are not there."""

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

from skymagic.files.transfer.folders import OWN_PREFIX, FilePlace, Folders, ListedFiles
from skymagic.files.transfer.listing import Entry, error_text
from skymagic.wire.files import (
    CHUNK,
    EndOfFiles,
    FileChunk,
    FileFailed,
    FilePiece,
    FileStart,
    encode,
)

PIECE = CHUNK
"""Bytes of a piece; the last one of a file is shorter. A message holds one."""
LARGE = 8 * PIECE
"""Bytes of a file from which its pieces are looked for, and what has come of it stays when the connection is cut."""
_DIGEST = 16


def part_name(path: str) -> str:
    """What a file is called until it is whole: the same each time, so that the next copy finds what a cut connection has left."""
    return f"{OWN_PREFIX}{sha256(os.fsencode(path.rpartition('/')[2])).hexdigest()[:16]}.part"


def lock(descriptor: int, kind: int) -> bool:
    """Lock a part (``LOCK_EX`` to write it, ``LOCK_SH`` to read it), without waiting; whether nobody else writes it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:  # taken, or a file system without locks
        return False
    return True


class PresentPieces:
    """The pieces of a file that are there, by number: of the file in its place, and of what came of it earlier.

    Args:
        folders: below the base.
        path: the file's, below it.

    Raises:
        OSError: its folder is not there.
    """

    def __init__(self, folders: Folders, path: str) -> None:
        self._descriptors: list[int] = []
        self._places: list[
            tuple[str, int, int]
        ] = []  # file name, descriptor and offset of each piece
        self.left = 0  # bytes of what came earlier
        above, part = path[: len(path) - len(path.rpartition("/")[2])], part_name(path)
        for name in (path.rpartition("/")[2], part):
            with contextlib.suppress(OSError):
                descriptor = folders.open(above + name, os.O_RDONLY)
                self._descriptors.append(descriptor)
                # others may write the same file at this moment, from here or from another machine: theirs is left out
                if name == part and not (
                    lock(descriptor, fcntl.LOCK_SH) and lock(descriptor, fcntl.LOCK_UN)
                ):
                    continue
                state = os.fstat(descriptor)
                if stat.S_ISREG(state.st_mode):
                    self._places += (
                        (name, descriptor, offset)
                        for offset in range(0, max(state.st_size, 1), PIECE)
                    )
                    self.left = state.st_size if name == part else 0

    def digests(self, stopped: Callable[[], bool] = lambda: False) -> str:
        """The xxh3-128 of each in hex, one after the other; "" where there is none."""
        return _digests(((descriptor, offset) for _, descriptor, offset in self._places), stopped)

    def read(self, number: int, digest: str) -> bytes:
        """A piece.

        Raises:
            ValueError: there is no such piece.
            OSError: it is not what it was.
        """
        import xxhash

        if not 0 <= number < len(self._places):
            raise ValueError("a piece that is not there")
        _, descriptor, offset = self._places[number]
        data = os.pread(descriptor, PIECE, offset)
        if xxhash.xxh3_128_hexdigest(data) != digest:
            raise OSError(0, "the partial copy changed in the meantime; copy it again")
        return data

    def lies(self, number: int, name: str, offset: int) -> bool:
        """Whether a piece lies in the file of this name, at this place."""
        found, _, place = self._places[number]
        return (found, place) == (name, offset)

    def close(self) -> None:
        """Close the files; twice is safe."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def _digests(places: Iterable[tuple[int, int]], stopped: Callable[[], bool]) -> str:
    """Digests of the pieces at these offsets in open files."""
    import xxhash

    found = []
    for descriptor, offset in places:
        if stopped():
            break
        found.append(xxhash.xxh3_128_hexdigest(os.pread(descriptor, PIECE, offset)))
    return "".join(found)


def listed_digests(
    places: Iterable[FilePlace], stopped: Callable[[], bool] = lambda: False
) -> list[str]:
    """The digest of each listed file; "" for one that cannot be read."""
    found = []
    with closing(ListedFiles()) as listed:
        for place in places:
            text = ""
            with contextlib.suppress(OSError), open(listed.open(place), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                text = _digests(
                    ((file.fileno(), offset) for offset in range(0, max(size, 1), PIECE)), stopped
                )
            found.append(text)
    return found


def equal(mine: str, theirs: str) -> bool:
    """Whether files of one length are equal: the digest of one, and what `PresentPieces` says of the other. Pure."""
    return bool(mine) and theirs.startswith(mine)


def numbered(text: str) -> dict[bytes, int]:
    """Digest → number of a piece, of what `PresentPieces` said of a file; pure."""
    digests = bytes.fromhex(text)
    return {
        digests[start : start + _DIGEST]: start // _DIGEST
        for start in range(0, len(digests), _DIGEST)
    }


def common(texts: Collection[str]) -> str:
    """What `PresentPieces` said of one file on several nodes, where they say the same; zeros stand for the rest. Pure."""
    step = 2 * _DIGEST
    columns = zip_longest(
        *([text[start : start + step] for start in range(0, len(text), step)] for text in texts)
    )
    return "".join(column[0] if len(set(column)) == 1 else "0" * step for column in columns)


# -- files as messages -----------------------------------------------------------------------------


OnBytes = Callable[[str, int], None]
"""Told of bytes that are on their way, with the path of their file."""


def encoded_files(
    files: Iterable[tuple[int, Entry, FilePlace]],
    told: OnBytes = lambda name, count: None,
    there: Mapping[int, str] = MappingProxyType({}),
) -> Iterator[bytes]:
    """Frames for files, each given as its number, its entry, and where it lies here.

    Args:
        there: by number, what `PresentPieces` said of a file where it goes: these pieces are named, and not sent.

    A file that grows while it is read is sent as long as it was; one that shrinks, as long as it is. The time of writing is that
    from before: a file that has changed meanwhile is seen as changed the next time.
    """
    from xxhash import xxh3_128_digest

    with closing(ListedFiles()) as listed:
        for number, entry, place in files:
            try:
                with open(listed.open(place), "rb", buffering=0) as file:
                    state = os.fstat(file.fileno())
                    left, begun, known = state.st_size, False, numbered(there.get(number, ""))
                    if known:
                        yield encode(FileStart(number, state.st_mtime_ns, state.st_size, False, 0))
                        begun = True
                    while left or not begun:
                        piece = _read(file.fileno(), min(left, PIECE))
                        left = left - len(piece) if piece else 0
                        last, nbytes = left == 0, len(piece)
                        start = FileStart(number, state.st_mtime_ns, state.st_size, last, nbytes)
                        if (
                            known
                            and (found := known.get(digest := xxh3_128_digest(piece))) is not None
                        ):
                            yield encode(FilePiece(found, digest.hex(), last))
                        else:
                            yield encode(FileChunk(last, nbytes) if begun else start, piece)
                        begun = True
                        told(entry.path, len(piece))
            except OSError as problem:
                yield encode(FileFailed(number, error_text(place.path, problem)))
    yield encode(EndOfFiles())


def _read(descriptor: int, count: int) -> bytes:
    """Read so many bytes, or fewer at the end of the file."""
    pieces = []
    while count and (piece := os.read(descriptor, count)):
        pieces.append(piece)
        count -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
