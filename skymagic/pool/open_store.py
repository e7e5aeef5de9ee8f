"""Where a pool's values go: into this machine's memory, or to a value server on each node."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from skymagic.cluster import Agents, Node
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
    from skymagic.data.remote.remote_store import RemoteStore

    def start_server(node: Node) -> Transport:
        # an agent that was started anew has another folder, so this is looked up each time
        return node.run(processes.VALUES, agents.started[node.index].store)

    return RemoteStore(agents.nodes, start_server, tell, keep=KEPT_ON_NODES)
