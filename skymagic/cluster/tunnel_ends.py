"""The two ends of a tunnel: a connection to the attach process, and the agent's transport.

The transport does not notice lost connections.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable

from skymagic.errors import HostGone
from skymagic.wire.codec import Transport
from skymagic.wire.processes import signal_name
from skymagic.wire.session.frames import (
    HANDSHAKE_REPLY,
    HANDSHAKE_REQUEST,
    HandshakeReply,
    HandshakeRequest,
)

READ_SIZE = 1 << 18


class TunnelConnection:
    """Connection that opens a transport, does the handshake, and copies bytes both ways.

    It runs on its own threads, which may block, unlike the session's loop. Closing `near` gives it
    up.

    Args:
        connect: opens a transport to the attach process; may be slow, and may raise.
        request: called once the transport is open.
        replied: called with the reply and the bytes after it.
        ended: called last, once, with the reason if known.
    """

    def __init__(
        self,
        connect: Callable[[], Transport],
        request: Callable[[], HandshakeRequest],
        replied: Callable[[TunnelConnection, HandshakeReply, bytes], None],
        ended: Callable[[TunnelConnection, str], None],
    ) -> None:
        # The loop can only wait for sockets, and a transport may be a pipe, a channel, or a
        # call that blocks. So threads copy between the transport and this pair.
        self.near, self._far = socket.socketpair()
        self._connect, self._request = connect, request
        self._replied, self._ended = replied, ended
        self._transport: Transport | None = None
        self._closing = threading.Lock()
        self._abandoned = False
        self.gone = False  # True if it ended because its node is certainly gone
        self.closed = threading.Event()  # set when everything is closed
        threading.Thread(target=self._run, name="skymagic-connection", daemon=True).start()

    def wait_closed(self, timeout: float) -> None:
        """Wait until its transport is closed, if it has one.

        A transport that is still being opened is closed later.
        """
        if self._transport is not None:
            self.closed.wait(timeout)

    def give_up(self) -> None:
        """Close the transport in the background, even in the middle of a call. Safe to call
        twice.
        """
        # shut down first: a thread that waits in recv or sendall on the other end would not notice
        # the close alone
        with contextlib.suppress(OSError):
            self.near.shutdown(socket.SHUT_RDWR)
        self.near.close()
        self._abandoned = True  # for a transport that is still being opened
        threading.Thread(target=self._close, name="skymagic-connection-close", daemon=True).start()

    def _close(self) -> None:
        # Both threads and `give_up` come here. The lock makes the later ones wait for the first, so
        # that `closed` is set when any of them returns.
        with self._closing:
            if self._transport is not None and not self.closed.is_set():
                try:
                    self._transport.close()
                finally:
                    self.closed.set()

    def _run(self) -> None:
        why = "it ended"
        try:
            transport = self._transport = self._connect()
            threading.Thread(
                target=self._send_loop,
                args=(transport,),
                name="skymagic-connection-out",
                daemon=True,
            ).start()
            if not self._abandoned:
                self._receive_loop(transport)
            why = transport.complaint() or why
        except Exception as problem:  # any error of a provider's connection means that it is down
            why = str(problem) or type(problem).__name__
            self.gone = isinstance(problem, HostGone)
        finally:
            # The loop reads all data that has arrived before it sees that the connection is over.
            with contextlib.suppress(OSError):
                self._far.shutdown(socket.SHUT_RDWR)
            # without a transport there is no thread that sends, which would close it
            if self._transport is None:
                self._far.close()
                self.closed.set()
            self._ended(self, why)
            self._close()  # last, because it may take long

    def _receive_loop(self, transport: Transport) -> None:
        transport.write(HANDSHAKE_REQUEST.encode(self._request()))
        data = b""
        # a login shell may print lines before the attach process starts
        while (reply_and_rest := HANDSHAKE_REPLY.first(data, noise=True)) is None:
            piece = transport.read()
            if not piece:
                return
            data += piece
        reply, remaining = reply_and_rest
        # before any other byte reaches the loop: `remaining` are the first bytes of its frames
        self._replied(self, reply, remaining)
        if not reply.error:
            while data := transport.read():
                self._far.sendall(data)

    def _send_loop(self, transport: Transport) -> None:
        with contextlib.suppress(OSError):
            while data := self._far.recv(READ_SIZE):
                # may block for as long as the connection hangs, hence the thread
                transport.write(data)
        self._far.close()
        self._close()


class AgentEnd:
    """The `wire.codec.Transport` to an agent, which spans connections.

    Args:
        send: queues bytes for the agent; never blocks.
        finish: asks the agent to end everything, and waits until it has ended or cannot be reached.
    """

    def __init__(self, send: Callable[[bytes], None], finish: Callable[[], None]) -> None:
        self._send, self._finish = send, finish
        self._changed = threading.Condition()
        self._received: deque[bytes] = deque()
        self._complaint: str | None = None

    def read(self) -> bytes:
        """Wait for output of the agent and return it; b"" when it has ended or is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._received or self._complaint is not None)
            data = b"".join(self._received)
            self._received.clear()
            return data

    def write(self, data: bytes | memoryview) -> None:
        """Send to the agent, now or once reconnected.

        Raises:
            BrokenPipeError: it has ended, or is lost.
        """
        if self._complaint is not None:
            raise BrokenPipeError(self._complaint or "the agent has ended")
        # a copy: the caller may reuse its buffer, and the session keeps the bytes until the other
        # end has acknowledged them
        self._send(bytes(data))

    def complaint(self) -> str:
        """Return the end of the agent's standard error, or the reason why it is lost."""
        return self._complaint or ""

    def close(self) -> None:
        """End the agent and wait for it. Safe to call twice."""
        if self._complaint is None:
            self._finish()

    # -- the tunnel's side -------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Add output of the agent."""
        with self._changed:
            self._received.append(data)
            self._changed.notify_all()

    def mark_ended(self, complaint: str) -> None:
        """Mark the end of the agent's output; the first reason counts."""
        # a lingering tunnel calls this twice: when it is given up, and at its thread's end
        with self._changed:
            if self._complaint is None:
                self._complaint = complaint
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Return True if the end came within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._complaint is not None, timeout)


def how_ended(status: int, output: str) -> str:
    """Return a message on how an agent ended; "" if it ended normally."""
    if not status:
        return output
    # `signal_name` returns "signal 40" for a signal without a name.
    how = (
        f"signal {signal_name(-status).removeprefix('signal ')}"
        if status < 0
        else f"exit status {status}"
    )
    return f"{output}\n({how})" if output else how
