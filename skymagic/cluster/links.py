"""The connections to all agents of a pool: messages out and in, requests and their replies, and the addresses by which nodes reach each other."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from skymagic.cluster.nodes import Node, States
from skymagic.errors import ProvisionError
from skymagic.wire import agent as wire
from skymagic.wire.codec import Transport
from skymagic.wire.threads import run_all


class PendingCalls:
    """Requests that wait for replies, each by the number that its replies bear."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._numbers = itertools.count(1)
        self._replies: dict[int, dict[int, Any]] = {}
        self._kept: dict[int, tuple[int, dict[int, Any]]] = {}

    def number(self) -> int:
        """A number that no other request has."""
        return next(self._numbers)

    @contextlib.contextmanager
    def call(self) -> Iterator[tuple[int, dict[int, Any]]]:
        """A number for a request, and where its replies arrive, by who sends them."""
        number = self.number()
        replies = self._replies.setdefault(number, {})
        try:
            yield number, replies
        finally:
            self._replies.pop(number, None)

    def keep(self, sender: int, replies: dict[int, Any]) -> int:
        """Number a request whose only reply is put into `replies`, under its sender, whenever it comes."""
        number = self.number()
        self._kept[number] = sender, replies
        return number

    def replied(self, number: int, sender: int, reply: Any) -> None:
        """A reply has come; one that nobody waits for any more is dropped."""
        if (kept := self._kept.get(number)) is not None and kept[0] == sender:
            kept[1][sender] = reply
            del self._kept[number]
        self._replies.get(number, {})[sender] = reply

    def wait(self, enough: Callable[[], bool], timeout: float) -> None:
        """Wait until there are enough replies, `timeout` seconds at most."""
        with self._changed:
            self._changed.wait_for(enough, timeout)


class AgentLink:
    """The connection to one node's agent: sends messages, and hands on what comes, on a thread of its own.

    Args:
        transport: how to reach the agent.
        node: the node's number, given with each message.
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
        self.complaint = ""  # set when the link has ended: why, as far as the other end said so
        self._writing = threading.Lock()
        self._thread = threading.Thread(
            target=self._listen, name=f"skymagic-link-{node}", daemon=True
        )
        self._thread.start()

    def send(self, message: wire.AgentMessage) -> None:
        """Send a message; one to an agent that is gone is dropped (its end is reported by `received`)."""
        with self._writing, contextlib.suppress(OSError):
            self._transport.write(wire.encode(message))

    def _listen(self) -> None:
        decoder = wire.decoder()
        with contextlib.suppress(OSError, ValueError):
            while data := self._transport.read():
                for message in decoder.feed(data):
                    self._received(self.node, message)
        self.complaint = self._transport.complaint()
        self._received(self.node, None)

    def drop(self) -> None:
        """Close the link to an agent that cannot be reached, which ends once it is reached again; twice is safe."""
        self._transport.close()

    def retire(self) -> None:
        """Close it for good, for another link takes its place: what comes on it still is no news any more; twice is safe."""
        self._received = lambda node, message: None
        self.close()

    def close(self) -> None:
        """Ask the agent to end everything, and wait for it; twice is safe."""
        self.send(wire.Shutdown())
        self._thread.join(timeout=5.0)
        self._transport.close()
        self._thread.join(timeout=5.0)


class AgentLinks:
    """A link for each node.

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
        self._links: dict[int, AgentLink] = {}

    def __getitem__(self, index: int) -> AgentLink:
        return self._links[index]

    def __iter__(self) -> Iterator[AgentLink]:
        return iter(tuple(self._links.values()))

    def add(self, index: int, transport: Transport) -> AgentLink:
        """A node's link, over this transport; in the place of the one that there was."""
        link = AgentLink(transport, index, self._received)
        self._links = {
            **self._links,
            index: link,
        }  # not changed in place: other threads go through it
        return link

    def connect(self, indices: Iterable[int]) -> dict[int, Transport]:
        """Reach the agents of these nodes side by side; when one fails, the others are closed, and what it raised is raised."""
        opened: dict[int, Transport | BaseException] = {}

        def open_one(index: int) -> None:
            try:
                opened[index] = self._states.nodes[index].start_agent(
                    functools.partial(self._link_changed, index)
                )
            except BaseException as problem:
                opened[index] = problem

        first, *others = indices  # the head's, on this thread: an interrupt reaches it
        threads = [
            threading.Thread(target=open_one, args=(index,), daemon=True) for index in others
        ]
        for thread in threads:
            thread.start()
        open_one(first)
        for thread in threads:
            thread.join()
        transports = {
            index: made
            for index, made in sorted(opened.items())
            if not isinstance(made, BaseException)
        }
        problems = [made for made in opened.values() if isinstance(made, BaseException)]
        if problems:
            for transport in transports.values():
                transport.close()
            raise problems[0]
        return transports

    def of(self, ranks: Iterable[int]) -> list[tuple[AgentLink, tuple[int, ...]]]:
        """The links to the nodes of these ranks, each with those that are there."""
        chosen, specs = sorted(set(ranks)), self._states.specs
        shares = [
            (link, tuple(rank for rank in chosen if specs[rank][0] == link.node)) for link in self
        ]
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


