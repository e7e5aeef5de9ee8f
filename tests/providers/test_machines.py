"""The separate machines that other tests use are separate, and can suffer what machines suffer."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.ssh.config import SshConfig
from skymagic.ssh.connecting import connect, connect_all
from skymagic.ssh.host import HostConnection
from skymagic.ssh.hostlist import HostSpec
from tests.lab.hosts import Hosts
from tests.lab.machines import Machines, machines

pytestmark = pytest.mark.needs("sshd", "namespaces")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("hosts"), 2) as made:
        yield made


def connected(hosts: Hosts, name: str) -> HostConnection:
    return connect(SshConfig(hosts.config).endpoint(HostSpec(name, name)))


def test_machines_are_separate(hosts: Machines) -> None:
    endpoints = [SshConfig(hosts.config).endpoint(HostSpec(name, name)) for name in hosts.names]
    first, second = connect_all(endpoints)
    try:
        assert [c.run("hostname; hostname -i; pwd").out.split() for c in (first, second)] == [
            ["h1", "127.0.1.1", str(hosts[0].home)],
            ["h2", "127.0.1.1", str(hosts[1].home)],
        ]
        first.run("touch /dev/shm/skymagic-here")
        assert second.run("ls /dev/shm").out == ""
        assert not Path("/dev/shm/skymagic-here").exists()
        assert int(first.run("ls -d /proc/[0-9]* | wc -l").out) < 12
        reach = second.run("timeout 5 bash -c 'read line </dev/tcp/10.77.0.1/22; echo $line'").out
        assert reach.startswith("SSH-2.0")
    finally:
        first.close()
        second.close()


def test_lab_hosts_cannot_reach_the_outside(hosts: Machines) -> None:
    with pytest.raises(OSError, match="unreachable"):
        socket.create_connection(("10.78.0.1", 80), timeout=5)


def test_the_clients_address_changes(hosts: Machines) -> None:
    connection = connected(hosts, "h1")
    hosts.link.move()
    other = connected(hosts, "h1")
    assert other.run("echo $SSH_CONNECTION").out.split()[0] == hosts.link.address
    other.close()
    connection.close()
    hosts[0].kill_sessions()


def test_a_slow_wire(tmp_path: Path) -> None:
    with machines(tmp_path / "hosts", 1, delay_ms=40) as hosts:
        connection = connected(hosts, "h1")
        process = connection.open("exec cat")
        begun = time.monotonic()
        process.write(b"x")
        process.read()
        assert time.monotonic() - begun >= 0.08
        hosts.link.change(delay_ms=0, rate_mbit=80)
        before = hosts.link.traffic()[0]
        begun = time.monotonic()
        connection.upload("data", [memoryview(bytes(2_000_000))], 2_000_000)
        assert time.monotonic() - begun >= 0.19
        assert 2_000_000 < hosts.link.traffic()[0] - before < 2_200_000
        process.close()
        connection.close()
