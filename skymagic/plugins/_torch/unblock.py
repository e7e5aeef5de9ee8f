"""A rank let out of a collective that will never end, without losing its variables: its connections are shut down, NCCL is aborted.

SIGINT, ``abort()`` and ``destroy_process_group()`` from another thread free nobody who is blocked in gloo. Shutting down the
*connected* sockets that the process group opened does (``shutdown(2)``): each blocked call raises at once. A *listening* socket must be
left alone, for gloo's accept thread would terminate the process. NCCL needs variables with which a rank outlives the errors of others,
and the abort of all communicators at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from importlib.metadata import version
from typing import Any

from skymagic.runtime import rendezvous


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
        forming = [
            self._opened_since(before) for before in self._before[:1]
        ]  # a group may be forming just now
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


VARIABLES = {
    # or the watchdog ends healthy ranks by SIGABRT when another has died; torch's _abort_process_group asks for it
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # or the heartbeat monitor ends a rank that is being held
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Read when a process group is made."""
OTHER_NAMES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING"}
"""By which torch knows them, too."""
RECORDER, RECORDER_BEFORE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""Entries of the flight recorder, which tells in which collective each rank is; and its name before torch 2.11."""
RECORDER_ENTRIES = "2000"
RENAMED_IN = (2, 11)
"""The torch version that warns of the earlier name in each rank's log; those before it read no other."""


def set_variables(
    environment: MutableMapping[str, str] = os.environ, torch_version: str | None = None
) -> None:
    """Set what the user has not set, under the names that the torch version reads (default: the installed one's)."""
    if torch_version is None:
        torch_version = version("torch")
    for name, value in VARIABLES.items():
        if name not in environment and OTHER_NAMES.get(name, name) not in environment:
            environment[name] = value
    if RECORDER not in environment and RECORDER_BEFORE not in environment:
        release = tuple(int(part) for part in re.findall(r"\d+", torch_version)[:2])
        environment[RECORDER if release >= RENAMED_IN else RECORDER_BEFORE] = RECORDER_ENTRIES


class Aborts:
    """Aborts NCCL's communicators on a thread of its own: an abort waits for kernels, and may take seconds."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def begin(self) -> int:
        """Abort all groups; returns at once. Safe on any thread and twice. The number of groups."""
        if not (backends := list(_backends())):
            return 0
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=abort_all, args=(backends,), name="skymagic-nccl-abort", daemon=True
                )
                self._thread.start()
        return len(backends)

    def wait(self) -> None:
        """Wait until what was begun is over: a group must not be destroyed meanwhile."""
        thread = self._thread
        if thread is not None:
            with rendezvous.waiting():  # a slow abort is not a rank that hangs
                thread.join()


def abort_all(backends: Iterable[Any]) -> None:
    """Abort communicators as one operation of NCCL: one after the other, they would wait for each other (pytorch#119797)."""
    backends = list(backends)
    leader = backends[0]
    together = hasattr(leader, "_group_start")
    if together:
        leader._group_start()
    try:
        for backend in backends:
            with contextlib.suppress(Exception):  # the others must be aborted all the same
                backend.abort()
    finally:
        if together:
            leader._group_end()


def empty_cache() -> None:
    """Give memory of the GPU back that nothing uses. After an abort: it waits for all kernels, also for those that wait for other ranks."""
    cuda = sys.modules["torch"].cuda
    if cuda.is_initialized():
        with contextlib.suppress(Exception):  # its context is lost
            cuda.empty_cache()


def _backends() -> Iterable[Any]:
    """NCCL's part of each group; none without NCCL."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    kind = getattr(c10d, "ProcessGroupNCCL", None)
    if c10d is None or kind is None:
        return
    device = sys.modules["torch"].device("cuda")
    for group in list(c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # a group without a part for GPUs
            backend = group._get_backend(device)
            if isinstance(backend, kind):
                yield backend
