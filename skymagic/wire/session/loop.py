"""The event loop at either end of a session: the connection that carries it now, and TCP sockets in its channels.

Channels have credit-based flow control. A receiver grants each channel a window of bytes, as in SSH (RFC 4254, section 5.2) and HTTP/2, so that one slow reader does not fill
the session for all. When the connection is slow or absent, sockets are not read, so that their senders wait.
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

from skymagic.wire.session import frames
from skymagic.wire.session.frames import Frame, ProtocolError, Session

BATCH = 1 << 18  # bytes waiting for the connection, from which on sockets are not read
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
        self.credit = WINDOW  # bytes that may still be sent to the other end
        self.unreported = (
            0  # bytes written here for which the other end was not granted new credit yet
        )
        self.out = bytearray()
        self.reading = True  # whether more can come from the socket
        self.finishing = False  # whether the other end has no more bytes
        self.shut = False
        self.mask = 0


class Channels:
    """The channels of one end, each with its socket."""

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
        read = (
            stream.reading and stream.credit > 0 and not self._congested and not stream.connecting
        )
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
                self._session.put(
                    frames.WINDOW, stream.channel, stream.unreported.to_bytes(4, "big")
                )
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


# -- the event loop of one end ---------------------------------------------------------------------


HEARTBEAT_INTERVAL = 1.0
"""Seconds after which an end that has nothing to send sends an ACK, as its heartbeat."""
HEARTBEAT_TIMEOUT = 4.0  # seconds without a byte after which a connection counts as lost: TCP alone would take minutes
ACK_DELAY = 0.05  # seconds that an acknowledgement may wait for a frame to travel with
ACK_FRAMES = 32
"""Frames after which it waits no more."""


class SessionLoop:
    """One end. Everything happens on the thread that calls `step`.

    Args:
        session: the numbered frames.
        on_frame: called for each frame that is not a channel's.
        on_detach: called with a reason when the connection is lost.
    """

    def __init__(
        self, session: Session, on_frame: Callable[[Frame], None], on_detach: Callable[[str], None]
    ) -> None:
        self.session = session
        self._on_frame, self._on_detach = on_frame, on_detach
        self._select = selectors.DefaultSelector()
        self.channels = Channels(session, self.watch)
        self._connection: socket.socket | None = None
        self._out = memoryview(b"")
        self._mask = 0
        self._last_in = self._last_out = self._last_step = time.monotonic()
        self._ack_at: float | None = None

    # -- the loop ----------------------------------------------------------------------------------------------------

    def watch(self, source: Any, call: Callable[[int], None], mask: int = READABLE) -> None:
        """Call with the ready events; a mask of 0 ends it, another replaces the one before."""
        known = source in self._select.get_map()
        if mask:
            (self._select.modify if known else self._select.register)(source, mask, call)
        elif known:
            self._select.unregister(source)

    def step(self, until: float | None = None) -> None:
        """Wait for events, until this time (of the monotonic clock) at most, and serve them."""
        for key, mask in self._select.select(self._timeout(until)):
            # An earlier call of this round may have closed it, and another source may have got its number.
            if self._select.get_map().get(key.fd) is key:
                key.data(mask)
        self.flush()
        self._heartbeat()

    def _timeout(self, until: float | None) -> float:
        now = time.monotonic()
        times = [now + HEARTBEAT_INTERVAL, *([until] if until is not None else [])]
        if self._connection is not None:
            times += [self._last_out + HEARTBEAT_INTERVAL, self._last_in + HEARTBEAT_TIMEOUT]
            if self._ack_at is not None and self.session.unacknowledged and not self._out:
                times.append(self._ack_at)
        return max(0.0, min(times) - now)

    def _heartbeat(self) -> None:
        now = time.monotonic()
        # A laptop that slept, or a stopped process, must not take its own silence for the other end's.
        if now - self._last_step > HEARTBEAT_INTERVAL + 1.0:
            self._last_in = now
        self._last_step = now
        if self._connection is None:
            return
        if now - self._last_in > HEARTBEAT_TIMEOUT:
            self.detach(f"nothing was heard for {HEARTBEAT_TIMEOUT:.0f} s")
        elif not self._out:
            waiting = self.session.unacknowledged
            due = waiting >= ACK_FRAMES or (
                waiting and self._ack_at is not None and self._ack_at <= now
            )
            if due or now - self._last_out > HEARTBEAT_INTERVAL:
                self._write(self.session.ack())

    def send_gone(self) -> None:
        """Send the last frame of a daemon that has left nothing on the node."""
        if self.attached and not self._out:
            self._write(self.session.gone())

    def close(self) -> None:
        """Close the connection and all streams; twice is safe."""
        self._drop()
        self.channels.close()
        self._select.close()

    # -- the connection ----------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    def attach(
        self, sock: socket.socket, received: int, first: bytes = b"", read: bytes = b""
    ) -> None:
        """Go on over this connection, in the place of the one before.

        Args:
            sock: taken over, and closed when it has ended.
            received: how many frames the other end has.
            first: to be written before all frames.
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
        self._out = memoryview(first)
        self._update_interest()
        if read:
            self._feed(read)
        self.flush()

    def restart(self, session: Session) -> None:
        """Begin another session, with another end: the connection and all channels of this one are closed."""
        self._drop()
        self.channels.close()
        self.session = session
        self.channels = Channels(session, self.watch)

    def detach(self, why: str) -> None:
        """Give the connection up."""
        if self._connection is not None:
            self.release()
            self._on_detach(why)

    def release(self) -> None:
        """Give the connection up, and tell nobody: the caller goes on over another one."""
        self._drop()
        self.channels.update_congestion()

    def _drop(self) -> None:
        if self._connection is not None:
            self.watch(self._connection, self._on_connection, 0)
            with contextlib.suppress(OSError):
                # A process that was forked meanwhile may hold the socket too: closing alone would not end the connection.
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            self._connection = None
            self._out = memoryview(b"")
            self._mask = 0

    def _update_interest(self) -> None:
        mask = READABLE | (WRITABLE if self._out else 0)
        if self._connection is not None and mask != self._mask:
            self.watch(self._connection, self._on_connection, mask)
            self._mask = mask

    def _on_connection(self, mask: int) -> None:
        if mask & READABLE and self._connection is not None:
            try:
                data = self._connection.recv(BATCH)
            except BlockingIOError:
                pass
            except OSError as problem:
                self.detach(str(problem))
            else:
                self._feed(data) if data else self.detach("the connection ended")

    def _feed(self, data: bytes) -> None:
        self._last_in = time.monotonic()
        try:
            received = self.session.feed(data)
        except ProtocolError as problem:
            self.detach(str(problem))
            return
        if received and self._ack_at is None:
            self._ack_at = self._last_in + ACK_DELAY
        for frame in received:
            if frame.channel and frame.kind != frames.OPEN:
                self.channels.receive(frame)
            else:
                self._on_frame(frame)

    def flush(self) -> None:
        """Write what waits, as far as the connection takes it."""
        while self._connection is not None:
            if not self._out:
                if not (data := self.session.take(BATCH)):
                    break
                self._out = memoryview(data)
            if not self._send():
                break
        self._update_interest()
        self.channels.update_congestion()

    def acknowledge(self) -> None:
        """Do not let the acknowledgement of what has come wait."""
        self._ack_at = 0.0

    def _write(self, data: bytes) -> None:
        self._out = memoryview(data)
        self._send()
        self._update_interest()

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
        if not self.session.unacknowledged:
            self._ack_at = None
        return not self._out
