"""A terminal on a rank's node: a process there, beside the rank, whose output is shown and to which keys are sent."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable

from skymagic.cluster.agents import Agents
from skymagic.wire import processes
from skymagic.wire import terminal as wire
from skymagic.wire.codec import Transport

CTRL_C = b"\x03"
INTERRUPT_TIMEOUT = 5.0
"""Seconds in which a program ends upon Ctrl-C; then its terminal is closed."""


class Terminal:
    """One program on a rank's node; ends with `close`.

    Args:
        command: for ``sh -c`` there; "" for the user's shell with a prompt.
        size: rows and columns.

    Raises:
        OSError, HostError: the node is not to be reached.
    """

    def __init__(self, agents: Agents, rank: int, command: str = "", size: tuple[int, int] = (24, 120)) -> None:
        index, spec = agents.specs[rank]
        self._transport: Transport = agents.nodes[index].run(processes.TERMINAL)
        pid = agents.ranks[rank].pid or 0
        self._transport.write(wire.encode(wire.StartProgram(command, pid, spec.info, agents.environment(rank), *size)))
        self._events: queue.SimpleQueue[bytes | int | None] = queue.SimpleQueue()
        self._interrupts = 0
        threading.Thread(target=self._read, name="skymagic-terminal", daemon=True).start()

    def _read(self) -> None:
        """On a thread: the stop button must not fall amid a message."""
        with contextlib.suppress(EOFError, OSError, ValueError):
            for message, payload in wire.messages(self._transport.read, noise=True):
                self._events.put(message.status if isinstance(message, wire.ProgramEnded) else bytes(payload))
        self._events.put(None)

    def type(self, keys: bytes) -> None:
        """Send keys; to a program that has ended nothing is sent."""
        with contextlib.suppress(OSError):
            self._transport.write(wire.encode(wire.Typed(len(keys)), keys))

    def resize(self, rows: int, columns: int) -> None:
        """Another size; on the thread that types, for two must not write at once."""
        with contextlib.suppress(OSError):
            self._transport.write(wire.encode(wire.Resized(rows, columns)))

    def interrupt(self) -> None:
        """Send Ctrl-C to the program; the second time have `follow` give it up. May be called by a signal's handler on the thread that follows."""
        self._interrupts += 1
        if self._interrupts == 1:
            self.type(CTRL_C)  # not by `follow`, which may have much to show before
        self._events.put(b"")  # wakes it

    def follow(self, show: Callable[[bytes], object]) -> int | None:
        """Show what it prints until it ends; its exit code, negative for a signal, None where the node is gone."""
        while True:
            try:
                event = self._events.get(timeout=INTERRUPT_TIMEOUT if self._interrupts else None)
            except queue.Empty:
                return -signal.SIGKILL
            if self._interrupts > 1:
                return -signal.SIGKILL
            if not isinstance(event, bytes):
                return event
            show(event)

    def close(self) -> None:
        """End the program, and what it runs in the foreground; twice is safe."""
        self._transport.close()
