"""Connections to real sshd hosts: processes, scripts, files, and what is left when something ends early."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skymagic.errors import HostError
from skymagic.ssh.config import Endpoint, endpoints
from skymagic.ssh.connecting import connect, connect_all
from skymagic.ssh.host import HostConnection
from tests.lab.hosts import Hosts, lent, loopback, masters, still_there
from tests.lab.notebook import gate
from tests.lab.raising import raises

pytestmark = pytest.mark.needs("sshd")


@pytest.fixture(scope="module")
def module_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with loopback(tmp_path_factory.mktemp("hosts"), 1) as made:
        yield made


@pytest.fixture
def hosts(module_hosts: Hosts, tmp_path: Path) -> Iterator[Hosts]:
    with lent(module_hosts, tmp_path) as made:
        yield made


@pytest.fixture(params=["paramiko", "openssh"], autouse=True)
def client(
    request: pytest.FixtureRequest, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Who speaks SSH."""
    with masters(hosts) as env:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(f"{__name__}.CLIENT", request.param)
        yield request.param


CLIENT = ""


@pytest.fixture
def connection(hosts: Hosts, client: str) -> Iterator[HostConnection]:
    made = connect(endpoint(hosts, "h1"))
    yield made
    made.close()
    assert not ours()


def endpoint(hosts: Hosts, name: str) -> Endpoint:
    config = Path.home() / ".ssh" / "config"
    config.write_text(hosts.config.read_text())
    (found,) = endpoints([name], CLIENT)
    return found


def ours() -> list[str]:
    """Threads that connections have left."""
    return [
        t.name
        for t in threading.enumerate()
        if "skymagic" in t.name or "paramiko" in type(t).__module__
    ]


# ------------------------------------------------------------------------------------------------------- scripts


def test_a_script(hosts: Hosts, connection: HostConnection) -> None:
    done = connection.run("echo out; echo err >&2; pwd; read x || exit 3")
    assert (done.status, done.out, done.err) == (3, f"out\n{hosts[0].home}\n", "err\n")


@pytest.mark.parametrize("client", ["paramiko"], indirect=True)
def test_an_end_of_input_that_is_late(connection: HostConnection, tmp_path: Path) -> None:
    """A process ends while another thread closes its input, which then writes to a closed channel."""
    made: Any = connection
    transport = made._transport
    channel: Any = connection.open_channel(5.0)
    opened = gate(tmp_path)
    channel.exec_command(f"cat {opened}")
    with channel.lock:
        late = channel._send_eof()
    opened.write_bytes(b"")
    while channel in transport._channels.values():
        channel.status_event.wait(0.01)
    connection.run("true")  # what closes the channel is sent before it
    transport._send_user_message(late)
    assert connection.run("echo there").out == "there\n"


def test_a_script_with_all_of_the_shells_letters(connection: HostConnection) -> None:
    done = connection.run("""cat <<'END'\n'"`$!\\ {}\nEND\necho 'ä'""")
    assert done.out == "'\"`$!\\ {}\nä\n"


def test_a_script_that_is_no_shell_text(connection: HostConnection) -> None:
    with raises(HostError, "shell-ended", r"h1: .*\n.*yntax error"):
        connection.run("if")


def test_lines_arrive_as_printed(hosts: Hosts, connection: HostConnection) -> None:
    seen: list[str] = []

    def hear(line: str) -> None:
        seen.append(line)
        (hosts[0].home / "go").touch()  # it prints the rest only now

    done = connection.run(
        "echo one; until [ -e go ]; do sleep 0.01; done; echo two; printf three", lines=hear
    )
    assert seen == ["one", "two", "three"]
    assert done.out == "one\ntwo\nthree"


def test_a_timeout_ends_the_script_with_all_that_it_started(
    hosts: Hosts, connection: HostConnection
) -> None:
    with raises(HostError, "host-timeout", r"h1: .*\b1 s\b"):
        connection.run("sleep 1000 & trap '' TERM; while :; do sleep 1000; done", timeout=1.0)
    assert still_there(hosts[0].processes()) == []
    assert connection.run("echo on").out == "on\n"


# ----------------------------------------------------------------------------------------------------- processes


def test_a_process_that_ends_while_it_is_fed(connection: HostConnection) -> None:
    """Its end is noticed between two writes or within one, with the same error."""
    for _ in range(100):
        process = connection.open("exit 3")
        with pytest.raises(BrokenPipeError, match="h1: "):
            list(map(process.write, itertools.repeat(bytes(1 << 16))))
        assert process.finish(20.0) == 3
        process.close()


