"""One connection of a tunnel: a transport to the attach process, joined to a socket that the tunnel's event loop can watch."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from skymagic.wire.codec import Transport
from skymagic.wire.session.frames import HANDSHAKE_REPLY, HANDSHAKE_REQUEST, HandshakeReply, HandshakeRequest

READ_SIZE = 1 << 18


class Connection:
    """Opens a transport, does the handshake, and carries bytes both ways; a transport may block, the loop may not.

    Args:
        connect: opens a transport to the attach process; may take its time, and may raise.
        request: called once the transport is open.
        replied: called with the reply and the bytes that came after it.
        ended: called last, once, with what is known of the reason.

    The calls come on threads of the connection. Closing `near` gives it up.
    """

    def __init__(
        self,
        connect: Callable[[], Transport],
        request: Callable[[], HandshakeRequest],
        replied: Callable[[Connection, HandshakeReply, bytes], None],
        ended: Callable[[Connection, str], None],
    ) -> None:
        self.near, self._far = socket.socketpair()
        self._connect, self._request = connect, request
        self._replied, self._ended = replied, ended
        self._transport: Transport | None = None
        self._closing = threading.Lock()
        self._abandoned = False
        self.closed = threading.Event()
        """Set when nothing is left of it."""
        threading.Thread(target=self._run, name="skymagic-connection", daemon=True).start()

    def wait_closed(self, timeout: float) -> None:
        """Wait until its transport is closed, if it has one; what is still being opened is closed when it is there."""
        if self._transport is not None:
            self.closed.wait(timeout)

    def give_up(self) -> None:
        """Let the transport be closed, whatever it is doing; twice is safe."""
        with contextlib.suppress(OSError):
            self.near.shutdown(socket.SHUT_RDWR)
        self.near.close()
        self._abandoned = True
        threading.Thread(target=self._close, name="skymagic-connection-close", daemon=True).start()

    def _close(self) -> None:
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
                target=self._send_loop, args=(transport,), name="skymagic-connection-out", daemon=True
            ).start()
            if not self._abandoned:
                self._receive_loop(transport)
            why = transport.complaint() or why
        except Exception as problem:  # whatever a provider's connection raises, it is down
            why = str(problem) or type(problem).__name__
        finally:
            with contextlib.suppress(OSError):
                self._far.shutdown(socket.SHUT_RDWR)
            if self._transport is None:
                self._far.close()
                self.closed.set()
            self._ended(self, why)
            self._close()  # last, for it may take its time

    def _receive_loop(self, transport: Transport) -> None:
        transport.write(HANDSHAKE_REQUEST.encode(self._request()))
        data = b""
        while (found := HANDSHAKE_REPLY.first(data, noise=True)) is None:
            piece = transport.read()
            if not piece:
                return
            data += piece
        reply, rest = found
        self._replied(self, reply, rest)
        if not reply.error:
            while data := transport.read():
                self._far.sendall(data)

    def _send_loop(self, transport: Transport) -> None:
        with contextlib.suppress(OSError):
            while data := self._far.recv(READ_SIZE):
                transport.write(data)
        self._far.close()
        self._close()
