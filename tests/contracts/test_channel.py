"""A channel: a byte stream to a shell on a node, whatever carries it."""

from __future__ import annotations

import functools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from skymagic.ssh.host import HostConnection
from tests.contracts import carriers
from tests.contracts.carriers import Carrier
from tests.lab.ending import cmdline, with_variable
from tests.lab.hosts import still_there

CARRIERS = [
    pytest.param(carriers.local, id="local"),
    pytest.param(
        functools.partial(carriers.ssh, client="paramiko"),
        marks=pytest.mark.needs("sshd"),
        id="paramiko",
    ),
    pytest.param(
        functools.partial(carriers.ssh, client="openssh"),
        marks=pytest.mark.needs("sshd"),
        id="openssh",
    ),
    pytest.param(carriers.slurm, marks=pytest.mark.needs("slurm", "root"), id="slurm"),
    pytest.param(
        carriers.kubernetes, marks=pytest.mark.needs("namespaces", "root"), id="kubernetes"
    ),
    pytest.param(carriers.ray, marks=pytest.mark.needs("ray"), id="ray"),
]
CUT_SECONDS = 15.0
"""Seconds after which both ends of a connection that was cut have noticed."""
SETTLED_SECONDS = 0.5
"""Seconds without progress after which a transfer counts as blocked."""
MOST_BUFFERED = 32 << 20
"""Most bytes that a channel may take while nobody reads at its other end."""
SENT = 40 << 20
"""More bytes than that."""


@pytest.fixture(scope="module", params=CARRIERS)
def carrier(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Carrier]:
    maker: Callable[[Path], AbstractContextManager[Carrier]] = request.param
    with maker(tmp_path_factory.mktemp("carrier")) as made:
        yield made


@pytest.fixture
def connection(carrier: Carrier) -> Iterator[HostConnection]:
    made = carrier.connect()
    yield made
    made.close()


@pytest.fixture
def mark() -> str:
    """Environment variable of the shells of this test, wherever they run on this machine."""
    return f"CONTRACT_{secrets.token_hex(8)}"


def running(mark: str) -> list[psutil.Process]:
    return with_variable(mark, "1")


