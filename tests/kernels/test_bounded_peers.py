"""What strangers and nodes send is read up to what was asked for, and no further."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import tracemalloc
import zlib

import pytest
import xxhash
import zmq

from skymagic.data.remote.client import Download
from skymagic.kernels.agent.discovery import answering
from skymagic.kernels.store.peers import PeerServer
from skymagic.wire.store import ReadChunk

DEADLINE = 10.0


def test_a_stranger_at_a_candidates_address_that_talks_without_end() -> None:
    """In another network the same private address is somebody else's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            peer, _ = listener.accept()
            with peer:
                try:
                    while True:
                        peer.sendall(b"x" * 65536)
                except OSError:
                    return

        talking = threading.Thread(target=talk, daemon=True)
        talking.start()
        assert answering({"127.0.0.1": listener.getsockname()[1]}, "secret") == {}
        talking.join(DEADLINE)
        assert not talking.is_alive()


def test_a_frame_of_a_gigabyte_before_the_sender_is_known() -> None:
    """The connection is closed when the frame says its length; there is no need to make room for it."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    server = PeerServer("127.0.0.1", public, secret, lambda name, offset, limit: (b"", ""))
    greeting = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE) as stranger:
        stranger.sendall(greeting)
        received = b""
        while len(received) < len(greeting):
            received += stranger.recv(4096)
        assert b"CURVE" in received
        stranger.sendall(b"\x06" + struct.pack("!Q", 1 << 30))
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(4096) == b"", "closed"


@pytest.mark.parametrize("deflated", [True, False])
def test_more_than_a_file_has(deflated: bool) -> None:
    """A decompression bomb: 64 MB in 64 kB, for a file of 1 kB."""
    data = bytes(64 << 20)
    packed = zlib.compress(data) if deflated else data
    piece = ReadChunk(1, len(packed), deflated, xxhash.xxh3_64_hexdigest(data))
    download = Download(threading.Event())
    download.begin(1000)
    tracemalloc.start()
    try:
        download.add(piece, packed)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(download.problem, OSError)
    assert peak < 1 << 20
