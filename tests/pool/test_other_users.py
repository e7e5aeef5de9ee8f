"""What another user of this machine, who has none of the pool's keys, gets from its ports: nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from tests.lab.notebook import Notebook, opened

NOISE = [b"", b"\x00" * 8, b"<IDS|MSG>"]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(tmp_path_factory.mktemp("notebook"), "%sky_pool --nodes 2") as one:
        yield one


def ports(notebook: Notebook) -> dict[int, str]:
    """Ports on which processes of the pool listen, with the address."""
    family = psutil.Process(notebook.pid).children(recursive=True)
    found = [each for process in family for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    return {each.laddr.port: each.laddr.ip for each in found}


def test_every_port_is_on_loopback_and_needs_a_key(notebook: Notebook) -> None:
    listening = ports(notebook)
    assert len(listening) > 4
    assert set(listening.values()) == {"127.0.0.1"}
    context = zmq.Context()
    try:
        for port in listening:
            socket = context.socket(zmq.SUB)
            socket.linger = 0
            monitor = socket.get_monitor_socket()
            socket.connect(f"tcp://127.0.0.1:{port}")
            seen: set[int] = set()
            while not seen & {
                zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
                zmq.EVENT_DISCONNECTED,
            }:
                assert monitor.poll(5000), f"port {port} neither let in nor refused"
                seen.add(recv_monitor_message(monitor)["event"])
                assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in seen, f"port {port} lets in whoever comes"
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close()
    finally:
        context.destroy(linger=0)


def test_nobody_reads_or_takes_orders_or_disturbs(notebook: Notebook) -> None:
    context, sockets = zmq.Context(), []
    try:
        for port in ports(notebook):
            for kind in (zmq.SUB, zmq.DEALER, zmq.ROUTER):
                for name in (b"", b"engine-0", b"\x00\x00\x00\x00\x01"):
                    socket = context.socket(kind)
                    socket.linger = 0
                    if kind == zmq.SUB:
                        socket.subscribe(b"")
                    elif name and not name.startswith(b"\x00"):
                        socket.identity = name
                    socket.connect(f"tcp://127.0.0.1:{port}")
                    if kind == zmq.DEALER:
                        socket.send_multipart(NOISE, zmq.DONTWAIT)
                    sockets.append(socket)
        notebook.run("%%sky_broadcast -o sky_pids\nimport os\nprint('my token is hf_123456')\nos.getpid();")
        pids = notebook.value("sky_pids")
        os.kill(pids[1], 9)  # orders to a rank that is started anew went to whoever called himself so
        notebook.finish(notebook.start("%%sky_broadcast\n1;"))  # fails where the death is not known yet
        notebook.run("%%sky_broadcast -o sky_pids --timeout 60\nimport os\nos.getpid();")
        assert notebook.value("sky_pids")[0] == pids[0]
        assert not [socket for socket in sockets if socket.type != zmq.ROUTER and socket.poll(0)]
    finally:
        context.destroy(linger=0)
