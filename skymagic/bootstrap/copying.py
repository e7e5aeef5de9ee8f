"""Folders of one host for others of its kind: a program that passes them from host to host, in whatever Python a host has.

Chain replication; each host unpacks what comes, and sends it on while it comes::

    host 0: tar → host 1 → host 2 → …      frames in TLS, with a certificate made for this one start
                   tar      tar

`program` is this file as text: a host without skymagic runs it with the standard library alone, and with its system's tar. It
answers each line of its standard input by one line, both in JSON::

    {"pem", "address", "unless"}               the port where the next host reaches it; null where the file `unless` exists
    {"upstream", "folder", "names", "place"}   whether all of it is here

A frame is 4 bytes of length and a piece; an empty one ends the stream, so that a connection that breaks is never taken for the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import socket
import ssl
import subprocess
import sys
import tempfile  # noqa: F401 (`program`: the text of `context` needs it)
import threading
import time  # noqa: F401 (`program`: the text of Door needs it)
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any  # noqa: F401

from skymagic.wire.authentication import Door
from skymagic.wire.tls import context

PIECE = (
    1 << 18
)  # bytes that go on together; with fewer at a time TLS takes processor time that is needed for unpacking
FOLLOWER_SECONDS = 15.0
"""For which a host waits for the next one before it unpacks alone."""
CONNECT_SECONDS = 5.0
SILENT_SECONDS = 60.0
HANDSHAKE_SECONDS = 10.0
"""For which a connection may stay open before its sender shows the certificate."""
COPIED = "copied"
"""Name of the folder of uploads' folder into which copies are unpacked."""

Sink = Callable[[bytes], object]


def packed(folder: str, names: Sequence[str]) -> Iterator[bytes]:
    """Folders below `folder` as a tar stream, in pieces; no pool installs into them meanwhile.

    Raises:
        OSError: tar has failed.
    """
    with open(f"{folder}/{names[0]}.lock", "a") as lock, contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)  # as install.sh does; some file systems have no locks
        command = ["tar", "-C", folder, "-cf", "-", *names]
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pipesize=1 << 20
        ) as tar:
            assert tar.stdout is not None
            while data := tar.stdout.read(PIECE):
                yield data
        if tar.returncode == 0:
            return
    raise OSError("tar has failed")


def received(pem: str, upstream: tuple[str, int], stack: contextlib.ExitStack) -> Iterator[bytes]:
    """Connect to the host before this one; the pieces that it sends. Raises OSError, later too, where it breaks off."""
    plain = stack.enter_context(socket.create_connection(upstream, CONNECT_SECONDS))
    plain.settimeout(SILENT_SECONDS)
    secure = stack.enter_context(context(pem, server=False).wrap_socket(plain))
    stream = stack.enter_context(secure.makefile("rb", PIECE))

    def exactly(nbytes: int) -> bytes:
        data: bytes = stream.read(nbytes)
        if len(data) != nbytes:
            raise OSError("the stream breaks off")
        return data

    def frames() -> Iterator[bytes]:
        while nbytes := int.from_bytes(exactly(4), "big"):
            yield exactly(nbytes)

    return frames()


def followers(pem: str, listener: socket.socket) -> queue.SimpleQueue[ssl.SSLSocket]:
    """Accept connections from now on: those that have the certificate. Strangers keep them out neither by number nor by silence."""
    known: queue.SimpleQueue[ssl.SSLSocket] = queue.SimpleQueue()
    door = Door(listener, known.put, context(pem, server=True), seconds=HANDSHAKE_SECONDS)

    def accept() -> None:
        while True:
            door.accept()

    threading.Thread(target=accept, daemon=True).start()
    return known


def framed(one: ssl.SSLSocket) -> Sink:
    """Send pieces to the next host; b"" at the end."""
    one.settimeout(SILENT_SECONDS)

    def send(data: bytes) -> None:
        one.sendall(len(data).to_bytes(4, "big") + data)

    return send


