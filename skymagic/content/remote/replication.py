"""Chain replication: choose each node's source, track values in transit, handle failures."""

from __future__ import annotations

import errno
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from skymagic.content.base import Buffer
from skymagic.content.chunks import new_hash
from skymagic.content.remote.clients import StoreClients
from skymagic.errors import PoolError
from skymagic.wire import store
from skymagic.wire.store import PIECE_BYTES, Adopted, AdoptReply, Ready, Stored, StoreFailed

logger = logging.getLogger(__name__)

NOTEBOOK = -1
"""Source of a node that receives a value over the notebook's own connection."""
LOCAL = -2
"""Source of a node that assembles a value from pieces of other values stored there."""


@dataclass
class Placement:
    """Nodes that have one value, and nodes that are receiving it."""

    held: set[int] = field(default_factory=set)
    """Nodes that have it."""
    sources: dict[int, int] = field(default_factory=dict)
    """By receiving node: the node that it copies from."""
    failed: dict[int, list[int]] = field(default_factory=dict)
    """By node: sources that it could not copy from."""

    def mark_stored(self, node: int) -> None:
        """Record that a node has the whole value."""
        self.sources.pop(node, None)
        self.held.add(node)

    def stopped(self, node: int) -> None:
        """Record that a node's source failed."""
        source = self.sources.pop(node, None)
        if source is not None:
            self.failed.setdefault(node, []).append(source)

    def disconnected(self, node: int) -> None:
        """Forget what a node has, because it is unknown without a connection.

        Nodes that copy from it need another source; this does not count as a failed attempt.
        """
        self.held.discard(node)
        for receiver in [
            node,
            *(other for other, source in self.sources.items() if source == node),
        ]:
            self.sources.pop(receiver, None)

    def upstream(self, node: int) -> list[int]:
        """Return the node, its source, the source of that node, and so on."""
        # Ends at the notebook, at a local source, or at a cycle.
        chain = [node]
        while (
            (source := self.sources.get(chain[-1])) is not None
            and source >= 0
            and source not in chain
        ):
            chain.append(source)
        return chain


