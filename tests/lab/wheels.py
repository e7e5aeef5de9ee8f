"""Wheels and package indexes for tests: tiny distributions, in a folder or served over HTTP."""

from __future__ import annotations

import hashlib
import socket
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


def make_wheel(folder: Path, name: str, version: str, requires: Sequence[str] = ()) -> Path:
    """A wheel of one module, which holds its version; `requires` are its requirements."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-py3-none-any.whl"
    files = {f"{module}.py": f"__version__ = {version!r}\n", **dist_info(name, version, requires)}
    files[f"{module}-{version}.dist-info/WHEEL"] = (
        "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = "".join(f"{each},,\n" for each in files)
    files[f"{module}-{version}.dist-info/RECORD"] = (
        f"{record}{module}-{version}.dist-info/RECORD,,\n"
    )
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in files.items():
            archive.writestr(each, text)
    return path


def dist_info(name: str, version: str, requires: Sequence[str] = ()) -> Mapping[str, str]:
    """The files that make an environment have a distribution."""
    needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    return {f"{name.replace('-', '_')}-{version}.dist-info/METADATA": text}


def installed(folder: Path, name: str, version: str, requires: Sequence[str] = ()) -> None:
    """Let a folder that is on sys.path have a distribution, without its code."""
    for file, text in dist_info(name, version, requires).items():
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text(text)


@contextmanager
def served(
    folder: Path,
    asked: list[str] | None = None,
    at: tuple[str, int] = ("127.0.0.1", 0),
    admits: Callable[[str], bool] = lambda authorization: True,
) -> Iterator[str]:
    """A package index of the wheels in a folder; its URL. The name of each wheel that is asked for goes to `asked`.

    A wheel is yanked that has a file of its name and ``.yanked`` beside it. `admits` is told what each request says of who asks.
    """

    class Index(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            part = self.path.strip("/").split("/")
            if not admits(self.headers.get("Authorization", "")):
                self.answer(401, b"", "text/plain")
            elif part[0] == "simple":
                files = [
                    path.name
                    for path in folder.glob("*.whl")
                    if path.name.split("-")[0] == part[1].replace("-", "_")
                ]
                links = "".join(
                    f'<a href="/files/{name.replace("+", "%2B")}#sha256={sha256_of(folder / name)}" data-core-metadata="true"'
                    f"{' data-yanked' if (folder / f'{name}.yanked').exists() else ''}>{name}</a>\n"
                    for name in files
                )
                self.answer(
                    200 if files else 404,
                    f"<!DOCTYPE html><html><body>{links}</body></html>".encode(),
                    "text/html",
                )
            elif part[1].endswith(".metadata"):
                self.answer(
                    200,
                    metadata_of(folder / unquote(part[1]).removesuffix(".metadata")),
                    "text/plain",
                )
            else:
                if asked is not None and self.command == "GET":
                    asked.append(unquote(part[1]))
                self.answer(
                    200, (folder / unquote(part[1])).read_bytes(), "application/octet-stream"
                )

        def answer(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 256  # uv asks for many things at once; whoever is turned away comes again after 1, 3, 7 … s
        daemon_threads = True  # connections that are kept alive are not waited for

    with Server(at, Index) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{at[0]}:{server.server_port}/simple"
        finally:
            server.shutdown()
            thread.join()


def sha256_of(path: Path) -> str:
    """The hash that an index announces of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def metadata_of(path: Path) -> bytes:
    """What a wheel says of itself (PEP 658)."""
    with zipfile.ZipFile(path) as archive:
        return archive.read(
            next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        )


@contextmanager
def mute() -> Iterator[tuple[str, list[socket.socket]]]:
    """An index that accepts connections and never answers: its URL, and the connections that it was asked over."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                connection, _ = listener.accept()
                taken.append(connection)
                if not connection.recv(1, socket.MSG_PEEK):  # nobody asks anything: the end of this
                    return

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/simple", taken
        finally:
            socket.create_connection(listener.getsockname()).close()
            thread.join()
            for connection in taken:
                connection.close()
