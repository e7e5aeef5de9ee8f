"""Redirection of standard streams at the level of file descriptors (``dup2``), which silences a process's output.

While a stream is silenced its descriptor leads to a sink: what Python, C code and child processes write goes there.

    silenced code   ── print ──┐
    C, children     ───────────┴─▶ descriptor 1 ──▶ sink: the rank's log, or the null device
    other threads   ── print ─▶ StreamProxy ─▶ saved_fd, a dup of what descriptor 1 was ──▶ the rank's output

A descriptor belongs to the whole process, and so does its redirection, but for one thing that Python can tell apart:
threads that were running before the silence began are bystanders, and what *they* print through ``sys.stdout`` or
``sys.stderr`` still comes out. Threads started during the silence count as part of the silenced code.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import types
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from typing import Any

from skymagic.wire.codec import write_all

sinks: dict[str, int] = {}
"""The descriptor that takes what is silenced, by stream (``"stdout"``, ``"stderr"``), in place of the null device.

A rank's kernel sets it, so that the rank's log stays complete. It is read at the moment a silence begins.
"""


class StandardStream:
    """One standard stream and the blocks that silence it now."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []  # of the blocks that are open, innermost last
        self._bystanders: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._proxy: StreamProxy | None = None
        # Made at the first silence and kept: a bystander may write to it at any moment, also while a silence ends.
        self.saved_fd = -1

    def begin(self) -> threading.Thread:
        """Open a block on this thread; `end` takes what this returns."""
        me = threading.current_thread()
        with self._lock:
            self._threads.append(me)
            if len(self._threads) == 1:
                try:
                    self._redirect()
                except BaseException:  # an interrupt that came just now
                    self.end(me)
                    raise
        return me

    def end(self, thread: threading.Thread) -> None:
        """End a block; the last one restores the stream. Twice is safe, and so is after `end_all`."""
        with self._lock:
            if thread in self._threads:
                self._threads.remove(thread)
                if not self._threads:
                    self._restore()

    def end_all(self) -> None:
        """End every block, whoever forgot to."""
        with self._lock:
            if self._threads:
                self._threads.clear()
                self._restore()

    @property
    def silenced(self) -> bool:
        """Whether any block is open."""
        return bool(self._threads)

    def silences_me(self) -> bool:
        """Whether what the current thread prints is to go to the sink."""
        if not self._threads:
            return False
        me = threading.current_thread()
        return me in self._threads or me not in self._bystanders

    def _redirect(self) -> None:
        original = getattr(sys, self.name)
        self._flush(original)
        self._bystanders = weakref.WeakSet(
            t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)
        )
        # a process without this stream has nothing to silence below Python
        with contextlib.suppress(OSError):
            if self.saved_fd < 0:
                self.saved_fd = os.dup(self.fd)
            else:
                os.dup2(self.fd, self.saved_fd, inheritable=False)
            with _sink(self.name) as sink:
                os.dup2(sink, self.fd)
        self._proxy = StreamProxy(self, original)
        setattr(sys, self.name, self._proxy)

    def _restore(self) -> None:
        proxy, self._proxy = self._proxy, None
        self._flush(proxy.original if proxy else None)
        if self.saved_fd >= 0:
            os.dup2(self.saved_fd, self.fd)
        if proxy is not None and getattr(sys, self.name) is proxy:
            setattr(sys, self.name, proxy.original)

    def _flush(self, original: Any) -> None:
        """Let what is buffered go where it was meant to go: Python's text, and C's."""
        for stream in {id(s): s for s in (original, getattr(sys, f"__{self.name}__"))}.values():
            if writes_to(stream, self.fd):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
        flush_c(self.name)

    def after_fork(self) -> None:
        """A child has one thread, and no use for a lock that another one held."""
        self._lock = threading.RLock()


