"""Clients of the nodes' transfer servers: requests, uploads and downloads, with cancellation.

All nodes are used concurrently.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from skymagic.cluster import Node
from skymagic.content.files.changes import files_error
from skymagic.errors import SkyError
from skymagic.wire import files as files_wire
from skymagic.wire.codec import Transport
from skymagic.wire.threads import run_all, start_all

logger = logging.getLogger(__name__)

T = TypeVar("T")
STOP_TIMEOUT = 5.0
"""Seconds within which clients should end after an interrupt."""
POLL_INTERVAL = 0.2
NOTHING_COPIED = "nothing was copied"


class CopyCancelled(Exception):
    """The user interrupted the copy."""


class NodeFailed(Exception):
    """A failure on one node; the arguments are sentences."""


class FileClient:
    """Client of one node's transfer server; `stop` is set when the user interrupts."""

    def __init__(self, node: Node, transport: Transport, stop: threading.Event) -> None:
        self.node, self._transport, self._stop = node, transport, stop
        self._messages = files_wire.messages(transport.read)
        self._writing = threading.Lock()
        self.replied = False  # True once an upload was answered, or no answer can come

    def request(self, request: files_wire.FileMessage, reply: type[T]) -> T:
        """Send a request, and wait for a reply of type `reply`.

        The request may be an `Include`, whose file holds the actual request.
        """
        self._write(files_wire.encode(request))
        while not isinstance(message := next(self._messages)[0], reply):
            pass
        while isinstance(request, files_wire.Include) and not isinstance(
            next(self._messages)[0], files_wire.Included
        ):
            pass
        self.check()
        return message

    def send(
        self,
        request: files_wire.Write,
        frames: Iterator[bytes],
        on_included: Callable[[], None] = lambda: None,
    ) -> files_wire.WriteReply:
        """Send files, as encoded messages, until all are sent or the node reports a full disk.

        Args:
            on_included: called when the node has read the file of an `Include` to its end.
        """
        reply: Future[files_wire.WriteReply] = Future()
        full = threading.Event()
        waiter = threading.Thread(
            target=self._await_reply, args=(reply, full, on_included), daemon=True
        )
        self._write(files_wire.encode(request))
        waiter.start()
        # Race: if the server ends meanwhile, the pipe breaks here, and the waiting thread gets the
        # reason.
        with contextlib.suppress(OSError):
            for data in frames:
                self.check()
                if full.is_set():
                    self._write(files_wire.encode(files_wire.EndOfFiles()))
                    break
                self._write(data)
        while waiter.is_alive():
            waiter.join(POLL_INTERVAL)
            self.check()
        return reply.result()

    def _await_reply(
        self,
        reply: Future[files_wire.WriteReply],
        full: threading.Event,
        on_included: Callable[[], None],
    ) -> None:
        try:
            while not isinstance(message := next(self._messages)[0], files_wire.WriteReply):
                if isinstance(message, files_wire.DiskFull):
                    full.set()
                elif isinstance(message, files_wire.Included):
                    on_included()
            reply.set_result(message)
        except BaseException as problem:
            reply.set_exception(problem)
        self.replied = True

    def receive(
        self,
        request: files_wire.SendFiles,
        take: Callable[[files_wire.FilePart, bytes | memoryview], bool],
    ) -> None:
        """Have the node send files.

        Args:
            take: called with each message and its payload; returns whether to continue.
        """
        self._write(files_wire.encode(request))
        wants_more = True
        for message, payload in self._messages:
            if isinstance(message, files_wire.SendFilesReply):
                break
            if wants_more and isinstance(message, files_wire.FilePart):
                wants_more = take(message, payload) and not self.interrupted
                if not wants_more:
                    self.cancel()
        self.check()

    def cancel(self) -> None:
        """Send `Cancel` after the current write.

        The rest of the upload is not sent, and the node keeps no partial file.
        """
        with self._writing, contextlib.suppress(OSError):
            self._transport.write(files_wire.encode(files_wire.Cancel()))

    @property
    def interrupted(self) -> bool:
        """True once the user has interrupted."""
        return self._stop.is_set()

    def check(self) -> None:
        """Raise `CopyCancelled` after an interrupt."""
        if self.interrupted:
            raise CopyCancelled

    def _write(self, data: bytes) -> None:
        with self._writing:
            self.check()
            self._transport.write(data)

    def complaint(self) -> str:
        """Return the last line of the server's standard error."""
        return (self._transport.complaint().splitlines() or [""])[-1]

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._transport.close()


