"""Connections from senders that are not authenticated yet: limits, and a handshake without TLS.

Challenge and response with HMAC-SHA256 (as CRAM-MD5, RFC 2195): the secret itself is never sent,
and an answer cannot be replayed. Both ends mix in the purpose, so that an answer is worthless at
another address too::

    verifier → prover    a nonce, 32 random bytes
    verifier ← prover    HMAC-SHA256(secret, purpose, nonce)
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

NONCE_BYTES = PROOF_BYTES = 32
NO_DESCRIPTOR_PAUSE = 0.1
"""Seconds to wait after a failed accept.

While no file descriptor is free, accept(2) fails immediately every time.
"""


class Door:
    """Acceptor of a listener's connections, with a limit on unauthenticated ones.

    Each connection is served on its own thread.

    A new connection displaces the oldest one when there are too many. A sender with the secret
    proves it within milliseconds, so strangers who hold connections open cannot keep it out.
    `content.remote.bare_hosts` sends this module to hosts that have nothing but the standard
    library.

    Args:
        serve: takes over the connection, on the connection's thread. With TLS it is called once the
            sender has presented the certificate. Without TLS it is called at once, and the sender
            counts as unauthenticated until it returns. May raise OSError or ValueError.
        context: TLS settings; None for connections that are not encrypted.
        most: limit on unauthenticated connections; each takes a thread and a descriptor.
        seconds: time that each sender has to authenticate.
    """

    def __init__(
        self,
        listener: socket.socket,
        serve: Callable[[Any], object],
        context: ssl.SSLContext | None,
        most: int = 64,
        seconds: float = 10.0,
    ) -> None:
        self._listener, self._serve, self._context = listener, serve, context
        self._most, self._seconds = most, seconds
        self._unknown: dict[socket.socket, None] = {}  # oldest first
        self._lock = threading.Lock()

    def accept(self) -> None:
        """Accept a pending connection, if any.

        If descriptors have run out, close the older half of the unauthenticated connections and
        pause for 0.1 s.
        """
        try:
            sock, _ = self._listener.accept()
            sock.settimeout(self._seconds)
            if self._context is not None:
                sock = self._context.wrap_socket(
                    sock, server_side=True, do_handshake_on_connect=False
                )
        except (BlockingIOError, TimeoutError):
            return
        except OSError:
            self._close_oldest((len(self._unknown) + 1) // 2)
            time.sleep(NO_DESCRIPTOR_PAUSE)
            return
        with self._lock:
            self._unknown[sock] = None
        # A new connection displaces the oldest: strangers who hold connections cannot keep it out.
        self._close_oldest(len(self._unknown) - self._most)
        try:
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()
        except RuntimeError:  # the system has no thread left
            self._stop_counting(sock)
            sock.close()

    def _answer(self, sock: socket.socket) -> None:
        try:
            # With TLS the handshake authenticates the sender; without it, `serve` does.
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
                self._stop_counting(sock)
            self._serve(sock)
        except (OSError, ValueError):
            sock.close()
        # Authenticated or closed: it no longer counts toward the limit.
        finally:
            self._stop_counting(sock)

    def _stop_counting(self, sock: socket.socket) -> None:
        with self._lock:
            self._unknown.pop(sock, None)

    def _close_oldest(self, count: int) -> None:
        with self._lock:
            oldest = list(self._unknown)[: max(0, count)]
            for sock in oldest:
                del self._unknown[sock]
        for sock in oldest:
            with contextlib.suppress(OSError):
                # Its thread sees the end of the stream and closes the socket. Closing it here could
                # free the descriptor for another connection while the thread still uses it.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def accept_ready(listener: socket.socket) -> socket.socket | None:
    """Accept a connection announced by a selector.

    Return None if it is gone or no descriptor is free.

    Without a free descriptor the selector announces the connection again at once. The pause keeps
    the caller's loop from using a whole core.
    """
    try:
        return listener.accept()[0]
    except BlockingIOError:
        return None
    except OSError:
        time.sleep(NO_DESCRIPTOR_PAUSE)
        return None


def accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """Yield a listener's connections until it is closed; retry while no descriptor is free."""
    while listener.fileno() >= 0:
        if (sock := accept_ready(listener)) is not None:
            yield sock


# -- challenge and response -----------------------------------------------------------------------


def proof(secret: str, purpose: str, nonce: bytes) -> bytes:
    """Return the proof that a sender knows the secret, in reply to a nonce."""
    return hmac.digest(secret.encode(), purpose.encode() + b"\0" + nonce, "sha256")


def verify(sock: socket.socket, secret: str, purpose: str, seconds: float) -> bool:
    """Challenge the other end and return True if it knows the secret.

    Raises:
        OSError: the connection failed.
        TimeoutError: the answer took more than `seconds` in all.
    """
    # A new nonce each time, so that a recorded answer is worthless.
    nonce = secrets.token_bytes(NONCE_BYTES)
    deadline = time.monotonic() + seconds
    sock.settimeout(seconds)
    sock.sendall(nonce)
    # In constant time: the time that `==` takes shows how many bytes of a guess are right. A sender
    # that closes early has sent fewer bytes, which equal no proof.
    return hmac.compare_digest(
        read_exactly(sock, PROOF_BYTES, deadline), proof(secret, purpose, nonce)
    )


def read_exactly(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Read exactly `nbytes` bytes, or fewer if the other end closes.

    The deadline holds for all of them together; a socket's own timeout would start again with each
    piece.
    """
    data = b""
    while len(data) < nbytes:
        if (remaining := deadline - time.monotonic()) <= 0:
            raise TimeoutError("the other end takes too long")
        sock.settimeout(remaining)
        if not (piece := sock.recv(nbytes - len(data))):
            break
        data += piece
    return data
