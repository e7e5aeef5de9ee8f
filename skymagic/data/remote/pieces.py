"""Pieces of large files: a changed file is sent as the pieces that no other file on the nodes has, and put together there.

The blocks are of fixed length, as rsync's are on its receiving side: a changed element, an appended line and another layer are
found; what is inserted in the middle moves all that follows, and is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from skymagic.data.store.base import Buffer
from skymagic.wire.store import Slice

PIECE = 1 << 20
"""Bytes of a piece; the last one of a file is shorter."""


class PieceIndex:
    """Where pieces are, by the hash of what they hold."""

    def __init__(self) -> None:
        self._places: dict[bytes, tuple[str, int]] = {}
        self._digests: dict[str, Sequence[bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, key: str, digests: Sequence[bytes]) -> None:
        """The file of this key consists of these pieces."""
        self._digests[key] = digests
        self._places.update({each: (key, number * PIECE) for number, each in enumerate(digests)})

    def remove(self, keys: Iterable[str]) -> None:
        """These files are no more; unknown ones are ignored."""
        for key in keys:
            for each in self._digests.pop(key, ()):
                if self._places.get(each, ("",))[0] == key:
                    del self._places[each]

    def find(self, digests: Iterable[bytes]) -> list[tuple[str, int] | None]:
        """For each piece, the key of a file that has it, and the offset there."""
        return [self._places.get(each) for each in digests]


def piece_digests(data: Buffer) -> list[bytes]:
    """The xxh3-128 of each piece."""
    import xxhash

    return [xxhash.xxh3_128_digest(each) for each in cut_into_pieces(data)]


def cut_into_pieces(data: Buffer) -> list[memoryview]:
    """The pieces."""
    view = memoryview(data).cast("B")
    return [view[start : start + PIECE] for start in range(0, view.nbytes, PIECE)]


def recipe(lengths: Iterable[int], places: Iterable[tuple[str, int] | None], rest: str) -> list[Slice]:
    """What a file consists of, as slices of other files, as few as can be; pure.

    Args:
        lengths: of its pieces.
        places: name and offset of each; None for one that is in the file `rest`, where they follow one another.
    """
    slices: list[Slice] = []
    sent = 0
    for nbytes, place in zip(lengths, places, strict=True):
        name, offset = place or (rest, sent)
        sent += 0 if place else nbytes
        slices.append((name, offset, nbytes))
    joined = slices[:1]
    for (name, offset, nbytes), following in pairwise(slices):
        if following[:2] == (name, offset + nbytes):
            joined[-1] = (name, joined[-1][1], joined[-1][2] + following[2])
        else:
            joined.append(following)
    return joined
