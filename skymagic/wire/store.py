"""What the notebook and a node's depot say to each other: messages (`wire.codec`), of which `Body` and `Piece` have raw bytes behind them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from skymagic.wire.codec import Codec, WithPayload

_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}")
_KEY = re.compile(r"[0-9a-f]{32}")


# -- notebook → depot ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """First of all: the pool's terms."""

    address: str = ""
    """Where other nodes reach this one; empty: there are none, and nothing listens."""
    public: str = ""
    secret: str = ""
    """The pool's key pair, which all of its depots have and nobody else (CURVE, Z85)."""
    keep: int = 0
    """Bytes that values kept for later pools may fill in the user's folder; 0: none is kept, none is looked for."""
    keep_after: float = 0.0
    """Seconds that a value must have been here to be worth keeping."""
    share: float = 0.5
    """The part of a file system's free space that values may fill."""


@dataclass(frozen=True)
class Look:
    """Which of these are here, or were kept by an earlier pool: key, name and length of each."""

    number: int
    values: list[tuple[str, str, int]]


@dataclass(frozen=True)
class Put:
    """A value comes: bodies, then its seal."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Body(WithPayload):
    """Raw bytes of a value follow."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Seal:
    """That was all of it."""

    name: str
    key: str


@dataclass(frozen=True)
class Follow:
    """Get a value from another node's depot, as it arrives there; what has come of it already is not asked for again."""

    name: str
    nbytes: int
    address: str
    port: int


@dataclass(frozen=True)
class Abandon:
    """What has come of these values is not wanted."""

    names: list[str]


@dataclass(frozen=True)
class Drop:
    """Unlink these files."""

    names: list[str]


@dataclass(frozen=True)
class Read:
    """Send a file's bytes from an offset on."""

    number: int
    name: str
    offset: int


@dataclass(frozen=True)
class Stop:
    """What is being read under this number is not wanted any more."""

    number: int


# -- depot → notebook ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """The depot is ready."""

    port: int
    room: int
    """Bytes that its store may still take."""


@dataclass(frozen=True)
class Looked:
    """Answer to `Look`: names that are not here; the others are, or will be said to have landed."""

    number: int
    lacks: list[str]
    here: list[str]
    room: int


@dataclass(frozen=True)
class Landed:
    """A value is complete and as its key says."""

    name: str
    key: str
    room: int
    note: str = ""
    """What the user should know of it."""


@dataclass(frozen=True)
class Failed:
    """A value did not land."""

    name: str
    reason: str
    errno: int = 0


@dataclass(frozen=True)
class Size:
    """Answer to `Read`: bytes that will come; -1: there is no such file."""

    number: int
    nbytes: int


@dataclass(frozen=True)
class Piece(WithPayload):
    """Raw bytes follow: a piece of a file that is read."""

    number: int
    nbytes: int
    packed: bool
    """Whether they are deflated."""
    check: str
    """xxh3-64 of the piece as it lies in the file."""


@dataclass(frozen=True)
class Beat:
    """The depot lives."""


Message = (
    Open | Look | Put | Body | Seal | Follow | Abandon | Drop | Read | Stop
    | Opened | Looked | Landed | Failed | Size | Piece | Beat
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
    if isinstance(message, Look):
        names += [name for _, name, _ in message.values]
        keys += [key for key, _, _ in message.values]
    if not all(map(is_name, names)) or not all(map(is_key, keys)):
        raise ValueError(f"not a name of a store: {[*names, *keys]!r}")


CODEC: Codec[Message] = Codec(Message, max_line=64 << 20, check=_check)
encode, decode, decoder = CODEC.encode, CODEC.decode, CODEC.decoder
