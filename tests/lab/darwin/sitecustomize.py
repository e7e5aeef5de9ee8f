"""A stand-in for macOS: hides what only Linux has from the Python code of a process.

Python imports this module as it starts if its folder is in ``PYTHONPATH``. It shows whether code
depends on Linux; it does not show how macOS behaves. Native code still runs on Linux.
"""

from __future__ import annotations

# What the standard library and its compiled helpers choose by platform is imported before.
import asyncio  # noqa: F401
import builtins
import ctypes.util  # noqa: F401
import errno
import importlib.metadata  # noqa: F401
import io
import multiprocessing.context  # noqa: F401
import multiprocessing.resource_tracker  # noqa: F401
import os
import platform
import select
import selectors  # noqa: F401
import shutil  # noqa: F401
import signal
import socket
import ssl  # noqa: F401
import subprocess  # noqa: F401
import sys
import sysconfig
import tempfile
import time
import urllib.request  # noqa: F401
import uuid  # noqa: F401
import webbrowser  # noqa: F401
import zipfile  # noqa: F401
from collections.abc import Callable
from types import ModuleType
from typing import Any

import psutil  # noqa: F401
import zmq  # noqa: F401

ABSENT: dict[ModuleType, tuple[str, ...]] = {
    os: (
        "sched_getaffinity", "sched_setaffinity", "pidfd_open", "memfd_create", "eventfd", "O_PATH", "O_TMPFILE",
        "posix_fallocate", "splice", "setns", "unshare", "pipe2", "getresuid", "setresuid", "getrandom", "copy_file_range",
    ),
    socket: (
        "TCP_USER_TIMEOUT", "SO_PEERCRED", "SOCK_NONBLOCK", "SOCK_CLOEXEC", "TCP_KEEPIDLE", "TCP_CONGESTION", "TCP_INFO",
        "AF_NETLINK", "AF_PACKET", "AF_VSOCK",
    ),
    select: ("epoll",),
    signal: ("pidfd_send_signal", "SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT", "sigtimedwait", "sigwaitinfo"),
    time: ("CLOCK_BOOTTIME",),
}  # fmt: skip
"""Names that macOS does not have, by module."""
FOLDERS = ("/proc", "/sys", "/dev/shm", "/run")


def _is_absent(path: object) -> bool:
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    text = os.fsdecode(path)
    return any(text == folder or text.startswith(f"{folder}/") for folder in FOLDERS)


def _hiding(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that takes a path: what only Linux has does not exist."""

    def hidden(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        # psutil has code of its own for macOS
        is_psutil = sys._getframe(1).f_globals.get("__name__", "").startswith("psutil")
        if _is_absent(path) and not is_psutil:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
        return function(path, *arguments, **options)

    return hidden


def _appnope() -> ModuleType:
    """Stand in for the package with which ipykernel turns off macOS's App Nap."""
    module = ModuleType("appnope")
    module.nope = lambda: None  # type: ignore[attr-defined]
    return module


class _Library(ctypes.CDLL):
    """Native library, which has Linux's suffix also when macOS's is asked for (torch does)."""

    def __init__(self, name: Any, *arguments: Any, **options: Any) -> None:
        if isinstance(name, str):
            name = name.replace(".dylib", ".so")
        super().__init__(name, *arguments, **options)


def _become_macos() -> None:
    ctypes.CDLL = _Library  # type: ignore[misc]
    sys.modules["appnope"] = _appnope()
    sysconfig.get_config_vars()  # cached: it reads files that are named after the platform
    tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]
    for module, names in ABSENT.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in ("stat", "lstat", "open", "listdir", "scandir", "readlink", "access", "statvfs"):
        setattr(os, name, _hiding(getattr(os, name)))
    builtins.open = io.open = _hiding(builtins.open)
    sys.platform = "darwin"
    platform.system = lambda: "Darwin"
    platform.machine = lambda: "arm64"
    platform.mac_ver = lambda *_: ("15.1", ("", "", ""), "arm64")


_become_macos()
