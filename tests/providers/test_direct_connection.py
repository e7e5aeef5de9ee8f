"""Direct connections to a node of a cluster, without a scheduler."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from skymagic.providers.cluster import DirectConnection
from skymagic.providers.head import NodeAccess
from skymagic.wire import processes, tls


def test_processes_start_at_the_same_time() -> None:
    """The relay accepts but does not answer: no start waits for the other one's timeout."""
    started: list[str] = []

    def through_channel(module: str, *args: str) -> Any:
        started.append(module)

    machine: Any = None  # needed for agents only
    with socket.create_server(("127.0.0.1", 0)) as relay, ThreadPoolExecutor(2) as pool:
        access = NodeAccess("", "", "n1", "127.0.0.1", relay.getsockname()[1], tls.certificate())
        direct = DirectConnection(lambda: "", access, machine, through_channel)
        starts = [
            pool.submit(direct.run, module)
            for module in (processes.VALUES, processes.TRANSFER_SERVER)
        ]
        relay.settimeout(2.0)  # less than the timeout of a start
        connections = [relay.accept()[0] for _ in starts]
        for connection in connections:
            connection.close()
        for start in starts:
            start.result(10.0)
    assert sorted(started) == sorted([processes.VALUES, processes.TRANSFER_SERVER])
