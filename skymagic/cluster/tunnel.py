"""The notebook's end of the session with a node: an agent and TCP ports that survive reconnects.

A tunnel keeps one session with a node's daemon over many connections. Sequence numbers deliver each
frame exactly once. The tunnel reconnects, forwards ports and reports its state.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from skymagic.cluster.tunnel_ends import AgentEnd, TunnelConnection, how_ended
from skymagic.wire.authentication import accept_ready
from skymagic.wire.codec import Transport
from skymagic.wire.session import frames
from skymagic.wire.session.frames import (
    AGENT_EXIT,
    OPEN_CHANNEL,
    Frame,
    HandshakeReply,
    HandshakeRequest,
    OpenChannel,
    ProtocolError,
    Session,
)
from skymagic.wire.session.loop import SessionLoop

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT = 30.0
"""Seconds that a node has to answer once connected; Python may start slowly from a cold disk."""
MAX_FIRST_ATTEMPTS = 3
"""Attempts after which a tunnel that was never connected is lost."""
RETRY_DELAYS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds before each attempt to reconnect; the last value repeats."""
STOP_TIMEOUT = 10.0
"""Seconds that the agent has to end everything."""
ABSENT_TIMEOUT = 5.0
"""Seconds that closing waits for a node that is not connected."""
LINGER_TIMEOUT = 86400.0
"""Seconds to keep trying an unreachable node, to tell it that its pool has ended.

After that, only the agent's own limits end it.
"""
LINGER_DELAY = 3.0
"""Seconds between two such attempts."""
EVICTION_TIMEOUT = 15.0
"""Seconds that a new agent waits for the end of the one that was given up."""
EXIT_TIMEOUT = 5.0
"""Seconds that a daemon has to remove its folder once its agent has ended."""
GONE = "the daemon on the node is gone"
RESTARTED = "the machine was restarted; everything on it is lost"


