"""Redirection of standard streams by file descriptor (``dup2``), to silence a process's output.

While a stream is silenced its descriptor leads to a sink, which receives the output of Python, C
code and child processes, from all threads.

    print ───────────────┐
    C, child processes ──┴─▶ descriptor 1 ──▶ sink: the rank's log, or the null device

A stream without a descriptor, such as a notebook's, is replaced by a stand-in meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from skymagic.wire.codec import write_all

sinks: dict[str, int] = {}
"""Descriptors that receive silenced output, by stream (``"stdout"``, ``"stderr"``), instead of the
null device.

A rank's kernel sets them, so that the rank's log stays complete. They are read when a silence
begins.
"""


class StandardStream:
    """A standard stream and the open blocks that silence it."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd
        self.lock = threading.RLock()
        self._blocks: set[object] = set()  # open blocks, on any thread
        self._original: Any = None
        # duplicate of the original descriptor; created by the first silence, and kept open
        self._saved_fd = -1

    @property
    def is_silenced(self) -> bool:
        """True if any block is open."""
        return bool(self._blocks)

    def begin(self) -> object:
        """Open a block, and return it for `end`."""
        block = object()
        with self.lock:
            self._blocks.add(block)
            if len(self._blocks) == 1:
                try:
                    self._redirect()
                except BaseException:  # such as an interrupt at this moment
                    self.end(block)
                    raise
        return block

    def end(self, block: object) -> None:
        """End a block; the last one restores the stream.

        Safe to call twice, and after `end_all`.
        """
        with self.lock:
            if block in self._blocks:
                self._blocks.remove(block)
                if not self._blocks:
                    self._restore()

    def end_all(self) -> None:
        """End all blocks, including any that were left open."""
        with self.lock:
            for block in list(self._blocks):
                self.end(block)

    def _redirect(self) -> None:
        self._original = getattr(sys, self.name)
        self._flush()  # earlier output belongs to the original descriptor
        # A process without this stream has nothing to silence below Python.
        with contextlib.suppress(OSError):
            if self._saved_fd < 0:
                self._saved_fd = os.dup(self.fd)
            else:
                os.dup2(self.fd, self._saved_fd, inheritable=False)
            with _sink(self.name) as sink:
                os.dup2(sink, self.fd)
        if self._original is not None and not writes_to(self._original, self.fd):
            setattr(sys, self.name, StandIn(self, self._original))

    def _restore(self) -> None:
        original, self._original = self._original, None
        self._flush(original)
        if self._saved_fd >= 0:
            os.dup2(self._saved_fd, self.fd)
        if isinstance(present := getattr(sys, self.name), StandIn) and present.original is original:
            setattr(sys, self.name, original)

    def _flush(self, *more: Any) -> None:
        """Flush buffered output, Python's and C's, to the descriptor that it was written for."""
        streams = (*more, getattr(sys, self.name), getattr(sys, f"__{self.name}__"))
        for stream in {id(s): s for s in streams}.values():
            if writes_to(stream, self.fd):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
        flush_c(self.name)


class StandIn(io.TextIOBase):
    """Stand-in for a stream without a descriptor during a silence.

    Passes writes on to the original afterwards.
    """

    encoding = "utf-8"
    """Read by programs that draw progress bars."""

    def __init__(self, stream: StandardStream, original: Any) -> None:
        self._stream = stream
        self.original = original

    def write(self, text: str) -> int:
        """Write to the descriptor; after the silence, to the original."""
        if not self._stream.is_silenced:
            return int(self.original.write(text))
        with contextlib.suppress(OSError):  # a process without this stream
            write_all(self._stream.fd, text.encode(errors="backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Flush the original after the silence. The stand-in buffers nothing."""
        if not self._stream.is_silenced:
            self.original.flush()

    def fileno(self) -> int:
        """Return the descriptor, for child processes and C libraries."""
        return self._stream.fd

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def _after_fork() -> None:
    """Replace the locks in a forked child: another thread of the parent may have held them."""
    for stream in STREAMS.values():
        stream.lock = threading.RLock()


STREAMS = {"stdout": StandardStream("stdout", 1), "stderr": StandardStream("stderr", 2)}
os.register_at_fork(after_in_child=_after_fork)


class Redirection:
    """A single redirection of some streams."""

    def __init__(self, names: Iterable[str]) -> None:
        self._streams = [STREAMS[name] for name in names]
        self._begun: list[tuple[StandardStream, object]] = []

    def __enter__(self) -> None:
        try:
            for stream in self._streams:
                self._begun.append((stream, stream.begin()))
        except BaseException:  # such as an interrupt between two streams
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        while self._begun:
            stream, block = self._begun.pop()
            stream.end(block)


def end_all() -> None:
    """End every silence.

    A kernel calls this at the end of a cell, so that an ill-timed interrupt cannot leave one open.
    """
    for stream in STREAMS.values():
        stream.end_all()


# -- descriptors -----------------------------------------------------------------------------------


def writes_to(stream: Any, fd: int) -> bool:
    """Return True if a stream writes to this descriptor, not to a notebook or memory."""
    try:
        return bool(stream.fileno() == fd)
    except (AttributeError, OSError, ValueError):
        return False


@contextlib.contextmanager
def _sink(name: str) -> Iterator[int]:
    if name in sinks:
        yield sinks[name]
        return
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        yield null
    finally:
        os.close(null)


def flush_c(name: str) -> None:
    """Flush one stream of the C library, whose text would otherwise appear on the wrong side of a
    silence.

    Only this one: flushing all of them would block on any that another thread is reading from.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):
        library, stream = _c_stream(name)
        library.fflush(stream)


@functools.cache
def _c_stream(name: str) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """Return the C library, and its variable for this stream."""
    library = ctypes.CDLL(None)
    symbol = name if sys.platform.startswith("linux") else f"__{name}p"
    return library, ctypes.c_void_p.in_dll(library, symbol)
