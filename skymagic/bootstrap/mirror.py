"""A host's mirror of files: what an index, the notebook or the mirror of another host has, for this host and for further mirrors.

Chain replication; each piece goes on as it comes::

    index, or notebook → mirror of host 0 → mirror of host 1 → …     TLS between them, with a certificate made for this one start
                            ↓                   ↓
                        uv there            uv there                 http://127.0.0.1, at a path that this user alone knows
                    folder of uploads   folder of uploads

It runs in whatever Python a host has before anything of ours is there (see `program`): with the standard library alone. Nothing
of it stays but what it was told to bring: what else it holds are files without names. Its standard input::

    {"pem", "address", "folder", "place"}       it listens, and says its port
    {"sources", "upstream", "bring", "sent"}    what it knows and whom it asks; it says which files it could not bring
    the content of what is "sent"               one file after the other, before it says that
    end of file                                 it ends
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import ssl
import sys
import tempfile
import threading
import time  # noqa: F401 (the text of Unauthenticated needs it: `program`)
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedReader
from pathlib import Path
from typing import IO, cast
from urllib import request
from urllib.parse import quote, unquote

from skymagic.wire.authentication import Unauthenticated
from skymagic.wire.tls import context

PAGES = "pages.json"
"""What all mirrors of a chain serve: ``pins`` and ``rest`` as lines of requirements, ``pages`` as lists of [file, sha256]."""
PIECE = 1 << 18
"""Bytes that go on together; with fewer at a time mirrors take processor time that is needed for unpacking."""
CONNECT_SECONDS = 5.0
SILENT_SECONDS = 60.0
HANDSHAKE_SECONDS = 10.0
"""For which a connection may stay open before its sender shows the certificate, or the path that only this user knows."""
ATTEMPTS = 3
"""How often a file is asked of an index; from where it was left."""

Begin = Callable[[int, ExitStack], tuple[int, Callable[[int], bytes]]]
"""Opens a source at an offset: the size of the whole, and what reads on from there, b"" at its end."""


class Content:
    """A file on its way: from the first source that has it to all who read it, while it comes.

    Args:
        opened: opens the file that it is written to.
    """

    def __init__(self, opened: Callable[[], IO[bytes]]) -> None:
        self._opened = opened
        self._changed = threading.Condition()
        self._size, self._come, self._over = -1, 0, False

    @classmethod
    def of(cls, path: Path) -> Content:
        """What is here already."""
        made = cls(lambda: open(path, "rb", buffering=0))  # noqa: SIM115 (its readers outlive this call)
        made._file = made._opened()
        made._size = made._come = os.fstat(made._file.fileno()).st_size
        made._over = True
        return made

    def fill(self, sources: Sequence[Begin]) -> None:
        """Let it come; once."""
        with contextlib.suppress(OSError):
            self._file = self._opened()
            for begin in sources:
                with contextlib.suppress(Exception), ExitStack() as stack:  # the next one goes on from here
                    size, read = begin(self._come, stack)
                    self._tell(size, 0)
                    while self._come < size and (data := read(min(PIECE, size - self._come))):
                        while data:  # a disk that fills takes a part
                            written = self._file.write(data)
                            self._tell(size, written)
                            data = data[written:]
                if self._come == self._size:
                    break
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _tell(self, size: int, more: int) -> None:
        with self._changed:
            self._size = size
            self._come += more
            self._changed.notify_all()

    @property
    def failed(self) -> bool:
        """Whether no source has had all of it."""
        return self._over and self._come != self._size

    def size(self) -> int:
        """Its size, once that is known; -1 when nobody has it."""
        with self._changed:
            self._changed.wait_for(lambda: self._size >= 0 or self._over)
            return self._size

    def pieces(self, at: int = 0) -> Iterator[bytes]:
        """What comes from an offset on; it ends early where the sources do."""
        while (come := self._beyond(at)) > at:
            data = os.pread(self._file.fileno(), min(PIECE, come - at), at)
            at += len(data)
            yield data

    def _beyond(self, at: int) -> int:
        """How much has come, once it is more than so much, or all."""
        with self._changed:
            self._changed.wait_for(lambda: self._come > at or self._over)
            return self._come


class Mirror:
    """All files of a chain, as this host has them.

    Args:
        pem: certificate and key of all mirrors of the chain.
        address: of this host, by which the next one reaches it.
        folder: skymagic's folder here. place: the folder of uploads.
    """

    def __init__(self, pem: str, address: str, folder: str, place: str) -> None:
        self._pem, self._folder, self._place = pem, folder, Path(place)
        self._contents: dict[str, Content] = {}
        self._bring: dict[str, str] = {}
        self._nonce = secrets.token_hex(4)
        self._sources: dict[str, Sequence[Begin]] = {}
        self._upstream: list[tuple[str, int]] = []
        self._lock = threading.Lock()
        self._secret = _secret(Path(folder, "mirror"))
        self._pages: Mapping[str, list[tuple[str, str]]] = {}
        self._listener = socket.create_server((address, 0), backlog=128)
        self.port = self._listener.getsockname()[1]

    def start(
        self,
        sources: str = "",
        upstream: Sequence[Sequence[object]] = (),
        bring: Mapping[str, str] | None = None,
        sent: Mapping[str, int] | None = None,
    ) -> list[str]:
        """Serve.

        Args:
            sources: a file of [URL, authorization] by name, and of variables by which URLs are reached.
            upstream: (address, port) of mirrors, the best first.
            bring: SHA-256 by name of what is put into the folder of uploads, unless it is there; "" where nobody knows it.
            sent: size by name of what comes over standard input, in this order.

        Returns:
            Those that could not be had.
        """
        if sources:
            said = json.loads(Path(sources).read_text())
            os.environ.update(said["env"])
            self._sources.update(
                {name: [partial(_from_index, *one)] * ATTEMPTS for name, one in said["wheels"].items()}
            )
        self._bring = dict(bring or {})
        self._upstream = [(str(address), int(str(port))) for address, port in upstream]
        expected = [(self._new(name), nbytes) for name, nbytes in (sent or {}).items()]
        threading.Thread(target=_receive, args=(expected,), daemon=True).start()
        threading.Thread(target=self._serve, daemon=True).start()
        lacking = [name for name in [*self._bring] if not self._brought(name)]
        if (pages := self._place / PAGES).is_file():
            self._offer(**json.loads(pages.read_bytes()))
        return lacking

    def _offer(self, pins: Sequence[str], rest: Sequence[str], pages: Mapping[str, list[tuple[str, str]]]) -> None:
        """Let this host's uv have what all have chosen."""
        self._pages = pages
        server = self._http()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{self._secret}"
        links = [f"--find-links {url}/{page}/" for page in pages]
        self._write("passed.txt", ["--no-index", *links, *pins])
        if rest:
            self._write("rest.txt", rest)

    def content(self, name: str) -> Content:
        """A file of this name; asked for where it is not here, and again where that has failed."""
        with self._lock:
            known = self._contents.get(name)
            if known is None or known.failed:
                if name in self._bring and (path := self._place / name).is_file():
                    return Content.of(path)
                known = self._new(name)
                peers = [partial(_from_mirror, self._pem, name, each) for each in self._upstream]
                sources = self._sources.get(name, peers)
                threading.Thread(target=known.fill, args=(sources,), daemon=True).start()
            return known

    def _new(self, name: str) -> Content:
        self._contents[name] = made = Content(partial(self._opened, name))
        return made

    def _opened(self, name: str) -> IO[bytes]:
        with self._lock:
            if name not in self._bring:
                return tempfile.TemporaryFile(dir=self._folder, buffering=0)
            half = self._half(name)
            half.parent.mkdir(mode=0o700, exist_ok=True)
            return _private(half, 0)

    def _half(self, name: str) -> Path:
        """Where a file is until it has come wholly; hosts may share a home."""
        return self._place / f"{name}.{self._nonce}.half"

    def _brought(self, name: str) -> bool:
        """Whether a file is in the folder now, and is what it should be."""
        content, digest = self.content(name), sha256()
        for data in content.pieces():
            digest.update(data)
        well = not content.failed and self._bring[name] in ("", digest.hexdigest())
        with self._lock:
            if well and self._contents.get(name) is content:
                self._half(name).rename(self._place / name)
                del self._contents[name]  # so that it is closed: removed while it is open, it would stay on NFS
            elif not well:
                del self._bring[name]  # for others, it may be tried again
                self._half(name).unlink(missing_ok=True)
        return well

    def _write(self, name: str, lines: Sequence[str]) -> None:
        with _private(self._place / name) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())

    # ------------------------------------------------------------------------------------- to further mirrors

    def _serve(self) -> None:
        secure, strangers = context(self._pem, server=True), Unauthenticated(seconds=HANDSHAKE_SECONDS)
        while True:
            with contextlib.suppress(OSError, RuntimeError):  # no descriptor is left, or no thread
                one = strangers.accept_tls(self._listener, secure)
                threading.Thread(target=self._answer, args=(strangers, one), daemon=True).start()

    def _answer(self, strangers: Unauthenticated, one: ssl.SSLSocket) -> None:
        with contextlib.suppress(OSError, ValueError), one:  # strangers' connections, and those that are lost
            try:
                one.do_handshake()
            finally:
                strangers.known(one)
            one.settimeout(SILENT_SECONDS)
            name, at = one.makefile("rb").readline(1000).decode().split()
            content = self.content(unquote(name))
            one.sendall(b"%d\n" % content.size())
            for data in content.pieces(int(at)):
                one.sendall(data)

    # ------------------------------------------------------------------------------------- to this host's uv

    def _http(self) -> ThreadingHTTPServer:
        """A server whose address stays from start to start where it can: what uv keeps, it knows by the URL."""
        mirror, strangers = self, Unauthenticated(seconds=HANDSHAKE_SECONDS)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = SILENT_SECONDS  # between two requests of uv, too

            def do_GET(self) -> None:
                if mirror._knows(self):
                    strangers.known(self.connection)
                    mirror._reply(self)
                else:
                    self.send_error(404)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
                return strangers.accept(self.socket), ("127.0.0.1", 0)

            def close_request(self, request: socket.socket) -> None:  # type: ignore[override]
                strangers.known(request)
                super().close_request(request)

            def service_actions(self) -> None:
                strangers.close_overdue()  # one who sends a byte now and then is never silent

        for port in (20_000 + int(self._secret[:8], 16) % 12_000, 0):
            with contextlib.suppress(OSError):
                return Server(("127.0.0.1", port), Handler)
        raise OSError("no port is free")

    def _knows(self, asker: BaseHTTPRequestHandler) -> bool:
        """Whether who asks can read this user's files."""
        return hmac.compare_digest(asker.path.lstrip("/").partition("/")[0].encode(), self._secret.encode())

    def _reply(self, to: BaseHTTPRequestHandler) -> None:
        page, _, name = to.path.lstrip("/").partition("/")[2].partition("/")
        files = dict(self._pages.get(page, ()))
        if name and unquote(name) not in files:
            to.send_error(404)
        elif not name:
            links = (f'<a href="{quote(each)}#sha256={digest}">{each}</a>' for each, digest in files.items())
            text = (
                "\n".join(["<!DOCTYPE html><html><body>", *links, "</body></html>"]).replace('#sha256="', '"').encode()
            )
            _send(to, len(text), iter([text]), "no-cache", "text/html")
        else:
            content = self.content(unquote(name))
            _send(to, content.size(), content.pieces(), "max-age=365000000, immutable", "application/octet-stream")


