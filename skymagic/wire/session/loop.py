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

MAX_BACKLOG = 1 << 18
"""Number of bytes waiting for the connection above which the channels' sockets are not read."""
CONNECTION_CHUNK = 1 << 18
"""Maximum number of bytes that one call reads from the connection, or writes to it or a socket."""
WINDOW = 1 << 22
"""Maximum number of bytes of a channel in flight."""
READ_SIZE = 1 << 16
"""Maximum number of bytes that one call reads from a channel's socket."""
ABORT = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
"""SO_LINGER setting that makes a close send a reset at once."""
READABLE, WRITABLE = selectors.EVENT_READ, selectors.EVENT_WRITE
Watch = Callable[[Any, Callable[[int], None], int], None]
"""Function like `SessionLoop.watch`."""


class ChannelSocket:
    """A TCP socket at one end of a channel."""

    def __init__(self, number: int, sock: socket.socket, connecting: bool = False) -> None:
        self.number = number
        """Number of the channel in its session."""
        self.sock = sock
        self.connecting = connecting
        """True until a non-blocking connect has finished."""
        self.credit = WINDOW
        """Number of bytes that may still be sent to the other end."""
        self.unreported = 0
        """Number of bytes written to the socket and not yet credited to the other end."""
        self.out = bytearray()
        """Bytes to be written to the socket."""
        self.eof_from_socket = False
        """True once the socket has ended: nothing more is sent to the other end."""
        self.eof_from_peer = False
        """True once the other end has sent its last bytes."""
        self.write_side_shut = False
        """True once the socket was shut down for writing."""
        self.mask = 0
        """Events that the loop watches the socket for."""


class Channels:
    """Channels of one end, each with its socket."""

    def __init__(self, session: Session, watch: Watch) -> None:
        self._session, self._watch = session, watch
        self._sockets: dict[int, ChannelSocket] = {}
        self._congested = False

    def add(self, number: int, sock: socket.socket, connecting: bool = False) -> None:
        """Serve a socket in a channel, and take ownership of it."""
        sock.setblocking(False)
        channel = self._sockets[number] = ChannelSocket(number, sock, connecting)
        self._update_interest(channel)

    def update_congestion(self) -> None:
        """Apply backpressure: do not read sockets while more than `MAX_BACKLOG` bytes wait."""
        congested = self._session.backlog >= MAX_BACKLOG
        if congested != self._congested:
            self._congested = congested
            for channel in list(self._sockets.values()):
                self._update_interest(channel)

    def close(self) -> None:
        """Close all channels. Safe to call twice."""
        for channel in list(self._sockets.values()):
            self._close(channel)

    def reset(self, number: int) -> None:
        """Reset a channel: notify the other end, and close this one."""
        self._session.put(frames.RESET, number)
        if (channel := self._sockets.get(number)) is not None:
            self._close(channel)

    def _close(self, channel: ChannelSocket) -> None:
        self._sockets.pop(channel.number, None)
        self._watch(channel.sock, lambda _: None, 0)
        channel.sock.close()

    def _update_interest(self, channel: ChannelSocket) -> None:
        read = (
            not channel.eof_from_socket
            and channel.credit > 0
            and not self._congested
            and not channel.connecting
        )
        write = channel.connecting or bool(channel.out)
        mask = (READABLE if read else 0) | (WRITABLE if write else 0)
        if mask != channel.mask:
            self._watch(channel.sock, lambda ready: self._on_socket(channel, ready), mask)
            channel.mask = mask

    def _on_socket(self, channel: ChannelSocket, ready: int) -> None:
        if channel.connecting:
            # The non-blocking connect has finished; the socket's error says how.
            if channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.reset(channel.number)
                return
            channel.connecting = False
        try:
            if ready & WRITABLE:
                self._drain(channel)
            if ready & READABLE:
                self._read(channel)
        except BlockingIOError:
            pass
        except OSError:
            self.reset(channel.number)
            return
        self._close_or_update(channel)

    def _read(self, channel: ChannelSocket) -> None:
        data = channel.sock.recv(min(READ_SIZE, channel.credit))
        if data:
            # the other end grants new credit when it has written the bytes (WINDOW)
            channel.credit -= len(data)
            self._session.put(frames.DATA, channel.number, data)
            self.update_congestion()
        else:
            channel.eof_from_socket = True
            self._session.put(frames.EOF, channel.number)

    def _drain(self, channel: ChannelSocket) -> None:
        while channel.out:
            sent = channel.sock.send(memoryview(channel.out)[:CONNECTION_CHUNK].toreadonly())
            del channel.out[:sent]
            channel.unreported += sent
            # grant credit in larger steps, not for every write
            if channel.unreported >= WINDOW // 4:
                self._session.put(
                    frames.WINDOW, channel.number, channel.unreported.to_bytes(4, "big")
                )
                channel.unreported = 0

    def _close_or_update(self, channel: ChannelSocket) -> None:
        """Shut the socket down for writing once the other end's last bytes are written to it.

        Close the channel when both directions have ended.
        """
        if (
            channel.eof_from_peer
            and not channel.out
            and not channel.connecting
            and not channel.write_side_shut
        ):
            channel.write_side_shut = True
            with contextlib.suppress(OSError):
                channel.sock.shutdown(socket.SHUT_WR)
        if channel.write_side_shut and channel.eof_from_socket:
            self._close(channel)
        else:
            self._update_interest(channel)

    def receive(self, frame: Frame) -> None:
        """Handle a frame for one of the channels."""
        channel = self._sockets.get(frame.channel)
        if channel is None:
            return  # reset at this end while the frame was in transit
        if frame.kind == frames.RESET:
            # The peer of this socket must see a reset too, not a normal end.
            channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            self._close(channel)
            return
        if frame.kind == frames.WINDOW:
            channel.credit += int.from_bytes(frame.data, "big")
        elif frame.kind == frames.EOF:
            channel.eof_from_peer = True
        else:
            channel.out += frame.data
            if not channel.connecting:
                self._on_socket(channel, WRITABLE)
                return
        self._close_or_update(channel)


