"""Protocol of a node's value server (diagram: `content.remote`), encoded by `wire.codec`."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Any

from skymagic.wire.codec import Codec, FrozenMessage, WithPayload

_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}(?:[0-9a-f]{32})?")
_NONCE = re.compile(r"[0-9a-f]{16}")
_KEY = re.compile(r"[0-9a-f]{32}(?:[0-9a-f]{32})?")
PIECE_BYTES = 1 << 19
"""Bytes of a value to read, hash and send at a time."""
XXH3, SHA256 = "xxh3-128", "sha256"
"""Hashes: the fast one, for values, and the one of the standard library, which every host has."""
ANY_PRIVATE = "private"
"""Listen at all private addresses and at the loopback address."""
Slice = tuple[str, int, int]
"""Name of a file in the store, offset, and length in bytes."""
Listener = tuple[str, int]
"""Address and port."""


class StoreMessage(FrozenMessage):
    """Base of this protocol's messages."""


# -- notebook → value server -------------------------------------------------------------------


class Settings(StoreMessage):
    """First message: the pool's settings for all of its value servers."""

    address: str = ""
    """Address on which other nodes reach this one, or `ANY_PRIVATE`; empty on a single node, and
    then nothing listens.
    """
    pem: str = field(default="", repr=False)
    """The pool's certificate and key (`wire.tls`), shared by its value servers only."""
    share: float = 0.5
    """Fraction of a file system's free space that values may fill."""
    hash: str = XXH3
    """Hash of the content, which is its key: `XXH3` or `SHA256`."""


class Put(StoreMessage):
    """Announce a value: `PutChunk`s follow, then `PutEnd`."""

    name: str
    nbytes: int


class PutChunk(StoreMessage, WithPayload):
    """Bytes of a value."""

    name: str
    nbytes: int


class PutEnd(StoreMessage):
    """End of the value: verify it against its key, the content's hash."""

    name: str
    key: str


class Replicate(StoreMessage):
    """Fetch a value from another node's server as it arrives there, starting at the offset already
    present here.
    """

    name: str
    nbytes: int
    sources: list[Listener]
    """Where that node may be reached; the first that presents the pool's certificate is used."""


class Assemble(StoreMessage):
    """Assemble a value from parts of others in this store, and verify it against its key."""

    name: str
    nbytes: int
    key: str
    slices: list[Slice]


class Adopt(StoreMessage):
    """Put files that this node has already into its store, so that others may follow them."""

    nonce: str
    """First part of their names in the store."""
    folder: str
    below: list[str]
    """Folders in it."""


class Delete(StoreMessage):
    """Unlink these files, complete or not."""

    names: list[str]


class Read(StoreMessage):
    """Send a file's bytes, starting at an offset."""

    number: int
    name: str
    offset: int


class CancelRead(StoreMessage):
    """Cancel the `Read` with this number."""

    number: int


# -- value server → notebook -------------------------------------------------------------------


class Ready(StoreMessage):
    """The server has opened the store and is listening."""

    listening: list[Listener]
    """Where it listens for other nodes; empty if the pool has a single node."""
    room: int
    """Bytes that the store can still take."""
    present: list[str]
    """Names of the values present from earlier connections."""


class Stored(StoreMessage):
    """A value is complete and matches its key."""

    name: str
    key: str
    room: int
    note: str = ""
    """Note about it for the user."""


class StoreFailed(StoreMessage):
    """A value could not be stored."""

    name: str
    reason: str
    errno: int = 0


class Adopted(StoreMessage):
    """A file of an `Adopt` is in the store."""

    name: str
    nbytes: int
    path: str = ""
    """Its path below the order's folder; "" for the archive (tar) with all small files."""
    mode: int = 0o600


class AdoptReply(StoreMessage):
    """End of an `Adopt`."""

    problem: str = ""


class ReadReply(StoreMessage):
    """Answer to `Read`: number of bytes that follow, or -1 if the file does not exist."""

    number: int
    nbytes: int


class ReadChunk(StoreMessage, WithPayload):
    """Bytes of a file being read."""

    number: int
    nbytes: int
    deflated: bool
    checksum: str
    """xxh3-64 of the piece as stored in the file."""


class Heartbeat(StoreMessage):
    """Sign of life from the server, every 2 s."""


# -- between value servers -------------------------------------------------------------------


class PeerMessage(FrozenMessage):
    """Base of the messages between value servers; `content.chain` has a diagram."""


class FollowValue(PeerMessage):
    """Send a value from this offset, as it arrives."""

    name: str
    offset: int


class ValuePiece(PeerMessage, WithPayload):
    """The next bytes of the value.

    Empty as a keepalive, or with the key once the value is complete.
    """

    nbytes: int
    key: str = ""


def is_name(text: object) -> bool:
    """Return True if this is the name of a file in a store.

    It consists of 16 and 32 or 64 hexadecimal digits, so it cannot lead outside the store.
    """
    # Not `match` with a `$`, which accepts a newline at the end.
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def is_key(text: object) -> bool:
    """Return True if this is an xxh3-128 or a SHA-256 in hex."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


# Names become paths in the store: anything else must be refused before it is used.
def _check(message: Any) -> None:
    names = [*getattr(message, "names", ()), *([message.name] if hasattr(message, "name") else [])]
    keys = [message.key] if hasattr(message, "key") else []
    if isinstance(message, Adopt) and not _NONCE.fullmatch(message.nonce):
        raise ValueError(f"not the beginning of a name of a store: {message.nonce!r}")
    if isinstance(message, Assemble):
        names += [name for name, _, _ in message.slices]
    if not all(map(is_name, names)) or not all(map(is_key, keys)):
        raise ValueError(f"not a name of a store: {[*names, *keys]!r}")


def _check_peer(message: Any) -> None:
    if isinstance(message, FollowValue) and not is_name(message.name):
        raise ValueError(f"not a name of a store: {message.name!r}")


CODEC: Codec[StoreMessage] = Codec(*StoreMessage.__subclasses__(), max_line=64 << 20, check=_check)
# A server reads the payload of a peer into a buffer of `PIECE_BYTES`: no larger one may pass.
PEER_CODEC: Codec[PeerMessage] = Codec(
    FollowValue, ValuePiece, max_line=1 << 12, max_payload=PIECE_BYTES, check=_check_peer
)
encode, decode, decoder = CODEC.encode, CODEC.decode, CODEC.decoder
