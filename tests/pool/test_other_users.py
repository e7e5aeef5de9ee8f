"""What another user of this machine, who has none of the pool's keys, gets from its ports: nothing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from tests.conftest import traces
from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

NOBODY = 65534
LOOK = """
import json, os, socket, sys
nobody, paths, pids = json.load(sys.stdin)
os.setgroups([]), os.setgid(nobody), os.setuid(nobody)  # now: the other user may not be allowed to start this Python
got = []
def attempt(what, call):
    try:
        call()
    except OSError:
        return
    got.append(what)
def connect(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path)
def write(path):
    os.close(os.open(os.path.join(path, "x") if os.path.isdir(path) else path, os.O_WRONLY | os.O_CREAT))
for path in paths:
    for name, call in ("list", os.listdir), ("read", lambda path: open(path, "rb").close()), ("write", write), ("connect", connect):
        attempt(f"{name} {path}", lambda: call(path))
for pid in pids:
    for name in "environ", "mem", "maps":
        attempt(f"{name} of {pid}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
    attempt(f"descriptors of {pid}", lambda: os.listdir(f"/proc/{pid}/fd"))
    attempt(f"signal {pid}", lambda: os.kill(pid, 0))
print(json.dumps([os.geteuid(), got]))
"""
NOISE = [b"", b"\x00" * 8, b"<IDS|MSG>"]

notebook = borrowed("--ranks 2")


def ports(notebook: Notebook) -> dict[int, str]:
    """Ports on which processes of the pool listen, with the address."""
    family = psutil.Process(notebook.pid).children(recursive=True)
    found = [
        each
        for process in family
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    ]
    return {each.laddr.port: each.laddr.ip for each in found}


def test_every_port_is_on_loopback_and_needs_a_key(notebook: Notebook) -> None:
    listening = ports(notebook)
    assert len(listening) > 4
    assert set(listening.values()) == {"127.0.0.1"}
    context = zmq.Context()
    try:
        for port in listening:
            asking = context.socket(zmq.SUB)
            asking.linger = 0
            monitor = asking.get_monitor_socket()
            asking.connect(f"tcp://127.0.0.1:{port}")
            seen: set[int] = set()
            while not seen & {
                zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
                zmq.EVENT_DISCONNECTED,
            }:
                assert monitor.poll(5000), f"port {port} neither let in nor refused"
                seen.add(recv_monitor_message(monitor)["event"])
                assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in seen, (
                    f"port {port} lets in whoever comes"
                )
            asking.disable_monitor()
            monitor.close(linger=0)
            asking.close()
    finally:
        context.destroy(linger=0)


def test_no_port_makes_room_for_a_strangers_frame(notebook: Notebook) -> None:
    """A command of ZMTP, before the handshake: its length is all that is needed to refuse it."""
    greeting = (
        b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    )
    for port in ports(notebook):
        with socket.create_connection(("127.0.0.1", port), 5.0) as stranger:
            stranger.sendall(greeting)
            received = b""
            while len(received) < len(greeting) and (data := stranger.recv(4096)):
                received += data
            with contextlib.suppress(ConnectionResetError):
                stranger.sendall(b"\x06" + struct.pack("!Q", 1_600_000_000))
                assert stranger.recv(4096) == b"", f"port {port} waits for more"


def test_nobody_reads_or_takes_orders_or_disturbs(notebook: Notebook) -> None:
    context, sockets = zmq.Context(), []
    try:
        for port in ports(notebook):
            for kind in (zmq.SUB, zmq.DEALER, zmq.ROUTER):
                for name in (b"", b"engine-0", b"\x00\x00\x00\x00\x01"):
                    asking = context.socket(kind)
                    asking.linger = 0
                    if kind == zmq.SUB:
                        asking.subscribe(b"")
                    elif name and not name.startswith(b"\x00"):
                        asking.identity = name
                    asking.connect(f"tcp://127.0.0.1:{port}")
                    if kind == zmq.DEALER:
                        asking.send_multipart(NOISE, zmq.DONTWAIT)
                    sockets.append(asking)
        notebook.run(
            "%%sky_broadcast -o sky_pids\nimport os\nprint('my token is hf_123456')\nos.getpid();"
        )
        pids = notebook.value("sky_pids")
        os.kill(
            pids[1], 9
        )  # orders to a rank that is started anew went to whoever called himself so
        notebook.finish(
            notebook.start("%%sky_broadcast\n1;")
        )  # fails where the death is not known yet
        notebook.run("%%sky_broadcast -o sky_pids --timeout 60\nimport os\nos.getpid();")
        assert notebook.value("sky_pids")[0] == pids[0]
        assert not [asking for asking in sockets if asking.type != zmq.ROUTER and asking.poll(0)]
    finally:
        context.destroy(linger=0)


@pytest.mark.needs("root")
def test_another_user_reads_no_file_and_no_process(notebook: Notebook) -> None:
    """Its folders, values in shared memory, sockets and connection files, and what its processes have in their environments."""
    notebook.run("import os\nsecret = os.urandom(4_000_000)")
    notebook.run("%%sky_broadcast\nlen(secret);")
    family = [psutil.Process(notebook.pid), *psutil.Process(notebook.pid).children(recursive=True)]
    # the pool's, by its name and by what its processes have mapped: other tests run on this machine too
    mapped = "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in family)
    job_id = notebook.value("__import__('skymagic').find().pool.job_id")
    places = {place for place in traces() if job_id in place.name or f"{place}/" in mapped}
    assert {str(place.parent) for place in places} >= {"/dev/shm"}
    paths = [str(path) for place in places for path in (place, *place.rglob("*"))]
    looked = subprocess.run(
        [sys.executable, "-c", LOOK], input=json.dumps([NOBODY, paths, [process.pid for process in family]]), cwd="/",
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    who, got = json.loads(looked.stdout)
    assert who == NOBODY
    assert got == []
    assert len(paths) > 5
    assert len(family) > 4
