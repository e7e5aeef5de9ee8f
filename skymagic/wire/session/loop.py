"""Event loop at either end of a session: its connection, and the TCP sockets in its channels.

Channels have credit-based flow control. A receiver grants each channel a window of bytes, as in SSH
(RFC 4254, section 5.2) and HTTP/2, so that one slow reader does not block the whole session. While
the connection is slow or absent, sockets are not read, so that their senders wait.
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

BATCH = 1 << 18  # bytes waiting for the connection above which sockets are not read
WINDOW = 1 << 22
"""Most bytes of a channel in flight."""
READ_SIZE = 1 << 16
ABORT = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
"""SO_LINGER setting that makes a close send a reset at once."""
READABLE, WRITABLE = selectors.EVENT_READ, selectors.EVENT_WRITE
Watch = Callable[[Any, Callable[[int], None], int], None]
"""Call a function with a source's ready events; a mask of 0 stops watching it."""


class ChannelSocket:
    """A TCP socket at one end of a channel."""

    def __init__(self, channel: int, sock: socket.socket, connecting: bool = False) -> None:
        self.channel = channel
        self.sock = sock
        self.connecting = connecting
        self.credit = WINDOW  # bytes that may still be sent to the other end
        # bytes written here for which the other end has not been granted new credit yet
        self.unreported = 0
        self.out = bytearray()
        self.reading = True  # whether more can come from the socket
        self.finishing = False  # whether the other end has no more bytes
        self.shut = False
        self.mask = 0


class Channels:
    """Channels of one end, each with its socket."""

    def __init__(self, session: Session, watch: Watch) -> None:
        self._session, self._watch = session, watch
        self._streams: dict[int, ChannelSocket] = {}
        self._congested = False

    def add(self, channel: int, sock: socket.socket, connecting: bool = False) -> None:
        """Serve a socket in a channel, and take ownership of it."""
        sock.setblocking(False)
        stream = self._streams[channel] = ChannelSocket(channel, sock, connecting)
        self._update_interest(stream)

    def update_congestion(self) -> None:
        """Apply backpressure: do not read sockets while `BATCH` bytes wait for the connection."""
        congested = self._session.backlog >= BATCH
        if congested != self._congested:
            self._congested = congested
            for stream in list(self._streams.values()):
                self._update_interest(stream)

    def close(self) -> None:
        """Close all streams. Safe to call twice."""
        for stream in list(self._streams.values()):
            self._forget(stream)

    def reset(self, channel: int) -> None:
        """Reset a channel: notify the other end, and close this one."""
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
            # The non-blocking connect has finished; the socket's error says how.
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
            # the other end grants new credit when it has written the bytes (WINDOW)
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
            # grant credit in larger steps, not for every write
            if stream.unreported >= WINDOW // 4:
                self._session.put(
                    frames.WINDOW, stream.channel, stream.unreported.to_bytes(4, "big")
                )
                stream.unreported = 0

    def _close_or_update(self, stream: ChannelSocket) -> None:
        """Forward the end of the stream once all earlier bytes are written.

        Forget the stream when both ways have ended.
        """
        if stream.finishing and not stream.out and not stream.connecting and not stream.shut:
            stream.shut = True
            with contextlib.suppress(OSError):
                stream.sock.shutdown(socket.SHUT_WR)
        # Both ways have ended.
        if stream.shut and not stream.reading:
            self._forget(stream)
        else:
            self._update_interest(stream)

    def receive(self, frame: Frame) -> None:
        """Handle a frame for one of the channels."""
        stream = self._streams.get(frame.channel)
        if stream is None:
            return  # reset at this end while the frame was in transit
        if frame.kind == frames.RESET:
            # The peer of this socket must see a reset too, not a normal end.
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
# Seconds without a byte after which a connection counts as lost; TCP alone would take minutes.
HEARTBEAT_TIMEOUT = 4.0
ACK_DELAY = 0.05  # seconds that an acknowledgement may wait to be sent along with a frame
ACK_FRAMES = 32
"""Number of frames after which an acknowledgement is sent without waiting."""


class SessionLoop:
    """One end of a session. Everything happens on the thread that calls `step`.

    Args:
        session: the numbered frames.
        on_frame: called for each frame that does not belong to a channel.
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

    # -- the loop ----------------------------------------------------------------------------

    def watch(self, source: Any, call: Callable[[int], None], mask: int = READABLE) -> None:
        """Call a function with the source's ready events.

        A mask of 0 stops this, another mask replaces the last one.
        """
        registered = source in self._select.get_map()
        if mask:
            (self._select.modify if registered else self._select.register)(source, mask, call)
        elif registered:
            self._select.unregister(source)

    def step(self, until: float | None = None) -> None:
        """Wait for events, until this time of the monotonic clock at most, and handle them."""
        for key, mask in self._select.select(self._timeout(until)):
            # An earlier callback of this round may have closed it, and another source may have got
            # its number.
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
        # After a laptop slept or a process was stopped, its own silence must not count as the other
        # end's.
        if now - self._last_step > HEARTBEAT_INTERVAL + 1.0:
            self._last_in = now
        self._last_step = now
        if self._connection is None:
            return
        if now - self._last_in > HEARTBEAT_TIMEOUT:
            self.detach(f"nothing was heard for {HEARTBEAT_TIMEOUT:.0f} s")
        elif not self._out:
            # Acknowledge many frames at once; a lone one waits for `ACK_DELAY` for data to go with.
            waiting = self.session.unacknowledged
            due = waiting >= ACK_FRAMES or (
                waiting and self._ack_at is not None and self._ack_at <= now
            )
            if due or now - self._last_out > HEARTBEAT_INTERVAL:
                self._write(self.session.ack())

    def send_gone(self) -> None:
        """Send the last frame of a daemon that has cleaned up its node."""
        if self.attached and not self._out:
            self._write(self.session.gone())

    def close(self) -> None:
        """Close the connection and all streams. Safe to call twice."""
        self._drop()
        self.channels.close()
        self._select.close()

    # -- the connection ----------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """True while there is a connection."""
        return self._connection is not None

    def attach(
        self, sock: socket.socket, received: int, first: bytes = b"", read: bytes = b""
    ) -> None:
        """Continue over this connection, which replaces the previous one.

        Args:
            sock: taken over, and closed when it has ended.
            received: number of frames that the other end has.
            first: bytes to write before all frames.
            read: bytes of frames that were read already.

        Raises:
            ProtocolError: it is not the other end of this session; the socket remains the caller's.
        """
        self._drop()
        # Raises before the socket is taken over: it remains the caller's.
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
        """Start another session with another end.

        The connection and all channels of this one are closed.
        """
        self._drop()
        self.channels.close()
        self.session = session
        self.channels = Channels(session, self.watch)

    def detach(self, why: str) -> None:
        """Give up the connection and report it."""
        if self._connection is not None:
            self.release()
            self._on_detach(why)

    def release(self) -> None:
        """Give up the connection without reporting it: the caller continues over another one."""
        self._drop()
        self.channels.update_congestion()

    def _drop(self) -> None:
        if self._connection is not None:
            self.watch(self._connection, self._on_connection, 0)
            with contextlib.suppress(OSError):
                # A process forked meanwhile may hold the socket too: closing alone would not end
                # the connection.
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
            # Channel 0 carries the agent's streams; OPEN creates a channel here.
            if frame.channel and frame.kind != frames.OPEN:
                self.channels.receive(frame)
            else:
                self._on_frame(frame)

    def flush(self) -> None:
        """Write what is waiting, as far as the connection accepts it."""
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
        """Send the next acknowledgement without delay."""
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
