"""Files as frames: ``file`` begins one, ``more`` goes on, ``fail`` gives one up, ``end`` is the end of all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from skymagic.files.transfer.entries import Entry
from skymagic.files.transfer.listing import trouble
from skymagic.wire.files import STEP, packed

Told = Callable[[str, int], None]
"""Told of bytes that are on their way, with the path of their file."""


def sent(files: Iterable[tuple[int, Entry, str]], told: Told = lambda name, count: None) -> Iterator[bytes]:
    """Frames for files, each given as its number, its entry, and where it lies here.

    A file that grows while it is read is sent as long as it was; one that shrinks, as long as it is. The time of writing is that
    from before: a file that has changed meanwhile is seen as changed the next time.
    """
    for number, entry, path in files:
        try:
            with open(path, "rb", buffering=0) as file:
                state = os.fstat(file.fileno())
                left = state.st_size
                start = {"i": number, "mtime": state.st_mtime_ns}
                name = "file"
                while True:
                    piece = _read(file.fileno(), min(left, STEP))
                    left = left - len(piece) if piece else 0
                    yield packed(name, {**start, "last": left == 0}, piece)
                    told(entry.path, len(piece))
                    if left == 0:
                        break
                    name, start = "more", {}
        except OSError as problem:
            yield packed("fail", {"i": number, "why": trouble(path, problem)})
    yield packed("end")


def _read(descriptor: int, count: int) -> bytes:
    """So many bytes, or fewer at the end of the file."""
    pieces = []
    while count and (piece := os.read(descriptor, count)):
        pieces.append(piece)
        count -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
