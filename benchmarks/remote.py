"""200 MB to four separate machines over a slow link, and back: against the link itself, and against openssh on a fast one."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, alternate, median, say, timed
from skymagic.content.chunks import digest
from skymagic.content.files.copy import Files
from skymagic.content.files.upload import DataPlane
from skymagic.content.remote.remote_store import RemoteStore
from skymagic.ssh.config import SshConfig
from skymagic.ssh.connecting import connect
from skymagic.ssh.host import HostConnection
from skymagic.ssh.hostlist import HostSpec
from skymagic.wire import processes
from tests.lab.machines import Machines, machines
from tests.lab.nodes import node_of, start

MACHINES = 4
PAYLOAD = 200_000_000
"""Bytes."""
BACK = 10_000_000
"""Bytes that each machine sends back."""
RATE = 100.0
"""Mbit/s of the slow link."""
DELAY = 25.0
"""Its delay, one way, in milliseconds."""
FILES = 1_000_000_000
"""Bytes of files."""
LOOPBACK = 400_000_000
"""Bytes over the fast link."""
STORE = "/dev/shm/skymagic-bench"
CIPHER = "aes128-gcm@openssh.com"
GIVE = f"""
import sys
from skymagic.content.store import NodeStore
pieces = [bytes(100) * ({BACK} // 100) if sys.argv[1] == "soft" else __import__("os").urandom({BACK})]
print(NodeStore("{STORE}").give(pieces, {BACK}))
"""


def figures() -> Iterator[Figure]:
    """The slow link first."""
    with (
        tempfile.TemporaryDirectory() as folder,
        machines(Path(folder) / "slow", MACHINES, rate_mbit=RATE, delay_ms=DELAY) as hosts,
    ):
        yield from slow(hosts)
    with tempfile.TemporaryDirectory() as folder, machines(Path(folder) / "fast", 1) as hosts:
        yield from fast(hosts)


@contextlib.contextmanager
def store(hosts: Machines) -> Iterator[tuple[RemoteStore, list[HostConnection]]]:
    """A store on all machines, with its connections."""
    config = SshConfig(hosts.config)
    connections = [connect(config.endpoint(HostSpec(name, name))) for name in hosts.names]
    server = command("-m", "skymagic.kernels.store.server", STORE)
    nodes = [
        node_of(index, host.name, functools.partial(connection.open, server), host.address)
        for index, (host, connection) in enumerate(zip(hosts, connections, strict=True))
    ]
    made = RemoteStore(nodes, start, say)
    try:
        yield made, connections
    finally:
        made.close()
        for connection in connections:
            connection.close()


def command(*words: str) -> str:
    """A Python process on a machine, whose files are those of this one."""
    root = str(Path(__file__).resolve().parent.parent)
    return shlex.join(["env", f"PYTHONPATH={root}", sys.executable, *words])


def peer(hosts: Machines) -> list[str]:
    """openssh's way to one machine."""
    where = f"{STORE}-peer"
    return [
        "ssh",
        "-F",
        str(hosts.config),
        "-c",
        CIPHER,
        hosts[0].name,
        f"cat > {where} && rm {where}",
    ]


def put(to: RemoteStore, data: bytes) -> None:
    """Send a value as the notebook does, and wait until all machines have it."""
    key = digest([data])
    to.put(key, [data], len(data))
    to.settle()


def slow(hosts: Machines) -> Iterator[Figure]:
    """Bytes and seconds on the slow link."""
    data = os.urandom(PAYLOAD)
    floor = PAYLOAD * 8 / (RATE * 1e6)
    with store(hosts) as (to, _):
        put(to, b"the servers are up")
        say(f"{PAYLOAD / 1e6:.0f} MB to {MACHINES} machines over {RATE:.0f} Mbit/s")
        before = sum(hosts.link.traffic())
        seconds = timed(lambda: put(to, data))
        crossed = sum(hosts.link.traffic()) - before
        name = f"{PAYLOAD / 1e6:.0f} MB to {MACHINES} machines"
        yield Figure(
            f"{name}: bytes on the link", crossed / 1e6, "MB", PAYLOAD / 1e6, "payload", 1.05, True
        )
        yield Figure(f"{name}: time", seconds, "s", floor, "the link's floor", 1.15, True)
        alone = timed(lambda: subprocess.run(peer(hosts), input=data, check=True))
        yield Figure(f"{name}: time", seconds, "s", alone, "ssh 'cat > file' to one", 1.15, True)
        before = sum(hosts.link.traffic())
        put(to, data)
        crossed = sum(hosts.link.traffic()) - before
        yield Figure(f"{name}, unchanged: bytes on the link", crossed / 1e3, "KB", limit=100)
        yield from changed(hosts, to)
        yield from files(hosts, to)
        yield from back(hosts, to)
        time.sleep(5)  # for what is worth keeping
    with store(hosts) as (to, _):
        put(to, b"the servers are up")
        before = sum(hosts.link.traffic())
        put(to, data)
        crossed = sum(hosts.link.traffic()) - before
        yield Figure(
            f"{name}, known from an earlier pool: bytes on the link", crossed / 1e3, "KB", limit=100
        )


def changed(hosts: Machines, to: RemoteStore) -> Iterator[Figure]:
    """A large array of which one element is another one now."""
    array = bytearray(os.urandom(LOOPBACK))
    say(f"{LOOPBACK / 1e6:.0f} MB, and again with one element changed")
    put(to, bytes(array))
    array[len(array) // 3] ^= 1
    data = bytes(array)
    before = sum(hosts.link.traffic())
    seconds = timed(lambda: put(to, data))
    crossed = sum(hosts.link.traffic()) - before
    name = f"one element of {LOOPBACK / 1e6:.0f} MB changed, to {MACHINES} machines"
    yield Figure(f"{name}: bytes on the link", crossed / 1e6, "MB", limit=8)
    yield Figure(
        f"{name}: time", seconds, "s", LOOPBACK * 8 / (RATE * 1e6), "the link's floor for all of it"
    )
    to.drop(to.keys())


def files(hosts: Machines, to: RemoteStore) -> Iterator[Figure]:
    """One file, and ten thousand of the same length in all."""
    config = SshConfig(hosts.config)
    connections = [connect(config.endpoint(HostSpec(name, name))) for name in hosts.names]
    nodes = [
        node_of(
            index,
            name,
            functools.partial(
                connection.open, command("-m", processes.TRANSFER_SERVER, "/dev/shm")
            ),
        )
        for index, (name, connection) in enumerate(zip(hosts.names, connections, strict=True))
    ]
    copying = Files(nodes, start, DataPlane(to, lambda node: STORE))
    try:
        for count in (1, 10_000):
            with tempfile.TemporaryDirectory() as folder:
                for number in range(count):
                    (Path(folder) / f"{number}").write_bytes(os.urandom(FILES // count))
                name = f"{FILES / 1e6:.0f} MB in {count} file{'s' * (count > 1)} to {MACHINES} machines"
                say(name)
                for what in (name, f"{name}, unchanged"):
                    before, begun = sum(hosts.link.traffic()), time.perf_counter()
                    copying.put(f"{folder}/", f"skymagic-files-{count}")
                    seconds, crossed = (
                        time.perf_counter() - begun,
                        sum(hosts.link.traffic()) - before,
                    )
                    if what == name:
                        floor = FILES * 8 / (RATE * 1e6)
                        yield Figure(
                            f"{what}: bytes on the link",
                            crossed / 1e6,
                            "MB",
                            FILES / 1e6,
                            "the files",
                            1.05,
                            True,
                        )
                        yield Figure(
                            f"{what}: time", seconds, "s", floor, "the link's floor", 1.15, True
                        )
                    else:
                        yield Figure(f"{what}: bytes on the link", crossed / 1e3, "KB", limit=100)
            for connection in connections:
                connection.run(f"rm -rf /dev/shm/skymagic-files-{count}")
    finally:
        for connection in connections:
            connection.close()


def back(hosts: Machines, to: RemoteStore) -> Iterator[Figure]:
    """Values that come back from all machines."""
    config = SshConfig(hosts.config)
    for kind, limit in (("hard", 1.5), ("soft", 0.5)):
        names = []
        for name in hosts.names:
            connection = connect(config.endpoint(HostSpec(name, name)))
            names.append(connection.run(command("-c", GIVE, kind)).out.split()[-1])
            connection.close()
        begun = time.perf_counter()
        to.prefetch((name, node) for node, name in enumerate(names))
        for node, name in enumerate(names):
            assert len(to.take(name, node)) == BACK
        seconds = time.perf_counter() - begun
        floor = MACHINES * BACK * 8 / (RATE * 1e6)
        words = "noise" if kind == "hard" else "zeros"
        yield Figure(
            f"{BACK / 1e6:.0f} MB of {words} back from each",
            seconds,
            "s",
            floor,
            "the link's floor",
            limit,
            True,
        )


def fast(hosts: Machines) -> Iterator[Figure]:
    """Throughput without a slow link."""
    data = os.urandom(LOOPBACK)

    def theirs() -> float:
        return timed(lambda: subprocess.run(peer(hosts), input=data, check=True))

    with store(hosts) as (to, _):
        put(to, b"the server is up")

        def ours() -> float:
            seconds = timed(lambda: put(to, data))
            to.drop(to.keys())
            return seconds

        say(f"{LOOPBACK / 1e6:.0f} MB to one machine nearby: ours, openssh")
        mine, other = alternate(3, ours, theirs)
        yield Figure(
            f"{LOOPBACK / 1e6:.0f} MB to one machine nearby",
            LOOPBACK / median(mine) / 1e6,
            "MB/s",
            LOOPBACK / median(other) / 1e6,
            "ssh 'cat > file'",
            0.7,
            True,
            True,
        )
