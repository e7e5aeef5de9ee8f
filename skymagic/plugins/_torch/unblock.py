"""Free a rank from a collective that never ends, without losing its variables.

Its connections are shut down, and NCCL is aborted. SIGINT, ``abort()`` and
``destroy_process_group()`` from another thread do not free a thread that is blocked in gloo.
Shutting down the *connected* sockets that the process group opened (``shutdown(2)``) does: each
blocked call raises at once. A *listening* socket must be left alone, because gloo's accept thread
would terminate the process. NCCL needs environment variables that let a rank survive the errors of
others, and all communicators must be aborted at once.
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
    """Return the open sockets of this process.

    Returns:
        The kernel's name of each socket (its inode), by file descriptor.
    """
    names = {}
    for entry in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith("socket:"):
                names[int(entry)] = target
    return names


class Connections:
    """Sockets that process groups have opened, to be shut down later from another thread."""

    def __init__(self) -> None:
        self._open: dict[int, str] = {}
        self._before: list[dict[int, str]] = []
        """Sockets that were open when each active recording started, outermost first."""

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Remember the sockets that are opened inside the context.

        They can be shut down before the context ends, too.
        """
        self._before.append(sockets())
        try:
            yield
        finally:
            self._open.update(self._opened_since(self._before.pop()))

    def _opened_since(self, before: Mapping[int, str]) -> dict[int, str]:
        return {fd: name for fd, name in sockets().items() if before.get(fd) != name}

    def shut_down(self) -> int:
        """Shut down those sockets that are still the same and connected, and return their number.

        Safe on any thread, and twice: a descriptor that was closed and reused has another inode.
        """
        count = 0
        # A group may be forming right now.
        forming = [self._opened_since(before) for before in self._before[:1]]
        for fd, name in ChainMap(self._open, *forming).copy().items():
            with contextlib.suppress(OSError):
                # The descriptor was closed and reused.
                if os.readlink(f"/proc/self/fd/{fd}") != name:
                    continue
                # On a copy, which the end of the block closes; the group still uses its own.
                with socket.socket(fileno=os.dup(fd)) as connection:
                    # raises for a listening socket, which must be left alone
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count

    def forget(self) -> None:
        """Forget all sockets, because their groups were destroyed."""
        self._open.clear()


VARIABLES = {
    # Otherwise the watchdog kills healthy ranks with SIGABRT when another one has died. torch's
    # _abort_process_group requires this.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Otherwise the heartbeat monitor kills a rank that is being held.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Environment variables that are read when a process group is created."""
OTHER_NAMES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING"}
"""Alternative names by which torch also reads them."""
RECORDER, RECORDER_BEFORE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""Variable for the number of entries in the flight recorder, and its name before torch 2.11.

The recorder shows which collective each rank is in.
"""
RECORDER_ENTRIES = "2000"
RENAMED_IN = (2, 11)
"""First torch version that warns about the earlier name in each rank's log.

Versions before it read no other name.
"""


def set_variables(
    environment: MutableMapping[str, str] = os.environ, torch_version: str | None = None
) -> None:
    """Set the variables that the user has not set, under the names that the torch version reads.

    Args:
        environment: environment to change.
        torch_version: version of torch; None for the installed one.
    """
    if torch_version is None:
        torch_version = version("torch")
    for name, value in VARIABLES.items():
        if name not in environment and OTHER_NAMES.get(name, name) not in environment:
            environment[name] = value
    if RECORDER not in environment and RECORDER_BEFORE not in environment:
        release = tuple(int(part) for part in re.findall(r"\d+", torch_version)[:2])
        environment[RECORDER if release >= RENAMED_IN else RECORDER_BEFORE] = RECORDER_ENTRIES


class Aborts:
    """Thread that aborts NCCL's communicators: an abort waits for kernels and may take seconds."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def begin(self) -> int:
        """Start to abort all groups, and return their number immediately.

        Safe on any thread, and twice.
        """
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
        """Wait until the abort is over, because a group must not be destroyed meanwhile."""
        thread = self._thread
        if thread is not None:
            with rendezvous.waiting():  # a slow abort must not count as a rank that hangs
                thread.join()


def abort_all(backends: Iterable[Any]) -> None:
    """Abort communicators as one operation of NCCL.

    One after the other, they would wait for each other (pytorch#119797).
    """
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
    """Free memory of the GPU that nothing uses.

    Call it after an abort: it waits for all kernels, including those that wait for other ranks.
    """
    cuda = sys.modules["torch"].cuda
    if cuda.is_initialized():
        with contextlib.suppress(Exception):  # its context is lost
            cuda.empty_cache()


def _backends() -> Iterable[Any]:
    """Yield the NCCL backend of each group; none without NCCL."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    kind = getattr(c10d, "ProcessGroupNCCL", None)
    if c10d is None or kind is None:
        return
    device = sys.modules["torch"].device("cuda")
    for group in list(c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # a group without a backend for GPUs
            backend = group._get_backend(device)
            if isinstance(backend, kind):
                yield backend
