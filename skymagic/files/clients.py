"""Clients of the nodes' transfer servers: request and reply, upload, download; all nodes concurrently, with cancellation."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from skymagic.cluster import Node
from skymagic.errors import SkyError
from skymagic.files.messages import files_error
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
STOP_TIMEOUT = 5.0
"""Seconds that clients have to end after an interrupt."""
POLL_INTERVAL = 0.2
NOTHING_COPIED = "nothing was copied"


class Cancelled(Exception):
    """The user interrupted."""


class NodeFailed(Exception):
    """What one node cannot do; the arguments are sentences."""


class FileClient:
    """A client of one node's transfer server.

    Args:
        node: which.
        transport: to the process there.
        stop: set when the user interrupts.
    """

    def __init__(self, node: Node, transport: Transport, stop: threading.Event) -> None:
        self.node = node
        self._stop = stop
        self._transport = transport
        self._messages = messages(self._transport.read)
        self._writing = threading.Lock()
        self._sending = False

    def request(self, request: Message, reply: type[T]) -> T:
        """Send a request and wait for its reply, of this type."""
        self._write(encode(request))
        while not isinstance(message := next(self._messages)[0], reply):
            pass
        self._check()
        return message

    def send(self, request: Write, frames: Iterator[bytes]) -> WriteReply:
        """Send files, as encoded messages, until all are sent or the node reports a full disk."""
        replies: list[WriteReply | BaseException] = []
        full = threading.Event()
        waiter = threading.Thread(target=self._await_reply, args=(replies, full), daemon=True)
        self._sending = True
        self._write(encode(request))
        waiter.start()
        # race: a server that ends meanwhile breaks the pipe here, and the waiter gets the reason
        with contextlib.suppress(OSError):
            for data in joined(frames):
                self._check()
                if full.is_set():
                    self._write(encode(EndOfFiles()))
                    break
                self._write(data)
        while waiter.is_alive():
            waiter.join(POLL_INTERVAL)
            self._check()
        if isinstance(replies[0], BaseException):
            raise replies[0]
        return replies[0]

    def _await_reply(self, replies: list[WriteReply | BaseException], full: threading.Event) -> None:
        try:
            while not isinstance(message := next(self._messages)[0], WriteReply):
                if isinstance(message, DiskFull):
                    full.set()
            replies.append(message)
        except BaseException as problem:
            replies.append(problem)

    def receive(self, request: Send, take: Callable[[FileMessage, bytes | memoryview], bool]) -> None:
        """Have the node send files; `take` gets each message with its payload and returns whether to go on."""
        self._write(encode(request))
        more = True
        for message, payload in self._messages:
            if isinstance(message, SendReply):
                break
            if more and isinstance(message, FileStart | FileChunk | FileFailed):
                more = take(message, payload) and not self._stop.is_set()
                if not more:
                    self.cancel()
        self._check()

    def cancel(self) -> None:
        """Send `Cancel`, unless files are being sent: their next chunk is not."""
        # a write that hangs holds the lock
        if self._sending or not self._writing.acquire(blocking=False):
            return
        with contextlib.suppress(OSError):
            try:
                self._transport.write(encode(Cancel()))
            finally:
                self._writing.release()

    def _check(self) -> None:
        if self._stop.is_set():
            raise Cancelled

    def _write(self, data: bytes) -> None:
        with self._writing:
            self._transport.write(data)

    def complaint(self) -> str:
        """The last line of the server's standard error."""
        return (self._transport.complaint().splitlines() or [""])[-1]

    def close(self) -> None:
        """End it; twice is safe."""
        self._transport.close()


class FileClients:
    """Clients of several nodes, as a context manager.

    Args:
        nodes: which.
        start: starts ``skymagic.kernels.files`` on a node.
        watch: called about five times a second while they work, by the thread that waits for them.
    """

    def __init__(
        self, nodes: Sequence[Node], start: Callable[[Node], Transport], watch: Callable[[], None] = lambda: None
    ) -> None:
        self.nodes = tuple(nodes)
        self._start = start
        self._watch = watch
        self._stop = threading.Event()
        self._clients: list[FileClient] = []

    def __enter__(self) -> FileClients:
        def opened(node: Node) -> None:
            client = FileClient(node, self._start(node), self._stop)
            self._clients.append(client)
            # race: opened after the interrupt, when __exit__ has closed the others
            if self._stop.is_set():
                client.close()

        try:
            self._run_all([(node, partial(opened, node)) for node in self.nodes], NOTHING_COPIED)
        except BaseException:
            self.__exit__()
            raise
        self._clients.sort(key=lambda client: self.nodes.index(client.node))
        return self

    def __exit__(self, *exc: object) -> None:
        threads = [threading.Thread(target=client.close, daemon=True) for client in self._clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def each(self, job: Callable[[FileClient], T], title: str = NOTHING_COPIED) -> list[T]:
        """Run a job with every client concurrently; its results in the order of the nodes.

        Raises:
            FilesError: what went wrong, of all nodes, after all have ended; `title` says what became of the whole.
        """
        return self._run_all([(client.node, partial(job, client)) for client in self._clients], title)

    def _run_all(self, jobs: Sequence[tuple[Node, Callable[[], T]]], title: str) -> list[T]:
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
            raise files_error(title, said, len(self.nodes))
        return [results[index] for index in range(len(jobs))]

    def _wait(self, threads: Sequence[threading.Thread]) -> None:
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(POLL_INTERVAL)
                    self._watch()
        # an interrupt
        except BaseException:
            self._stop.set()
            for client in self._clients:
                client.cancel()
            end = time.monotonic() + STOP_TIMEOUT
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
            raise

    def _sentences(self, node: Node, problem: BaseException) -> Sequence[str]:
        if isinstance(problem, NodeFailed):
            return problem.args
        if isinstance(problem, SkyError):
            return [str(problem)]
        if not isinstance(problem, OSError | EOFError | ValueError | LookupError | TypeError):
            raise problem
        client = next((client for client in self._clients if client.node is node), None)
        said = (client.complaint() if client is not None else "") or str(problem)
        return [f"the connection was lost ({said}); what had arrived is whole: run it again to go on"]
