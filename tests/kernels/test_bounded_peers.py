"""What strangers and nodes send is read up to what was asked for, and no further."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator

import pytest
import xxhash

from skymagic.content.chain import PeerServer
from skymagic.content.remote.client import Download
from skymagic.kernels.agent.discovery import MAX_PROBES, Candidates, answering_addresses
from skymagic.kernels.fork import EventLoop
from skymagic.wire import tls
from skymagic.wire.store import PEER_CODEC, ReadChunk
from tests.lab.golden import Golden

DEADLINE = 10.0


def test_endless_data_from_a_stranger_is_cut_off() -> None:
    """In another network, a private address belongs to another machine."""
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
        assert answering_addresses({"127.0.0.1": listener.getsockname()[1]}, "secret") == {}
        talking.join(DEADLINE)
        assert not talking.is_alive()


def test_a_frame_of_a_gigabyte_before_the_sender_is_known() -> None:
    """The connection is closed as soon as the frame states its length; no memory is allocated."""
    server = PeerServer(["127.0.0.1"], tls.certificate(), lambda name, offset, limit: (b"", ""))
    client_hello = b"\x01" + ((1 << 24) - 1).to_bytes(3, "big")
    with socket.create_connection(server.listening[0], DEADLINE) as stranger:
        # a record of TLS is at most 16 KiB; the handshake message in it says how long it is
        stranger.sendall(
            b"\x16\x03\x01" + struct.pack("!H", 1 << 14) + client_hello.ljust(1 << 14, b"x")
        )
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(4096)[:1] in (b"", b"\x15"), "closed, perhaps with an alert"
            assert stranger.recv(4096) == b"", "closed"


def test_a_value_whose_name_leads_elsewhere(golden: Golden) -> None:
    """A compromised node of the pool gets files of the store only, and no piece is longer than agreed."""
    for line in (
        b'["FollowValue",{"name":"../precious","offset":0}]\n',
        b'["ValuePiece",{"nbytes":1073741824}]\n',
    ):
        with golden.raises(ValueError):
            PEER_CODEC.decode(line)


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


# -- who listens, who replays, who only connects ---------------------------------------------------------------------------


@pytest.fixture
def candidates() -> Iterator[Candidates]:
    """A node's listeners for probes at 127.0.0.1, on an event loop of their own."""

    def fail(problem: Exception) -> None:
        raise problem

    loop, over = EventLoop(fail), threading.Event()
    listening = Candidates(loop)
    listening.listen(["127.0.0.1"])

    def serve() -> None:
        while not over.is_set():
            loop.run_once(time.monotonic() + 0.05)
        listening.close()

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    yield listening
    over.set()
    serving.join(DEADLINE)


def exchange(port: int, data: bytes) -> bytes:
    """What a stranger gets at 127.0.0.1 for these bytes, until the other end closes."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), DEADLINE) as stranger:
        stranger.sendall(data)
        while piece := stranger.recv(4096):
            received += piece
    return received


@contextlib.contextmanager
def answering_with(answer: Callable[[bytes], bytes]) -> Iterator[int]:
    """The port of a stranger who answers one probe."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer, contextlib.suppress(OSError):
                peer.sendall(answer(peer.recv(4096)))

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield listener.getsockname()[1]
        serving.join(DEADLINE)


def test_a_probe_is_answered_without_the_secret(candidates: Candidates) -> None:
    """An eavesdropper sees a proof that is valid for one nonce only."""
    assert answering_addresses(candidates.ports, candidates.secret) == {"127.0.0.1": "127.0.0.1"}
    assert answering_addresses(candidates.ports, "another pool's") == {}
    [port] = candidates.ports.values()
    first, second = (exchange(port, bytes([number]) * 32) for number in range(2))
    assert first != second
    assert len(first) == len(second) == 32
    assert candidates.secret.encode() not in first + second


def test_replayed_answer_is_refused(candidates: Candidates) -> None:
    [port] = candidates.ports.values()
    heard = exchange(port, b"n" * 32)
    with answering_with(lambda nonce: heard) as strange:
        assert answering_addresses({"127.0.0.1": strange}, candidates.secret) == {}


def test_answer_obtained_from_the_node_is_refused(candidates: Candidates) -> None:
    """The answer includes the address that was probed."""
    [port] = candidates.ports.values()
    with answering_with(lambda nonce: exchange(port, nonce)) as strange:
        assert answering_addresses({"127.0.0.1": strange}, candidates.secret) == {}


def test_silent_strangers_are_disconnected(candidates: Candidates) -> None:
    [port] = candidates.ports.values()
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE))
            for _ in range(3 * MAX_PROBES)
        ]
        assert answering_addresses(candidates.ports, candidates.secret) == {
            "127.0.0.1": "127.0.0.1"
        }
        assert all(stranger.recv(1) == b"" for stranger in strangers), (
            "closed: displaced, or in time"
        )
