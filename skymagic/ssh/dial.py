"""TCP connect with a timeout and cancellation; keepalive against dead peers."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time

from skymagic.errors import HostError
from skymagic.ssh.cancellation import POLL_INTERVAL, Cancellation
from skymagic.ssh.config import Endpoint

DEAD_PEER_TIMEOUT = 15
"""Seconds without an acknowledgement after which a peer is dead (TCP_USER_TIMEOUT, RFC 5482)."""
UNREACHABLE_ERRNOS = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EADDRNOTAVAIL}


def dial(endpoint: Endpoint, cancellation: Cancellation) -> socket.socket:
    """A connected socket; all addresses of the name are tried.

    Raises:
        HostError: with the reason.
    """
    problem: OSError | None = None
    addresses = _addresses(endpoint)
    for family, kind, protocol, _, address in addresses:
        cancellation.check()
        # an address that leads nowhere must not use up the time of the next one
        end = time.monotonic() + endpoint.timeout / len(addresses)
        sock = socket.socket(family, kind, protocol)
        try:
            _connect(sock, address, end, cancellation)
            set_tcp_options(sock)
            return sock
        except BaseException as failed:
            sock.close()
            if not isinstance(failed, OSError):
                raise
            problem = failed
    assert problem is not None
    raise HostError(endpoint.label, *_reason_and_remedy(problem, endpoint)) from problem


def _addresses(endpoint: Endpoint) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    try:
        return socket.getaddrinfo(endpoint.hostname, endpoint.port, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except (OSError, UnicodeError) as problem:
        reason, remedy = (
            f"the name {endpoint.hostname!r} is not known",
            "check its spelling, or give it a HostName in ~/.ssh/config",
        )
        raise HostError(endpoint.label, reason, remedy) from problem


def _connect(sock: socket.socket, address: tuple[object, ...], end: float, cancellation: Cancellation) -> None:
    sock.setblocking(False)
    code = sock.connect_ex(address)
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_WRITE)
        while code in (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY):
            cancellation.check()
            if time.monotonic() >= end:
                raise TimeoutError(errno.ETIMEDOUT, "no answer")
            if selector.select(POLL_INTERVAL):
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
    sock.setblocking(True)


def set_tcp_options(sock: socket.socket) -> None:
    """TCP_NODELAY, and keepalive, which detects a dead peer while nothing is sent too; where the system has them."""
    options = [
        (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 5),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 3),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", DEAD_PEER_TIMEOUT * 1000),
    ]
    for level, name, value in options:
        with contextlib.suppress(AttributeError, OSError):
            sock.setsockopt(level, getattr(socket, name), value)


def _reason_and_remedy(problem: OSError, endpoint: Endpoint) -> tuple[str, str]:
    where = f"{endpoint.hostname} port {endpoint.port}"
    if isinstance(problem, TimeoutError) or problem.errno == errno.ETIMEDOUT:
        remedy = "is the host up, and may this machine reach it (VPN, firewall, ProxyJump)?"
        return f"{where} did not answer within {endpoint.timeout:.0f} s", remedy
    if problem.errno == errno.ECONNREFUSED:
        return f"{where} refused the connection", "is sshd running there, and is this its port?"
    if problem.errno in UNREACHABLE_ERRNOS:
        return f"there is no route to {where}", "is the network (VPN) up, or is a ProxyJump needed?"
    return f"{where} cannot be reached: {problem.strerror or problem}", f"try: ssh {endpoint.label}"
