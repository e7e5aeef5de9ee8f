"""One line to each node, and all of them at once: questions, bytes out, bytes in, and an end to all when the user wants it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from skymagic.cluster import Node
from skymagic.errors import SkyError
from skymagic.files.messages import failed
from skymagic.wire.files import (
    Cancel,
    DiskFull,
    EndOfFiles,
    FileChunk,
    FileFailed,
    FileMessage,
    FileStart,
    Message,
    Send,
    SendReply,
    Write,
    WriteReply,
    encode,
    joined,
    messages,
)
from skymagic.wire.transport import Transport

T = TypeVar("T")
PATIENCE = 5.0
"""Seconds in which a line that is to stop comes to an end by itself."""
TICK = 0.2


class Stopped(Exception):
    """The user wants no more."""


class Trouble(Exception):
    """What one node cannot do; its arguments are sentences."""


class Line:
    """A line to one node.

    Args:
        node: which.
        transport: to the process there.
        stop: set when the user wants no more.
    """

    def __init__(self, node: Node, transport: Transport, stop: threading.Event) -> None:
        self.node = node
        self._stop = stop
        self._transport = transport
        self._messages = messages(self._transport.read)
        self._writing = threading.Lock()
        self._sending = False

    def ask(self, request: Message, reply: type[T]) -> T:
        """A request, and its reply of this type."""
        self._write(encode(request))
        while not isinstance(message := next(self._messages)[0], reply):
            pass
        self._check()
        return message

    def send(self, request: Write, frames: Iterator[bytes]) -> WriteReply:
        """Send files, as encoded messages; returns what the node says at the end, or when its disk is full."""
        answers: list[WriteReply | BaseException] = []
        full = threading.Event()
        hearing = threading.Thread(target=self._hear, args=(answers, full), daemon=True)
        self._sending = True
        self._write(encode(request))
        hearing.start()
        with contextlib.suppress(OSError):  # the other thread hears why
            for data in joined(frames):
                self._check()
                if full.is_set():
                    self._write(encode(EndOfFiles()))
                    break
                self._write(data)
        while hearing.is_alive():
            hearing.join(TICK)
            self._check()
        if isinstance(answers[0], BaseException):
            raise answers[0]
        return answers[0]

    def _hear(self, answers: list[WriteReply | BaseException], full: threading.Event) -> None:
        try:
            while not isinstance(message := next(self._messages)[0], WriteReply):
                if isinstance(message, DiskFull):
                    full.set()
            answers.append(message)
        except BaseException as problem:
            answers.append(problem)

    def receive(self, request: Send, take: Callable[[FileMessage, bytes | memoryview], bool]) -> None:
        """Have the node send files; `take` gets each message and its payload, and says whether more are wanted."""
        self._write(encode(request))
        more = True
        for message, payload in self._messages:
            if isinstance(message, SendReply):
                break
            if more and isinstance(message, FileStart | FileChunk | FileFailed):
                more = take(message, payload) and not self._stop.is_set()
                if not more:
                    self.halt()
        self._check()

    def halt(self) -> None:
        """Have the node come to an end with what it does; it is told unless bytes are on their way there."""
        if self._sending or not self._writing.acquire(blocking=False):  # a line that hangs keeps the lock
            return
        with contextlib.suppress(OSError):
            try:
                self._transport.write(encode(Cancel()))
            finally:
                self._writing.release()

    def _check(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def _write(self, data: bytes) -> None:
        with self._writing:
            self._transport.write(data)

    def complaint(self) -> str:
        """The last thing that the other end said when it failed."""
        return (self._transport.complaint().splitlines() or [""])[-1]

    def close(self) -> None:
        """End it; twice is safe."""
        self._transport.close()


class Lines:
    """Lines to several nodes, as a context manager.

    Args:
        nodes: which.
        start: starts ``skymagic.kernels.files`` on a node.
        watch: called about five times a second while they are at work, by the thread that waits for them.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        start: Callable[[Node], Transport],
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.nodes = tuple(nodes)
        self._start = start
        self._watch = watch
        self._stop = threading.Event()
        self._lines: list[Line] = []

    def __enter__(self) -> Lines:
        def opened(node: Node) -> None:
            line = Line(node, self._start(node), self._stop)
            self._lines.append(line)
            if self._stop.is_set():  # too late
                line.close()

        try:
            self._all([(node, lambda node=node: opened(node)) for node in self.nodes], "nothing was copied")  # type: ignore[misc]
        except BaseException:
            self.__exit__()
            raise
        self._lines.sort(key=lambda line: self.nodes.index(line.node))
        return self

    def __exit__(self, *exc: object) -> None:
        threads = [threading.Thread(target=line.close, daemon=True) for line in self._lines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def each(self, job: Callable[[Line], T], title: str = "nothing was copied") -> list[T]:
        """Do a job with every line at once; its results in the order of the nodes.

        Raises:
            FilesError: what went wrong, of all nodes, after all have ended; `title` says what became of the whole.
        """
        return self._all([(line.node, lambda line=line: job(line)) for line in self._lines], title)  # type: ignore[misc]

    def _all(self, jobs: Sequence[tuple[Node, Callable[[], T]]], title: str) -> list[T]:
        results: dict[int, T] = {}
        problems: dict[int, BaseException] = {}

        def work(index: int, job: Callable[[], T]) -> None:
            try:
                results[index] = job()
            except BaseException as problem:
                problems[index] = problem

        threads = [
            threading.Thread(target=work, args=(index, job), name="skymagic-files", daemon=True)
            for index, (_, job) in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        self._wait(threads)
        if problems:
            said = [
                (str(jobs[index][0]), sentence)
                for index, problem in sorted(problems.items())
                for sentence in self._sentences(jobs[index][0], problem)
            ]
            raise failed(title, said, len(self.nodes))
        return [results[index] for index in range(len(jobs))]

    def _wait(self, threads: Sequence[threading.Thread]) -> None:
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(TICK)
                    self._watch()
        except BaseException:  # the stop button
            self._stop.set()
            for line in self._lines:
                line.halt()
            end = time.monotonic() + PATIENCE
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
            raise

    def _sentences(self, node: Node, problem: BaseException) -> Sequence[str]:
        if isinstance(problem, Trouble):
            return problem.args
        if isinstance(problem, SkyError):
            return [str(problem)]
        if not isinstance(problem, OSError | EOFError | ValueError | LookupError | TypeError):
            raise problem
        line = next((line for line in self._lines if line.node is node), None)
        said = (line.complaint() if line is not None else "") or str(problem)
        return [f"the connection was lost ({said}); what had arrived is whole: run it again to go on"]
