"""Connecting to real sshd hosts: keys, jump hosts, and each way in which it fails, with what is said and what is left."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from skymagic.errors import HostError, HostsError
from skymagic.ssh.config import Endpoint, SshConfig
from skymagic.ssh.connecting import connect, connect_all
from skymagic.ssh.hostlist import HostSpec, expand
from tests.lab.hosts import Hosts, keygen, lent, loopback, still_there

pytestmark = pytest.mark.needs("sshd")


@pytest.fixture(scope="module")
def module_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with loopback(tmp_path_factory.mktemp("hosts"), 2) as made:
        yield made


@pytest.fixture
def hosts(module_hosts: Hosts, tmp_path: Path) -> Iterator[Hosts]:
    with lent(module_hosts, tmp_path) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Neither threads nor sockets nor child processes."""
    before = len(psutil.Process().net_connections("tcp"))
    yield
    assert [
        t.name
        for t in threading.enumerate()
        if "skymagic" in t.name or "paramiko" in type(t).__module__
    ] == []
    assert len(psutil.Process().net_connections("tcp")) == before


def configured(hosts: Hosts, *lines: str, name: str = "h1", label: str | None = None) -> Endpoint:
    """A host, with these lines before all others."""
    path = hosts.folder / "config_of_test"
    path.write_text("".join(f"{line}\n" for line in lines) + hosts.config.read_text())
    return SshConfig(path).endpoint(HostSpec(label or name, name))


def failing(endpoint: Endpoint) -> HostError:
    with pytest.raises(HostError) as failed:
        connect(endpoint)
    assert failed.value.host == endpoint.label
    return failed.value


def reached(endpoint: Endpoint, ask=None) -> str:
    connection = connect(endpoint, ask)
    try:
        return connection.run("echo $SKYMAGIC_TEST_HOST").out.partition("-")[0]
    finally:
        connection.close()


# ----------------------------------------------------------------------------------------------------- host keys


def test_an_unknown_host_key_is_shown_and_not_accepted(hosts: Hosts) -> None:
    hosts.known_hosts.write_text("")
    shown = subprocess.run(
        ["ssh-keygen", "-lf", f"{hosts[0].hostkey}.pub"], capture_output=True, text=True, check=True
    )
    failure = failing(configured(hosts))
    assert failure.code == "host-key-unknown"
    assert failure.reason.endswith(f"ssh-ed25519 {shown.stdout.split()[1]}")
    assert failure.hint.endswith("ssh h1")
    assert hosts.known_hosts.read_text() == ""


def test_nothing_switches_the_check_off(hosts: Hosts) -> None:
    hosts.known_hosts.write_text("")
    failure = failing(configured(hosts, "StrictHostKeyChecking no", "UserKnownHostsFile /dev/null"))
    assert failure.code == "host-key-unknown"
    assert "StrictHostKeyChecking no" in failure.hint


def test_a_changed_host_key_is_refused(hosts: Hosts) -> None:
    other = Path(f"{keygen(hosts.folder / 'other')}.pub").read_text()
    place = f"[127.0.0.2]:{hosts[0].port}"
    hosts.known_hosts.write_text(f"# mine\n{place} {other}")
    failure = failing(configured(hosts))
    assert failure.code == "host-key-changed"
    assert "ssh-ed25519 SHA256:" in failure.reason
    assert f"{hosts.known_hosts} line 2" in failure.reason
    assert f"ssh-keygen -R '{place}' -f {hosts.known_hosts}, then once: ssh h1" in failure.hint
    subprocess.run(
        ["ssh-keygen", "-R", place, "-f", str(hosts.known_hosts)], check=True, capture_output=True
    )
    assert failing(configured(hosts)).code == "host-key-unknown"


def test_a_revoked_host_key_is_refused(hosts: Hosts) -> None:
    key = Path(f"{hosts[0].hostkey}.pub").read_text()
    hosts.known_hosts.write_text(hosts.known_hosts.read_text() + f"@revoked * {key}")
    assert failing(configured(hosts)).code == "host-key-revoked"


