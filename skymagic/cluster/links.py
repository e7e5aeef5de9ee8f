"""Connections to all agents of a pool: messages, requests, and addresses between nodes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from skymagic.cluster.nodes import Node, States
from skymagic.errors import ProvisionError
from skymagic.wire import agent as wire
from skymagic.wire.codec import Transport
from skymagic.wire.threads import run_all

logger = logging.getLogger(__name__)


class PendingCalls:
    """Requests that wait for replies, matched by number."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._numbers = itertools.count(1)
        self._replies: dict[int, dict[int, Any]] = {}
        self._kept: dict[int, tuple[int, dict[int, Any]]] = {}

    def number(self) -> int:
        """Return a number that no other request has."""
        return next(self._numbers)

    @contextlib.contextmanager
    def call(self) -> Iterator[tuple[int, dict[int, Any]]]:
        """Yield a number for a request, and a dictionary that receives its replies by sender."""
        number = self.number()
        replies = self._replies.setdefault(number, {})
        try:
            yield number, replies
        finally:
            self._replies.pop(number, None)

    def keep(self, sender: int, replies: dict[int, Any]) -> int:
        """Number a request whose only reply goes into `replies` under its sender, whenever it
        arrives.
        """
        number = self.number()
        self._kept[number] = sender, replies
        return number

    def deliver(self, number: int, sender: int, reply: Any) -> None:
        """Deliver a reply; it is dropped if nothing waits for it any more."""
        if (entry := self._kept.get(number)) is not None and entry[0] == sender:
            entry[1][sender] = reply
            del self._kept[number]
        self._replies.get(number, {})[sender] = reply

    def wait(self, enough: Callable[[], bool], timeout: float) -> None:
        """Wait until there are enough replies, or `timeout` seconds have passed."""
        with self._changed:
            self._changed.wait_for(enough, timeout)


class AgentLink:
    """Connection to one node's agent, with a thread that dispatches incoming messages.

    Args:
        transport: byte streams to the agent.
        node: the node's number, passed with each message.
        received: called on the link's thread for each message, and with None when the link ends.
    """

    def __init__(
        self,
        transport: Transport,
        node: int,
        received: Callable[[int, wire.AgentMessage | None], None],
    ) -> None:
        self.node = node
        self._transport = transport
        self._received = received
        self.complaint = ""  # set when the link has ended: the reason, if the other end gave one
        self._writing = threading.Lock()
        self._thread = threading.Thread(
            target=self._listen, name=f"skymagic-link-{node}", daemon=True
        )
        self._thread.start()

    def send(self, message: wire.AgentMessage) -> None:
        """Send a message. It is dropped if the agent is gone, which `received` reports."""
        with self._writing, contextlib.suppress(OSError):
            self._transport.write(wire.encode(message))

    def _listen(self) -> None:
        decoder = wire.decoder()
        with contextlib.suppress(OSError, ValueError):
            while data := self._transport.read():
                for message in decoder.feed(data):
                    self._received(self.node, message)
        self.complaint = self._transport.complaint()
        logger.info("link has ended: node=%s", self.node)
        self._received(self.node, None)

    def drop(self) -> None:
        """Close the link to an unreachable agent, which ends once it is reached again.

        Safe to call twice.
        """
        self._transport.close()

    def retire(self) -> None:
        """Close the link for good, because another one replaces it; ignore its remaining messages.

        Safe to call twice.
        """
        self._received = lambda node, message: None
        self.close()

    def close(self) -> None:
        """Ask the agent to end everything, and wait for it. Safe to call twice."""
        self.send(wire.Shutdown())
        self._thread.join(timeout=5.0)
        self._transport.close()
        self._thread.join(timeout=5.0)


class AgentLinks:
    """A link for each node.

    Args:
        states: the nodes and the location of their ranks.
        received: called on a link's thread for each message of a node, and with None when its link
            ends.
        changed: called with a node and its link's state: "connected", "reconnecting" or "lost".
    """

    def __init__(
        self,
        states: States,
        received: Callable[[int, wire.AgentMessage | None], None],
        changed: Callable[[int, str], None],
    ) -> None:
        self._states, self._received, self._link_changed = states, received, changed
        self._links: dict[int, AgentLink] = {}

    def __getitem__(self, index: int) -> AgentLink:
        return self._links[index]

    def __iter__(self) -> Iterator[AgentLink]:
        return iter(tuple(self._links.values()))

    def add(self, index: int, transport: Transport) -> AgentLink:
        """Return a new link to a node over this transport, which replaces any earlier link."""
        link = AgentLink(transport, index, self._received)
        # not changed in place: other threads iterate over it
        self._links = {**self._links, index: link}
        return link

    def connect(self, indices: Iterable[int]) -> dict[int, Transport]:
        """Connect to the agents of these nodes concurrently.

        If one fails, the other transports are closed and its error is raised.
        """
        opened: dict[int, Transport | BaseException] = {}

        def open_one(index: int) -> None:
            try:
                logger.debug("connecting to the agent: node=%s", index)
                opened[index] = self._states.nodes[index].start_agent(
                    functools.partial(self._link_changed, index)
                )
            except BaseException as problem:
                logger.warning("agent not reached: node=%s error=%s", index, type(problem).__name__)
                opened[index] = problem

        # the head's on this thread, so that an interrupt reaches it
        first, *other_indices = indices
        threads = [
            threading.Thread(target=open_one, args=(index,), daemon=True) for index in other_indices
        ]
        for thread in threads:
            thread.start()
        open_one(first)
        for thread in threads:
            thread.join()
        transports = {
            index: result
            for index, result in sorted(opened.items())
            if not isinstance(result, BaseException)
        }
        problems = [result for result in opened.values() if isinstance(result, BaseException)]
        if problems:
            for transport in transports.values():
                transport.close()
            raise problems[0]
        return transports

    def of(self, ranks: Iterable[int]) -> list[tuple[AgentLink, tuple[int, ...]]]:
        """Return the links to the nodes of these ranks, each with its ranks."""
        sorted_ranks, specs = sorted(set(ranks)), self._states.specs
        shares = [
            (link, tuple(rank for rank in sorted_ranks if specs[rank][0] == link.node))
            for link in self
        ]
        return [(link, node_ranks) for link, node_ranks in shares if node_ranks]

    def send_others(self, index: int, message: wire.AgentMessage) -> None:
        """Send a message to all nodes except one."""
        for link in self:
            if link.node != index:
                link.send(message)

    def complaint(self, index: int) -> str:
        """Return the reason why a node's link ended, if its other end gave one."""
        link = self._links.get(index)
        return link.complaint if link is not None else ""

    def retire(self, indices: Iterable[int], timeout: float) -> None:
        """Close links for good, within `timeout` seconds, before others replace them."""
        run_all([self._links[index].retire for index in indices], timeout=timeout)

    def close(self) -> None:
        """Ask all agents to end everything. Safe to call twice."""
        run_all([link.close for link in self])


