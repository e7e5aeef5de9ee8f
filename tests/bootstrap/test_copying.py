"""Folders that go from host to host: chains of programs, streams that break off, disks that are full, and strangers."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

import psutil
import pytest

from skymagic.bootstrap.copying import COPIED, PIECE, program
from skymagic.wire import tls

NAMES = ["wheels/e", "code/c"]
DATA = os.urandom(8 * PIECE)
SHORT = "FOLLOWER_SECONDS = 15.0", "FOLLOWER_SECONDS = 1.0"
STRANGERS = 200
DEADLINE = 20.0


class Linked:
    """The program in a process of its own, as it runs on a host."""

    def __init__(self, home: Path, pem: str, text: str = "", unless: str = "") -> None:
        self.folder, self.place = home / "sky", home / "sky/incoming/t"
        self.place.mkdir(parents=True)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", text or program()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.port = self.asked({"pem": pem, "address": "127.0.0.1", "unless": unless})

    def asked(self, words: dict[str, object]) -> object:
        self.tell(words)
        return self.said()

    def tell(self, words: dict[str, object]) -> None:
        stdin = cast("IO[bytes]", self.process.stdin)
        stdin.write(json.dumps(words).encode() + b"\n")
        stdin.flush()

    def said(self) -> object:
        return json.loads(cast("IO[bytes]", self.process.stdout).readline())

    def take(self, before: Linked | None, first: Linked, *, last: bool = False) -> None:
        words: dict[str, object] = {"folder": str(self.folder), "names": NAMES, "last": last}
        if before is not None:
            words |= {
                "upstream": ["127.0.0.1", before.port],
                "target": str(self.place),
            }
        self.tell(words)

    def read(self, name: str) -> bytes:
        return (self.place / COPIED / name).read_bytes()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


Chain = Callable[..., list[Linked]]


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    """Programs on so many hosts; the first has wheels and code."""
    with contextlib.ExitStack() as stack:

        def made(count: int, text: str = "") -> list[Linked]:
            pem = tls.certificate()
            links = [Linked(tmp_path / str(n), pem, text) for n in range(count)]
            for each in links:
                stack.callback(each.close)
            first = links[0].folder
            (first / "wheels/e").mkdir(parents=True)
            (first / "wheels/e/large").write_bytes(DATA)
            (first / "wheels/e/uv").touch()
            (first / "wheels/e/uv").chmod(0o700)
            (first / "code/c").mkdir(parents=True)
            (first / "code/c/module.py").write_text("code")
            return links

        yield made


def passed(links: list[Linked]) -> list[object]:
    for before, each in zip([None, *links], links, strict=False):
        each.take(before, links[0], last=each is links[-1])
    return [each.said() for each in links]


def test_all_hosts_get_the_files_of_one(chain: Chain) -> None:
    links = chain(4)
    assert passed(links) == [True] * 4
    for each in links[1:]:
        assert each.read("wheels/e/large") == DATA
        assert each.read("code/c/module.py") == b"code"
        assert (each.place / COPIED / "wheels/e/uv").stat().st_mode & 0o777 == 0o700


def test_a_host_that_shares_a_home_with_the_first(tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    link = Linked(tmp_path / "home", tls.certificate(), unless=str(tmp_path / "ready"))
    assert link.port is None
    assert link.process.wait(DEADLINE) == 0
    link.close()


def test_a_stream_that_breaks_off_is_no_end(chain: Chain) -> None:
    links = chain(3)
    for before, each in zip(links, links[1:], strict=False):
        each.take(before, links[0], last=each is links[-1])
    links[0].process.kill()  # whether or not it has begun to send
    assert [each.said() for each in links[1:]] == [False] * 2


def test_a_disk_that_is_full_keeps_nothing_from_those_behind(chain: Chain) -> None:
    links = chain(3)
    room = 3 * PIECE
    resource.prlimit(links[1].process.pid, resource.RLIMIT_FSIZE, (room, room))
    assert passed(links) == [True, False, True]
    assert links[2].read("wheels/e/large") == DATA


def test_slow_host_does_not_delay_others(chain: Chain) -> None:
    first, second, _ = chain(3, program().replace(*SHORT))
    first.take(None, first)
    second.take(first, first)
    assert [first.said(), second.said()] == [True, True]
    assert second.read("wheels/e/large") == DATA


def test_strangers_get_nothing(chain: Chain) -> None:
    """One shows another certificate, the other shows none."""
    links = chain(2)
    assert asked_by_a_stranger(cast("int", links[0].port)) == b""
    assert passed(links) == [True, True]


def asked_by_a_stranger(port: int) -> bytes:
    other = tls.context(tls.certificate(), server=False)
    other.verify_mode = ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port)) as plain:
        try:
            with other.wrap_socket(plain) as one:
                return one.recv(1)
        except OSError:  # TLS 1.3 refuses after the greeting
            return b""


def test_silent_strangers_are_disconnected(chain: Chain) -> None:
    """All are closed in the end. Meanwhile the server does not spin when descriptors run out, and continues to copy."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))\n"
    text = program().replace("HANDSHAKE_SECONDS = 10.0", "HANDSHAKE_SECONDS = 1.0")
    at = text.index("import contextlib")
    links = chain(2, text[:at] + limit + text[at:])
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", cast("int", links[0].port))
        idle = [
            stack.enter_context(socket.create_connection(address, DEADLINE))
            for _ in range(STRANGERS)
        ]
        process = psutil.Process(links[0].process.pid)
        used, begun = sum(process.cpu_times()[:2]), time.monotonic()
        for stranger in idle:
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        assert sum(process.cpu_times()[:2]) - used < 0.5 + 0.5 * (time.monotonic() - begun)
    assert passed(links) == [True, True]