def marked(mark: str, script: str) -> str:
    """Run the script in a shell that is known by its environment."""
    return f"export {mark}=1; exec /bin/sh -c '{script}'"


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def settled(count: Callable[[], int]) -> int:
    """Wait until a count has stopped growing, and return it."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < SETTLED_SECONDS:
        if (now := count()) != last:
            last, since = now, time.monotonic()
        time.sleep(0.02)  # what blocks tells nobody
    return last


def test_every_byte_arrives_in_order_and_unchanged(connection: HostConnection) -> None:
    shell = connection.open("exec cat")
    for piece in (bytes(range(256)), b"\r\n\x04\x03\x1c\x00\xff~.\n", os.urandom(300_000)):
        shell.write(piece)
        received = b""
        while len(received) < len(piece):
            received += shell.read()
        assert received == piece
    shell.close()
    assert shell.status() == 0


def test_output_stays_open_after_the_input_ends(connection: HostConnection) -> None:
    shell = connection.open("wc -c; echo after; exit 3")
    shell.write(bytes(1000))
    shell.end_input()
    shell.end_input()
    assert b"".join(iter(shell.read, b"")).split() == [b"1000", b"after"]
    assert shell.finish(CUT_SECONDS) == 3
    shell.close()


def test_the_exit_status_is_the_shells(connection: HostConnection) -> None:
    assert connection.run("true").status == 0
    assert connection.run("exit 200").status == 200
    # a container's runtime reports a signal as a shell does
    assert connection.run("kill -9 $$").status in (-1, 128 + 9)


def test_errors_are_apart_from_output(connection: HostConnection) -> None:
    result = connection.run(
        "echo out; echo problem >&2; head -c 1500000 /dev/zero >&2; head -c 5000000 /dev/zero; "
        "echo end >&2"
    )
    assert (len(result.out), result.out[:4]) == (5_000_004, "out\n")
    assert result.err.endswith("end\n")
    assert connection.run("echo problem >&2").err == "problem\n"


def test_large_transfers_both_ways_do_not_block_each_other(
    carrier: Carrier, connection: HostConnection
) -> None:
    sent = os.urandom(1 << 20) * (carrier.large >> 20)
    shell = connection.open("exec cat")

    def write() -> None:
        shell.write(sent)
        shell.end_input()

    writing = in_background(write)
    received = b"".join(iter(shell.read, b""))
    writing.join()
    assert received == sent
    assert shell.finish(CUT_SECONDS) == 0
    shell.close()


def test_a_writer_waits_for_a_shell_that_does_not_read(connection: HostConnection) -> None:
    shell = connection.open("while [ ! -e go-$$ ]; do sleep 0.05; done; rm go-$$; exec wc -c")
    counts = [0]

    def write() -> None:
        for _ in range(SENT >> 20):
            shell.write(bytes(1 << 20))
            counts[0] += 1 << 20
        shell.end_input()

    writing = in_background(write)
    assert settled(lambda: counts[0]) < MOST_BUFFERED
    assert connection.run(f"touch go-{shell.pid}").status == 0
    assert int(b"".join(iter(shell.read, b""))) == SENT
    writing.join()
    shell.close()


def test_a_shell_waits_for_a_reader(connection: HostConnection) -> None:
    shell = connection.open(
        f"n=0; while [ $n -lt {SENT >> 20} ]; do "
        "head -c 1048576 /dev/zero; n=$((n+1)); echo $n >n-$$; done; rm n-$$"
    )

    def written() -> int:
        return int(connection.run(f"cat n-{shell.pid}").out or 0) << 20

    assert settled(written) < MOST_BUFFERED
    assert sum(map(len, iter(shell.read, b""))) == SENT
    assert shell.finish(CUT_SECONDS) == 0
    shell.close()


def test_writing_to_a_shell_that_ends_is_a_broken_pipe(connection: HostConnection) -> None:
    shell = connection.open("read line; echo no such module >&2; exit 5")
    shell.write(b"line\n")
    with pytest.raises(BrokenPipeError):
        shell.write(bytes(SENT))
    assert (shell.finish(CUT_SECONDS), shell.complaint()) == (5, "no such module")
    shell.close()


def test_shells_run_concurrently(connection: HostConnection) -> None:
    shells = [connection.open("exec cat") for _ in range(4)]
    for number, shell in enumerate(shells):
        shell.write(b"%d" % number)
    assert [shell.read() for shell in shells] == [b"0", b"1", b"2", b"3"]
    for shell in shells:
        shell.close()


def test_killing_a_shell_leaves_no_process(connection: HostConnection, mark: str) -> None:
    stubborn = 'trap "" HUP PIPE; sleep 1000 & echo up; while :; do sleep 1000; done'
    shell = connection.open(marked(mark, stubborn))
    assert shell.read() == b"up\n"
    assert (begun := running(mark))
    shell.kill()
    shell.kill()
    assert still_there(begun) == []
    assert running(mark) == []


def test_closing_a_connection_ends_readers_and_shells(carrier: Carrier, mark: str) -> None:
    connection = carrier.connect()
    shell = connection.open(marked(mark, "echo up; cat"))
    assert shell.read() == b"up\n"
    begun = running(mark)
    received: list[bytes] = []
    reading = in_background(lambda: received.append(shell.read()))
    connection.close()
    connection.close()
    reading.join(CUT_SECONDS)
    assert received == [b""]
    with pytest.raises(OSError):
        shell.write(bytes(MOST_BUFFERED))
    shell.close()
    assert still_there(begun, CUT_SECONDS) == []


@pytest.mark.parametrize("carrier", CARRIERS[1:], indirect=True)
def test_both_ends_notice_a_cut(carrier: Carrier, connection: HostConnection, mark: str) -> None:
    assert carrier.cut is not None
    shell = connection.open(marked(mark, "echo up; cat; exit 7"))
    assert shell.read() == b"up\n"
    begun = running(mark)
    received: list[bytes] = []
    reading = in_background(lambda: received.append(shell.read()))
    carrier.cut()
    reading.join(CUT_SECONDS)
    assert received == [b""]
    assert shell.finish(CUT_SECONDS) == -1
    with pytest.raises(OSError):
        shell.write(bytes(MOST_BUFFERED))
    shell.close()
    assert still_there(begun, CUT_SECONDS) == []
    connection.close()
    again = carrier.connect()
    assert again.run("echo again").out == "again\n"
    again.close()


def test_shell_input_is_on_no_command_line(connection: HostConnection) -> None:
    secret = secrets.token_hex(16)
    shell = connection.open(f"known={secret}; echo up; read line; exec cat")
    assert shell.read() == b"up\n"
    shell.write(f"{secret}\n".encode())
    shell.write(b"read")
    assert shell.read() == b"read"
    assert [
        words for one in psutil.process_iter() if secret in " ".join(words := cmdline(one))
    ] == []
    shell.close()
