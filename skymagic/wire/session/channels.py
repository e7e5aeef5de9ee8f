"""The TCP streams in the channels of a session, at either end of it.

A window for each stream bounds what is under way; when the connection is slow or absent, streams are not read, so that their senders
wait.
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
"""Bytes that wait for the connection, from which on streams are not read."""
WINDOW = 1 << 22
"""Bytes of a stream that may be under way."""
READ = 1 << 16
ABORT = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
"""SO_LINGER: closing sends a reset at once."""
READABLE, WRITABLE = selectors.EVENT_READ, selectors.EVENT_WRITE
Watch = Callable[[Any, Callable[[int], None], int], None]
"""Call with the ready events of a source; a mask of 0 ends it."""


def NOTHING(_: int) -> None:
    """What is called for a source that is not watched any more."""


class Stream:
    """A TCP socket at one end of a channel."""

    def __init__(self, channel: int, sock: socket.socket, connecting: bool = False) -> None:
        self.channel = channel
        self.sock = sock
        self.connecting = connecting
        self.credit = WINDOW
        """Bytes that the other end still takes."""
        self.owed = 0
        """Bytes written here that the other end has no credit for yet."""
        self.out = bytearray()
        self.reading = True
        """Whether more can come from the socket."""
        self.finishing = False
        """Whether the other end has no more bytes."""
        self.shut = False
        self.mask = 0


class Channels:
    """Owns the streams of one end.

    Args:
        session: where their frames go.
        watch: the event loop's.
    """

    def __init__(self, session: Session, watch: Watch) -> None:
        self._session, self._watch = session, watch
        self._streams: dict[int, Stream] = {}
        self._congested = False

    def add(self, channel: int, sock: socket.socket, connecting: bool = False) -> None:
        """Serve a socket in a channel; it is taken over."""
        sock.setblocking(False)
        stream = self._streams[channel] = Stream(channel, sock, connecting)
        self._interest(stream)

    def congestion(self) -> None:
        """Look whether streams may be read: not while much waits for the connection."""
        congested = self._session.backlog >= BATCH
        if congested != self._congested:
            self._congested = congested
            for stream in list(self._streams.values()):
                self._interest(stream)

    def close(self) -> None:
        """Close all streams; twice is safe."""
        for stream in list(self._streams.values()):
            self._forget(stream)

    def reset(self, channel: int) -> None:
        """Tell the other end that a channel is broken, and forget it."""
        self._session.put(frames.RESET, channel)
        if (stream := self._streams.get(channel)) is not None:
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.channel, None)
        self._watch(stream.sock, NOTHING, 0)
        stream.sock.close()

    def _interest(self, stream: Stream) -> None:
        read = stream.reading and stream.credit > 0 and not self._congested and not stream.connecting
        write = stream.connecting or bool(stream.out)
        mask = (READABLE if read else 0) | (WRITABLE if write else 0)
        if mask != stream.mask:
            self._watch(stream.sock, lambda ready: self._on_stream(stream, ready), mask)
            stream.mask = mask

    def _on_stream(self, stream: Stream, ready: int) -> None:
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
        self._settle(stream)

    def _read(self, stream: Stream) -> None:
        data = stream.sock.recv(min(READ, stream.credit))
        if data:
            stream.credit -= len(data)
            self._session.put(frames.DATA, stream.channel, data)
            self.congestion()
        else:
            stream.reading = False
            self._session.put(frames.EOF, stream.channel)

    def _drain(self, stream: Stream) -> None:
        while stream.out:
            sent = stream.sock.send(memoryview(stream.out)[:BATCH].toreadonly())
            del stream.out[:sent]
            stream.owed += sent
            if stream.owed >= WINDOW // 4:
                self._session.put(frames.WINDOW, stream.channel, stream.owed.to_bytes(4, "big"))
                stream.owed = 0

    def _settle(self, stream: Stream) -> None:
        """Pass an end of the stream on once all bytes before it are written, and forget it when both ways have ended."""
        if stream.finishing and not stream.out and not stream.connecting and not stream.shut:
            stream.shut = True
            with contextlib.suppress(OSError):
                stream.sock.shutdown(socket.SHUT_WR)
        if stream.shut and not stream.reading:
            self._forget(stream)
        else:
            self._interest(stream)

    def heard(self, frame: Frame) -> None:
        """A frame for one of the streams."""
        stream = self._streams.get(frame.channel)
        if stream is None:
            return  # it was reset here meanwhile
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
                try:
                    self._drain(stream)
                except BlockingIOError:
                    pass
                except OSError:
                    self.reset(stream.channel)
                    return
        self._settle(stream)