def _send(to: BaseHTTPRequestHandler, size: int, pieces: Iterator[bytes], kept: str, kind: str) -> None:
    if size < 0:
        to.send_error(502)
        return
    to.send_response(200)
    for header, value in (("Content-Type", kind), ("Content-Length", str(size)), ("Cache-Control", kept)):
        to.send_header(header, value)
    to.end_headers()
    if to.command == "GET":
        with contextlib.suppress(OSError):
            size -= sum(to.wfile.write(data) for data in pieces)
        to.close_connection = size != 0


def _private(path: Path, buffering: int = -1) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "w+b", buffering)


def _secret(path: Path) -> str:
    """A secret of this user's on this host; a new one where there is none."""
    with (
        contextlib.suppress(FileExistsError),
        open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file,
    ):
        file.write(secrets.token_hex(16))
    return path.read_text().strip() or secrets.token_hex(16)  # another start writes it just now


# ------------------------------------------------------------------------------------------------ sources


def _from_mirror(
    pem: str, name: str, address: tuple[str, int], at: int, stack: ExitStack
) -> tuple[int, Callable[[int], bytes]]:
    plain = stack.enter_context(socket.create_connection(address, CONNECT_SECONDS))
    plain.settimeout(SILENT_SECONDS)
    one = stack.enter_context(context(pem, server=False).wrap_socket(plain))
    one.sendall(f"{quote(name)} {at}\n".encode())
    stream = cast("BufferedReader", stack.enter_context(one.makefile("rb", PIECE)))
    size = int(stream.readline())
    if size < 0:
        raise FileNotFoundError(name)
    return size, stream.read


