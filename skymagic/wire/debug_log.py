"""The debug log of a process: one bounded file, written only on request.

Every module logs with ``logging.getLogger(__name__)``. By default nothing of that is written or
shown. ``SKYMAGIC_LOG=DEBUG`` or ``%config SkyMagic.log_level = "DEBUG"`` makes each process of a
pool write a file, which `wire.debug_entries` reads::

    debug_log.setup(folder / "debug-0-agent.log", {"pool": "main", "node": 0})
    debug_log.set_level("DEBUG")        # "" stops writing

A line has the time (UTC), the level, the module, the message, and the identifiers that hold for the
whole process::

    2026-11-28T02:00:00.123456Z INFO kernels.agent.ranks: rank forked: rank=3 pool=main node=1

The files never contain values, tokens, environment variables, or the text of cells.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ENVIRONMENT = "SKYMAGIC_LOG"
"""Environment variable with the level that the notebook and the command start with."""
LEVELS = ("", "DEBUG", "INFO", "WARNING")
"""Levels of `set_level`; the first one stops writing."""
MAX_BYTES = 5_000_000
"""Size at which a file becomes the older of the two files of its process."""
OLDER = ".1"
"""Suffix of the older file."""
QUIET = logging.WARNING
"""Level of our loggers while no file is written: most calls then return at once."""
_ROOT = logging.getLogger("skymagic")
_PREFIX = "skymagic."
_UNDISABLED = logging.Manager(logging.root)
"""Manager of loggers that ``logging.disable`` does not reach."""


class DebugFile(logging.Handler):
    """Handler that appends to one bounded file.

    The file is opened for each line: user code on a rank may fork, close all descriptors, or move
    the working folder, and a descriptor that was kept open would then write into another file. A
    line that cannot be written is dropped, because debugging must not disturb what it observes.

    Args:
        path: absolute path of the file, in a private folder.
        identifiers: identifiers of the process, appended to each line.
    """

    def __init__(self, path: Path, identifiers: Mapping[str, object]) -> None:
        super().__init__()
        self.path = path
        self.identifiers = dict(identifiers)

    def emit(self, record: logging.LogRecord) -> None:
        """Append a record."""
        try:
            self._append(self._line(record).encode(errors="backslashreplace"))
        # not `handleError`, which would print into the user's output
        except Exception:
            return

    def _line(self, record: logging.LogRecord) -> str:
        first, *more_lines = record.getMessage().split("\n")
        if record.exc_info:
            more_lines += logging.Formatter().formatException(record.exc_info).split("\n")
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        when = f"{seconds}.{int(record.created % 1 * 1e6):06d}Z"
        text = " ".join([first, *(f"{name}={value}" for name, value in self.identifiers.items())])
        head = f"{when} {record.levelname} {record.name.removeprefix(_PREFIX)}: {text}"
        # indented, so that no text of an error can look like the beginning of an entry
        return "\n    ".join([head, *more_lines]) + "\n"

    def _append(self, line: bytes) -> None:
        file = self._open()
        try:
            if os.fstat(file).st_size + len(line) <= MAX_BYTES:
                os.write(file, line)
                return
        finally:
            os.close(file)
        self.path.replace(f"{self.path}{OLDER}")
        # Cut, because a line longer than `MAX_BYTES` would fit into no file and never be done.
        self._append(line[: MAX_BYTES // 2])

    def _open(self) -> int:
        # O_APPEND, because a forked process writes to the same file until it calls `setup`.
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.path, flags, 0o600)


_file: DebugFile | None = None
_level = ""


def setup(path: Path, identifiers: Mapping[str, object]) -> None:
    """Set the file of this process; `set_level` starts writing it.

    A forked process calls it again. The level stays.
    """
    global _file
    if _file is not None:
        # In a forked process, this is the handler of its parent's file.
        _ROOT.removeHandler(_file)
    _file = DebugFile(path, identifiers)
    set_level(_level)


def setup_beside(process: str, **identifiers: object) -> None:
    """Set the file of a process that was forked from one with a file.

    Args:
        process: its name; the file lies in the same folder.
        identifiers: in addition to those of the other process.
    """
    if _file is not None:
        path = _file.path.with_name(file_name(str(_file.identifiers["node"]), process))
        setup(path, {**_file.identifiers, **identifiers})


def set_level(level: str) -> None:
    """Write messages of this level and above (one of `LEVELS`) to the file; "" stops writing.

    Raises:
        ValueError: the level does not exist.
    """
    global _level
    if level not in LEVELS:
        raise ValueError(f"{level!r} is not one of {', '.join(LEVELS[1:])}")
    _level = level
    if _file is None or not level:
        if _file is not None:
            _ROOT.removeHandler(_file)
        _ROOT.setLevel(QUIET)
    protect()


def level() -> str:
    """Return the level that was set last; "" if nothing is written."""
    return _level


def level_of_environment() -> str:
    """Return the level that `ENVIRONMENT` asks for: DEBUG for any text that is no level."""
    text = os.environ.get(ENVIRONMENT, "").strip().upper()
    return text if text in LEVELS else "DEBUG"


def protect() -> None:
    """Make the loggers work again after user code has configured logging in this process.

    ``logging.disable`` and ``dictConfig`` (with ``disable_existing_loggers``, its default) are
    meant for the user's own loggers. Called after each cell, because modules that were imported
    since then have new loggers.
    """
    if _file is None or not _level:
        return
    _ROOT.addHandler(_file)  # once only
    _ROOT.setLevel(_level)
    _ROOT.disabled = False
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith(_PREFIX) and isinstance(logger, logging.Logger):
            logger.disabled = False
            # `logging.disable` sets a level of the manager that a logger asks
            logger.manager = _UNDISABLED


def arguments(folder: str, process: str, pool: str, node: int) -> tuple[str, ...]:
    """Return the arguments that make a process on a node log as this one does; see `start`.

    Empty while this process writes no file.

    Args:
        folder: folder of the node's agent.
        process: name of the process.
    """
    if not _level:
        return ()
    return f"{folder}/{file_name(node, process)}", _level, pool, str(node)


def arguments_beside(process: str) -> tuple[str, ...]:
    """Return the arguments that make a child of the notebook log in the same folder; see `start`.

    Empty while this process writes no file.

    Args:
        process: name of the child.
    """
    if _file is None or not _level:
        return ()
    _, _, host_and_pid = _file.path.name.partition("-")
    return str(_file.path.with_name(f"{process}-{host_and_pid}")), _level


def start(arguments: Sequence[str]) -> None:
    """Write the file that the arguments from another process describe, if there are any."""
    if arguments:
        path, level, *pool_and_node = arguments
        setup(Path(path), dict(zip(("pool", "node"), pool_and_node, strict=False)))
        set_level(level)


def file_name(node: int | str, process: str) -> str:
    """Return the name of the file of a process that belongs to a node of a pool."""
    return f"debug-{node}-{process}.log"
