"""The notebook's end of a node's session (`wire.session`): an agent and TCP ports that outlive each connection.

A tunnel is one session with a node's daemon (exactly once by sequence numbers), over one connection after the other: it reconnects, forwards
ports and reports its state.
"""

from __future__ import annotations

import contextlib
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

HANDSHAKE_TIMEOUT = 30.0
"""Seconds that a node has to answer, once it is connected to: a cold disk may hold its Python."""
MAX_FIRST_ATTEMPTS = 3
"""Connections after which a tunnel that never was connected is lost."""
RETRY_DELAYS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds before each attempt to connect again; the last for all that follow."""
STOP_TIMEOUT = 10.0
"""Seconds that the agent has to end everything."""
ABSENT_TIMEOUT = 5.0
"""Seconds to wait at the close for a node that is not connected."""
LINGER_TIMEOUT = 86400.0
"""Seconds for which a node that is out of reach is tried, to tell it that its pool has ended. Its own limits end it too."""
LINGER_DELAY = 3.0
"""Seconds between two such tries."""
EVICTION_TIMEOUT = 15.0
"""Seconds that a new agent waits for the end of the one that was given up."""
EXIT_TIMEOUT = 5.0
"""Seconds that a daemon has to remove its folder, once its agent has ended."""
GONE = "the daemon on the node is gone"
RESTARTED = "the machine was restarted; everything on it is lost"


class Tunnel:
    """One session with a node's daemon, its connections, and the ports that lead through it.

    Args:
        connect: opens a transport to ``python -m skymagic.kernels.daemon.attach NAME`` on the node. It is called again, on a thread
            of its own, whenever a connection is lost; it may raise, and should do so within some seconds.
        state: called (on the tunnel's thread) with each new state: ``"connected"``, ``"reconnecting"``, ``"lost"``.
        secret: what the daemon knows its notebooks by; a new one unless given.
        takes_over: whether the daemon is there already, with a session of another notebook.

    Opening does not wait; a node that cannot be reached ends the agent's transport, whose `complaint` says why.
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
        """``connected``, ``reconnecting``, ``lost`` (for certain: nothing will come back) or ``closed``."""
        self.reason = ""  # why it is not connected
        self._connect, self._on_state = connect, state
        self._secret = secret or secrets.token_hex(16)
        self._client = secrets.token_hex(8)
        self._takes_over = takes_over
        self._session = Session()
        self._loop = SessionLoop(self._session, self._on_frame, self._reconnect)
        self.agent = AgentEnd(
            lambda data: self._post(lambda: self._session.put(frames.DATA, 0, data)), self._finish
        )
        """The transport to the node agent, for one `link.Link`."""
        self._connection: TunnelConnection | None = None
        self._old_connections: list[TunnelConnection] = []
        self._replied = False  # whether the node has replied on this connection
        self._attempt = self._tries = 0
        self._boot_id = ""
        self._progress = 0  # the session's, when a connection was last seen to be of use
        self._deadline: float | None = (
            None  # when to try the next connection, or to give up waiting for a handshake
        )
        self._exit_deadline: float | None = None
        """Set when the agent has ended: until when the daemon may take to end too."""
        self._linger_deadline: float | None = None
        self._ports: dict[tuple[str, int], int] = {}
        self._listeners: list[socket.socket] = []
        self._channel = 0
        self._calls: deque[Callable[[], None]] = deque()
        self._closed = False
        self.lingering = False
        """Whether the agent was asked to end everything while it was out of reach, and has not answered yet."""
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._loop.watch(self._woken, lambda _: self._on_calls())
        self._thread = threading.Thread(target=self._run, name="skymagic-tunnel", daemon=True)
        self._thread.start()

    # -- public ----------------------------------------------------------------------------------------------------

    def forward(self, address: str, port: int, wanted: int = 0) -> int:
        """A port of 127.0.0.1 here that leads to this address and port as the node reaches it; the same one each time.

        Args:
            wanted: the port here, if it is free.
        """
        if (known := self._ports.get((address, port))) is not None:
            return known
        try:
            listener = socket.create_server(("127.0.0.1", wanted), backlog=128)
        except OSError:
            listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        listener.setblocking(False)
        here: int = listener.getsockname()[1]
        self._ports[address, port] = here
        target = OPEN_CHANNEL.encode(OpenChannel(address, port))
        self._listeners.append(listener)
        self._post(lambda: self._loop.watch(listener, lambda _: self._accept(listener, target)))
        if self._closed:
            listener.close()
        return here

    def move(self) -> None:
        """Go on over a new connection, where there is one that is not lost; nobody is told, unless the new one fails."""

        def again() -> None:
            if self._loop.attached and self._exit_deadline is None:
                self._loop.release()
                self._drop_connection()
                self._open_connection()

        self._post(again)

    def retry(self) -> None:
        """Connect again now, where there is no connection: the node may be back."""

        def again() -> None:
            if not self._loop.attached and not self._closed:
                self._drop_connection()
                self._open_connection()

        self._post(again)

    def wait_over(self, timeout: float) -> bool:
        """Whether nothing of it goes on within so many seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self, *, linger: bool = False) -> None:
        """End the agent and everything that leads to it; twice is safe.

        Args:
            linger: where the node is out of reach, go on in the background until it has been told, `LINGER_TIMEOUT` at most.
        """
        self.agent.close()
        if linger and self.lingering:
            return
        self._post(self._end)
        self._thread.join(STOP_TIMEOUT)
        end = time.monotonic() + STOP_TIMEOUT
        for connection in self._old_connections:  # one that hangs may take its time
            connection.wait_closed(max(0.0, end - time.monotonic()))

    def leave(self) -> None:
        """Close it without ending the agent, which goes on as after a lost connection; twice is safe."""
        self._post(self._end)
        self._thread.join(STOP_TIMEOUT)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _post(self, call: Callable[[], None]) -> None:
        """Have it called on the tunnel's thread, unless the tunnel is over."""
        self._calls.append(call)
        # A full pipe wakes the thread anyway; a closed one has none.
        with contextlib.suppress(OSError):
            self._waker.send(b"w")

    def _on_calls(self) -> None:
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
            self.agent.ended(self.reason)
            self._waker.close()
            self._woken.close()

    def _set_state(self, state: str, reason: str = "") -> None:
        changed = state != self.state
        self.state, self.reason = state, reason
        if changed:
            self._on_state(state)

    # -- connections -------------------------------------------------------------------------------------------------

    def _open_connection(self) -> None:
        self._deadline = None
        self._replied = False
        self._attempt += 1

        def wait() -> None:
            if not self._replied:
                self._deadline = time.monotonic() + HANDSHAKE_TIMEOUT

        def request() -> HandshakeRequest:
            self._post(wait)
            begun = bool(self._boot_id)
            return HandshakeRequest(
                self._secret, begun or self._takes_over, self._attempt, self._session.received, self._client,
                self._takes_over and not begun,
            )  # fmt: skip

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

    def _on_reply(self, connection: TunnelConnection, reply: HandshakeReply, rest: bytes) -> None:
        if connection is not self._connection:
            return
        self._deadline = None
        if reply.error:
            if reply.gone:
                restarted = self._boot_id and reply.boot_id != self._boot_id
                self._fail(RESTARTED if restarted else reply.error)
            else:
                self._reconnect(reply.error)
            return
        self._replied = True
        self._boot_id = reply.boot_id
        try:
            self._loop.attach(connection.near, reply.received, read=rest)
        except ProtocolError as problem:
            self._fail(f"{GONE}: {problem}")
            return
        if self._loop.attached and self._exit_deadline is None:
            self._set_state("connected")

    def _on_end(self, connection: TunnelConnection, why: str) -> None:
        if connection is self._connection and connection.gone:
            self._fail(why)
        elif connection is self._connection and not self._loop.attached:
            self._reconnect(why)  # one that is attached is read to its end

    def _drop_connection(self) -> None:
        """Let the present connection be closed, beside what goes on."""
        if self._connection is not None:
            self._connection.give_up()
            self._old_connections = [
                one for one in self._old_connections if not one.closed.is_set()
            ]
            self._old_connections.append(self._connection)
            self._connection = None

    def _reconnect(self, why: str) -> None:
        """Connect again: at once, then with backoff as long as no connection brings any frame."""
        self._drop_connection()
        if self._closed:
            return
        if self._session.progress > self._progress:
            self._tries, self._progress = 0, self._session.progress
        if not self._boot_id and self._tries + 1 >= MAX_FIRST_ATTEMPTS:
            self._fail(why)
            return
        delay = RETRY_DELAYS[min(self._tries, len(RETRY_DELAYS) - 1)]
        self._deadline = time.monotonic() + (max(delay, LINGER_DELAY) if self.lingering else delay)
        self._tries += 1
        if self._exit_deadline is None:
            self._set_state("reconnecting", why)

    def _fail(self, why: str) -> None:
        """Nothing will come back."""
        self._closed = True
        if self._exit_deadline is None:
            self._set_state("lost", why)

    # -- channels ----------------------------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == frames.DATA:
            self.agent.receive(frame.data)
        elif frame.kind == frames.EXIT:
            end = AGENT_EXIT.decode(frame.data)
            self._set_state("lost", how_ended(end.status, end.stderr))
            self._exit_deadline = (
                time.monotonic() + EXIT_TIMEOUT
            )  # the daemon goes when it knows that this has come
            self._loop.acknowledge()
        elif frame.kind == frames.GONE:
            self._closed = True

    def _accept(self, listener: socket.socket, target: bytes) -> None:
        if (sock := accept_ready(listener)) is None:
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._channel += 1
        self._session.put(frames.OPEN, self._channel, target)
        self._loop.channels.add(self._channel, sock)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Ask the agent to end everything, and wait; not long for a node that is not connected.

        Such a node is told as soon as it is back: what runs there must not stand in the way of a new agent, nor go on for long.
        """

        def send_eof() -> None:
            self._session.put(frames.EOF, 0)
            if self._connection is None:
                self._open_connection()

        self._post(send_eof)
        if not self.agent.wait(ABSENT_TIMEOUT) and (
            self.state != "connected" or not self.agent.wait(STOP_TIMEOUT)
        ):
            self._post(self._linger)
            self.agent.wait(ABSENT_TIMEOUT)

    def _linger(self) -> None:
        """Nobody waits for the agent any more, and it still has to hear that it must end everything."""
        if self._closed or self._exit_deadline is not None:
            return
        if not self._boot_id:  # it was never there: a daemon that nobody attaches to ends by itself
            self._end()
            return
        self.lingering = True
        self._on_state = lambda _: None
        self._linger_deadline = time.monotonic() + LINGER_TIMEOUT
        self.agent.ended(self.reason or "the node is out of reach")

    def _end(self) -> None:
        if self.state != "lost":
            self._set_state("closed", "the tunnel was closed")
        self._closed = True


class AgentTunnel:
    """The tunnel to the agent that a node has now.

    Args:
        secret: what the daemon of an agent that is there already knows its notebooks by; a new one unless given.
    """

    def __init__(self, secret: str = "") -> None:
        self.secret = secret or secrets.token_hex(16)
        self.takes_over = bool(secret)
        """Whether the next tunnel leads to an agent that is there already."""
        self._tunnel: Tunnel | None = None
        self._given_up: list[Tunnel] = []
        """To agents that were out of reach when they were to end, and are told so when they are back."""

    def open(self, connect: Callable[[], Transport], state: Callable[[str], None]) -> Transport:
        """The transport to an agent, after the end of the one before; the arguments are `Tunnel`'s."""
        self.close(linger=True)
        if self._tunnel is not None and self._tunnel.lingering:
            self._given_up.append(self._tunnel)
        takes_over, self.takes_over = self.takes_over, False
        self._given_up = [tunnel for tunnel in self._given_up if not tunnel.wait_over(0.0)]
        before = tuple(self._given_up)

        def connect_after_eviction() -> Transport:
            _evict(before)
            return connect()

        self._tunnel = Tunnel(
            connect_after_eviction, state=state, secret=self.secret, takes_over=takes_over
        )
        return self._tunnel.agent

    def forward(self, address: str, port: int, wanted: int = 0) -> int:
        """A port here that leads to this address and port as the node reaches it, while the agent is connected; the arguments are `Tunnel`'s."""
        assert self._tunnel is not None
        return self._tunnel.forward(address, port, wanted)

    def move(self) -> None:
        """Go on over a new connection (`Tunnel.move`)."""
        if self._tunnel is not None:
            self._tunnel.move()

    def leave(self) -> None:
        """Close it, and leave the agent and what that runs; twice is safe."""
        if self._tunnel is not None:
            self._tunnel.leave()

    def close(self, *, linger: bool = False) -> None:
        """End the agent and the tunnel; twice is safe.

        Args:
            linger: as of `Tunnel.close`.
        """
        tunnels = [*self._given_up, *([self._tunnel] if self._tunnel is not None else [])]
        for tunnel in tunnels:
            tunnel.close(linger=linger)


def _evict(tunnels: Sequence[Tunnel]) -> None:
    """Wait until agents that were given up have ended: their daemon has the name that a new one's shall have.

    Raises:
        TimeoutError: one is still out of reach.
    """
    end = time.monotonic() + EVICTION_TIMEOUT
    for tunnel in tunnels:
        tunnel.retry()
    for tunnel in tunnels:
        if not tunnel.wait_over(max(0.0, end - time.monotonic())):
            raise TimeoutError("what ran there before could not be told to end")
