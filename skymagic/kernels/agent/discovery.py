"""Address discovery: by which addresses the nodes of a cluster reach each other; the notebook may use others.

As in ICE (RFC 8445), only smaller: the head listens at all its private addresses, its *candidates*; the others try to connect to
each, which is a *probe*, and the notebook takes a candidate that all of them reached. What answers must prove that it has the
listener's secret (`wire.authentication`): in another network the same private address belongs to somebody else.

    head     → notebook  AgentStarted: candidates, secret
    notebook → others    ProbeAddresses: candidates, secret
    others   → head      connect; a nonce
    others   ← head      its HMAC with the secret; the head closes
    others   → notebook  ProbeReply: candidates that answered, each with this node's own address on the way there
    notebook → head      StartController: the chosen address
    notebook → all       ListenForProbes: each listens at its own address, so that others can tell later whether it is dead
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from skymagic.kernels.fork import EventLoop
from skymagic.kernels.network import interface_addresses
from skymagic.wire.authentication import NONCE_BYTES, Door, exactly, proof, verify
from skymagic.wire.processes import boot_id
from skymagic.wire.threads import run_all

TIMEOUT = 2.0
"""Seconds in which a candidate must answer, and one who probes must ask."""
MAX_PROBES = 32  # connections that may wait for their nonce at once; a new one displaces the oldest


def machine() -> str:
    """A text that is equal in all processes that reach each other by 127.0.0.1, and in no others."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/net')}"
    return f"{boot_id()} {socket.gethostname()}"


def private_addresses() -> list[str]:
    """This machine's private IPv4 addresses other than loopback; public ones are no place to listen."""
    found = set(interface_addresses().values())
    with contextlib.suppress(OSError):  # its name may lead nowhere
        found |= {
            str(entry[4][0])
            for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        }
    found = set(filter(_private, found))
    return sorted(found, key=ipaddress.IPv4Address)


def _private(address: str) -> bool:
    known = ipaddress.IPv4Address(address)
    shared = known in ipaddress.IPv4Network("100.64.0.0/10")  # RFC 6598: carriers' and tailnets'
    return (known.is_private or shared) and not known.is_loopback and not known.is_unspecified


class Candidates:
    """The listeners at this node's candidate addresses, which answer the nonces of all who connect.

    Attributes:
        secret: by which nodes that probe know this one; for them alone.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._loop, self.secret = loop, secrets.token_hex(16)
        self._listeners: list[socket.socket] = []

    @property
    def ports(self) -> dict[str, int]:
        """Address → port."""
        return dict(listener.getsockname()[:2] for listener in self._listeners)

    def listen(self, addresses: Iterable[str]) -> None:
        """Listen at these addresses, as far as they are this machine's, and no longer at others."""
        self.close()
        for address in addresses:
            with contextlib.suppress(OSError):
                listener = socket.create_server((address, 0))
                listener.setblocking(
                    False
                )  # race: who connects may be gone again before the accept
                self._listeners.append(listener)
                self._loop.watch(
                    listener, Door(listener, self._answer, None, MAX_PROBES, TIMEOUT).accept
                )

    def _answer(self, peer: socket.socket) -> None:
        with peer:
            nonce = exactly(peer, NONCE_BYTES, time.monotonic() + TIMEOUT)
            if len(nonce) == NONCE_BYTES:
                peer.sendall(proof(self.secret, _purpose(*peer.getsockname()[:2]), nonce))

    def close(self, but: str = "") -> None:
        """Stop listening, but at this address; twice is safe."""
        kept = [
            listener for listener in self._listeners if but and listener.getsockname()[0] == but
        ]
        for listener in self._listeners:
            if listener not in kept:
                self._loop.unwatch(listener)
                listener.close()
        self._listeners = kept


def _purpose(address: str, port: int) -> str:
    """What a proof is for: one candidate's is no other's, whom a stranger might ask for it."""
    return f"candidate {address} {port}"


def probe(
    loop: EventLoop,
    candidates: Mapping[str, int],
    secret: str,
    on_result: Callable[[dict[str, str]], None],
) -> None:
    """Probe beside the event loop, for a candidate that drops packets takes its time; call back on the loop."""
    ours, theirs = socket.socketpair()

    def run() -> None:
        with theirs:
            theirs.sendall(json.dumps(answering(candidates, secret)).encode())

    def done() -> None:
        loop.unwatch(ours)
        with ours:
            on_result(json.loads(ours.recv(1 << 16)))

    loop.watch(ours, done)
    threading.Thread(target=run, name="skymagic-discovery", daemon=True).start()


def answering(candidates: Mapping[str, int], secret: str) -> dict[str, str]:
    """The candidates (address → port) that prove to have the secret, each with the address that this machine has on the way there."""
    probes = [
        functools.partial(_own_address, address, port, secret)
        for address, port in candidates.items()
    ]
    found = zip(candidates, run_all(probes, timeout=2 * TIMEOUT), strict=True)
    return {address: own for address, own in found if isinstance(own, str)}


def _own_address(address: str, port: int, secret: str) -> str | None:
    with socket.create_connection((address, port), TIMEOUT) as peer:
        own_address = str(peer.getsockname()[0])
        return own_address if verify(peer, secret, _purpose(address, port), TIMEOUT) else None
