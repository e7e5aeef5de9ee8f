"""Connections to the value servers of all nodes: opened in parallel, retried with backoff."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Sequence

from skymagic.cluster import Node
from skymagic.content.remote.client import ConnectionLost, StoreClient
from skymagic.errors import PoolError, SkyError
from skymagic.wire import store
from skymagic.wire.codec import Transport
from skymagic.wire.threads import failures, run_all

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 2.0
_CLOSE_TIMEOUT = 10.0


class StoreClients:
    """Clients of all nodes' value servers, with their lifetimes.

    Args:
        nodes: nodes in the order of their numbers.
        start: starts a value server on a node.
        settings: returns the first message to a node's server.
        notify: called with one sentence when a node cannot be reached for a while.
        retry_timeout: seconds to retry a node that cannot be reached.
        silence_timeout: seconds without a message after which a connection counts as lost.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        start: Callable[[Node], Transport],
        settings: Callable[[Node], store.Settings],
        notify: Callable[[str], None],
        retry_timeout: float,
        silence_timeout: float,
    ) -> None:
        self._settings = settings
        self.all = [
            StoreClient(node, start, settings(node), self._pass_on, silence_timeout)
            for node in nodes
        ]
        self.lost: set[int] = set()  # nodes that are gone and get no messages
        self.on_message: Callable[[int, store.StoreMessage | None], None] = lambda node, message: (
            None
        )
        """Called on the clients' threads with a node's number and a message about values from its
        server; with None when the connection is lost.
        """
        self._notify = notify
        self._retry_timeout = retry_timeout
        self.unlinking: list[set[str]] = [set() for _ in nodes]
        """By node: names of files that it still has to unlink."""

    @property
    def nodes(self) -> set[int]:
        """Nodes that receive the files that are put."""
        return set(range(len(self.all))) - self.lost

    def connected(self) -> list[int]:
        """Return the nodes that are connected and not lost."""
        return [
            client.node_index
            for client in self.all
            if client.connected and client.node_index not in self.lost
        ]

    def connect(self, nodes: Iterable[int] | None = None) -> None:
        """Open all missing connections in parallel.

        Each server first reports the files that it has kept.

        Raises:
            PoolError: nodes cannot be reached; the message names all of them.
        """
        among = self.nodes if nodes is None else nodes
        down = [self.all[node] for node in sorted(among) if not self.all[node].connected]
        problems = failures(run_all([functools.partial(self._retry, client) for client in down]))
        if problems:
            raise problems[0] if len(problems) == 1 else PoolError("\n".join(map(str, problems)))
        for client in down:
            self._send_unlinks(client.node_index)

    def _retry(self, client: StoreClient) -> None:
        """Connect with exponential backoff until the node answers, is lost, or the time is up."""
        start = time.monotonic()
        pause = _FIRST_PAUSE
        while client.node_index not in self.lost:
            try:
                client.connect()
                return
            except (OSError, SkyError) as problem:
                if time.monotonic() - start > self._retry_timeout or client.closed:
                    raise _unreachable(client, problem) from None
                # Notify once, not at each attempt.
                if pause == _FIRST_PAUSE:
                    self._notify(
                        f"{client.node.name} cannot be reached at present ({problem}); trying again"
                    )
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 1.6)

    def move(self, node: Node) -> None:
        """Replace a node that is gone by another machine."""
        self.all[node.index].move(node, self._settings(node))

    def send(self, node: int, message: store.StoreMessage, data: memoryview | None = None) -> bool:
        """Send a message and raw bytes; return False if the connection is lost."""
        try:
            self.all[node].send(message, data)
        except ConnectionLost:
            return False
        return True

    def follow(self, node: int, name: str, nbytes: int, source: int) -> None:
        """Make a node copy a value from another node."""
        self.send(node, store.Replicate(name, nbytes, self.all[source].listening))

    def unlink(self, names: Iterable[str], nodes: Iterable[int] | None = None) -> None:
        """Unlink files, on all nodes by default, now or after the next reconnect."""
        names = set(names)
        for node in range(len(self.all)) if nodes is None else nodes:
            self.unlinking[node] |= names
            self._send_unlinks(node)

    def _send_unlinks(self, node: int) -> None:
        # A copy: only names that were sent are removed, as others may be added meanwhile.
        names = set(self.unlinking[node])
        if names and self.all[node].connected and self.send(node, store.Delete(sorted(names))):
            self.unlinking[node] -= names

    def drop_silent(self) -> None:
        """Drop the connections that were silent for too long."""
        for client in self.all:
            client.drop_if_silent()

    def close(self, names: Iterable[str]) -> None:
        """Unlink these files on connected nodes and end all value servers; safe to call twice."""
        names = set(names)
        run_all(
            [functools.partial(self._close, client, names) for client in self.all],
            timeout=_CLOSE_TIMEOUT,
        )

    def _close(self, client: StoreClient, names: set[str]) -> None:
        # Sending to a silent server could block.
        if client.connected and not client.drop_if_silent():
            with contextlib.suppress(ConnectionLost):
                client.send(store.Delete(sorted(names | self.unlinking[client.node_index])))
        client.close()

    def _pass_on(self, node: int, message: store.StoreMessage | None) -> None:
        # Looked up at each call: `on_message` is set after the clients exist.
        self.on_message(node, message)


def _unreachable(client: StoreClient, problem: BaseException) -> PoolError:
    return PoolError(
        f"node {client.node_index} ({client.node.name}) cannot be reached: {problem}; "
        "run the cell again when it is back, or end the pool with %sky_down",
        code="node-unreached",
        node=client.node_index,
        names=[client.node.name],
    )
