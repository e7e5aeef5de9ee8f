"""Records and sockets of daemons in shared places: other users' are passed over, and what hosts say is shown as text."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from skymagic.wire import record
from skymagic.wire.record import RECORD, AgentRecord

FULL = """
import os, socket, sys
os.setuid(int(sys.argv[2]))  # here, for the interpreter itself may be where no other user can read
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(0)
waiting = [socket.socket(socket.AF_UNIX) for _ in range(8)]
for each in waiting:
    each.setblocking(False)
    try:
        each.connect(sys.argv[1])
    except BlockingIOError:
        break
print("full", flush=True)
input()
"""
"""A socket that nobody accepts from, and whose backlog is full: connect(2) waits there for ever."""


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """The name of a daemon that does not run, and its folder, which anybody can make."""
    monkeypatch.setattr(record, "CONNECT_TIMEOUT", 0.3)
    name = f"test-{uuid.uuid4().hex[:8]}-0"
    folder = Path(record.folders(name)[0])
    yield name, folder
    shutil.rmtree(folder, ignore_errors=True)


def full(folder: Path, user: int, stack: ExitStack) -> None:
    """Have a user listen there without ever accepting."""
    folder.mkdir(mode=0o700)
    os.chown(folder, user, -1)
    command = [sys.executable, "-c", FULL, f"{folder}/{record.SOCKET}", str(user)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stack.enter_context(process)
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == b"full\n"


@pytest.mark.needs("root")
def test_a_socket_of_another_user_is_not_connected_to(
    daemon: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, folder = daemon
    monkeypatch.setattr(record, "CONNECT_TIMEOUT", None)  # it does not depend on the deadline
    with ExitStack() as stack:
        full(folder, 65534, stack)
        assert not record.answers(name)


def test_a_daemon_that_does_not_accept_is_not_waited_for(daemon: tuple[str, Path]) -> None:
    name, folder = daemon
    with ExitStack() as stack:
        full(folder, os.getuid(), stack)
        assert not record.answers(name)


def test_a_daemon_answers(daemon: tuple[str, Path]) -> None:
    name, folder = daemon
    assert not record.answers(name)
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/{record.SOCKET}")
        listener.listen()
        assert record.answers(name)
        folder.chmod(0o750)
        assert not record.answers(name)


def test_host_text_cannot_control_the_terminal() -> None:
    told = AgentRecord(
        "1",
        "tr\x1b[2Jain",
        "job",
        0,
        1,
        "ann\x1b]0;owned\x07@laptop\nroot@prod",
        "h\x9bm",
        "b",
        1,
        1.0,
    )
    found = record.read(RECORD.encode(told).decode())
    assert found is not None
    assert (found.pool, found.hostname) == ("tr\\x1b[2Jain", "h\\x9bm")
    assert found.client == "ann\\x1b]0;owned\\x07@laptop\\nroot@prod"
