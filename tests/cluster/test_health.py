"""Nodes are checked over their connections."""

from __future__ import annotations

from skymagic.cluster import Node
from skymagic.cluster.checking import check
from skymagic.errors import HostError
from skymagic.providers import local
from skymagic.wire.codec import Transport


def test_nodes_of_this_machine_and_one_that_cannot_be_reached() -> None:
    """With real processes."""

    def unreached(*words: object) -> Transport:
        raise HostError("gone", "no answer")

    nodes = [
        Node(number, f"here{number}", unreached, local.run, address="127.0.0.1")
        for number in range(2)
    ]
    found = check([*nodes, Node(2, "gone", unreached, unreached, address="127.0.0.1")])
    assert abs(found.nodes[0].clock_offset) <= max(found.nodes[0].clock_error, 0.01)
    assert [(one.node, one.problem) for one in found.verdicts if one.broken] == [
        (2, "not checked: gone: no answer")
    ]
