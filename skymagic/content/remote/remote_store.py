"""The stores of several nodes as one: each file is sent once and ends up on every node.

Of a changed file only the pieces are sent that no other file on the nodes has, and the nodes
assemble it. The blocks have a fixed length, like those of rsync's receiving side. So a changed
element, an appended line or another layer is detected, but an insertion in the middle moves
everything after it, which is sent again.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import pairwise

from skymagic.cluster import Node
from skymagic.content.base import Buffer, Content, Store
from skymagic.content.chunks import ChunkIndex, chunk_hash, cut, digest
from skymagic.content.device import DeviceBytes
from skymagic.content.remote.client import Download
from skymagic.content.remote.clients import StoreClients
from skymagic.content.remote.replication import ReplicatedFile, Replication
from skymagic.errors import PoolError
from skymagic.wire import store, tls
from skymagic.wire.codec import CHUNK, Transport
from skymagic.wire.store import Slice


def recipe(
    lengths: Iterable[int], locations: Iterable[tuple[str, int] | None], remainder_file: str
) -> list[Slice]:
    """Return the slices of other files that make up a file, as few as possible.

    Args:
        lengths: length of each piece.
        locations: name and offset of each piece, or None for one that is in `remainder_file`, where
            these pieces follow one another.
        remainder_file: name of the file with the remaining pieces.
    """
    slices: list[Slice] = []
    rest_offset = 0
    for nbytes, location in zip(lengths, locations, strict=True):
        name, offset = location or (remainder_file, rest_offset)
        rest_offset += 0 if location else nbytes
        slices.append((name, offset, nbytes))
    joined = slices[:1]
    for (name, offset, nbytes), following in pairwise(slices):
        if following[:2] == (name, offset + nbytes):
            joined[-1] = (name, joined[-1][1], joined[-1][2] + following[2])
        else:
            joined.append(following)
    return joined


# -- prefetching -----------------------------------------------------------------------------------


FILES_PER_NODE = 2
"""Files to fetch from one node at a time: while one arrives, the next is requested."""


class Prefetch:
    """Fetches files in advance."""

    def __init__(self, fetch: Callable[[str, int, threading.Event], memoryview]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, int], tuple[Future[memoryview], threading.Event]] = {}

    def start(self, files: Iterable[tuple[str, int]]) -> None:
        """Start to fetch these files (name, node).

        Each will be taken or discarded once, in about this order.
        """
        queues: dict[int, list[tuple[str, int]]] = {}
        with self._lock:
            for file in files:
                self._pending[file] = Future(), threading.Event()
                # Reversed, because the threads pop from the end.
                queues.setdefault(file[1], []).insert(0, file)
        for queue in queues.values():
            for _ in range(min(FILES_PER_NODE, len(queue))):
                threading.Thread(
                    target=self._work, args=(queue,), name="skymagic-prefetch", daemon=True
                ).start()

    def take(self, name: str, node: int) -> memoryview:
        """Return a file's bytes. Raises the errors of `fetch`."""
        with self._lock:
            future, _ = self._pending.get((name, node), (None, None))
        if future is None:
            return self._fetch(name, node, threading.Event())
        try:
            return future.result()
        finally:
            if future.done():  # after an interrupt the file may still be discarded
                with self._lock:
                    self._pending.pop((name, node), None)

    def cancel(self, name: str, node: int) -> None:
        """Cancel a file that is not needed; safe to call twice."""
        with self._lock:
            _, unwanted = self._pending.pop((name, node), (None, None))
        if unwanted is not None:
            unwanted.set()

    def _work(self, queue: list[tuple[str, int]]) -> None:
        while queue:
            # Two threads share the queue: the other one may have just taken the last file.
            try:
                file = queue.pop()
            except IndexError:
                return
            with self._lock:
                future, unwanted = self._pending.get(file, (None, None))
            if future is None or unwanted is None:
                continue
            try:
                future.set_result(self._fetch(*file, unwanted))
            except BaseException as problem:
                future.set_exception(problem)


# -- the stores of several nodes as one ------------------------------------------------------------


