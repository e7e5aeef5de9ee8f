"""Frames and handshake of a session: exactly-once delivery by acknowledgements (as TCP, RFC 9293).

Both ends of a tunnel hold a `Session`. It touches no socket and no clock: bytes of a connection
come in, frames come out, each exactly once and in order. Sent frames are kept until they are
acknowledged, and sent again over the next connection.

    kind 1 byte | channel 4 | number 8 | length 4 | data        big endian

Frames are numbered from 1 in each direction. ACK and GONE are not numbered: the number in an ACK is
how many frames have been received, and ACKs are heartbeats too. Frames are binary rather than
`wire.codec`'s lines, because most are pieces of byte streams; the handshake is one line of JSON
each way.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field

from skymagic.wire.codec import Codec, FrozenMessage

HEADER = struct.Struct("!BIQI")
MAX_DATA = 1 << 16
"""Most bytes of data in a frame, so that a short message never waits behind a long one
(head-of-line blocking).
"""

ACK, DATA, OPEN, EOF, RESET, WINDOW, EXIT, GONE = range(8)
"""Kinds: `DATA` bytes of a channel; `OPEN` a channel to an address; `EOF` no more bytes; `RESET`
the channel is broken; `WINDOW` more bytes may be sent; `EXIT` the agent has ended; `GONE` (not
numbered) nothing is left on the node.
"""


class ProtocolError(ValueError):
    """The other end does not speak this protocol, or is not the session's original end."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A unit of data between the two ends."""

    kind: int
    channel: int
    data: bytes = b""


class Session:
    """Numbered frames at one end, kept until acknowledged."""

    def __init__(self) -> None:
        self.received = 0  # numbered frames received
        self.backlog = 0  # bytes waiting for a connection
        self._sent = 0  # number of the last frame given to the current connection
        self._last = 0  # number of the last frame put
        self._unacked: deque[bytes] = deque()
        """Encoded frames that the other end has not acknowledged; the last one has number `_last`.
        """
        self._acknowledged = 0  # number of frames that the last ACK acknowledged
        self._buffer = bytearray()

    @property
    def all_acknowledged(self) -> bool:
        """True if the other end has received everything."""
        return not self._unacked

    @property
    def progress(self) -> int:
        """Number of frames delivered in both directions; grows while connections work."""
        return self.received + self._last - len(self._unacked)

    @property
    def unacknowledged(self) -> int:
        """Number of frames received but not acknowledged yet."""
        return self.received - self._acknowledged

    def put(self, kind: int, channel: int, data: bytes = b"") -> None:
        """Send a frame now or once reconnected; data longer than `MAX_DATA` is split."""
        # `or 1`: a frame without data, such as an EOF, is sent as well.
        for start in range(0, len(data) or 1, MAX_DATA):
            piece = data[start : start + MAX_DATA]
            self._last += 1
            encoded = HEADER.pack(kind, channel, self._last, len(piece)) + piece
            self._unacked.append(encoded)
            self.backlog += len(encoded)

    def resume(self, received: int) -> None:
        """Continue over a new connection; the other end has received this many frames.

        Raises:
            ProtocolError: the number is impossible, so it is not the other end of this session.
        """
        # Before anything changes: if the new connection is refused, the previous one continues.
        if not self._last - len(self._unacked) <= received <= self._last:
            raise ProtocolError(f"the other end says it has {received} of {self._last} frames")
        # Half a frame of the old connection is worthless: it will be sent again in full.
        self._buffer.clear()
        self._acknowledged = self.received  # by the handshake
        # Frames that the other end has are dropped; the rest is sent again, in order.
        self._acknowledge(received)
        self._sent = received
        self.backlog = sum(map(len, self._unacked))

    def _acknowledge(self, received: int) -> None:
        while self._unacked and self._last - len(self._unacked) < received:
            self._unacked.popleft()

    def ack(self) -> bytes:
        """Return an ACK, to be written at once."""
        self._acknowledged = self.received
        return HEADER.pack(ACK, 0, self.received, 0)

    @staticmethod
    def gone_frame() -> bytes:
        """Return the last frame of a daemon."""
        return HEADER.pack(GONE, 0, 0, 0)

    def take(self, limit: int) -> bytes:
        """Return about `limit` bytes to write next to the current connection.

        Return b"" if nothing is waiting.
        """
        if self._sent == self._last:
            return b""
        # An acknowledgement travels with the data, instead of by itself later.
        pieces = [self.ack()] if self.unacknowledged else []
        # `_unacked` begins after the frames that the other end has acknowledged.
        index = self._sent - (self._last - len(self._unacked))
        size = 0
        while index < len(self._unacked) and size < limit:
            pieces.append(self._unacked[index])
            size += len(self._unacked[index])
            index += 1
            self._sent += 1
        self.backlog -= size
        return b"".join(pieces)

    def feed(self, data: bytes) -> list[Frame]:
        """Take bytes from the current connection and return the frames that they complete.

        Raises:
            ProtocolError: these are not frames of this session.
        """
        self._buffer += data
        frames: list[Frame] = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            kind, channel, number, length = HEADER.unpack_from(self._buffer, start)
            if kind > GONE or length > MAX_DATA:
                raise ProtocolError("bytes came that are no frame")
            if len(self._buffer) - start < HEADER.size + length:
                break
            body = start + HEADER.size
            start = body + length
            if kind == ACK:
                # Only frames sent over this connection, or before it, can have been received.
                if number > self._sent:
                    raise ProtocolError(
                        f"frame {number} was acknowledged, and {self._sent} were sent"
                    )
                self._acknowledge(number)
            # a GONE is not numbered
            elif kind == GONE:
                frames.append(Frame(kind, channel))
            # A gap or a repetition cannot occur on one connection between correct ends.
            elif number != self.received + 1:
                raise ProtocolError(f"frame {number} came after frame {self.received}")
            else:
                self.received = number
                frames.append(Frame(kind, channel, bytes(self._buffer[body:start])))
        del self._buffer[:start]
        return frames


