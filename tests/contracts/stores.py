"""Stores of content, an implementation each: a folder here, and stores of nodes behind a server each, here or on machines of their own."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil

from skymagic.content.base import Store
from skymagic.content.chunks import digest
from skymagic.content.remote.remote_store import RemoteStore
from skymagic.content.store import OVERFLOW, NodeStore, create, overflow, remove
from skymagic.kernels.store.server import LOCK
from skymagic.providers.local import ChildTransport
from skymagic.ssh.config import SshConfig
from skymagic.ssh.connecting import connect
from skymagic.ssh.host import HostConnection
from skymagic.ssh.hostlist import HostSpec
from skymagic.wire.codec import Transport
from tests.lab.nodes import node_of, start

if TYPE_CHECKING:
    from tests.lab.machines import Machine, Machines

MB = 1 << 20
ROOT = str(Path(__file__).resolve().parents[2])
SERVER = "skymagic.kernels.store.server"


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

    def __init__(self, inner: Any, breaks: float) -> None:
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
        pid: int = self.inner._child.pid
        return pid

    def read(self) -> bytes:
        """From the server."""
        time.sleep(self.pause)  # a slow line
        data: bytes = self.inner.read() if self.sent + self.got < self.breaks else b""
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
        return str(self.inner.complaint())

    def close(self) -> None:
        """End it."""
        self.inner.close()


class Remote(Nodes):
    """Nodes with a server each.

    Args:
        nodes: with what starts their servers.
        folders: of each node, as this machine reaches them.
        options: of the store.

    Attributes:
        breaks: for each node, after how many bytes its next lines break.
        lines: the connections to each node, the last one at the end.
        said: what the user is told.
    """

    store: RemoteStore

    def __init__(self, names: list[str], addresses: list[str], **options: object) -> None:
        self.breaks: list[list[float]] = [[] for _ in names]
        self.lines: list[list[Counted]] = [[] for _ in names]
        self.said: list[str] = []
        self.nodes = [
            node_of(n, name, partial(self._opened, n), address)
            for n, (name, address) in enumerate(zip(names, addresses, strict=True))
        ]
        self.store = RemoteStore(self.nodes, start, self.said.append, **options)  # type: ignore[arg-type]

    @abstractmethod
    def opened(self, node: int) -> Any:
        """Start a node's server and return the connection to it."""

    @abstractmethod
    def server(self, node: int) -> int:
        """Return the process that serves a node."""

    def _opened(self, node: int) -> Transport:
        breaks = self.breaks[node].pop(0) if self.breaks[node] else float("inf")
        self.lines[node].append(Counted(self.opened(node), breaks))
        return self.lines[node][-1]

    def sent(self) -> list[int]:
        """Bytes that went to each node."""
        return [sum(line.sent for line in lines) for lines in self.lines]

    def moved(self) -> int:
        return sum(self.sent())

    def cut(self, node: int) -> None:
        """Kill the node's server, and with it the line to it."""
        os.kill(self.server(node), signal.SIGKILL)

    def close(self) -> None:
        self.store.close()
        for folder in self.folders:
            remove(folder)


class Cluster(Remote):
    """Several nodes on this machine: a folder and a server each.

    Args:
        count: of nodes.
        options: of the store.

    Attributes:
        before: words before each node's command.
    """

    def __init__(self, count: int, **options: object) -> None:
        self.before: list[list[str]] = [[] for _ in range(count)]
        self.folders = [create() for _ in range(count)]
        super().__init__([f"node{n}" for n in range(count)], ["127.0.0.1"] * count, **options)

    def opened(self, node: int) -> ChildTransport:
        return ChildTransport(
            [*self.before[node], sys.executable, "-m", SERVER, self.folders[node]]
        )

    def server(self, node: int) -> int:
        return self.lines[node][-1].pid


class Apart(Remote):
    """Machines of their own behind a link, reached over SSH.

    Args:
        hosts: the machines.
        options: of the store.

    Attributes:
        dead_after: seconds after which a machine that does not answer is dead.
    """

    dead_after = 10.0

    def __init__(self, hosts: Machines, **options: object) -> None:
        self.hosts = hosts
        self.connections: dict[int, HostConnection] = {}
        self.folder = f"/dev/shm/skymagic-{os.urandom(8).hex()}"
        self.pids = [cast("Machine", host).space.pid for host in hosts]
        self.folders = [f"/proc/{pid}/root{self.folder}" for pid in self.pids]
        super().__init__([host.name for host in hosts], [host.address for host in hosts], **options)

    def opened(self, node: int) -> Any:
        words = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", SERVER, self.folder]
        return self.connection(node).open(shlex.join(words))

    def connection(self, node: int) -> HostConnection:
        """A connection that is not dead."""
        known = self.connections.get(node)
        if known is None or not known.alive:
            name = self.hosts[node].name
            endpoint = SshConfig(self.hosts.config).endpoint(HostSpec(name, name))
            known = self.connections[node] = connect(replace(endpoint, timeout=self.dead_after))
        return known

    def server(self, node: int) -> int:
        words = ["-m", SERVER, self.folder]
        return next(
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if (process.info["cmdline"] or [])[1:] == words
            and _namespace(process.pid) == _namespace(self.pids[node])
        )

    def close(self) -> None:
        self.store.close()
        for connection in self.connections.values():
            connection.close()
        for folder in self.folders:
            remove(folder)


def _namespace(pid: int) -> str:
    """The machine that a process runs on."""
    return str(Path(f"/proc/{pid}/ns/mnt").readlink())


def put(nodes: Nodes, data: bytes, progress: Callable[[int], None] | None = None) -> str:
    """Put a value and wait until it is everywhere."""
    key = nodes.store.put(None, [data], len(data), progress)
    nodes.store.settle()
    return key