PROBE_TIMEOUT = 5.0
"""Seconds that nodes have to probe another one."""


class Routes:
    """Find out which addresses the nodes of a pool reach each other at."""

    def __init__(self, states: States, links: AgentLinks, calls: PendingCalls) -> None:
        self._states, self._links, self._calls = states, links, calls
        self._listening: dict[int, wire.ProbeReply] = {}
        """Node → addresses for probing it, once it has reported them."""

    def find(self, timeout: float) -> list[str]:
        """Return each node's address for the others, the head first.

        Raises:
            ProvisionError: no private address of the head can be reached by all others.
        """
        nodes, started = self._states.nodes, self._states.started
        if len({started[index].machine for index in range(len(nodes))}) == 1:
            return ["127.0.0.1"] * len(nodes)
        addresses, other_indices = self._places(0) or started[0].addresses, range(1, len(nodes))
        with self._calls.call() as (number, answers):
            for index in other_indices:
                self._links[index].send(
                    wire.ProbeAddresses(dict(addresses), started[0].secret, number)
                )
            self._states.wait(
                lambda: len(answers) == len(other_indices), timeout, "the way from node to node"
            )
            replies: dict[int, wire.ProbeReply] = dict(answers)
        logger.debug(
            "nodes reach the head: %s",
            {node: list(reply.routes) for node, reply in replies.items()},
        )
        head_address = common_address(
            nodes, addresses, {index: replies[index].routes for index in other_indices}
        )
        return [head_address, *(replies[index].routes[head_address] for index in other_indices)]

    def listen(self, indices: Iterable[int]) -> None:
        """Have these nodes listen at their addresses, so that others can later probe if they are
        dead.

        Returns at once. Called whenever agents are new to this notebook: after the start, after
        attaching, and after agents were restarted.
        """
        nodes = self._states.nodes
        if len(nodes) < 2:
            return
        for index in indices:
            if nodes[index].address and index not in self._states.gone:
                number = self._calls.keep(index, self._listening)
                self._links[index].send(wire.ListenForProbes(nodes[index].address, number))

    def _places(self, index: int) -> dict[str, int]:
        """Return a node's addresses for probes (address → port).

        The result is empty until it has reported them.
        """
        reply = self._listening.get(index)
        return reply.addresses if reply is not None else {}

    def is_reachable(self, index: int) -> bool | None:
        """Return True if another node reaches this one and it was not released; None if unknown."""
        if self._states.nodes[index].alive() is False:
            return False
        states, probed, started = (
            self._states,
            self._places(index),
            self._states.started.get(index),
        )
        other_nodes = [
            other
            for other in range(len(states.nodes))
            if other not in {index, *states.away, *states.gone}
        ]
        if not probed or not other_nodes or started is None:
            return None
        with self._calls.call() as (number, answers):
            for other in other_nodes:
                self._links[other].send(wire.ProbeAddresses(probed, started.secret, number))
            self._calls.wait(lambda: len(answers) == len(other_nodes), PROBE_TIMEOUT)
            replies = list(answers.values())
        return any(answer.routes for answer in replies) if replies else None

    def forget(self, index: int) -> None:
        """Forget a node's probe addresses: its new agent listens on other ports."""
        self._listening.pop(index, None)


def common_address(
    nodes: Sequence[Node], ports: Mapping[str, int], ways: Mapping[int, Mapping[str, str]]
) -> str:
    """Return the first address of the head that all other nodes reach.

    Args:
        ports: the head's addresses, each with the port that was probed.
        ways: for each other node, the addresses that it reaches, each with the node's own address
            on that route.

    Raises:
        ProvisionError: no such address exists.
    """
    for address in ports:
        if all(address in routes for routes in ways.values()):
            return address
    head = nodes[0].name
    if not ports:
        raise ProvisionError(
            f"{head} has no private IPv4 address, by which the nodes of a pool reach each other "
            "(IPv6 alone does not do): "
            "give each node one, or make a pool of one node",
            code="network",
        )
    lost = [nodes[index].name for index, routes in ways.items() if not routes]
    raise ProvisionError(
        f"{', '.join(lost) or 'the nodes'} cannot reach {head} at a private address that serves "
        f"all ({head} has {', '.join(ports) or 'none'}); the nodes of a pool must be in one "
        "network, and let each other in",
        code="network",
    )
