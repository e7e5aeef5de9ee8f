"""The gate of a node, as a process: a daemon that holds nothing of the login."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.kernels.daemon import rundir
from skymagic.kernels.daemon.rundir import RunDirectoryError
from skymagic.wire.session.frames import HANDSHAKE_REPLY, HANDSHAKE_REQUEST, HandshakeRequest
from tests.lab.golden import Golden


@pytest.fixture
def name(tmp_path, monkeypatch) -> str:
    """A name for a daemon, whose folder is looked for under `tmp_path` only."""
    monkeypatch.setattr(
        rundir,
        "candidates",
        lambda name: [str(tmp_path / "first" / name), str(tmp_path / "second" / name)],
    )
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    return "lab-0"


def test_a_folder_is_ours_alone(name, tmp_path) -> None:
    place = rundir.make(name)
    assert place.path == str(tmp_path / "first" / name)
    assert Path(place.path).stat().st_mode & 0o777 == 0o700
    assert rundir.make(name).path == place.path
    found = rundir.find(name)
    assert found is not None
    assert found.path == place.path
    place.remove()
    place.remove()
    assert rundir.find(name) is None


@pytest.mark.parametrize("trick", ["link", "open", "file", "foreign"])
def test_files_of_other_users_are_ignored(name, tmp_path, trick) -> None:
    bait = tmp_path / "first" / name
    if trick == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        bait.symlink_to(tmp_path / "elsewhere")
    elif trick == "file":
        bait.write_text("")
    else:
        bait.mkdir(mode=0o700)
        bait.chmod(0o770 if trick == "open" else 0o700)
        if trick == "foreign":
            if os.getuid() != 0:
                pytest.skip("only root can give a folder away")
            os.chown(bait, 12345, 12345)
    assert rundir.find(name) is None
    assert rundir.make(name).path == str(tmp_path / "second" / name)
    found = rundir.find(name)
    assert found is not None
    assert found.path == str(tmp_path / "second" / name)


def test_all_reasons_are_reported(golden: Golden, name, tmp_path) -> None:
    (tmp_path / "first" / name).write_text("")
    (tmp_path / "second" / name).mkdir()
    (tmp_path / "second" / name).chmod(0o755)
    with golden.raises(RunDirectoryError):
        rundir.make(name)


def test_a_path_too_long_for_a_socket_is_passed_over(tmp_path, monkeypatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(rundir, "candidates", lambda name: [str(long / name), str(tmp_path / name)])
    place = rundir.make("a")
    assert place.path == str(tmp_path / "a")
    place.listen().close()


@pytest.mark.parametrize("bad", ["", "a/b", "..x/y", "a b", "x" * 81, "a\n"])
def test_names(golden: Golden, bad) -> None:
    with golden.raises(RunDirectoryError):
        rundir.make(bad)


def test_unserved_socket_is_no_daemon(name) -> None:
    place = rundir.make(name)
    place.listen().close()
    assert place.connect() is None
    place.listen().close()  # in the place of the one before
    place.remove()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder in which sockets can lie: their paths may not be long."""
    with tempfile.TemporaryDirectory(prefix="test-attach-") as folder:
        yield Path(folder)


def test_leftovers_of_killed_daemons_are_removed(short_path, monkeypatch) -> None:
    monkeypatch.setattr(
        rundir, "candidates", lambda name: [str(short_path / f"skymagic-daemon-0-{name}")]
    )
    old, new, alive, mine = (rundir.make(name) for name in ("old", "new", "alive", "mine"))
    other = short_path / "skymagic-daemon-00-old"
    other.mkdir(mode=0o700)
    old.listen().close()
    new.listen().close()
    with alive.listen():
        for path in (old.path, alive.path, str(other)):
            os.utime(path, (0, 0))
        rundir.sweep(mine, Path(new.path).stat().st_mtime + 60)
    assert {path.name for path in short_path.iterdir()} == {
        *(f"skymagic-daemon-0-{name}" for name in ("new", "alive", "mine")), "skymagic-daemon-00-old"
    }  # fmt: skip


def test_nothing_of_the_login_is_held() -> None:
    """sshd ends a session when its pipes are closed, so the daemon must not hold any."""
    daemon = f"test-{uuid.uuid4().hex[:12]}"
    agent = "import sys; sys.stdin.read()"
    command = [
        sys.executable,
        "-m",
        "skymagic.kernels.daemon.attach",
        daemon,
        sys.executable,
        "-c",
        agent,
    ]
    extra, kept = os.pipe()
    secret = "0123456789abcdef"

    def hello(attempt: int) -> bytes:
        return HANDSHAKE_REQUEST.encode(HandshakeRequest(secret, attempt > 1, attempt, 0))

    done = subprocess.run(command, input=hello(1), capture_output=True, pass_fds=[kept], timeout=60)
    os.close(kept)
    assert os.read(extra, 1) == b""
    os.close(extra)
    found = HANDSHAKE_REPLY.first(done.stdout, noise=True)
    assert found is not None
    assert found[0].error == ""
    assert done.stderr == b""
    again = subprocess.run(command, input=hello(2), capture_output=True, timeout=60)
    assert b'"error":""' in again.stdout
    old = subprocess.run(command, input=hello(2), capture_output=True, timeout=60)
    assert b"a newer connection has taken its place" in old.stdout
    wrong = HANDSHAKE_REQUEST.encode(HandshakeRequest("somebody else", True, 3, 0))
    assert (
        b"serves another notebook"
        in subprocess.run(command, input=wrong, capture_output=True, timeout=60).stdout
    )
    end = hello(3) + FINISH
    gate = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    out, _ = communicate_until_end(gate, end)
    assert b'"status":0' in out


def communicate_until_end(gate: subprocess.Popen[bytes], data: bytes) -> tuple[bytes, int]:
    """Write, acknowledge the agent's end, and read until the daemon closes."""
    from skymagic.wire.session import frames

    assert gate.stdin is not None
    assert gate.stdout is not None
    gate.stdin.write(data)
    gate.stdin.flush()
    out = b""
    while b'"status"' not in out:
        out += os.read(gate.stdout.fileno(), 4096)
    gate.stdin.write(frames.HEADER.pack(frames.ACK, 0, 1, 0))
    gate.stdin.flush()
    out += gate.stdout.read()
    gate.stdin.close()
    gate.stdout.close()
    return out, gate.wait()


def _finish() -> bytes:
    from skymagic.wire.session import frames

    session = frames.Session()
    session.put(frames.EOF, 0)
    return session.take(1000)


FINISH = _finish()


def test_without_a_greeting_nothing_starts() -> None:
    command = [
        sys.executable,
        "-m",
        "skymagic.kernels.daemon.attach",
        "test-nothing",
        sys.executable,
        "-c",
        "pass",
    ]
    assert subprocess.run(command, input=b"", capture_output=True, timeout=60).stdout == b""
    done = subprocess.run(command, input=b"{}\n", capture_output=True, timeout=60)
    assert b"not a message" in done.stdout
    resume = HANDSHAKE_REQUEST.encode(HandshakeRequest("w", True, 1, 0))
    done = subprocess.run(command, input=resume, capture_output=True, timeout=60)
    assert b"killed from outside" in done.stdout
    assert b'"is_lost":true' in done.stdout
