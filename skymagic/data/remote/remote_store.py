"""The stores of several nodes as one: what is put lies on every node, and the notebook's connection carries it once."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from skymagic.data.remote.client import Fetch, Node
from skymagic.data.remote.fanout import victims
from skymagic.data.remote.prefetch import Returns
from skymagic.data.remote.replication import Spreading, Value
from skymagic.data.store.pins import Pins
from skymagic.data.store.store import LARGE, Buffer, digest
from skymagic.errors import PoolError
from skymagic.wire import store

__all__ = ["Node", "RemoteStore"]


class RemoteStore(Pins):
    """The stores of a pool's nodes, filled through their depots; takes the place of a `store.NodeStore`.

    Depots are started at the first need, all at once, and again after a lost connection.

    Args:
        nodes: in the order of their numbers; ``node`` in a rank's reference is such a number.
        notify: called with one sentence when files are evicted, kept on disk, or a node cannot be reached for a while.
        keep: bytes that values may fill in ``~/.skymagic/data/values`` on each node, for the user's later pools; 0: none.
        keep_after: seconds that a value must have been in use to be worth keeping.
        patience: seconds for which a node that cannot be reached is tried again.
        silence: seconds without a word from a depot, which speaks every two, after which its line is taken for lost.
        share: the part of the free space of a node's shared memory that may be filled, 0 to 1.
    """

    far = True

    def __init__(
        self,
        nodes: Sequence[Node],
        notify: Callable[[str], None] | None = None,
        *,
        keep: int = 0,
        keep_after: float = 2.0,
        patience: float = 60.0,
        silence: float = 10.0,
        share: float = 0.5,
    ) -> None:
        super().__init__()
        self._notify = notify or (lambda sentence: None)
        self._keep = keep
        self._nonce = secrets.token_hex(8)
        several = len(nodes) > 1
        public, secret = _key_pair() if several else ("", "")
        self._spreading = Spreading(
            nodes,
            lambda node: store.Open(node.address if several else "", public, secret, keep, keep_after, share),
            self._notify,
            patience,
            silence,
        )
        self._fleet = self._spreading.fleet
        self._returns = Returns(self._fetch)
        self._files: dict[str, Value] = {}
        self._expected: dict[str, Value] = {}
        self._shipping = threading.RLock()
        """Held while values are sent: one thread at a time."""

    # -- there -------------------------------------------------------------------------------------------------------

    def have(self, keys: Iterable[str]) -> list[str]:
        """The keys of which there is no file, in the order given."""
        with self._lock:
            now = time.monotonic()
            missing = []
            for key in keys:
                file = self._files.get(key)
                if file is None:
                    missing.append(key)
                else:
                    file.used = now
            return missing

    def expect(self, values: Iterable[tuple[str, int]]) -> frozenset[str]:
        """These values (key, length) will be put: find those that an earlier pool has left on nodes, in one round trip.

        Returns:
            Keys of the values that need not be sent.
        """
        with self._shipping:
            new = {
                key: self._value(key, nbytes)
                for key, nbytes in values
                if nbytes >= LARGE and key not in self._files and key not in self._expected
            }
            if not new or not self._keep:
                return frozenset()
            self._spreading.reach()
            self._expected.update(new)
            self._spreading.add(new.values())
            self._spreading.look(list(new.values()), self._fleet.up())
            return frozenset(key for key, file in new.items() if file.spread.here or file.spread.coming)

    def put(
        self,
        key: str | None,
        pieces: Iterable[Buffer],
        nbytes: int,
        progress: Callable[[int], None] | None = None,
    ) -> str:
        """Send one file to all nodes, unless it is there already; some may have it only after `settle`.

        Args:
            key: the content's hash where it is known. What counts is what was sent: a value that another thread changes
                meanwhile lands, whole, under the hash of the bytes that were read.
            nbytes: the sum of the pieces' lengths, in bytes.
            progress: called now and then with the bytes sent so far.

        Returns:
            The key of the file.

        Raises:
            OSError: a node has no room.
            PoolError: a node cannot be reached.
        """
        pieces = list(pieces)
        key = key or digest(pieces)
        with self._shipping:
            if not self.have([key]):
                return key
            self._spreading.reach()
            file = self._expected.pop(key, None) or self._value(key, nbytes)
            self._make_room(nbytes)
            file.pieces = pieces
            self._spreading.add([file])
            try:
                self._spreading.spread(file, progress)
            except BaseException:
                self._spreading.remove([file])
                raise
            self._files[file.key] = file
            return file.key

    def settle(self) -> None:
        """Wait until every node has what was put, mending what goes wrong; what was expected and not put is forgotten.

        Raises:
            OSError: a node has no room.
            PoolError: a node cannot be reached, or values do not get through to it.
        """
        with self._shipping:
            unwanted = list(self._expected.values())
            self._expected.clear()
            self._spreading.remove(unwanted)
            self._spreading.settle()

    def name(self, key: str) -> str:
        """The file name of a key that is here, the same on every node."""
        return self._files[key].name

    def drop(self, keys: Iterable[str]) -> None:
        """Unlink these files on all nodes; unknown keys are ignored."""
        with self._lock:
            gone = [file for key in keys if (file := self._files.pop(key, None)) is not None]
        self._spreading.remove(gone)

    def held(self) -> frozenset[str]:
        """Keys of all files that are there."""
        return frozenset(self._files)

    # -- and back ----------------------------------------------------------------------------------------------------

    def bring(self, files: Iterable[tuple[str, int]]) -> None:
        """These files (name, node) will be taken or discarded: let them come from all nodes at once."""
        self._returns.bring(files)

    def take(self, name: str, node: int = 0) -> memoryview:
        """Bring a file that a rank has left in its node's store here, and unlink it there.

        Raises:
            FileNotFoundError: it was taken before.
            PoolError: the node cannot be reached.
        """
        return self._returns.take(name, node)

    def discard(self, name: str, node: int = 0) -> None:
        """Unlink a file that a rank has left and that nobody wants; twice is safe."""
        self._returns.discard(name, node)
        self._fleet.lines[node].heed()
        self._fleet.unlink([name], [node])

    def _fetch(self, name: str, node: int, unwanted: threading.Event) -> memoryview:
        fetch = Fetch(unwanted)
        while not fetch.complete:
            if node in self._fleet.given_up:
                raise PoolError(f"{self._fleet.lines[node].node.name} is lost, and a value with it")
            if unwanted.is_set():
                raise PoolError("nobody wants this value any more")
            self._spreading.reach([node])
            self._fleet.lines[node].fetch(name, fetch)
        self._fleet.unlink([name], [node])
        assert fetch.memory is not None
        return fetch.memory

    # -- nodes -------------------------------------------------------------------------------------------------------

    def lose(self, node: int) -> None:
        """A node is gone: nothing is sent to it any more, nor waited for."""
        self._spreading.lose(node)

    def regain(self, node: int) -> None:
        """A node that was gone is there again, perhaps with another store: the next `settle` brings it what it lacks."""
        self._spreading.regain(node)

    def close(self) -> None:
        """Unlink all files that were put, and end the depots; twice is safe."""
        self._files.clear()
        self._fleet.close(self._spreading.names())

    def _value(self, key: str, nbytes: int) -> Value:
        return Value(key, f"{self._nonce}-{key}", nbytes)

    def _make_room(self, nbytes: int) -> None:
        """Evict files that nobody needs, the oldest first, if that lets a value fit on every node."""
        with self._lock:
            room = min((self._fleet.lines[node].room for node in self._fleet.up()), default=0)
            free = [file for file in self._files.values() if not self.pinned(file.key)]
            free.sort(key=lambda file: file.used)
            evicted = victims(((file.key, file.nbytes) for file in free), room, nbytes)
            gone = sum(self._files[key].nbytes for key in evicted)
        self.drop(evicted)
        for line in self._fleet.lines:
            line.room += gone - nbytes
        if evicted:
            self._notify(
                f"the nodes' stores are full: {len(evicted)} of the oldest values will be sent again when used"
            )


def _key_pair() -> tuple[str, str]:
    """A pair of keys for one pool."""
    import zmq

    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()
