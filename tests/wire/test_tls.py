"""TLS between nodes: what one end writes the other reads, whole, both ways at once; strangers read and write nothing."""

from __future__ import annotations

import os
import socket
import ssl
import threading

import pytest

from skymagic.wire import tls


def served(pem: str) -> tuple[socket.socket, threading.Thread]:
    """A socket to an end that sends back what comes."""
    near, far = socket.socketpair()
    ours, theirs = socket.socketpair()

    def echo() -> None:
        with theirs:
            while data := theirs.recv(1 << 16):
                theirs.sendall(data)

    def serve() -> None:
        answering = threading.Thread(target=echo)
        answering.start()
        try:
            tls.pump(tls.context(pem, server=True).wrap_socket(far, server_side=True), ours)
        except ssl.SSLError:
            far.close()
            ours.close()
        answering.join()

    thread = threading.Thread(target=serve)
    thread.start()
    return near, thread


def test_both_ways_at_once() -> None:
    pem = tls.certificate()
    sock, serving = served(pem)
    secure = tls.context(pem, server=False).wrap_socket(sock)
    near, far = socket.socketpair()
    pumping = threading.Thread(target=tls.pump, args=(secure, far))
    pumping.start()
    data, got = os.urandom(5_000_000), bytearray()
    writing = threading.Thread(target=near.sendall, args=(data,))
    writing.start()
    with near:
        while len(got) < len(data):
            got += near.recv(1 << 18)
    assert got == data
    for thread in (writing, pumping, serving):
        thread.join(10.0)
        assert not thread.is_alive()


@pytest.mark.parametrize("knows", ["nothing", "another certificate"])
def test_strangers_get_nothing(knows: str) -> None:
    sock, serving = served(tls.certificate())
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    if knows == "another certificate":
        stranger = tls.context(tls.certificate(), server=False)
    with sock:
        assert heard(stranger, sock) == b""
    serving.join(10.0)
    assert not serving.is_alive()


def heard(stranger: ssl.SSLContext, sock: socket.socket) -> bytes:
    try:
        with stranger.wrap_socket(sock) as secure:
            secure.sendall(b"hello")
            return secure.recv(5)
    except OSError:
        return b""
