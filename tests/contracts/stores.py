"""Stores of content, an implementation each: a folder here, and the stores of one node or several behind a server each."""

from __future__ import annotations

import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skymagic.content.base import Store
from skymagic.content.chunks import digest
from skymagic.content.remote.remote_store import RemoteStore
from skymagic.content.store import OVERFLOW, NodeStore, create, overflow, remove
from skymagic.kernels.store.server import LOCK
from skymagic.providers.local import ChildTransport
from skymagic.wire.codec import Transport
from tests.lab.nodes import node_of, start

MB = 1 << 20


class Nodes(ABC):
    """Nodes with a folder each, and the notebook's store of what they have.

    Attributes:
        store: as the notebook uses it.
        folders: of each node, as its ranks use them.
    """

    store: Store
    folders: list[str]

    @abstractmethod
    def moved(self) -> int:
        """Return the bytes that have been written here, or have left for the nodes, so far."""

    @abstractmethod
    def close(self) -> None:
        """End the store and remove the folders. Safe to call twice."""

    def files(self, node: int) -> list[Path]:
        """What lies on a node, complete or not."""
        places = (Path(self.folders[node]), overflow(self.folders[node]))
        found = (path for place in places if place.exists() for path in place.iterdir())
        return sorted(path for path in found if path.name not in (LOCK, OVERFLOW))

    def content(self, node: int, key: str) -> memoryview:
        """A value as a rank of the node maps it."""
        return NodeStore(self.folders[node]).map(self.store.name(key))

    def everywhere(self, key: str) -> bool:
        """Whether every node has the value."""
        return all(digest([self.content(node, key)]) == key for node in range(len(self.folders)))


class Here(Nodes):
    """The folder of this machine. Takes options of the store."""

    def __init__(self, **options: Any) -> None:
        self.folders = [create()]
        self.store = NodeStore(self.folders[0], **options)
        self._inodes: dict[int, int] = {}

    def moved(self) -> int:
        self._inodes |= {status.st_ino: status.st_size for status in map(os.stat, self.files(0))}
        return sum(self._inodes.values())

    def close(self) -> None:
        self.store.close()
        remove(self.folders[0])


class Counted:
    """A transport that counts what passes through it."""

    def __init__(self, inner: ChildTransport, breaks: float) -> None:
        self.inner = inner
        self.sent = 0
        self.got = 0
        self.breaks = breaks
        """Bytes after which nothing passes any more, in either direction."""
        self.pause = 0.0
        """Seconds that each reading takes."""

    @property
    def pid(self) -> int:
        """The server's process."""
        return self.inner._child.pid

    def read(self) -> bytes:
        """From the server."""
        time.sleep(self.pause)  # a slow line
        data = self.inner.read() if self.sent + self.got < self.breaks else b""
        self.got += len(data)
        return data

    def write(self, data: bytes | memoryview) -> None:
        """To the server."""
        if self.sent + self.got > self.breaks:
            raise BrokenPipeError
        self.inner.write(data)
        self.sent += len(data)

    def complaint(self) -> str:
        """Its standard error."""
        return self.inner.complaint()

    def close(self) -> None:
        """End it."""
        self.inner.close()


class Cluster(Nodes):
    """Several nodes on this machine: a folder and a server each.

    Args:
        count: of nodes.
        options: of the store.

    Attributes:
        breaks: for each node, after how many bytes its next lines break.
        before: words before each node's command.
    """

    store: RemoteStore

    def __init__(self, count: int, **options: object) -> None:
        self.breaks: list[list[float]] = [[] for _ in range(count)]
        self.before: list[list[str]] = [[] for _ in range(count)]
        self.folders = [create() for _ in range(count)]
        self.lines: list[list[Counted]] = [[] for _ in range(count)]
        self.said: list[str] = []
        nodes = self.nodes = [
            node_of(n, f"node{n}", self._open(n), "127.0.0.1") for n in range(count)
        ]
        self.store = RemoteStore(nodes, start, self.said.append, **options)  # type: ignore[arg-type]

    def _open(self, node: int) -> Callable[[], Transport]:
        def opened() -> Transport:
            command = [
                *self.before[node],
                sys.executable,
                "-m",
                "skymagic.kernels.store.server",
                self.folders[node],
            ]
            breaks = self.breaks[node].pop(0) if self.breaks[node] else float("inf")
            self.lines[node].append(Counted(ChildTransport(command), breaks))
            return self.lines[node][-1]

        return opened

    def sent(self) -> list[int]:
        """Bytes that went to each node."""
        return [sum(line.sent for line in lines) for lines in self.lines]

    def moved(self) -> int:
        return sum(self.sent())

    def cut(self, node: int) -> None:
        """Kill the node's server, and with it the line to it."""
        os.kill(self.lines[node][-1].pid, signal.SIGKILL)

    def close(self) -> None:
        self.store.close()
        for folder in self.folders:
            remove(folder)


def put(cluster: Nodes, data: bytes) -> str:
    """Put a value and wait until it is everywhere."""
    key = cluster.store.put(None, [data], len(data))
    cluster.store.settle()
    return key
