"""The daemon of a node: owns the agent, and keeps what it says until the notebook has it.

It runs in one thread: the agent's pipes, the socket that gates connect to, and streams to ports of this node. It ends when the agent
has ended and the notebook knows of it, or nobody has come for `FORSAKEN` seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from skymagic.kernels.daemon.fork import Forked
from skymagic.kernels.daemon.rundir import Berth, sweep
from skymagic.wire import agent as wire
from skymagic.wire.boot import boot_id
from skymagic.wire.session import frames
from skymagic.wire.session.frames import Frame, ProtocolError, Session
from skymagic.wire.session.handshake import (
    EXIT,
    OPEN,
    REPLY,
    REQUEST,
    AgentExit,
    HandshakeReply,
    HandshakeRequest,
)
from skymagic.wire.session.loop import Loop
from skymagic.wire.session.channels import WRITABLE

FORSAKEN = 20.0
"""Seconds for which a daemon waits to be fetched, when its agent has ended or was never told what to do."""
GRACE = 10.0
"""Seconds that the agent has to end everything once its input is closed."""
READ = 1 << 18


class Daemon:
    """The event loop.

    Args:
        listener: where gates connect.
        place: the folder, removed at the end.
        command: what is run in the place of the agent; empty for the agent.
        secret: what a notebook must know.
    """

    def __init__(self, listener: socket.socket, place: Berth, command: Sequence[str], secret: str) -> None:
        self.place = place
        self.secret = secret
        self.session = Session()
        self.loop = Loop(self.session, self._on_frame, lambda _: self._tell_agent(wire.NotebookDetached()))
        self.attempt = 0
        self.partial = bytearray()
        """The beginning of a line for the agent, whose end has not come."""
        self.lines = bytearray()
        """Whole lines that the agent has not read."""
        self.told = False
        """Whether the agent has been told what to do."""
        self.closing = False
        """Whether the agent's input ends after the lines that wait."""
        self.dismissed = False
        """Whether the daemon ends with its agent: somebody on this machine wants it, or nobody ever came."""
        self.status: int | None = None
        self.agent: subprocess.Popen[bytes] | Forked | None = None
        self.input = self.output = -1
        self.deadline: float | None = time.monotonic() + FORSAKEN
        self.kill_at: float | None = None
        listener.setblocking(False)
        self.listener = listener
        self.loop.watch(listener, self._on_gate)
        self._start(command)
        with suppress(OSError):
            sweep(place, time.time())

    def _start(self, command: Sequence[str]) -> None:
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: None)
        self.loop.watch(woken, lambda _: self._on_signal(woken))
        with open(os.open(self.place.errors, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as errors:
            try:
                agent = _run(command, errors.fileno()) if command else Forked(_agent, errors.fileno())
            except OSError as problem:
                self._say_end(127, str(problem))
                return
        assert agent.stdin is not None and agent.stdout is not None
        self.agent = agent
        self.input, self.output = agent.stdin.fileno(), agent.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self.loop.watch(self.output, lambda _: self._on_output())

    def run(self) -> None:
        """Serve until the end; then nothing is left."""
        try:
            while not self._over():
                self.loop.step(min(filter(None, (self.deadline, self.kill_at)), default=None))
                self._limits()
        finally:
            self._kill()
        self.listener.close()
        self.place.remove()
        self.loop.say_gone()
        self.loop.close()

    def _over(self) -> bool:
        if self.status is None:
            return False
        return (
            self.session.settled
            or self.dismissed
            or (self.deadline is not None and self.deadline <= time.monotonic())
        )

    def _limits(self) -> None:
        now = time.monotonic()
        waited = self.loop.attached or (self.told and self.status is None)
        if waited:
            self.deadline = None
        elif self.deadline is None:
            self.deadline = now + FORSAKEN
        elif self.deadline <= now and self.status is None:
            self.deadline, self.dismissed = None, True
            self._close_input()
        if self.kill_at is not None and self.kill_at <= now:
            self.kill_at = None
            self._kill()

    def _kill(self) -> None:
        if self.status is None and self.agent is not None:
            with suppress(OSError):
                os.killpg(self.agent.pid, signal.SIGKILL)

    # -- gates -------------------------------------------------------------------------------------------------------

    def _on_gate(self, _: int) -> None:
        with suppress(OSError):
            sock, _address = self.listener.accept()
            sock.setblocking(False)
            line = bytearray()
            self.loop.watch(sock, lambda _: self._on_request(sock, line))

    def _on_request(self, sock: socket.socket, line: bytearray) -> None:
        try:
            data = sock.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        line += data
        try:
            found = REQUEST.first(bytes(line))
        except ValueError as problem:
            self.loop.watch(sock, lambda _: None, 0)
            self._refuse(sock, str(problem))
            return
        if found is not None or not data:
            self.loop.watch(sock, lambda _: None, 0)
            self._attach(sock, *found) if found is not None else sock.close()

    def _refuse(self, sock: socket.socket, why: str, gone: bool = True) -> None:
        with suppress(OSError):
            sock.send(REPLY.encode(HandshakeReply(boot_id(), error=why, gone=gone)))
        sock.close()

    def _attach(self, sock: socket.socket, request: HandshakeRequest, rest: bytes) -> None:
        if request.secret != self.secret:
            self._refuse(sock, "a daemon of this name serves another notebook")
        elif request.attempt <= self.attempt:
            self._refuse(sock, "a newer connection has taken its place", gone=False)
        else:
            self.attempt = request.attempt
            was_attached = self.loop.attached
            try:
                reply = REPLY.encode(HandshakeReply(boot_id(), self.session.received))
                self.loop.attach(sock, request.received, reply, rest)
            except ProtocolError as problem:
                self._refuse(sock, str(problem))
                return
            if not was_attached:
                self._tell_agent(wire.NotebookAttached())

    # -- the agent ---------------------------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame) -> None:
        match frame.kind:
            case frames.DATA:
                self._pass_on(frame.data)
            case frames.EOF:
                self._close_input()
            case frames.OPEN:
                self._open(frame)

    def _pass_on(self, data: bytes) -> None:
        """Whole lines only, so that ours can go between them."""
        end = data.rfind(b"\n") + 1
        if not end:
            self.partial += data
            return
        self.lines += self.partial + data[:end]
        self.partial = bytearray(data[end:])
        self.told = True
        self._write()

    def _tell_agent(self, message: wire.NotebookDetached | wire.NotebookAttached) -> None:
        if self.told:
            self.lines += wire.encode(message)
            self._write()

    def _write(self) -> None:
        if self.input < 0:
            return
        try:
            while self.lines:
                del self.lines[: os.write(self.input, self.lines)]
        except BlockingIOError:
            pass
        except OSError:
            self._end_input()
            return
        if self.closing and not self.lines:
            self._end_input()
        else:
            self.loop.watch(self.input, lambda _: self._write(), WRITABLE if self.lines else 0)

    def _close_input(self) -> None:
        """Let the agent end everything, once it has read what was said before."""
        if not self.closing:
            self.closing = True
            self.kill_at = time.monotonic() + GRACE
            self._write()

    def _end_input(self) -> None:
        self.loop.watch(self.input, lambda _: None, 0)
        assert self.agent is not None and self.agent.stdin is not None
        with suppress(OSError):
            self.agent.stdin.close()
        self.input = -1
        self.lines.clear()

    def _on_output(self) -> None:
        if self.output >= 0 and not self._read():
            self.loop.watch(self.output, lambda _: None, 0)
            self.output = -1

    def _read(self) -> bool:
        try:
            data = os.read(self.output, READ)
        except BlockingIOError:
            return True
        self.session.put(frames.DATA, 0, data) if data else None
        return bool(data)

    def _on_signal(self, woken: int) -> None:
        with suppress(BlockingIOError):
            if signal.SIGTERM in os.read(woken, 4096):
                self.dismissed = True
                self._close_input()
        if self.status is None and self.agent is not None and (status := self.agent.poll()) is not None:
            self._ended(status)

    def _ended(self, status: int) -> None:
        """Say how the agent ended, after all that it said. Its output may stay open in a process that it left."""
        before = -1
        while self.output >= 0 and self.session.backlog != before:
            before = self.session.backlog
            self._on_output()
        with open(self.place.errors, errors="replace") as file:
            self._say_end(status, file.read()[-4000:].strip())

    def _say_end(self, status: int, stderr: str) -> None:
        self.status = status
        self.session.put(frames.EXIT, 0, EXIT.encode(AgentExit(status, stderr)))

    # -- streams -----------------------------------------------------------------------------------------------------

    def _open(self, frame: Frame) -> None:
        try:
            target = OPEN.decode(frame.data)
            family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
        except (ValueError, OSError):
            self.loop.channels.reset(frame.channel)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.connect((target.address, target.port))
        except BlockingIOError:
            pass
        except OSError:
            sock.close()
            self.loop.channels.reset(frame.channel)
            return
        self.loop.channels.add(frame.channel, sock, connecting=True)


def _run(command: Sequence[str], errors: int) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True)


def _agent() -> None:
    from skymagic.kernels.agent.agent import main

    main()
