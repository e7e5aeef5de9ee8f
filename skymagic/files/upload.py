"""What all nodes get: compared with each of them first, then what several of them lack once for all of these."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from functools import partial

from skymagic.cluster import Node
from skymagic.files.changes import PARTLY_COPIED, ByteCounter, changes, copied
from skymagic.files.clients import FileClient, FileClients, NodeFailed
from skymagic.files.messages import Copied
from skymagic.files.multicast import DataPlane, Multicast
from skymagic.files.transfer.entries import Entry
from skymagic.files.transfer.folders import ListedFiles
from skymagic.files.transfer.listing import Listing, digests
from skymagic.files.transfer.pieces import LARGE, common
from skymagic.files.transfer.sending import OnBytes, encoded_files
from skymagic.wire import files as wire

MANY_FILES = 1000
"""Entries from which all nodes are asked at once what they lack."""
WORTHWHILE_BYTES = 4 << 20
"""Bytes from which the data plane's own round trips are worth it."""


class Upload:
    """Brings entries to all nodes.

    Args:
        clients: of these nodes.
        found: what is here.
        entries: of it, with the names that they take there.
        counter: gets the bytes that are sent.
        plane: carries what several nodes lack; None where there is none.
    """

    def __init__(
        self,
        clients: FileClients,
        found: Listing,
        entries: Sequence[Entry],
        counter: ByteCounter,
        plane: DataPlane | None,
    ) -> None:
        self._clients, self._found, self._entries = clients, found, entries
        self._counter, self._plane = counter, plane

    def run(self, bases: Mapping[Node, str], *, mirror: bool) -> tuple[Copied, ...]:
        """Compare and send, into these folders.

        Raises:
            FilesError: what went wrong, of all nodes at once.
        """
        different = self._compare(bases, mirror)
        pieces = self._pieces(different)
        groups: dict[object, list[FileClient]] = {}
        for client, change in different.items():
            groups.setdefault((tuple(change.want), frozenset(pieces[client])), []).append(client)
        there: dict[FileClient, dict[int, str]] = {}
        shared: dict[FileClient, Multicast | None] = {}
        for members in groups.values():
            first = members[0]
            alike = {number: common([pieces[client][number] for client in members]) for number in pieces[first]}
            there |= dict.fromkeys(members, alike)
            shared |= dict.fromkeys(members, self._shared(different[first].want, members, alike))

        def write(client: FileClient) -> Copied:
            change = different[client]
            reply = self._send(client, change, there[client], shared[client])
            if reply.problems:
                raise NodeFailed(*reply.problems)
            return copied(client.node, self._entries, change.want, reply.nbytes, reply.removed, self._found.notes)

        return tuple(self._clients.each(write, PARTLY_COPIED))

    def _pieces(self, different: Mapping[FileClient, wire.Write]) -> dict[FileClient, dict[int, str]]:
        """What is on each node of the large files that it gets, by number."""

        def ask(client: FileClient) -> tuple[FileClient, dict[int, str]]:
            large = [number for number in different[client].want if self._entries[number].size >= LARGE]
            found = client.request(wire.FindPieces(large), wire.FindPiecesReply).pieces if large else []
            return client, {number: text for number, text in zip(large, found, strict=True) if text}

        return dict(self._clients.each(ask))

    def _compare(self, bases: Mapping[Node, str], mirror: bool) -> dict[FileClient, wire.Write]:
        """What each node is to get."""
        found = self._found
        rows, tops = [entry.plain() for entry in self._entries], [vars(top) for top in found.tops]
        columns = [list(column) for column in zip(*rows, strict=True)]

        requests: dict[Node, wire.FileMessage] = {
            node: wire.Compare(base, columns, tops, found.contents, found.machine, mirror)
            for node, base in bases.items()
        }

        def compare(client: FileClient) -> tuple[FileClient, wire.CompareReply]:
            reply = client.request(requests[client.node], wire.CompareReply)
            if reply.problems:
                raise NodeFailed(*reply.problems)
            return client, reply

        plane, several = self._plane, len(bases) > 1 and len(set(bases.values())) == 1
        if plane is None or not several or len(rows) < MANY_FILES:
            replies = dict(self._clients.each(compare))
        else:
            key = plane.put([zlib.compress(wire.encode(next(iter(requests.values()))), 9)])
            try:
                requests |= {node: plane.include(node, key, deflated=True) for node in bases}
                replies = dict(self._clients.each(compare))
            finally:
                plane.drop([key])
        asked = sorted({number for reply in replies.values() for number in reply.ask})
        with closing(ListedFiles()) as listed:
            hashes = list(digests((found.places[number] for number in asked), listed.open))
        known = dict(zip(asked, hashes, strict=True))
        return {client: changes(reply.want, reply.ask, reply.hashes, known) for client, reply in replies.items()}

    def _shared(self, want: Sequence[int], members: Sequence[FileClient], there: Mapping[int, str]) -> Multicast | None:
        """What carries these files to several nodes at once; None where each gets them by itself."""
        nbytes = sum(self._entries[number].size for number in want)
        if self._plane is None or len(members) == 1 or nbytes < WORTHWHILE_BYTES:
            self._counter.total += nbytes * len(members)
            return None
        self._counter.total += nbytes
        frames = self._frames(want, there, lambda name, count: None)
        return Multicast(self._plane, members, frames, partial(self._counter.add, self._found.tops[0].name))

    def _frames(self, want: Sequence[int], there: Mapping[int, str], told: OnBytes) -> Generator[bytes, None, None]:
        files = ((number, self._entries[number], self._found.places[number]) for number in want)
        return wire.joined(encoded_files(files, told, there))

    def _send(
        self, client: FileClient, change: wire.Write, there: Mapping[int, str], shared: Multicast | None
    ) -> wire.WriteReply:
        if shared is None:
            return client.send(change, self._frames(change.want, there, self._counter.add))
        try:
            return client.send(change, shared.messages(client), partial(shared.included, client))
        finally:
            shared.leave(client)
