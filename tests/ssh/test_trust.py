"""What ssh itself would not trust: host keys that are revoked, and a configuration that others can write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.errors import HostError, RequestError
from skymagic.ssh.config import SshConfig
from skymagic.ssh.connecting import connect
from skymagic.ssh.hostlist import HostSpec
from tests.lab.hosts import Hosts, loopback


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with loopback(tmp_path_factory.mktemp("hosts")) as found:
        yield found


def connecting(hosts: Hosts, revoked: Path) -> None:
    config = revoked.with_name("config")
    config.write_text(f'Host *\n  RevokedHostKeys "{revoked}"\n{hosts.config.read_text()}')
    connect(SshConfig(config).endpoint(HostSpec("h1", "h1"))).close()


@pytest.mark.needs("sshd")
def test_revoked_host_keys(hosts: Hosts, tmp_path: Path) -> None:
    """Listed with others, in a list that is not there, and in one that cannot be read: refused, as by ssh."""
    known = SshConfig(hosts.config).endpoint(HostSpec("h1", "h1")).known_hosts
    keys = [line.split()[1:3] for file in known if Path(file).exists() for line in Path(file).read_text().splitlines()]
    revoked = tmp_path / "revoked keys"
    revoked.write_text("# none of them\nssh-ed25519 AAAA me@old\n")
    connecting(hosts, revoked)
    revoked.write_text("".join(f"{kind} {key} of an old disk\n" for kind, key in keys))
    with pytest.raises(HostError, match=f"its host key .* is revoked by {re.escape(str(revoked))}"):
        connecting(hosts, revoked)
    revoked.write_bytes(b"SSHKRL\n\0" + bytes(40))
    with pytest.raises(HostError, match="RevokedHostKeys .* cannot be read .*KRL"):
        connecting(hosts, revoked)
    revoked.unlink()
    with pytest.raises(HostError, match="RevokedHostKeys .* cannot be read .*No such file"):
        connecting(hosts, revoked)


@pytest.mark.parametrize("name", ["config", "more"])
@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_configuration_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: int
) -> None:
    """They would choose the ProxyCommand that runs here; what is included counts too."""
    folder = tmp_path / ".ssh"
    folder.mkdir()
    (folder / "config").write_text("Include more\n")
    (folder / "more").write_text("Host h1\n  Hostname 127.0.0.9\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert SshConfig().endpoint(HostSpec("h1", "h1")).hostname == "127.0.0.9"
    (folder / name).chmod(mode)
    with pytest.raises(RequestError, match=f"others may write {re.escape(str(folder / name))}, .* chmod go-w"):
        SshConfig()
