"""The notebook's end of a tunnel's channel 0: a transport to the node agent that does not notice lost connections."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from skymagic.wire.processes import signal_name


class AgentEnd:
    """A `wire.codec.Transport`.

    Args:
        send: queues bytes for the agent; never blocks.
        finish: asks the agent to end everything, and waits until it has or cannot be waited for.
    """

    def __init__(self, send: Callable[[bytes], None], finish: Callable[[], None]) -> None:
        self._send, self._finish = send, finish
        self._changed = threading.Condition()
        self._received: deque[bytes] = deque()
        self._complaint: str | None = None

    def read(self) -> bytes:
        """What the agent has written; b"" when it has ended or is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._received or self._complaint is not None)
            data = b"".join(self._received)
            self._received.clear()
            return data

    def write(self, data: bytes | memoryview) -> None:
        """Send to the agent, now or when there is a connection again.

        Raises:
            BrokenPipeError: it has ended, or is lost.
        """
        if self._complaint is not None:
            raise BrokenPipeError(self._complaint or "the agent has ended")
        self._send(bytes(data))

    def complaint(self) -> str:
        """The end of the agent's standard error, or why it is lost."""
        return self._complaint or ""

    def close(self) -> None:
        """End the agent and wait for it; twice is safe."""
        if self._complaint is None:
            self._finish()

    # -- the tunnel's side -------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """The agent has written this."""
        with self._changed:
            self._received.append(data)
            self._changed.notify_all()

    def ended(self, complaint: str) -> None:
        """Nothing more will come; the first reason counts."""
        with self._changed:
            if self._complaint is None:
                self._complaint = complaint
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Whether the end came within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._complaint is not None, timeout)


def how_ended(status: int, said: str) -> str:
    """An agent's end in words; "" when all was well."""
    if not status:
        return said
    # a signal without a name has the word in it
    how = f"signal {signal_name(-status).removeprefix('signal ')}" if status < 0 else f"exit status {status}"
    return f"{said}\n({how})" if said else how