def copied(pieces: Iterator[bytes], sinks: Sequence[Sink]) -> bool:
    """Give all pieces to all sinks; whether all of them came. A sink that fails gets no more, and keeps nothing from the others."""
    left = list(sinks)

    def give(data: bytes) -> None:
        for sink in [*left]:
            try:
                sink(data)
            except OSError:
                left.remove(sink)

    try:
        for data in pieces:
            give(data)
    except (OSError, ValueError):
        return False
    give(b"")
    return True


def unpacked(pieces: Iterator[bytes], sinks: Sequence[Sink], place: Path) -> bool:
    """Unpack pieces in a folder, beside other sinks; whether all of it is there."""
    place.mkdir(mode=0o700, parents=True)
    # as root, tar would give the files to whoever had the number of their owner there
    command = ["tar", "-C", str(place), "-xof", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pipesize=1 << 20
    ) as tar:
        assert tar.stdin is not None
        well = copied(pieces, [*sinks, tar.stdin.write])
        with contextlib.suppress(OSError):
            tar.stdin.close()
    return well and tar.returncode == 0


def moved(programs: Path, before: str, now: str) -> None:
    """Correct the first lines of an environment's programs, which name its interpreter by its path."""
    for path in programs.iterdir() if before != now and programs.is_dir() else ():
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            if data.startswith(b"#!") and before.encode() in data:
                path.write_bytes(data.replace(before.encode(), now.encode()))


class ChainLink:
    """A host's place in the chain: what it sends or receives.

    Args:
        pem: certificate and key of all hosts of the chain.
        address: of this host, by which the next one reaches it.
    """

    def __init__(self, pem: str, address: str) -> None:
        self._pem = pem
        listener = socket.create_server((address, 0), backlog=128)
        self.port: int = listener.getsockname()[1]
        # from now on: hosts connect in any order, and none waits for those behind it before it greets the one before it
        self._followers = followers(pem, listener)

    def take(
        self,
        folder: str,
        names: Sequence[str],
        upstream: Sequence[str | int] = (),
        place: str = "",
        source: str = "",
        last: bool = False,
    ) -> bool:
        """Send or receive folders; whether all of them are here.

        Args:
            folder: skymagic's folder here. names: of what is copied, below it; the environment first.
            upstream: address and port of the host before this one; () for the first.
            place: the folder of uploads, where copies are put. source: skymagic's folder on the first host.
            last: whether no other host follows.
        """
        with contextlib.ExitStack() as stack:
            if not upstream:
                return copied(packed(folder, names), self._sinks(stack, last))
            pieces = received(self._pem, (str(upstream[0]), int(upstream[1])), stack)
            here = Path(place, COPIED)
            if not unpacked(pieces, self._sinks(stack, last), here):
                return False
            moved(here / names[0] / "bin", f"{source}/{names[0]}", f"{folder}/{names[0]}")
            return True

    def _sinks(self, stack: contextlib.ExitStack, last: bool) -> list[Sink]:
        """The next host, unless there is none, or it does not come."""
        try:
            return (
                []
                if last
                else [framed(stack.enter_context(self._followers.get(timeout=FOLLOWER_SECONDS)))]
            )
        except queue.Empty:
            return []


def main() -> None:
    """Answer both lines."""
    os.umask(0o077)  # an unpacked environment has the modes of its files
    known = json.loads(sys.stdin.readline())
    if (unless := known.pop("unless")) and Path(unless).exists():
        print("null", flush=True)
        os._exit(0)
    link = ChainLink(**known)
    print(link.port, flush=True)
    well = False
    with contextlib.suppress(OSError, ValueError):  # no line comes; no connection; no tar; no room
        well = link.take(**json.loads(sys.stdin.readline()))
    print(json.dumps(well), flush=True)
    os._exit(0)  # strangers' connections are not waited for


def program() -> str:
    """The text of this file, for a Python without skymagic."""
    import inspect

    ours = {f"import {one.__name__}\n": inspect.getsource(one) for one in (context, Door)}
    lines = inspect.getsource(sys.modules[__name__]).splitlines(keepends=True)
    texts = (
        ours[line.partition(" ")[2].partition(" ")[2]]
        if line.startswith("from skymagic.")
        else line
        for line in lines
    )
    return "".join(texts) + "\n\nmain()\n"
