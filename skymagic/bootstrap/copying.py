"""Pass folders from one host to others of the same kind, with any Python that the hosts have.

This is chain replication: each host unpacks the stream and forwards it at the same time::

    host 0: tar → host 1 → host 2 → …      frames in TLS, certificate made for this start
                   tar      tar

`program` returns this file as text. A host without skymagic runs it with only the standard library
and the system's tar. It answers each line of its standard input with one line, both in JSON::

    {"pem", "address", "unless"}
        the port where the next host reaches it, or null if the file `unless` exists
    {"upstream", "folder", "names", "target"}
        whether the complete copy is on this host

A frame is a 4-byte length followed by that many bytes. An empty frame ends the stream, so that a
broken connection is never mistaken for the end.
"""

from __future__ import annotations

import contextlib
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

PIECE = 1 << 18
"""Bytes that are forwarded together.

With smaller pieces, TLS takes processor time that unpacking needs.
"""
FOLLOWER_SECONDS = 15.0
"""Seconds that a host waits for the next host before it unpacks alone."""
CONNECT_SECONDS = 5.0
SILENT_SECONDS = 60.0
HANDSHAKE_SECONDS = 10.0
"""Seconds that a connection may stay open before the peer presents the certificate."""
COPIED = "copied"
"""Name of the folder, inside the upload folder, into which copies are unpacked."""

Sink = Callable[[bytes], object]


def pack_folders(folder: str, names: Sequence[str]) -> Iterator[bytes]:
    """Yield folders below `folder` as a tar stream, in pieces.

    Raises:
        OSError: tar failed.
    """
    command = ["tar", "-C", folder, "-cf", "-", *names]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pipesize=1 << 20
    ) as tar:
        assert tar.stdout is not None
        while data := tar.stdout.read(PIECE):
            yield data
    if tar.returncode != 0:
        raise OSError("tar has failed")


def receive_pieces(
    pem: str, upstream: tuple[str, int], stack: contextlib.ExitStack
) -> Iterator[bytes]:
    """Connect to the previous host in the chain and yield the pieces that it sends.

    Raises:
        OSError: the connection failed. The iterator raises it too if the stream breaks off.
    """
    plain = stack.enter_context(socket.create_connection(upstream, CONNECT_SECONDS))
    plain.settimeout(SILENT_SECONDS)
    secure = stack.enter_context(context(pem, server=False).wrap_socket(plain))
    stream = stack.enter_context(secure.makefile("rb", PIECE))

    def read_exactly(nbytes: int) -> bytes:
        data: bytes = stream.read(nbytes)
        if len(data) != nbytes:
            raise OSError("the stream breaks off")
        return data

    def frames() -> Iterator[bytes]:
        while nbytes := int.from_bytes(read_exactly(4), "big"):
            yield read_exactly(nbytes)

    return frames()


def followers(pem: str, listener: socket.socket) -> queue.SimpleQueue[ssl.SSLSocket]:
    """Accept connections in the background and queue those that present the certificate.

    Strangers cannot block them, neither with many connections nor by staying silent.
    """
    connections: queue.SimpleQueue[ssl.SSLSocket] = queue.SimpleQueue()
    door = Door(listener, connections.put, context(pem, server=True), seconds=HANDSHAKE_SECONDS)

    def accept() -> None:
        while True:
            door.accept()

    threading.Thread(target=accept, daemon=True).start()
    return connections


def framed_sink(connection: ssl.SSLSocket) -> Sink:
    """Return a function that sends pieces to the next host, and b"" at the end."""
    connection.settimeout(SILENT_SECONDS)

    def send(data: bytes) -> None:
        connection.sendall(len(data).to_bytes(4, "big") + data)

    return send


