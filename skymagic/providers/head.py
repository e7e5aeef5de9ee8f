"""The machines of a pool as they are reached from its head: for the kernel of a notebook that is executed there."""

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
from skymagic.providers.local import Detached, DetachedAccess, Here, run
from skymagic.providers.provider import Survey
from skymagic.wire import processes, tls
from skymagic.wire.codec import Transport
from skymagic.wire.threads import failures, run_all

CONNECT_TIMEOUT = 10.0


@dataclass(frozen=True)
class NodeAccess:
    """What leads from the head to a node's daemon.

    Attributes:
        daemon: its name. secret: what it knows its notebooks by.
        node: what the pool calls the node.
        address, port: where a relay listens on the node (`kernels.relay`); none on the head itself.
        pem: the certificate and key by which both know each other.
    """

    daemon: str
    secret: str = field(repr=False)
    node: str
    address: str = ""
    port: int = 0
    pem: str = field(default="", repr=False)


def attach(plan: Plan, accesses: Sequence[NodeAccess]) -> tuple[Survey, Sequence[Node]]:
    """The machines of a pool whose agents run already; the caller's is the head."""
    here = Here(DetachedAccess(accesses[0].daemon, accesses[0].secret))
    head = here.node(accesses[0].daemon, run)
    tunnels = tuple(AgentTunnel(one.secret) for one in accesses[1:])
    nodes = [replace(head, name=accesses[0].node if plan.remote else head.name)]
    nodes += [_other(index, accesses[index], one) for index, one in enumerate(tunnels, 1)]
    return Detached(plan, here, tunnels), nodes


def _other(index: int, access: NodeAccess, tunnel: AgentTunnel) -> Node:
    """A machine that is not the head."""
    relayed = functools.partial(Relayed, access)
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
    """What leads to a relay on a node that listens at this address and knows this certificate, once it does.

    Args:
        run: starts a module on the node.

    Raises:
        PoolError: it does not listen there.
    """
    with contextlib.closing(run(processes.RELAY, access.daemon, access.address)) as transport:
        transport.write(access.pem.encode())
        said = b""
        while not (found := re.search(rb"^listens (\d+)\n", said, re.MULTILINE)):
            piece = transport.read()
            if not piece:
                raise PoolError(
                    f"{access.node} cannot be reached there: {transport.complaint() or said.decode()}"
                )
            said += piece
    return replace(access, port=int(found[1]))


def accesses(
    nodes: Sequence[Node], known: Sequence[Any], addresses: Sequence[str]
) -> tuple[NodeAccess, ...]:
    """Start a relay on each node but the head, and return what leads from the head to all nodes.

    Relays end with the pool, or a minute after the last process of the head has left them.

    Args:
        nodes: the machines as they are reached from here, the head first.
        known: what leads to their daemons (`Node.access`).
        addresses: where the nodes reach each other.

    Raises:
        PoolError: a relay does not listen.
    """
    first, *others = (
        NodeAccess(access.daemon, access.secret, node.name, address)
        for node, access, address in zip(nodes, known, addresses, strict=True)
    )
    pem = tls.certificate() if others else ""
    opened = run_all(
        [
            functools.partial(relay, node.run, replace(access, pem=pem))
            for node, access in zip(nodes[1:], others, strict=True)
        ]
    )
    for problem in failures(opened):
        raise problem
    return (replace(first, address=""), *(one for one in opened if isinstance(one, NodeAccess)))


class Relayed:
    """A process on another node, by its relay.

    Args:
        words: the module, and its arguments. timeout: seconds.

    Raises:
        OSError: the relay is not to be reached, or is another one.
    """

    def __init__(self, access: NodeAccess, *words: str, timeout: float = CONNECT_TIMEOUT) -> None:
        sock = socket.create_connection((access.address, access.port), timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            secure: ssl.SSLSocket = tls.context(access.pem, server=False).wrap_socket(sock)
            secure.sendall(json.dumps(words).encode() + b"\n")
        except BaseException:
            sock.close()
            raise
        self._near, far = socket.socketpair()
        self._thread = threading.Thread(
            target=tls.pump, args=(secure, far), name="skymagic-relayed", daemon=True
        )
        self._thread.start()

    def read(self) -> bytes:
        """Bytes that have come."""
        try:
            return self._near.recv(1 << 16)
        except OSError:
            return b""

    def write(self, data: bytes | memoryview) -> None:
        """Send all of these bytes."""
        self._near.sendall(data)

    def complaint(self) -> str:
        """Empty: only the process's output comes through the relay."""
        return ""

    def close(self) -> None:
        """Close its streams, upon which it ends; twice is safe."""
        try:
            self._near.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._thread.join(5.0)
        self._near.close()
