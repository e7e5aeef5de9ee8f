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
from collections.abc import Callable, Iterator
from typing import Any

NONCE_BYTES = PROOF_BYTES = 32
NO_DESCRIPTOR_PAUSE = 0.1
"""Seconds after an accept that failed: when no descriptor is left, accept(2) fails at once, as often as it is called."""


class Door:
    """A listener's connections, each served on a thread; those whose senders are not known yet are bounded.

    A new connection displaces the oldest one when there are too many. A sender who has the secret shows it within milliseconds, so that
    strangers who hold connections do not keep it out. `bootstrap.copying` sends this class as text: it needs the standard library alone.

    Args:
        serve: called on the connection's thread, and takes it over: with TLS once the sender has shown the certificate, without it at once,
            and then the sender counts as unknown until this returns. It may raise OSError or ValueError.
        context: of TLS; None for connections that are not encrypted.
        most: how many there may be; each has a thread and a descriptor.
        seconds: for which each waits for what the sender shows.
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
        self._unknown: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()

    def accept(self) -> None:
        """Accept a connection; where there is none, nothing happens.

        If descriptors ran out, the older half of the unknown connections is closed, and this takes 0.1 s.
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
            time.sleep(0.1)  # NO_DESCRIPTOR_PAUSE, which is not in the text that is sent
            return
        with self._lock:
            self._unknown[sock] = None
        self._close_oldest(len(self._unknown) - self._most)
        try:
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()
        except RuntimeError:  # no thread is left
            self._known(sock)
            sock.close()

    def _answer(self, sock: socket.socket) -> None:
        try:
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
                self._known(sock)
            self._serve(sock)
        except (OSError, ValueError):
            sock.close()
        finally:
            self._known(sock)

    def _known(self, sock: socket.socket) -> None:
        with self._lock:
            self._unknown.pop(sock, None)

    def _close_oldest(self, count: int) -> None:
        with self._lock:
            oldest = list(self._unknown)[: max(0, count)]
            for sock in oldest:
                del self._unknown[sock]
        for sock in oldest:
            with contextlib.suppress(OSError):
                # its thread sees its end, and closes it: the descriptor is not another one's before
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
    return hmac.compare_digest(exactly(sock, PROOF_BYTES, deadline), proof(secret, purpose, nonce))


def exactly(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
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
