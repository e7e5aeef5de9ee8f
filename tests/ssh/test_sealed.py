"""Encrypted sessions in channels that are not: what both ends prove, what crosses the channel, and shells within."""

from __future__ import annotations

import ast
import io
import logging
import os
import re
import secrets
import shutil
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from skymagic.errors import HostError
from skymagic.ssh import sealed as channels
from skymagic.ssh.command import CommandChannel
from skymagic.ssh.process import Process
from skymagic.ssh.sealed import SealedChannel, UntrustedHost
from skymagic.wire import sealed, tls
from tests.lab.golden import Golden
from tests.lab.raising import raises

JOB = "lab-0123abcd"
KEY = "the pool's channel key"


class Recorded(CommandChannel):
    """A channel whose bytes are all kept."""

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__(["/bin/sh", "-c"], env)
        self.seen = b""

    def recv(self, nbytes: int) -> bytes:
        data = super().recv(nbytes)
        self.seen += data
        return data

    def send(self, data: bytes) -> int:
        sent = super().send(data)
        self.seen += bytes(data[:sent])
        return sent

    def exec_command(self, command: str) -> None:
        self.seen += command.encode()
        super().exec_command(command)


class KnowsKey:
    """Trusts nodes that know a key."""

    def __init__(self, key: str = KEY) -> None:
        self.key = key
        self.claims: list[dict[str, str]] = []
        self.kept: list[str] = []

    def check(self, node: str, claim: Mapping[str, str], seen: str) -> dict[str, str]:
        self.claims.append(dict(claim))
        if claim["knows"] and claim.get("proof") != sealed.proof(self.key, sealed.NODE, seen):
            raise UntrustedHost(node, "its proof is wrong")
        return {"proof": sealed.proof(self.key, sealed.NOTEBOOK, seen), "key": self.key}

    def accepted(self, node: str) -> None:
        self.kept.append(node)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A node's environment, with the holder's folder and a home that has the key."""
    (tmp_path / "holder").mkdir(mode=0o700)
    (tmp_path / "holder" / "start").touch()
    key = tmp_path / "home" / ".skymagic" / "channels" / JOB / "key"
    key.parent.mkdir(parents=True)
    key.write_text(KEY + "\n")
    key.chmod(0o600)
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path / "home"),
        "SKYMAGIC_HOLDER": str(tmp_path / "holder"),
    }


def key_file(env: Mapping[str, str]) -> Path:
    return Path(env["HOME"], ".skymagic", "channels", JOB, "key")


@contextmanager
def process(
    env: Mapping[str, str], text: str, trust: KnowsKey | None = None, pem: str = ""
) -> Iterator[tuple[Process, Recorded]]:
    raw = Recorded(env)
    made = Process(
        SealedChannel(raw, "n1", JOB, trust or KnowsKey(), pem),
        "n1",
        text,
        lambda pid: os.killpg(pid, 15),
        lambda: True,
        "true",
    )
    try:
        yield made, raw
    finally:
        made.close()


def all_of(read: Callable[[], bytes]) -> bytes:
    return b"".join(iter(read, b""))


def test_nothing_of_a_shell_crosses_in_clear(env: dict[str, str]) -> None:
    secret = secrets.token_hex(16)
    with process(env, "cat; echo $((6 * 7)) complaint >&2; exit 3") as (shell, raw):
        shell.write(f"a line with {secret}\n".encode())
        shell.end_input()
        assert all_of(shell.read) == f"a line with {secret}\n".encode()
        assert (shell.finish(5.0), shell.errors()) == (3, "42 complaint\n")
    assert sealed.MARK in raw.seen
    for text in (secret, KEY, "complaint", "cat;", "exec /bin/sh -s"):
        assert text.encode() not in raw.seen


def test_sessions_are_logged_without_secrets(env: dict[str, str]) -> None:
    """Log at both ends: the notebook's logger, and a file in the holder's folder on the node."""
    secret = secrets.token_hex(16)
    lines = io.StringIO()
    handler, level = logging.StreamHandler(lines), sealed.logger.level
    sealed.logger.addHandler(handler)
    sealed.logger.setLevel(logging.DEBUG)
    try:
        with process({**env, "SKYMAGIC_LOG": "DEBUG"}, f"echo {secret}; exit 3") as (shell, _):
            assert all_of(shell.read) == f"{secret}\n".encode()
            assert (shell.finish(5.0), shell.errors()) == (3, "")
    finally:
        sealed.logger.removeHandler(handler)
        sealed.logger.setLevel(level)
    log = Path(env["SKYMAGIC_HOLDER"], sealed.LOG_NAME)
    assert log.stat().st_mode & 0o077 == 0
    steps = ["TLS session is open: end=node version=TLSv1.3", "key is claimed: ", "source=shared"]
    steps += ["key is stored: ", "notebook is authenticated", "shell starts", "status=3"]
    position = 0
    for step in steps:
        position = log.read_text().index(step, position)
    assert "TLS session is open: end=notebook version=TLSv1.3" in lines.getvalue()
    proof = sealed.proof(KEY, sealed.NODE, "")
    for text in (secret, KEY, proof, "echo", "PRIVATE KEY"):
        assert text not in log.read_text() + lines.getvalue()


def test_a_shell_that_reads_no_more_fails_the_writer(env: dict[str, str]) -> None:
    with process(env, "exec <&-; echo closed; sleep 60") as (shell, _):
        assert shell.read() == b"closed\n"
        with pytest.raises(BrokenPipeError):
            shell.write(bytes(100_000_000))
        shell.kill()


def test_noise_before_the_session_is_dropped(env: dict[str, str]) -> None:
    class Noisy(Recorded):
        def exec_command(self, command: str) -> None:
            super().exec_command(f"echo welcome; echo to n1 >&2; {command}")

    raw = Noisy(env)
    shell = Process(
        SealedChannel(raw, "n1", JOB, KnowsKey()), "n1", "echo on", print, lambda: True, "true"
    )
    assert (all_of(shell.read), shell.finish(5.0)) == (b"on\n", 0)
    shell.close()


def test_shell_that_ends_early_gives_its_reason(env: dict[str, str]) -> None:
    class Ends(Recorded):
        def exec_command(self, command: str) -> None:
            super().exec_command("echo no job is here; echo srun: error >&2; exit 1")

    with pytest.raises(HostError, match="no job is here\nsrun: error"):
        Process(
            SealedChannel(Ends(env), "n1", JOB, KnowsKey()), "n1", "", print, lambda: True, "true"
        )


def test_node_without_python_is_explained(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "INTERPRETERS", ())
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    with (
        raises(HostError, "setup-python", r"TLS 1.3"),
        process(env, "true"),
    ):
        pass


def test_a_key_is_stored_and_used_from_then_on(env: dict[str, str]) -> None:
    trust = KnowsKey()
    for _ in range(2):
        with process(env, "true", trust) as (shell, _):
            assert shell.finish(5.0) == 0
    assert [claim["knows"] for claim in trust.claims] == [sealed.SHARED, sealed.STORED]
    stored = Path(env["SKYMAGIC_HOLDER"], sealed.KEY_NAME)
    assert (stored.read_text(), stored.stat().st_mode & 0o777) == (KEY, 0o600)


def test_a_node_without_the_key_gets_it_in_the_session(env: dict[str, str]) -> None:
    key_file(env).unlink()
    trust = KnowsKey()
    for _ in range(2):
        with process(env, "true", trust) as (shell, raw):
            assert shell.finish(5.0) == 0
        assert KEY.encode() not in raw.seen
    assert [claim["knows"] for claim in trust.claims] == [sealed.NONE, sealed.STORED]
    assert trust.kept == ["n1", "n1"]


def test_a_node_with_another_key_is_refused(env: dict[str, str]) -> None:
    key_file(env).write_text("another key")
    with pytest.raises(UntrustedHost, match="its proof is wrong"), process(env, "true"):
        pass


def test_a_notebook_without_the_key_is_refused(env: dict[str, str]) -> None:
    class Pretends(KnowsKey):
        def check(self, node: str, claim: Mapping[str, str], seen: str) -> dict[str, str]:
            return {"proof": sealed.proof("a guess", sealed.NOTEBOOK, seen), "key": "a guess"}

    with (
        raises(HostError, "shell-ended", "channel key"),
        process(env, f"touch {env['HOME']}/ran", Pretends()),
    ):
        pass
    assert not Path(env["HOME"], "ran").exists()


@pytest.mark.needs("root")
@pytest.mark.parametrize("taken", ["folder", "link"])
def test_holder_folder_of_another_user_is_ignored(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    """The holder then uses a longer name; the other user's key and program are not used."""
    usual = Path(env["SKYMAGIC_HOLDER"])
    own = usual.rename(f"{usual}+Ab3xYz")
    place = usual if taken == "folder" else usual.with_name("elsewhere")
    place.mkdir(mode=0o755)
    (place / "start").touch()
    (place / sealed.KEY_NAME).write_text("another key")
    program = place / "python3"
    program.write_text("#!/bin/sh\ntouch $HOME/ran\n")
    program.chmod(0o755)
    (place / "python").write_text(f"{program}\n")
    if taken == "link":
        usual.symlink_to(place)
    else:
        for path in (place, *place.iterdir()):
            os.chown(path, 65534, 65534)
    trust = KnowsKey()
    for _ in range(2):
        with process(env, "true", trust) as (shell, _):
            assert shell.finish(5.0) == 0
    assert [claim["knows"] for claim in trust.claims] == [sealed.SHARED, sealed.STORED]
    assert (own / sealed.KEY_NAME).read_text() == KEY
    monkeypatch.setattr(channels, "INTERPRETERS", ())
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    with pytest.raises(HostError, match="no Python"), process(env, "true"):
        pass
    assert not Path(env["HOME"], "ran").exists()
    (own / "python").write_text("/usr/bin/python3\n")
    with process(env, "true") as (shell, _):
        assert shell.finish(5.0) == 0