class RemoteStore(Store):
    """The stores of a pool's nodes, filled through a value server on each.

    The servers are started in parallel on first use, and again after a lost connection.

    Args:
        nodes: nodes in the order of their numbers; `node` in a rank's reference is such a number.
        start: starts `skymagic.kernels.store.server STORE` on a node; STORE is the folder that its
            ranks use as their store.
        notify: called with one sentence when files are evicted or written to disk instead, or a
            node cannot be reached for a while.
        retry_timeout: seconds to retry a node that cannot be reached.
        silence_timeout: seconds without a message after which a connection counts as lost; a value
            server sends a heartbeat every two seconds.
        share: fraction of the free space in a node's shared memory that may be filled, 0 to 1.
        hash: hash of the content: `wire.store.XXH3`, or SHA256 for nodes without packages.
    """

    remote = True

    def __init__(
        self,
        nodes: Sequence[Node],
        start: Callable[[Node], Transport],
        notify: Callable[[str], None] | None = None,
        *,
        retry_timeout: float = 60.0,
        silence_timeout: float = 10.0,
        share: float = 0.5,
        hash: str = store.XXH3,
    ) -> None:
        super().__init__(notify)
        self._hash = hash
        self._nonce = secrets.token_hex(8)
        several = len(nodes) > 1
        pem = tls.certificate() if several else ""

        def settings(node: Node) -> store.Settings:
            return store.Settings(node.address if several else "", pem, share, hash)

        self._clients = StoreClients(
            nodes, start, settings, self._notify, retry_timeout, silence_timeout
        )
        self._replication = Replication(self._clients, self._notify, hash)
        self._prefetch = Prefetch(self._fetch)
        self._files: dict[str, ReplicatedFile] = {}
        self._chunks = ChunkIndex()
        self._sending = threading.RLock()  # held while values are sent: one thread at a time

    # -- sending -----------------------------------------------------------------------------------

    def unsent(self, data: Content) -> int:
        if isinstance(data, DeviceBytes) or len(data) < 2 * CHUNK or not self._chunks:
            return len(data)
        chunks = cut(data)
        located = zip(chunks, self._chunks.find(map(chunk_hash, chunks)), strict=True)
        return sum(len(chunk) for chunk, location in located if location is None)

    def put(
        self,
        key: str | None,
        pieces: Iterable[Content],
        nbytes: int,
        progress: Callable[[int], None] | None = None,
    ) -> str:
        # In host memory, because they are read several times and kept until all nodes have them.
        parts: list[Buffer] = [
            piece.read() if isinstance(piece, DeviceBytes) else piece for piece in pieces
        ]
        key = key or digest(parts, self._hash)
        with self._sending:
            if not self.missing([key]):
                return key
            self._clients.connect()
            file = ReplicatedFile(key, f"{self._nonce}-{key}", nbytes)
            self._make_room(nbytes)
            self._replication.add([file])
            try:
                hashes = self._assemble(file, parts, progress)
                file.pieces = parts
                self._replication.replicate(file, progress)
            except BaseException:
                self._replication.remove([file])
                raise
            self._files[file.key] = file
            # Otherwise another thread changed the value while it was sent, and the hashes are
            # stale.
            if file.key == key:
                self._chunks.add(key, hashes)
            return file.key

    def _assemble(
        self, file: ReplicatedFile, pieces: list[Buffer], progress: Callable[[int], None] | None
    ) -> list[bytes]:
        """Let the nodes assemble a file from pieces they have, after sending them the missing ones.

        Return the hashes of the file's pieces.
        """
        if len(pieces) != 1 or file.nbytes < 2 * CHUNK:
            return []
        chunks = cut(pieces[0])
        hashes = [chunk_hash(chunk) for chunk in chunks]
        locations = self._chunks.find(hashes)
        bases = {location[0] for location in locations if location}
        if not bases or file.placement.held or file.placement.sources:
            return hashes
        # The missing pieces may already be stored as a value, which must stay.
        before = self.keys()
        lacking = [
            chunk for chunk, location in zip(chunks, locations, strict=True) if location is None
        ]
        missing_key = ""
        # The nodes read from these files while they assemble the new one.
        self.pin(bases)
        try:
            missing_key = (
                self.put(None, lacking, sum(map(len, lacking)), progress) if lacking else min(bases)
            )
            self._replication.settle()
            # By now all nodes have the base files and the missing pieces.
            named_locations = [
                location and (self.name(location[0]), location[1]) for location in locations
            ]
            self._replication.assemble(
                file, recipe(map(len, chunks), named_locations, self.name(missing_key))
            )
        finally:
            self.unpin(bases)
            # The separate file with the missing pieces was needed only for assembly.
            self.drop({missing_key} - before)
        return hashes

    def settle(self) -> None:
        with self._sending:
            self._replication.settle()

    def adopt(
        self, node: int, folder: str, below: Sequence[str]
    ) -> tuple[list[store.Adopted], set[int]]:
        """Pass files that a node has already on to the others.

        A node that cannot be reached or has no space left does not hold up the others.

        Args:
            folder: folder on the node.
            below: folders in it, with all files in these.

        Returns:
            The files by their names in the stores, and the nodes that have all of them.

        Raises:
            OSError: a file cannot be read, or the connection to the node is lost.
        """
        with self._sending:
            with contextlib.suppress(PoolError):
                self._clients.connect()
            self._replication.lose_failed()
            files = self._replication.adopt(node, folder, below)
            while True:
                try:
                    self._replication.settle()
                    break
                except (OSError, PoolError):
                    if not self._replication.lose_failed() or node in self._clients.lost:
                        break
            have_all = self._clients.nodes.intersection(*(file.placement.held for file in files))
            return [adopted for file in files for adopted in file.adopted], have_all

    def drop(self, keys: Iterable[str]) -> None:
        with self._lock:
            dropped = [file for key in keys if (file := self._files.pop(key, None)) is not None]
        self._chunks.remove(file.key for file in dropped)
        self._replication.remove(dropped)

    # -- receiving ---------------------------------------------------------------------------------

    def prefetch(self, files: Iterable[tuple[str, int]]) -> None:
        self._prefetch.start(files)

    def take(self, name: str, node: int = 0) -> memoryview:
        return self._prefetch.take(name, node)

    def discard(self, name: str, node: int = 0) -> None:
        self._prefetch.cancel(name, node)
        self._clients.all[node].wake()
        self._clients.unlink([name], [node])

    def _fetch(self, name: str, node: int, unwanted: threading.Event) -> memoryview:
        download = Download(unwanted)
        # After a lost connection the download resumes at the same position.
        while not download.complete:
            if node in self._clients.lost:
                raise PoolError(
                    f"{self._clients.all[node].node.name} is lost, and a value with it",
                    code="value-lost",
                    node=node,
                )
            if unwanted.is_set():
                raise PoolError("this value is no longer needed", code="value-dropped")
            self._clients.connect([node])
            self._clients.all[node].continue_download(name, download)
        self._clients.unlink([name], [node])
        assert download.memory is not None
        return download.memory

    # -- nodes -------------------------------------------------------------------------------------

    def lose(self, node: int) -> None:
        """Stop sending to a node that is gone, and stop waiting for it."""
        self._replication.lose(node)

    def readmit(self, node: Node) -> None:
        """Use a node again that was gone, perhaps with another store or on another machine.

        The next `settle` sends it the files that it lacks. Files that no node has any more are
        forgotten: their values are sent again when they are used.
        """
        self._clients.move(node)
        self._replication.readmit(node.index)
        with self._lock:
            lost = [
                key
                for key, file in self._files.items()
                if file.pieces is None and not file.placement.held
            ]
        self.drop(lost)

    def close(self) -> None:
        self._files.clear()
        self._clients.close(self._replication.names())

    def _make_room(self, nbytes: int) -> None:
        """Evict unneeded files if that makes a value fit on every node."""
        with self._lock:
            room = min(
                (self._clients.all[node].free_bytes for node in self._clients.connected()),
                default=0,
            )
            evicted = self._files_to_evict(self._files, room, nbytes) or []
            freed = sum(self._files[key].nbytes for key in evicted)
        self.drop(evicted)
        for client in self._clients.all:
            # An estimate, until the node reports its free space again.
            client.free_bytes += freed - nbytes
        if evicted:
            self._notify(
                f"the nodes' stores are full: {len(evicted)} of the oldest values "
                "will be sent again when used"
            )
