"""Chunks of content: how values and files are cut and hashed, and which chunks are present already.

Chunks have a fixed length, like the blocks of rsync's receiving side. A changed element, an
appended line or another layer changes a chunk or two. An insertion in the middle moves everything
after it, which is then sent again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from skymagic.content.base import Buffer, Content
from skymagic.content.device import host_pieces
from skymagic.wire.codec import CHUNK
from skymagic.wire.store import SHA256, XXH3

HASH_BYTES = 16
"""Bytes of a chunk's hash."""


def new_hash(kind: str = XXH3) -> Any:
    """Return the state of a hash, with `update` and `hexdigest`.

    xxhash is imported for its own hash only: hosts without packages use SHA-256.
    """
    if kind == SHA256:
        return hashlib.sha256()
    import xxhash

    return xxhash.xxh3_128()


def digest(pieces: Iterable[Content], kind: str = XXH3) -> str:
    """Return the hash of all pieces as one stream, in hexadecimal."""
    state = new_hash(kind)
    for piece in host_pieces(pieces):
        state.update(piece)
    return str(state.hexdigest())


def chunk_hash(chunk: Buffer) -> bytes:
    """Return the xxh3-128 hash of a chunk."""
    import xxhash

    return xxhash.xxh3_128_digest(chunk)


def cut(data: Buffer) -> list[memoryview]:
    """Cut data into chunks; the last one may be shorter."""
    view = memoryview(data).cast("B")
    return [view[start : start + CHUNK] for start in range(0, view.nbytes, CHUNK)]


def split_hashes(hashes: bytes) -> list[bytes]:
    """Return the hashes in their concatenation."""
    return [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]


class ChunkIndex:
    """Locations of chunks by their hashes."""

    def __init__(self) -> None:
        self._locations: dict[bytes, tuple[str, int]] = {}
        self._hashes: dict[str, Sequence[bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._locations)

    def add(self, key: str, hashes: Sequence[bytes]) -> None:
        """Record the chunks of the content with this key, in their order."""
        self._hashes[key] = hashes
        self._locations.update(
            {chunk: (key, number * CHUNK) for number, chunk in enumerate(hashes)}
        )

    def remove(self, keys: Iterable[str]) -> None:
        """Forget the chunks of these contents; unknown keys are ignored."""
        for key in keys:
            for chunk in self._hashes.pop(key, ()):
                if self._locations.get(chunk, ("",))[0] == key:
                    del self._locations[chunk]

    def find(self, hashes: Iterable[bytes]) -> list[tuple[str, int] | None]:
        """Return the key of a content that has each chunk, and the offset there, or None."""
        return [self._locations.get(chunk) for chunk in hashes]
