"""The protocol of copying files between the notebook and a process on a node: requests, replies, and files in chunks.

notebook                                     node
Stat, List, Hash, Compare           →
                                    ←   StatReply, ListReply, HashReply, CompareReply
Write, (FileStart, (FileChunk | FilePiece)…)…, EndOfFiles →
                                    ←   DiskFull?, WriteReply
Include (in a Write, of a Compare)  →
                                    ←   Included
SendFiles                           →
                                    ←   (FileStart, (FileChunk | FilePiece)… | FileFailed)…, EndOfFiles, SendFilesReply
Cancel                              →   the reply comes early, and is incomplete
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from skymagic.wire.codec import Codec, FrozenMessage, WithPayload

CHUNK = 1 << 20
"""Most bytes after one message, and most that are written at once."""


class FileMessage(FrozenMessage):
    """Base of this protocol's messages."""


class Stat(FileMessage):
    """What is at this path?"""

    path: str


class StatReply(FileMessage):
    """The path in full, and what is there: "file", "folder" or ""; or why the path means nothing."""

    path: str = ""
    kind: str = ""
    problem: str = ""


class List(FileMessage):
    """List a source; later requests mean its entries by their numbers."""

    path: str
    follow: bool
    """Whether links that lead out of it are followed."""


class ListReply(FileMessage):
    """A `files.transfer.listing.Listing` as plain values."""

    listing: dict[str, Any]


class Hash(FileMessage):
    """Hash these files of the listing."""

    numbers: list[int]


class HashReply(FileMessage):
    """The digest of each (`files.transfer.pieces`); "" for one that cannot be read."""

    hashes: list[str]


class Compare(FileMessage):
    """Compare these entries, which come from `tops` on the machine `origin`, with what is in the folder `base`."""

    base: str
    columns: list[list[Any]]
    """Columns of the entries, each as `Entry.plain`: what is alike stands together, and is deflated well."""
    tops: list[dict[str, Any]]
    contents: bool
    origin: str
    mirror: bool


class CompareReply(FileMessage):
    """What must be done, by numbers of entries.

    Attributes:
        want: files to be sent.
        ask: files of the same size and another time: their digests tell.
        there: pairs of a number and what `PresentPieces` says: of all files to ask for, and of large ones to be sent.
        problems: why it cannot be done.
    """

    want: list[int]
    ask: list[int]
    there: list[tuple[int, str]]
    problems: list[str]


class Write(FileMessage):
    """Files come that the last `Compare` named: these by number; those in `equal` need only their times."""

    want: list[int]
    equal: list[int]


class WriteReply(FileMessage):
    """How many files were written and removed, what went wrong, and how many bytes have come."""

    files: int
    removed: int
    problems: list[str]
    nbytes: int


class SendFiles(FileMessage):
    """Send these files of the listing."""

    numbers: list[int]
    pieces: list[str]
    """What is here of each, as in `CompareReply.there`."""


class SendFilesReply(FileMessage):
    """All files were sent."""


class Include(FileMessage):
    """What comes next is in this file of the node's store, which is the folder `store`."""

    store: str
    name: str
    deflated: bool
    """Whether the file is to be inflated first; by zlib, at once."""


class Included(FileMessage):
    """All that is in the file was taken."""


class Cancel(FileMessage):
    """Come to an end with what you are doing."""


class DiskFull(FileMessage):
    """Nothing more can be written: send no more."""


class FileStart(FileMessage, WithPayload):
    """A file begins, with its first bytes; small ones are whole with it."""

    number: int
    mtime: int
    """Nanoseconds; from before the file was read, so that a later change shows."""
    size: int
    """Bytes of the file: the receiver takes no more."""
    last: bool
    """Whether these are all of its bytes."""
    nbytes: int


class FileChunk(FileMessage, WithPayload):
    """More bytes of the file."""

    last: bool
    nbytes: int


class FilePiece(FileMessage):
    """The next bytes of the file are a piece that is there: its number, and its xxh3-128 in hex."""

    number: int
    digest: str
    last: bool


class FileFailed(FileMessage):
    """The file cannot be read, or not to its end."""

    number: int
    reason: str


class EndOfFiles(FileMessage):
    """No more files come."""


FilePart = FileStart | FileChunk | FilePiece | FileFailed
CODEC: Codec[FileMessage] = Codec(
    *FileMessage.__subclasses__(), max_line=1 << 30, max_payload=CHUNK
)
"""The listing of a million files is a tenth of the longest line."""
encode, messages = CODEC.encode, CODEC.messages


def joined(frames: Iterable[bytes]) -> Generator[bytes, None, None]:
    """The same bytes in fewer pieces: small ones are put together."""
    waiting: list[bytes] = []
    size = 0
    for frame in frames:
        if size + len(frame) > CHUNK and waiting:
            yield b"".join(waiting)
            waiting, size = [], 0
        waiting.append(frame)
        size += len(frame)
    if waiting:
        yield b"".join(waiting)
