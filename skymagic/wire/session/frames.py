"""The frames of a session, and its handshake: exactly-once delivery by sequence numbers and cumulative acknowledgements (TCP, RFC 9293).

Both ends of a tunnel hold a `Session`. It touches no socket and no clock: bytes of a connection come in, frames come out, each once
and in order. What was sent is kept until it is acknowledged, and sent again over the next connection.

    kind 1 byte | channel 4 | number 8 | length 4 | data        big endian

Frames are numbered from 1 for each direction. ACK and GONE have no number of their own: ACK's says how many frames have been
received, and is the heartbeat too. Frames are binary and not `wire.codec`'s lines, because most are pieces of byte streams; the handshake
is one line of JSON each way.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field

from skymagic.wire.codec import Codec, FrozenMessage

HEADER = struct.Struct("!BIQI")
MAX_DATA = 1 << 16
"""Most bytes of data in a frame, so that a short message never waits behind a long one (head-of-line blocking)."""

ACK, DATA, OPEN, EOF, RESET, WINDOW, EXIT, GONE = range(8)
"""Kinds: `DATA` bytes of a channel; `OPEN` a channel to an address; `EOF` no more bytes; `RESET` the channel is broken;
`WINDOW` so many more bytes may come; `EXIT` the agent has ended; `GONE` (without a number) nothing is left on the node."""


class ProtocolError(ValueError):
    """The other end does not speak this protocol, or is not who was here before."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What one end sends the other."""

    kind: int
    channel: int
    data: bytes = b""


class Session:
    """One end of a session."""

    def __init__(self) -> None:
        self.received = 0  # numbered frames that have come
        self.backlog = 0  # bytes that wait to be given to a connection
        self._sent = 0  # number of the last frame that was given to the present connection
        self._last = 0  # number of the last frame that was put
        self._unacked: deque[bytes] = deque()
        """Encoded frames that the other end has not acknowledged, the last of them `_last`."""
        self._acknowledged = 0  # what the last ACK acknowledged
        self._buffer = bytearray()

    @property
    def settled(self) -> bool:
        """Whether the other end has received everything."""
        return not self._unacked

    @property
    def progress(self) -> int:
        """Frames that have arrived, here and there; grows while connections are of use."""
        return self.received + self._last - len(self._unacked)

    @property
    def unacknowledged(self) -> int:
        """How many frames have come that were not acknowledged yet."""
        return self.received - self._acknowledged

    def put(self, kind: int, channel: int, data: bytes = b"") -> None:
        """Send a frame, now or when there is a connection again; data longer than `MAX_DATA` becomes several."""
        for start in range(0, len(data) or 1, MAX_DATA):
            piece = data[start : start + MAX_DATA]
            self._last += 1
            encoded = HEADER.pack(kind, channel, self._last, len(piece)) + piece
            self._unacked.append(encoded)
            self.backlog += len(encoded)

    def resume(self, received: int) -> None:
        """A new connection begins; the other end has received so many frames.

        Raises:
            ProtocolError: that cannot be; it is not the other end of this session.
        """
        if not self._last - len(self._unacked) <= received <= self._last:
            raise ProtocolError(f"the other end says it has {received} of {self._last} frames")
        self._buffer.clear()
        self._acknowledged = self.received  # by the handshake
        self._acknowledge(received)
        self._sent = received
        self.backlog = sum(map(len, self._unacked))

    def _acknowledge(self, received: int) -> None:
        while self._unacked and self._last - len(self._unacked) < received:
            self._unacked.popleft()

    def ack(self) -> bytes:
        """An ACK, to be written at once."""
        self._acknowledged = self.received
        return HEADER.pack(ACK, 0, self.received, 0)

    @staticmethod
    def gone() -> bytes:
        """The last frame of a daemon."""
        return HEADER.pack(GONE, 0, 0, 0)

    def take(self, limit: int) -> bytes:
        """What is to be written next to the present connection: about `limit` bytes, b"" if there is nothing."""
        if self._sent == self._last:
            return b""
        pieces = [self.ack()] if self.unacknowledged else []
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
        """Bytes of the present connection; the frames that they complete.

        Raises:
            ProtocolError: these are no frames of this session.
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
                if number > self._sent:
                    raise ProtocolError(
                        f"frame {number} was acknowledged, and {self._sent} were sent"
                    )
                self._acknowledge(number)
            elif kind == GONE:
                frames.append(Frame(kind, channel))
            elif number != self.received + 1:
                raise ProtocolError(f"frame {number} came after frame {self.received}")
            else:
                self.received = number
                frames.append(Frame(kind, channel, bytes(self._buffer[body:start])))
        del self._buffer[:start]
        return frames


# -- the messages in JSON --------------------------------------------------------------------------


LONGEST = 1 << 16
"""Bytes that a request or a reply, or what a login shell prints before it, may take."""
REPLACED = "another notebook has attached instead of this one"
"""Why a daemon refuses the notebook that it had before."""


class HandshakeRequest(FrozenMessage):
    """Notebook → daemon: who attaches."""

    secret: str = field(repr=False)
    """Known to this user's notebooks and the daemon only."""
    resume: bool
    """Whether the daemon must be there already."""
    attempt: int
    """Counts the connections of a session: a newer one takes the place of an older."""
    received: int
    """Frames that the notebook has."""
    client: str = ""
    """Which notebook it is: the daemon serves one, until another takes its place."""
    takes_over: bool = False
    """Whether it begins a session of its own, in the place of the one that the daemon has; what that had under way is lost."""


class HandshakeReply(FrozenMessage):
    """Daemon, or the attach process when there is no daemon → notebook."""

    boot_id: str
    received: int = 0
    """Frames that the daemon has."""
    error: str = ""
    """Why there is no connection."""
    gone: bool = False
    """Whether it is for good."""


class OpenChannel(FrozenMessage):
    """In an OPEN frame, notebook → daemon: where the node is to connect the channel to."""

    address: str
    port: int


class AgentExit(FrozenMessage):
    """In an EXIT frame, daemon → notebook: how the agent ended, after all that it wrote."""

    status: int
    """Exit code; negative for a signal."""
    stderr: str
    """The end of its standard error."""


HANDSHAKE_REQUEST: Codec[HandshakeRequest] = Codec(HandshakeRequest, max_line=LONGEST)
HANDSHAKE_REPLY: Codec[HandshakeReply] = Codec(HandshakeReply, max_line=LONGEST)
OPEN_CHANNEL: Codec[OpenChannel] = Codec(OpenChannel, max_line=LONGEST)
AGENT_EXIT: Codec[AgentExit] = Codec(AgentExit, max_line=LONGEST)
