"""Credit-based flow control: TCP sockets in the channels of a session, at either end of it.

A receiver grants each channel a window of bytes, as in SSH (RFC 4254, section 5.2) and HTTP/2, so that one slow reader does not fill
the session for all. When the connection is slow or absent, sockets are not read, so that their senders wait.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
from collections.abc import Callable
from typing import Any

from skymagic.wire.session import frames
from skymagic.wire.session.frames import Frame, Session

BATCH = 1 << 18
"""Bytes waiting for the connection, from which on sockets are not read."""
WINDOW = 1 << 22
"""Bytes of a channel that may be under way."""
READ_SIZE = 1 << 16
ABORT = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
"""SO_LINGER: closing sends a reset at once."""
READABLE, WRITABLE = selectors.EVENT_READ, selectors.EVENT_WRITE
Watch = Callable[[Any, Callable[[int], None], int], None]
"""Call with the ready events of a source; a mask of 0 ends it."""


class ChannelSocket:
    """A TCP socket at one end of a channel."""

    def __init__(self, channel: int, sock: socket.socket, connecting: bool = False) -> None:
        self.channel = channel
        self.sock = sock
        self.connecting = connecting
        self.credit = WINDOW
        """Bytes that may still be sent to the other end."""
        self.unreported = 0
        """Bytes written here for which the other end was not granted new credit yet."""
        self.out = bytearray()
        self.reading = True
        """Whether more can come from the socket."""
        self.finishing = False
        """Whether the other end has no more bytes."""
        self.shut = False
        self.mask = 0


class Channels:
    """Owns the sockets of one end.

    Args:
        session: where their frames go.
        watch: the event loop's.
    """

    def __init__(self, session: Session, watch: Watch) -> None:
        self._session, self._watch = session, watch
        self._streams: dict[int, ChannelSocket] = {}
        self._congested = False

    def add(self, channel: int, sock: socket.socket, connecting: bool = False) -> None:
        """Serve a socket in a channel; it is taken over."""
        sock.setblocking(False)
        stream = self._streams[channel] = ChannelSocket(channel, sock, connecting)
        self._update_interest(stream)

    def update_congestion(self) -> None:
        """Backpressure: do not read sockets while `BATCH` bytes wait for the connection."""
        congested = self._session.backlog >= BATCH
        if congested != self._congested:
            self._congested = congested
            for stream in list(self._streams.values()):
                self._update_interest(stream)

    def close(self) -> None:
        """Close all streams; twice is safe."""
        for stream in list(self._streams.values()):
            self._forget(stream)

    def reset(self, channel: int) -> None:
        """Reset a channel: the other end is notified, this end closed."""
        self._session.put(frames.RESET, channel)
        if (stream := self._streams.get(channel)) is not None:
            self._forget(stream)

    def _forget(self, stream: ChannelSocket) -> None:
        self._streams.pop(stream.channel, None)
        self._watch(stream.sock, lambda _: None, 0)
        stream.sock.close()

    def _update_interest(self, stream: ChannelSocket) -> None:
        read = stream.reading and stream.credit > 0 and not self._congested and not stream.connecting
        write = stream.connecting or bool(stream.out)
        mask = (READABLE if read else 0) | (WRITABLE if write else 0)
        if mask != stream.mask:
            self._watch(stream.sock, lambda ready: self._on_stream(stream, ready), mask)
            stream.mask = mask

    def _on_stream(self, stream: ChannelSocket, ready: int) -> None:
        if stream.connecting:
            if stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.reset(stream.channel)
                return
            stream.connecting = False
        try:
            if ready & WRITABLE:
                self._drain(stream)
            if ready & READABLE:
                self._read(stream)
        except BlockingIOError:
            pass
        except OSError:
            self.reset(stream.channel)
            return
        self._close_or_update(stream)

    def _read(self, stream: ChannelSocket) -> None:
        data = stream.sock.recv(min(READ_SIZE, stream.credit))
        if data:
            stream.credit -= len(data)
            self._session.put(frames.DATA, stream.channel, data)
            self.update_congestion()
        else:
            stream.reading = False
            self._session.put(frames.EOF, stream.channel)

    def _drain(self, stream: ChannelSocket) -> None:
        while stream.out:
            sent = stream.sock.send(memoryview(stream.out)[:BATCH].toreadonly())
            del stream.out[:sent]
            stream.unreported += sent
            if stream.unreported >= WINDOW // 4:
                self._session.put(frames.WINDOW, stream.channel, stream.unreported.to_bytes(4, "big"))
                stream.unreported = 0

    def _close_or_update(self, stream: ChannelSocket) -> None:
        """Pass an end of the stream on once all bytes before it are written, and forget it when both ways have ended."""
        if stream.finishing and not stream.out and not stream.connecting and not stream.shut:
            stream.shut = True
            with contextlib.suppress(OSError):
                stream.sock.shutdown(socket.SHUT_WR)
        if stream.shut and not stream.reading:
            self._forget(stream)
        else:
            self._update_interest(stream)

    def receive(self, frame: Frame) -> None:
        """A frame for one of the channels."""
        stream = self._streams.get(frame.channel)
        if stream is None:
            return  # reset here while the frame was on its way
        if frame.kind == frames.RESET:
            stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            self._forget(stream)
            return
        if frame.kind == frames.WINDOW:
            stream.credit += int.from_bytes(frame.data, "big")
        elif frame.kind == frames.EOF:
            stream.finishing = True
        else:
            stream.out += frame.data
            if not stream.connecting:
                self._on_stream(stream, WRITABLE)
                return
        self._close_or_update(stream)
