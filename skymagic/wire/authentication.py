"""Connections before their sender is known: how many may wait, for how long, and a handshake for those that are not encrypted.

Challenge and response with HMAC-SHA256 (as CRAM-MD5, RFC 2195): the secret itself is never sent, and an answer is worthless the next
time. Both ends add what the answer is for, so that it is worthless at another address too::

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
from collections.abc import Iterator

NONCE_BYTES = PROOF_BYTES = 32
NO_DESCRIPTOR_PAUSE = 0.1
"""Seconds after an accept that failed: when no descriptor is left, accept(2) fails at once, as often as it is called."""


class Unauthenticated:
    """The connections of one listener whose senders are not known yet.

    A new connection displaces the oldest one when there are too many. A sender who has the secret shows it within milliseconds, so that
    strangers who hold connections do not keep it out. `bootstrap.copying` sends this class as text: it needs the standard library alone.

    Args:
        most: how many there may be; each has a thread and a descriptor.
        seconds: how long each may take.
    """

    def __init__(self, most: int = 64, seconds: float = 10.0) -> None:
        self._most, self._seconds = most, seconds
        self._since: dict[socket.socket, float] = {}
        self._lock = threading.Lock()

    def accept(self, listener: socket.socket) -> socket.socket:
        """Accept a connection. `known` must be called for it later.

        Raises:
            OSError: there is none. If descriptors ran out, the older half of the waiting connections is closed, and this takes 0.1 s.
        """
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            raise
        except OSError:
            self._close_oldest((len(self._since) + 1) // 2)
            time.sleep(0.1)
            raise
        self._add(sock)
        return sock

    def accept_tls(self, listener: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        """Accept a connection whose TLS handshake is still to be done; otherwise as `accept`."""
        sock = self.accept(listener)
        self.known(sock)
        secure = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self._add(secure)
        return secure

    def _add(self, sock: socket.socket) -> None:
        sock.settimeout(self._seconds)
        with self._lock:
            self._since[sock] = time.monotonic()
        self._close_oldest(len(self._since) - self._most)

    def known(self, sock: socket.socket) -> None:
        """Take a connection out: its sender is known, or it is closed. Twice is safe."""
        with self._lock:
            self._since.pop(sock, None)

    def _close_oldest(self, count: int) -> None:
        with self._lock:
            oldest = list(self._since)[: max(0, count)]
        self._close(oldest)

    def _close(self, socks: list[socket.socket]) -> None:
        for sock in socks:
            self.known(sock)
            with contextlib.suppress(OSError):
                # the thread that reads from it sees its end, and closes it: the descriptor is not another one's before
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def accept_ready(listener: socket.socket) -> socket.socket | None:
    """Accept a connection that a selector has announced. None: it is gone again, or no descriptor is left.

    In the latter case the selector announces it again at once: a pause here keeps its loop from taking a whole core.
    """
    try:
        return listener.accept()[0]
    except BlockingIOError:
        return None
    except OSError:
        time.sleep(NO_DESCRIPTOR_PAUSE)
        return None


def accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """The connections to a listener, until that is closed; where no descriptor is left, it tries again."""
    while listener.fileno() >= 0:
        if (sock := accept_ready(listener)) is not None:
            yield sock


# -- challenge and response --------------------------------------------------------------------------------------------


def proof(secret: str, purpose: str, nonce: bytes) -> bytes:
    """What shows that a sender has the secret, to who has sent the nonce."""
    return hmac.digest(secret.encode(), purpose.encode() + b"\0" + nonce, "sha256")


def verify(sock: socket.socket, secret: str, purpose: str, seconds: float) -> bool:
    """Challenge the other end; whether it has the secret. Raises OSError, TimeoutError after `seconds` in all."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    deadline = time.monotonic() + seconds
    sock.settimeout(seconds)
    sock.sendall(nonce)
    return hmac.compare_digest(_exactly(sock, PROOF_BYTES, deadline), proof(secret, purpose, nonce))


def _exactly(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    """So many bytes, or fewer where the other end closes. A deadline for all of them: each piece has a timeout of its own."""
    data = b""
    while len(data) < nbytes:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("the other end takes too long")
        sock.settimeout(left)
        if not (piece := sock.recv(nbytes - len(data))):
            break
        data += piece
    return data
