"""Nodes on which each process that is started is one that the test has chosen."""

from __future__ import annotations

from collections.abc import Callable

from skymagic.cluster import Node
from skymagic.wire.codec import Transport


def node_of(index: int, name: str, process: Callable[[], Transport], address: str = "") -> Node:
    """A node on which `process` starts whatever is to run there."""
    return Node(index, name, lambda state: process(), lambda *_: process(), address=address)


def start(node: Node) -> Transport:
    """Start the process of a node of `node_of`."""
    return node.run("")