class StreamProxy:
    """Stands in ``sys.stdout`` during a silence and writes by thread. Whoever keeps it afterwards reaches the original."""

    def __init__(self, stream: StandardStream, original: Any) -> None:
        self._stream = stream
        self.original = original

    def write(self, text: str) -> int:
        descriptor = self._descriptor()
        if descriptor is None:
            return self.original.write(text) if self.original is not None else len(text)
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        write_all(descriptor, text.encode(self.encoding, "backslashreplace"))
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if self.original is not None and self._descriptor() is None:
            self.original.flush()

    def isatty(self) -> bool:
        return self._descriptor() is None and self.original is not None and self.original.isatty()

    def fileno(self) -> int:
        return self._stream.fd

    @property
    def encoding(self) -> str:
        return getattr(self.original, "encoding", None) or "utf-8"

    @property
    def buffer(self) -> Any:
        return BufferProxy(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def _descriptor(self) -> int | None:
        """Where to write; None for the original object."""
        if self._stream.silences_me():
            return self._stream.fd if self._stream.saved_fd >= 0 else _null()
        if self._stream.silenced and self._stream.saved_fd >= 0 and writes_to(self.original, self._stream.fd):
            return self._stream.saved_fd
        return None


class BufferProxy:
    """The ``buffer`` of a StreamProxy."""

    def __init__(self, proxy: StreamProxy) -> None:
        self._proxy = proxy

    def write(self, data: bytes | bytearray | memoryview) -> int:
        descriptor = self._proxy._descriptor()
        if descriptor is None:
            written: int = self._proxy.original.buffer.write(data)
            return written
        write_all(descriptor, data)
        return len(data)

    def flush(self) -> None:
        self._proxy.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proxy.original.buffer, name)


STREAMS = {"stdout": StandardStream("stdout", 1), "stderr": StandardStream("stderr", 2)}
for _stream in STREAMS.values():
    os.register_at_fork(after_in_child=_stream.after_fork)


class Redirection:
    """One redirection of some streams, begun and ended once, on the thread that begins it."""

    def __init__(self, names: Iterable[str]) -> None:
        self._streams = [STREAMS[name] for name in names]
        self._begun: list[tuple[StandardStream, threading.Thread]] = []

    def __enter__(self) -> None:
        try:
            for stream in self._streams:
                self._begun.append((stream, stream.begin()))
        except BaseException:  # an interrupt between two streams
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        while self._begun:
            stream, thread = self._begun.pop()
            stream.end(thread)


def end_all() -> None:
    """End every silence: a kernel calls it when a cell is over, so that an ill-timed interrupt cannot leave one open."""
    for stream in STREAMS.values():
        stream.end_all()


# ------------------------------------------------------------------------------------- functions that pause


@types.coroutine
def drive(steps: Any, redirect: Callable[[], Redirection]) -> Generator[Any, Any, Any]:
    """Drive a generator or an awaitable: each of its steps is inside a `redirect()`, and what is between its steps is not."""
    step: Callable[[], Any] = functools.partial(steps.send, None)
    while True:
        try:
            with redirect():
                item = step()
        except StopIteration as stop:
            return stop.value
        try:
            sent = yield item
        except GeneratorExit:
            with redirect():
                steps.close()
            raise
        except BaseException as problem:
            step = functools.partial(steps.throw, problem)
        else:
            step = functools.partial(steps.send, sent)


async def drive_async(steps: AsyncGenerator[Any, Any], redirect: Callable[[], Redirection]) -> AsyncGenerator[Any, Any]:
    """An asynchronous generator, silenced while it runs."""
    step = steps.asend(None)
    while True:
        try:
            item = await drive(step, redirect)
        except StopAsyncIteration:
            return
        try:
            sent = yield item
        except GeneratorExit:
            await drive(steps.aclose(), redirect)
            raise
        except BaseException as problem:
            step = steps.athrow(problem)
        else:
            step = steps.asend(sent)


# -------------------------------------------------------------------------------------------- descriptors


def writes_to(stream: Any, fd: int) -> bool:
    """Whether a stream object ends in this descriptor, and not in a notebook or in memory."""
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


@functools.cache
def _null() -> int:
    return os.open(os.devnull, os.O_WRONLY)


def flush_c(name: str) -> None:
    """fflush one stream of the C library, whose text would otherwise come out on the wrong side of a silence.

    Only this one: flushing all of them waits for whoever is reading from another.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):
        library, stream = _c_stream(name)
        library.fflush(stream)


@functools.cache
def _c_stream(name: str) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """The C library, and its variable that holds this stream."""
    library = ctypes.CDLL(None)
    symbol = name if sys.platform.startswith("linux") else f"__{name}p"
    return library, ctypes.c_void_p.in_dll(library, symbol)
