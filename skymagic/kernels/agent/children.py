"""The agent's two child processes, each with its owner: ipyparallel's controller (on the head), and the forkserver."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from skymagic.kernels.agent import forkserver
from skymagic.kernels.fork import EventLoop, fork
from skymagic.wire import agent as wire
from skymagic.wire import processes

END_TIMEOUT = 5.0
"""Seconds that the forkserver has to end what ranks have left: a process in the middle of a system call may not end at once."""

Sink = Callable[[wire.AgentMessage], None]
"""Where messages go."""


class Controller:
    """Owns ipyparallel's controller, which lets in only those who have its key (CURVE), also on 127.0.0.1: a machine has other users.

    Args:
        directory: the agent's, where the controller's profile and the agent's log are.
        address: where it listens.
        on_listening: called once with its connection information for ranks.
        send: to the notebook: ControllerUp, and AgentFailed when it has ended by itself.
    """

    def __init__(
        self,
        loop: EventLoop,
        directory: Path,
        address: str,
        on_listening: Callable[[dict[str, Any]], None],
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
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.stdin, self._stdout = self._process.stdin, self._process.stdout
        loop.watch(self._stdout, self._on_output)
        # the end of its output does not say that it has ended: its heartbeat, a process of its own, may keep that open
        self._pidfd = os.pidfd_open(self._process.pid) if hasattr(os, "pidfd_open") else -1
        if self._pidfd >= 0:
            loop.watch(self._pidfd, self._ended)

    @property
    def descriptors(self) -> set[int]:
        """Descriptors of the agent's ends of its pipes: it lives until its standard input ends, so nobody else may hold them."""
        return {self.stdin.fileno(), self._stdout.fileno()}

    def _on_output(self) -> None:
        line = os.read(self._stdout.fileno(), 4096)
        if not line:
            self._ended()
        elif b"listening" in line and not self._listening:
            self._listening = True
            client, engine = (
                self._security / f"ipcontroller-{whose}.json" for whose in ("client", "engine")
            )
            info = json.loads(engine.read_text())
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
        reason = f"ipyparallel's controller ended with status {status}\n{log[-2000:]}".strip()
        self._send(wire.AgentFailed(reason))

    def close(self) -> None:
        """End it, and its heartbeat, which is a process of its own in the same group."""
        self._kill_group()
        self._process.wait()

    def _kill_group(self) -> None:
        """Before it is waited for: afterwards its number may be another group's."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class Forkserver:
    """The process that forks ranks, with its lifetime.

    Args:
        preload: modules that it imports first.
        foreign: descriptors of the agent that it closes: whoever holds one of them keeps a link open.
        on_message: called with RankForked and ChildExited.
        send: to the notebook: AgentFailed when it has ended by itself.
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
        self._channel, theirs = socket.socketpair()

        def serve() -> None:
            for fd in {self._channel.fileno(), *foreign} - {theirs.fileno(), 0, 1, 2}:
                os.close(fd)
            forkserver.serve(theirs, tuple(preload))

        self._pid = fork(serve)
        theirs.close()  # the channel's end must show when the forkserver is gone
        loop.watch(self._channel, self._on_readable)

    def fork(self, spec: wire.RankSpec, descriptors: list[int]) -> None:
        """Ask for a rank; `descriptors` are its control socket, standard output and standard error, and are closed here."""
        forkserver.send_spec(self._channel, spec, descriptors)
        for fd in descriptors:
            os.close(fd)

    def _on_readable(self) -> None:
        data = self._channel.recv(1 << 16)
        if not data:
            self._loop.unwatch(self._channel)
            self._send(wire.AgentFailed("the process that forks ranks ended"))
        for message in self._decoder.feed(data):
            self._on_message(message)

    def close(self) -> None:
        """End it; it ends the ranks, and what they have left, before."""
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGTERM)  # it may be in the middle of a long import
            self._channel.shutdown(socket.SHUT_WR)
            self._channel.settimeout(END_TIMEOUT)
            while self._channel.recv(1 << 16):
                pass
        self._channel.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
