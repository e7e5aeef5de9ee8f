"""What a server refuses, what it leaves, and what crosses a slow line."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from skymagic.content.chunks import digest
from skymagic.content.store import NodeStore, create, remove
from skymagic.kernels.store.server import messages
from skymagic.providers.local import ChildTransport
from skymagic.wire import store as protocol
from skymagic.wire import tls
from tests.contracts.stores import MB, Cluster, put
from tests.lab.golden import Golden
from tests.lab.waiting import until

NAME = "0123456789abcdef-" + "f" * 32


@pytest.fixture
def store() -> Iterator[Path]:
    made = create()
    yield Path(made)
    remove(made)


def said(server: ChildTransport) -> list[object]:
    """All that a server says until it ends."""
    stream, found = protocol.decoder(noise=True), []
    while data := server.read():
        found += list(stream.feed(data))
    return found


def started(store: Path, *lines: bytes) -> ChildTransport:
    """A server that was told this."""
    server = ChildTransport([sys.executable, "-m", "skymagic.kernels.store.server", str(store)])
    for line in (protocol.encode(protocol.Settings()), *lines):
        server.write(line)
    return server


@pytest.mark.parametrize(
    "line",
    [
        b'["Delete",{"names":["../precious"]}]\n',
        b'["Delete",{"names":["/etc/passwd"]}]\n',
        b'["Read",{"number":1,"name":"../precious","offset":0}]\n',
        b'["Put",{"name":"../precious","nbytes":5}]\n',
        b'["PutEnd",{"name":"' + NAME.encode() + b'","key":"../../precious"}]\n',
        b'["Replicate",{"name":".value-server","nbytes":1,"sources":[["",1]]}]\n',
        b'["Exec",{}]\n',
        b"\x80\x04\x95nonsense\n",
        b"[]\n",
    ],
)
def test_file_names_cannot_leave_the_store(store: Path, line: bytes) -> None:
    precious = store.parent / "precious"
    precious.write_text("precious")
    try:
        server = started(store, line)
        answers = said(server)
        server.close()
        assert len(answers) == 1  # ready; then it ended
        assert precious.read_text() == "precious"
        assert list(store.iterdir()) == []
    finally:
        precious.unlink()


@pytest.mark.parametrize("how", ["its input ends", "SIGTERM", "SIGHUP", "its store goes"])
def test_an_end_leaves_nothing_half_done(store: Path, how: str) -> None:
    part = (
        protocol.encode(protocol.Put(NAME, MB))
        + protocol.encode(protocol.PutChunk(NAME, 10))
        + b"x" * 10
    )
    server = started(store, part)
    while not [
        path for path in store.iterdir() if path.suffix == ".part" and path.stat().st_size == 10
    ]:
        pass
    if how == "its store goes":
        remove(store)
    elif how == "its input ends":
        server.close()
    else:
        os.kill(server._child.pid, getattr(signal, how))
    assert server._child.wait() == 0
    server.close()
    assert not store.exists() or list(store.iterdir()) == []


def test_a_store_open_to_others_is_refused(golden: Golden, store: Path) -> None:
    store.chmod(0o755)
    server = started(store)
    assert said(server) == []
    golden.line(server.complaint(), str(store), hide=[store])
    server.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_store_of_another_user_is_refused(store: Path) -> None:
    """Neither a server nor a rank uses a folder whose owner could read and replace what is in it."""
    os.chown(store, 65534, 65534)
    server = started(store)
    assert said(server) == []
    assert "PermissionError" in server.complaint()
    server.close()
    with pytest.raises(PermissionError):
        NodeStore(store)
    assert list(store.iterdir()) == []


@pytest.mark.parametrize("who", ["nobody", "a stranger", "the pool"])
def test_only_the_pool_is_served(who: str) -> None:
    with closing(Cluster(2)) as two:
        name = two.store.name(put(two, b"secret"))
        client = two.store._clients.all[0]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if who != "nobody":
            context = tls.context(
                client._settings.pem if who == "the pool" else tls.certificate(), server=False
            )
        with socket.create_connection(client.listening[0], 10.0) as sock:
            received = asked(context, sock, protocol.FollowValue(name, 0))
        found = list(protocol.PEER_CODEC.decoder().feed(received))
        key = name.partition("-")[2]
        expected = [protocol.ValuePiece(6), memoryview(b"secret"), protocol.ValuePiece(0, key)]
        assert found == (expected if who == "the pool" else [])


def asked(context: ssl.SSLContext, sock: socket.socket, request: protocol.PeerMessage) -> bytes:
    """What a follower hears until the value has ended, or the other end closes."""
    received = b""
    with contextlib.suppress(OSError), context.wrap_socket(sock) as secure:
        secure.sendall(protocol.PEER_CODEC.encode(request))
        # the last message is the one without bytes behind it
        while b"\n" not in received.rpartition(b"secret")[2] and (piece := secure.recv(4096)):
            received += piece
    return received


def test_a_follower_trusts_the_pool_alone(store: Path) -> None:
    """The server is told to copy a value from a listener whose certificate is not the pool's."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            context = tls.context(tls.certificate(), server=True)
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    with (
                        contextlib.suppress(OSError),
                        sock,
                        context.wrap_socket(sock, server_side=True) as secure,
                    ):
                        heard.append(secure.recv(4096))

        threading.Thread(target=listen, daemon=True).start()
        port = listener.getsockname()[1]
        server = ChildTransport([sys.executable, "-m", "skymagic.kernels.store.server", str(store)])
        server.write(protocol.encode(protocol.Settings("127.0.0.1", tls.certificate())))
        server.write(protocol.encode(protocol.Replicate(NAME, 1, [("127.0.0.1", port)])))
        stream = protocol.decoder(noise=True)
        while not (
            failed := [
                each
                for each in stream.feed(server.read())
                if isinstance(each, protocol.StoreFailed)
            ]
        ):
            pass
        assert [failure.name for failure in failed] == [NAME]
        assert f"127.0.0.1:{port}" in failed[0].reason
        assert not any(heard)  # it was told nothing
        server.close()
        listener.shutdown(socket.SHUT_RDWR)


