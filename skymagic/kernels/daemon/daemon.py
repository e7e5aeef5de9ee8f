"""The daemon of a node: owns the agent, and buffers its output until the notebook acknowledges it.

One thread with an event loop serves the agent's pipes, the socket that `kernels.daemon.attach`
connects to, and TCP connections to ports of this node. The daemon lives as long as its agent, and
then ends once the notebook has acknowledged the agent's end, or if nothing attaches within
`ORPHAN_TIMEOUT` seconds. An agent that has not got its configuration yet is ended if nothing
attaches for as long.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from skymagic.kernels.agent import directories
from skymagic.kernels.daemon.rundir import RunDirectory, sweep
from skymagic.kernels.fork import Forked, signal_pipe
from skymagic.wire import agent as wire
from skymagic.wire import debug_log
from skymagic.wire.authentication import accept_ready
from skymagic.wire.processes import boot_id
from skymagic.wire.record import ended_by
from skymagic.wire.session import frames
from skymagic.wire.session.frames import (
    AGENT_EXIT,
    HANDSHAKE_REPLY,
    HANDSHAKE_REQUEST,
    OPEN_CHANNEL,
    REPLACED,
    AgentExit,
    Frame,
    HandshakeReply,
    HandshakeRequest,
    ProtocolError,
    Session,
)
from skymagic.wire.session.loop import WRITABLE, SessionLoop

logger = logging.getLogger(__name__)

ORPHAN_TIMEOUT = 20.0
"""Seconds to wait for a connection when the agent has ended or has never received a line."""
ACKNOWLEDGE_TIMEOUT = 5.0
"""Seconds for a connected notebook to acknowledge the agent's end before the daemon ends."""
STOP_TIMEOUT = 10.0
"""Seconds that the agent has to end everything once its input is closed."""
READ_SIZE = 1 << 18


