"""Settings, hashed names and fingerprints are those of OpenSSH."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from skymagic.ssh.config import Endpoint, SshConfig
from skymagic.ssh.hostlist import expand
from skymagic.ssh.keys import KnownHosts, fingerprint, known_hosts_name
from tests.lab.hosts import keygen

# ------------------------------------------------------------------------------------------------------ settings


def settle(path: Path, text: str, word: str) -> Endpoint:
    path.mkdir(exist_ok=True)
    (path / "config").write_text(text)
    return SshConfig(path / "config").endpoint(expand([word])[0])


CONFIG = """
User=everyone
Include more/*.conf
Host gpu*
  HostName %h.lab.example
  Port 2200
  IdentityFile ~/.ssh/lab_%r
  IdentityFile "~/.ssh/with space"
Host gpu1 !gpu2
  User late
Match host *.lab.example user everyone
  ConnectTimeout 7
  ServerAliveInterval 3
Host jumped
  ProxyJump me@gate:2022
Host *
  IdentityFile ~/.ssh/all
  IdentitiesOnly yes
"""


@pytest.mark.needs("sshd")
@pytest.mark.parametrize("word", ["gpu1", "other", "jumped", "inc1"])
def test_settings_are_those_of_openssh(tmp_path: Path, word: str) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.conf").write_text("Host inc1\n  HostName 10.9.9.9\n  User included\n")
    text = CONFIG.replace("more/", f"{tmp_path}/more/")
    found = settle(tmp_path, text, word)
    shown = subprocess.run(
        ["ssh", "-G", "-F", str(tmp_path / "config"), word],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = [line.partition(" ")[::2] for line in shown.splitlines()]
    wanted = dict(lines)
    assert found.hostname == wanted["hostname"]
    assert str(found.port) == wanted["port"]
    assert found.user == wanted["user"]
    expanded = [
        value.replace("~", str(Path.home()), 1).replace("%r", found.user)
        for key, value in lines
        if key == "identityfile"
    ]
    assert list(found.identities) == expanded
    assert found.identities_only is (wanted["identitiesonly"] == "yes")
    assert f"{found.timeout:.0f}" == wanted["connecttimeout"].replace("none", "15")
    assert [jump.label for jump in found.proxy_jump] == (
        [wanted["proxyjump"]] if "proxyjump" in wanted else []
    )


@pytest.mark.needs("sshd")
def test_hashed_names_and_fingerprints_are_those_of_openssh(tmp_path: Path) -> None:
    public = Path(f"{keygen(tmp_path / 'key')}.pub")
    kind, key = public.read_text().split()[:2]
    (tmp_path / "known").write_text(f"[gpu1]:2222 {kind} {key}\ngpu2 {kind} {key}\n")
    subprocess.run(
        ["ssh-keygen", "-q", "-H", "-f", str(tmp_path / "known")], check=True, capture_output=True
    )
    assert "gpu" not in (tmp_path / "known").read_text()
    known = KnownHosts([str(tmp_path / "known")])
    assert known.check((known_hosts_name("GPU1", 2222),), kind, key).state == "known"
    assert known.check((known_hosts_name("gpu2", 22),), kind, key).state == "known"
    assert known.check((known_hosts_name("gpu1", 22),), kind, key).state == "unknown"
    shown = subprocess.run(
        ["ssh-keygen", "-lf", str(public)], capture_output=True, text=True, check=True
    ).stdout
    import base64

    assert shown.split()[1] == fingerprint(base64.b64decode(key))
