"""One running rank, as its agent has it: its process, its control socket and its output."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import Any

from skymagic.kernels.agent.loop import Loop
from skymagic.kernels.agent.output import RankOutput
from skymagic.wire import agent as wire
from skymagic.wire import processes


class Rank:
    """One running rank; owns its control socket, its log and the read ends of its pipes."""

    def __init__(self, number: int, ident: str, control: socket.socket, output: RankOutput) -> None:
        self.number = number
        self.ident = ident
        self.control = control
        self.output = output
        self.decoder = wire.decoder()
        self.pid: int | None = None
        self.started = 0
        """When its process was, which tells it from a later one of that number."""
        self.ready = False
        """Whether it has run its plugins' hooks."""
        self.expected = False
        """Whether its end was asked for."""
        self.hook: int | None = None
        """How many times its `on_interruption` hook has ended; None while it has none."""

    def send(self, message: wire.AgentMessage) -> None:
        """Send to its control thread; to a rank that is gone nothing is sent."""
        with contextlib.suppress(OSError):
            self.control.sendall(wire.encode(message))

    def signal(self, signum: int) -> None:
        """Send it a signal; one that has ended gets none."""
        if self.pid is not None:
            processes.send_signal(self.pid, self.started, signum)

    def usage(self) -> list[Any] | None:
        """The state of its main thread, as a letter of Linux's, and the processor time that it has used, in seconds."""
        try:
            status = Path(f"/proc/{self.pid}/task/{self.pid}/stat").read_text()
        except OSError:
            return None
        state, *fields = status.rpartition(")")[2].split()
        return [state, (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")]

    def kill(self) -> None:
        """SIGKILL it; the forkserver ends what it started."""
        self.signal(signal.SIGKILL)

    def close(self, loop: Loop) -> None:
        """Close what the agent has of it."""
        loop.unwatch(self.control)
        for pipe in self.output.pipes:
            loop.unwatch(pipe.fd)
        self.control.close()
        self.output.close()
