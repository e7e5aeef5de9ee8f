"""Address discovery: by which addresses the nodes of a cluster reach each other; the notebook may use others.

As in ICE (RFC 8445), only smaller: the head listens at all its private addresses, its *candidates*; the others try to connect to
each, which is a *probe*, and the notebook takes a candidate that all of them reached. What answers must know the pool's secret:
in another network the same private address belongs to somebody else.

    head     → notebook  AgentStarted: candidates
    notebook → others    ProbeAddresses: candidates, secret
    others   → head      connect; the head sends the secret and closes
    others   → notebook  ProbeReply: candidates that answered, each with this node's own address on the way there
    notebook → head      StartController: the chosen address
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from skymagic.kernels.agent.loop import Loop
from skymagic.kernels.network import interface_addresses
from skymagic.wire.boot import boot_id
from skymagic.wire.threads import run_all

TIMEOUT = 2.0
"""Seconds in which a candidate must answer."""


def machine() -> str:
    """The same text for all processes that reach each other by 127.0.0.1, and for no others."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/net')}"
    return f"{boot_id()} {socket.gethostname()}"


def private_addresses() -> list[str]:
    """This machine's private IPv4 addresses other than loopback; public ones are no place to listen."""
    found = {address for address in [*interface_addresses().values(), *_of_hostname()] if _private(address)}
    return sorted(found, key=ipaddress.IPv4Address)


def _private(address: str) -> bool:
    known = ipaddress.IPv4Address(address)
    shared = known in ipaddress.IPv4Network("100.64.0.0/10")  # RFC 6598: carriers' and tailnets'
    return (known.is_private or shared) and not known.is_loopback and not known.is_unspecified


def _of_hostname() -> list[str]:
    with contextlib.suppress(OSError):
        return [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return []


class Candidates:
    """Owns the listeners at this node's candidate addresses, and sends the secret to whoever connects."""

    def __init__(self, loop: Loop, secret: str) -> None:
        self._loop, self._secret = loop, secret
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
                listener.setblocking(False)  # race: who connects may be gone again before the accept
                self._listeners.append(listener)
                self._loop.watch(listener, lambda listener=listener: self._answer(listener))  # type: ignore[misc]

    def _answer(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            peer, _ = listener.accept()
            with peer:
                peer.sendall(self._secret.encode())

    def close(self, but: str = "") -> None:
        """Stop listening, but at this address; twice is safe."""
        kept = [listener for listener in self._listeners if but and listener.getsockname()[0] == but]
        for listener in self._listeners:
            if listener not in kept:
                self._loop.unwatch(listener)
                listener.close()
        self._listeners = kept


def probe(loop: Loop, candidates: Mapping[str, int], secret: str, on_result: Callable[[dict[str, str]], None]) -> None:
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
    """The candidates (address → port) that answer with the secret, each with the address that this machine has on the way there."""
    probes = [functools.partial(_own_address, address, port, secret) for address, port in candidates.items()]
    found = zip(candidates, run_all(probes, timeout=2 * TIMEOUT), strict=True)
    return {address: own for address, own in found if isinstance(own, str)}


def _own_address(address: str, port: int, secret: str) -> str | None:
    with socket.create_connection((address, port), TIMEOUT) as peer:
        own_address = str(peer.getsockname()[0])
        expected = secret.encode()
        # who answers may be anybody: no more than the secret and the end after it is read
        received, deadline = b"", time.monotonic() + TIMEOUT
        while len(received) <= len(expected) and time.monotonic() < deadline:
            if not (piece := peer.recv(1024)):
                return own_address if hmac.compare_digest(received, expected) else None
            received += piece
        return None