class Tunnel:
    """Session with a node's daemon, its connections, and the ports forwarded through it.

    The constructor does not wait. If the node cannot be reached, the agent's transport ends and its
    `complaint` gives the reason.

    Args:
        connect: opens a transport to ``python -m skymagic.kernels.daemon.attach NAME`` on the node.
            It is called again, on a separate thread, whenever a connection is lost; it may raise,
            and should do so within some seconds.
        state: called (on the tunnel's thread) with each new state: ``"connected"``,
            ``"reconnecting"``, ``"lost"``.
        secret: authenticates the notebook to the daemon; a new one by default.
        takes_over: True if the daemon is already running, with another notebook's session.
    """

    def __init__(
        self,
        connect: Callable[[], Transport],
        *,
        state: Callable[[str], None] = lambda _: None,
        secret: str = "",
        takes_over: bool = False,
    ) -> None:
        self.state = "reconnecting"
        """``connected``, ``reconnecting``, ``lost`` (for certain: it will not come back) or
        ``closed``.
        """
        self.reason = ""  # reason why it is not connected
        self._connect, self._on_state = connect, state
        self._secret = secret or secrets.token_hex(16)
        self._client = secrets.token_hex(8)
        self._takes_over = takes_over
        self._session = Session()
        self._loop = SessionLoop(self._session, self._on_frame, self._reconnect)
        self.agent = AgentEnd(
            lambda data: self._post(lambda: self._session.put(frames.DATA, 0, data)), self._finish
        )
        """The transport to the node's agent, for one `cluster.links.AgentLink`."""
        self._connection: TunnelConnection | None = None
        self._old_connections: list[TunnelConnection] = []
        self._replied = False  # whether the node has replied on this connection
        self._attempt = self._tries = 0
        self._boot_id = ""
        self._progress = 0  # the session's progress at the last check
        # when to try the next connection, or to give up waiting for a handshake
        self._deadline: float | None = None
        self._exit_deadline: float | None = None
        """Set when the agent has ended: deadline for the daemon to end too."""
        self._linger_deadline: float | None = None
        self._ports: dict[tuple[str, int], int] = {}
        self._listeners: list[socket.socket] = []
        self._channel = 0
        self._calls: deque[Callable[[], None]] = deque()
        self._closed = False
        self.lingering = False
        """True if the agent was asked to end everything while out of reach, and has not answered
        yet.
        """
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._loop.watch(self._woken, lambda _: self._on_calls())
        self._thread = threading.Thread(target=self._run, name="skymagic-tunnel", daemon=True)
        self._thread.start()

    # -- public ------------------------------------------------------------------------------------

    def forward(self, address: str, port: int, preferred_port: int = 0) -> int:
        """Return a port of 127.0.0.1 that leads to an address and port on the node.

        Repeated calls return the same port.

        Args:
            preferred_port: the local port, if it is free.
        """
        # One listener for each target: callers ask again after each reconnection, and a program
        # that remembers the port must not lose it.
        if (existing := self._ports.get((address, port))) is not None:
            return existing
        try:
            listener = socket.create_server(("127.0.0.1", preferred_port), backlog=128)
        except OSError:
            # the preferred port is taken: let the system choose
            listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        listener.setblocking(False)
        local_port: int = listener.getsockname()[1]
        self._ports[address, port] = local_port
        target = OPEN_CHANNEL.encode(OpenChannel(address, port))
        self._listeners.append(listener)
        # the selector belongs to the tunnel's thread
        self._post(lambda: self._loop.watch(listener, lambda _: self._accept(listener, target)))
        # Race: if the thread ended before the append, it did not close this listener. Checked after
        # the append, so that one of the two closes it; closing twice is harmless.
        if self._closed:
            listener.close()
        return local_port

    def move(self) -> None:
        """Move a live tunnel to a new connection.

        Its state stays "connected" unless the new connection fails.
        """

        def move_now() -> None:
            if self._loop.attached and self._exit_deadline is None:
                # detached first: its end must not count as a loss, which would show "reconnecting"
                self._loop.detach_silently()
                self._drop_connection()
                self._open_connection()

        self._post(move_now)

    def retry(self) -> None:
        """Reconnect now unless connected, because the node may be back."""

        def retry_now() -> None:
            if not self._loop.attached and not self._closed:
                self._drop_connection()
                self._open_connection()

        self._post(retry_now)

    def wait_ended(self, timeout: float) -> bool:
        """Wait `timeout` seconds at most for the tunnel's thread to end; return True if it did."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self, *, linger: bool = False) -> None:
        """End the agent and close the tunnel. Safe to call twice.

        Args:
            linger: keep trying an unreachable node in the background until it has been notified, at
                most `LINGER_TIMEOUT`.
        """
        self.agent.close()
        # the thread continues, and ends once the node has been notified
        if linger and self.lingering:
            return
        self._post(self._end)
        self._thread.join(STOP_TIMEOUT)
        end = time.monotonic() + STOP_TIMEOUT
        for connection in self._old_connections:  # a hanging one may take long
            connection.wait_closed(max(0.0, end - time.monotonic()))

    def leave(self) -> None:
        """Close the tunnel without ending the agent, which continues as after a lost connection.

        Safe to call twice.
        """
        self._post(self._end)
        self._thread.join(STOP_TIMEOUT)

    # -- the thread --------------------------------------------------------------------------------

    def _post(self, call: Callable[[], None]) -> None:
        """Run a function on the tunnel's thread, unless that has ended."""
        # Appended before the thread is woken: in the other order it could find nothing, and sleep.
        self._calls.append(call)
        # A full pipe wakes the thread anyway; a closed one means that the thread has ended.
        with contextlib.suppress(OSError):
            self._waker.send(b"w")

    def _on_calls(self) -> None:
        # The bytes are taken out before the calls: a call that is appended meanwhile leaves another
        # byte, which wakes the thread once more.
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._calls:
            self._calls.popleft()()

    def _run(self) -> None:
        self._open_connection()
        try:
            while not self._closed:
                deadlines = (self._deadline, self._exit_deadline, self._linger_deadline)
                self._loop.step(min(filter(None, deadlines), default=None))
                if self._linger_deadline is not None and (
                    self._linger_deadline <= time.monotonic()
                ):
                    break
                if self._exit_deadline is not None and self._exit_deadline <= time.monotonic():
                    break
                if self._deadline is not None and self._deadline <= time.monotonic():
                    self._deadline = None
                    self._on_deadline()
        finally:
            self._closed = True
            self._drop_connection()
            for listener in self._listeners:
                listener.close()
            self._loop.close()
            self.agent.mark_ended(self.reason)
            self._waker.close()
            self._woken.close()

    def _set_state(self, state: str, reason: str = "") -> None:
        changed = state != self.state
        self.state, self.reason = state, reason
        # each attempt has another reason; only the first one is reported
        if changed:
            log = logger.warning if state in ("reconnecting", "lost") else logger.info
            log("tunnel is %s: reason=%s", state, reason.partition("\n")[0])
            self._on_state(state)

    # -- connections -------------------------------------------------------------------------------

    def _open_connection(self) -> None:
        self._deadline = None
        self._replied = False
        self._attempt += 1
        logger.debug("tunnel connects: attempt=%s", self._attempt)

        def wait() -> None:
            if not self._replied:
                self._deadline = time.monotonic() + HANDSHAKE_TIMEOUT

        def request() -> HandshakeRequest:
            # The timeout begins here and not with the attempt: a login may be slow, and has its own
            # time limit.
            self._post(wait)
            # Once a daemon has answered, another one is not the same agent: it must not be started
            # by a reconnection.
            started = bool(self._boot_id)
            return HandshakeRequest(
                self._secret,
                started or self._takes_over,
                self._attempt,
                self._session.received,
                self._client,
                self._takes_over and not started,
            )

        self._connection = TunnelConnection(
            self._connect,
            request,
            lambda connection, reply, rest: self._post(
                lambda: self._on_reply(connection, reply, rest)
            ),
            lambda connection, why: self._post(lambda: self._on_end(connection, why)),
        )

    def _on_deadline(self) -> None:
        if self._connection is None:
            self._open_connection()
        else:
            self._reconnect(f"the node did not answer within {HANDSHAKE_TIMEOUT:.0f} s")

    def _on_reply(
        self, connection: TunnelConnection, reply: HandshakeReply, payload: bytes
    ) -> None:
        # a reply of a connection that was given up meanwhile
        if connection is not self._connection:
            return
        self._deadline = None
        if reply.error:
            if reply.is_lost:
                # another boot id means that the machine was restarted, and everything on it is lost
                restarted = self._boot_id and reply.boot_id != self._boot_id
                self._fail(RESTARTED if restarted else reply.error)
            else:
                self._reconnect(reply.error)
            return
        self._replied = True
        self._boot_id = reply.boot_id
        try:
            self._loop.attach(connection.near, reply.received, already_read=payload)
        # The daemon has fewer frames than it once acknowledged: it is a new one of the same name.
        except ProtocolError as problem:
            self._fail(f"{GONE}: {problem}")
            return
        # the payload may have held the agent's end, or an error that detached the loop again
        if self._loop.attached and self._exit_deadline is None:
            self._set_state("connected")

    def _on_end(self, connection: TunnelConnection, why: str) -> None:
        if connection is self._connection and connection.gone:
            self._fail(why)
        elif connection is self._connection and not self._loop.attached:
            self._reconnect(why)  # an attached one is read to its end

    def _drop_connection(self) -> None:
        """Close the current connection in the background."""
        if self._connection is not None:
            # A transport on a dead network may take minutes to close, so this thread does not wait;
            # `close` waits for those that are not closed by then.
            self._connection.give_up()
            self._old_connections = [
                connection for connection in self._old_connections if not connection.closed.is_set()
            ]
            self._old_connections.append(self._connection)
            self._connection = None

    def _reconnect(self, why: str) -> None:
        """Reconnect at once, then with backoff as long as no connection delivers a frame."""
        self._drop_connection()
        if self._closed:
            return
        # Progress and not a successful handshake resets the backoff: a connection that always
        # breaks at its first frame would otherwise be made again without a pause.
        if self._session.progress > self._progress:
            self._tries, self._progress = 0, self._session.progress
        # without a boot id the node has never answered
        if not self._boot_id and self._tries + 1 >= MAX_FIRST_ATTEMPTS:
            self._fail(why)
            return
        logger.debug("tunnel connects again: tries=%s reason=%s", self._tries, why)
        delay = RETRY_DELAYS[min(self._tries, len(RETRY_DELAYS) - 1)]
        self._deadline = time.monotonic() + (max(delay, LINGER_DELAY) if self.lingering else delay)
        self._tries += 1
        if self._exit_deadline is None:
            self._set_state("reconnecting", why)

    def _fail(self, why: str) -> None:
        """Mark the session as lost for good."""
        self._closed = True
        if self._exit_deadline is None:
            self._set_state("lost", why)

    # -- channels ----------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == frames.DATA:
            self.agent.receive(frame.data)
        elif frame.kind == frames.EXIT:
            end = AGENT_EXIT.decode(frame.data)
            # before the deadline is set: from then on the state is final, whatever happens to the
            # connection
            self._set_state("lost", how_ended(end.status, end.stderr))
            # the daemon ends once it knows that this frame has arrived
            self._exit_deadline = time.monotonic() + EXIT_TIMEOUT
            self._loop.acknowledge()
        elif frame.kind == frames.GONE:
            self._closed = True

    def _accept(self, listener: socket.socket, target: bytes) -> None:
        if (sock := accept_ready(listener)) is None:
            return
        # Nagle's algorithm would add up to 40 ms to each small message of a forwarded port
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._channel += 1
        # OPEN goes first: the channel's own frames follow it in the same session, in order
        self._session.put(frames.OPEN, self._channel, target)
        self._loop.channels.add(self._channel, sock)

    # -- the end -----------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Ask the agent to end everything, and wait for it, but not long for an unconnected node.

        Such a node is notified as soon as it is back: its processes must neither block a new agent
        nor run for long.
        """

        def send_eof() -> None:
            self._session.put(frames.EOF, 0)
            # at once, and not after the delay of the last failed attempt
            if self._connection is None:
                self._open_connection()

        self._post(send_eof)
        if not self.agent.wait(ABSENT_TIMEOUT) and (
            self.state != "connected" or not self.agent.wait(STOP_TIMEOUT)
        ):
            self._post(self._linger)
            self.agent.wait(ABSENT_TIMEOUT)

    def _linger(self) -> None:
        """Keep trying to stop the agent in the background; nothing waits for it any more."""
        if self._closed or self._exit_deadline is not None:
            return
        # The node never answered: a daemon that no notebook attaches to ends by itself.
        if not self._boot_id:
            self._end()
            return
        logger.info("agent out of reach: it is ended in the background")
        self.lingering = True
        # the pool has ended: nobody needs to know this tunnel's state any more
        self._on_state = lambda _: None
        self._linger_deadline = time.monotonic() + LINGER_TIMEOUT
        self.agent.mark_ended(self.reason or "the node is out of reach")

    def _end(self) -> None:
        if self.state != "lost":
            self._set_state("closed", "the tunnel was closed")
        self._closed = True


class AgentTunnel:
    """Tunnel to the current agent of a node.

    Args:
        secret: authenticates the notebook to the daemon of an existing agent; a new one by default.
    """

    def __init__(self, secret: str = "") -> None:
        self.secret = secret or secrets.token_hex(16)
        self.takes_over = bool(secret)
        """True if the next tunnel leads to an existing agent."""
        self._tunnel: Tunnel | None = None
        self._lingering_tunnels: list[Tunnel] = []
        """Tunnels to agents that were out of reach when they had to end; each is notified later."""

    def open(self, connect: Callable[[], Transport], state: Callable[[str], None]) -> Transport:
        """Return the transport to a new agent, after ending the previous one.

        The arguments are `Tunnel`'s.
        """
        self.close(linger=True)
        if self._tunnel is not None and self._tunnel.lingering:
            self._lingering_tunnels.append(self._tunnel)
        takes_over, self.takes_over = self.takes_over, False
        self._lingering_tunnels = [
            tunnel for tunnel in self._lingering_tunnels if not tunnel.wait_ended(0.0)
        ]
        before = tuple(self._lingering_tunnels)

        # on the connection's thread: a node that is out of reach delays its own agent only
        def connect_after_eviction() -> Transport:
            _evict(before)
            return connect()

        self._tunnel = Tunnel(
            connect_after_eviction, state=state, secret=self.secret, takes_over=takes_over
        )
        return self._tunnel.agent

    def forward(self, address: str, port: int, preferred_port: int = 0) -> int:
        """Return a local port that leads to a port of the node, as `Tunnel.forward`."""
        assert self._tunnel is not None
        return self._tunnel.forward(address, port, preferred_port)

    def move(self) -> None:
        """Move to a new connection (`Tunnel.move`)."""
        if self._tunnel is not None:
            self._tunnel.move()

    def leave(self) -> None:
        """Close the tunnel without stopping the agent or its ranks. Safe to call twice."""
        if self._tunnel is not None:
            self._tunnel.leave()

    def close(self, *, linger: bool = False) -> None:
        """End the agent and close the tunnel. Safe to call twice.

        Args:
            linger: as in `Tunnel.close`.
        """
        tunnels = [*self._lingering_tunnels, *([self._tunnel] if self._tunnel is not None else [])]
        for tunnel in tunnels:
            tunnel.close(linger=linger)


def _evict(tunnels: Sequence[Tunnel]) -> None:
    """Wait until agents that were given up have ended, because the new agent's daemon takes over
    their name.

    Raises:
        TimeoutError: one is still out of reach.
    """
    end = time.monotonic() + EVICTION_TIMEOUT
    # all of them first: they reconnect at the same time, and share the timeout
    for tunnel in tunnels:
        tunnel.retry()
    for tunnel in tunnels:
        if not tunnel.wait_ended(max(0.0, end - time.monotonic())):
            raise TimeoutError("the previous agent on this node could not be stopped")
