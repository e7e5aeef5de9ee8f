"""Chain replication: which node gets a value from which other one, values on their way to all nodes, and what is done when that fails."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from skymagic.data.remote.clients import StoreClients
from skymagic.data.store.base import Buffer
from skymagic.errors import PoolError
from skymagic.wire import store
from skymagic.wire.store import PIECE_BYTES, Ready, Stored, StoreFailed

NOTEBOOK = -1
"""The source of a node that gets a value over the notebook's own connection."""
LOCAL = -2
"""The source of a node that makes a value of what lies there: pieces of other values."""


@dataclass
class Placement:
    """Where one value is, and on its way to."""

    here: set[int] = field(default_factory=set)
    """Nodes that have it."""
    sources: dict[int, int] = field(default_factory=dict)
    """Node that is getting it → the one that it gets it from."""
    failed: dict[int, list[int]] = field(default_factory=dict)
    """Node → those that it could not get it from."""

    def arrived(self, node: int) -> None:
        """Note that a node has the whole value."""
        self.sources.pop(node, None)
        self.here.add(node)

    def stopped(self, node: int) -> None:
        """A node got no more from its source."""
        source = self.sources.pop(node, None)
        if source is not None:
            self.failed.setdefault(node, []).append(source)

    def disconnected(self, node: int) -> None:
        """What a node has is unknown; those that follow it need another source, and it counts as no failure of theirs."""
        self.here.discard(node)
        for each in [node, *(other for other, source in self.sources.items() if source == node)]:
            self.sources.pop(each, None)

    def upstream(self, node: int) -> list[int]:
        """The node, its source, the source of that one…"""
        chain = [node]
        while (
            (source := self.sources.get(chain[-1])) is not None
            and source >= 0
            and source not in chain
        ):
            chain.append(source)
        return chain


def assign_sources(placement: Placement, nodes: Sequence[int]) -> list[tuple[int, int]]:
    """(node, source) for each node that neither has a value nor is getting it; whom the notebook serves comes last.

    The nodes form a chain: each follows the one before it, so that the notebook's own connection carries a value once.
    A node whose source has failed follows the first of those that have the value; when all have failed twice, the notebook.

    Args:
        nodes: those that can be reached, in the order of the chain.
    """
    plan = Placement(set(placement.here), dict(placement.sources), placement.failed)
    found: list[tuple[int, int]] = []
    for node in nodes:
        if node not in plan.here and node not in plan.sources:
            source = _source(plan, node, [other for other in nodes if other != node])
            plan.sources[node] = source
            found.append((node, source))
    return sorted(found, key=lambda each: each[1] == NOTEBOOK)


def _source(plan: Placement, node: int, others: list[int]) -> int:
    failed = plan.failed.get(node, [])
    able = [
        other
        for other in others
        if failed.count(other) < 2
        # not one that waits, over whatever chain, for this node: they would wait for each other
        and (other in plan.here or (other in plan.sources and node not in plan.upstream(other)))
    ]
    if not able:
        return NOTEBOOK
    if failed:
        return min(able, key=lambda other: (failed.count(other), other not in plan.here, other))
    return max((other for other in able if other < node), default=able[0])


# -- values on their way to all nodes --------------------------------------------------------------


RETRIES = 3  # times that a value may fail to reach a node, beyond once for each node

_PROGRESS_BYTES = 1 << 22
_HOPELESS_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


Progress = Callable[[int], None] | None
"""Called now and then with the bytes of a value that were sent."""


@dataclass(eq=False)
class ReplicatedFile:
    """One file, on all nodes."""

    key: str
    """The hash of its content; another one when the content changed before it was sent."""
    sent_as: str
    """The name under which it is sent."""
    nbytes: int
    pieces: list[Buffer] | None = None
    """What it is made of, until all nodes have it."""
    sealed: bool = False
    """Whether all of it was sent once, or is on a node: from then on its key stands."""
    replicated: bool = False
    """Whether all nodes had it once."""
    placement: Placement = field(default_factory=Placement)
    problem: Exception | None = None
    used: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """The file's name on every node."""
        return f"{self.sent_as.partition('-')[0]}-{self.key}"


