"""Connections before their sender is known: an accept that fails is tried again, and the oldest of too many goes."""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
import threading

import pytest

from skymagic.wire import tls
from skymagic.wire.authentication import NONCE_BYTES, Door, proof, verify

DEADLINE = 10.0
EXHAUST = """
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
"""
"""Takes all descriptors, as `held`."""
WITHOUT_DESCRIPTORS = f"""
import os, resource, socket, threading
from skymagic.wire.authentication import accepted
listener = socket.create_server(("127.0.0.1", 0))
first, second = (socket.socket() for _ in range(2))
{EXHAUST}first.connect(listener.getsockname())
threading.Timer(0.5, lambda: [os.close(each) for each in held]).start()
for sock in accepted(listener):
    print(sock.getpeername() == first.getsockname())
    listener.close()
"""


def test_an_accept_without_a_descriptor_is_tried_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "True\n", done.stderr


ANNOUNCED = f"""
import os, resource, selectors, socket, time
from skymagic.wire.authentication import accept_ready
listener = socket.create_server(("127.0.0.1", 0))
listener.setblocking(False)
print(accept_ready(listener))
client = socket.create_connection(listener.getsockname())
waiting = selectors.DefaultSelector()
waiting.register(listener, selectors.EVENT_READ)
{EXHAUST}end, turns = time.monotonic() + 0.5, 0
while time.monotonic() < end:
    for _ in waiting.select(1.0):
        assert accept_ready(listener) is None
        turns += 1
print(turns <= 6)
[os.close(each) for each in held]
print(accept_ready(listener).getpeername() == client.getsockname())
"""


def test_a_loop_does_not_spin_where_no_descriptor_is_left() -> None:
    """The selector reports the connection again and again, which took a whole core."""
    done = subprocess.run(
        [sys.executable, "-c", ANNOUNCED], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["None", "True", "True"], done.stderr


def test_a_new_connection_displaces_the_oldest() -> None:
    over = threading.Event()

    def serve(sock: socket.socket) -> None:
        with sock:
            over.wait(DEADLINE)
            sock.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        door = Door(listener, serve, None, most=2)
        clients = []
        for _ in range(3):
            clients.append(socket.create_connection(listener.getsockname(), DEADLINE))
            door.accept()
        assert clients[0].recv(1) == b""
        over.set()
        assert [client.recv(1) for client in clients[1:]] == [b"x"] * 2
        for each in clients:
            each.close()


def test_peer_with_the_certificate_is_not_displaced() -> None:
    pem, served = tls.certificate(), queue.SimpleQueue[socket.socket]()
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        door = Door(listener, served.put, tls.context(pem, server=True), most=2)
        plain = stack.enter_context(socket.create_connection(listener.getsockname(), DEADLINE))
        door.accept()
        known = stack.enter_context(tls.context(pem, server=False).wrap_socket(plain))
        there = stack.enter_context(served.get(timeout=DEADLINE))
        strangers = []
        for _ in range(3):
            strangers.append(
                stack.enter_context(socket.create_connection(listener.getsockname(), DEADLINE))
            )
            door.accept()
        assert strangers[0].recv(1) == b""
        there.sendall(b"x")
        assert known.recv(1) == b"x"


@pytest.mark.parametrize(
    ("secret", "purpose", "is_known"),
    [("s", "p", True), ("t", "p", False), ("s", "q", False), ("", "", False)],
)
def test_a_proof_is_of_one_secret_for_one_purpose(
    secret: str, purpose: str, is_known: bool
) -> None:
    here, there = socket.socketpair()
    with here, there:

        def prove() -> None:
            there.sendall(proof(secret, purpose, there.recv(NONCE_BYTES)))

        proving = threading.Thread(target=prove)
        proving.start()
        assert verify(here, "s", "p", DEADLINE) is is_known
        proving.join()


def test_a_byte_now_and_then_extends_no_deadline() -> None:
    here, there = socket.socketpair()
    with here, there:
        over = threading.Event()

        def trickle() -> None:
            while not over.wait(0.05):
                there.sendall(b"x")

        trickling = threading.Thread(target=trickle)
        trickling.start()
        try:
            with pytest.raises(TimeoutError):
                verify(here, "s", "p", 0.5)
        finally:
            over.set()
            trickling.join()