def _from_index(url: str, authorization: str, at: int, stack: ExitStack) -> tuple[int, Callable[[int], bytes]]:
    asked = request.Request(url, headers={"User-Agent": "pip (skymagic)"})
    if authorization:
        asked.add_unredirected_header("Authorization", authorization)
    if at:
        asked.add_header("Range", f"bytes={at}-")
    reply = stack.enter_context(request.urlopen(asked, timeout=SILENT_SECONDS))
    size, skipped = int(reply.headers["Content-Length"]), at
    if at and reply.status == 206:
        return size + at, reply.read
    while skipped and (data := reply.read(min(PIECE, skipped))):
        skipped -= len(data)
    return size, reply.read


def _from_input(nbytes: int, at: int, stack: ExitStack) -> tuple[int, Callable[[int], bytes]]:
    return nbytes, _input().read


def _input() -> BufferedReader:
    return cast("BufferedReader", sys.stdin.buffer)


def _receive(expected: Sequence[tuple[Content, int]]) -> None:
    """What the notebook sends; after one that fails, what comes is of no use."""
    well = True
    for content, nbytes in expected:
        content.fill([partial(_from_input, nbytes)] if well else [])
        well = not content.failed


def main() -> None:
    """Serve until standard input ends, or what is sent cannot be kept."""
    if not (line := _input().readline()):
        return
    mirror = Mirror(**json.loads(line))
    print(json.dumps(mirror.port), flush=True)
    if line := _input().readline():
        known = json.loads(line)
        print(json.dumps(lacking := mirror.start(**known)), flush=True)
        while not (lacking and "sent" in known) and _input().read1(PIECE):
            pass
    sys.stdout.flush()
    os._exit(0)  # whoever still asks is not waited for


def program() -> str:
    """It as text, for a Python without skymagic."""
    import inspect

    ours = {f"import {one.__name__}\n": inspect.getsource(one) for one in (context, Unauthenticated)}
    lines = inspect.getsource(sys.modules[__name__]).splitlines(keepends=True)
    texts = (
        ours[line.partition(" ")[2].partition(" ")[2]] if line.startswith("from skymagic.") else line for line in lines
    )
    return "".join(texts) + "\n\nmain()\n"
