"""Values on their way to several nodes: where each is, from whom each node gets it, and what is done when that fails."""

from __future__ import annotations

import contextlib
import errno
import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from skymagic.data.remote.client import LineLost, Node
from skymagic.data.remote.clients import Fleet
from skymagic.data.remote.fanout import KEPT, UPLINK, Spread, orders
from skymagic.data.store.store import Buffer
from skymagic.errors import PoolError
from skymagic.wire import store
from skymagic.wire.store import Failed, Landed

STEP = 1 << 19
"""Bytes that are copied, hashed and sent at a time."""
TRIES = 3
"""Times that a value may fail to reach a node, beyond once for each node."""

_TOLD = 1 << 22
_HOPELESS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)

Told = Callable[[int], None] | None
"""Called now and then with the bytes of a value that were sent."""


@dataclass(eq=False)
class Value:
    """One file, on all nodes."""

    key: str
    """The hash of its content; another one when the content changed before it was sent."""
    asked: str
    """The name under which it is sent."""
    nbytes: int
    pieces: list[Buffer] | None = None
    """What it is made of, until all nodes have it."""
    sealed: bool = False
    """Whether all of it was sent once: from then on its key stands."""
    settled: bool = False
    """Whether all nodes had it once."""
    spread: Spread = field(default_factory=Spread)
    problem: Exception | None = None
    used: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """The file's name on every node."""
        return f"{self.asked.partition('-')[0]}-{self.key}"