class Replication:
    """Brings files to all nodes."""

    def __init__(self, clients: StoreClients, notify: Callable[[str], None]) -> None:
        self.clients = clients
        self.changed = threading.Condition(threading.RLock())
        """Held for moments, while what follows and the files themselves change."""
        self._notify = notify
        self._files: dict[str, ReplicatedFile] = {}
        self._unverified: set[int] = (
            set()
        )  # nodes whose connection was lost: what they have is unknown
        self._regained: set[int] = (
            set()
        )  # nodes that were gone, are there again, and were not connected to since
        self._replan = False
        """Whether a node may need another source: set by the clients' threads, cleared by the one that sends."""
        clients.on_message = self._received

    def add(self, files: Iterable[ReplicatedFile]) -> None:
        """Take notice of what the servers say of these files."""
        with self.changed:
            self._files.update({file.sent_as: file for file in files})

    def remove(self, files: Iterable[ReplicatedFile]) -> None:
        """Unlink these files on all nodes, also where they are still on their way."""
        names: set[str] = set()
        with self.changed:
            for file in files:
                self._files.pop(file.sent_as, None)
                names |= {file.sent_as, file.name}
        if names:
            self.clients.unlink(names)

    def names(self) -> set[str]:
        """Names of all files that may lie on nodes."""
        with self.changed:
            return {name for file in self._files.values() for name in (file.sent_as, file.name)}

    def pending(self) -> list[ReplicatedFile]:
        """Files that were put and that some node still lacks; lets go of the memory of the others."""
        with self.changed:
            nodes = self.clients.nodes
            put = [
                file for file in self._files.values() if file.pieces is not None or file.replicated
            ]
            for file in put:
                if not nodes - file.placement.here:
                    file.replicated, file.pieces = True, None
            # What a node has kept is heard of when its connection is needed; nothing is done for that alone.
            verified = nodes - self._unverified
            return [
                file
                for file in put
                if (verified if file.pieces is None else nodes) - file.placement.here
            ]

    def settle(self) -> None:
        """Wait until all nodes have all files.

        Raises:
            OSError: a node has no room.
            PoolError: a node cannot be reached, or values do not get through to it.
        """
        while regained := self._regained & self.clients.nodes:
            self.clients.connect(regained)
            self._regained -= regained
        while pending := self.pending():
            self.clients.connect()
            for file in pending:
                if file.problem is not None:
                    raise file.problem
                self.replicate(file)
            with self.changed:
                # News that came since the plan was made must not be slept through: they are in `_replan` or `pending`.
                if not self._replan and self.pending() == pending:
                    self.changed.wait(1.0)
                self._replan = False
            self.clients.drop_silent()

    # -- nodes -------------------------------------------------------------------------------------------------------

    def lose(self, node: int) -> None:
        """A node is gone: nothing is sent to it any more."""
        with self.changed:
            self.clients.lost.add(node)
            self._replan = True
            self.changed.notify_all()

    def regain(self, node: int) -> None:
        """A node that was gone is there again, perhaps with another store; `settle` brings it what it lacks."""
        with self.changed:
            self.clients.lost.discard(node)
            for file in self._files.values():
                file.placement.disconnected(node)
            self._unverified.add(node)
            self._regained.add(node)
        self.clients.all[node].disconnect()

    # -- what the value servers say ----------------------------------------------------------------------------------

    def _received(self, node: int, message: store.StoreMessage | None) -> None:
        """A message of a node, None when its connection is lost; called on the clients' threads."""
        with self.changed:
            if message is None:
                self._unverified.add(node)
                self._replan = True
                for file in self._files.values():
                    file.placement.disconnected(node)
            elif isinstance(message, Ready):
                self._unverified.discard(node)
                here = set(message.present) - self.clients.unlinking[node]
                for file in self._files.values():
                    if file.name in here:
                        file.placement.arrived(node)
            elif isinstance(message, Stored):
                self._arrived(node, message)
            elif isinstance(message, StoreFailed):
                self._failed(node, message)
            self.changed.notify_all()

    def _arrived(self, node: int, message: Stored) -> None:
        client = self.clients.all[node]
        client.room = message.room
        file = self._files.get(message.name)
        if file is None:
            return
        if file.key == message.key:
            file.placement.arrived(node)
            file.sealed = True
        else:  # the value changed between two times that it was sent
            file.placement.stopped(node)
            self._replan = True
        if message.note:
            self._notify(
                f"{client.node.name}: {file.nbytes / 1e6:,.0f} MB do not fit in memory: {message.note}"
            )

    def _failed(self, node: int, message: StoreFailed) -> None:
        file = self._files.get(message.name)
        if file is None or node not in file.placement.sources:
            return
        file.placement.stopped(node)
        self._replan = True
        where = self.clients.all[node].node.name
        if message.errno in _HOPELESS_ERRNOS:
            file.problem = OSError(message.errno, f"{message.reason}, on {where}")
        elif len(file.placement.failed.get(node, ())) > RETRIES + len(self.clients.all):
            file.problem = PoolError(
                f"a value could not be sent to {where}: {message.reason}; run the cell again"
            )

    # -- sending -----------------------------------------------------------------------------------------------------

    def replicate(
        self, file: ReplicatedFile, progress: Progress = None, *, only_followers: bool = False
    ) -> None:
        """Give each node that is not getting a file yet a source for it, and send it to those whose source is the notebook.

        Args:
            only_followers: leave out the nodes that must get it from here.
        """
        with self.changed:
            plan = [
                (node, source)
                for node, source in assign_sources(file.placement, self.clients.connected())
                if source != NOTEBOOK or not only_followers
            ]
            file.placement.sources.update(plan)
        for node, source in plan:
            if source == NOTEBOOK:
                self._upload(file, node, progress)
            else:
                self.clients.follow(node, file.sent_as, file.nbytes, source)

    def assemble(self, file: ReplicatedFile, slices: list[store.Slice]) -> None:
        """Let the nodes that are not getting a file yet make it of what they have."""
        with self.changed:
            nodes = [node for node, _ in assign_sources(file.placement, self.clients.connected())]
            file.placement.sources.update(dict.fromkeys(nodes, LOCAL))
        for node in nodes:
            self.clients.send(node, store.Assemble(file.sent_as, file.nbytes, file.key, slices))

    def _upload(self, file: ReplicatedFile, node: int, progress: Progress) -> None:
        """Send a file's bytes over the notebook's own connection to a node."""
        import xxhash

        if file.pieces is None:
            raise PoolError("the nodes have lost values that they had; run the cell again")
        state = xxhash.xxh3_128()
        done = 0
        sending = self.clients.send(node, store.Put(file.sent_as, file.nbytes))
        for piece in _copies(file.pieces):
            if file.problem is not None:
                raise file.problem
            if not sending or file.placement.sources.get(node) != NOTEBOOK:
                return
            state.update(piece)
            sending = self.clients.send(node, store.PutChunk(file.sent_as, piece.nbytes), piece)
            done += piece.nbytes
            if progress is not None and done % _PROGRESS_BYTES < PIECE_BYTES:
                progress(done)
            if self._replan:  # while sending: the others need not wait for its end
                self._replan = False
                self.replicate(file, only_followers=True)
        self._seal(file, str(state.hexdigest()))
        self.clients.send(node, store.PutEnd(file.sent_as, file.key))

    def _seal(self, file: ReplicatedFile, key: str) -> None:
        """What was sent has this key, whatever the file's was before."""
        with self.changed:
            if file.sealed and file.key != key:
                raise PoolError("a value was changed while it was sent; run the cell again")
            file.key, file.sealed = key, True


def _copies(pieces: Iterable[Buffer]) -> Iterable[memoryview]:
    """The pieces' bytes, at most PIECE_BYTES at a time, each valid until the next.

    The copy is what makes hash and bytes agree while other threads write to the value.
    """
    scratch = memoryview(bytearray(PIECE_BYTES))
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for start in range(0, view.nbytes, PIECE_BYTES):
            part = view[start : start + PIECE_BYTES]
            copy = scratch[: part.nbytes]
            copy[:] = part
            yield copy
