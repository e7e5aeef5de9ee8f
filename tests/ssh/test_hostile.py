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


def forced(command: str) -> list[str]:
    """As if the login shell did this, whatever it is asked for."""
    return [f"ForceCommand {command}"]


@pytest.mark.parametrize(
    ("options", "files"),
    [
        ([], {}),
        (
            ["Banner {folder}/banner", "PrintMotd yes"],
            {"../../banner": "Authorised use only!\n" * 20},
        ),
        (
            forced('. {folder}/noise; exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"'),
            {"../../noise": NOISE, ".bashrc": NOISE},
        ),
        pytest.param(
            [login_shell("fish")],
            {".config/fish/config.fish": NOISE},
            marks=pytest.mark.needs("fish"),
        ),
        pytest.param(
            [login_shell("csh")],
            {".cshrc": "echo welcome; set path = ($path /nowhere)\n"},
            marks=pytest.mark.needs("csh"),
        ),
    ],
    ids=["a home with spaces", "a banner before the login", "a profile that prints", "fish", "csh"],
)
def test_everything_works(options: list[str], files: dict[str, str], tmp_path: Path) -> None:
    lines = [line.replace("{folder}", f"{tmp_path}/hosts") for line in options]
    with loopback(
        tmp_path / "hosts", options=lines, home="home" if options else "my 'own' $HOME"
    ) as hosts:
        for name, text in files.items():
            path = hosts[0].home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        everything_works(hosts)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("exec yes", "h1: the login shell printed more than .* before it ran anything"),
        ("echo 'This account is not available.'; exit 1", "h1: the login shell ended before it ran anything:\nThis account is not available.$"),
        ("internal-sftp", "h1: the login shell ended before it ran anything"),
        ("exec sleep 1000", "h1: the login shell ran nothing within 2 s\n  does a profile wait"),
    ],
    ids=["prints without end", "refuses", "speaks another language", "waits"],
)  # fmt: skip
def test_a_login_shell_that_runs_nothing(
    command: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in command:
        monkeypatch.setattr(process, "START_TIMEOUT", 2.0)
    with loopback(tmp_path / "hosts", options=forced(command)) as hosts:
        connection = connected(hosts)
        with pytest.raises(HostError, match=words):
            connection.run("true")
        connection.close()
        hosts[0].power_cut()
