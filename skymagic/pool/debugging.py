"""Debug log of the notebook's process, and the level of its pools' other processes.

The file lies with the state that outlives a notebook, so that it can be read after a crash.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from skymagic.pool import registry
from skymagic.wire import atomic, debug_log

KEPT_FILES = 20
"""Number of files of earlier processes that are kept."""
_process = ""
"""Name of this process once its environment was read."""


def folder() -> Path:
    """Return the folder of the debug logs of notebooks and commands."""
    return atomic.state_folder("debug")


def start(process: str = "notebook") -> None:
    """Start this process's debug log if the environment asks for it; safe to call twice."""
    global _process
    if not _process:
        _process = process
        with contextlib.suppress(OSError):  # a home that is not writable
            set_level(debug_log.level_of_environment() or debug_log.level())


def set_level(level: str) -> None:
    """Set the level of this process's debug log and of those of its pools' processes.

    Raises:
        ValueError: the level does not exist.
        OSError: the log cannot be written.
    """
    global _process
    _process = _process or "notebook"
    if level and not debug_log.level():
        atomic.private_folder(folder())
        name = f"{_process}-{socket.gethostname()}-{os.getpid()}.log"
        debug_log.setup(folder() / name, {})
        _remove_old_files()
    debug_log.set_level(level)
    for pool in registry.pools():
        if pool.resources.has_agents:
            pool.agents.set_log_level(level)


def _remove_old_files() -> None:
    with contextlib.suppress(OSError):  # another notebook removes them too
        newest_first = sorted(
            folder().iterdir(), key=lambda path: path.stat().st_mtime, reverse=True
        )
        for path in newest_first[KEPT_FILES:]:
            path.unlink()