class FileClients:
    """Context manager for the clients of several nodes.

    Args:
        nodes: nodes to connect to.
        start: starts a transfer server on a node, and returns the connection to it.
        on_poll: called about five times a second while the clients work.
    """

    def __init__(
        self, nodes: Sequence[Node], start: Callable[[Node], Transport], on_poll: Callable[[], None]
    ) -> None:
        self.nodes, self._start, self._on_poll = tuple(nodes), start, on_poll
        self._stop = threading.Event()
        self._clients: list[FileClient] = []
        self._jobs: Sequence[Future[Any]] = ()

    def __enter__(self) -> FileClients:
        def open_client(node: Node) -> None:
            client = FileClient(node, self._start(node), self._stop)
            self._clients.append(client)
            logger.debug("transfer server is connected: node=%s", node.index)
            # Race: opened after the interrupt, when __exit__ had already closed the others.
            if self._stop.is_set():
                client.close()

        try:
            self._run_all(
                [(node, partial(open_client, node)) for node in self.nodes], NOTHING_COPIED
            )
        except BaseException as problem:
            logger.warning("transfer servers not reached: error=%s", type(problem).__name__)
            self.__exit__()
            raise
        self._clients.sort(key=lambda client: self.nodes.index(client.node))
        return self

    def __exit__(self, *exc: object) -> None:
        run_all([client.close for client in self._clients])
        # Jobs that are still running have just lost their connection: wait until they have removed
        # partial files.
        wait(self._jobs, STOP_TIMEOUT)

    def run_on_all(self, job: Callable[[FileClient], T], title: str = NOTHING_COPIED) -> list[T]:
        """Run a job with every client concurrently, and return the results in node order.

        Raises:
            FilesError: problems of all nodes, after all have ended; `title` describes the outcome.
        """
        return self._run_all(
            [(client.node, partial(job, client)) for client in self._clients], title
        )

    def _run_all(self, jobs: Sequence[tuple[Node, Callable[[], T]]], title: str) -> list[T]:
        try:
            futures = self._jobs = start_all([job for _, job in jobs], name="skymagic-files")
            pending = True
            while pending:
                pending = bool(wait(futures, POLL_INTERVAL).not_done)
                self._on_poll()
        except BaseException:  # the wait was interrupted
            self._stop.set()
            end = time.monotonic() + STOP_TIMEOUT
            # If a connection ended without Cancel, the node would consider it lost, and keep half a
            # file for the next copy. `cancel` waits for the write in progress, which takes as long
            # as the node needs to receive it.
            run_all([client.cancel for client in self._clients], timeout=STOP_TIMEOUT)
            wait(self._jobs, max(0.0, end - time.monotonic()))
            raise
        problems = [
            (str(node), sentence)
            for (node, _), future in zip(jobs, futures, strict=True)
            if (problem := future.exception()) is not None
            for sentence in self._explain(node, problem)
        ]
        if problems:
            raise files_error(title, problems, len(self.nodes))
        return [future.result() for future in futures]

    def _explain(self, node: Node, problem: BaseException) -> Sequence[str]:
        if isinstance(problem, NodeFailed):
            return problem.args
        if isinstance(problem, SkyError):
            return [str(problem)]
        if not isinstance(problem, OSError | EOFError | ValueError | LookupError | TypeError):
            raise problem
        client = next((client for client in self._clients if client.node is node), None)
        complaint = (client.complaint() if client is not None else "") or str(problem)
        return [
            f"the connection was lost ({complaint}); files that arrived are complete: "
            "repeat the copy to resume it"
        ]
