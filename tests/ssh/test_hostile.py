"""Hosts that are not as one would like them: banners, profiles that print, other login shells, spaces in HOME."""

from __future__ import annotations

from pathlib import Path

import pytest

from skymagic.errors import HostError
from skymagic.ssh import process
from skymagic.ssh.config import SshConfig
from skymagic.ssh.connecting import connect
from skymagic.ssh.host import HostConnection
from skymagic.ssh.hostlist import HostSpec
from tests.lab.hosts import Hosts, loopback

pytestmark = pytest.mark.needs("sshd")

NOISE = "echo welcome to the lab; echo 'no message of the day' >&2; printf 'an unfinished line'\n"


def connected(hosts: Hosts) -> HostConnection:
    return connect(SshConfig(hosts.config).endpoint(HostSpec("h1", "h1")))


def login_shell(program: str) -> str:
    """As if `program` were the user's login shell: sshd gives it the command as one word, after -c."""
    return f'ForceCommand exec {program} -c "$SSH_ORIGINAL_COMMAND"'


def everything_works(hosts: Hosts) -> None:
    """Scripts, processes and files, byte for byte; no process stays."""
    connection = connected(hosts)
    try:
        done = connection.run("pwd; printf '%s\\n' \"$HOME\" 'a\\b!' ; echo problem >&2; exit 7")
        home = hosts[0].home
        assert (done.status, done.out, done.err) == (7, f"{home}\n{home}\na\\b!\n", "problem\n")
        cat = connection.open("exec cat")
        cat.write(b"\x00\xff\n")
        assert cat.read() == b"\x00\xff\n"
        cat.close()
        assert cat.status() == 0
        connection.upload("a file", [memoryview(b"content")], 7)
        assert (home / "a file").read_bytes() == b"content"
    finally:
        connection.close()


def test_a_home_with_spaces(tmp_path: Path) -> None:
    with loopback(tmp_path / "hosts", home="my 'own' $HOME") as hosts:
        everything_works(hosts)


def test_a_banner_before_the_login(tmp_path: Path) -> None:
    (tmp_path / "banner").write_text("Authorised use only!\n" * 20)
    with loopback(tmp_path / "hosts", options=[f"Banner {tmp_path / 'banner'}", "PrintMotd yes"]) as hosts:
        everything_works(hosts)


def test_a_profile_that_prints(tmp_path: Path) -> None:
    noise = tmp_path / "noise"
    noise.write_text(NOISE)
    options = [f'ForceCommand . {noise}; exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"']
    with loopback(tmp_path / "hosts", options=options) as hosts:
        (hosts[0].home / ".bashrc").write_text(NOISE)
        everything_works(hosts)


def test_a_profile_that_prints_without_end(tmp_path: Path) -> None:
    with loopback(tmp_path / "hosts", options=["ForceCommand exec yes"]) as hosts:
        connection = connected(hosts)
        with pytest.raises(HostError, match=r"h1: the login shell printed more than .* before it ran anything"):
            connection.run("true")
        connection.close()


@pytest.mark.needs("fish")
def test_fish(tmp_path: Path) -> None:
    with loopback(tmp_path / "hosts", options=[login_shell("fish")]) as hosts:
        config = hosts[0].home / ".config" / "fish" / "config.fish"
        config.parent.mkdir(parents=True)
        config.write_text(NOISE)
        everything_works(hosts)


@pytest.mark.needs("csh")
def test_csh(tmp_path: Path) -> None:
    with loopback(tmp_path / "hosts", options=[login_shell("csh")]) as hosts:
        (hosts[0].home / ".cshrc").write_text("echo welcome; set path = ($path /nowhere)\n")
        everything_works(hosts)


def test_a_login_shell_that_refuses(tmp_path: Path) -> None:
    options = ["ForceCommand echo 'This account is not available.'; exit 1"]
    with loopback(tmp_path / "hosts", options=options) as hosts:
        connection = connected(hosts)
        with pytest.raises(HostError) as failed:
            connection.run("true")
        assert str(failed.value) == (
            "h1: the login shell ended before it ran anything:\nThis account is not available."
        )
        connection.close()


def test_a_forced_command_that_speaks_another_language(tmp_path: Path) -> None:
    with loopback(tmp_path / "hosts", options=["ForceCommand internal-sftp"]) as hosts:
        connection = connected(hosts)
        with pytest.raises(HostError, match=r"h1: the login shell ended before it ran anything"):
            connection.run("true")
        connection.close()


def test_a_profile_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "START_TIMEOUT", 1.0)
    with loopback(tmp_path / "hosts", options=["ForceCommand exec sleep 1000"]) as hosts:
        connection = connected(hosts)
        with pytest.raises(HostError, match="h1: the login shell ran nothing within 1 s\n  does a profile wait"):
            connection.run("true")
        connection.close()
        hosts[0].power_cut()
