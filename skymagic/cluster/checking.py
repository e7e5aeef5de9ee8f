"""Checks nodes: asks each how it is, compares its clock, and has each send bytes to each other, pairs side by side.

A round of a tournament has each node in one pair at most, so that links are measured and not nodes that serve several at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from skymagic.cluster.health import Findings, Health, Way, gpus, max_rates, xids
from skymagic.cluster.nodes import Node
from skymagic.wire import check as wire
from skymagic.wire import processes
from skymagic.wire.codec import Transport
from skymagic.wire.threads import run_all

T = TypeVar("T", bound=wire.CheckMessage)
CLOCK_READINGS = 5
MOST_ROUNDS = 7
"""Rounds of the tournament: with more than 8 nodes not all pairs are measured, but each node with 7 others."""
TIMEOUT = 60.0
"""Seconds for all answers on how nodes are."""


@dataclass(frozen=True)
class LinkTest:
    """How much is sent over each link, each way: so many bytes, but for so many seconds at most."""

    nbytes: int
    seconds: float


WHOLE, QUICK = LinkTest(256_000_000, 3.0), LinkTest(32_000_000, 1.0)


class Client:
    """A client of one node's check process."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._messages = wire.messages(transport.read, noise=True)

    def request(self, request: wire.CheckMessage, reply: type[T]) -> T:
        """Send a request and wait for its reply. Raises OSError or EOFError: the node is gone."""
        self.transport.write(wire.encode(request))
        message, _ = next(self._messages)
        assert isinstance(message, reply)
        return message


def check(
    nodes: Sequence[Node],
    own: Mapping[int, Sequence[int]],
    extent: LinkTest,
    *,
    expected: int = 0,
    rate: float = 0.0,
    say: Callable[[str], None] = lambda line: None,
) -> Findings:
    """Check nodes; nothing of theirs is changed.

    Args:
        nodes: with addresses where they reach each other; without these no link is measured.
        own: node → pids that may use its GPUs, with all that they have started.
        expected: GPUs that each should have. rate: bytes per second that a link should have; 0 where unknown.
    """
    outcomes = run_all([partial(_start, node) for node in nodes], timeout=TIMEOUT)
    clients = {index: one for index, one in enumerate(outcomes) if isinstance(one, Client)}
    try:
        say(f"looking at {', '.join(node.name for node in nodes)} …")
        looked = run_all([partial(_health, nodes[i], clients[i], own.get(i, ())) for i in clients], timeout=TIMEOUT)
        found = dict(zip(clients, looked, strict=True))
        health = tuple(
            known if isinstance(known := found.get(index), Health) else _unreached(node, known or outcomes[index])
            for index, node in enumerate(nodes)
        )
        there = {i: one for i, one in clients.items() if not health[i].unreached and nodes[i].address}
        if len(there) > 1:
            say(f"measuring links among {len(there)} nodes …")
        pairs = rounds(sorted(there))[:MOST_ROUNDS]
        first = Findings(health, tuple(_ways(nodes, there, extent, pairs)), expected, rate)
        # a node that was at work elsewhere for a moment has no slow link: what is one twice counts
        again = [[pair for pair in each if first.are_slow(*pair)] for each in pairs]
        return replace(first, ways=max_rates([*first.ways, *_ways(nodes, there, extent, again)]))
    finally:
        run_all([one.transport.close for one in clients.values()], timeout=TIMEOUT)


def _start(node: Node) -> Client:
    return Client(node.run(processes.CHECK))


def _unreached(node: Node, problem: object) -> Health:
    first = (str(problem).splitlines() or [""])[0]
    return Health(node.name, unreached=first or type(problem).__name__)


def _health(node: Node, client: Client, own: Sequence[int]) -> Health:
    looked = client.request(wire.SurveyNode(), wire.NodeSurvey)
    ahead, unsure = _clock(client)
    strangers = None
    if looked.processes is not None:
        strangers = tuple(int(pid) for pid, origins in looked.processes.items() if not set(origins) & set(own))
    elif not looked.gpus:
        strangers = ()
    return Health(
        node.name,
        gpus=gpus(looked.gpus),
        complaint=looked.complaint,
        strangers=strangers,
        xids=None if looked.kernel is None else xids(looked.kernel),
        efa_unused=looked.efa,
        disk_free=looked.disk_free,
        ahead=ahead,
        unsure=unsure,
    )


def _clock(client: Client) -> tuple[float, float]:
    """(seconds that the node's clock is ahead, how wrong that may be): the answer that came soonest, as NTP has it."""
    readings = []
    for _ in range(CLOCK_READINGS):
        begun, clock = time.monotonic(), time.time()
        there = client.request(wire.ReadClock(), wire.NodeClock).time
        took = time.monotonic() - begun
        readings.append((took / 2, there - (clock + took / 2)))
    unsure, ahead = min(readings)
    return ahead, unsure


def _ways(
    nodes: Sequence[Node],
    clients: Mapping[int, Client],
    extent: LinkTest,
    tournament: Sequence[Sequence[tuple[int, int]]],
) -> Iterator[Way]:
    for pairs in tournament:
        for turned in (False, True):
            ways = [(b, a) if turned else (a, b) for a, b in pairs]
            jobs = [partial(_measure, nodes[b], clients[a], clients[b], extent) for a, b in ways]
            for (source, target), sent in zip(ways, run_all(jobs, timeout=TIMEOUT), strict=True):
                if isinstance(sent, BaseException):
                    yield Way(source, target, None, str(sent) or type(sent).__name__)
                else:
                    rate = sent.nbytes / sent.seconds if sent.seconds and not sent.problem else None
                    yield Way(source, target, rate, sent.problem)


def _measure(target: Node, sender: Client, receiver: Client, extent: LinkTest) -> wire.BytesSent:
    at = receiver.request(wire.ListenForBytes(target.address), wire.Listening)
    if at.problem:
        return wire.BytesSent(problem=f"{target.address}: {at.problem}")
    return sender.request(
        wire.SendBytes(target.address, at.port, at.token, extent.nbytes, extent.seconds), wire.BytesSent
    )


def rounds(players: Sequence[int]) -> list[list[tuple[int, int]]]:
    """All pairs, in rounds in which nobody is in two pairs (the circle method); pure."""
    ring: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    found = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found
