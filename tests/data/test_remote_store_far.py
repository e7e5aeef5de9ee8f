"""Values to separate machines over SSH: what crosses the client's link, and a link, a cable and a machine that fail."""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skymagic.content.remote.remote_store import RemoteStore
from skymagic.errors import PoolError
from skymagic.ssh.config import SshConfig
from skymagic.ssh.connecting import connect
from skymagic.ssh.host import HostConnection
from skymagic.ssh.hostlist import HostSpec
from skymagic.wire.codec import Transport
from tests.contracts.stores import MB
from tests.lab.machines import Machines, machines
from tests.lab.nodes import node_of, start
from tests.lab.raising import raises
from tests.lab.waiting import at

pytestmark = pytest.mark.needs("sshd", "namespaces")

STORE = "/dev/shm/skymagic-store"
ROOT = str(Path(__file__).resolve().parents[2])
SILENCE = 4.0  # seconds after which a server is given up; a cut lasts longer
CUT = 6.0
DEAD = 3
"""Seconds after which a peer that does not answer is dead, and for which it is dialled."""
LONG_CUT = 12.0
"""A connection's keepalive has failed by then, and another one too."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("far") / "hosts", 3, rate_mbit=100, delay_ms=10) as made:
        yield made


@pytest.fixture
def peers_are_dead_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymagic.ssh.dial.DEAD_PEER_TIMEOUT", DEAD)


class Pool:
    """A store on all machines; a machine is connected to again when its connection is dead."""

    def __init__(self, hosts: Machines, **options: float) -> None:
        self.hosts = hosts
        self.connections: dict[str, HostConnection] = {}
        self.said: list[str] = []
        nodes = [
            node_of(n, host.name, self._open(host.name), host.address)
            for n, host in enumerate(hosts)
        ]
        self.store = RemoteStore(nodes, start, self.said.append, **options)

    def connection(self, name: str) -> HostConnection:
        """A connection that is not dead."""
        known = self.connections.get(name)
        if known is None or not known.alive:
            known = connect(
                replace(
                    SshConfig(self.hosts.config).endpoint(HostSpec(name, name)), timeout=float(DEAD)
                )
            )
            self.connections[name] = known
        return known

    def _open(self, name: str) -> Callable[[], Transport]:
        words = [
            "env",
            f"PYTHONPATH={ROOT}",
            sys.executable,
            "-m",
            "skymagic.kernels.store.server",
            STORE,
        ]
        return lambda: self.connection(name).open(shlex.join(words))

    def put(self, data: bytes, progress: Callable[[int], None] | None = None) -> str:
        """Put a value, and wait until it is everywhere."""
        key = self.store.put(None, [data], len(data), progress)
        self.store.settle()
        return key

    def there(self) -> list[list[str]]:
        """Names of the complete files on each machine."""
        return [self.connection(host.name).run(f"ls {STORE}").out.split() for host in self.hosts]

    def close(self) -> None:
        """End it."""
        self.store.close()
        for connection in self.connections.values():
            connection.close()


@pytest.fixture
def pool(hosts: Machines) -> Iterator[Pool]:
    made = Pool(hosts, silence_timeout=SILENCE)
    yield made
    made.close()


def test_the_link_is_cut_for_longer_than_a_silence(hosts: Machines, pool: Pool) -> None:
    pool.put(b"all are up")
    data = os.urandom(40 * MB)
    mended = threading.Timer(CUT, hosts.link.mend)

    def cut() -> None:
        hosts.link.cut()
        mended.start()

    try:
        key = pool.put(data, at(10 * MB, cut))
    finally:
        mended.join()
    assert all(pool.store.name(key) in names for names in pool.there())


@pytest.mark.usefixtures("peers_are_dead_soon")
def test_a_machine_loses_its_cable_while_it_follows(hosts: Machines, pool: Pool) -> None:
    pool.put(b"all are up")
    mended = threading.Timer(LONG_CUT, hosts[1].mend)

    def cut() -> None:
        hosts[1].cut()
        mended.start()

    try:
        key = pool.put(os.urandom(20 * MB), at(5 * MB, cut))
    finally:
        mended.join()
    assert all(pool.store.name(key) in names for names in pool.there())
    assert any(sentence.startswith("h2 ") for sentence in pool.said)


@pytest.mark.usefixtures("peers_are_dead_soon")
def test_a_machine_dies(hosts: Machines) -> None:
    pool = Pool(hosts, retry_timeout=2.0, silence_timeout=SILENCE)
    try:
        pool.put(b"all are up")
        with raises(PoolError, "node-unreached", r"node 2 \(h3\)"):
            pool.put(os.urandom(20 * MB), at(5 * MB, hosts[2].power_cut))
        pool.store.lose(2)
        pool.store.settle()
        key = pool.put(os.urandom(2 * MB))
        for name in ("h1", "h2"):
            assert pool.store.name(key) in pool.connection(name).run(f"ls {STORE}").out.split()
    finally:
        pool.close()
        hosts[2].reboot()