# -- the messages in JSON --------------------------------------------------------------------------


LONGEST = 1 << 16
"""Most bytes of a request or a reply, or of a login shell's output before it."""
REPLACED = "another notebook has attached instead of this one"
"""Reason why a daemon refuses its previous notebook."""


class HandshakeRequest(FrozenMessage):
    """Notebook → daemon: identify the notebook that attaches."""

    secret: str = field(repr=False)
    """Known to this user's notebooks and the daemon only."""
    resume: bool
    """True if the daemon must be running already."""
    attempt: int
    """Number of the connection within the session; a newer one replaces an older one."""
    received: int
    """Frames that the notebook has received."""
    client: str = ""
    """Identity of the notebook; the daemon serves one until another replaces it."""
    takes_over: bool = False
    """True to start a new session that replaces the daemon's; whatever that one had under way is
    lost.
    """


class HandshakeReply(FrozenMessage):
    """Daemon (or the attach process if no daemon is running) → notebook."""

    boot_id: str
    received: int = 0
    """Frames that the daemon has received."""
    error: str = ""
    """Reason for refusing the connection."""
    is_lost: bool = False
    """True if the daemon will not come back."""


class OpenChannel(FrozenMessage):
    """In an OPEN frame, notebook → daemon: address that the node connects the channel to."""

    address: str
    port: int


class AgentExit(FrozenMessage):
    """In an EXIT frame, daemon → notebook: exit of the agent, after all of its output."""

    status: int
    """Exit code; negative for a signal."""
    stderr: str
    """The end of its standard error."""


HANDSHAKE_REQUEST: Codec[HandshakeRequest] = Codec(HandshakeRequest, max_line=LONGEST)
HANDSHAKE_REPLY: Codec[HandshakeReply] = Codec(HandshakeReply, max_line=LONGEST)
OPEN_CHANNEL: Codec[OpenChannel] = Codec(OpenChannel, max_line=LONGEST)
AGENT_EXIT: Codec[AgentExit] = Codec(AgentExit, max_line=LONGEST)
