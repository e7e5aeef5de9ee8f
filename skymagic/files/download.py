"""What one node sends."""

from __future__ import annotations

from collections.abc import Callable

from skymagic.cluster import Node
from skymagic.files.changes import ByteCounter, changes, copied
from skymagic.files.clients import FileClient, NodeFailed
from skymagic.files.destination import unrequested
from skymagic.files.messages import Copied
from skymagic.files.transfer.entries import renamed, unsafe
from skymagic.files.transfer.listing import Listing
from skymagic.files.transfer.pieces import LARGE, PIECE
from skymagic.files.transfer.receiving import Receiver
from skymagic.wire import files as wire


class Download:
    """A download from one node: listed and compared when it is made.

    Raises:
        NodeFailed: why it cannot be downloaded.
    """

    def __init__(
        self, client: FileClient, src: str, place: Callable[[Node, Listing], tuple[str, str | None]], follow: bool
    ) -> None:
        self.node = client.node
        self._found = Listing.of(client.request(wire.List(src, follow), wire.ListReply).listing)
        if problems := [*self._found.problems, *unsafe(self._found.entries), *unrequested(self._found, src)]:
            raise NodeFailed(*problems)
        base, name = place(self.node, self._found)
        self._entries = renamed(self._found.entries, name)
        self._receiver = Receiver(base, self._entries)
        difference = self._receiver.compare(self._found.machine, self._found.tops, contents=self._found.contents)
        if difference.problems:
            raise NodeFailed(*difference.problems)
        asked = difference.ask
        theirs = client.request(wire.Hash(asked), wire.HashReply).hashes if asked else []
        here = dict(zip(asked, self._receiver.hashes(asked), strict=True))
        self._changes = changes(difference.want, asked, theirs, here)
        want = self._changes.want
        self.nbytes = sum(self._entries[number].size for number in want)
        large = [number for number in want if self._entries[number].size >= LARGE]
        there = dict(zip(large, self._receiver.pieces(large), strict=True))
        self._pieces = [there.get(number, "") for number in want]

    def run(self, client: FileClient, counter: ByteCounter) -> Copied:
        """Download it.

        Raises:
            NodeFailed: what could not be written.
        """
        receiver = self._receiver
        path = ""

        def take(message: wire.FilePart, payload: bytes | memoryview) -> bool:
            nonlocal path
            receiver.take(message, payload)
            if isinstance(message, wire.FileStart):
                path = self._entries[message.number].path
            counter.add(path, PIECE if isinstance(message, wire.FilePiece) else len(payload))
            return not receiver.disk_full

        try:
            receiver.begin(self._changes.want)
            client.receive(wire.SendFiles(self._changes.want, self._pieces), take)
            receiver.end(self._changes.equal)
        except (EOFError, OSError):
            receiver.abort(keep=not client.interrupted)
            raise
        finally:
            receiver.abort()
        if receiver.problems:
            raise NodeFailed(*receiver.problems)
        return copied(self.node, self._entries, self._changes.want, receiver.nbytes, 0, self._found.notes)
