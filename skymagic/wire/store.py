"""The protocol of a node's value server: messages (`wire.codec`) between it and the notebook; `data.remote` draws them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from skymagic.wire.codec import Codec, WithPayload

_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}")
_KEY = re.compile(r"[0-9a-f]{32}")


# -- notebook → value server ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """First of all: the pool's settings for all of its value servers."""

    address: str = ""
    """Where other nodes reach this one; empty: there are none, and nothing listens."""
    public: str = ""
    secret: str = ""
    """The pool's key pair, which all of its value servers have and nobody else (CURVE, Z85)."""
    keep: int = 0
    """Bytes that values kept for later pools may fill in the user's folder; 0: none is kept, none is looked for."""
    keep_after: float = 0.0
    """Seconds that a value must have been here to be worth keeping."""
    share: float = 0.5
    """The part of a file system's free space that values may fill."""


@dataclass(frozen=True)
class Query:
    """Which of these are here, or were kept by an earlier pool: key, name and length of each."""

    number: int
    values: list[tuple[str, str, int]]


@dataclass(frozen=True)
class Put:
    """A value comes: `PutChunk`s, then `PutEnd`."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class PutChunk(WithPayload):
    """Bytes of a value."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class PutEnd:
    """That was all of it: verify it against its key, the content's hash."""

    name: str
    key: str


@dataclass(frozen=True)
class Replicate:
    """Get a value from another node's server, as it arrives there, from the offset on that is here already."""

    name: str
    nbytes: int
    address: str
    port: int


@dataclass(frozen=True)
class Delete:
    """Unlink these files, complete or not."""

    names: list[str]


@dataclass(frozen=True)
class Read:
    """Send a file's bytes from an offset on."""

    number: int
    name: str
    offset: int


@dataclass(frozen=True)
class CancelRead:
    """Send no more for the `Read` of this number."""

    number: int


# -- value server → notebook ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The server has the store, and listens."""

    port: int
    """For other nodes; 0 when there are none."""
    room: int
    """Bytes that its store may still take."""


@dataclass(frozen=True)
class QueryReply:
    """Answer to `Query`. What is neither missing nor present is arriving: `Stored` or `StoreFailed` follows."""

    number: int
    missing: list[str]
    present: list[str]
    room: int


@dataclass(frozen=True)
class Stored:
    """A value is complete and as its key says."""

    name: str
    key: str
    room: int
    note: str = ""
    """What the user should know of it."""


@dataclass(frozen=True)
class StoreFailed:
    """A value could not be stored."""

    name: str
    reason: str
    errno: int = 0


@dataclass(frozen=True)
class ReadReply:
    """Answer to `Read`: bytes that will come; -1: there is no such file."""

    number: int
    nbytes: int


@dataclass(frozen=True)
class ReadChunk(WithPayload):
    """Bytes of a file that is read."""

    number: int
    nbytes: int
    deflated: bool
    checksum: str
    """xxh3-64 of the piece as it lies in the file."""


@dataclass(frozen=True)
class Heartbeat:
    """The server lives; sent every 2 s."""


Message = (
    Settings | Query | Put | PutChunk | PutEnd | Replicate | Delete | Read | CancelRead
    | Ready | QueryReply | Stored | StoreFailed | ReadReply | ReadChunk | Heartbeat
)  # fmt: skip


def is_name(text: object) -> bool:
    """Whether this is the name of a file in a store: 16 and 32 hexadecimal digits, so that it leads nowhere else."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def is_key(text: object) -> bool:
    """Whether this is an xxh3-128 in hex."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def _check(message: Any) -> None:
    names = [*getattr(message, "names", ()), *([message.name] if hasattr(message, "name") else [])]
    keys = [message.key] if hasattr(message, "key") else []
    if isinstance(message, Query):
        names += [name for _, name, _ in message.values]
        keys += [key for key, _, _ in message.values]
    if not all(map(is_name, names)) or not all(map(is_key, keys)):
        raise ValueError(f"not a name of a store: {[*names, *keys]!r}")


CODEC: Codec[Message] = Codec(Message, max_line=64 << 20, check=_check)
encode, decode, decoder = CODEC.encode, CODEC.decode, CODEC.decoder