def test_a_key_that_others_could_read_proves_nothing(golden: Golden, env: dict[str, str]) -> None:
    key_file(env).chmod(0o640)
    trust = KnowsKey()
    with process(env, "true", trust):
        pass
    assert trust.claims[0]["knows"] == sealed.NONE
    golden(trust.claims[0]["problem"], hide=[Path(env["HOME"])])


def test_a_certificate_other_than_the_pinned_one_is_refused(env: dict[str, str]) -> None:
    class Other(Recorded):
        def exec_command(self, command: str) -> None:
            pinned = re.search(r" ([0-9a-f]{64});", command)
            assert pinned is not None
            super().exec_command(command.replace(pinned[1], "0" * 64))

    pem = tls.certificate()
    with process(env, "echo on", pem=pem) as (shell, _):
        assert all_of(shell.read) == b"on\n"
    with raises(HostError, "channel-unsealed"):
        Process(
            SealedChannel(Other(env), "n1", JOB, KnowsKey(), pem),
            "n1",
            "",
            print,
            lambda: True,
            "x",
        )


def test_someone_in_between_can_prove_nothing_to_either_end(env: dict[str, str]) -> None:
    """It has a session with each end, and relays the messages."""

    class InBetween(Recorded):
        def __init__(self) -> None:
            super().__init__(env)
            ours, self._his = socket.socketpair()
            self.to_notebook = sealed.SealedStream(
                sealed.node_context(), False, lambda: ours.recv(1 << 16), ours.sendall
            )
            self.said: list[dict[str, str]] = []
            self._ours = ours

        def exec_command(self, command: str) -> None:
            super().exec_command(command)
            threading.Thread(target=self._listen, daemon=True).start()

        def _listen(self) -> None:
            noise = b""
            while sealed.MARK not in noise:
                noise += super().recv(1)
            self._ours.sendall(noise)
            to_node = sealed.SealedStream(
                channels._context(tls.certificate()),
                True,
                lambda: CommandChannel.recv(self, 1 << 16),
                lambda data: CommandChannel.send(self, data),
            )
            try:
                to_node.handshake()
                self.to_notebook.handshake()
                claim = to_node.get_message(sealed.CLAIM)
                self.to_notebook.put_message(sealed.CLAIM, claim)
                self.said = [claim, self.to_notebook.get_message(sealed.GRANT)]
            finally:
                self._ours.close()

        def recv(self, nbytes: int) -> bytes:
            return self._his.recv(nbytes)

        def send(self, data: bytes) -> int:
            return self._his.send(data)

    raw = InBetween()
    with pytest.raises(UntrustedHost, match="its proof is wrong"):
        Process(SealedChannel(raw, "n1", JOB, KnowsKey()), "n1", "", print, lambda: True, "true")
    assert raw.said[1] == {"refused": "its proof is wrong"}
    raw._his.close()


