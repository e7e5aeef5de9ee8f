"""Address discovery: find the addresses by which the nodes of a cluster reach each other.

The notebook may use different ones. This is a small version of ICE (RFC 8445): the head listens at
all its private addresses, its *candidates*; the other nodes try to connect to each of them (a
*probe*), and the notebook picks a candidate that all of them reached. The peer must prove that it
has the listener's secret (`wire.authentication`), because in another network the same private
address belongs to another machine.

    head     → notebook  AgentStarted: candidates, secret
    notebook → others    ProbeAddresses: candidates, secret
    others   → head      connect; a nonce
    others   ← head      its HMAC with the secret; the head closes
    others   → notebook  ProbeReply: candidates that answered, each with this node's source address
    notebook → head      HeadAddress: the selected address
    notebook → all       ListenForProbes: each node listens at its own address, for liveness checks
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from skymagic.kernels.fork import EventLoop
from skymagic.wire.authentication import NONCE_BYTES, Door, proof, read_exactly, verify
from skymagic.wire.processes import boot_id
from skymagic.wire.threads import run_all

logger = logging.getLogger(__name__)

TIMEOUT = 2.0
"""Seconds for a candidate to answer a probe, and for a prober to send its nonce."""
MAX_PROBES = 32  # connections waiting for their nonce; a new one displaces the oldest


def machine() -> str:
    """Return a string that only processes that reach each other by 127.0.0.1 have in common."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/net')}"
    return f"{boot_id()} {socket.gethostname()}"


class Candidates:
    """Listeners at this node's candidate addresses, which answer the nonces of all peers.

    Attributes:
        secret: identifies this node to the nodes that probe it; known to them alone.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._loop, self.secret = loop, secrets.token_hex(16)
        self._listeners: list[socket.socket] = []

    @property
    def ports(self) -> dict[str, int]:
        """Port of each address."""
        return dict(listener.getsockname()[:2] for listener in self._listeners)

    def listen(self, addresses: Iterable[str]) -> None:
        """Listen at those of the given addresses that belong to this machine, and at no others."""
        self.close()
        for address in addresses:
            with contextlib.suppress(OSError):
                listener = socket.create_server((address, 0))
                logger.debug("listening for probes: address=%s", address)
                # race: a peer may disconnect before the accept
                listener.setblocking(False)
                self._listeners.append(listener)
                self._loop.watch(
                    listener, Door(listener, self._answer, None, MAX_PROBES, TIMEOUT).accept
                )

    def _answer(self, peer: socket.socket) -> None:
        with peer:
            nonce = read_exactly(peer, NONCE_BYTES, time.monotonic() + TIMEOUT)
            if len(nonce) == NONCE_BYTES:
                peer.sendall(proof(self.secret, _purpose(*peer.getsockname()[:2]), nonce))

    def close(self, but: str = "") -> None:
        """Stop listening, except at address `but`; twice is safe."""
        remaining = [
            listener for listener in self._listeners if but and listener.getsockname()[0] == but
        ]
        for listener in self._listeners:
            if listener not in remaining:
                self._loop.unwatch(listener)
                listener.close()
        self._listeners = remaining


def _purpose(address: str, port: int) -> str:
    """Return the text that a proof is bound to.

    A stranger cannot reuse the proof of another candidate.
    """
    return f"candidate {address} {port}"


def probe(
    loop: EventLoop,
    candidates: Mapping[str, int],
    secret: str,
    on_result: Callable[[dict[str, str]], None],
) -> None:
    """Probe the candidates on a thread, and call back on the loop.

    A candidate that drops packets takes its time.
    """
    reader, writer = socket.socketpair()

    def run() -> None:
        with writer:
            writer.sendall(json.dumps(answering_addresses(candidates, secret)).encode())

    def done() -> None:
        loop.unwatch(reader)
        with reader:
            on_result(json.loads(reader.recv(1 << 16)))

    loop.watch(reader, done)
    threading.Thread(target=run, name="skymagic-discovery", daemon=True).start()


def answering_addresses(candidates: Mapping[str, int], secret: str) -> dict[str, str]:
    """Return the candidates that prove to have the secret, with this machine's source addresses.

    Args:
        candidates: address → port.
    """
    probes = [
        functools.partial(_own_address, address, port, secret)
        for address, port in candidates.items()
    ]
    routes = zip(candidates, run_all(probes, timeout=2 * TIMEOUT), strict=True)
    reached = {address: own for address, own in routes if isinstance(own, str)}
    logger.debug("probed other nodes: addresses=%s reached=%s", list(candidates), list(reached))
    return reached


def _own_address(address: str, port: int, secret: str) -> str | None:
    with socket.create_connection((address, port), TIMEOUT) as peer:
        own_address = str(peer.getsockname()[0])
        return own_address if verify(peer, secret, _purpose(address, port), TIMEOUT) else None
