"""Unblocking a rank in a collective by shutting its connections down (``shutdown(2)``), without losing its variables.

SIGINT, ``abort()`` and ``destroy_process_group()`` from another thread free nobody who is blocked in gloo. Shutting down the
*connected* sockets that the process group opened does: each blocked call raises at once. A *listening* socket must be left
alone, for gloo's accept thread would terminate the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import ChainMap
from collections.abc import Iterator, Mapping


def sockets() -> dict[int, str]:
    """The sockets this process has open: file descriptor → the kernel's name of the socket (its inode)."""
    found = {}
    for entry in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith("socket:"):
                found[int(entry)] = target
    return found


class Connections:
    """The sockets that process groups have opened, so that they can be shut down later from another thread."""

    def __init__(self) -> None:
        self._open: dict[int, str] = {}
        self._before: list[dict[int, str]] = []
        """What was open when each recording that goes on began, the outermost first."""

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Remember the sockets opened inside; they can be shut down while the block goes on, too."""
        self._before.append(sockets())
        try:
            yield
        finally:
            self._open.update(self._opened_since(self._before.pop()))

    def _opened_since(self, before: Mapping[int, str]) -> dict[int, str]:
        return {fd: name for fd, name in sockets().items() if before.get(fd) != name}

    def shut_down(self) -> int:
        """Shut down those that are still the same and connected; the number of them.

        Safe on any thread, and twice: a descriptor that was closed and used again has another inode.
        """
        count = 0
        forming = [self._opened_since(before) for before in self._before[:1]]  # a group may be forming just now
        for fd, name in ChainMap(self._open, *forming).copy().items():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}") != name:
                    continue
                with socket.socket(fileno=os.dup(fd)) as connection:
                    connection.getpeername()  # raises for a listening socket, which must be left alone
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count

    def forget(self) -> None:
        """The groups are gone."""
        self._open.clear()
