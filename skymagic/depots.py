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
from skymagic.depotline import DepotLine, Fetch, LineLost, Node
from skymagic.errors import PoolError, SkyError
from skymagic.fanout import KEPT, UPLINK, Spread, orders, victims
from skymagic.freight import Failed, Landed
from skymagic.pins import Pins
from skymagic.store import LARGE, Buffer, digest

__all__ = ["Node", "RemoteStore"]

STEP = 1 << 19
"""Bytes that are copied, hashed and sent at a time."""
TRIES = 3
"""Times that a value may fail to reach a node, beyond once for each other node."""

_TOLD = 1 << 22


@dataclass
class _File:
    """One value, on all nodes."""

    key: str
    name: str
    nbytes: int
    pieces: list[Buffer] | None = None
    """What it is made of, until all nodes have it."""
    asked: str = ""
    """The name under which it was sent: it may have changed meanwhile."""
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
        share: float = 0.5,
    ) -> None:
        super().__init__()
        self._notify = notify or (lambda sentence: None)
        self._patience = patience
        self._keep = keep
        self._nonce = secrets.token_hex(8)
        public, secret = _key_pair() if len(nodes) > 1 else ("", "")
        self._lines = [
            DepotLine(
                node, number,
                freight.Open(
                    node.address if len(nodes) > 1 else "", public, secret, keep, keep_after, share
                ),
                self._heard,
            )
            for number, node in enumerate(nodes)
        ]  # fmt: skip
        self._files: dict[str, _File] = {}
        self._asked: dict[str, _File] = {}
        self._expected: dict[str, _File] = {}
        self._unlink: list[set[str]] = [set() for _ in nodes]
        """Names that a node could not yet be told to unlink."""
        self._unsure: set[int] = set()
        """Nodes whose line was lost: what they have must be looked at."""
        self._given_up: set[int] = set()
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

    def expect(self, values: Iterable[tuple[str, int]]) -> None:
        """These values (key, length) will be put: find those that an earlier pool has left on nodes, in one round trip."""
        with self._shipping:
            new = {
                key: _File(key, self._name(key), nbytes)
                for key, nbytes in values
                if nbytes >= LARGE and key not in self._files and key not in self._expected
            }
            if not new or not self._keep:
                return
            self._reach()
            with self._news:
                self._expected.update(new)
                self._asked.update({file.name: file for file in new.values()})
            self._look(list(new.values()), self._up())

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
                file = self._expected.pop(key, None) or _File(key, self._name(key), nbytes)
                file.pieces, file.asked = pieces, file.name
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
                unwanted = [file.name for file in self._expected.values()]
                self._expected.clear()
            self._forget(unwanted)
            while pending := self._pending():
                self._reach()
                for file in pending:
                    if file.problem is not None:
                        raise file.problem
                    self._spread(file, None)
                with self._news:
                    if self._pending() == pending and not self._troubled:
                        self._news.wait(1.0)
                    self._troubled = False
                for line in self._lines:
                    line.silent()

    def name(self, key: str) -> str:
        """The file name of a key that is here, the same on every node."""
        return self._files[key].name

    def drop(self, keys: Iterable[str]) -> None:
        """Unlink these files on all nodes; unknown keys are ignored."""
        with self._news:
            gone = [file for key in keys if (file := self._files.pop(key, None)) is not None]
            for file in gone:
                self._asked.pop(file.asked, None)
        self._forget([name for file in gone for name in {file.name, file.asked}])

    def held(self) -> frozenset[str]:
        """Keys of all files that are there."""
        return frozenset(self._files)

    def take(self, name: str, node: int = 0) -> memoryview:
        """Bring a file that a rank has left in its node's store here, and unlink it there.

        Raises:
            FileNotFoundError: it was taken before.
            PoolError: the node cannot be reached.
        """
        fetch: Fetch | None = None
        while fetch is None or not fetch.complete:
            self._reach([node])
            fetch = self._lines[node].fetch(name, fetch)
        self.discard(name, node)
        assert fetch.memory is not None
        return fetch.memory

    def discard(self, name: str, node: int = 0) -> None:
        """Unlink a file that a rank has left and that nobody wants; twice is safe."""
        self._unlink[node].add(name)
        self._flush(node)

    def lose(self, node: int) -> None:
        """A node is gone for good: nothing is sent to it any more."""
        self._given_up.add(node)
        self._lines[node].close()
        with self._news:
            self._troubled = True
            self._news.notify_all()

    def regain(self, node: int) -> None:
        """A node that was gone is there again, with an empty store: it gets what the others have with the next `settle`."""
        with self._news:
            for file in [*self._files.values(), *self._expected.values()]:
                file.spread.lost(node)
            self._unsure.add(node)
            self._given_up.discard(node)

    def close(self) -> None:
        """Unlink all files that were put, and end the depots; twice is safe."""
        names = {name for file in self._files.values() for name in (file.name, file.asked) if name}
        self._files.clear()
        self._asked.clear()
        ends = [threading.Thread(target=self._end, args=(line, names), daemon=True) for line in self._lines]
        for end in ends:
            end.start()
        for end in ends:
            end.join(timeout=10.0)

    # -- lines -------------------------------------------------------------------------------------------------------

    def _end(self, line: DepotLine, names: set[str]) -> None:
        if line.up and not line.silent():
            with contextlib.suppress(LineLost):
                line.send(freight.Drop(sorted(names | self._unlink[line.number])))
        line.close()

    def _up(self) -> list[int]:
        return [line.number for line in self._lines if line.up and line.number not in self._given_up]

    def _reach(self, nodes: Iterable[int] | None = None) -> None:
        """Open the lines that are down, all at once, and find out what those that were lost have kept."""
        wanted = [
            self._lines[node]
            for node in (range(len(self._lines)) if nodes is None else nodes)
            if node not in self._given_up and not self._lines[node].up
        ]
        if not wanted:
            return
        problems: list[BaseException] = []
        threads = [
            threading.Thread(target=self._try, args=(line, problems), daemon=True) for line in wanted[1:]
        ]
        for thread in threads:
            thread.start()
        self._try(wanted[0], problems)
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0] if len(problems) == 1 else PoolError("\n".join(map(str, problems)))
        for line in wanted:
            self._flush(line.number)
            if line.number in self._unsure:
                self._unsure.discard(line.number)
                self._look(list(self._files.values()), [line.number])

    def _try(self, line: DepotLine, problems: list[BaseException]) -> None:
        begun = time.monotonic()
        pause = 0.2
        while line.number not in self._given_up:
            try:
                return line.open()
            except (OSError, SkyError) as problem:
                if time.monotonic() - begun > self._patience:
                    problems.append(PoolError(_unreachable(line, problem)))
                    return None
                if pause == 0.2 and self._patience > 1:
                    self._notify(f"{line.node.name} cannot be reached at present: {problem}; trying again")
            time.sleep(pause)
            pause = min(2.0, pause * 1.6)
        return None

    def _send(self, node: int, message: freight.Message, data: memoryview | None = None) -> bool:
        """Whether it was sent; if not, the line is lost, and `settle` mends it."""
        try:
            self._lines[node].send(message, data)
        except LineLost:
            return False
        return True

    def _flush(self, node: int) -> None:
        """Tell a node what to unlink."""
        names = set(self._unlink[node])
        if names and self._lines[node].up and self._send(node, freight.Drop(sorted(names))):
            self._unlink[node] -= names

    def _forget(self, names: Iterable[str]) -> None:
        """Unlink files on all nodes, now or when they can be reached."""
        names = set(filter(None, names))
        for line in self._lines if names else ():
            self._unlink[line.number] |= names
            self._flush(line.number)

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
        self._lines[node].room = message.room
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
                f"{self._lines[node].node.name}: {_size(file.nbytes)} do not fit in memory: {message.note}"
            )

    def _failed(self, node: int, message: Failed) -> None:
        file = self._asked.get(message.name)
        if file is None or node not in file.spread.coming:
            return
        file.spread.stopped(node)
        self._troubled = True
        where = self._lines[node].node.name
        if message.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            file.problem = OSError(message.errno, f"{message.reason}, on {where}")
        elif len(file.spread.failed.get(node, ())) > TRIES + len(self._lines):
            file.problem = PoolError(f"a value does not get through to {where}: {message.reason}")

    # -- values ------------------------------------------------------------------------------------------------------

    def _name(self, key: str) -> str:
        return f"{self._nonce}-{key}"

    def _pending(self) -> list[_File]:
        """Files that some node still lacks; lets go of the memory of the others."""
        with self._news:
            nodes = set(range(len(self._lines))) - self._given_up
            pending = [file for file in self._files.values() if nodes - file.spread.here]
            for file in self._files.values():
                if file.pieces is not None and not nodes - file.spread.here:
                    file.pieces = None
            return pending

    def _look(self, files: list[_File], nodes: list[int]) -> None:
        """Find out which of the files nodes have, or can restore from what an earlier pool has left there."""
        values = [(file.key, file.name, file.nbytes) for file in files]
        answers = []
        for node in nodes if values else ():
            with contextlib.suppress(LineLost):
                answers.append((node, self._lines[node].look(values)))
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
            room = min((self._lines[node].room for node in self._up()), default=0)
            free = sorted(
                (file for file in self._files.values() if not self.pinned(file.key)),
                key=lambda file: file.used,
            )
            evicted = victims(((file.key, file.nbytes) for file in free), room, nbytes)
            gone = sum(self._files[key].nbytes for key in evicted)
        self.drop(evicted)
        for line in self._lines:
            line.room += gone - nbytes
        if evicted:
            self._notify(
                f"the nodes' stores are full: {len(evicted)} of the oldest values will be sent again when used"
            )

    def _spread(self, file: _File, progress: Callable[[int], None] | None) -> None:
        """Set the value on its way to each node that is not getting it yet."""
        with self._news:
            plan = orders(file.spread, self._up())
            file.spread.coming.update(plan)
        for node, source in plan:
            if source == UPLINK:
                self._upload(file, node, progress)
            else:
                line = self._lines[source]
                self._send(
                    node, freight.Follow(file.asked or file.name, file.nbytes, line.node.address, line.port)
                )

    def _upload(self, file: _File, node: int, progress: Callable[[int], None] | None) -> None:
        """Send the value's bytes over the notebook's own connection to a node."""
        import xxhash

        if file.pieces is None:
            raise PoolError("values that the nodes had are gone; run the cell again")
        state = xxhash.xxh3_128()
        scratch = memoryview(bytearray(STEP))
        done = 0
        going = self._send(node, freight.Put(file.asked, file.nbytes))
        for piece in _steps(file.pieces):
            if file.problem is not None:
                raise file.problem
            if not going or file.spread.coming.get(node) != UPLINK:
                return
            # The copy is what makes hash and bytes agree while other threads write to the value.
            copy = scratch[: piece.nbytes]
            copy[:] = piece
            state.update(copy)
            going = self._send(node, freight.Body(file.asked, copy.nbytes), copy)
            done += copy.nbytes
            if progress is not None and done % _TOLD < STEP:
                progress(done)
            if self._troubled:
                self._redirect(file)
        self._sealed(file, str(state.hexdigest()))
        self._send(node, freight.Seal(file.asked, file.key))

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
            plan = [(node, source) for node, source in orders(file.spread, self._up()) if source != UPLINK]
            file.spread.coming.update(plan)
        for node, source in plan:
            line = self._lines[source]
            self._send(node, freight.Follow(file.asked, file.nbytes, line.node.address, line.port))


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


def _unreachable(line: DepotLine, problem: BaseException) -> str:
    return (
        f"node {line.number} ({line.node.name}) cannot be reached: {problem}; "
        "run the cell again when it is back, or end the pool with %sky_down"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"
