"""Protocol for copying files between the notebook and a process on a node.

notebook                                     node
Stat, List, Hash, Compare           →
                                    ←   StatReply, ListReply, HashReply, CompareReply
Write, (FileStart, (FileChunk | FilePiece)…)…, EndOfFiles →
                                    ←   DiskFull?, WriteReply
Include (in a Write, of a Compare)  →
                                    ←   Included
SendFiles                           →
                                    ←   (FileStart, (FileChunk | FilePiece)… | FileFailed)…,
                                        EndOfFiles, SendFilesReply
Cancel                              →   the reply comes early, and is incomplete
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

from skymagic.wire.codec import CHUNK, Codec, FrozenMessage, WithPayload


class FileMessage(FrozenMessage):
    """Base of this protocol's messages."""


class Stat(FileMessage):
    """Ask for the kind of file at a path."""

    path: str


class StatReply(FileMessage):
    """Absolute path and the kind of file there: "file", "folder" or ""; or the reason why the path
    is invalid.
    """

    path: str = ""
    kind: str = ""
    problem: str = ""


class List(FileMessage):
    """List a source; later requests refer to its entries by number."""

    path: str
    follow: bool
    """Follow links that lead out of the source."""


@dataclass(frozen=True)
class Top:
    """A file or folder named as the source, used to detect a copy onto itself.

    Attributes:
        name: its last name.
        kind: ``file`` or ``folder``.
        real: its path without links.
        device, number: device of its file system, and inode number.
    """

    name: str
    kind: str
    real: str
    device: int
    number: int


class ListReply(FileMessage):
    """Contents of the source, as a `content.transfer.listing.Listing` describes them."""

    columns: list[list[Any]]
    """Columns of the entries, as in `Compare`."""
    tops: list[Top]
    contents: bool
    notes: list[str]
    problems: list[str]
    machine: str


class Hash(FileMessage):
    """Hash these files of the listing."""

    numbers: list[int]


class HashReply(FileMessage):
    """Digest of each file (`content.transfer.pieces`); "" if it cannot be read."""

    hashes: list[str]


class Compare(FileMessage):
    """Compare these entries, which come from `tops` on the machine `origin`, with the contents of
    the folder `base`.
    """

    base: str
    columns: list[list[Any]]
    """Entries as a list for each field of `content.transfer.listing.Entry`.

    Similar values are adjacent, and compress well.
    """
    tops: list[Top]
    contents: bool
    origin: str
    mirror: bool


class CompareReply(FileMessage):
    """Actions required, by entry number.

    Attributes:
        to_send: files to be sent.
        ask: files with the same size but another time; their digests decide.
        present: pairs of a number and a `PresentPieces` text, for all files in `ask` and for large
            files in `to_send`.
        problems: reasons why it cannot be done.
    """

    to_send: list[int]
    ask: list[int]
    present: list[tuple[int, str]]
    problems: list[str]


class Write(FileMessage):
    """Announce that files of the last `Compare` follow, by number."""

    to_write: list[int]
    same_content: list[int]
    """Files whose content is the same already, and only the times are to be set."""


class WriteReply(FileMessage):
    """Numbers of files written and removed, problems, and the number of bytes received."""

    files: int
    removed: int
    problems: list[str]
    nbytes: int


class SendFiles(FileMessage):
    """Send these files of the listing."""

    numbers: list[int]
    remote_digests: list[str]
    """Pieces of each file that the notebook already has, as in `CompareReply.present`."""


class SendFilesReply(FileMessage):
    """End of the files requested by `SendFiles`."""


class Include(FileMessage):
    """Read the next frames from this file in `store`, the folder of the node's store."""

    store: str
    name: str
    deflated: bool
    """Inflate the file first, in one go, with zlib."""


class Included(FileMessage):
    """Acknowledge that the whole file was read."""


class Cancel(FileMessage):
    """Stop the current operation early."""


class DiskFull(FileMessage):
    """The disk is full; stop sending."""


class FileStart(FileMessage, WithPayload):
    """Start of a file with its first bytes; small files fit whole."""

    number: int
    mtime: int
    """Modification time in nanoseconds, read before the file's content, so that a later change
    shows.
    """
    size: int
    """Size of the file in bytes; the receiver accepts no more."""
    last: bool
    """True if these are all of its bytes."""
    nbytes: int


class FileChunk(FileMessage, WithPayload):
    """Next bytes of the file."""

    last: bool
    nbytes: int


class FilePiece(FileMessage):
    """Reference to a piece that the receiver has, in place of the file's next bytes: its number,
    and its xxh3-128 in hex.
    """

    number: int
    digest: str
    last: bool


class FileFailed(FileMessage):
    """The file cannot be read, or not to its end."""

    number: int
    reason: str


class EndOfFiles(FileMessage):
    """End of the files."""


FilePart = FileStart | FileChunk | FilePiece | FileFailed
CODEC: Codec[FileMessage] = Codec(
    *FileMessage.__subclasses__(), max_line=1 << 30, max_payload=CHUNK
)
"""The listing of a million files takes a tenth of the longest line."""
encode, messages = CODEC.encode, CODEC.messages


def joined(frames: Iterable[bytes]) -> Generator[bytes, None, None]:
    """Yield the same bytes in fewer pieces, by joining small ones."""
    # A frame may be a file of a few bytes, a folder may have thousands of these, and each piece is
    # written separately.
    waiting: list[bytes] = []
    size = 0
    for frame in frames:
        # Send what is waiting before it grows beyond a chunk.
        if size + len(frame) > CHUNK and waiting:
            yield b"".join(waiting)
            waiting, size = [], 0
        waiting.append(frame)
        size += len(frame)
    if waiting:
        yield b"".join(waiting)
