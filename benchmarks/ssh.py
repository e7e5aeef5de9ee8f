"""Connections over SSH beside openssh's own, to a real sshd on a loopback address."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, alternate, median, timed
from skymagic.ssh.config import SshConfig
from skymagic.ssh.connecting import connect
from skymagic.ssh.host import HostConnection
from skymagic.ssh.hostlist import HostSpec
from tests.lab.hosts import Hosts, loopback

SIZE = 400 << 20
PIECE = 1 << 20
ROUNDS = 7
CIPHER = "aes128-gcm@openssh.com"
MEMORY = Path("/dev/shm")


def figures() -> Iterator[Figure]:
    """Bulk data in both directions, and how long it takes to have a connection."""
    place = MEMORY if MEMORY.is_dir() else None  # a disk would be what is measured
    with (
        tempfile.TemporaryDirectory(dir=place, prefix="bench-") as name,
        loopback(Path(name) / "hosts") as hosts,
    ):
        data = Path(name) / "data"
        data.write_bytes(bytes(range(256)) * (SIZE >> 8))
        connection = _connected(hosts)
        try:
            yield _rates("to a host", *alternate(ROUNDS, *_up(connection, hosts, data)))
            yield _rates("from a host", *alternate(ROUNDS, *_down(connection, hosts, data)))
        finally:
            connection.close()
        ours, theirs = alternate(
            ROUNDS,
            lambda: timed(lambda: _connected(hosts).close()),
            lambda: timed(lambda: _openssh(hosts, "true")),
        )
        yield Figure("connect", median(ours), "s", median(theirs), "ssh")


def _rates(name: str, ours: list[float], theirs: list[float]) -> Figure:
    rate = SIZE / 1e6
    return Figure(
        f"{SIZE >> 20} MB {name}", rate / median(ours), "MB/s", rate / median(theirs), "ssh",
        limit=0.7, relative=True, least=True,
    )  # fmt: skip


def _connected(hosts: Hosts) -> HostConnection:
    return connect(SshConfig(hosts.config).endpoint(HostSpec("h1", "h1")))


def _openssh(hosts: Hosts, command: str, **streams: object) -> None:
    words = ["ssh", "-F", str(hosts.config), "-c", CIPHER, "h1", command]
    subprocess.run(words, check=True, **streams)  # type: ignore[call-overload]


def _up(connection: HostConnection, hosts: Hosts, data: Path):
    view = memoryview(data.read_bytes())

    def ours() -> float:
        pieces = (view[begin : begin + PIECE] for begin in range(0, SIZE, PIECE))
        return timed(lambda: connection.upload("there", pieces, SIZE))

    def theirs() -> float:
        with data.open("rb") as source:
            return timed(lambda: _openssh(hosts, f"cat > '{hosts[0].home}/there'", stdin=source))

    return ours, theirs


def _down(connection: HostConnection, hosts: Hosts, data: Path):
    def read() -> None:
        process = connection.open(f"exec cat '{data}'")
        size = 0
        while piece := process.read():
            size += len(piece)
        process.close()
        assert size == SIZE

    def theirs() -> float:
        return timed(lambda: _openssh(hosts, f"cat '{data}'", stdout=subprocess.DEVNULL))

    return lambda: timed(read), theirs
