"""Strangers at a mirror's two ports: connections without a certificate, or without the path, end neither it nor its service."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import psutil
import pytest

from skymagic.bootstrap.mirror import PAGES
from skymagic.wire import tls

MIRROR = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
from skymagic.bootstrap import mirror
text = mirror.program().replace("HANDSHAKE_SECONDS = 10.0", "HANDSHAKE_SECONDS = 1.0")
exec(compile(text, "mirror", "exec"), {"__name__": "mirror"})
"""
DEADLINE = 20.0
STRANGERS = 200


class Mirror:
    """A mirror, as its text, that may have 48 open files; it has one file."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.process, self.pem = process, tls.certificate()
        place = folder / "place"
        place.mkdir()
        (place / "x.whl").write_bytes(b"content")
        (place / PAGES).write_text(json.dumps({"pins": [], "rest": [], "pages": {"p": [["x.whl", "0"]]}}))
        self.port = int(
            str(self._said({"pem": self.pem, "address": "127.0.0.1", "folder": str(folder), "place": str(place)}))
        )
        assert self._said({"bring": {"x.whl": ""}}) == []
        self.page = (place / "passed.txt").read_text().split()[2]

    def _said(self, words: dict[str, object]) -> object:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def by_tls(self) -> bytes:
        context = tls.context(self.pem, server=False)
        with (
            socket.create_connection(("127.0.0.1", self.port), DEADLINE) as plain,
            context.wrap_socket(plain) as secure,
        ):
            secure.sendall(b"x.whl 0\n")
            return secure.makefile("rb").read().partition(b"\n")[2]

    def by_http(self) -> bytes:
        with build_opener(ProxyHandler({})).open(self.page + "x.whl", timeout=DEADLINE) as reply:
            return bytes(reply.read())


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    process = subprocess.Popen([sys.executable, "-c", MIRROR], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        yield Mirror(tmp_path, process)
        assert process.poll() is None, "it has ended"
        process.kill()


@contextlib.contextmanager
def strangers(port: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE)) for _ in range(STRANGERS)]


@pytest.mark.parametrize("port", ["tls", "http"])
def test_strangers_who_only_connect(mirror: Mirror, port: str) -> None:
    """All are closed in the end; meanwhile it does not ask for descriptors without a pause, and then serves as before."""
    number = mirror.port if port == "tls" else int(urlsplit(mirror.page).port or 0)
    with strangers(number) as idle:
        process = psutil.Process(mirror.process.pid)
        used, begun = sum(process.cpu_times()[:2]), time.monotonic()
        for stranger in idle:
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        assert sum(process.cpu_times()[:2]) - used < 0.5 + 0.5 * (time.monotonic() - begun)
    assert mirror.by_tls() == mirror.by_http() == b"content"


def test_a_stranger_who_sends_a_byte_now_and_then(mirror: Mirror) -> None:
    """Each byte begins a socket's own timeout anew."""
    with socket.create_connection(("127.0.0.1", int(urlsplit(mirror.page).port or 0)), DEADLINE) as stranger:
        begun = time.monotonic()
        stranger.settimeout(0.2)
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begun < DEADLINE:
                stranger.sendall(b"G")
                with contextlib.suppress(TimeoutError):
                    if stranger.recv(1) == b"":
                        break
        assert time.monotonic() - begun < DEADLINE / 2
    assert mirror.by_http() == b"content"


def test_the_users_own_connection_may_stay_idle(mirror: Mirror) -> None:
    """uv keeps its connections; only those of strangers have a second."""
    address = urlsplit(mirror.page)
    with socket.create_connection((str(address.hostname), int(address.port or 0)), DEADLINE) as own:
        for wait in (2.5, 0.0):
            own.sendall(f"GET {address.path}x.whl HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            received = b""
            while not received.endswith(b"content"):
                piece = own.recv(4096)
                assert piece
                received += piece
            time.sleep(wait)  # as uv does, which keeps its connection and asks later