def test_a_host_key_under_another_name(hosts: Hosts) -> None:
    key = Path(f"{hosts[0].hostkey}.pub").read_text()
    hosts.known_hosts.write_text(f"lab {key}")
    assert reached(configured(hosts, "HostKeyAlias lab")) == "h1"
    hosts.known_hosts.write_text(f"127.0.0.2 {key}")  # without its port, as openssh takes it
    assert reached(configured(hosts)) == "h1"


def test_known_host_key_type_is_preferred(tmp_path: Path) -> None:
    second = keygen(tmp_path / "rsa", "rsa")
    with loopback(tmp_path / "hosts", 1, options=[f"HostKey {second}"]) as hosts:
        for key in (second, hosts[0].hostkey):
            words = Path(f"{key}.pub").read_text().split()
            hosts.known_hosts.write_text(f"[127.0.0.2]:{hosts[0].port} {words[0]} {words[1]}\n")
            assert reached(configured(hosts)) == "h1"


# ---------------------------------------------------------------------------------------------------------- keys


def bare(hosts: Hosts, *lines: str) -> Endpoint:
    """The first host, with no key but those given."""
    own = f'IdentityFile "{hosts.key}"'
    assert own in hosts.config.read_text()
    hosts.config.write_text(
        hosts.config.read_text().replace(own, "").replace("IdentityAgent none", "")
    )
    return configured(hosts, *lines)


def test_wrong_keys_are_named(hosts: Hosts) -> None:
    other = keygen(hosts.folder / "other")
    (hosts.folder / "text").write_text("no key")
    failure = failing(
        bare(
            hosts,
            "IdentityAgent none",
            *(f"IdentityFile {p}" for p in (other, "/none/key", hosts.folder / "text")),
        )
    )
    assert failure.code == "host-no-key"
    assert f"@127.0.0.2 accepts none of your keys (tried: {other})" in failure.reason
    assert "/none/key (" in failure.reason
    assert f"{hosts.folder / 'text'} (" in failure.reason
    assert f"ssh-copy-id -p {hosts[0].port} " in failure.hint


def test_the_wrong_user(hosts: Hosts) -> None:
    endpoint = SshConfig(hosts.config).endpoint(expand(["no-such-user@h1"])[0])
    failure = failing(endpoint)
    assert failure.code == "host-no-key"
    assert "no-such-user@127.0.0.2" in failure.reason
    assert "'no-such-user'" in failure.hint


@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
def test_kinds_of_keys(hosts: Hosts, kind: str) -> None:
    key = keygen(hosts.folder / kind, kind)
    hosts[0].authorized.write_text(Path(f"{key}.pub").read_text())
    assert reached(bare(hosts, "IdentityAgent none", f"IdentityFile {key}")) == "h1"


def test_passphrase_is_requested_once(hosts: Hosts) -> None:
    key = keygen(hosts.folder / "locked", passphrase="sesame")
    hosts[0].authorized.write_text(Path(f"{key}.pub").read_text())
    endpoint = bare(hosts, "IdentityAgent none", f"IdentityFile {key}")
    failure = failing(endpoint)
    assert (
        f"{key} (it has a passphrase, and there is no prompt here: ssh-add {key})" in failure.reason
    )
    asked: list[str] = []

    def ask(question: str) -> str:
        assert threading.current_thread() is threading.main_thread()
        asked.append(question)
        return "sesame" if len(asked) == 2 else "wrong"

    for connection in connect_all([endpoint] * 3, ask):
        connection.close()
    assert reached(endpoint, ask) == "h1"
    assert asked == [f"passphrase of {key}: ", f"wrong passphrase; passphrase of {key}: "]


def test_missing_passphrase_is_explained(hosts: Hosts) -> None:
    key = keygen(hosts.folder / "locked", passphrase="sesame")
    endpoint = bare(hosts, "IdentityAgent none", f"IdentityFile {key}")
    with pytest.raises(HostError, match="ssh-add ") as failed:
        connect(endpoint, lambda question: "")
    assert failed.value.code == "host-no-key"

    def nobody(question: str) -> str:
        raise NotImplementedError("this frontend does not support input requests")

    with pytest.raises(HostError, match="ssh-add ") as failed:
        connect(endpoint, nobody)
    assert failed.value.code == "host-no-key"

    def stop(question: str) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        connect_all([endpoint] * 2, stop)


