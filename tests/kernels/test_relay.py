"""A job's relay on a node, as a real process: strangers who connect without a certificate neither end it nor keep its driver out."""

from __future__ import annotations

import platform
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator

import pytest

from skymagic.wire import tls

RELAY = """
import resource, socket, sys
from skymagic.kernels import relay
from skymagic.wire import tls
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
relay.answers = lambda daemon: True  # the daemon's end is not what is tried
relay.HANDSHAKE_TIMEOUT = 1.0
context = tls.context(sys.stdin.read(), server=True)
listener = socket.create_server(("127.0.0.1", 0), backlog=256)
print(listener.getsockname()[1], flush=True)
relay.ProcessRelay("none", listener, context).run()
"""
DEADLINE = 20.0


@pytest.fixture
def served() -> Iterator[tuple[int, str]]:
    """The port of a relay that may have 48 open files, and the certificate that it knows."""
    pem = tls.certificate()
    process = subprocess.Popen(
        [sys.executable, "-c", RELAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(pem.encode())
        process.stdin.close()
        process.stdin = None
        yield int(process.stdout.readline()), pem
        assert process.poll() is None, "it has ended"
        process.kill()


def asked(port: int, pem: str) -> bytes:
    """What a process on the node says, through a connection of the pool's own."""
    context = tls.context(pem, server=False)
    with (
        socket.create_connection(("127.0.0.1", port), DEADLINE) as plain,
        context.wrap_socket(plain) as secure,
    ):
        secure.sendall(b'["platform"]\n')
        return secure.recv(4096)


def test_strangers_cannot_exhaust_descriptors(served: tuple[int, str]) -> None:
    port, pem = served
    strangers = []
    try:
        for _ in range(200):
            strangers.append(socket.create_connection(("127.0.0.1", port), DEADLINE))
        for stranger in (
            strangers
        ):  # all are closed by the relay in the end: refused, or after their handshake's time
            stranger.settimeout(DEADLINE)
            try:
                assert stranger.recv(1) == b""
            except ConnectionResetError:
                pass
        assert platform.platform().encode() in asked(port, pem)
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_stranger_starts_nothing(served: tuple[int, str]) -> None:
    port, pem = served
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        asked(port, tls.certificate())
    assert platform.platform().encode() in asked(port, pem)
