"""A session of numbered frames that survives its connections: what was sent is kept until the other end has it, and sent again.

Both ends of a tunnel hold a `Session`. It touches no socket and no clock: bytes of a connection come in, frames come out,
each exactly once and in order, whatever connections were lost in between.

A frame is a header (kind, channel, number, length; big endian) and its data. Frames are numbered from 1 for each direction; when a
connection begins, both ends say how many they have received, and each goes on from there. ACK has no number of its own: it says how
many frames have been received, and that its sender is alive.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass

HEADER = struct.Struct("!BIQI")
MAX_DATA = 1 << 16
"""Bytes of data in a frame at most, so that a short message never waits behind a long one."""

ACK, DATA, OPEN, EOF, RESET, WINDOW, EXIT, GONE = range(8)
"""Kinds: `DATA` bytes of a channel; `OPEN` a channel to an address; `EOF` no more bytes; `RESET` the channel is broken;
`WINDOW` so many more bytes may come; `EXIT` the agent has ended; `GONE` (without a number) nothing is left on the node."""


class ProtocolError(ValueError):
    """The other end does not speak this protocol, or is not who was here before."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What one end tells the other."""

    kind: int
    channel: int
    data: bytes = b""


class Session:
    """One end of a session."""

    def __init__(self) -> None:
        self.received = 0
        """Numbered frames that have come."""
        self.backlog = 0
        """Bytes that wait to be given to a connection."""
        self._sent = 0
        """Number of the last frame that was given to the present connection."""
        self._last = 0
        """Number of the last frame that was put."""
        self._kept: deque[bytes] = deque()
        """Encoded frames that the other end has not acknowledged, the last of them `_last`."""
        self._said = 0
        """What the last ACK said."""
        self._buffer = bytearray()

    @property
    def settled(self) -> bool:
        """Whether the other end has received everything."""
        return not self._kept

    @property
    def progress(self) -> int:
        """Frames that have arrived, here and there; grows while connections are of use."""
        return self.received + self._last - len(self._kept)

    @property
    def owes(self) -> int:
        """How many frames have come that the other end has not been told of."""
        return self.received - self._said

    def put(self, kind: int, channel: int, data: bytes = b"") -> None:
        """Send a frame, now or when there is a connection again; data longer than `MAX_DATA` becomes several."""
        for start in range(0, len(data) or 1, MAX_DATA):
            piece = data[start : start + MAX_DATA]
            self._last += 1
            encoded = HEADER.pack(kind, channel, self._last, len(piece)) + piece
            self._kept.append(encoded)
            self.backlog += len(encoded)

    def resume(self, received: int) -> None:
        """A new connection begins; the other end has received so many frames.

        Raises:
            ProtocolError: that cannot be; it is not the other end of this session.
        """
        if not self._last - len(self._kept) <= received <= self._last:
            raise ProtocolError(f"the other end says it has {received} of {self._last} frames")
        self._buffer.clear()
        self._said = self.received  # the beginning of a connection says it
        self._acknowledge(received)
        self._sent = received
        self.backlog = sum(map(len, self._kept))

    def _acknowledge(self, received: int) -> None:
        while self._kept and self._last - len(self._kept) < received:
            self._kept.popleft()

    def ack(self) -> bytes:
        """An ACK, to be written at once."""
        self._said = self.received
        return HEADER.pack(ACK, 0, self.received, 0)

    @staticmethod
    def gone() -> bytes:
        """The last word of a daemon."""
        return HEADER.pack(GONE, 0, 0, 0)

    def take(self, limit: int) -> bytes:
        """What is to be written next to the present connection: about `limit` bytes, b"" if there is nothing."""
        if self._sent == self._last:
            return b""
        pieces = [self.ack()] if self.owes else []
        index = self._sent - (self._last - len(self._kept))
        size = 0
        while index < len(self._kept) and size < limit:
            pieces.append(self._kept[index])
            size += len(self._kept[index])
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
                self._heard(number)
                continue
            if kind == GONE:
                frames.append(Frame(kind, channel))
                continue
            if number != self.received + 1:
                raise ProtocolError(f"frame {number} came after frame {self.received}")
            self.received = number
            frames.append(Frame(kind, channel, bytes(self._buffer[body:start])))
        del self._buffer[:start]
        return frames

    def _heard(self, number: int) -> None:
        if number > self._sent:
            raise ProtocolError(f"frame {number} was acknowledged, and {self._sent} were sent")
        self._acknowledge(number)
