"""The protocol of a node's value server: messages (`wire.codec`) between it and the notebook; `data.remote` draws them."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Any

from skymagic.wire.codec import Codec, FrozenMessage, WithPayload

_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}")
_KEY = re.compile(r"[0-9a-f]{32}")
PIECE_BYTES = 1 << 19
"""Bytes of a value that are read, hashed and sent at a time."""
Slice = tuple[str, int, int]
"""Name of a file in the store, offset, and length in bytes."""


class StoreMessage(FrozenMessage):
    """Base of this protocol's messages."""


# -- notebook → value server ------------------------------------------------------------------------------------------------


class Settings(StoreMessage):
    """First of all: the pool's settings for all of its value servers."""

    address: str = ""
    """Where other nodes reach this one; empty: there are none, and nothing listens."""
    pem: str = field(default="", repr=False)
    """The pool's certificate and key (`wire.tls`), which all of its value servers have and nobody else."""
    share: float = 0.5
    """The part of a file system's free space that values may fill."""


class Put(StoreMessage):
    """A value comes: `PutChunk`s, then `PutEnd`."""

    name: str
    nbytes: int


class PutChunk(StoreMessage, WithPayload):
    """Bytes of a value."""

    name: str
    nbytes: int


class PutEnd(StoreMessage):
    """All of the value was sent: verify it against its key, the content's hash."""

    name: str
    key: str


class Replicate(StoreMessage):
    """Get a value from another node's server, as it arrives there, from the offset on that is here already."""

    name: str
    nbytes: int
    address: str
    port: int


class Assemble(StoreMessage):
    """Put a value together from parts of others that are here, and verify it against its key."""

    name: str
    nbytes: int
    key: str
    slices: list[Slice]


class Delete(StoreMessage):
    """Unlink these files, complete or not."""

    names: list[str]


class Read(StoreMessage):
    """Send a file's bytes from an offset on."""

    number: int
    name: str
    offset: int


class CancelRead(StoreMessage):
    """Send no more for the `Read` of this number."""

    number: int


# -- value server → notebook ------------------------------------------------------------------------------------------------


class Ready(StoreMessage):
    """The server has the store, and listens."""

    port: int
    """For other nodes; 0 when there are none."""
    room: int
    """Bytes that its store may still take."""
    present: list[str]
    """Names of the values that are there, of earlier connections."""


class Stored(StoreMessage):
    """A value is complete and as its key says."""

    name: str
    key: str
    room: int
    note: str = ""
    """What the user should know of it."""


class StoreFailed(StoreMessage):
    """A value could not be stored."""

    name: str
    reason: str
    errno: int = 0


class ReadReply(StoreMessage):
    """Answer to `Read`: bytes that will come; -1: there is no such file."""

    number: int
    nbytes: int


class ReadChunk(StoreMessage, WithPayload):
    """Bytes of a file that is read."""

    number: int
    nbytes: int
    deflated: bool
    checksum: str
    """xxh3-64 of the piece as it lies in the file."""


class Heartbeat(StoreMessage):
    """The server lives; sent every 2 s."""


# -- between value servers ---------------------------------------------------------------------------------------------------


class PeerMessage(FrozenMessage):
    """Base of the messages between value servers; `kernels.store.peers` draws them."""


class FollowValue(PeerMessage):
    """Send a value from this offset on, as it arrives."""

    name: str
    offset: int


class ValuePiece(PeerMessage, WithPayload):
    """The next bytes of the value; none for "still there", or with the key of a value that has ended."""

    nbytes: int
    key: str = ""


def is_name(text: object) -> bool:
    """Whether this is the name of a file in a store: 16 and 32 hexadecimal digits, so that it leads nowhere else."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def is_key(text: object) -> bool:
    """Whether this is an xxh3-128 in hex."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def _check(message: Any) -> None:
    names = [*getattr(message, "names", ()), *([message.name] if hasattr(message, "name") else [])]
    keys = [message.key] if hasattr(message, "key") else []
    if isinstance(message, Assemble):
        names += [name for name, _, _ in message.slices]
    if not all(map(is_name, names)) or not all(map(is_key, keys)):
        raise ValueError(f"not a name of a store: {[*names, *keys]!r}")


def _check_peer(message: Any) -> None:
    if isinstance(message, FollowValue) and not is_name(message.name):
        raise ValueError(f"not a name of a store: {message.name!r}")


CODEC: Codec[StoreMessage] = Codec(*StoreMessage.__subclasses__(), max_line=64 << 20, check=_check)
PEER_CODEC: Codec[PeerMessage] = Codec(
    FollowValue, ValuePiece, max_line=1 << 12, max_payload=PIECE_BYTES, check=_check_peer
)
encode, decode, decoder = CODEC.encode, CODEC.decode, CODEC.decoder