def test_records_that_were_changed_end_the_session(env: dict[str, str]) -> None:
    class Changes(Recorded):
        changing = False

        def recv(self, nbytes: int) -> bytes:
            data = super().recv(nbytes)
            if self.changing and len(data) > 20:
                data = data[:-1] + bytes([data[-1] ^ 1])
            return data

    raw = Changes(env)
    shell = Process(
        SealedChannel(raw, "n1", JOB, KnowsKey()), "n1", "cat", print, lambda: True, "true"
    )
    raw.changing = True
    shell.write(b"a transfer of 100")
    assert shell.read() == b""
    shell.close()


def test_only_tls_1_3_is_spoken() -> None:
    assert channels._context(tls.certificate()).minimum_version == ssl.TLSVersion.TLSv1_3
    assert sealed.node_context().minimum_version == ssl.TLSVersion.TLSv1_3


def test_the_program_is_read_by_old_pythons_and_any_login_shell() -> None:
    text = sealed.program_text()
    ast.parse(text, feature_version=(3, 6))
    assert "import skymagic" not in text
    assert "import typing" not in text
    assert not set("'!\n") & set(channels.bootstrap(JOB, "0" * 64))
    assert len(channels.bootstrap(JOB)) < 20_000


OTHER_PYTHONS = sorted(
    path
    for minor in range(6, 20)
    for path in [
        shutil.which(f"python3.{minor}"),
        *map(str, Path("~/.pyenv/versions").expanduser().glob(f"3.{minor}.*/bin/python3")),
    ]
    if path and "shims" not in path
)


def test_it_runs_with_each_python_here(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "INTERPRETERS", ())
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    for python in OTHER_PYTHONS:
        with process({**env, "SKYMAGIC_PYTHON": python}, "cat; exit 3") as (shell, _):
            shell.write(b"through " * 10_000)
            shell.end_input()
            assert all_of(shell.read) == b"through " * 10_000, python
            assert shell.finish(5.0) == 3


def test_a_frame_that_is_too_long_is_refused(golden: Golden) -> None:
    stream = sealed.SealedStream(sealed.node_context(), False, lambda: b"", bytes)
    stream._plain += sealed.HEADER.pack(sealed.OUTPUT, 1 << 30)
    with golden.raises(ValueError):
        stream.get()
