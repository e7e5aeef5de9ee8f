"""Making connections: all hosts at once, all failures in one error, nothing left of a failure or an interrupt."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from skymagic.errors import HostError, HostsError
from skymagic.ssh import dial, login, proxy
from skymagic.ssh.cancellation import Cancellation, Cancelled
from skymagic.ssh.config import Endpoint
from skymagic.ssh.connection import Connection

if TYPE_CHECKING:
    import paramiko

Ask = Callable[[str], str]


class Progress(Protocol):
    """Told of each host as it goes on; called on the caller's thread."""

    def __call__(self, endpoint: Endpoint, state: str) -> None:
        """`state` is "connected", or how it failed."""


def connect(endpoint: Endpoint, ask: Ask | None = None) -> Connection:
    """Connect to one host.

    Args:
        endpoint: from ``SshConfig.endpoint``.
        ask: asks the user for a passphrase; called on the caller's thread. Without it no encrypted key is used.

    Raises:
        HostError: with the reason and what to try.
    """
    return connect_all([endpoint], ask)[0]


def connect_all(
    endpoints: Sequence[Endpoint], ask: Ask | None = None, progress: Progress | None = None
) -> list[Connection]:
    """Connect to all hosts at once.

    The work is done on threads and the caller only waits, so that an interrupt finds it in a known place.

    Returns:
        The connections, in the order of the endpoints.

    Raises:
        HostError: one host failed.
        HostsError: several did. Those that did connect are closed again.
    """
    crew = _Crew(endpoints, ask is not None)
    try:
        crew.start()
        crew.serve(ask, progress)
        failures = [failure for failure in crew.failures if failure is not None]
        if len(failures) == 1 and len(endpoints) == 1:
            raise failures[0]
        if failures:
            raise HostsError(failures, len(endpoints)) from failures[0]
        return [connection for connection in crew.connections if connection is not None]
    except BaseException:
        crew.abandon()
        raise


class _Crew:
    """Threads that connect, one for each host."""

    def __init__(self, endpoints: Sequence[Endpoint], may_ask: bool) -> None:
        self.endpoints, self.may_ask = endpoints, may_ask
        self.connections: list[Connection | None] = [None] * len(endpoints)
        self.failures: list[HostError | None] = [None] * len(endpoints)
        self._unexpected: list[BaseException] = []
        self._patience = Cancellation()
        self._news: queue.SimpleQueue[tuple[int | None, str, Future[str] | None]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._work, args=(index,), name=f"skymagic-connect-{each.label}", daemon=True
            )
            for index, each in enumerate(endpoints)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def serve(self, ask: Ask | None, progress: Progress | None) -> None:
        """On the caller's thread: answer questions, until all are done."""
        left = len(self.endpoints)
        while left:
            index, words, answer = self._news.get()
            if answer is not None and ask is not None:
                answer.set_result(_answered(ask, words))
            elif index is not None:
                left -= 1
                if self._unexpected:
                    raise self._unexpected[0]
                if progress is not None:
                    progress(self.endpoints[index], words)

    def abandon(self) -> None:
        """End the threads and close what they have made."""
        self._patience.cancel()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=5.0)
        for connection in self.connections:
            if connection is not None:
                connection.close()

    def _work(self, index: int) -> None:
        endpoint = self.endpoints[index]
        words = "connected"
        try:
            self.connections[index] = _connected(
                endpoint, self._question if self.may_ask else None, self._patience
            )
        except HostError as failure:
            self.failures[index] = failure
            words = failure.reason
        except Cancelled:
            return
        except BaseException as problem:
            self._unexpected.append(problem)
        self._news.put((index, words, None))

    def _question(self, words: str) -> str:
        """On a worker's thread: have the caller's thread ask."""
        answer: Future[str] = Future()
        done = threading.Event()
        answer.add_done_callback(lambda _: done.set())
        self._news.put((None, words, answer))
        while not self._patience.wait(done, 3600.0):
            pass
        return answer.result()


def _answered(ask: Ask, words: str) -> str:
    """The user's answer, "" where nobody can be asked: a notebook that is run by a program has no input."""
    try:
        return ask(words)
    except (NotImplementedError, EOFError, OSError):
        return ""


def _connected(endpoint: Endpoint, ask: Ask | None, cancellation: Cancellation) -> Connection:
    first = endpoint.proxy_jump[0] if endpoint.proxy_jump else endpoint
    with contextlib.ExitStack() as below, cancellation.turn((first.hostname, first.port)):
        transport = _transport(endpoint, ask, cancellation, below)
        cancellation.check()
        return Connection(endpoint, transport, below.pop_all())


def _transport(
    endpoint: Endpoint,
    ask: Ask | None,
    cancellation: Cancellation,
    below: contextlib.ExitStack,
    via: tuple[Endpoint, paramiko.Transport] | None = None,
) -> paramiko.Transport:
    """Through the jump hosts to an authenticated transport; all that it needs is closed by `below`."""
    for jump in endpoint.proxy_jump:
        try:
            via = jump, _transport(jump, ask, cancellation, below, via)
        except HostError as failure:
            reason = f"its jump host {jump.label} cannot be used: {failure.reason}"
            raise HostError(endpoint.label, reason, failure.remedy) from failure
    with (
        _blaming(endpoint, below)
        if endpoint.proxy_command and via is None
        else contextlib.nullcontext() as command
    ):
        stream = command or (
            proxy.through(via[1], via[0], endpoint) if via else dial.dial(endpoint, cancellation)
        )
        below.callback(stream.close)
        transport = login.start(stream, endpoint, cancellation)
        below.callback(login.end, transport)
    login.check(transport, endpoint)
    login.authenticate(transport, endpoint, ask, cancellation)
    return transport


@contextlib.contextmanager
def _blaming(endpoint: Endpoint, below: contextlib.ExitStack) -> Iterator[socket.socket]:
    """A ProxyCommand's stream; when the command ends within, that is told in its own words."""
    command = proxy.Command(endpoint)
    below.callback(command.close)
    try:
        yield command.socket
    except HostError as failure:
        raise command.blamed(failure) from failure
