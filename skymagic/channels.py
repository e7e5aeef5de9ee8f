"""The event loop at either end of a tunnel: one session, the connection that carries it, and TCP streams in its channels.

Channel 0 is the agent's; every other channel is a TCP stream, opened by the notebook's end. A window for each stream bounds what is
under way; when the connection is slow or absent, streams are not read, so that their senders wait.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from skymagic import frames
from skymagic.frames import Frame, ProtocolError, Session

BEAT = 2.0
"""Seconds after which an end that has nothing to say says that it is alive."""
SILENCE = 6.0
"""Seconds without a byte after which a connection counts as lost."""
ACK_DELAY = 0.05
"""Seconds that an acknowledgement may wait for a frame to travel with."""
ACK_FRAMES = 32
"""Frames after which it waits no more."""
BATCH = 1 << 18
"""Bytes that wait for the connection, from which on streams are not read; also written at once at most."""
WINDOW = 1 << 22
"""Bytes of a stream that may be under way."""
READ = 1 << 16
ABORT = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
"""SO_LINGER: closing sends a reset at once."""
READABLE, WRITABLE = selectors.EVENT_READ, selectors.EVENT_WRITE


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


class Loop:
    """One end. Everything happens on the thread that calls `step`.

    Args:
        session: the numbered frames.
        heard: called for each frame that is not a stream's.
        detached: called with a reason when the connection is lost.
    """

    def __init__(
        self, session: Session, heard: Callable[[Frame], None], detached: Callable[[str], None]
    ) -> None:
        self.session = session
        self.streams: dict[int, Stream] = {}
        self._heard, self._detached = heard, detached
        self._select = selectors.DefaultSelector()
        self._connection: socket.socket | None = None
        self._out = memoryview(b"")
        self._mask = 0
        self._congested = False
        self._last_in = self._last_out = self._turned = time.monotonic()
        self._ack_at: float | None = None

    # -- the loop ----------------------------------------------------------------------------------------------------

    def watch(self, source: Any, call: Callable[[int], None], mask: int = READABLE) -> None:
        """Call with the ready events; a mask of 0 ends it, another replaces the one before."""
        known = source in self._select.get_map()
        if not mask:
            if known:
                self._select.unregister(source)
        elif known:
            self._select.modify(source, mask, call)
        else:
            self._select.register(source, mask, call)

    def step(self, until: float | None = None) -> None:
        """Wait for events, until this time (of the monotonic clock) at most, and serve them."""
        for key, mask in self._select.select(self._patience(until)):
            if self._select.get_map().get(key.fd) is key:  # else an earlier call has ended it
                key.data(mask)
        self.flush()
        self._beat()

    def _patience(self, until: float | None) -> float:
        now = time.monotonic()
        times = [now + BEAT, *([until] if until is not None else [])]
        if self._connection is not None:
            times += [self._last_out + BEAT, self._last_in + SILENCE]
            if self._ack_at is not None and self.session.owes and not self._out:
                times.append(self._ack_at)
        return max(0.0, min(times) - now)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._turned > BEAT + 1.0:  # this process stood still, not the other end
            self._last_in = now
        self._turned = now
        if self._connection is None:
            return
        if now - self._last_in > SILENCE:
            self.detach(f"nothing was heard for {SILENCE:.0f} s")
        elif not self._out and (self._due(now) or now - self._last_out > BEAT):
            self._write(self.session.ack())

    def _due(self, now: float) -> bool:
        owes = self.session.owes
        return bool(owes) and (owes >= ACK_FRAMES or (self._ack_at is not None and self._ack_at <= now))

    def say_gone(self) -> None:
        """The last word of a daemon that has left nothing."""
        if self.attached and not self._out:
            self._write(self.session.gone())

    def close(self) -> None:
        """Close the connection and all streams; twice is safe."""
        self._drop()
        for stream in list(self.streams.values()):
            self._forget(stream)
        self._select.close()

    # -- the connection ----------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    def attach(self, sock: socket.socket, received: int, say: bytes = b"", read: bytes = b"") -> None:
        """Go on over this connection, in the place of the one before.

        Args:
            sock: taken over, and closed when it has ended.
            received: what the other end said that it has.
            say: to be written before all frames.
            read: frames' bytes that were read already.

        Raises:
            ProtocolError: it is not the other end of this session; the socket is still the caller's.
        """
        self._drop()
        self.session.resume(received)
        sock.setblocking(False)
        self._connection = sock
        self._last_in = self._last_out = time.monotonic()
        self._ack_at = None
        self._out = memoryview(say)
        self._interest()
        if read:
            self._feed(read)
        self.flush()

    def detach(self, why: str) -> None:
        """Give the connection up."""
        if self._connection is not None:
            self._drop()
            self._congestion()
            self._detached(why)

    def _drop(self) -> None:
        if self._connection is not None:
            self.watch(self._connection, self._on_connection, 0)
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # a process forked off meanwhile may hold it too
            self._connection.close()
            self._connection = None
            self._out = memoryview(b"")
            self._mask = 0

    def _interest(self) -> None:
        mask = READABLE | (WRITABLE if self._out else 0)
        if self._connection is not None and mask != self._mask:
            self.watch(self._connection, self._on_connection, mask)
            self._mask = mask

    def _on_connection(self, mask: int) -> None:
        if mask & READABLE and self._connection is not None:
            try:
                data = self._connection.recv(BATCH)
            except BlockingIOError:
                return
            except OSError as problem:
                self.detach(str(problem))
                return
            if not data:
                self.detach("the connection ended")
                return
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        self._last_in = time.monotonic()
        try:
            heard = self.session.feed(data)
        except ProtocolError as problem:
            self.detach(str(problem))
            return
        if heard and self._ack_at is None:
            self._ack_at = self._last_in + ACK_DELAY
        for frame in heard:
            if frame.channel and frame.kind != frames.OPEN:
                self._on_frame(frame)
            else:
                self._heard(frame)

    def flush(self) -> None:
        """Write what waits, as far as the connection takes it."""
        while self._connection is not None:
            if not self._out:
                if not (data := self.session.take(BATCH)):
                    break
                self._out = memoryview(data)
            if not self._send():
                break
        self._interest()
        self._congestion()

    def acknowledge(self) -> None:
        """Do not let the acknowledgement of what has come wait."""
        self._ack_at = 0.0

    def _write(self, data: bytes) -> None:
        self._out = memoryview(data)
        self._send()
        self._interest()

    def _send(self) -> bool:
        assert self._connection is not None
        try:
            self._out = self._out[self._connection.send(self._out) :]
        except BlockingIOError:
            return False
        except OSError as problem:
            self.detach(str(problem))
            return False
        self._last_out = time.monotonic()
        if not self.session.owes:
            self._ack_at = None
        return not self._out

    def _congestion(self) -> None:
        congested = self.session.backlog >= BATCH
        if congested != self._congested:
            self._congested = congested
            for stream in list(self.streams.values()):
                self._stream_interest(stream)

    # -- streams -----------------------------------------------------------------------------------------------------

    def stream(self, channel: int, sock: socket.socket, connecting: bool = False) -> None:
        """Serve a socket in a channel; it is taken over."""
        sock.setblocking(False)
        stream = self.streams[channel] = Stream(channel, sock, connecting)
        self._stream_interest(stream)

    def reset(self, channel: int) -> None:
        """Tell the other end that a channel is broken, and forget it."""
        self.session.put(frames.RESET, channel)
        if (stream := self.streams.get(channel)) is not None:
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        self.streams.pop(stream.channel, None)
        if stream.mask:
            self._select.unregister(stream.sock)
        stream.sock.close()

    def _stream_interest(self, stream: Stream) -> None:
        read = stream.reading and stream.credit > 0 and not self._congested and not stream.connecting
        write = stream.connecting or bool(stream.out)
        mask = (READABLE if read else 0) | (WRITABLE if write else 0)
        if mask != stream.mask:
            self.watch(stream.sock, lambda ready: self._on_stream(stream, ready), mask)
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
            self.session.put(frames.DATA, stream.channel, data)
            if self.session.backlog >= BATCH:
                self._congestion()
        else:
            stream.reading = False
            self.session.put(frames.EOF, stream.channel)

    def _drain(self, stream: Stream) -> None:
        while stream.out:
            sent = stream.sock.send(memoryview(stream.out)[:BATCH].toreadonly())
            del stream.out[:sent]
            stream.owed += sent
            if stream.owed >= WINDOW // 4:
                self.session.put(frames.WINDOW, stream.channel, stream.owed.to_bytes(4, "big"))
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
            self._stream_interest(stream)

    def _on_frame(self, frame: Frame) -> None:
        stream = self.streams.get(frame.channel)
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
