"""OpenSSH's own client: masters that are opened, found and lost, what it asks and who answers, and what paramiko leaves to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from skymagic.errors import HostError, RequestError
from skymagic.ssh import openssh
from skymagic.ssh.config import endpoints
from skymagic.ssh.connecting import SSHConnection, connect, connect_all
from skymagic.ssh.dial import Cancellation
from skymagic.ssh.openssh import OpenSSHConnection
from tests.lab.ending import cmdline
from tests.lab.hosts import Hosts, codes, keygen, lent, loopback, masters, still_there
from tests.lab.raising import raises

pytestmark = pytest.mark.needs("sshd")


@pytest.fixture(scope="module")
def module_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with loopback(tmp_path_factory.mktemp("hosts"), 1) as made:
        yield made


@pytest.fixture
def hosts(module_hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    with lent(module_hosts, tmp_path) as made, known(made, monkeypatch):
        yield made


@contextmanager
def known(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, *lines: str) -> Iterator[None]:
    """This process as a client that knows the hosts, with these lines before all others."""
    with masters(hosts, *lines) as env:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        yield
        while OPEN:
            OPEN.pop().close()


OPEN: list[OpenSSHConnection | SSHConnection] = []
"""Connections of the test that runs."""


def asked_for(
    host: str = "h1", client: str = "openssh", ask: openssh.Ask | None = None
) -> OpenSSHConnection | SSHConnection:
    (endpoint,) = endpoints([host], client)
    made = connect(endpoint, ask)
    assert isinstance(made, OpenSSHConnection | SSHConnection)
    OPEN.append(made)
    return made


def processes(hosts: Hosts) -> list[psutil.Process]:
    """OpenSSH's clients that this test has started."""
    mine = os.environ["XDG_RUNTIME_DIR"]
    return [
        one
        for one in psutil.process_iter()
        if mine in " ".join(cmdline(one)) and cmdline(one)[0] == "ssh"
    ]


def prepend(*lines: str) -> None:
    """Put lines before the user's configuration."""
    config = Path.home() / ".ssh" / "config"
    config.write_text("".join(f"{line}\n" for line in lines) + config.read_text())


# ------------------------------------------------------------------------------------------------- masters


def test_one_login_serves_all_and_stays(hosts: Hosts) -> None:
    (endpoint,) = endpoints(["h1"], "openssh")
    made = connect_all([endpoint] * 3)
    made.append(asked_for())
    assert [one.run("echo on; exit 255").status for one in made] == [-1] * 4
    for one in made:
        one.close()
    assert asked_for().run("echo again").out == "again\n"
    assert len([line for line in hosts[0].log if "Accepted publickey" in line]) == 1


def test_a_master_that_the_user_has_open(hosts: Hosts) -> None:
    prepend("Host *", "  ControlMaster auto", "  ControlPath ~/cm-%r@%h")
    place = f"{Path.home()}/cm"
    prepend("Host *", f"  ControlPath {place}")
    config = str(Path.home() / ".ssh" / "config")
    subprocess.run(["ssh", "-F", config, "-fNM", "h1"], check=True)
    connection = asked_for()
    assert connection.run("echo on").out == "on\n"
    assert len([line for line in hosts[0].log if "Accepted publickey" in line]) == 1
    # it ends, and says so at once
    subprocess.run(["ssh", "-F", config, "-O", "exit", "h1"], check=True, capture_output=True)
    assert not connection.alive
    with raises(HostError, "host-lost", r"h1: "):
        connection.open("true")
    connection.close()


def test_a_master_that_died_and_left_its_socket(hosts: Hosts) -> None:
    first = asked_for()
    process = first.open("exec cat")
    (master,) = [one for one in processes(hosts) if "-fNM" in cmdline(one)]
    master.kill()
    master.wait(5.0)  # its end of what tells of it is closed by then
    assert process.read() == b""
    assert (process.finish(5.0), first.alive) == (-1, False)
    process.close()
    first.close()
    assert (
        len(list(Path(os.environ["XDG_RUNTIME_DIR"]).glob("skymagic-ssh-*/*"))) == 2
    )  # its socket, and the lock
    assert asked_for().run("echo on").out == "on\n"


def test_a_configuration_that_a_channel_must_not_follow(hosts: Hosts) -> None:
    """Settings for interactive sessions, and those that would apply once per channel."""
    prepend("Host h1", "  RemoteCommand uptime", "  RequestTTY yes", "  LocalForward 1 localhost:1", "  ForwardAgent yes",
            "  PermitLocalCommand yes", f"  LocalCommand touch {hosts.folder}/ran")  # fmt: skip
    prepend(f'Match exec "echo x >> {hosts.folder}/matched"')
    connection = asked_for()
    assert [connection.run("echo on").out for _ in range(3)] == ["on\n"] * 3
    assert not (hosts.folder / "ran").exists()
    assert (
        hosts.folder / "matched"
    ).read_text() == "x\n" * 2  # once to see where a master is, once to open it


