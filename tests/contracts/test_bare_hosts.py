"""Files to hosts that have a Python and nothing else: one upload, whatever their number, and nothing stays."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest

from skymagic.bootstrap.install import COPIED
from skymagic.content.remote.bare_hosts import BareHost, BareHosts, archive
from skymagic.errors import PoolError
from skymagic.ssh.config import SshConfig
from skymagic.ssh.connecting import connect
from skymagic.ssh.hostlist import HostSpec
from skymagic.wire import store as protocol
from skymagic.wire import tls
from tests.contracts.stores import MB
from tests.lab.machines import Machines, machines

pytestmark = pytest.mark.needs("sshd", "namespaces")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("bare") / "hosts", 4) as made:
        yield made


@contextmanager
def bare(
    hosts: Machines, tmp_path: Path, pythons: Mapping[int, str] = MappingProxyType({})
) -> Iterator[tuple[BareHosts, list[str]]]:
    """Stores on all machines, and what the user is told."""
    connections, said = [], list[str]()
    try:
        for host in hosts:
            endpoint = SshConfig(hosts.config).endpoint(HostSpec(host.name, host.name))
            connections.append(connect(endpoint))
        made = [
            BareHost(
                host.name,
                connection,
                pythons.get(number, sys.executable),
                str(tmp_path / host.name),
            )
            for number, (host, connection) in enumerate(zip(hosts, connections, strict=True))
        ]
        with BareHosts(made, said.append) as stores:
            yield stores, said
    finally:
        for connection in connections:
            connection.close()


def test_a_file_is_sent_once_to_all_hosts(hosts: Machines, tmp_path: Path) -> None:
    source = tmp_path / "a.whl"
    source.write_bytes(os.urandom(20 * MB))
    key = hashlib.sha256(source.read_bytes()).hexdigest()
    with bare(hosts, tmp_path) as (stores, said):
        before = hosts.link.traffic()[0]
        paths = stores.send(source)
        assert hosts.link.traffic()[0] - before < 1.15 * 20 * MB
        for host in hosts:
            (place,) = (path for path in paths if Path(path).is_file() and host.name in path)
            assert Path(place).read_bytes() == source.read_bytes()
            assert place.endswith(f"-{key}")
        before = hosts.link.traffic()[0]
        assert stores.send(source) == paths
        assert hosts.link.traffic()[0] - before < 100_000
        assert said == []
    assert [list((tmp_path / host.name).rglob("*")) for host in hosts] == [
        [tmp_path / host.name / "incoming"] for host in hosts
    ]


def test_an_empty_file(hosts: Machines, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with bare(hosts, tmp_path) as (stores, _):
        places = [path for path in stores.send(tmp_path / "empty") if Path(path).is_file()]
        assert [Path(path).stat().st_size for path in places] == [0] * len(hosts)


def test_a_python_that_does_not_run_it_is_named(hosts: Machines, tmp_path: Path) -> None:
    with (
        bare(hosts, tmp_path, {0: "/bin/false"}) as (stores, _),
        pytest.raises(PoolError, match="h1"),
    ):
        stores.send(Path(__file__))


def test_the_server_needs_no_package(tmp_path: Path) -> None:
    """Also not skymagic itself."""
    (tmp_path / "server.pyz").write_bytes(archive())
    settings = protocol.Settings(protocol.ANY_PRIVATE, tls.certificate(), 1.0, protocol.SHA256)
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "server.pyz", str(tmp_path / "store")],
        cwd=tmp_path,
        input=protocol.encode(settings),
        capture_output=True,
        check=True,
    )
    (ready,) = protocol.decoder(noise=True).feed(ended.stdout)
    addresses = dict(ready.listening)
    assert "127.0.0.1" in addresses
    assert all(ipaddress.ip_address(each).is_private for each in addresses)


def test_folders_of_the_first_host_go_to_the_others(hosts: Machines, tmp_path: Path) -> None:
    """The notebook sends none of it. Programs stay programs, and small files stay as they are."""
    first = tmp_path / hosts[0].name
    files = {
        "wheels/e/large.whl": os.urandom(9 * MB),
        "wheels/e/equal.whl": b"",
        "wheels/e/uv": os.urandom(2 * MB),
        "wheels/e/pins.txt": b"torch==2",
        "code/c/a module.py": b"code",
        "code/c/inner/module.py": b"more code",
    }
    files["wheels/e/equal.whl"] = files["wheels/e/large.whl"]
    for name, data in files.items():
        (first / name).parent.mkdir(parents=True, exist_ok=True)
        (first / name).write_bytes(data)
    (first / "wheels/e/uv").chmod(0o700)
    with bare(hosts, tmp_path) as (stores, said):
        before = hosts.link.traffic()[0]
        names = stores.share(["wheels/e", "code/c"])
        assert hosts.link.traffic()[0] - before < 1_000_000
        assert (names[0], [bool(name) for name in names[1:]]) == ("", [True] * 3)
        stores.store.close()  # the copies stay
        for host, name in list(zip(hosts, names, strict=True))[1:]:
            copies = tmp_path / host.name / "incoming" / name / COPIED
            assert {path: (copies / path).read_bytes() for path in files} == files
            assert (copies / "wheels/e/uv").stat().st_mode & 0o777 == 0o700
        assert said == []


def test_a_host_without_room_does_not_hold_up_others(hosts: Machines, tmp_path: Path) -> None:
    first = tmp_path / hosts[0].name / "wheels"
    first.mkdir(parents=True)
    (first / "large.whl").write_bytes(os.urandom(20 * MB))
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/sh\nulimit -f 8000\nexec {sys.executable} "$@"\n')
    limited.chmod(0o700)
    with bare(hosts, tmp_path, {2: str(limited)}) as (stores, _):
        names = stores.share(["wheels"])
        assert [bool(name) for name in names] == [False, True, False, True]


def test_a_host_without_python_does_not_hold_up_others(hosts: Machines, tmp_path: Path) -> None:
    first = tmp_path / hosts[0].name / "wheels"
    first.mkdir(parents=True)
    (first / "large.whl").write_bytes(os.urandom(2 * MB))
    with bare(hosts, tmp_path, {2: "/bin/false"}) as (stores, _):
        assert [bool(name) for name in stores.share(["wheels"])] == [False, True, False, True]