def copy_pieces(pieces: Iterator[bytes], sinks: Sequence[Sink]) -> bool:
    """Pass all pieces to all sinks and return True if the stream was complete.

    A sink that fails gets no more pieces and does not hold up the others.
    """
    active_sinks = list(sinks)

    def give(data: bytes) -> None:
        for sink in [*active_sinks]:
            try:
                sink(data)
            except OSError:
                active_sinks.remove(sink)

    try:
        for data in pieces:
            give(data)
    except (OSError, ValueError):
        return False
    give(b"")
    return True


def unpack_pieces(pieces: Iterator[bytes], sinks: Sequence[Sink], folder: Path) -> bool:
    """Unpack the pieces into a folder while passing them to other sinks.

    Returns:
        True if everything was unpacked.
    """
    folder.mkdir(mode=0o700, parents=True)
    # Without -o, tar running as root would give the files to whichever user has the same numeric ID
    # on this host.
    command = ["tar", "-C", str(folder), "-xof", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pipesize=1 << 20
    ) as tar:
        assert tar.stdin is not None
        is_complete = copy_pieces(pieces, [*sinks, tar.stdin.write])
        with contextlib.suppress(OSError):
            tar.stdin.close()
    return is_complete and tar.returncode == 0


class ChainLink:
    """Program on one host of the chain.

    Args:
        pem: certificate and key shared by all hosts of the chain.
        address: address of this host at which the next one reaches it.
    """

    def __init__(self, pem: str, address: str) -> None:
        self._pem = pem
        listener = socket.create_server((address, 0), backlog=128)
        self.port: int = listener.getsockname()[1]
        # Accept right away: hosts connect in any order, and a host must not wait for those behind
        # it before it connects to the one before it.
        self._followers = followers(pem, listener)

    def take(
        self,
        folder: str,
        names: Sequence[str],
        upstream: Sequence[str | int] = (),
        target: str = "",
        last: bool = False,
    ) -> bool:
        """Send or receive folders, and return True if all of them are on this host.

        Args:
            folder: skymagic's folder on this host.
            names: paths below `folder` to copy.
            upstream: address and port of the previous host; () for the first host.
            target: the upload folder, into which the copies are put.
            last: whether this is the last host of the chain.
        """
        with contextlib.ExitStack() as stack:
            if not upstream:
                return copy_pieces(pack_folders(folder, names), self._sinks(stack, last))
            pieces = receive_pieces(self._pem, (str(upstream[0]), int(upstream[1])), stack)
            return unpack_pieces(pieces, self._sinks(stack, last), Path(target, COPIED))

    def _sinks(self, stack: contextlib.ExitStack, last: bool) -> list[Sink]:
        """Return the sink for the next host, or no sink if this is the last host.

        A next host that does not connect in time is left out too.
        """
        try:
            return (
                []
                if last
                else [
                    framed_sink(stack.enter_context(self._followers.get(timeout=FOLLOWER_SECONDS)))
                ]
            )
        except queue.Empty:
            return []


def main() -> None:
    """Read both lines and answer them."""
    os.umask(0o077)  # unpacked files keep the modes that tar recorded
    settings = json.loads(sys.stdin.readline())
    if (unless := settings.pop("unless")) and Path(unless).exists():
        print("null", flush=True)
        os._exit(0)
    link = ChainLink(**settings)
    print(link.port, flush=True)
    is_complete = False
    # No line arrives, the connection fails, tar is missing, or the disk is full.
    with contextlib.suppress(OSError, ValueError):
        is_complete = link.take(**json.loads(sys.stdin.readline()))
    print(json.dumps(is_complete), flush=True)
    # Do not wait for connections of strangers.
    os._exit(0)


def program() -> str:
    """Return the text of this file for a Python without skymagic."""
    import inspect

    sources = {
        f"import {copied_object.__name__}\n": inspect.getsource(copied_object)
        for copied_object in (context, Door)
    }
    lines = inspect.getsource(sys.modules[__name__]).splitlines(keepends=True)
    texts = (
        sources[line.partition(" ")[2].partition(" ")[2]]
        if line.startswith("from skymagic.")
        else line
        for line in lines
    )
    return "".join(texts) + "\n\nmain()\n"
