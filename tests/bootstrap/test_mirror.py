"""Mirrors of wheels: chains of them, an index that breaks off, what a notebook sends, and strangers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from hashlib import sha256
from http.client import HTTPResponse, IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, cast
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import pytest

from skymagic.bootstrap.mirror import PAGES, PIECE, program
from skymagic.wire import tls

DATA = os.urandom(3_000_000)
HALF = 6 * PIECE
direct = build_opener(ProxyHandler({})).open


class Served:
    """A mirror in a process of its own, as it runs on a host."""

    def __init__(self, folder: Path, pem: str) -> None:
        self.place = folder / "place"
        self.place.mkdir(parents=True)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", program()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.port = self.asked({"pem": pem, "address": "127.0.0.1", "folder": str(folder), "place": str(self.place)})

    def asked(self, words: Mapping[str, object]) -> object:
        self.tell(json.dumps(words).encode() + b"\n")
        return self.said()

    def tell(self, data: bytes) -> None:
        stdin = cast("IO[bytes]", self.process.stdin)
        stdin.write(data)
        stdin.flush()

    def said(self) -> object:
        return json.loads(cast("IO[bytes]", self.process.stdout).readline())

    @property
    def links(self) -> str:
        """The page that uv is told."""
        found = re.search(r"--find-links (\S+)", (self.place / "passed.txt").read_text())
        assert found is not None
        return found[1]

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            cast("IO[bytes]", self.process.stdin).close()

    def close(self) -> None:
        self.end()
        self.process.wait(timeout=30)
        cast("IO[bytes]", self.process.stdout).close()


class Index:
    """Sends half of its only file; then it breaks off, or waits, the first time that it is asked."""

    def __init__(self, breaks: bool) -> None:
        self.go_on, self.asked_from = threading.Event(), list[str]()
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("Range", "")
                index.asked_from.append(wanted)
                at = int(wanted.removeprefix("bytes=").rstrip("-") or 0)
                self.send_response(206 if wanted else 200)
                self.send_header("Content-Length", str(len(DATA) - at))
                self.end_headers()
                self.wfile.write(DATA[at:HALF])
                if not breaks or wanted:
                    index.go_on.wait()
                    self.wfile.write(DATA[max(at, HALF) :])

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/a-1.0+cpu-py3-none-any.whl"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.go_on.set()
        self.server.shutdown()
        self.server.server_close()


NAME = "a-1.0+cpu-py3-none-any.whl"
Chain = Callable[[bool, str], tuple[list[Served], Index]]


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Chain]:
    """Three mirrors and an index; the third asks the second, and after it the first."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as stack:

        def made(breaks: bool, pem: str) -> tuple[list[Served], Index]:
            index = Index(breaks)
            stack.callback(index.close)
            mirrors = []
            for n in range(3):
                mirrors.append(Served(tmp_path / str(n), pem))
                stack.callback(mirrors[-1].close)
            pins = f"a==1.0+cpu --hash=sha256:{sha256(DATA).hexdigest()}"
            pages = {"pins": [pins], "rest": ["b==2"], "pages": {"00ff": [[NAME, "ab" * 32]]}}
            (mirrors[0].place / PAGES).write_text(json.dumps(pages))
            for name in ("code", "other"):
                (mirrors[0].place / name).write_text("code")
            sources = mirrors[0].place / "sources.json"
            sources.write_text(json.dumps({"env": {}, "wheels": {NAME: [index.url, ""]}}))
            ports = [("127.0.0.1", each.port) for each in mirrors]
            bring = {PAGES: "", "code": sha256(b"code").hexdigest()}
            assert mirrors[0].asked({"sources": str(sources), "bring": {**bring, "other": ""}}) == []
            assert mirrors[1].asked({"upstream": ports[:1], "bring": bring}) == []
            more = {**bring, "none": "", "other": "00" * 32}
            assert mirrors[2].asked({"upstream": ports[1::-1], "bring": more}) == ["none", "other"]
            assert not [*mirrors[2].place.glob("none*"), *mirrors[2].place.glob("other*")]
            return mirrors, index

        yield made


def get(url: str) -> HTTPResponse:
    return cast("HTTPResponse", direct(url, timeout=60))


def test_what_comes_goes_on_while_it_comes(chain: Chain) -> None:
    mirrors, index = chain(False, tls.certificate())
    assert (mirrors[2].place / "code").read_text() == "code"
    assert (mirrors[2].place / "rest.txt").read_text() == "b==2\n"
    assert (mirrors[2].place / "passed.txt").read_text().splitlines()[0] == "--no-index"
    page = get(mirrors[2].links).read().decode()
    assert f'<a href="a-1.0%2Bcpu-py3-none-any.whl#sha256={"ab" * 32}">{NAME}</a>' in page
    answers = [get(f"{each.links}a-1.0%2Bcpu-py3-none-any.whl") for each in mirrors]
    assert [each.read(HALF) for each in answers] == [DATA[:HALF]] * 3
    assert not index.go_on.is_set(), "the index has the rest still"
    index.go_on.set()
    assert [each.read() for each in answers] == [DATA[HALF:]] * 3
    assert index.asked_from == [""]


