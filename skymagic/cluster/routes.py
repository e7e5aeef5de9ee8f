"""The addresses by which the nodes of a pool reach each other: chosen from what each has tried, and tried again when one is out of reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skymagic.cluster.links import Links
from skymagic.cluster.nodes import Node
from skymagic.cluster.rpc import PendingCalls
from skymagic.cluster.states import States
from skymagic.errors import ProvisionError
from skymagic.wire import agent as wire

PROBE_TIMEOUT = 5.0
"""Seconds that nodes have to probe another one."""


class Routes:
    """Has the nodes of a pool probe each other's addresses."""

    def __init__(self, states: States, links: Links, calls: PendingCalls) -> None:
        self._states, self._links, self._calls = states, links, calls
        self._probed: dict[int, dict[str, int]] = {}
        """Where each node can be reached by the others: address → port."""

    def find(self, timeout: float) -> list[str]:
        """Where the nodes reach each other, the head first.

        Raises:
            ProvisionError: no private address of the head can be reached by all others.
        """
        nodes, started = self._states.nodes, self._states.started
        if len({started[index].machine for index in range(len(nodes))}) == 1:
            return ["127.0.0.1"] * len(nodes)
        places, others = self._probed.get(0) or started[0].addresses, range(1, len(nodes))
        with self._calls.call() as (number, answers):
            for index in others:
                self._links[index].send(wire.ProbeAddresses(dict(places), started[0].secret, number, listen=True))
            self._states.wait(lambda: len(answers) == len(others), timeout, "the way from node to node")
            found: dict[int, wire.ProbeReply] = dict(answers)
        self._probed = {index: found[index].addresses for index in others}
        chosen = common_address(nodes, places, {index: found[index].routes for index in others})
        self._probed[0] = {chosen: places[chosen]}
        return [chosen, *(found[index].routes[chosen] for index in others)]

    def reached(self, index: int) -> bool | None:
        """Whether another node reaches this one; None when nobody can tell."""
        states, probed, started = self._states, self._probed.get(index), self._states.started.get(index)
        others = [other for other in range(len(states.nodes)) if other not in {index, *states.away, *states.gone}]
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
        self._probed.pop(index, None)


def common_address(nodes: Sequence[Node], places: Mapping[str, int], ways: Mapping[int, Mapping[str, str]]) -> str:
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
