"""Concurrent connections to many hosts, all or nothing, with all failures in one error.

Also defines the connection whose channels are paramiko's.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from skymagic.errors import HostError, HostsError
from skymagic.ssh import dial, login, openssh
from skymagic.ssh.config import Endpoint
from skymagic.ssh.dial import Cancellation, ConnectCancelled
from skymagic.ssh.host import HostConnection
from skymagic.ssh.process import WINDOW_BYTES
from skymagic.ssh.proxy_command import ProxyCommand

if TYPE_CHECKING:
    import paramiko

logger = logging.getLogger(__name__)

CHANNEL_ATTEMPTS = 3
_other_logins: set[Endpoint] = set()
"""Hosts that OpenSSH has logged in to: paramiko is not tried there again."""
Ask = Callable[[str], str]
Progress = Callable[[Endpoint, str], None]
"""Called on the caller's thread when a host's connect has ended, with "connected" or the
failure.
"""


def connect(endpoint: Endpoint, ask: Ask | None = None) -> HostConnection:
    """Connect to one host.

    Args:
        endpoint: from `SshConfig.endpoint`.
        ask: asks the user for a passphrase, a password or a code; called on the caller's thread.
            Without it encrypted keys are not used.

    Raises:
        HostError: with the reason and a remedy.
    """
    return connect_all([endpoint], ask)[0]


def connect_all(
    endpoints: Sequence[Endpoint], ask: Ask | None = None, progress: Progress | None = None
) -> list[HostConnection]:
    """Connect to all hosts at once.

    The work is done on threads and the caller only waits, so that an interrupt finds it in a known
    place.

    Returns:
        The connections, in the order of the endpoints.

    Raises:
        HostError: the only host failed.
        HostsError: several hosts, or some of them, failed. Successful connections are closed again.
    """
    attempts = _Attempts(endpoints, ask is not None)
    try:
        attempts.run(ask, progress)
        failures = [failure for failure in attempts.failures if failure is not None]
        if len(failures) == 1 and len(endpoints) == 1:
            raise failures[0]
        if failures:
            raise HostsError(failures, len(endpoints)) from failures[0]
        return [connection for connection in attempts.connections if connection is not None]
    except BaseException:
        attempts.cancel()
        raise


class _Attempts:
    """Concurrent connects, a thread for each host.

    Their events go to the caller's thread over a queue.
    """

    def __init__(self, endpoints: Sequence[Endpoint], may_ask: bool) -> None:
        self.endpoints, self.may_ask = endpoints, may_ask
        self.connections: list[HostConnection | None] = [None] * len(endpoints)
        self.failures: list[HostError | None] = [None] * len(endpoints)
        self._unexpected: list[BaseException] = []
        self._cancellation = Cancellation()
        self._events: queue.SimpleQueue[tuple[int | None, str, Future[str] | None]] = (
            queue.SimpleQueue()
        )
        self._threads = [
            threading.Thread(
                target=self._attempt,
                args=(index,),
                name=f"skymagic-connect-{endpoint.label}",
                daemon=True,
            )
            for index, endpoint in enumerate(endpoints)
        ]

    def run(self, ask: Ask | None, progress: Progress | None) -> None:
        """Start the threads; ask for passphrases and report progress on the caller's thread until
        all have ended.
        """
        for thread in self._threads:
            thread.start()
        remaining = len(self.endpoints)
        while remaining:
            index, text, answer = self._events.get()
            if answer is not None and ask is not None:
                answer.set_result(_answer(ask, text))
            elif index is not None:
                remaining -= 1
                if self._unexpected:
                    raise self._unexpected[0]
                if progress is not None:
                    progress(self.endpoints[index], text)

    def cancel(self) -> None:
        """End the threads and close their connections."""
        self._cancellation.cancel()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=5.0)
        for connection in self.connections:
            if connection is not None:
                connection.close()

    def _attempt(self, index: int) -> None:
        text = "connected"
        ask = self._ask_caller if self.may_ask else None
        try:
            self.connections[index] = _open_connection(
                self.endpoints[index], ask, self._cancellation
            )
        except HostError as failure:
            logger.warning(
                "host not reached: host=%s reason=%s",
                self.endpoints[index].label,
                failure.reason.partition("\n")[0],
            )
            self.failures[index] = failure
            text = failure.reason
        except ConnectCancelled:
            return
        except BaseException as problem:
            self._unexpected.append(problem)
        self._events.put((index, text, None))

    def _ask_caller(self, text: str) -> str:
        """Have the caller's thread ask, because input() works on IPython's main thread only."""
        answer: Future[str] = Future()
        done = threading.Event()
        answer.add_done_callback(lambda _: done.set())
        self._events.put((None, text, answer))
        while not self._cancellation.wait(done, 3600.0):
            pass
        return answer.result()


def _answer(ask: Ask, text: str) -> str:
    """Return the user's answer; "" without input, as in a notebook that nbconvert runs."""
    try:
        return ask(text)
    except (NotImplementedError, EOFError, OSError):
        return ""


