"""``%sky_forward``: ports of a pool's nodes (TensorBoard, a profiler, a dashboard) as links of the notebook, through the tunnels to the nodes."""

from __future__ import annotations

import html
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from skymagic.pool import Pool

REFUSAL_SECONDS = 1.0
"""Seconds in which a node refuses a connection to a port on which nothing listens; what listens keeps it open."""
WHO_CONNECTS = (
    "every user of this machine can open these addresses, and every user of the node its port: "
    "where others log in, start what listens there with a password or token"
)


@dataclass(frozen=True)
class ForwardedPort:
    """A port of a node and where it is reached from here.

    Attributes:
        node: the node in words.
        port: the port there, on 127.0.0.1.
        address: ``HOST:PORT`` here that leads to it.
        listening: whether something listened there when the port was forwarded.
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
    """What `%sky_forward` shows: a line for each port, with a link."""

    ports: tuple[ForwardedPort, ...]

    def __repr__(self) -> str:
        return "\n".join([*map(str, self.ports), WHO_CONNECTS])

    def _repr_html_(self) -> str:
        lines = [
            f"port {one.port} of {html.escape(one.node)}: "
            f'<a href="http://{one.address}/" target="_blank" rel="noopener">http://{one.address}/</a>{html.escape(one._note)}'
            for one in self.ports
        ]
        return "<br>".join([*lines, html.escape(WHO_CONNECTS)])


def forward(pool: Pool, ports: Sequence[int], nodes: Sequence[int]) -> ForwardedPorts:
    """Open a port on 127.0.0.1 here for each of these ports of each node; one that was opened before is kept.

    It has the same number if that is free here. It closes with the pool. Other users of this machine can connect to it,
    as to every port on 127.0.0.1.

    Args:
        nodes: the nodes' numbers.
    """
    return ForwardedPorts(tuple(_forwarded(pool, port, node) for node in nodes for port in ports))


def _forwarded(pool: Pool, port: int, index: int) -> ForwardedPort:
    node = pool.agents.nodes[index]
    # without a tunnel the node is this machine
    here = node.forward("127.0.0.1", port, port) if node.forward is not None else port
    return ForwardedPort(str(node), port, f"127.0.0.1:{here}", _listens(here))


def _listens(port: int) -> bool:
    """Whether a connection to this port is accepted, and not closed at once by the node at its other end."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=REFUSAL_SECONDS) as sock:
            return bool(sock.recv(1))
    except TimeoutError:
        return True  # it waits for a request
    except OSError:
        return False