# -- the event loop of one end ---------------------------------------------------------------------


HEARTBEAT_INTERVAL = 1.0
"""Seconds after which an end that has nothing to send sends an ACK, as its heartbeat."""
HEARTBEAT_TIMEOUT = 4.0
"""Seconds without a byte after which a connection counts as lost; TCP alone would take minutes."""
ACK_DELAY = 0.05
"""Seconds that an acknowledgement may wait to be sent along with a frame."""
ACK_FRAMES = 32
"""Number of frames after which an acknowledgement is sent without waiting."""


class SessionLoop:
    """End of a session. Everything happens on the thread that calls `step`.

    Args:
        session: sequence numbers, and the frames that are not acknowledged yet.
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
            # An earlier callback of this round may have closed this source, and a new source may
            # have got the same file descriptor.
            if self._select.get_map().get(key.fd) is key:
                key.data(mask)
        self.flush()
        self._heartbeat()

    def _timeout(self, until: float | None) -> float:
        now = time.monotonic()
        times = [now + HEARTBEAT_INTERVAL, *([until] if until is not None else [])]
        if self._connection is not None:
            times += [self._last_out + HEARTBEAT_INTERVAL, self._last_in + HEARTBEAT_TIMEOUT]
            # While `_out` waits, no acknowledgement can be sent: its deadline, once passed, would
            # keep the loop busy.
            if self._ack_at is not None and self.session.unacknowledged and not self._out:
                times.append(self._ack_at)
        return max(0.0, min(times) - now)

    def _heartbeat(self) -> None:
        now = time.monotonic()
        # After a laptop slept or a process was stopped, its own silence must not count as the other
        # end's.
        # (`step` waits for `HEARTBEAT_INTERVAL` at most; a busy machine may take a second more.)
        if now - self._last_step > HEARTBEAT_INTERVAL + 1.0:
            self._last_in = now
        self._last_step = now
        if self._connection is None:
            return
        if now - self._last_in > HEARTBEAT_TIMEOUT:
            self.detach(f"no data arrived for {HEARTBEAT_TIMEOUT:.0f} s")
        elif not self._out:
            # Acknowledge many frames at once. The acknowledgement of a single frame waits for
            # `ACK_DELAY`, so that it can be sent along with data.
            waiting = self.session.unacknowledged
            due = waiting >= ACK_FRAMES or (
                waiting and self._ack_at is not None and self._ack_at <= now
            )
            if due or now - self._last_out > HEARTBEAT_INTERVAL:
                self._write(self.session.ack())

    def send_gone(self) -> None:
        """Send the last frame of a daemon that has cleaned up its node."""
        if self.attached and not self._out:
            self._write(self.session.gone_frame())

    def close(self) -> None:
        """Close the connection and all channels. Safe to call twice."""
        self._close_connection()
        self.channels.close()
        self._select.close()

    # -- the connection ----------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """True while there is a connection."""
        return self._connection is not None

    def attach(
        self, sock: socket.socket, received: int, first: bytes = b"", already_read: bytes = b""
    ) -> None:
        """Continue over this connection, which replaces the previous one.

        Args:
            sock: owned by the loop from now on, which closes it when it has ended.
            received: number of frames that the other end has.
            first: bytes to write before all frames.
            already_read: bytes of frames that the caller has read from the socket.

        Raises:
            ProtocolError: it is not the other end of this session. The socket remains the caller's,
                and the previous connection continues.
        """
        self.session.resume(received)
        self._close_connection()
        sock.setblocking(False)
        self._connection = sock
        self._last_in = self._last_out = time.monotonic()
        self._ack_at = None
        self._out = memoryview(first)
        self._update_interest()
        if already_read:
            self._feed(already_read)
        self.flush()

    def restart(self, session: Session) -> None:
        """Start another session with another end.

        The connection and all channels of this one are closed.
        """
        self._close_connection()
        self.channels.close()
        self.session = session
        self.channels = Channels(session, self.watch)

    def detach(self, why: str) -> None:
        """Give up the connection and report it."""
        if self._connection is not None:
            self.detach_silently()
            self._on_detach(why)

    def detach_silently(self) -> None:
        """Give up the connection without reporting it: the caller continues over another one."""
        self._close_connection()
        self.channels.update_congestion()

    def _close_connection(self) -> None:
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
        # A connection that has become writable needs nothing here: `step` ends with a flush.
        if mask & READABLE and self._connection is not None:
            try:
                data = self._connection.recv(CONNECTION_CHUNK)
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
        """Write waiting bytes until the connection accepts no more."""
        while self._connection is not None:
            if not self._out:
                if not (data := self.session.take(CONNECTION_CHUNK)):
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
        # The callers make sure that `_out` is empty: the rest of a frame in it would be lost.
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
