"""The notebook's end of the link to one node agent: messages out, messages in on a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from skymagic.wire import agent as wire
from skymagic.wire.codec import Transport


class Link:
    """Owns a transport.

    Args:
        transport: how to reach the agent.
        node: the node's number, given with each message.
        received: called on the link's thread for each message, and with None when the link ends.
    """

    def __init__(
        self, transport: Transport, node: int, received: Callable[[int, wire.AgentMessage | None], None]
    ) -> None:
        self.node = node
        self._transport = transport
        self._received = received
        self.complaint = ""
        """Set when the link has ended: why, as far as the other end said so."""
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name=f"skymagic-link-{node}", daemon=True)
        self._thread.start()

    def send(self, message: wire.AgentMessage) -> None:
        """Send a message; one to an agent that is gone is dropped (its end is reported by `received`)."""
        with self._writing, contextlib.suppress(OSError):
            self._transport.write(wire.encode(message))

    def _listen(self) -> None:
        decoder = wire.decoder()
        with contextlib.suppress(OSError, ValueError):
            while data := self._transport.read():
                for message in decoder.feed(data):
                    self._received(self.node, message)
        self.complaint = self._transport.complaint()
        self._received(self.node, None)

    def drop(self) -> None:
        """Close the link without ending the agent: it cannot be reached; twice is safe."""
        self._transport.close()

    def retire(self) -> None:
        """Close it for good, for another link takes its place: what comes on it still is no news any more; twice is safe."""
        self._received = lambda node, message: None
        self.close()

    def close(self) -> None:
        """Ask the agent to end everything, and wait for it; twice is safe."""
        self.send(wire.Shutdown())
        self._thread.join(timeout=5.0)
        self._transport.close()
        self._thread.join(timeout=5.0)
