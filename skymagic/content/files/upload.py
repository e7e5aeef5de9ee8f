"""Uploads to several nodes: files that several nodes lack are sent once, over the data plane.

All nodes are compared first.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from skymagic.cluster import Node
from skymagic.content.base import Buffer
from skymagic.content.chunks import digest
from skymagic.content.files.changes import (
    INCOMPLETE_COPY,
    ByteCounter,
    CopyResult,
    copy_result,
    files_to_write,
    present_pieces,
)
from skymagic.content.files.clients import POLL_INTERVAL, FileClient, FileClients, NodeFailed
from skymagic.content.store import OVERFLOW
from skymagic.content.transfer.listing import Entry, Listing, columns_of
from skymagic.content.transfer.pieces import OnBytes, common, encoded_files, listed_digests
from skymagic.wire import files as files_wire

if TYPE_CHECKING:
    from skymagic.content.remote.remote_store import RemoteStore

BATCH_BYTES = 64 << 20
"""Bytes per batch; at most two batches lie in the nodes' stores."""


@dataclass(frozen=True)
class DataPlane:
    """The stores of a pool's nodes.

    Attributes:
        store: all of them.
        folder: returns the path of a node's store on that node.
    """

    store: RemoteStore
    folder: Callable[[Node], str]

    def put(
        self,
        pieces: Sequence[Buffer],
        progress: Callable[[int], None] = lambda sent: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> str:
        """Send bytes to all nodes, which keep them until `drop`; return their key.

        Args:
            meanwhile: called when everything was sent, before it has arrived.

        Raises:
            NodeFailed: a node has no room.
            PoolError: a node cannot be reached.
        """
        key = digest(pieces)
        # before it is there: a cell that runs meanwhile removes everything that is not pinned
        self.store.pin([key])
        try:
            self.store.put(key, pieces, sum(map(len, pieces)), progress)
            meanwhile()
            self.store.settle()
        except BaseException as problem:
            self.drop([key])
            raise NodeFailed(str(problem)) if isinstance(problem, OSError) else problem from None
        return key

    def drop(self, keys: Sequence[str]) -> None:
        """Remove bytes sent by `put`; a key sent twice is kept until it is dropped twice."""
        self.store.unpin(keys)
        self.store.drop(key for key in keys if not self.store.pinned(key))

    def paths(self, node: Node, key: str) -> list[str]:
        """Return the paths where a value may be on a node."""
        name = self.store.name(key)
        return [f"{self.folder(node)}/{name}", f"{self.folder(node)}/{OVERFLOW}/{name}"]

    def include(self, node: Node, key: str, *, deflated: bool = False) -> files_wire.Include:
        """Return the message that makes a node continue with a file in its store."""
        return files_wire.Include(self.folder(node), self.store.name(key), deflated)


class Multicast:
    """A stream of messages for several nodes.

    Each client's thread iterates over `messages`; the first client that needs a batch sends it to
    all nodes.
    """

    def __init__(
        self,
        plane: DataPlane,
        clients: Sequence[FileClient],
        stream: Iterator[bytes],
        on_sent: Callable[[int], None],
    ) -> None:
        self._plane, self._stream, self._on_sent = plane, stream, on_sent
        self._bringing = threading.Lock()
        self._next: list[bytes] = []
        self._keys: list[str] = []  # keys of the batches, in order; "" at the end
        self._problem: BaseException | None = None
        # number of batches that each node has read; nodes that take no more are removed
        self._taken = dict.fromkeys(clients, 0)
        self._dropped = 0
        self._changed = threading.Condition()  # held while the two attributes above change

    def messages(self, client: FileClient) -> Generator[bytes, None, None]:
        """Yield a node's own messages, which point to the batches.

        One batch is sent while the node reads another.
        """
        for number in itertools.count():
            if not self._wait(client, number - 1) or not (key := self._batch(client, number)):
                return
            yield files_wire.encode(self._plane.include(client.node, key))

    def included(self, client: FileClient) -> None:
        """Record that the node has read one more batch."""
        with self._changed:
            if client in self._taken:  # an interrupted client may have left
                self._taken[client] += 1
        self._drop()

    def leave(self, client: FileClient) -> None:
        """Record that the node takes no more batches. Safe to call twice."""
        with self._changed:
            self._taken.pop(client, None)
        self._drop()

    def _wait(self, client: FileClient, taken: int) -> bool:
        """Wait until the node has read this many batches; return False if it will not."""
        with self._changed:
            while self._taken[client] < taken and not client.replied:
                self._changed.wait(POLL_INTERVAL)
                client.check()
        return not client.replied

    def _batch(self, client: FileClient, number: int) -> str:
        """Return the key of a batch; "" after the last one."""
        with self._bringing:
            if self._problem is not None:
                raise self._problem
            if number == len(self._keys):
                try:
                    self._keys.append(self._bring(client))
                except BaseException as problem:
                    self._problem = problem
                    raise
            return self._keys[number]

    def _bring(self, client: FileClient) -> str:
        if not self._keys:
            self._read()
        if not self._next:
            return ""
        sent, nbytes = 0, sum(map(len, self._next))

        def progress(done: int) -> None:
            nonlocal sent
            client.check()
            self._on_sent(done - sent)
            sent = done

        # The next batch is read while the last bytes of this one are in transit.
        key = self._plane.put(self._next, progress, self._read)
        self._on_sent(nbytes - sent)
        return key

    def _read(self) -> None:
        self._next, nbytes = [], 0
        while nbytes < BATCH_BYTES and (data := next(self._stream, b"")):
            self._next.append(data)
            nbytes += len(data)

    def _drop(self) -> None:
        """Remove the batches that all nodes have read."""
        with self._changed:
            end = min(self._taken.values(), default=len(self._keys))
            read_by_all = [key for key in self._keys[self._dropped : end] if key]
            self._dropped = max(end, self._dropped)
            self._changed.notify_all()
        self._plane.drop(read_by_all)


# -- uploads to all nodes --------------------------------------------------------------------------


MANY_FILES = 1000
"""Number of entries above which all nodes are compared at once."""
WORTHWHILE_BYTES = 4 << 20
"""Bytes above which the data plane's round trips pay off."""


class Upload:
    """An upload of entries to all nodes."""

    def __init__(
        self,
        clients: FileClients,
        listing: Listing,
        entries: Sequence[Entry],
        counter: ByteCounter,
        plane: DataPlane | None,
    ) -> None:
        self._clients, self._found, self._entries = clients, listing, entries
        self._counter, self._plane = counter, plane

    def run(self, bases: Mapping[Node, str], *, mirror: bool) -> tuple[CopyResult, ...]:
        """Compare with the contents of these folders, and send what differs.

        Raises:
            FilesError: problems of all nodes at once.
        """
        replies = self._compare(bases, mirror)
        unclear = sorted({number for reply in replies.values() for number in reply.ask})
        digests = dict(
            zip(
                unclear,
                listed_digests(self._found.file_places[number] for number in unclear),
                strict=True,
            )
        )
        different = {client: files_to_write(reply, digests) for client, reply in replies.items()}
        pieces = {
            client: present_pieces(self._entries, different[client].to_write, reply.present)
            for client, reply in replies.items()
        }
        groups: dict[object, list[FileClient]] = {}
        for client, change in different.items():
            groups.setdefault((tuple(change.to_write), frozenset(pieces[client])), []).append(
                client
            )
        present: dict[FileClient, dict[int, str]] = {}
        shared: dict[FileClient, Multicast | None] = {}
        for members in groups.values():
            first = members[0]
            alike = {
                number: common([pieces[client][number] for client in members])
                for number in pieces[first]
            }
            present |= dict.fromkeys(members, alike)
            shared |= dict.fromkeys(
                members, self._shared(different[first].to_write, members, alike)
            )

        def write(client: FileClient) -> CopyResult:
            change = different[client]
            reply = self._send(client, change, present[client], shared[client])
            if reply.problems:
                raise NodeFailed(*reply.problems)
            return copy_result(
                client.node,
                self._entries,
                change.to_write,
                reply.nbytes,
                reply.removed,
                self._found.notes,
            )

        return tuple(self._clients.run_on_all(write, INCOMPLETE_COPY))

    def _compare(
        self, bases: Mapping[Node, str], mirror: bool
    ) -> dict[FileClient, files_wire.CompareReply]:
        """Return each node's differences."""
        source = self._found
        columns = columns_of(self._entries)
        requests: dict[Node, files_wire.FileMessage] = {
            node: files_wire.Compare(
                base, columns, source.tops, source.contents, source.machine, mirror
            )
            for node, base in bases.items()
        }

        def compare(client: FileClient) -> tuple[FileClient, files_wire.CompareReply]:
            reply = client.request(requests[client.node], files_wire.CompareReply)
            if reply.problems:
                raise NodeFailed(*reply.problems)
            return client, reply

        plane, several = self._plane, len(bases) > 1 and len(set(bases.values())) == 1
        if plane is None or not several or len(self._entries) < MANY_FILES:
            return dict(self._clients.run_on_all(compare))
        key = plane.put([zlib.compress(files_wire.encode(next(iter(requests.values()))), 9)])
        try:
            requests |= {node: plane.include(node, key, deflated=True) for node in bases}
            return dict(self._clients.run_on_all(compare))
        finally:
            plane.drop([key])

    def _shared(
        self, want: Sequence[int], members: Sequence[FileClient], remote_digests: Mapping[int, str]
    ) -> Multicast | None:
        """Return a stream of these files to several nodes at once; None if each node gets them
        separately.
        """
        nbytes = sum(self._entries[number].size for number in want)
        if self._plane is None or len(members) == 1 or nbytes < WORTHWHILE_BYTES:
            self._counter.total += nbytes * len(members)
            return None
        self._counter.total += nbytes
        frames = self._frames(want, remote_digests, lambda name, count: None)
        return Multicast(
            self._plane, members, frames, partial(self._counter.add, self._found.tops[0].name)
        )

    def _frames(
        self, want: Sequence[int], remote_digests: Mapping[int, str], on_bytes: OnBytes
    ) -> Generator[bytes, None, None]:
        files = (
            (number, self._entries[number], self._found.file_places[number]) for number in want
        )
        return files_wire.joined(encoded_files(files, on_bytes, remote_digests))

    def _send(
        self,
        client: FileClient,
        change: files_wire.Write,
        remote_digests: Mapping[int, str],
        shared: Multicast | None,
    ) -> files_wire.WriteReply:
        if shared is None:
            return client.send(
                change, self._frames(change.to_write, remote_digests, self._counter.add)
            )
        try:
            return client.send(change, shared.messages(client), partial(shared.included, client))
        finally:
            shared.leave(client)
