"""Mirrors of wheels: chains of them, an index that breaks off, and strangers."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from hashlib import sha256
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, cast
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import pytest

from skymagic.bootstrap.mirror import PAGES, program
from skymagic.wire import tls

DATA = os.urandom(3_000_000)
HALF = len(DATA) // 2
direct = build_opener(ProxyHandler({})).open


class Served:
    """A mirror in a process of its own, as it runs on a host."""

    def __init__(self, folder: Path, pem: str) -> None:
        self.place = folder / "place"
        self.place.mkdir(parents=True)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", program()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = self.asked({"pem": pem, "address": "127.0.0.1", "folder": str(folder), "place": str(self.place)})

    def asked(self, words: Mapping[str, object]) -> object:
        stdin, stdout = cast("IO[str]", self.process.stdin), cast("IO[str]", self.process.stdout)
        stdin.write(json.dumps(words) + "\n")
        stdin.flush()
        return json.loads(stdout.readline())

    @property
    def links(self) -> str:
        """The page that uv is told."""
        found = re.search(r"--find-links (\S+)", (self.place / "passed.txt").read_text())
        assert found is not None
        return found[1]

    def close(self) -> None:
        self.process.communicate(timeout=30)


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
            (mirrors[0].place / "code").write_text("code")
            sources = mirrors[0].place / "sources.json"
            sources.write_text(json.dumps({"env": {}, "wheels": {NAME: [index.url, ""]}}))
            files = {name: str(mirrors[0].place / name) for name in (PAGES, "code")}
            assert mirrors[0].asked({"sources": str(sources), "files": files}) == []
            ports = [("127.0.0.1", each.port) for each in mirrors]
            assert mirrors[1].asked({"upstream": ports[:1], "bring": ["code"]}) == []
            assert mirrors[2].asked({"upstream": ports[1::-1], "bring": ["code", "none"]}) == ["none"]
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