# --------------------------------------------------------------------------------------------------------- files


def pieces(data: bytes) -> Iterator[memoryview]:
    view = memoryview(data)
    for begin in range(0, len(data), 1 << 20):
        yield view[begin : begin + (1 << 20)]


def test_a_file(hosts: Hosts, connection: HostConnection) -> None:
    data = bytes(range(256)) * 20_000
    connection.upload("a folder/it's $HOME", pieces(data), len(data), 0o755)
    there = hosts[0].home / "a folder" / "it's $HOME"
    assert there.read_bytes() == data
    assert there.stat().st_mode & 0o777 == 0o755
    connection.upload("empty", pieces(b""), 0)
    assert (hosts[0].home / "empty").stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written(hosts: Hosts, connection: HostConnection) -> None:
    (hosts[0].home / "taken").write_text("")
    for _ in range(60):  # the far end may close while it is written to, and before
        with raises(HostError, "host-write", "h1: taken/x .*: mkdir: "):
            connection.upload("taken/x", pieces(b"x" * 10_000_000), 10_000_000)


def test_half_a_file_has_no_name(hosts: Hosts, connection: HostConnection) -> None:
    with pytest.raises(HostError, match="3 of 4 bytes arrived"):
        connection.upload("half", pieces(b"abc"), 4)
    assert [path.name for path in hosts[0].home.iterdir() if not path.name.startswith(".")] == []


# --------------------------------------------------------------------------------------------- connections end


def test_a_script_whose_connection_is_lost(hosts: Hosts, connection: HostConnection) -> None:
    with raises(HostError, "host-lost", "h1: "):
        connection.run("echo begun; sleep 1000", lines=lambda line: hosts[0].kill_sessions())
    hosts[0].power_cut()


def test_all_hosts_at_once(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    with loopback(tmp_path / "hosts", 3) as hosts:
        endpoints = [endpoint(hosts, name) for name in ("h3", "h1", "h2", "h1")]
        made = connect_all(endpoints, progress=lambda each, state: told.append((each.label, state)))
        assert [each.label for each in made] == ["h3", "h1", "h2", "h1"]
        assert [each.run("echo $HOME").out.strip() for each in made][:2] == [
            str(hosts[2].home),
            str(hosts[0].home),
        ]
        assert sorted(told) == [
            ("h1", "connected"),
            ("h1", "connected"),
            ("h2", "connected"),
            ("h3", "connected"),
        ]
        for each in made:
            each.close()
            each.close()
    assert not ours()


# ------------------------------------------------------------------------------------------------- ends at any time


def test_an_interrupt_ends_a_script(hosts: Hosts, connection: HostConnection) -> None:
    def press(line: str) -> None:
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()

    with pytest.raises(KeyboardInterrupt):
        connection.run("sleep 1000 & echo begun; wait", lines=press)
    assert still_there(hosts[0].processes()) == []
    assert connection.run("echo on").out == "on\n"


def test_closing_a_connection_ends_its_scripts(hosts: Hosts) -> None:
    connection = connect(endpoint(hosts, "h1"))
    begun = threading.Event()
    failures: list[HostError] = []

    def work() -> None:
        try:
            connection.run(
                "trap '' HUP PIPE; echo begun; sleep 1000", lines=lambda line: begun.set()
            )
        except HostError as failure:
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(20)
    running = hosts[0].processes()
    connection.close()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert still_there(running) == []
    (failure,) = failures
    assert failure.code == "host-lost"
    assert "closed" in failure.reason, "and not by the host"
    assert not ours()


def test_close_frees_waiters_on_a_frozen_host(hosts: Hosts) -> None:
    connection = connect(endpoint(hosts, "h1"))
    reading, writing = connection.open("exec cat"), connection.open("exec sleep 1000")
    heard: list[bytes] = []
    raised: list[OSError] = []

    def write() -> None:
        try:
            while True:
                writing.write(bytes(1 << 20))
        except OSError as problem:
            raised.append(problem)

    threads = [
        threading.Thread(target=lambda: heard.append(reading.read())),
        threading.Thread(target=write),
    ]
    hosts[0].freeze()
    for thread in threads:
        thread.start()
    connection.close()
    for thread in threads:
        thread.join(timeout=20)
    assert (heard, len(raised)) == ([b""], 1)
    hosts[0].thaw()
    for process in (reading, writing):
        process.close()
    hosts[0].power_cut()
    assert not ours()
