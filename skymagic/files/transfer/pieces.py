"""Files as encoded messages of `wire.files`, and pieces of a large file that are there already.

Pieces are found in the file that is replaced, and in what a cut connection has left of it. They are of fixed length, as a value's are
(`data.remote.remote_store`): a changed part, an appended log, and the rest of half a file move as the pieces that are not there."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from hashlib import sha256
from itertools import zip_longest
from types import MappingProxyType

from skymagic.files.transfer.folders import NOFOLLOW, OWN_PREFIX, FilePlace, Folders, ListedFiles
from skymagic.files.transfer.listing import Entry, error_text
from skymagic.wire.files import CHUNK, EndOfFiles, FileChunk, FileFailed, FilePiece, FileStart, encode

PIECE = CHUNK
"""Bytes of a piece; the last one of a file is shorter. A message holds one."""
LARGE = 8 * PIECE
"""Bytes of a file from which its pieces are looked for, and what has come of it stays when the connection is cut."""
LEFT = 0
"""The time of a half file that was left, in seconds since 1970."""
SILENT_SECONDS = 60.0
"""Seconds after which a half file that has another time counts as left."""
OLD_SECONDS = 7 * 86400.0
"""Seconds for which it is kept."""
_DIGEST = 16


class PresentPieces:
    """The pieces of a large file that are there, by number: of the file in its place, and of what came of it earlier.

    Args:
        folders: below the base.
        path: the file's, below it.

    Raises:
        OSError: its folder is not there.
    """

    def __init__(self, folders: Folders, path: str) -> None:
        self._descriptors: list[int] = []
        self._places: list[tuple[str, int, int]] = []
        """File name, descriptor and offset of each piece."""
        above = path[: len(path) - len(_name(path))]
        for name in (_name(path), *halves(folders, path)):
            with contextlib.suppress(OSError):
                self._open(name, folders.open(above + name, os.O_RDONLY))

    def _open(self, name: str, descriptor: int) -> None:
        self._descriptors.append(descriptor)
        state = os.fstat(descriptor)
        if stat.S_ISREG(state.st_mode):
            self._places += ((name, descriptor, offset) for offset in range(0, state.st_size, PIECE))

    def digests(self, stopped: Callable[[], bool] = lambda: False) -> list[bytes]:
        """The xxh3-128 of each."""
        import xxhash

        found = []
        for _, descriptor, offset in self._places:
            if stopped():
                break
            found.append(xxhash.xxh3_128_digest(os.pread(descriptor, PIECE, offset)))
        return found

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
            raise OSError(0, "what was there of it has changed meanwhile; copy it again")
        return data

    def lies(self, number: int, name: str, offset: int) -> bool:
        """Whether a piece lies in the file of this name, at this place."""
        found, _, place = self._places[number]
        return (found, place) == (name, offset)

    def close(self) -> None:
        """Close the files; twice is safe."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def half_mark(path: str) -> str:
    """What tells the halves of a large file from those of others, in the names that `folders.beside` makes."""
    return f"{sha256(os.fsencode(_name(path))).hexdigest()[:16]}-"


def halves(folders: Folders, path: str) -> list[str]:
    """Names of what cut connections have left of a large file, beside it; sorted.

    Others may write the same file at this moment, from here or from another machine: theirs are left out.
    """
    return [each for each, _ in _left_in(folders, path) if each.startswith(OWN_PREFIX + half_mark(path))]


def remove_left(folders: Folders, entries: Iterable[Entry]) -> None:
    """Remove what earlier copies have left in the folders of these entries: halves of files that are whole now, and what is old.

    A file that was large and is small now, or is no more copied, has nobody else who looks for its half.

    Raises:
        OSError: what is there cannot be removed.
    """
    by_folder: dict[str, list[str]] = {}
    for entry in entries:
        by_folder.setdefault(os.path.dirname(entry.path), []).append(entry.path)
    for paths in by_folder.values():
        if left := _left_in(folders, paths[0]):
            marks = tuple(OWN_PREFIX + half_mark(each) for each in paths)
            folder, place = folders.parent(paths[0])
            for name, since in left:
                if name.startswith(marks) or time.time() - since > OLD_SECONDS:
                    with contextlib.suppress(FileNotFoundError):  # another copy has seen it too
                        os.unlink(os.path.join(os.path.dirname(place), name), dir_fd=folder)


def _left_in(folders: Folders, path: str) -> list[tuple[str, float]]:
    """What copies have left beside a file: names, sorted, and since when each has been as it is."""
    folder, place = folders.parent(path)
    above = os.path.dirname(place)
    if folder is None:
        names = os.listdir(above)
    else:
        descriptor = os.open(".", os.O_RDONLY | NOFOLLOW, dir_fd=folder)  # the open one may only be passed through
        try:
            names = os.listdir(descriptor)
        finally:
            os.close(descriptor)
    found = []
    for each in sorted(names):
        if each.startswith(OWN_PREFIX) and each.endswith(".part"):
            with contextlib.suppress(FileNotFoundError):
                state = os.lstat(os.path.join(above, each), dir_fd=folder)
                if state.st_mtime == LEFT or time.time() - state.st_mtime > SILENT_SECONDS:
                    found.append((each, state.st_ctime))  # the other time may be LEFT
    return found


def present(folders: Folders, entries: Iterable[Entry], stopped: Callable[[], bool] = lambda: False) -> list[str]:
    """The digests of the pieces that are there of each file, in hex, one after the other; "" where none is."""
    found = []
    for entry in entries:
        text = ""
        with contextlib.suppress(OSError):
            pieces = PresentPieces(folders, entry.path)
            try:
                text = b"".join(pieces.digests(stopped)).hex()
            finally:
                pieces.close()
        found.append(text)
    folders.close()
    return found


def numbered(text: str) -> dict[bytes, int]:
    """Digest → number of a piece, of what `present` said of a file; pure."""
    digests = bytes.fromhex(text)
    return {digests[start : start + _DIGEST]: start // _DIGEST for start in range(0, len(digests), _DIGEST)}


def common(texts: Collection[str]) -> str:
    """What `present` said of one file on several nodes, where they say the same; zeros stand for the rest. Pure."""
    step = 2 * _DIGEST
    columns = zip_longest(*([text[start : start + step] for start in range(0, len(text), step)] for text in texts))
    return "".join(column[0] if len(set(column)) == 1 else "0" * step for column in columns)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


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
        there: by number, what `pieces.present` said of a file where it goes: these pieces are named, and not sent.

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
                        if known and (found := known.get(digest := xxh3_128_digest(piece))) is not None:
                            yield encode(FilePiece(found, digest.hex(), last))
                        else:
                            yield encode(FileChunk(last, nbytes) if begun else start, piece)
                        begun = True
                        told(entry.path, len(piece))
            except OSError as problem:
                yield encode(FileFailed(number, error_text(place.path, problem)))
    yield encode(EndOfFiles())


def _read(descriptor: int, count: int) -> bytes:
    """So many bytes, or fewer at the end of the file."""
    pieces = []
    while count and (piece := os.read(descriptor, count)):
        pieces.append(piece)
        count -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
