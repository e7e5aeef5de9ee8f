"""Owners of the agent's two child processes: ipyparallel's controller (on the head) and the
forkserver.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from skymagic.kernels.agent import forkserver
from skymagic.kernels.fork import EventLoop, fork
from skymagic.wire import agent as wire
from skymagic.wire import processes
from skymagic.wire.typed import JsonObject

logger = logging.getLogger(__name__)

END_TIMEOUT = 5.0
"""Seconds that the forkserver has to end what ranks left behind.

A process in the middle of a system call may not end at once.
"""

Sink = Callable[[wire.AgentMessage], None]
"""Destination of messages."""


class Controller:
    """Owner of ipyparallel's controller, which admits only clients with its key (CURVE).

    That holds on 127.0.0.1 too, because a machine has other users.

    Args:
        directory: the agent's, with the controller's profile and the agent's log.
        address: where it listens.
        on_listening: called once with its connection information for ranks.
        send: sends the notebook ControllerUp, and AgentFailed if it ends by itself.
    """

    def __init__(
        self,
        loop: EventLoop,
        directory: Path,
        address: str,
        on_listening: Callable[[JsonObject], None],
        send: Sink,
    ) -> None:
        self._loop = loop
        self._directory = directory
        self._security = directory / "profile" / "security"
        self._on_listening, self._send = on_listening, send
        self._listening = False
        command = [
            sys.executable,
            *(["-P"] if sys.flags.safe_path else []),
            "-m",
            processes.CONTROLLER,
        ]
        command += [
            f"--profile-dir={directory / 'profile'}",
            f"--ip={address}",
            "--IPController.enable_curve=True",
        ]
        # a separate process group, so that its heartbeat can be killed with it
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.stdin, self._stdout = self._process.stdin, self._process.stdout
        loop.watch(self._stdout, self._on_output)
        # its output may stay open after its end, held by its heartbeat, a separate process
        self._pidfd = os.pidfd_open(self._process.pid) if hasattr(os, "pidfd_open") else -1
        if self._pidfd >= 0:
            loop.watch(self._pidfd, self._ended)

    @property
    def descriptors(self) -> set[int]:
        """Descriptors of the agent's ends of its pipes.

        The controller lives until its standard input closes, so no other process may hold them.
        """
        return {self.stdin.fileno(), self._stdout.fileno()}

    def _on_output(self) -> None:
        line = os.read(self._stdout.fileno(), 4096)
        if not line:
            self._ended()
        elif b"listening" in line and not self._listening:
            self._listening = True
            client, engine = (
                self._security / f"ipcontroller-{role}.json" for role in ("client", "engine")
            )
            info = json.loads(engine.read_text())
            logger.info("controller listens: pid=%s", self._process.pid)
            self._send(wire.ControllerUp(json.loads(client.read_text()), info))
            self._on_listening(info)

    def _ended(self) -> None:
        self._loop.unwatch(self._stdout)
        if self._pidfd >= 0:
            self._loop.unwatch(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._kill_group()
        status = self._process.wait()
        log = (self._directory / "agent.log").read_text(errors="replace") if status > 0 else ""
        logger.error("controller ended: pid=%s status=%s", self._process.pid, status)
        reason = f"ipyparallel's controller ended with status {status}\n{log[-2000:]}".strip()
        self._send(wire.AgentFailed(reason))

    def close(self) -> None:
        """End it together with its heartbeat, a separate process in the same group."""
        self._kill_group()
        self._process.wait()

    def _kill_group(self) -> None:
        """Kill the process group, before it is reaped: later its number may be another group's."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class Forkserver:
    """Owner of the process that forks ranks.

    Args:
        preload: modules that it imports first.
        foreign: descriptors of the agent that it closes: holding one of them keeps a link open.
        on_message: called with RankForked and ChildExited.
        send: sends the notebook AgentFailed if it ends by itself.
    """

    def __init__(
        self,
        loop: EventLoop,
        preload: Iterable[str],
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
            forkserver.serve(forkserver_end, tuple(preload))

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
