"""Checks nodes: asks each how it is, and compares its clock; all nodes at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from skymagic.cluster.health import Findings, Health, gpus, xids
from skymagic.cluster.nodes import Node
from skymagic.wire import check as wire
from skymagic.wire import processes
from skymagic.wire.codec import Transport
from skymagic.wire.threads import run_all

T = TypeVar("T", bound=wire.CheckMessage)
CLOCK_READINGS = 5
TIMEOUT = 60.0
"""Seconds for all answers on how nodes are."""


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
    *,
    expected: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Findings:
    """Check nodes; nothing of theirs is changed.

    Args:
        own: node → pids that may use its GPUs, with all that they have started.
        expected: GPUs that each should have.
    """
    outcomes = run_all([partial(_start, node) for node in nodes], timeout=TIMEOUT)
    clients = {index: one for index, one in enumerate(outcomes) if isinstance(one, Client)}
    try:
        say(f"looking at {', '.join(node.name for node in nodes)} …")
        looked = run_all(
            [partial(_health, nodes[i], clients[i], own.get(i, ())) for i in clients],
            timeout=TIMEOUT,
        )
        found = dict(zip(clients, looked, strict=True))
        health = tuple(
            known
            if isinstance(known := found.get(index), Health)
            else _unreached(node, known or outcomes[index])
            for index, node in enumerate(nodes)
        )
        return Findings(health, expected)
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
        strangers = tuple(
            int(pid) for pid, origins in looked.processes.items() if not set(origins) & set(own)
        )
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