class AgentInput:
    """Standard input of the agent.

    The agent receives whole lines only, so that the daemon can insert its own messages.
    """

    def __init__(self, loop: SessionLoop) -> None:
        self._loop = loop
        self._stdin: IO[bytes] | None = None
        self._partial = bytearray()  # an incomplete line
        self._pending = bytearray()  # whole lines that the agent has not read
        # whether the agent has received its first line, before which it must get nothing else
        self.configured = False
        self.closing = False  # whether the input closes after the pending lines
        self.first_line = b""
        """The agent's configuration, until the daemon has read it."""

    def open(self, stdin: IO[bytes]) -> None:
        """Connect to the agent, which was started."""
        os.set_blocking(stdin.fileno(), False)
        self._stdin = stdin

    def forward(self, data: bytes) -> None:
        """Pass on data from the notebook."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._partial += data
            return
        self._pending += self._partial + data[:end]
        self._partial = bytearray(data[end:])
        if not self.configured:
            self.first_line = bytes(self._pending[: self._pending.index(b"\n")])
        self.configured = True
        self._write()

    def forget_partial(self) -> None:
        """Drop an incomplete line, whose rest will never arrive."""
        self._partial.clear()

    def notify(self, message: wire.AgentMessage) -> None:
        """Insert a message of the daemon between lines."""
        if self.configured:
            self._pending += wire.encode(message)
            self._write()

    def close(self) -> None:
        """Close it once the agent has read all pending lines."""
        self.closing = True
        self._write()

    def _write(self) -> None:
        if self._stdin is None:
            return
        fd = self._stdin.fileno()
        try:
            while self._pending:
                del self._pending[: os.write(fd, self._pending)]
        except BlockingIOError:
            pass
        except OSError:
            self._end()
            return
        if self.closing and not self._pending:
            self._end()
        else:
            self._loop.watch(fd, lambda _: self._write(), WRITABLE if self._pending else 0)

    def _end(self) -> None:
        if self._stdin is not None:
            self._loop.watch(self._stdin.fileno(), lambda _: None, 0)
            with suppress(OSError):
                self._stdin.close()
        self._stdin = None
        self._pending.clear()


class Daemon:
    """The daemon process and its event loop.

    Args:
        listener: accepts connections of `kernels.daemon.attach`, which relays a notebook's bytes.
        directory: run directory, removed at the end.
        command: runs instead of the agent, in tests; empty for the agent.
        secret: proves that a notebook may attach.
    """

    def __init__(
        self, listener: socket.socket, directory: RunDirectory, command: Sequence[str], secret: str
    ) -> None:
        self.directory = directory
        self.secret = secret
        self.session = Session()
        self.loop = SessionLoop(
            self.session, self._on_frame, lambda _: self.input.notify(wire.NotebookDetached())
        )
        self.input = AgentInput(self.loop)
        self.client = ""  # id of the notebook that it serves
        self.attempt = 0  # number of that notebook's latest attempt to connect; others are outdated
        self.wait_for_notebook = True
        """True if the daemon waits after the agent's end until a notebook has acknowledged it.

        False after a SIGTERM, or if no notebook ever came.
        """
        self.status: int | None = None
        self.exit_data = b""  # the encoded report of the agent's end
        self.mid_line = False
        """True if the agent's output so far ends within a line."""
        self.skipping = False
        """True while the rest of a line is skipped whose beginning another notebook got."""
        self.agent: subprocess.Popen[bytes] | Forked | None = None
        self.output = -1
        # when a daemon without a notebook gives up waiting for one
        self.deadline: float | None = time.monotonic() + ORPHAN_TIMEOUT
        # when an agent that was asked to end is killed
        self.kill_at: float | None = None
        self.acknowledge_by = 0.0
        """Deadline for a connected notebook to acknowledge the agent's end."""
        listener.setblocking(False)
        self.listener = listener
        self.loop.watch(listener, self._on_connection)
        self._start(command)
        with suppress(OSError):
            sweep(directory, time.time())

    def _start(self, command: Sequence[str]) -> None:
        woken = signal_pipe()
        # empty handlers: the signals wake the loop through the pipe
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: None)
        # meant for ranks' hooks, but Slurm sends them to all processes of a job
        for number in (
            signal.SIGUSR1,
            signal.SIGUSR2,
        ):
            signal.signal(number, signal.SIG_IGN)
        self.loop.watch(woken, lambda _: self._on_signal(woken))
        with open(
            os.open(self.directory.errors, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb"
        ) as errors:
            try:
                agent = (
                    _run(command, errors.fileno())
                    if command
                    else Forked(lambda: _agent(self.directory.record), errors.fileno())
                )
            except OSError as problem:
                self._send_exit(127, str(problem))
                return
        assert agent.stdin is not None and agent.stdout is not None
        self.agent = agent
        self.input.open(agent.stdin)
        self.output = agent.stdout.fileno()
        os.set_blocking(self.output, False)
        self.loop.watch(self.output, lambda _: self._on_output())

    def run(self) -> None:
        """Serve until the end, and leave nothing behind."""
        try:
            while not self._is_finished():
                self.loop.step(min(filter(None, (self.deadline, self.kill_at)), default=None))
                self._check_deadlines()
        finally:
            self._kill()
        self.listener.close()
        self.directory.remove()
        logger.info("daemon ends: status=%s attached=%s", self.status, self.loop.attached)
        if self.status:  # an agent that was killed has not removed its folders
            directories.sweep()
        self.loop.send_gone()
        self.loop.close()

    def _is_finished(self) -> bool:
        if self.status is None:
            return False
        now = time.monotonic()
        orphaned = self.deadline is not None and self.deadline <= now
        acknowledged_or_away = not self.loop.attached or self.acknowledge_by <= now
        return (
            self.session.all_acknowledged
            or orphaned
            or (not self.wait_for_notebook and acknowledged_or_away)
        )

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        is_needed = self.loop.attached or (self.input.configured and self.status is None)
        if is_needed:
            self.deadline = None
        elif self.deadline is None:
            self.deadline = now + ORPHAN_TIMEOUT
        elif self.deadline <= now and self.status is None:
            logger.warning("no notebook came within %s s: the agent is ended", ORPHAN_TIMEOUT)
            self.deadline, self.wait_for_notebook = None, False
            self._close_input()
        if self.kill_at is not None and self.kill_at <= now:
            logger.warning("agent is killed, because it did not end in %s s", STOP_TIMEOUT)
            self.kill_at = None
            self._kill()

    def _kill(self) -> None:
        if self.status is None and self.agent is not None:
            with suppress(OSError):
                os.killpg(self.agent.pid, signal.SIGKILL)

    # -- connections -------------------------------------------------------------------------------

    def _on_connection(self, _: int) -> None:
        if (sock := accept_ready(self.listener)) is None:
            return
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
            handshake = HANDSHAKE_REQUEST.first(bytes(line))
        except ValueError as problem:
            self.loop.watch(sock, lambda _: None, 0)
            self._refuse(sock, str(problem))
            return
        if handshake is not None or not data:
            self.loop.watch(sock, lambda _: None, 0)
            self._attach(sock, *handshake) if handshake is not None else sock.close()

    def _refuse(self, sock: socket.socket, why: str, is_lost: bool = True) -> None:
        logger.warning("connection refused: %s", why)
        with suppress(OSError):
            sock.send(HANDSHAKE_REPLY.encode(HandshakeReply(boot_id(), error=why, is_lost=is_lost)))
        sock.close()

    def _attach(self, sock: socket.socket, request: HandshakeRequest, payload: bytes) -> None:
        if request.secret != self.secret:
            self._refuse(sock, "a daemon of this name serves another notebook")
        elif request.takes_over:
            self._take_over(request)
            self._serve(sock, request, payload, wire.NotebookReplaced())
        elif self.client and request.client != self.client:
            self._refuse(sock, REPLACED)
        elif request.attempt <= self.attempt:
            self._refuse(sock, "a newer connection has taken its place", is_lost=False)
        else:
            self._serve(
                sock, request, payload, None if self.loop.attached else wire.NotebookAttached()
            )

    def _take_over(self, request: HandshakeRequest) -> None:
        """Drop the previous notebook's session, with its unsent data and its incomplete line."""
        self.session = Session()
        self.loop.restart(self.session)
        self.input.forget_partial()
        # the new notebook decodes lines, and must start with a whole one
        self.skipping = self.mid_line
        # the dropped session had the report of the agent's end
        if self.exit_data:
            self.session.put(frames.EXIT, 0, self.exit_data)

    def _serve(
        self,
        sock: socket.socket,
        request: HandshakeRequest,
        payload: bytes,
        message: wire.AgentMessage | None,
    ) -> None:
        """Serve a notebook over this connection.

        Args:
            message: message to the agent about the notebook; None for none.
        """
        self.client, self.attempt = request.client, request.attempt
        logger.info(
            "notebook connected: attempt=%s received=%s new=%s",
            request.attempt,
            request.received,
            request.takes_over,
        )
        try:
            reply = HANDSHAKE_REPLY.encode(HandshakeReply(boot_id(), self.session.received))
            self.loop.attach(sock, request.received, reply, payload)
        except ProtocolError as problem:
            self._refuse(sock, str(problem))
            return
        if message is not None:
            self.input.notify(message)

    # -- the agent ---------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame) -> None:
        match frame.kind:
            case frames.DATA:
                self.input.forward(frame.data)
                if self.input.first_line:
                    self._start_debug_log()
            case frames.EOF:
                self._close_input()
            case frames.OPEN:
                self._open_channel(frame)

    def _start_debug_log(self) -> None:
        """Start the daemon's debug log, with the pool and level of the agent's configuration."""
        line, self.input.first_line = self.input.first_line, b""
        with suppress(ValueError):  # another program instead of the agent
            if isinstance(spec := wire.decode(line), wire.AgentSpec):
                path = Path(self.directory.path, debug_log.file_name(spec.node, "daemon"))
                debug_log.setup(path, {"pool": spec.pool, "node": spec.node})
                debug_log.set_level(spec.log_level)
                logger.info("daemon serves its first notebook: pid=%s", os.getpid())

    def _close_input(self) -> None:
        """Close the agent's input once it has read all lines; it then ends everything."""
        if not self.input.closing:
            logger.info("agent is asked to end")
            self.kill_at = time.monotonic() + STOP_TIMEOUT
            self.input.close()

    def _on_output(self) -> None:
        with suppress(BlockingIOError):
            if data := os.read(self.output, READ_SIZE):
                self.mid_line = not data.endswith(b"\n")
                if self.skipping:
                    # skip the rest of a line whose beginning went to another notebook
                    _, end, data = data.partition(b"\n")
                    self.skipping = not end
                if data:
                    self.session.put(frames.DATA, 0, data)
            else:
                self.loop.watch(self.output, lambda _: None, 0)
                self.output = -1

    def _on_signal(self, woken: int) -> None:
        with suppress(BlockingIOError):
            if signal.SIGTERM in os.read(woken, 4096):
                self.wait_for_notebook = False
                self._close_input()
        if (
            self.status is None
            and self.agent is not None
            and (status := self.agent.poll()) is not None
        ):
            self._on_agent_exit(status)

    def _on_agent_exit(self, status: int) -> None:
        """Send the agent's exit status after all of its output."""
        previous_backlog = -1
        # read until nothing more arrives, not to the end of the stream: a process that the agent
        # left behind may hold it open
        while self.output >= 0 and self.session.backlog != previous_backlog:
            previous_backlog = self.session.backlog
            self._on_output()
        with open(self.directory.errors, errors="replace") as file:
            self._send_exit(status, file.read()[-4000:].strip())

    def _send_exit(self, status: int, stderr: str) -> None:
        self.status = status
        logger.info("agent exited: status=%s", status)
        self.acknowledge_by = time.monotonic() + ACKNOWLEDGE_TIMEOUT
        ender = ended_by(Path(self.directory.path))
        if ender and status < 0 and not self.mid_line:
            # the agent was killed and could not report the end of the pool: do it here
            self.session.put(frames.DATA, 0, wire.encode(wire.PoolEnded(f"was ended by {ender}")))
        self.exit_data = AGENT_EXIT.encode(AgentExit(status, stderr))
        self.session.put(frames.EXIT, 0, self.exit_data)

    # -- streams -----------------------------------------------------------------------------------

    def _open_channel(self, frame: Frame) -> None:
        sock: socket.socket | None = None
        try:
            target = OPEN_CHANNEL.decode(frame.data)
            sock = socket.socket(socket.AF_INET6 if ":" in target.address else socket.AF_INET)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # connecting goes on in the background: the loop waits until it has succeeded or failed
            with suppress(BlockingIOError):
                sock.connect((target.address, target.port))
        except (ValueError, OSError):
            if sock is not None:
                sock.close()
            logger.warning("port of this node not reached: channel=%s", frame.channel)
            self.loop.channels.reset(frame.channel)
            return
        self.loop.channels.add(frame.channel, sock, connecting=True)


def _run(command: Sequence[str], errors: int) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True)


def _agent(record: str) -> None:
    from skymagic.kernels.agent.agent import main

    main(record)