def test_nodes_that_wait_for_each_other() -> None:
    """Two values and two nodes: each node is to receive first what the other receives last."""
    with closing(Cluster(2)) as two:
        put(two, b"all are up")
        clients = two.store._clients.all
        data = [os.urandom(MB), os.urandom(MB)]
        names = [f"{NAME[:16]}-{digest([each])}" for each in data]
        for node, other in ((0, 1), (1, 0)):
            for name in names if node == 0 else reversed(names):
                clients[node].send(protocol.Replicate(name, MB, clients[other].listening))
        for node, name, each in ((0, names[1], data[1]), (1, names[0], data[0])):
            clients[node].send(protocol.Put(name, MB))  # instead of following, at last
            clients[node].send(protocol.PutChunk(name, MB), memoryview(each))
            clients[node].send(protocol.PutEnd(name, name[17:]))
        until(
            lambda: all({path.name for path in two.files(node)} >= set(names) for node in range(2))
        )


def test_servers_listen_on_their_own_address_alone() -> None:
    with closing(Cluster(2)) as two:
        put(two, b"all are up")
        for lines in two.lines:
            listening = psutil.Process(lines[0].pid).net_connections()
            assert {each.laddr.ip for each in listening if each.status == psutil.CONN_LISTEN} == {
                "127.0.0.1"
            }
            words = " ".join(psutil.Process(lines[0].pid).cmdline()) + str(
                psutil.Process(lines[0].pid).environ()
            )
            assert two.store._clients.all[0]._settings.pem not in words
        with socket.create_connection(
            two.store._clients.all[0].listening[0]
        ) as stranger:  # who speaks no TLS hears nothing of use
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert two.everywhere(put(two, os.urandom(MB)))


def test_files_are_deflated_while_the_line_is_slow() -> None:
    with closing(Cluster(1)) as one:
        put(one, b"it is up")
        one.lines[0][0].pause = 0.001  # for 64 KiB
        soft, hard = b"0123456789" * (MB // 2), os.urandom(5 * MB)
        for data, least, most in (
            (soft, 2 * MB, 0.8 * len(soft)),  # at first nobody knows that it is slow
            (soft, 0, len(soft) // 20),
            (hard, len(hard), 1.01 * len(hard)),
        ):
            before = one.lines[0][0].got
            name = NodeStore(one.folders[0]).give([data], len(data))
            assert one.store.take(name) == data
            assert least <= one.lines[0][0].got - before <= most


def test_a_signal_before_the_read_is_not_slept_through() -> None:
    silent, _open = os.pipe()
    wake, bell = os.pipe()
    try:
        os.write(
            bell, b"\x0f"
        )  # what the interpreter writes for a signal that came just before the wait
        assert list(messages(silent, wake)) == []
    finally:
        for end in (silent, _open, wake, bell):
            os.close(end)
