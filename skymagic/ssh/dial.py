"""Streams to an sshd: TCP with a timeout and keepalive, and ProxyJump; cancellation of connects."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from skymagic.errors import HostError
from skymagic.ssh.config import Endpoint

if TYPE_CHECKING:
    import paramiko

logger = logging.getLogger(__name__)


POLL_INTERVAL = 0.05
"""Seconds between a wait's checks for cancellation."""
CONCURRENT_LOGINS = 8
"""Concurrent logins at one sshd; with over 10 unauthenticated ones it drops some at random
(MaxStartups 10:30:100).
"""


class ConnectCancelled(BaseException):
    """The connect was cancelled.

    This is a BaseException, so that no ``except Exception`` keeps its thread alive.
    """


class Cancellation:
    """Cancellation token, shared by the threads of one request and checked during their waits."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._servers: dict[tuple[str, int], threading.Semaphore] = {}
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Make all waits raise ConnectCancelled."""
        self._cancelled.set()

    def check(self) -> None:
        """Raise ConnectCancelled if cancelled."""
        if self._cancelled.is_set():
            raise ConnectCancelled

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait for an event; return True if it was set within `seconds` seconds.

        Raises:
            ConnectCancelled: the request was cancelled.
        """
        end = time.monotonic() + seconds
        while not event.wait(max(0.0, min(POLL_INTERVAL, end - time.monotonic()))):
            self.check()
            if time.monotonic() >= end:
                return False
        self.check()
        return True

    @contextlib.contextmanager
    def login_slot(self, server: tuple[str, int]) -> Iterator[None]:
        """Hold one of the login slots of the sshd at this address: a counting semaphore."""
        with self._lock:
            slots = self._servers.setdefault(server, threading.Semaphore(CONCURRENT_LOGINS))
        while not slots.acquire(timeout=POLL_INTERVAL):
            self.check()
        try:
            yield
        finally:
            slots.release()


# -- TCP -------------------------------------------------------------------------------------------


DEAD_PEER_TIMEOUT = 15
"""Seconds without an acknowledgement after which a peer is dead (TCP_USER_TIMEOUT, RFC 5482)."""
UNREACHABLE_ERRNOS = {
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.ENETDOWN,
    errno.EADDRNOTAVAIL,
}


def connect_tcp(endpoint: Endpoint, cancellation: Cancellation) -> socket.socket:
    """Return a connected socket; all addresses of the name are tried.

    Raises:
        HostError: no address accepts a connection; the message gives the reason.
    """
    problem: OSError | None = None
    addresses = _addresses(endpoint)
    for family, kind, protocol, _, address in addresses:
        cancellation.check()
        # An unreachable address must not use up the time of the next one.
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
            logger.debug("address not reached: host=%s reason=%s", endpoint.label, failed)
            problem = failed
    assert problem is not None
    raise _connect_error(problem, endpoint) from problem


def _addresses(endpoint: Endpoint) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    try:
        return socket.getaddrinfo(  # type: ignore[return-value]
            endpoint.hostname, endpoint.port, type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError) as problem:
        reason, remedy = (
            f"the name {endpoint.hostname!r} is not known",
            "check its spelling, or give it a HostName in ~/.ssh/config",
        )
        raise HostError(endpoint.label, reason, remedy, code="host-name") from problem


def _connect(
    sock: socket.socket, address: tuple[object, ...], end: float, cancellation: Cancellation
) -> None:
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
    """Set TCP_NODELAY and keepalive, if the system has them.

    Keepalive detects a dead peer on an idle connection too.
    """
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


def _connect_error(problem: OSError, endpoint: Endpoint) -> HostError:
    address = f"{endpoint.hostname} port {endpoint.port}"
    if isinstance(problem, TimeoutError) or problem.errno == errno.ETIMEDOUT:
        remedy = "is the host up, and may this machine reach it (VPN, firewall, ProxyJump)?"
        reason = f"{address} did not answer within {endpoint.timeout:.0f} s"
        return HostError(endpoint.label, reason, remedy, code="host-silent")
    if problem.errno == errno.ECONNREFUSED:
        remedy = "is sshd running there, and is this its port?"
        reason = f"{address} refused the connection"
        return HostError(endpoint.label, reason, remedy, code="host-refused")
    if problem.errno in UNREACHABLE_ERRNOS:
        remedy = "is the network (VPN) up, or is a ProxyJump needed?"
        reason = f"there is no route to {address}"
        return HostError(endpoint.label, reason, remedy, code="host-no-route")
    reason = f"{address} cannot be reached: {problem.strerror or problem}"
    return HostError(endpoint.label, reason, f"try: ssh {endpoint.label}", code="host-unreached")


# -- jump hosts ------------------------------------------------------------------------------------


def open_through(jump: paramiko.Transport, via: Endpoint, endpoint: Endpoint) -> paramiko.Channel:
    """Open a direct-tcpip channel (RFC 4254, 7.2) through a jump host to the endpoint.

    Raises:
        HostError: the jump host cannot, or may not, reach it.
    """
    import paramiko

    destination = f"{endpoint.hostname} port {endpoint.port}"
    address = (endpoint.hostname, endpoint.port)
    try:
        return jump.open_channel(
            "direct-tcpip", address, ("127.0.0.1", 0), timeout=endpoint.timeout
        )
    except paramiko.ChannelException as problem:
        failure, remedy = (
            "cannot connect",
            f"is the host up, and does {via.label} know it by that name?",
        )
        if problem.code == 1:
            failure = "does not allow connections"
            remedy = f"AllowTcpForwarding must be on in the sshd of {via.label}"
        reason = f"the jump host {via.label} {failure} to {destination}: {problem.text}"
        raise HostError(endpoint.label, reason, remedy, code="host-jump") from problem
    except (paramiko.SSHException, OSError, EOFError) as problem:
        reason = (
            f"{destination} did not answer through the jump host {via.label} "
            f"within {endpoint.timeout:.0f} s"
        )
        raise HostError(
            endpoint.label,
            reason,
            f"is the host up, and may {via.label} reach it?",
            code="host-jump",
        ) from problem
