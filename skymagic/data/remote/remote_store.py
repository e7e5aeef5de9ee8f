"""The stores of several nodes as one: what is put lies on every node, and the notebook's connection carries it once.

A changed file is sent as the pieces that no other file on the nodes has, and put together there. The blocks are of fixed length, as rsync's are on its receiving side: a changed element, an appended line and another layer are
found; what is inserted in the middle moves all that follows, and is sent.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import pairwise

from skymagic.cluster import Node
from skymagic.data.remote.client import IncomingFile
from skymagic.data.remote.clients import StoreClients
from skymagic.data.remote.replication import ReplicatedFile, Replication
from skymagic.data.store.base import Buffer, Content, Store
from skymagic.data.store.device import DeviceBytes
from skymagic.data.store.store import digest
from skymagic.errors import PoolError
from skymagic.wire import store, tls
from skymagic.wire.codec import Transport
from skymagic.wire.store import Slice

PIECE = 1 << 20  # bytes of a piece; the last one of a file is shorter


class PieceIndex:
    """Where pieces are, by the hash of what they hold."""

    def __init__(self) -> None:
        self._places: dict[bytes, tuple[str, int]] = {}
        self._digests: dict[str, Sequence[bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, key: str, digests: Sequence[bytes]) -> None:
        """The file of this key consists of these pieces."""
        self._digests[key] = digests
        self._places.update({each: (key, number * PIECE) for number, each in enumerate(digests)})

    def remove(self, keys: Iterable[str]) -> None:
        """Forget the pieces of these files; unknown ones are ignored."""
        for key in keys:
            for each in self._digests.pop(key, ()):
                if self._places.get(each, ("",))[0] == key:
                    del self._places[each]

    def find(self, digests: Iterable[bytes]) -> list[tuple[str, int] | None]:
        """For each piece, the key of a file that has it, and the offset there."""
        return [self._places.get(each) for each in digests]


def piece_digests(data: Buffer) -> list[bytes]:
    """The xxh3-128 of each piece."""
    import xxhash

    return [xxhash.xxh3_128_digest(each) for each in cut_into_pieces(data)]


def cut_into_pieces(data: Buffer) -> list[memoryview]:
    """The pieces."""
    view = memoryview(data).cast("B")
    return [view[start : start + PIECE] for start in range(0, view.nbytes, PIECE)]


def recipe(
    lengths: Iterable[int], places: Iterable[tuple[str, int] | None], rest: str
) -> list[Slice]:
    """What a file consists of, as slices of other files, as few as can be; pure.

    Args:
        lengths: of its pieces.
        places: name and offset of each; None for one that is in the file `rest`, where they follow one another.
    """
    slices: list[Slice] = []
    sent = 0
    for nbytes, place in zip(lengths, places, strict=True):
        name, offset = place or (rest, sent)
        sent += 0 if place else nbytes
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
"""Files that come from one node at a time: while one arrives, the next is asked for."""


class Prefetch:
    """Fetches files ahead."""

    def __init__(self, fetch: Callable[[str, int, threading.Event], memoryview]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, int], tuple[Future[memoryview], threading.Event]] = {}

    def start(self, files: Iterable[tuple[str, int]]) -> None:
        """Begin to fetch these files (name, node): each will be taken or discarded once, in about this order."""
        queues: dict[int, list[tuple[str, int]]] = {}
        with self._lock:
            for file in files:
                self._pending[file] = Future(), threading.Event()
                queues.setdefault(file[1], []).insert(0, file)
        for queue in queues.values():
            for _ in range(min(FILES_PER_NODE, len(queue))):
                threading.Thread(
                    target=self._work, args=(queue,), name="skymagic-prefetch", daemon=True
                ).start()

    def take(self, name: str, node: int) -> memoryview:
        """A file's bytes. Raises what `fetch` raises."""
        with self._lock:
            future, _ = self._pending.get((name, node), (None, None))
        if future is None:
            return self._fetch(name, node, threading.Event())
        try:
            return future.result()
        finally:
            if future.done():  # an interrupt leaves it to be discarded
                with self._lock:
                    self._pending.pop((name, node), None)

    def cancel(self, name: str, node: int) -> None:
        """Nobody wants it; twice is safe."""
        with self._lock:
            _, unwanted = self._pending.pop((name, node), (None, None))
        if unwanted is not None:
            unwanted.set()

    def _work(self, queue: list[tuple[str, int]]) -> None:
        while queue:
            # Two threads share the queue: the other one may have taken the last file meanwhile.
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

    The servers are started at the first need, all at once, and again after a lost connection.

    Args:
        nodes: in the order of their numbers; ``node`` in a rank's reference is such a number.
        start: starts ``skymagic.kernels.store.server STORE`` on a node, STORE being the folder that its ranks have as their
            store.
        notify: called with one sentence when files are evicted, written to disk instead, or a node cannot be reached for a while.
        retry_timeout: seconds for which a node that cannot be reached is tried again.
        silence_timeout: seconds without a message from a value server, which sends a heartbeat every two, after which its
            connection counts as lost.
        share: the part of the free space of a node's shared memory that may be filled, 0 to 1.
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
    ) -> None:
        super().__init__(notify)
        self._nonce = secrets.token_hex(8)
        several = len(nodes) > 1
        pem = tls.certificate() if several else ""

        def settings(node: Node) -> store.Settings:
            return store.Settings(node.address if several else "", pem, share)

        self._clients = StoreClients(
            nodes, start, settings, self._notify, retry_timeout, silence_timeout
        )
        self._replication = Replication(self._clients, self._notify)
        self._prefetch = Prefetch(self._fetch)
        self._files: dict[str, ReplicatedFile] = {}
        self._pieces = PieceIndex()
        self._sending = threading.RLock()  # held while values are sent: one thread at a time

    # -- out ---------------------------------------------------------------------------------------------------------

    def unsent(self, data: Content) -> int:
        if isinstance(data, DeviceBytes) or len(data) < 2 * PIECE or not self._pieces:
            return len(data)
        found = zip(cut_into_pieces(data), self._pieces.find(piece_digests(data)), strict=True)
        return sum(len(piece) for piece, place in found if place is None)

    def put(
        self,
        key: str | None,
        pieces: Iterable[Content],
        nbytes: int,
        progress: Callable[[int], None] | None = None,
    ) -> str:
        # in host memory: they are read several times, and kept until all nodes have them
        parts: list[Buffer] = [
            each.read() if isinstance(each, DeviceBytes) else each for each in pieces
        ]
        key = key or digest(parts)
        with self._sending:
            if not self.missing([key]):
                return key
            self._clients.connect()
            file = ReplicatedFile(key, f"{self._nonce}-{key}", nbytes)
            self._make_room(nbytes)
            self._replication.add([file])
            try:
                digests = self._assemble(file, parts, progress)
                file.pieces = parts
                self._replication.replicate(file, progress)
            except BaseException:
                self._replication.remove([file])
                raise
            self._files[file.key] = file
            if file.key == key:
                self._pieces.add(key, digests)
            return file.key

    def _assemble(
        self, file: ReplicatedFile, pieces: list[Buffer], progress: Callable[[int], None] | None
    ) -> list[bytes]:
        """Let the nodes make a file of pieces that they have, and of those that they lack, which are sent; its pieces' hashes."""
        if len(pieces) != 1 or file.nbytes < 2 * PIECE:
            return []
        digests, cut = piece_digests(pieces[0]), cut_into_pieces(pieces[0])
        found = self._pieces.find(digests)
        bases = {place[0] for place in found if place}
        if not bases or file.placement.here or file.placement.sources:
            return digests
        before = self.keys()
        lacking = [piece for piece, place in zip(cut, found, strict=True) if place is None]
        rest = ""
        self.pin(bases)
        try:
            rest = (
                self.put(None, lacking, sum(map(len, lacking)), progress) if lacking else min(bases)
            )
            self._replication.settle()
            places = [place and (self.name(place[0]), place[1]) for place in found]
            self._replication.assemble(file, recipe(map(len, cut), places, self.name(rest)))
        finally:
            self.unpin(bases)
            self.drop({rest} - before)
        return digests

    def settle(self) -> None:
        with self._sending:
            self._replication.settle()

    def drop(self, keys: Iterable[str]) -> None:
        with self._lock:
            gone = [file for key in keys if (file := self._files.pop(key, None)) is not None]
        self._pieces.remove(file.key for file in gone)
        self._replication.remove(gone)

    # -- and back ----------------------------------------------------------------------------------------------------

    def prefetch(self, files: Iterable[tuple[str, int]]) -> None:
        self._prefetch.start(files)

    def take(self, name: str, node: int = 0) -> memoryview:
        return self._prefetch.take(name, node)

    def discard(self, name: str, node: int = 0) -> None:
        self._prefetch.cancel(name, node)
        self._clients.all[node].wake()
        self._clients.unlink([name], [node])

    def _fetch(self, name: str, node: int, unwanted: threading.Event) -> memoryview:
        download = IncomingFile(unwanted)
        while (
            not download.complete
        ):  # a download that a lost connection has cut resumes where it was
            if node in self._clients.lost:
                raise PoolError(f"{self._clients.all[node].node.name} is lost, and a value with it")
            if unwanted.is_set():
                raise PoolError("this value is no longer needed")
            self._clients.connect([node])
            self._clients.all[node].fetch(name, download)
        self._clients.unlink([name], [node])
        assert download.memory is not None
        return download.memory

    # -- nodes -------------------------------------------------------------------------------------------------------

    def lose(self, node: int) -> None:
        """A node is gone: nothing is sent to it any more, nor waited for."""
        self._replication.lose(node)

    def regain(self, node: Node) -> None:
        """A node that was gone is there again, perhaps with another store, or another machine: the next `settle` brings it what it lacks.

        What no node has any more is forgotten: its values are sent again when they are used.
        """
        self._clients.move(node)
        self._replication.regain(node.index)
        with self._lock:
            lost = [
                key
                for key, file in self._files.items()
                if file.pieces is None and not file.placement.here
            ]
        self.drop(lost)

    def close(self) -> None:
        self._files.clear()
        self._clients.close(self._replication.names())

    def _make_room(self, nbytes: int) -> None:
        """Evict files that nobody needs, if that lets a value fit on every node."""
        with self._lock:
            room = min(
                (self._clients.all[node].room for node in self._clients.connected()), default=0
            )
            evicted = self._victims(self._files, room, nbytes) or []
            freed = sum(self._files[key].nbytes for key in evicted)
        self.drop(evicted)
        for client in self._clients.all:
            client.room += freed - nbytes
        if evicted:
            self._notify(
                f"the nodes' stores are full: {len(evicted)} of the oldest values will be sent again when used"
            )
