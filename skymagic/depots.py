"""The stores of several nodes as one: what is put lies on every node, and the notebook's connection carries it once."""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from skymagic import freight
from skymagic.depotline import Fetch, LineLost, Node
from skymagic.errors import PoolError
from skymagic.fanout import KEPT, UPLINK, Spread, orders, victims
from skymagic.fleet import Fleet
from skymagic.freight import Failed, Landed
from skymagic.pins import Pins
from skymagic.returns import Returns
from skymagic.store import LARGE, Buffer, digest

__all__ = ["Node", "RemoteStore"]

STEP = 1 << 19
"""Bytes that are copied, hashed and sent at a time."""
TRIES = 3
"""Times that a value may fail to reach a node, beyond once for each other node."""

_TOLD = 1 << 22


@dataclass(eq=False)
class _File:
    """One value, on all nodes."""

    key: str
    name: str
    nbytes: int
    asked: str
    """The name under which it was sent: its content may have changed meanwhile."""
    pieces: list[Buffer] | None = None
    """What it is made of, until all nodes have it."""
    settled: bool = False
    """Whether all nodes had it once."""
    spread: Spread = field(default_factory=Spread)
    problem: Exception | None = None
    used: float = field(default_factory=time.monotonic)


class RemoteStore(Pins):
    """The stores of a pool's nodes, filled through their depots; takes the place of a `store.NodeStore`.

    Depots are started at the first need, all at once, and again after a lost connection.

    Args:
        nodes: in the order of their numbers; ``node`` in a rank's reference is such a number.
        notify: called with one sentence when files are evicted, kept on disk, or a node cannot be reached for a while.
        keep: bytes that values may fill in ``~/.skymagic/values`` on each node, for the user's later pools; 0: none.
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
        self._fleet = Fleet(
            nodes,
            lambda node: freight.Open(
                node.address if several else "", public, secret, keep, keep_after, share
            ),
            self._heard,
            self._notify,
            patience,
            silence,
        )
        self._returns = Returns(self._fetch)
        self._files: dict[str, _File] = {}
        self._asked: dict[str, _File] = {}
        self._expected: dict[str, _File] = {}
        self._unsure: set[int] = set()
        """Nodes whose line was lost: what they have must be looked at."""
        self._troubled = False
        self._shipping = threading.RLock()
        self._news = threading.Condition(threading.RLock())

    # -- as a store --------------------------------------------------------------------------------------------------

    def have(self, keys: Iterable[str]) -> list[str]:
        """The keys of which there is no file, in the order given."""
        with self._news:
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
                key: _File(key, self._name(key), nbytes, self._name(key))
                for key, nbytes in values
                if nbytes >= LARGE and key not in self._files and key not in self._expected
            }
            if not new or not self._keep:
                return frozenset()
            self._reach()
            with self._news:
                self._expected.update(new)
                self._asked.update({file.name: file for file in new.values()})
            self._look(list(new.values()), self._fleet.up())
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
            self._reach()
            with self._news:
                file = self._expected.pop(key, None) or _File(key, self._name(key), nbytes, self._name(key))
                file.pieces = pieces
            self._make_room(nbytes)
            with self._news:
                self._asked[file.asked] = file
                self._files[key] = file
            try:
                self._spread(file, progress)
            except BaseException:
                self.drop([file.key])
                raise
            return file.key

    def settle(self) -> None:
        """Wait until every node has what was put, mending what goes wrong; what was expected and not put is forgotten.

        Raises:
            OSError: a node has no room.
            PoolError: a node cannot be reached, or values do not get through to it.
        """
        with self._shipping:
            with self._news:
                unwanted = [file.asked for file in self._expected.values()]
                self._expected.clear()
                for name in unwanted:
                    del self._asked[name]
            if unwanted:
                self._fleet.unlink(unwanted)
            while pending := self._pending():
                self._reach()
                for file in pending:
                    if file.problem is not None:
                        raise file.problem
                    self._spread(file, None)
                with self._news:
                    if not self._troubled and self._pending() == pending:
                        self._news.wait(1.0)
                    self._troubled = False
                self._fleet.silent()

    def name(self, key: str) -> str:
        """The file name of a key that is here, the same on every node."""
        return self._files[key].name

    def drop(self, keys: Iterable[str]) -> None:
        """Unlink these files on all nodes; unknown keys are ignored."""
        with self._news:
            gone = [file for key in keys if (file := self._files.pop(key, None)) is not None]
            for file in gone:
                self._asked.pop(file.asked, None)
        if gone:
            self._fleet.unlink(name for file in gone for name in (file.name, file.asked))

    def held(self) -> frozenset[str]:
        """Keys of all files that are there."""
        return frozenset(self._files)

    def take(self, name: str, node: int = 0) -> memoryview:
        """Bring a file that a rank has left in its node's store here, and unlink it there.

        Raises:
            FileNotFoundError: it was taken before.
            PoolError: the node cannot be reached.
        """
        return self._returns.take(name, node)

    def bring(self, files: Iterable[tuple[str, int]]) -> None:
        """These files (name, node) will be taken or discarded: let them come from all nodes at once."""
        self._returns.bring(files)

    def discard(self, name: str, node: int = 0) -> None:
        """Unlink a file that a rank has left and that nobody wants; twice is safe."""
        self._returns.discard(name, node)
        self._fleet.unlink([name], [node])

    def _fetch(self, name: str, node: int, unwanted: threading.Event) -> memoryview:
        fetch = Fetch(unwanted)
        while not fetch.complete:
            if node in self._fleet.given_up:
                raise PoolError(f"{self._fleet.lines[node].node.name} is lost, and a value with it")
            if unwanted.is_set():
                raise PoolError("nobody wants this value any more")
            self._reach([node])
            self._fleet.lines[node].fetch(name, fetch)
        self._fleet.unlink([name], [node])
        assert fetch.memory is not None
        return fetch.memory

    def lose(self, node: int) -> None:
        """A node is gone: nothing is sent to it any more."""
        with self._news:
            self._fleet.given_up.add(node)
            self._troubled = True
            self._news.notify_all()

    def regain(self, node: int) -> None:
        """A node that was gone is there again: the next `settle` brings it what it lacks."""
        with self._news:
            self._fleet.given_up.discard(node)
            self._unsure.add(node)
            for file in self._files.values():
                file.spread.lost(node)
                file.settled = False
        self._fleet.lines[node].hang_up()  # its store may be another one now

    def close(self) -> None:
        """Unlink all files that were put, and end the depots; twice is safe."""
        names = {name for file in self._files.values() for name in (file.name, file.asked)}
        self._files.clear()
        self._asked.clear()
        self._fleet.close(names)

    def _reach(self, nodes: Iterable[int] | None = None) -> None:
        """Open the lines that are down, and find out what those that were lost have kept."""
        for node in self._fleet.reach(nodes):
            if node in self._unsure:
                self._unsure.discard(node)
                self._look(list(self._files.values()), [node])

    # -- news --------------------------------------------------------------------------------------------------------

    def _heard(self, node: int, message: freight.Message | None) -> None:
        """What a depot says of its values; called on the lines' threads."""
        with self._news:
            if message is None:
                self._unsure.add(node)
                self._troubled = True
                for file in [*self._files.values(), *self._expected.values()]:
                    file.spread.lost(node)
            elif isinstance(message, Landed):
                self._landed(node, message)
            elif isinstance(message, Failed):
                self._failed(node, message)
            self._news.notify_all()

    def _landed(self, node: int, message: Landed) -> None:
        self._fleet.lines[node].room = message.room
        file = self._asked.get(message.name)
        if file is None:
            return
        if file.key == message.key:
            file.spread.landed(node)
        else:  # it changed between two ways that it was sent
            file.spread.stopped(node)
            self._troubled = True
        if message.note:
            self._notify(
                f"{self._fleet.lines[node].node.name}: {_size(file.nbytes)} do not fit in memory: {message.note}"
            )

    def _failed(self, node: int, message: Failed) -> None:
        file = self._asked.get(message.name)
        if file is None or node not in file.spread.coming:
            return
        file.spread.stopped(node)
        self._troubled = True
        where = self._fleet.lines[node].node.name
        if message.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            file.problem = OSError(message.errno, f"{message.reason}, on {where}")
        elif len(file.spread.failed.get(node, ())) > TRIES + len(self._fleet.lines):
            file.problem = PoolError(f"a value does not get through to {where}: {message.reason}")

    # -- values ------------------------------------------------------------------------------------------------------

    def _name(self, key: str) -> str:
        return f"{self._nonce}-{key}"

    def _pending(self) -> list[_File]:
        """Files that some node still lacks; lets go of the memory of the others."""
        with self._news:
            nodes = self._fleet.nodes
            for file in self._files.values():
                if not nodes - file.spread.here:
                    file.settled, file.pieces = True, None
            sure = nodes - self._unsure
            return [
                file for file in self._files.values() if (sure if file.settled else nodes) - file.spread.here
            ]

    def _look(self, files: list[_File], nodes: list[int]) -> None:
        """Find out which of the files nodes have, or can restore from what an earlier pool has left there."""
        values = [(file.key, file.name, file.nbytes) for file in files]
        answers = []
        for node in nodes if values else ():
            with contextlib.suppress(LineLost):
                answers.append((node, self._fleet.lines[node].look(values)))
        for node, answer in answers:
            with contextlib.suppress(LineLost):
                looked = answer()
                with self._news:
                    self._found(node, files, set(looked.lacks), set(looked.here))

    def _found(self, node: int, files: list[_File], lacks: set[str], here: set[str]) -> None:
        for file in files:
            if file.name in here:
                file.spread.landed(node)
            elif file.name not in lacks and node not in file.spread.here:
                file.spread.coming[node] = KEPT

    def _make_room(self, nbytes: int) -> None:
        """Evict files that nobody needs, the oldest first, if that lets a value fit on every node."""
        with self._news:
            room = min((self._fleet.lines[node].room for node in self._fleet.up()), default=0)
            free = sorted(
                (file for file in self._files.values() if not self.pinned(file.key)),
                key=lambda file: file.used,
            )
            evicted = victims(((file.key, file.nbytes) for file in free), room, nbytes)
            gone = sum(self._files[key].nbytes for key in evicted)
        self.drop(evicted)
        for line in self._fleet.lines:
            line.room += gone - nbytes
        if evicted:
            self._notify(
                f"the nodes' stores are full: {len(evicted)} of the oldest values will be sent again when used"
            )

    def _spread(self, file: _File, progress: Callable[[int], None] | None) -> None:
        """Set the value on its way to each node that is not getting it yet."""
        with self._news:
            plan = orders(file.spread, self._fleet.up())
            file.spread.coming.update(plan)
        for node, source in plan:
            if source == UPLINK:
                self._upload(file, node, progress)
            else:
                self._fleet.follow(node, file.asked, file.nbytes, source)

    def _upload(self, file: _File, node: int, progress: Callable[[int], None] | None) -> None:
        """Send the value's bytes over the notebook's own connection to a node."""
        import xxhash

        if file.pieces is None:
            raise PoolError("values that the nodes had are gone; run the cell again")
        state = xxhash.xxh3_128()
        scratch = memoryview(bytearray(STEP))
        done = 0
        going = self._fleet.send(node, freight.Put(file.asked, file.nbytes))
        for piece in _steps(file.pieces):
            if file.problem is not None:
                raise file.problem
            if not going or file.spread.coming.get(node) != UPLINK:
                return
            # The copy is what makes hash and bytes agree while other threads write to the value.
            copy = scratch[: piece.nbytes]
            copy[:] = piece
            state.update(copy)
            going = self._fleet.send(node, freight.Body(file.asked, copy.nbytes), copy)
            done += copy.nbytes
            if progress is not None and done % _TOLD < STEP:
                progress(done)
            if self._troubled:
                self._redirect(file)
        self._sealed(file, str(state.hexdigest()))
        self._fleet.send(node, freight.Seal(file.asked, file.key))

    def _sealed(self, file: _File, key: str) -> None:
        """What was sent has this key, whatever the value's was before."""
        with self._news:
            if file.key != key:
                if file.spread.here:
                    raise PoolError("a value was changed while it was sent; run the cell again")
                self._files.pop(file.key, None)
                file.key, file.name = key, self._name(key)
                self._files[key] = file

    def _redirect(self, file: _File) -> None:
        """While a value is sent: let nodes that have lost their source follow another."""
        with self._news:
            self._troubled = False
            plan = [
                (node, source) for node, source in orders(file.spread, self._fleet.up()) if source != UPLINK
            ]
            file.spread.coming.update(plan)
        for node, source in plan:
            self._fleet.follow(node, file.asked, file.nbytes, source)


def _steps(pieces: Iterable[Buffer]) -> Iterable[memoryview]:
    """The pieces' bytes, at most STEP at a time."""
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for start in range(0, view.nbytes, STEP):
            yield view[start : start + STEP]


def _key_pair() -> tuple[str, str]:
    """A pair of keys for one pool."""
    import zmq

    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"
