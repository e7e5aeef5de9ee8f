"""Owner of the agent's child process, the forkserver."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from skymagic.kernels.agent import forkserver
from skymagic.kernels.fork import EventLoop, fork
from skymagic.wire import agent as wire

logger = logging.getLogger(__name__)

END_TIMEOUT = 5.0
"""Seconds that the forkserver has to end what ranks left behind.

A process in the middle of a system call may not end at once.
"""

Sink = Callable[[wire.AgentMessage], None]
"""Destination of messages."""


class Forkserver:
    """Owner of the process that forks ranks.

    Args:
        preload: modules that it imports first.
        profile: directory that serves as the IPython profile of its ranks.
        foreign: descriptors of the agent that it closes: holding one of them keeps a link open.
        on_message: called with RankForked and ChildExited.
        send: sends the notebook AgentFailed if it ends by itself.
    """

    def __init__(
        self,
        loop: EventLoop,
        preload: Iterable[str],
        profile: Path,
        foreign: set[int],
        on_message: Sink,
        send: Sink,
    ) -> None:
        self._loop, self._on_message, self._send = loop, on_message, send
        self._decoder = wire.decoder()
        self._channel, forkserver_end = socket.socketpair()

        def serve() -> None:
            for fd in {self._channel.fileno(), *foreign} - {forkserver_end.fileno(), 0, 1, 2}:
                os.close(fd)
            forkserver.serve(forkserver_end, tuple(preload), str(profile))

        self._pid = fork(serve)
        logger.info("forkserver started: pid=%s", self._pid)
        forkserver_end.close()  # otherwise the channel would stay open after the forkserver's end
        loop.watch(self._channel, self._on_readable)

    def fork(self, spec: wire.RankSpec, descriptors: list[int]) -> None:
        """Ask for a rank.

        Args:
            descriptors: its control socket, standard output and standard error; closed here.
        """
        forkserver.send_spec(self._channel, spec, descriptors)
        for fd in descriptors:
            os.close(fd)

    def _on_readable(self) -> None:
        data = self._channel.recv(1 << 16)
        if not data:
            logger.error("forkserver ended: pid=%s", self._pid)
            self._loop.unwatch(self._channel)
            self._send(wire.AgentFailed("the process that forks ranks ended"))
        for message in self._decoder.feed(data):
            self._on_message(message)

    def close(self) -> None:
        """End it, after it has ended the ranks and the processes that they left behind."""
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGTERM)  # it may be in the middle of a long import
            # once it serves, it ignores SIGTERM and ends with its input; its end of the channel
            # closes last, after it has killed what the ranks left
            self._channel.shutdown(socket.SHUT_WR)
            self._channel.settimeout(END_TIMEOUT)
            while self._channel.recv(1 << 16):
                pass
        self._channel.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