def _open_connection(
    endpoint: Endpoint, ask: Ask | None, cancellation: Cancellation
) -> HostConnection:
    if endpoint.client == "paramiko" or (
        endpoint.client == "auto" and endpoint not in _other_logins
    ):
        try:
            logger.debug("connecting over paramiko: host=%s", endpoint.label)
            return _over_paramiko(endpoint, ask, cancellation)
        except login.UnsupportedLogin:
            logger.info("host needs OpenSSH's own client: host=%s", endpoint.label)
            if endpoint.client == "paramiko" or shutil.which("ssh") is None:
                raise
    connection = openssh.connect(endpoint, ask, cancellation)
    _other_logins.add(endpoint)
    return connection


def _over_paramiko(
    endpoint: Endpoint, ask: Ask | None, cancellation: Cancellation
) -> SSHConnection:
    first = endpoint.proxy_jump[0] if endpoint.proxy_jump else endpoint
    with contextlib.ExitStack() as resources, cancellation.login_slot((first.hostname, first.port)):
        transport = _open_transport(endpoint, ask, cancellation, resources)
        cancellation.check()
        return SSHConnection(endpoint, transport, resources.pop_all())


def _open_transport(
    endpoint: Endpoint,
    ask: Ask | None,
    cancellation: Cancellation,
    resources: contextlib.ExitStack,
    via: tuple[Endpoint, paramiko.Transport] | None = None,
) -> paramiko.Transport:
    """Open an authenticated transport through the jump hosts.

    `resources` closes everything that it uses.
    """
    for jump in endpoint.proxy_jump:
        try:
            via = jump, _open_transport(jump, ask, cancellation, resources, via)
        except HostError as failure:
            reason = f"its jump host {jump.label} cannot be used: {failure.reason}"
            raise HostError(endpoint.label, reason, failure.hint, code="host-jump") from failure
    command = ProxyCommand(endpoint) if endpoint.proxy_command and via is None else None
    try:
        if command is not None:
            resources.callback(command.close)
            stream: login.Stream = command.stream
        else:
            stream = (
                dial.open_through(via[1], via[0], endpoint)
                if via
                else dial.connect_tcp(endpoint, cancellation)
            )
        resources.callback(stream.close)
        transport = login.handshake(stream, endpoint, cancellation)
        resources.callback(login.close, transport)
    except HostError as failure:
        if command is None:
            raise
        raise command.with_output(failure) from failure
    login.check_host_key(transport, endpoint)
    login.authenticate(transport, endpoint, ask, cancellation)
    return transport


class SSHConnection(HostConnection):
    """A connection to one host, including the connections to its jump hosts.

    Args:
        endpoint: the host.
        transport: an authenticated transport.
        resources: closed after the transport: sockets and connections to jump hosts.
    """

    def __init__(
        self, endpoint: Endpoint, transport: paramiko.Transport, resources: contextlib.ExitStack
    ) -> None:
        super().__init__(endpoint.label, f"ssh {endpoint.label} true")
        self._transport, self._resources = transport, resources
        logger.info("SSH connection is up: host=%s", endpoint.label)

    @property
    def alive(self) -> bool:
        """True while the connection is up.

        TCP keepalive detects a dead peer after `DEAD_PEER_TIMEOUT`.
        """
        return self._transport.is_active()

    def release(self) -> None:
        """Close the connection and everything that uses it. Safe to call twice."""
        logger.debug("SSH connection is closed: host=%s", self.label)
        login.close(self._transport)
        self._resources.close()

    def open_channel(self, timeout: float) -> paramiko.Channel:
        """Return a channel of this connection. Raises HostError."""
        import paramiko

        attempts_left = CHANNEL_ATTEMPTS
        while True:
            try:
                return self._transport.open_session(window_size=WINDOW_BYTES, timeout=timeout)
            except paramiko.ChannelException as problem:
                # Race: a process that has just ended may count toward MaxSessions a moment longer.
                logger.debug("channel refused, tried again: host=%s", self.label)
                attempts_left -= 1
                if not attempts_left:
                    reason = f"sshd allows no more processes on this connection ({problem.text})"
                    raise HostError(
                        self.label,
                        reason,
                        "raise MaxSessions in the host's sshd_config",
                        code="host-sessions",
                    ) from problem
                time.sleep(0.1)
            except (paramiko.SSHException, OSError, EOFError) as problem:
                raise HostError(self.label, "the connection is lost", code="host-lost") from problem