def test_no_program(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(hosts.folder))
    with raises(HostError, "openssh-missing", r"--ssh openssh .*\n.*paramiko"):
        asked_for()


def test_a_folder_of_another_user(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(os.environ["XDG_RUNTIME_DIR"]) / f"skymagic-ssh-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o770)
    asked_for().close()
    assert not list(folder.iterdir())
    (other,) = folder.parent.glob(f"{folder.name}-*")
    assert other.stat().st_mode & 0o777 == 0o700
    asked_for().close()
    assert list(folder.parent.glob(f"{folder.name}-*")) == [other]


# ------------------------------------------------------------------------------------------------- the way there


def test_a_changed_host_key(hosts: Hosts) -> None:
    other = Path(f"{keygen(hosts.folder / 'other')}.pub").read_text()
    hosts.known_hosts.write_text(
        f"{hosts.known_hosts.read_text().split()[0]} {' '.join(other.split()[:2])}\n"
    )
    with pytest.raises(
        HostError, match="(?s)REMOTE HOST IDENTIFICATION HAS CHANGED.*Host key verification failed"
    ) as failed:
        asked_for(ask=lambda prompt: "yes")
    assert not processes(hosts)
    assert "ssh -fNM -S " in failed.value.hint


def test_an_unknown_host_key_is_asked_about(hosts: Hosts) -> None:
    hosts.known_hosts.write_text("")
    prepend("Host *", "  StrictHostKeyChecking no")
    with pytest.raises(HostError, match="Host key verification failed"):
        asked_for()
    prompts: list[str] = []

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        return "yes"

    connection = asked_for(ask=ask)
    assert connection.run("echo on").out == "on\n"
    (prompt,) = prompts
    assert "authenticity of host" in prompt
    assert "SHA256:" in prompt
    assert hosts.known_hosts.read_text()


def test_revoked_host_keys(hosts: Hosts) -> None:
    """OpenSSH reads the list: text, binary, or missing, which revokes all keys."""
    revoked = hosts.folder / "revoked keys"
    prepend("Host *", f'  RevokedHostKeys "{revoked}"')
    revoked.write_text("# none\n")
    connection = asked_for(client="auto")
    assert isinstance(connection, OpenSSHConnection)
    subprocess.run(
        ["ssh", "-S", connection.path, "-O", "exit", "h1"], check=True, capture_output=True
    )
    key = Path(f"{hosts[0].hostkey}.pub")
    subprocess.run(["ssh-keygen", "-q", "-k", "-f", str(revoked), str(key)], check=True)
    for _ in range(2):
        with pytest.raises(HostError, match=r"(?s)[Rr]evoked.*Host key verification failed"):
            asked_for(client="auto", ask=lambda prompt: "yes")
        revoked.unlink(missing_ok=True)


PASSES = """\
import array, os, socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
out = socket.socket(fileno=1)
out.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sock.fileno()]))])
"""


def test_a_proxy_that_hands_its_socket_over(hosts: Hosts) -> None:
    """paramiko does not support ProxyUseFdpass, so OpenSSH is chosen."""
    (hosts.folder / "passes").write_text(PASSES)
    prepend(
        "Host h1",
        f"  ProxyCommand {sys.executable} {hosts.folder}/passes %h %p",
        "  ProxyUseFdpass yes",
    )
    with pytest.raises(RequestError, match="what only --ssh openssh follows: proxyusefdpass"):
        endpoints(["h1"], "paramiko")
    connection = asked_for(client="auto")
    assert isinstance(connection, OpenSSHConnection)
    assert connection.run("echo on").out == "on\n"


RELAY = """\
import os, socket, sys, threading
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
threading.Thread(target=lambda: [os.write(1, data) for data in iter(lambda: sock.recv(65536), b"")], daemon=True).start()
for data in iter(lambda: os.read(0, 65536), b""):
    sock.sendall(data)
"""


def test_a_proxy_command(hosts: Hosts) -> None:
    (hosts.folder / "relay").write_text(RELAY)
    prepend("Host h1", f"  ProxyCommand {sys.executable} {hosts.folder}/relay %h %p")
    assert asked_for().run("echo on").out == "on\n"


def test_a_proxy_command_that_fails(hosts: Hosts) -> None:
    prepend("Host h1", "  ProxyCommand echo no way today >&2; exit 3")
    with raises(HostError, "openssh-login", r"Connection closed"):
        asked_for()


@pytest.mark.parametrize(
    "line", ["Match tagged mine", "Match localnetwork 10.0.0.0/8", "Match exec false"]
)
def test_a_match_that_paramiko_would_take_for_everybody(hosts: Hosts, line: str) -> None:
    prepend('Match host "the version"', "  Compression no", "Host *")
    (endpoint,) = endpoints(["h1"])
    assert endpoint.client == "auto"
    prepend(line, "  Port 1", "Host *")
    (endpoint,) = endpoints(["h1"])
    assert endpoint.client == "openssh"


# ------------------------------------------------------------------------------------------------- what it asks


@contextmanager
def asking(
    folder: Path, monkeypatch: pytest.MonkeyPatch, accepted: Sequence[str]
) -> Iterator[Hosts]:
    """A host that wants a key and a one-time code, each of which it takes once."""
    with (
        codes(folder / "codes", accepted) as more,
        loopback(folder / "hosts", 1, **more) as hosts,
        known(hosts, monkeypatch),
    ):
        yield hosts


@pytest.mark.needs("root", "namespaces")
@pytest.mark.parametrize("client", ["openssh", "auto"])
def test_a_one_time_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    with asking(tmp_path, monkeypatch, ["271828", "314159"]) as hosts:
        prompts: list[str] = []
        answers = iter(["000000", "271828"])

        def ask(prompt: str) -> str:
            assert threading.current_thread() is threading.main_thread()
            prompts.append(prompt)
            for one in psutil.Process().children(recursive=True):
                with contextlib.suppress(
                    psutil.NoSuchProcess
                ):  # it has ended, and shows nothing any more
                    assert "271828" not in " ".join(one.cmdline()) + str(one.environ())
            return next(answers)

        (endpoint,) = endpoints(["h1"], client)
        for connection in connect_all([endpoint] * 2, ask):
            assert connection.run("echo on").out == "on\n"
            connection.close()
        assert ["Password:" in prompt for prompt in prompts] == [True, True]
        assert hosts[0].wait_log("Accepted keyboard-interactive/pam")
        # paramiko has come as far as the key
        logins = len([line for line in hosts[0].log if "Partial publickey" in line])
        assert (logins > 1) == (client == "auto")
        # nobody is asked again, also where nobody can be
        again = connect(endpoint)
        assert again.run("echo on").out == "on\n"
        assert len([line for line in hosts[0].log if "Partial publickey" in line]) == logins
        again.close()


@pytest.mark.needs("root", "namespaces")
def test_unattended_login_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with asking(tmp_path, monkeypatch, ["271828"]) as hosts:
        with raises(HostError, "openssh-login", r"asked"):
            asked_for(ask=lambda prompt: "")
        with pytest.raises(
            HostError, match=r"Permission denied \(keyboard-interactive\)"
        ) as failed:
            asked_for()
        assert not processes(hosts)
        # what the error says opens a master that is used from then on
        remedy = failed.value.hint.partition(": ")[2]
        askpass = tmp_path / "askpass"
        askpass.write_text("#!/bin/sh\necho 271828\n")
        askpass.chmod(0o700)
        env = {**os.environ, "SSH_ASKPASS": str(askpass), "SSH_ASKPASS_REQUIRE": "force"}
        subprocess.run(remedy, shell=True, check=True, env=env)
        assert asked_for().run("echo on").out == "on\n"


@pytest.mark.needs("root", "namespaces")
def test_an_interrupt_while_it_waits_for_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asking(tmp_path, monkeypatch, ["271828"]) as hosts:

        def stop(prompt: str) -> str:
            running = processes(hosts)
            assert running
            threads.extend(running)
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
            return ""

        threads: list[psutil.Process] = []
        with pytest.raises(KeyboardInterrupt):
            asked_for(ask=stop)
        assert still_there(threads) == []
        assert not list(Path(os.environ["XDG_RUNTIME_DIR"]).glob("ask-*"))


@pytest.mark.needs("root", "namespaces")
def test_dead_master_does_not_prompt_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asking(tmp_path, monkeypatch, ["271828"]) as hosts:
        asked_for(ask=lambda prompt: "271828")
        hosts[0].kill_sessions()
        for _ in range(3):
            with raises(HostError, "openssh-login") as failed:
                asked_for()
            assert "terminal" in failed.value.hint
        # the host has seen one more login, and not three
        assert len([line for line in hosts[0].log if "Partial publickey" in line]) == 2


def test_a_key_that_waits_for_a_touch(hosts: Hosts) -> None:
    """The note needs no answer; ssh's next step counts. Here sh runs the askpass program, as ssh does for a hardware key."""
    told: list[str] = []

    def ask(prompt: str) -> str:
        told.append(prompt)
        return ""

    script = (
        'SSH_ASKPASS_PROMPT=none "$SSH_ASKPASS" "Confirm user presence for key x"; echo touched'
    )
    said = openssh._run_client("h1", ["/bin/sh", "-c", script], Cancellation(), ask, "")
    assert said == "touched\n"
    (prompt,) = told
    assert prompt.startswith("Confirm user presence for key x (")
