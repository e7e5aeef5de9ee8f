"""``%sky_forward``: ports of a pool's nodes as links in the notebook, through tunnels to the nodes.

Typical services are TensorBoard, a profiler or a dashboard.
"""

from __future__ import annotations

import html
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from skymagic.pool import Pool

REFUSAL_SECONDS = 1.0
"""Seconds for a node to refuse a connection to a port without a listener.

A listener keeps the connection open.
"""
WHO_CONNECTS = (
    "every user of this machine can open these addresses, and every user of the node its port: "
    "where others log in, start what listens there with a password or token"
)


@dataclass(frozen=True)
class ForwardedPort:
    """A port of a node and its local address.

    Attributes:
        node: description of the node.
        port: the port on the node's 127.0.0.1.
        address: local ``HOST:PORT`` that leads to it.
        listening: True if something listened on the node's port when it was forwarded.
    """

    node: str
    port: int
    address: str
    listening: bool

    @property
    def _note(self) -> str:
        return (
            ""
            if self.listening
            else " (nothing listens there yet: the link works once something does)"
        )

    def __str__(self) -> str:
        return f"port {self.port} of {self.node}: http://{self.address}/{self._note}"


@dataclass(frozen=True)
class ForwardedPorts:
    """Output of `%sky_forward`: a line with a link for each port."""

    ports: tuple[ForwardedPort, ...]

    def __repr__(self) -> str:
        return "\n".join([*map(str, self.ports), WHO_CONNECTS])

    def _repr_html_(self) -> str:
        lines = [
            f"port {port.port} of {html.escape(port.node)}: "
            f'<a href="http://{port.address}/" target="_blank" '
            f'rel="noopener">http://{port.address}/</a>{html.escape(port._note)}'
            for port in self.ports
        ]
        return "<br>".join([*lines, html.escape(WHO_CONNECTS)])


def forward(pool: Pool, ports: Sequence[int], nodes: Sequence[int]) -> ForwardedPorts:
    """Open a local port on 127.0.0.1 for each of these ports of each node.

    Ports that were opened before are reused. The local port has the same number if that is free. It
    closes with the pool. Other users of this machine can connect to it, as to every port on
    127.0.0.1.

    Args:
        nodes: indexes of the nodes.
    """
    return ForwardedPorts(
        tuple(_forward_port(pool, port, node) for node in nodes for port in ports)
    )


def _forward_port(pool: Pool, port: int, index: int) -> ForwardedPort:
    node = pool.agents.nodes[index]
    # a node without a tunnel is this machine
    local_port = node.forward("127.0.0.1", port, port) if node.forward is not None else port
    return ForwardedPort(str(node), port, f"127.0.0.1:{local_port}", _is_listening(local_port))


def _is_listening(port: int) -> bool:
    """Return True if a connection to this port is accepted and not closed at once by the node."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=REFUSAL_SECONDS) as sock:
            return bool(sock.recv(1))
    except TimeoutError:
        return True  # the service waits for a request
    except OSError:
        return False
