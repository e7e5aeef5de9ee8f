"""The notebook's end of a tunnel's channel 0: a transport to the node agent that does not notice lost connections."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from skymagic.wire.exit_status import signal_name


class AgentEnd:
    """A `link.Transport`.

    Args:
        send: puts bytes under way; never blocks.
        finish: asks the agent to end everything, and waits until it has or cannot be waited for.
    """

    def __init__(self, send: Callable[[bytes], None], finish: Callable[[], None]) -> None:
        self._send, self._finish = send, finish
        self._news = threading.Condition()
        self._came: deque[bytes] = deque()
        self._complaint: str | None = None

    def read(self) -> bytes:
        """What the agent has said; b"" when it has ended or is lost."""
        with self._news:
            self._news.wait_for(lambda: self._came or self._complaint is not None)
            data = b"".join(self._came)
            self._came.clear()
            return data

    def write(self, data: bytes | memoryview) -> None:
        """Tell the agent, now or when there is a connection again.

        Raises:
            BrokenPipeError: it has ended, or is lost.
        """
        if self._complaint is not None:
            raise BrokenPipeError(self._complaint or "the agent has ended")
        self._send(bytes(data))

    def complaint(self) -> str:
        """The agent's last words, or why it is lost."""
        return self._complaint or ""

    def close(self) -> None:
        """End the agent and wait for it; twice is safe."""
        if self._complaint is None:
            self._finish()

    # -- the tunnel's side -------------------------------------------------------------------------------------------

    def heard(self, data: bytes) -> None:
        """The agent has said something."""
        with self._news:
            self._came.append(data)
            self._news.notify_all()

    def ended(self, complaint: str) -> None:
        """Nothing more will come; the first reason counts."""
        with self._news:
            if self._complaint is None:
                self._complaint = complaint
            self._news.notify_all()

    def wait(self, timeout: float) -> bool:
        """Whether the end came within so many seconds."""
        with self._news:
            return self._news.wait_for(lambda: self._complaint is not None, timeout)


def how_ended(status: int, said: str) -> str:
    """An agent's end in words; "" when all was well."""
    if not status:
        return said
    # a signal without a name has the word in it
    how = f"signal {signal_name(-status).removeprefix('signal ')}" if status < 0 else f"exit status {status}"
    return f"{said}\n({how})" if said else how
