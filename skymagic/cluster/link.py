"""The notebook's end of the link to one node agent: messages out, messages in on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from skymagic.wire import agent as wire


class Transport(Protocol):
    """A pair of byte streams to an agent, made by a provider."""

    def read(self) -> bytes:
        """Bytes that have come, at least one; b"" at the end. Called by the link's thread only."""

    def write(self, data: bytes | memoryview) -> None:
        """Send all of these bytes; raises OSError when the other end is gone."""

    def complaint(self) -> str:
        """What the other end said before it could speak the protocol: a traceback, a shell's error; else ""."""

    def close(self) -> None:
        """Close the link and wait until the agent has ended (or end it); twice is safe."""


class Link:
    """Owns a transport.

    Args:
        transport: how to reach the agent.
        node: the node's number, given with each message.
        heard: called on the link's thread for each message, and with None when the link ends.
    """

    def __init__(
        self, transport: Transport, node: int, heard: Callable[[int, wire.Message | None], None]
    ) -> None:
        self.node = node
        self._transport = transport
        self._heard = heard
        self.complaint = ""
        """Set when the link has ended: why, as far as the other end said so."""
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name=f"skymagic-link-{node}", daemon=True)
        self._thread.start()

    def send(self, message: wire.Message) -> None:
        """Tell the agent; an agent that is gone hears nothing (its end is reported by `heard`)."""
        with self._writing:
            try:
                self._transport.write(wire.encode(message))
            except OSError:
                return

    def _listen(self) -> None:
        lines = wire.Lines()
        try:
            while data := self._transport.read():
                for message in lines.feed(data):
                    self._heard(self.node, message)
        except (OSError, ValueError):
            pass
        self.complaint = self._transport.complaint()
        self._heard(self.node, None)

    def drop(self) -> None:
        """Let go of the agent without a word: it cannot be reached; twice is safe."""
        self._transport.close()

    def close(self) -> None:
        """Ask the agent to end everything, and wait for it; twice is safe."""
        self.send(wire.Shutdown())
        self._thread.join(timeout=5.0)
        self._transport.close()
        self._thread.join(timeout=5.0)
