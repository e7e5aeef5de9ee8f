"""A host's mirror of wheels: what an index or the mirror of another host has, for the uv of this host and for further mirrors.

Chain replication; each piece goes on as it comes::

    index → mirror of host 0 → mirror of host 1 → …     TLS between them, with a certificate made for this one start
                  ↓                   ↓
              uv there            uv there              http://127.0.0.1, at a path that this user alone knows

It runs in whatever Python a host has before anything of ours is there (see `program`): with the standard library alone. Nothing
of it stays: what it holds are files without names. Its standard input::

    {"pem", "address", "folder", "place"}       it listens, and says its port
    {"sources", "files", "upstream", "bring"}   what it knows and whom it asks; it says which files it could not bring
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import IO, cast
from urllib import request
from urllib.parse import quote, unquote

from skymagic.wire.tls import context

PAGES = "pages.json"
"""What all mirrors of a chain serve: ``pins`` and ``rest`` as lines of requirements, ``pages`` as lists of [file, sha256]."""
PIECE = 1 << 18
CONNECT_SECONDS = 5.0
SILENT_SECONDS = 60.0
ATTEMPTS = 3
"""How often a file is asked of an index; from where it was left."""

Begin = Callable[[int, ExitStack], tuple[int, Callable[[int], bytes]]]
"""Opens a source at an offset: the size of the whole, and what reads on from there, b"" at its end."""


class Content:
    """A file on its way: from the first source that has it to all who read it, while it comes."""

    def __init__(self, folder: str, sources: Sequence[Begin]) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (its readers outlive this call)
        self._changed = threading.Condition()
        self._size, self._come, self._over = -1, 0, False
        threading.Thread(target=self._fill, args=(sources,), daemon=True).start()

    def _fill(self, sources: Sequence[Begin]) -> None:
        for begin in sources:
            with contextlib.suppress(Exception), ExitStack() as stack:  # the next one goes on from here
                size, read = begin(self._come, stack)
                self._tell(size, 0)
                while self._come < size and (data := read(PIECE)):
                    self._file.write(data)
                    self._tell(size, len(data))
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
        files: Mapping[str, str] | None = None,
        upstream: Sequence[Sequence[object]] = (),
        bring: Sequence[str] = (),
    ) -> list[str]:
        """Serve.

        Args:
            sources: a file of [URL, authorization] by name, and of variables by which URLs are reached.
            files: paths here by name. upstream: (address, port) of mirrors, the best first.
            bring: names of what is put into the folder of uploads.

        Returns:
            Those that could not be had.
        """
        if sources:
            said = json.loads(Path(sources).read_text())
            os.environ.update(said["env"])
            self._sources.update(
                {name: [partial(_from_index, *one)] * ATTEMPTS for name, one in said["wheels"].items()}
            )
        self._sources.update({name: [partial(_from_file, path)] for name, path in (files or {}).items()})
        self._upstream = [(str(address), int(str(port))) for address, port in upstream]
        threading.Thread(target=self._serve, daemon=True).start()
        lacking = [name for name in bring if not self._brought(name)]
        pages = self.content(PAGES)
        try:
            found = json.loads(b"".join(pages.pieces()))
        except ValueError:
            return [*lacking, PAGES]
        self._pages = found["pages"]
        server = self._http()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{self._secret}"
        links = [f"--find-links {url}/{page}/" for page in self._pages]
        self._write("passed.txt", ["--no-index", *links, *found["pins"]])
        if found["rest"]:
            self._write("rest.txt", found["rest"])
        return lacking

    def content(self, name: str) -> Content:
        """A file of this name; asked for where it is not here, and again where that has failed."""
        with self._lock:
            known = self._contents.get(name)
            if known is None or known.failed:
                peers = [partial(_from_mirror, self._pem, name, each) for each in self._upstream]
                known = self._contents[name] = Content(self._folder, self._sources.get(name, peers))
            return known

    def _brought(self, name: str) -> bool:
        path, content = self._place / Path(name).name, self.content(name)
        half = path.with_name(f"{path.name}.half")
        with _private(half) as file:
            come = sum(file.write(data) for data in content.pieces())
        if come != content.size():
            half.unlink()
            return False
        half.rename(path)
        return True

    def _write(self, name: str, lines: Sequence[str]) -> None:
        with _private(self._place / name) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())

    # ------------------------------------------------------------------------------------- to further mirrors

    def _serve(self) -> None:
        secure = context(self._pem, server=True)
        while True:
            plain, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(secure, plain), daemon=True).start()

    def _answer(self, secure: ssl.SSLContext, plain: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), plain:  # strangers' connections, and those that are lost
            plain.settimeout(SILENT_SECONDS)
            with secure.wrap_socket(plain, server_side=True) as one:
                name, at = one.makefile("rb").readline(1000).decode().split()
                content = self.content(unquote(name))
                one.sendall(b"%d\n" % content.size())
                for data in content.pieces(int(at)):
                    one.sendall(data)

    # ------------------------------------------------------------------------------------- to this host's uv

    def _http(self) -> ThreadingHTTPServer:
        """A server whose address stays from start to start where it can: what uv keeps, it knows by the URL."""
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                mirror._reply(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        for port in (20_000 + int(self._secret[:8], 16) % 12_000, 0):
            with contextlib.suppress(OSError):
                return Server(("127.0.0.1", port), Handler)
        raise OSError("no port is free")

    def _reply(self, to: BaseHTTPRequestHandler) -> None:
        secret, _, rest = to.path.lstrip("/").partition("/")
        page, _, name = rest.partition("/")
        files = dict(self._pages.get(page, ()))
        known = hmac.compare_digest(secret.encode(), self._secret.encode()) and (not name or unquote(name) in files)
        if not known:
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


def _private(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


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
    return size, stream.read1


def _from_index(url: str, authorization: str, at: int, stack: ExitStack) -> tuple[int, Callable[[int], bytes]]:
    asked = request.Request(url, headers={"User-Agent": "pip (skymagic)"})
    if authorization:
        asked.add_unredirected_header("Authorization", authorization)
    if at:
        asked.add_header("Range", f"bytes={at}-")
    reply = stack.enter_context(request.urlopen(asked, timeout=SILENT_SECONDS))
    size, skipped = int(reply.headers["Content-Length"]), at
    if at and reply.status == 206:
        return size + at, reply.read1
    while skipped and (data := reply.read(min(PIECE, skipped))):
        skipped -= len(data)
    return size, reply.read1


def _from_file(path: str, at: int, stack: ExitStack) -> tuple[int, Callable[[int], bytes]]:
    data = Path(path).read_bytes()
    return len(data), BytesIO(data[at:]).read


def main() -> None:
    """Serve until standard input ends."""
    if not (line := sys.stdin.readline()):
        return
    mirror = Mirror(**json.loads(line))
    print(json.dumps(mirror.port), flush=True)
    if line := sys.stdin.readline():
        print(json.dumps(mirror.start(**json.loads(line))), flush=True)
        sys.stdin.read()
    sys.stdout.flush()
    os._exit(0)  # whoever still asks is not waited for


def program() -> str:
    """It as text, for a Python without skymagic."""
    import inspect

    ours = inspect.getsource(context)
    lines = inspect.getsource(sys.modules[__name__]).splitlines(keepends=True)
    return "".join(ours if line.endswith(".tls import context\n") else line for line in lines) + "\n\nmain()\n"