PROBE_TIMEOUT = 5.0
"""Seconds that nodes have to probe another one."""


class Routes:
    """Has the nodes of a pool probe each other's addresses."""

    def __init__(self, states: States, links: AgentLinks, calls: PendingCalls) -> None:
        self._states, self._links, self._calls = states, links, calls
        self._listening: dict[int, wire.ProbeReply] = {}
        """By node: where it listens for probes, from when it has said so."""

    def find(self, timeout: float) -> list[str]:
        """Where the nodes reach each other, the head first.

        Raises:
            ProvisionError: no private address of the head can be reached by all others.
        """
        nodes, started = self._states.nodes, self._states.started
        if len({started[index].machine for index in range(len(nodes))}) == 1:
            return ["127.0.0.1"] * len(nodes)
        places, others = self._places(0) or started[0].addresses, range(1, len(nodes))
        with self._calls.call() as (number, answers):
            for index in others:
                self._links[index].send(
                    wire.ProbeAddresses(dict(places), started[0].secret, number)
                )
            self._states.wait(
                lambda: len(answers) == len(others), timeout, "the way from node to node"
            )
            found: dict[int, wire.ProbeReply] = dict(answers)
        chosen = common_address(nodes, places, {index: found[index].routes for index in others})
        return [chosen, *(found[index].routes[chosen] for index in others)]

    def listen(self, indices: Iterable[int]) -> None:
        """Have these nodes listen where the others reach them, so that these can tell later whether one is dead.

        Returns at once. Called whenever agents are new to this notebook: after the start, after attaching, and
        after agents were started anew.
        """
        nodes = self._states.nodes
        if len(nodes) < 2:
            return
        for index in indices:
            if nodes[index].address and index not in self._states.gone:
                number = self._calls.keep(index, self._listening)
                self._links[index].send(wire.ListenForProbes(nodes[index].address, number))

    def _places(self, index: int) -> dict[str, int]:
        """Where a node listens for probes (address → port); empty while it has not said so."""
        reply = self._listening.get(index)
        return reply.addresses if reply is not None else {}

    def reached(self, index: int) -> bool | None:
        """Whether another node reaches this one, and it was not given back; None when nobody can tell."""
        if self._states.nodes[index].alive() is False:
            return False
        states, probed, started = (
            self._states,
            self._places(index),
            self._states.started.get(index),
        )
        others = [
            other
            for other in range(len(states.nodes))
            if other not in {index, *states.away, *states.gone}
        ]
        if not probed or not others or started is None:
            return None
        with self._calls.call() as (number, answers):
            for other in others:
                self._links[other].send(wire.ProbeAddresses(probed, started.secret, number))
            self._calls.wait(lambda: len(answers) == len(others), PROBE_TIMEOUT)
            found = list(answers.values())
        return any(answer.routes for answer in found) if found else None

    def forget(self, index: int) -> None:
        """A node has another agent, whose ports are others."""
        self._listening.pop(index, None)


def common_address(
    nodes: Sequence[Node], places: Mapping[str, int], ways: Mapping[int, Mapping[str, str]]
) -> str:
    """The first address of the head that all others reach.

    Args:
        places: the head's addresses, each with the port that was probed.
        ways: for each of the others, which of these it reaches, each with its own address on that way.

    Raises:
        ProvisionError: there is none.
    """
    for address in places:
        if all(address in way for way in ways.values()):
            return address
    head = nodes[0].name
    if not places:
        raise ProvisionError(
            f"{head} has no private IPv4 address, by which the nodes of a pool reach each other (IPv6 alone does not do): "
            "give each node one, or make a pool of one node"
        )
    lost = [nodes[index].name for index, way in ways.items() if not way]
    raise ProvisionError(
        f"{', '.join(lost) or 'the nodes'} cannot reach {head} at a private address that serves all "
        f"({head} has {', '.join(places) or 'none'}); the nodes of a pool must be in one network, and let each other in"
    )
