"""Files as encoded messages of `wire.files`: `FileStart`, `FileChunk`, `FileFailed`, and `EndOfFiles` at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from types import MappingProxyType

from skymagic.files.transfer.entries import Entry
from skymagic.files.transfer.folders import ListedFiles, Place
from skymagic.files.transfer.listing import error_text
from skymagic.files.transfer.pieces import PIECE, numbered
from skymagic.wire.files import EndOfFiles, FileChunk, FileFailed, FilePiece, FileStart, encode

OnBytes = Callable[[str, int], None]
"""Told of bytes that are on their way, with the path of their file."""


def encoded_files(
    files: Iterable[tuple[int, Entry, Place]],
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
