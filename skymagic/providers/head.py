"""Reach the machines of a pool from its head: used by the kernel of a notebook executed there."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skymagic.cluster import Node
from skymagic.cluster.tunnel import AgentTunnel
from skymagic.errors import PoolError
from skymagic.plan.plans import Plan
from skymagic.providers.local import Detached, DetachedAccess, LocalMachine, run
from skymagic.providers.provider import Survey
from skymagic.wire import processes, tls
from skymagic.wire.codec import Transport
from skymagic.wire.threads import failures, run_all

CONNECT_TIMEOUT = 10.0


@dataclass(frozen=True)
class NodeAccess:
    """Everything the head needs to reach a node's daemon.

    Attributes:
        daemon: name of the daemon.
        secret: secret that the daemon expects from its notebooks.
        node: name of the node in the pool.
        address: address of the relay on the node (`kernels.relay`); "" on the head itself.
        port: port of the relay; 0 on the head itself.
        pem: certificate and key that authenticate both sides.
    """

    daemon: str
    secret: str = field(repr=False)
    node: str
    address: str = ""
    port: int = 0
    pem: str = field(default="", repr=False)


def attach(plan: Plan, accesses: Sequence[NodeAccess]) -> tuple[Survey, Sequence[Node]]:
    """Return the machines of a pool whose agents already run. The caller is on the head."""
    this_machine = LocalMachine(DetachedAccess(accesses[0].daemon, accesses[0].secret))
    head = this_machine.node(accesses[0].daemon, run)
    tunnels = tuple(AgentTunnel(access.secret) for access in accesses[1:])
    nodes = [replace(head, name=accesses[0].node if plan.remote else head.name)]
    nodes += [_other(index, accesses[index], tunnel) for index, tunnel in enumerate(tunnels, 1)]
    return Detached(plan, this_machine, tunnels), nodes


def _other(index: int, access: NodeAccess, tunnel: AgentTunnel) -> Node:
    """Return a machine other than the head."""
    relayed = functools.partial(RelayedTransport, access)
    attach = functools.partial(relayed, processes.ATTACH, access.daemon)
    start = functools.partial(tunnel.open, attach)
    return Node(
        index,
        access.node,
        start,
        relayed,
        access=access,
        leave=tunnel.leave,
        forward=tunnel.forward,
    )


def relay(run: Callable[..., Transport], access: NodeAccess) -> NodeAccess:
    """Start a relay on a node and return how to reach it, once it listens.

    It listens at the address, and uses the certificate, in `access`.

    Args:
        run: starts a module on the node.

    Raises:
        PoolError: the relay does not listen there.
    """
    with contextlib.closing(run(processes.RELAY, access.daemon, access.address)) as transport:
        transport.write(access.pem.encode())
        output = b""
        while not (match := re.search(rb"^listens (\d+)\n", output, re.MULTILINE)):
            piece = transport.read()
            if not piece:
                raise PoolError(
                    f"{access.node} cannot be reached there: "
                    f"{transport.complaint() or output.decode()}",
                    code="unreached",
                    names=[access.node],
                )
            output += piece
    return replace(access, port=int(match[1]))


def accesses(
    nodes: Sequence[Node], daemon_accesses: Sequence[Any], addresses: Sequence[str]
) -> tuple[NodeAccess, ...]:
    """Start a relay on each node but the head, and return the head's access to each node.

    Relays end with the pool, or a minute after the last process of the head disconnects.

    Args:
        nodes: the machines as reached from here, the head first.
        daemon_accesses: access to their daemons (`Node.access`).
        addresses: addresses of the nodes in their common network.

    Raises:
        PoolError: a relay does not listen.
    """
    first, *remaining = (
        NodeAccess(access.daemon, access.secret, node.name, address)
        for node, access, address in zip(nodes, daemon_accesses, addresses, strict=True)
    )
    pem = tls.certificate() if remaining else ""
    opened = run_all(
        [
            functools.partial(relay, node.run, replace(access, pem=pem))
            for node, access in zip(nodes[1:], remaining, strict=True)
        ]
    )
    for problem in failures(opened):
        raise problem
    return (
        replace(first, address=""),
        *(outcome for outcome in opened if isinstance(outcome, NodeAccess)),
    )


class RelayedTransport:
    """A process on another node, reached through its relay.

    Args:
        command: the module and its arguments.
        timeout: seconds to wait for the connection.

    Raises:
        OSError: the relay cannot be reached, or it is another pool's.
    """

    def __init__(self, access: NodeAccess, *command: str, timeout: float = CONNECT_TIMEOUT) -> None:
        sock = socket.create_connection((access.address, access.port), timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            secure: ssl.SSLSocket = tls.context(access.pem, server=False).wrap_socket(sock)
            secure.sendall(json.dumps(command).encode() + b"\n")
        except BaseException:
            sock.close()
            raise
        self._near, far = socket.socketpair()
        self._thread = threading.Thread(
            target=tls.pump, args=(secure, far), name="skymagic-relayed", daemon=True
        )
        self._thread.start()

    def read(self) -> bytes:
        """Return the next bytes from the process."""
        try:
            return self._near.recv(1 << 16)
        except OSError:
            return b""

    def write(self, data: bytes | memoryview) -> None:
        """Send all of these bytes."""
        self._near.sendall(data)

    def complaint(self) -> str:
        """Return "", because the relay only carries the process's output."""
        return ""

    def close(self) -> None:
        """Close the process's streams, which ends it. Twice is safe."""
        try:
            self._near.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._thread.join(5.0)
        self._near.close()
