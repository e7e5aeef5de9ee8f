"""NCCL when ranks fail: variables with which a rank outlives the others' errors, and the abort of all communicators at once."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, MutableMapping
from typing import Any

from skymagic.runtime import rendezvous

VARIABLES = {
    # or the watchdog ends healthy ranks by SIGABRT when another has died; torch's _abort_process_group asks for it
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # or the heartbeat monitor ends a rank that is being held
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # the flight recorder: which collective each rank is in
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
}
"""Read when a process group is made."""
OTHER_NAMES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("NCCL_ASYNC_ERROR_HANDLING",),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": ("TORCH_FR_BUFFER_SIZE",),
}
"""By which torch knows them, too."""


def set_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set."""
    for name, value in VARIABLES.items():
        if not any(other in environment for other in (name, *OTHER_NAMES.get(name, ()))):
            environment[name] = value


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


def shares_sockets(backend: object) -> bool:
    """Whether a backend's connections may be shut down: gloo's. NCCL's are closed by its abort alone."""
    return str(backend).lower() != "nccl"