def test_what_breaks_off_goes_on_from_there(chain: Chain) -> None:
    """From an index, and from another mirror."""
    mirrors, index = chain(True, tls.certificate())
    answer = get(f"{mirrors[2].links}a-1.0%2Bcpu-py3-none-any.whl")
    assert answer.read(HALF) == DATA[:HALF]
    mirrors[1].process.kill()
    index.go_on.set()
    assert answer.read() == DATA[HALF:]
    assert index.asked_from == ["", f"bytes={HALF}-"]


Three = tuple[list[Served], dict[str, bytes], list[dict[str, object]]]


@pytest.fixture
def sent(tmp_path: Path) -> Iterator[Three]:
    """Three mirrors, the first of which will be sent two files, and what they are told."""
    with ExitStack() as stack:
        pem, mirrors = tls.certificate(), list[Served]()
        for n in range(3):
            mirrors.append(Served(tmp_path / str(n), pem))
            stack.callback(mirrors[-1].close)
        ports = [("127.0.0.1", each.port) for each in mirrors]
        data = {"wheels/large": DATA, "small": b"small"}
        bring = {name: sha256(content).hexdigest() for name, content in data.items()}
        sizes = {name: len(content) for name, content in data.items()}
        first: dict[str, object] = {"bring": bring, "sent": sizes}
        others: list[dict[str, object]] = [{"upstream": ports[:n][::-1], "bring": bring} for n in (1, 2)]
        yield mirrors, data, [first, *others]


def told(mirrors: list[Served], words: list[dict[str, object]], data: bytes) -> None:
    for each, what in zip(mirrors, words, strict=True):
        each.tell(json.dumps(what).encode() + b"\n")
    mirrors[0].tell(data)


def test_what_the_notebook_sends_goes_on_while_it_comes(sent: Three) -> None:
    mirrors, data, words = sent
    told(mirrors, words, DATA[:HALF])
    while sum(path.stat().st_size for path in mirrors[2].place.glob("wheels/large.*.half")) != HALF:
        assert mirrors[2].process.poll() is None
    mirrors[1].process.kill()
    mirrors[0].tell(DATA[HALF:] + data["small"])
    for each in (mirrors[0], mirrors[2]):
        assert each.said() == []
        found = {str(path.relative_to(each.place)): path for path in each.place.rglob("*") if path.is_file()}
        assert {name: path.read_bytes() for name, path in found.items()} == data
        assert {path.stat().st_mode & 0o777 for path in found.values()} == {0o600}


@pytest.mark.parametrize("problem", ["it breaks off", "other bytes come", "there is no room"])
def test_what_does_not_come_from_the_notebook_is_said(sent: Three, problem: str) -> None:
    mirrors, data, words = sent
    content = DATA
    if problem == "other bytes come":
        content = bytes(len(DATA))
    if problem == "there is no room":
        resource.prlimit(mirrors[0].process.pid, resource.RLIMIT_FSIZE, (HALF, HALF))
    with contextlib.suppress(BrokenPipeError):  # it wants no more
        told(mirrors, words, content[:HALF] if problem == "it breaks off" else content + data["small"])
    if problem == "it breaks off":
        mirrors[0].end()
    others = ["wheels/large"] if problem == "other bytes come" else ["wheels/large", "small"]
    assert mirrors[0].said() == others
    assert all("wheels/large" in cast("list[str]", each.said()) for each in mirrors[1:])
    assert mirrors[0].process.wait(timeout=60) == 0
    assert not [path for each in mirrors for path in each.place.rglob("*.half")]


def test_a_disk_that_is_full(chain: Chain) -> None:
    """Who has no room has the beginning alone, and does not keep it from those behind."""
    mirrors, index = chain(False, tls.certificate())
    index.go_on.set()
    room = 1_000_001
    resource.prlimit(mirrors[1].process.pid, resource.RLIMIT_FSIZE, (room, room))
    assert get(f"{mirrors[2].links}a-1.0%2Bcpu-py3-none-any.whl").read() == DATA
    with pytest.raises(IncompleteRead) as raised:
        get(f"{mirrors[1].links}a-1.0%2Bcpu-py3-none-any.whl").read()
    assert raised.value.partial == DATA[:room]


def test_strangers_get_nothing(chain: Chain) -> None:
    mirrors, index = chain(False, tls.certificate())
    index.go_on.set()
    for url in (mirrors[0].links.replace("/00ff/", "/0000/x"), re.sub("/[0-9a-f]{32}/", "/0/", mirrors[0].links)):
        with pytest.raises(HTTPError, match="404"):
            get(url)
    assert asked_by_a_stranger(cast("int", mirrors[0].port)) == b"", "it shows another certificate"


def asked_by_a_stranger(port: int) -> bytes:
    other = tls.context(tls.certificate(), server=False)
    other.verify_mode = ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port)) as plain:
        try:
            with other.wrap_socket(plain) as one:
                one.sendall(b"code 0\n")
                return one.recv(1)
        except OSError:  # TLS 1.3 refuses after the greeting
            return b""
