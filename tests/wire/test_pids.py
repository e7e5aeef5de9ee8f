"""A process is signalled by its number only as long as that is its own."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skymagic.kernels.agent.ranks import Rank
from skymagic.kernels.daemon import rundir
from skymagic.kernels.fork import EventLoop
from skymagic.kernels.store.server import LOCK, exclusive
from skymagic.wire import processes

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="start times and pidfds are Linux's"
)
SLEEP = [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(100)"]


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the number of one that we knew."""
    with subprocess.Popen(SLEEP, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@contextmanager
def without_locks() -> Iterator[None]:
    """A file system without locks, as NFS where no lockd runs."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        yield


def lives(process: subprocess.Popen[bytes]) -> bool:
    """SIGTERM reaches it, and nothing did before: signals are handled in the order of their numbers, SIGKILL first."""
    process.send_signal(signal.SIGTERM)
    return process.wait() == -signal.SIGTERM


def test_a_later_process_of_the_same_number_gets_no_signal(
    stranger: subprocess.Popen[bytes],
) -> None:
    begun = processes.started(stranger.pid)
    assert begun > processes.started(1) >= 0
    assert not processes.send_signal(stranger.pid, begun - 1, signal.SIGKILL)
    assert lives(stranger)
    assert not processes.send_signal(stranger.pid, begun, signal.SIGKILL), "it has gone"


def test_signal_reaches_the_right_process(stranger: subprocess.Popen[bytes]) -> None:
    assert processes.send_signal(stranger.pid, processes.started(stranger.pid), signal.SIGKILL)
    assert stranger.wait() == -signal.SIGKILL


def test_a_rank_that_has_ended(stranger: subprocess.Popen[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        rank = Rank(EventLoop(print), 0, "ident", ours, output=None)  # type: ignore[arg-type]  # of no interest here
        rank.pid, rank.started = stranger.pid, processes.started(stranger.pid) - 1
        rank.kill()
    assert lives(stranger)


@pytest.mark.parametrize("difference", [0, -1], ids=["itself", "its number"])
def test_an_earlier_value_server(
    stranger: subprocess.Popen[bytes], tmp_path: Path, difference: int
) -> None:
    """On a file system without locks, only the file identifies an earlier server."""
    (tmp_path / LOCK).write_text(
        f"{stranger.pid} {processes.started(stranger.pid) + difference}".ljust(40)
    )
    with without_locks(), exclusive(tmp_path):
        assert (stranger.wait() == -signal.SIGKILL) if difference == 0 else lives(stranger)
    assert not (tmp_path / LOCK).exists()


def test_an_earlier_value_server_that_holds_the_lock(tmp_path: Path) -> None:
    """It has locked the file but not yet written its pid: the file still has the previous one."""
    with subprocess.Popen(SLEEP, stdout=subprocess.PIPE) as before:
        assert before.stdout is not None
        before.stdout.readline()
        (tmp_path / LOCK).write_text(f"{before.pid} {processes.started(before.pid) - 1}".ljust(40))
        holder = os.open(tmp_path / LOCK, os.O_RDWR)
        fcntl.flock(holder, fcntl.LOCK_EX)
        code = (
            "import sys; from pathlib import Path; from skymagic.kernels.store.server import exclusive\n"
            "print('begun', flush=True)\nwith exclusive(Path(sys.argv[1])): print('held', flush=True)"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
        ) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"begun\n"
            assert not select.select([server.stdout], [], [], 0.2)[0]
            os.close(holder)
            assert server.stdout.readline() == b"held\n"
        assert lives(before)


def test_daemon_folder_without_file_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "candidates", lambda name: [str(tmp_path / name)])
    directory = rundir.make("a")
    with without_locks(), directory.locked():
        directory.listen().close()
    directory.remove()