class Spreading:
    """Brings values to all nodes of a fleet.

    Args:
        nodes: in the order of their numbers.
        terms: what each depot is told first.
        notify: called with one sentence that the user should hear.
        patience: seconds for which a node that cannot be reached is tried again.
        silence: seconds without a word after which a line is taken for lost.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        terms: Callable[[Node], store.Open],
        notify: Callable[[str], None],
        patience: float,
        silence: float,
    ) -> None:
        self.fleet = Fleet(nodes, terms, self._heard, notify, patience, silence)
        self.news = threading.Condition(threading.RLock())
        """Held for moments, while what follows and the values themselves change."""
        self._notify = notify
        self._values: dict[str, Value] = {}
        self._unsure: set[int] = set()
        """Nodes whose line was lost: what they have must be looked at."""
        self._back: set[int] = set()
        """Nodes that were gone, are there again, and have not been looked at."""
        self._troubled = False

    def add(self, values: Iterable[Value]) -> None:
        """Hear of these values."""
        with self.news:
            self._values.update({value.asked: value for value in values})

    def remove(self, values: Iterable[Value]) -> None:
        """Unlink these values on all nodes, wherever they are on their way."""
        names: set[str] = set()
        with self.news:
            for value in values:
                self._values.pop(value.asked, None)
                names |= {value.asked, value.name}
        if names:
            self.fleet.unlink(names)

    def names(self) -> set[str]:
        """Names of all files that may lie on nodes."""
        with self.news:
            return {name for value in self._values.values() for name in (value.asked, value.name)}

    def pending(self) -> list[Value]:
        """Values that were put and that some node still lacks; lets go of the memory of the others."""
        with self.news:
            nodes = self.fleet.nodes
            put = [value for value in self._values.values() if value.pieces is not None or value.settled]
            for value in put:
                if not nodes - value.spread.here:
                    value.settled, value.pieces = True, None
            # What a node has kept is looked at when its line is needed; nothing is done for that alone.
            sure = nodes - self._unsure
            return [value for value in put if (sure if value.pieces is None else nodes) - value.spread.here]

    def settle(self) -> None:
        """Wait until all nodes have all values.

        Raises:
            OSError: a node has no room.
            PoolError: a node cannot be reached, or values do not get through to it.
        """
        while back := self._back & self.fleet.nodes:
            self.reach(back)
            self._back -= back
        while pending := self.pending():
            self.reach()
            for value in pending:
                if value.problem is not None:
                    raise value.problem
                self.spread(value)
            with self.news:
                if not self._troubled and self.pending() == pending:
                    self.news.wait(1.0)
                self._troubled = False
            self.fleet.silent()

    # -- nodes -------------------------------------------------------------------------------------------------------

    def reach(self, nodes: Iterable[int] | None = None) -> None:
        """Open the lines that are down, and find out what those that were lost have kept. Raises PoolError."""
        for node in self.fleet.reach(nodes):
            if node in self._unsure:
                self._unsure.discard(node)
                self.look(list(self._values.values()), [node])

    def look(self, values: list[Value], nodes: Iterable[int]) -> None:
        """Find out which values nodes have, or can restore from what an earlier pool has left there."""
        asked = [(value.key, value.name, value.nbytes) for value in values]
        waits = []
        for node in nodes if asked else ():
            with contextlib.suppress(LineLost):
                waits.append(self.fleet.lines[node].look(asked, functools.partial(self._found, node, values)))
        for wait in waits:
            with contextlib.suppress(LineLost):
                wait()

    def _found(self, node: int, values: list[Value], looked: store.Looked) -> None:
        here, lacks = set(looked.here), set(looked.lacks)
        with self.news:
            for value in values:
                if value.name in here:
                    value.spread.landed(node)
                elif value.name == value.asked and value.name not in lacks and node not in value.spread.here:
                    value.spread.coming[node] = KEPT

    def lose(self, node: int) -> None:
        """A node is gone: nothing is sent to it any more."""
        with self.news:
            self.fleet.given_up.add(node)
            self._troubled = True
            self.news.notify_all()

    def regain(self, node: int) -> None:
        """A node that was gone is there again, perhaps with another store; `settle` brings it what it lacks."""
        with self.news:
            self.fleet.given_up.discard(node)
            for value in self._values.values():
                value.spread.lost(node)
            self._unsure.add(node)
            self._back.add(node)
        self.fleet.lines[node].hang_up()

    # -- news of depots ----------------------------------------------------------------------------------------------

    def _heard(self, node: int, message: store.Message | None) -> None:
        """What a depot says; called on the lines' threads."""
        with self.news:
            if message is None:
                self._unsure.add(node)
                self._troubled = True
                for value in self._values.values():
                    value.spread.lost(node)
            elif isinstance(message, Landed):
                self._landed(node, message)
            elif isinstance(message, Failed):
                self._failed(node, message)
            self.news.notify_all()

    def _landed(self, node: int, message: Landed) -> None:
        line = self.fleet.lines[node]
        line.room = message.room
        value = self._values.get(message.name)
        if value is None:
            return
        if value.key == message.key:
            value.spread.landed(node)
        else:  # it changed between two ways that it was sent
            value.spread.stopped(node)
            self._troubled = True
        if message.note:
            self._notify(
                f"{line.node.name}: {value.nbytes / 1e6:,.0f} MB do not fit in memory: {message.note}"
            )

    def _failed(self, node: int, message: Failed) -> None:
        value = self._values.get(message.name)
        if value is None or node not in value.spread.coming:
            return
        value.spread.stopped(node)
        self._troubled = True
        where = self.fleet.lines[node].node.name
        if message.errno in _HOPELESS:
            value.problem = OSError(message.errno, f"{message.reason}, on {where}")
        elif len(value.spread.failed.get(node, ())) > TRIES + len(self.fleet.lines):
            value.problem = PoolError(
                f"a value does not get through to {where}: {message.reason}; run the cell again"
            )

    # -- sending -----------------------------------------------------------------------------------------------------

    def spread(self, value: Value, progress: Told = None, *, only_redirect: bool = False) -> None:
        """Set a value on its way to each node that is not getting it yet.

        Args:
            only_redirect: leave out the nodes that must get it from here.
        """
        with self.news:
            plan = [
                (node, source)
                for node, source in orders(value.spread, self.fleet.up())
                if source != UPLINK or not only_redirect
            ]
            value.spread.coming.update(plan)
        for node, source in plan:
            if source == UPLINK:
                self._upload(value, node, progress)
            else:
                self.fleet.follow(node, value.asked, value.nbytes, source)

    def _upload(self, value: Value, node: int, progress: Told) -> None:
        """Send a value's bytes over the notebook's own connection to a node."""
        import xxhash

        if value.pieces is None:
            raise PoolError("the nodes have lost values that they had; run the cell again")
        state = xxhash.xxh3_128()
        done = 0
        going = self.fleet.send(node, store.Put(value.asked, value.nbytes))
        for piece in _copies(value.pieces):
            if value.problem is not None:
                raise value.problem
            if not going or value.spread.coming.get(node) != UPLINK:
                return
            state.update(piece)
            going = self.fleet.send(node, store.Body(value.asked, piece.nbytes), piece)
            done += piece.nbytes
            if progress is not None and done % _TOLD < STEP:
                progress(done)
            if self._troubled:
                self._troubled = False
                self.spread(value, only_redirect=True)
        self._seal(value, str(state.hexdigest()))
        self.fleet.send(node, store.Seal(value.asked, value.key))

    def _seal(self, value: Value, key: str) -> None:
        """What was sent has this key, whatever the value's was before."""
        with self.news:
            if value.sealed and value.key != key:
                raise PoolError("a value was changed while it was sent; run the cell again")
            value.key, value.sealed = key, True


def _copies(pieces: Iterable[Buffer]) -> Iterable[memoryview]:
    """The pieces' bytes, at most STEP at a time, each valid until the next.

    The copy is what makes hash and bytes agree while other threads write to the value.
    """
    scratch = memoryview(bytearray(STEP))
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for start in range(0, view.nbytes, STEP):
            part = view[start : start + STEP]
            copy = scratch[: part.nbytes]
            copy[:] = part
            yield copy