@contextmanager
def agent(folder: Path, *keys: Path) -> Iterator[str]:
    """An ssh-agent that holds these keys; its socket."""
    place = folder / "agent"
    process = subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(place)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        env = {**os.environ, "SSH_AUTH_SOCK": str(place)}
        for key in keys:
            subprocess.run(["ssh-add", "-q", str(key)], env=env, check=True, capture_output=True)
        yield str(place)
    finally:
        process.terminate()
        process.communicate()


def test_the_agents_keys(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = keygen(hosts.folder / "wrong")
    with agent(hosts.folder, wrong, hosts.key) as place:
        endpoint = bare(hosts, "IdentitiesOnly no", "IdentityFile none")
        assert (
            reached(
                configured(
                    hosts, f"IdentityAgent {place}", "IdentitiesOnly no", "IdentityFile none"
                )
            )
            == "h1"
        )
        monkeypatch.setenv("SSH_AUTH_SOCK", place)
        assert reached(endpoint) == "h1"
        only = failing(configured(hosts, "IdentitiesOnly yes", f"IdentityFile {wrong}"))
        assert f"(tried: {wrong} (agent))" in only.reason
        # the file's key is the agent's: the agent's is used, and no file is read
        hosts.key.rename(hosts.folder / "away")
        assert reached(configured(hosts, "IdentitiesOnly yes", f"IdentityFile {hosts.key}")) == "h1"


def test_a_host_that_takes_no_keys(tmp_path: Path) -> None:
    options = ["PubkeyAuthentication no", "PasswordAuthentication yes"]
    with loopback(tmp_path / "hosts", 1, options=options) as hosts:
        failure = failing(configured(hosts))
        assert failure.code == "host-other-login"
        assert failure.reason.endswith("keys, but: password")


# -------------------------------------------------------------------------------------------------- on the way


def test_a_name_that_is_not_known(hosts: Hosts) -> None:
    failure = failing(
        SshConfig(hosts.config).endpoint(HostSpec("nowhere.invalid", "nowhere.invalid"))
    )
    assert failure.code == "host-name"
    assert "'nowhere.invalid'" in failure.reason


def test_nothing_listens(hosts: Hosts) -> None:
    hosts[0].stop()
    failure = failing(configured(hosts))
    assert failure.code == "host-refused"
    assert f"127.0.0.2 port {hosts[0].port} " in failure.reason
    hosts[0].start()
    assert reached(configured(hosts)) == "h1"


@contextmanager
def server(backlog: int = 5) -> Iterator[socket.socket]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(backlog)
        yield listening


def at(listening: socket.socket, hosts: Hosts, *lines: str) -> Endpoint:
    return configured(hosts, "HostName 127.0.0.1", f"Port {listening.getsockname()[1]}", *lines)


def test_no_answer(hosts: Hosts) -> None:
    with server(0) as listening, socket.socket() as first, socket.socket() as second:
        for sock in (first, second):  # they fill the queue: further ones are not answered
            sock.setblocking(False)
            sock.connect_ex(listening.getsockname())
        failure = failing(at(listening, hosts, "ConnectTimeout 1"))
    assert failure.code == "host-silent"
    assert " 1 s" in failure.reason


def test_silent_server_is_explained(hosts: Hosts) -> None:
    with server() as listening:
        failure = failing(at(listening, hosts, "ConnectTimeout 1"))
    assert failure.code == "host-no-ssh"
    assert " 1 s" in failure.reason


def test_a_frozen_host(hosts: Hosts) -> None:
    hosts[0].freeze()
    failure = failing(configured(hosts, "ConnectTimeout 1"))
    assert failure.code == "host-no-ssh"
    assert " 1 s" in failure.reason
    hosts[0].thaw()


@pytest.mark.parametrize("said", [b"HTTP/1.0 400 Bad Request\r\n\r\n", b"", b"\xff\xfe\r\n"])
def test_another_server(hosts: Hosts, said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    def serve() -> None:
        with listening.accept()[0] as sock:
            sock.sendall(said)

    with server() as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        with caplog.at_level(logging.DEBUG):
            failure = failing(at(listening, hosts))
        thread.join()
    assert failure.code == "host-no-ssh"
    assert [record for record in caplog.records if "paramiko" in record.name] == []


# ----------------------------------------------------------------------------------------------------- by proxy


def test_through_a_jump_host(hosts: Hosts) -> None:
    assert reached(configured(hosts, "Host h2", "ProxyJump h1", "Host *", name="h2")) == "h2"
    assert any("Accepted publickey" in line for line in hosts[0].log)


def test_through_two_jump_hosts(hosts: Hosts) -> None:
    assert reached(configured(hosts, "Host h2", "ProxyJump h1,h1", "Host *", name="h2")) == "h2"
    assert sum("Accepted publickey" in line for line in hosts[0].log) == 2


def test_a_jump_host_that_fails(hosts: Hosts) -> None:
    endpoint = configured(hosts, "Host h2", "ProxyJump h1", "Host *", name="h2")
    port = hosts[1].port
    hosts[1].stop()
    failure = failing(endpoint)
    assert failure.code == "host-jump"
    assert f"h1 cannot connect to 127.0.0.3 port {port}: " in failure.reason
    hosts[0].stop()
    failure = failing(endpoint)
    assert failure.code == "host-jump"
    assert isinstance(failure.__cause__, HostError)
    assert failure.__cause__.code == "host-refused"
    assert failure.__cause__.host == "h1"
    assert failure.__cause__.reason in failure.reason


@pytest.mark.parametrize(("unknown", "code"), [(0, "host-jump"), (1, "host-key-unknown")])
def test_each_host_on_the_way_shows_its_key(hosts: Hosts, unknown: int, code: str) -> None:
    keys = hosts.known_hosts.read_text().splitlines()
    hosts.known_hosts.write_text(f"{keys[1 - unknown]}\n")
    failure = failing(configured(hosts, "Host h2", "ProxyJump h1", "Host *", name="h2"))
    assert failure.code == code
    assert "ssh-ed25519 SHA256:" in failure.reason


def test_a_jump_host_that_forbids_it(tmp_path: Path) -> None:
    with loopback(tmp_path / "hosts", 2, options=["AllowTcpForwarding no"]) as hosts:
        failure = failing(configured(hosts, "Host h2", "ProxyJump h1", "Host *", name="h2"))
        assert failure.code == "host-jump"
        assert "127.0.0.3" in failure.reason
        assert {"AllowTcpForwarding", "h1"} <= set(failure.hint.split())


def test_over_a_command(hosts: Hosts) -> None:
    command = f"ssh -F {hosts.config} -W %h:%p h1"
    assert (
        reached(configured(hosts, "Host h2", f"ProxyCommand {command}", "Host *", name="h2"))
        == "h2"
    )
    assert any("Accepted publickey" in line for line in hosts[0].log)


ASYNCIO_PROXY = """
import asyncio, sys

async def copy(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()

async def main(host, port):
    loop = asyncio.get_running_loop()
    from_client = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(from_client), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
    to_client = asyncio.StreamWriter(transport, protocol, None, loop)
    from_server, to_server = await asyncio.open_connection(host, int(port))
    await asyncio.gather(copy(from_client, to_server), copy(from_server, to_client))

asyncio.run(main(*sys.argv[1:]))
"""


def test_over_a_command_built_on_asyncio(hosts: Hosts) -> None:
    """asyncio watches its output to notice the reader's end, so output and input must not be the same descriptor."""
    script = hosts.folder / "asyncio_proxy.py"
    script.write_text(ASYNCIO_PROXY)
    endpoint = configured(hosts, f"ProxyCommand {sys.executable} {script} %h %p")
    connection = connect(endpoint)
    try:
        process = connection.open("cat")
        sent = os.urandom(1 << 22)  # both directions at once, beyond the buffers of the pipes

        def send() -> None:
            process.write(sent)
            process.end_input()

        writer = threading.Thread(target=send)
        writer.start()
        received = b"".join(iter(process.read, b""))
        writer.join()
        process.close()
    finally:
        connection.close()
    assert received == sent


def test_a_connection_over_a_command_closes_while_it_is_silent(hosts: Hosts) -> None:
    endpoint = configured(hosts, "ProxyCommand sleep 60")
    endpoint = dataclasses.replace(endpoint, timeout=1.0)
    assert "127.0.0.2" in failing(endpoint).reason


def test_a_command_without_a_shell(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/no/such/shell")
    failure = failing(configured(hosts, "ProxyCommand nc %h %p"))
    assert failure.code == "host-proxy"
    assert "$SHELL" in failure.hint


def test_a_command_that_talks_is_not_to_blame(hosts: Hosts) -> None:
    hosts.known_hosts.write_text("")
    command = f"sh -c 'echo hello >&2; exec ssh -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -F {hosts.config} -W %h:%p h1'"
    endpoint = configured(hosts, "Host h2", f"ProxyCommand {command}", "Host *", name="h2")
    assert failing(endpoint).code == "host-key-unknown"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sh -c 'echo no such tunnel >&2; exit 3'", "ended with exit code 3: no such tunnel"),
        ("no-such-program %h", "ended with exit code 127: "),
    ],
)
def test_a_command_that_fails(hosts: Hosts, command: str, words: str) -> None:
    failure = failing(configured(hosts, f"ProxyCommand {command}"))
    assert failure.reason.startswith("its ProxyCommand ")
    assert words in failure.reason


# ------------------------------------------------------------------------------------------------- several at once


def test_all_failures_in_one_error(hosts: Hosts) -> None:
    hosts[1].stop()
    names = ("h2", "h1", "nowhere.invalid")
    told: dict[str, str] = {}
    with pytest.raises(HostsError) as failed:
        connect_all(
            [configured(hosts, name=name) for name in names],
            progress=lambda endpoint, state: told.__setitem__(endpoint.label, state),
        )
    assert [failure.host for failure in failed.value.failures] == ["h2", "nowhere.invalid"]
    lines = str(failed.value).splitlines()
    assert failed.value.host_count == 3
    assert [failure.code for failure in failed.value.failures] == ["host-refused", "host-name"]
    assert lines[0].startswith("2 of 3 ")
    assert lines[1].startswith(f"h2: 127.0.0.3 port {hosts[1].port} ")
    assert lines[3].startswith("nowhere.invalid: ")
    assert told["h1"] == "connected"
    assert told["h2"] == failed.value.failures[0].reason
    assert still_there(hosts[0].sessions()) == []


def test_an_interrupt_leaves_nothing(hosts: Hosts) -> None:
    """One host is silent, one waits behind it, and one is connected."""
    ready = threading.Event()

    def press() -> None:
        sock = listening.accept()[0]
        hosts[0].wait_log("Accepted publickey")
        ready.wait()
        os.kill(os.getpid(), signal.SIGINT)
        sock.recv(1000)
        while sock.recv(1000):
            pass  # until it is closed at the other end
        sock.close()

    with server() as listening:
        thread = threading.Thread(target=press)
        thread.start()
        silent = at(listening, hosts, "ConnectTimeout 60")
        jumped = configured(
            hosts, "Host h2", "ProxyJump h1", "Host *", "ConnectTimeout 60", name="h2"
        )
        hosts[1].freeze()
        with pytest.raises(KeyboardInterrupt):
            connect_all(
                [silent, jumped, configured(hosts)], progress=lambda endpoint, state: ready.set()
            )
        thread.join(timeout=20)
        assert not thread.is_alive()
    hosts[1].thaw()
    assert still_there(hosts[0].sessions()) == []


def test_more_hosts_than_one_sshd_takes_at_once(tmp_path: Path) -> None:
    with loopback(tmp_path / "hosts", 1, options=["MaxStartups 10:100:10"]) as hosts:
        for connection in connect_all([configured(hosts)] * 20):
            connection.close()


def test_no_further_process(tmp_path: Path) -> None:
    with loopback(tmp_path / "hosts", 1, options=["MaxSessions 2"]) as hosts:
        connection = connect(configured(hosts))
        first, second = connection.open("exec cat"), connection.open("exec cat")
        with pytest.raises(HostError) as failed:
            connection.open("true")
        assert failed.value.code == "host-sessions"
        assert "MaxSessions" in failed.value.hint
        first.close()
        assert connection.run("echo on").out == "on\n"
        second.close()
        connection.close()
