"""The links to all agents of a pool: opened side by side, found by node or by rank, and closed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator

from skymagic.cluster.link import Link
from skymagic.cluster.states import States
from skymagic.wire import agent as wire
from skymagic.wire.codec import Transport
from skymagic.wire.threads import run_all


class Links:
    """Owns a link for each node.

    Args:
        states: the nodes and where their ranks are.
        received: called on a link's thread for each message of a node, and with None when its link ends.
        changed: called with a node and its link's state: "connected", "reconnecting" or "lost".
    """

    def __init__(
        self,
        states: States,
        received: Callable[[int, wire.AgentMessage | None], None],
        changed: Callable[[int, str], None],
    ) -> None:
        self._states, self._received, self._link_changed = states, received, changed
        self._links: dict[int, Link] = {}

    def __getitem__(self, index: int) -> Link:
        return self._links[index]

    def __iter__(self) -> Iterator[Link]:
        return iter(tuple(self._links.values()))

    def add(self, index: int, transport: Transport) -> Link:
        """A node's link, over this transport; in the place of the one that there was."""
        link = Link(transport, index, self._received)
        self._links = {**self._links, index: link}  # not changed in place: other threads go through it
        return link

    def connect(self, indices: Iterable[int]) -> dict[int, Transport]:
        """Reach the agents of these nodes side by side; when one fails, the others are closed, and what it raised is raised."""
        opened: dict[int, Transport | BaseException] = {}

        def open_one(index: int) -> None:
            try:
                opened[index] = self._states.nodes[index].start_agent(functools.partial(self._link_changed, index))
            except BaseException as problem:
                opened[index] = problem

        first, *others = indices
        threads = [threading.Thread(target=open_one, args=(index,), daemon=True) for index in others]
        for thread in threads:
            thread.start()
        open_one(first)
        for thread in threads:
            thread.join()
        transports = {index: made for index, made in sorted(opened.items()) if not isinstance(made, BaseException)}
        problems = [made for made in opened.values() if isinstance(made, BaseException)]
        if problems:
            for transport in transports.values():
                transport.close()
            raise problems[0]
        return transports

    def of(self, ranks: Iterable[int]) -> list[tuple[Link, tuple[int, ...]]]:
        """The links to the nodes of these ranks, each with those that are there."""
        chosen, specs = sorted(set(ranks)), self._states.specs
        shares = [(link, tuple(rank for rank in chosen if specs[rank][0] == link.node)) for link in self]
        return [(link, mine) for link, mine in shares if mine]

    def send_others(self, index: int, message: wire.AgentMessage) -> None:
        """Send a message to all nodes but one."""
        for link in self:
            if link.node != index:
                link.send(message)

    def complaint(self, index: int) -> str:
        """Why a node's link has ended, as far as its other end said so."""
        link = self._links.get(index)
        return link.complaint if link is not None else ""

    def retire(self, indices: Iterable[int], timeout: float) -> None:
        """Close links for good, `timeout` seconds at most: others will take their places."""
        run_all([self._links[index].retire for index in indices], timeout=timeout)

    def close(self) -> None:
        """Ask all agents to end everything; twice is safe."""
        run_all([link.close for link in self])
