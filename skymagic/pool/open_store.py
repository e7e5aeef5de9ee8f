"""Where a pool's values go: into this machine's memory, or to a depot on each node."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from skymagic.cluster import Agents
from skymagic.wire import processes
from skymagic.wire.transport import Transport

if TYPE_CHECKING:
    from skymagic.data.remote.remote_store import RemoteStore
    from skymagic.data.store.store import NodeStore

KEPT_ON_NODES = 4 << 30
"""Bytes of values that each node keeps for the user's later pools."""


def open_store(agents: Agents, remote: bool, tell: Callable[[str], None]) -> NodeStore | RemoteStore:
    """The store of a pool whose agents have said hello.

    Args:
        remote: whether its nodes are other machines.
        tell: what the user must hear.
    """
    if not remote:
        from skymagic.data.store.store import NodeStore

        return NodeStore(agents.started[0].store, notify=tell)
    from skymagic.data.remote.remote_store import Node, RemoteStore

    nodes = [
        Node(member.name, functools.partial(_open_depot, agents, index), agents.places[index].address)
        for index, member in enumerate(agents.members)
    ]
    return RemoteStore(nodes, tell, keep=KEPT_ON_NODES)


def _open_depot(agents: Agents, index: int) -> Transport:
    return agents.members[index].run(processes.VALUES, agents.started[index].store)