def assign_sources(placement: Placement, nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (node, source) for each node that neither has a value nor is receiving it.

    Nodes served by the notebook come last. The nodes form a chain: each copies from the one before
    it, so that the notebook's own connection carries a value once. A node whose source failed
    copies from the first node that has the value, or, once all of these have failed twice, from the
    notebook.

    Args:
        nodes: reachable nodes, in the order of the chain.
    """
    plan = Placement(set(placement.held), dict(placement.sources), placement.failed)
    assignments: list[tuple[int, int]] = []
    for node in nodes:
        if node not in plan.held and node not in plan.sources:
            source = _source(plan, node, [other for other in nodes if other != node])
            plan.sources[node] = source
            assignments.append((node, source))
    return sorted(assignments, key=lambda assignment: assignment[1] == NOTEBOOK)


def _source(plan: Placement, node: int, candidates: list[int]) -> int:
    failed = plan.failed.get(node, [])
    able = [
        other
        for other in candidates
        if failed.count(other) < 2
        # Not a node that copies from this one, even indirectly: they would wait for each other.
        and (other in plan.held or (other in plan.sources and node not in plan.upstream(other)))
    ]
    if not able:
        return NOTEBOOK
    if failed:
        return min(able, key=lambda other: (failed.count(other), other not in plan.held, other))
    # The nearest node before this one, so that the nodes form a chain.
    return max((other for other in able if other < node), default=able[0])


# -- values on their way to all nodes --------------------------------------------------------------


RETRIES = 3
"""Failures allowed for one value on one node, beyond one failure per node of the pool."""

_PROGRESS_BYTES = 1 << 22
_HOPELESS_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS)


Progress = Callable[[int], None] | None
"""Called at intervals with the bytes of a value sent so far."""


@dataclass(eq=False)
class ReplicatedFile:
    """File that is replicated on all nodes."""

    key: str
    """Content hash; replaced if the contents changed before they were sent."""
    sent_as: str
    """Name of the file while it is sent."""
    nbytes: int
    pieces: list[Buffer] | None = None
    """Contents, kept until all nodes have them."""
    sealed: bool = False
    """True once all of it was sent, or is on a node: its key is final from then on."""
    replicated: bool = False
    """True once all nodes have had it."""
    adopted: list[Adopted] = field(default_factory=list)
    """Files of the node that had it first."""
    placement: Placement = field(default_factory=Placement)
    problem: Exception | None = None
    used: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """Name of the file on every node."""
        return f"{self.sent_as.partition('-')[0]}-{self.key}"


class Replication:
    """Brings files to all nodes."""

    def __init__(self, clients: StoreClients, notify: Callable[[str], None], hash: str) -> None:
        self.clients = clients
        self._hash = hash
        self.changed = threading.Condition(threading.RLock())
        """Held briefly while the fields below or the files themselves change."""
        self._notify = notify
        self._files: dict[str, ReplicatedFile] = {}
        self._unverified: set[int] = set()
        """Nodes that lost their connection, so that it is unknown which files they have."""
        self._regained: set[int] = set()
        """Nodes that have returned and were not connected to since."""
        self._replan = False
        """True if a node may need another source: set by the clients' threads, cleared by the
        sending thread.
        """
        self.failed_nodes: set[int] = set()
        """Nodes that have failed to store a file from all sources."""
        self._adoption: AdoptReply | None = None
        clients.on_message = self._on_message

    def add(self, files: Iterable[ReplicatedFile]) -> None:
        """Start to track what the servers report about these files."""
        with self.changed:
            self._files.update({file.sent_as: file for file in files})

    def remove(self, files: Iterable[ReplicatedFile]) -> None:
        """Unlink these files on all nodes, including those still in transit."""
        names: set[str] = set()
        with self.changed:
            for file in files:
                self._files.pop(file.sent_as, None)
                names |= {file.sent_as, file.name}
        if names:
            self.clients.unlink(names)

    def names(self) -> set[str]:
        """Return the names of all files that may be on nodes."""
        with self.changed:
            return {name for file in self._files.values() for name in (file.sent_as, file.name)}

    def pending(self) -> list[ReplicatedFile]:
        """Return the files that were put and that some node still lacks.

        The memory of all other files is released.
        """
        with self.changed:
            nodes = self.clients.nodes
            put = [
                file for file in self._files.values() if file.pieces is not None or file.replicated
            ]
            for file in put:
                if not nodes - file.placement.held:
                    file.replicated, file.pieces = True, None
            # A node reports its stored files when it is connected to; do not connect just for that.
            verified = nodes - self._unverified
            return [
                file
                for file in put
                if (verified if file.pieces is None else nodes) - file.placement.held
            ]

    def settle(self) -> None:
        """Wait until all nodes have all files.

        Raises:
            OSError: a node has no space left.
            PoolError: a node cannot be reached, or values do not get through to it.
        """
        while regained := self._regained & self.clients.nodes:
            # Connect first: `Ready` reports which files the nodes still have.
            self.clients.connect(regained)
            self._regained -= regained
        while pending := self.pending():
            self.clients.connect()
            for file in pending:
                if file.problem is not None:
                    raise file.problem
                self.replicate(file)
            with self.changed:
                # Do not sleep through messages that arrived since the plan was made: they show up
                # in `_replan` or `pending`.
                if not self._replan and self.pending() == pending:
                    self.changed.wait(1.0)
                self._replan = False
            self.clients.drop_silent()

    # -- nodes -------------------------------------------------------------------------------------

    def lose(self, node: int) -> None:
        """Stop sending to a node that is gone."""
        logger.info("no values are sent to the lost node: node=%s", node)
        with self.changed:
            self.clients.lost.add(node)
            self._replan = True
            self.changed.notify_all()

    def lose_failed(self) -> set[int]:
        """Stop sending to the nodes that cannot be reached or have no space, and return them."""
        failed = (self.failed_nodes & self.clients.nodes) | (
            self.clients.nodes - set(self.clients.connected())
        )
        for node in failed:
            self.lose(node)
            # Those that follow it get another source.
            self.clients.all[node].disconnect()
        with self.changed:
            self.failed_nodes.clear()
            for file in self._files.values():
                file.problem = None
        return failed

    def readmit(self, node: int) -> None:
        """Use a node again that was gone, perhaps with another store.

        `settle` sends it the files that it lacks.
        """
        logger.info("values are sent to the node again: node=%s", node)
        with self.changed:
            self.clients.lost.discard(node)
            for file in self._files.values():
                file.placement.disconnected(node)
            self._unverified.add(node)
            self._regained.add(node)
        self.clients.all[node].disconnect()

    # -- messages from the value servers -----------------------------------------------------------

    def _on_message(self, node: int, message: store.StoreMessage | None) -> None:
        """Handle a message of a node, or None if its connection is lost.

        Called on the clients' threads.
        """
        with self.changed:
            if message is None:
                self._unverified.add(node)
                self._replan = True
                for file in self._files.values():
                    file.placement.disconnected(node)
            elif isinstance(message, Ready):
                self._unverified.discard(node)
                present = set(message.present) - self.clients.unlinking[node]
                for file in self._files.values():
                    if file.name in present:
                        file.placement.mark_stored(node)
            elif isinstance(message, Stored):
                self._on_stored(node, message)
            elif isinstance(message, StoreFailed):
                self._failed(node, message)
            elif isinstance(message, Adopted):
                self._on_adopted(node, message)
            elif isinstance(message, AdoptReply):
                self._adoption = message
            self.changed.notify_all()

    def _on_stored(self, node: int, message: Stored) -> None:
        client = self.clients.all[node]
        client.free_bytes = message.room
        file = self._files.get(message.name)
        if file is None:
            return
        # The node hashed what it received: only a matching key counts.
        if file.key == message.key:
            file.placement.mark_stored(node)
            file.sealed = True
        else:  # the value changed between two attempts to send it
            file.placement.stopped(node)
            self._replan = True
        if message.note:
            self._notify(
                f"{client.node.name}: {file.nbytes / 1e6:,.0f} MB do not fit in memory: "
                f"{message.note}"
            )

    def _failed(self, node: int, message: StoreFailed) -> None:
        file = self._files.get(message.name)
        if file is None or node not in file.placement.sources:
            return
        logger.warning(
            "value not stored, another source is tried: node=%s name=%s errno=%s",
            node,
            message.name,
            message.errno,
        )
        file.placement.stopped(node)
        self._replan = True
        node_name = self.clients.all[node].node.name
        # Another source would not help: the node itself has no space or no permission.
        if message.errno in _HOPELESS_ERRNOS:
            self.failed_nodes.add(node)
            file.problem = OSError(message.errno, f"{message.reason}, on {node_name}")
        elif len(file.placement.failed.get(node, ())) > RETRIES + len(self.clients.all):
            self.failed_nodes.add(node)
            file.problem = PoolError(
                f"a value could not be sent to {node_name}: {message.reason}; run the cell again",
                code="value-not-sent",
                names=[node_name],
            )

    def _on_adopted(self, node: int, message: Adopted) -> None:
        key = message.name.partition("-")[2]
        file = self._files.setdefault(
            message.name,
            ReplicatedFile(key, message.name, message.nbytes, sealed=True, replicated=True),
        )
        file.adopted.append(message)
        file.placement.mark_stored(node)
        self._replan = True

    # -- sending -----------------------------------------------------------------------------------

    def replicate(
        self, file: ReplicatedFile, progress: Progress = None, *, only_followers: bool = False
    ) -> None:
        """Assign a source to each node that is not receiving a file yet.

        Nodes whose source is the notebook are sent the file right away.

        Args:
            only_followers: True to skip the nodes that have to receive it from the notebook.
        """
        with self.changed:
            plan = [
                (node, source)
                for node, source in assign_sources(file.placement, self.clients.connected())
                if source != NOTEBOOK or not only_followers
            ]
            # Set before anything is sent, so that replies find the node's source.
            file.placement.sources.update(plan)
        # Without the lock, which the clients' threads need to handle the replies.
        for node, source in plan:
            if source == NOTEBOOK:
                self._upload(file, node, progress)
            else:
                self.clients.follow(node, file.sent_as, file.nbytes, source)

    def adopt(self, node: int, folder: str, below: Sequence[str]) -> list[ReplicatedFile]:
        """Start to pass files that a node has already on to all others, as its server finds them.

        `settle` waits until they have arrived.

        Raises:
            OSError: a file cannot be read, or the connection to the node is lost.
        """
        self._adoption = None
        if not self.clients.send(node, store.Adopt(secrets.token_hex(8), folder, list(below))):
            raise OSError(errno.ENOTCONN, "the connection is lost")
        while self._adoption is None and node in self.clients.connected():
            for file in self.pending():
                self.replicate(file, only_followers=True)
            with self.changed:
                if not self._replan and self._adoption is None:
                    self.changed.wait(1.0)
                self._replan = False
        if self._adoption is None or self._adoption.problem:
            raise OSError(
                errno.EIO, self._adoption.problem if self._adoption else "the connection is lost"
            )
        with self.changed:
            return [file for file in self._files.values() if file.adopted]

    def assemble(self, file: ReplicatedFile, slices: list[store.Slice]) -> None:
        """Let the nodes that are not receiving a file yet assemble it from stored pieces."""
        with self.changed:
            nodes = [node for node, _ in assign_sources(file.placement, self.clients.connected())]
            file.placement.sources.update(dict.fromkeys(nodes, LOCAL))
        for node in nodes:
            self.clients.send(node, store.Assemble(file.sent_as, file.nbytes, file.key, slices))

    def _upload(self, file: ReplicatedFile, node: int, progress: Progress) -> None:
        """Send a file's bytes to a node over the notebook's own connection."""
        if file.pieces is None:
            self.failed_nodes.add(node)
            raise PoolError(
                "the nodes have lost values that they had; run the cell again", code="value-lost"
            )
        state = new_hash(self._hash)
        done = 0
        sending = self.clients.send(node, store.Put(file.sent_as, file.nbytes))
        for piece in _copies(file.pieces):
            if file.problem is not None:
                raise file.problem
            # The connection was lost, or the node has reported a failure: `settle` plans again.
            if not sending or file.placement.sources.get(node) != NOTEBOOK:
                return
            state.update(piece)
            sending = self.clients.send(node, store.PutChunk(file.sent_as, piece.nbytes), piece)
            done += piece.nbytes
            if progress is not None and done % _PROGRESS_BYTES < PIECE_BYTES:
                progress(done)
            if self._replan:  # replan now, so that other nodes need not wait for the end
                self._replan = False
                self.replicate(file, only_followers=True)
        self._seal(file, str(state.hexdigest()))
        self.clients.send(node, store.PutEnd(file.sent_as, file.key))

    def _seal(self, file: ReplicatedFile, key: str) -> None:
        """Fix a file's key to the hash of the bytes that were sent."""
        with self.changed:
            # The earlier contents were sent in full under this name, or are on a node.
            if file.sealed and file.key != key:
                raise PoolError(
                    "a value was changed while it was sent; run the cell again",
                    code="value-changed",
                )
            file.key, file.sealed = key, True


def _copies(pieces: Iterable[Buffer]) -> Iterable[memoryview]:
    """Iterate over copies of the pieces' bytes, at most PIECE_BYTES at a time.

    A copy is valid until the next one is requested. It ensures that hash and bytes agree even if
    other threads write to the value.
    """
    scratch = memoryview(bytearray(PIECE_BYTES))
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for start in range(0, view.nbytes, PIECE_BYTES):
            part = view[start : start + PIECE_BYTES]
            copy = scratch[: part.nbytes]
            copy[:] = part
            yield copy
