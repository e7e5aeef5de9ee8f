"""Writing to the notebook, and knowing when it has left: what this process has sent reaches the front end even if it is killed then.

In a Jupyter kernel a message takes these steps::

    run's thread ── queue ──▶ IOPub thread ── ZeroMQ's queue ──▶ ZeroMQ's own thread ── TCP ──▶ the front end
                                          bytes are counted here      and here: TCP_INFO

ZeroMQ does not tell when it has sent something. Linux tells how many bytes were written to each connection of the iopub socket, which
is compared with those that ZeroMQ was given. Elsewhere it is taken for sent after SETTLED.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from skymagic.display.identity import METADATA, Identity, identified

Write = Callable[[str, str], None]
"""Takes a stream's name and text."""
SETTLED = 0.05
"""Seconds after which what was given to ZeroMQ is taken for sent, where nobody can tell."""
DEADLINE = 1.0
"""The same where it can be told, and a front end takes nothing."""
LOOKS, LOOK_SECONDS, POLL_SECONDS = 4, 50e-6, 2e-3
"""ZeroMQ mostly needs less than 0.1 ms: so many looks at once, so far apart, then one in so many seconds."""
SCAN_SECONDS = 5.0
"""How often new connections are looked for."""
TCP_ESTABLISHED = 1


@dataclass
class Due:
    """What is called just before something is sent, and on the thread that sends, when it has left.

    Attributes:
        held: whether some of it is kept back on the screen still.
        identity: what its messages say that they are of; None for nothing.
        left: whether it has left.
    """

    before: Callable[[], object]
    after: Callable[[], object]
    held: Callable[[], bool] = lambda: False
    identity: Identity | None = None
    left: threading.Event = field(default_factory=threading.Event)

    def has_left(self) -> None:
        """It has left this process."""
        self.after()
        self.left.set()


class UnderWay(threading.local):
    """What the present thread shows.

    Attributes:
        parts: (stream's name, text) of what was written within a `content` or `together`, and not sent yet; None outside one.
        content: the one within which this thread is.
        due: by source the contents of which nothing was sent yet; begun: of which something was; sent: all of it.
        no_wait_until: until when no content waits for the one before, as it was waited for in vain.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[str, str]] | None = None
        self.content: Due | None = None
        self.due: dict[Hashable, Due] = {}
        self.begun: dict[Hashable, Due] = {}
        self.sent: dict[Hashable, Due] = {}
        self.no_wait_until = -math.inf

    def begin(self) -> None:
        """Something is about to be sent: with it begins what is due."""
        due, self.due = self.due, {}
        for one in due.values():
            one.before()
        self.begun |= due

    @property
    def identities(self) -> list[Identity]:
        """Of what is being sent."""
        return [one.identity for one in self.begun.values() if one.identity is not None]

    def take_begun(self) -> list[Due]:
        """What was begun, and is sent now; without what is held back."""
        sent = {source: one for source, one in self.begun.items() if not one.held()}
        self.begun = {source: one for source, one in self.begun.items() if source not in sent}
        self.sent |= sent
        return [*sent.values()]


_here = UnderWay()


def write(name: str, text: str) -> None:
    """Put text on the notebook's own standard output or error; within a `content` in one piece with what follows there."""
    parts = _here.parts
    if not text:
        return
    if parts is None:
        _put(name, text, last=True)
    elif parts and parts[-1][0] == name:
        parts[-1] = name, parts[-1][1] + text
    else:
        parts.append((name, text))


def _put(name: str, text: str, *, last: bool) -> None:
    """Send text.

    Args:
        last: whether it ends what was begun.
    """
    stream = sys.stderr if name == "stderr" else sys.stdout
    thread = getattr(stream, "pub_thread", None)
    _here.begin()
    with identified(stream, text, _here.identities):
        stream.write(text)
        begun = _here.take_begun() if last else []
        if begun and thread is not None:
            thread.schedule(partial(_send, stream, begun))
        stream.flush()
    if thread is None:
        for one in begun:
            one.has_left()


@contextlib.contextmanager
def showing() -> Iterator[Mapping[str, Any]]:
    """What is shown within goes the same way, though not through a stream; what was written before goes first. Gives metadata for it."""
    _put_parts(last=False)
    _here.begin()
    yield {METADATA: _here.identities} if _here.identities else {}
    if _here.parts is None:
        _end()


@contextlib.contextmanager
def content(
    source: Hashable,
    before: Callable[[], object],
    after: Callable[[], object],
    identity: Identity | None = None,
) -> Iterator[None]:
    """What this thread writes and shows within is one content of a source: `before` is called just before its first part is sent, and `after`
    when its last part has left this process. Of one that shows nothing yet both are called with what is sent next.

    It waits until the source's content before has left: of each source one at most is under way when this process is killed. That is not
    waited for where nobody can tell, or where a front end takes nothing.

    Args:
        source: whose content it is; what was said before of the same source, and nothing was sent for, is not called any more.
        identity: what the messages in which it is sent say that they are of.
    """
    _wait_for(source)
    _here.due.pop(source, None)  # it comes last now
    _here.content = _here.due[source] = Due(before, after, identity=identity)
    try:
        with together():
            yield
    finally:
        _here.content = None


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What this thread writes and shows within has left when its last part has."""
    if _here.parts is not None:
        yield
        return
    _here.parts = []
    try:
        yield
    finally:
        _put_parts(last=True)
        _here.parts = None
        _end()


def kept_back(held: Callable[[], bool]) -> None:
    """Some of the present content may be shown later, such as a line that has not ended: it has left when that is no longer so too."""
    if _here.content is not None:
        _here.content.held = held


def forget() -> None:
    """What this thread has shown so far is complete: what waits to be called still had nothing to show."""
    _here.due, _here.begun, _here.sent = {}, {}, {}


def _wait_for(source: Hashable) -> None:
    """Wait until what was sent of a source has left."""
    before = _here.sent.pop(source, None)
    thread = getattr(sys.stdout, "pub_thread", None)
    now = time.monotonic()
    if before is None or thread is None or not _outbox(thread).tells or now < _here.no_wait_until:
        return
    before.left.wait(2 * DEADLINE)  # which is set after DEADLINE in any case
    if (waited_until := time.monotonic()) > now + DEADLINE:
        _here.no_wait_until = waited_until + SCAN_SECONDS


def _put_parts(*, last: bool) -> None:
    """Send what was written in the present content."""
    parts = _here.parts or []
    for number, (name, text) in enumerate(parts, 1):
        _put(name, text, last=last and number == len(parts))
    parts.clear()


def _end() -> None:
    """All of what was begun was sent."""
    thread = getattr(sys.stdout, "pub_thread", None)
    for one in _here.take_begun():
        one.has_left() if thread is None else thread.schedule(partial(_outbox(thread).after, one.has_left))


def _send(stream: Any, due: Sequence[Due]) -> None:
    """Send what was written, on a kernel's own thread for it: the message waits there in a queue, and what is called after it comes behind it.

    It is put there without waking the thread, which is awake: one that wakes itself more often than it looks blocks for ever. The flush
    that comes next wakes it.
    """
    stream._flush()
    outbox = _outbox(stream.pub_thread)
    stream.pub_thread._events.extend(partial(outbox.after, one.has_left) for one in due)


def prepare() -> None:
    """Find out where this process sends to, before there is much to send; what is shown in the first moment after that is told of late."""
    thread = getattr(sys.stdout, "pub_thread", None)
    if thread is not None:
        thread.schedule(partial(_outbox(thread).after, lambda: None))


class Outbox:
    """Of one IOPub thread: how much it was given to send, and how much of that has left. Used on that thread alone.

    Attributes:
        given: bytes that ZeroMQ was given for each connection, as ZMTP 3 frames them.
    """

    def __init__(self, thread: Any) -> None:
        self.thread = thread
        self.given = 0
        self._connections: dict[str, Connection] = {}
        self._scanned = -SCAN_SECONDS
        self._waiting: deque[tuple[int, float, Callable[[], object]]] = deque()
        """(`given` that must have left, until when that is waited for, what is called then)."""
        self.tells = False
        """Whether it is known here what has left; read on any thread."""
        self._counts = (send := getattr(thread, "_really_send", None)) is not None
        if send is not None:
            thread._really_send = partial(self._counted, send)

    def _counted(self, send: Callable[..., None], message: Sequence[Any], *args: Any, **options: Any) -> None:
        send(message, *args, **options)
        # the iopub socket has no encryption: a frame has 2 bytes of its own, or 9
        self.given += sum(size + (2 if size < 256 else 9) for size in map(_size, message))

    def after(self, call: Callable[[], object]) -> None:
        """Have it called when all that was given so far has left."""
        now = time.monotonic()
        if now >= self._scanned + SCAN_SECONDS:
            self._scanned = now
            self._scan(now)
        self.tells = bool(self._connections)
        self._waiting.append((self.given, now + (DEADLINE if self._connections else SETTLED), call))
        if len(self._waiting) == 1:
            self._poll()

    def _poll(self) -> None:
        for _ in range(LOOKS):
            self._release()
            if not self._waiting:
                return
            if self._connections:
                time.sleep(LOOK_SECONDS)
        self.thread.io_loop.call_later(POLL_SECONDS, self._poll)

    def _release(self) -> None:
        """Call what need not wait any longer."""
        now = time.monotonic()
        left = [(name, one.left(self.given)) for name, one in self._connections.items()]
        self._drop([name for name, nbytes in left if nbytes is None])
        known = [one.left(self.given) or 0 for one in self._connections.values()]
        trusted = known and all(now >= one.since + SETTLED for one in self._connections.values())
        while self._waiting:
            given, until, call = self._waiting[0]
            if now >= until:  # a front end that hangs, or a miscount
                self._drop([*self._connections])
                self._scanned = -SCAN_SECONDS
            elif not trusted or min(known) < given:
                return
            self._waiting.popleft()
            call()

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._connections.pop(name).sock.close()

    def _scan(self, now: float) -> None:
        """Find new connections of the iopub socket: ZeroMQ does not tell them, and the system does."""
        with contextlib.suppress(Exception):  # another transport, another system: then there are none
            port = int(self.thread.socket.last_endpoint.decode().rpartition(":")[2])
            for name, sock in _accepted(port, self._connections).items() if self._counts else ():
                self._connections[name] = Connection(sock, now)


class Connection:
    """A connection of the iopub socket.

    Attributes:
        since: when it was found. What was given before may be on its way then, so that for a moment too much seems to have left.
    """

    def __init__(self, sock: socket.socket, since: float) -> None:
        self.sock = sock
        self.since = since
        self._before: int | None = None
        """Bytes that have left through it beyond those that are counted."""

    def left(self, given: int) -> int | None:
        """How many of the bytes that were given have left through it; None when it is closed."""
        try:
            found = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            return None
        if found[0] != TCP_ESTABLISHED:
            return None
        # struct tcp_info of Linux 4.19: tcpi_notsent_bytes, tcpi_bytes_sent, tcpi_bytes_retrans
        (waiting,), (out, again) = struct.unpack_from("=I", found, 144), struct.unpack_from("=QQ", found, 200)
        written = int(out - again + waiting)
        self._before = max(written - given, written - given if self._before is None else self._before)
        return written - self._before


def _accepted(port: int, known: Container[str]) -> dict[str, socket.socket]:
    """This process's connections at a port of its own, by the system's name of each; the sockets are copies.

    Only sockets are copied: closing a copy of a file would give up its locks.
    """
    found, seen = dict[str, socket.socket](), set[str]()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, ValueError):
            name = str(entry.readlink())
            if not name.startswith("socket:") or name in known or name in seen:
                continue
            seen.add(name)
            sock = socket.socket(fileno=os.dup(int(entry.name)))
            with contextlib.ExitStack() as unless:
                unless.callback(sock.close)
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == port:
                    sock.getpeername()  # one that listens has none
                    unless.pop_all()
                    found[name] = sock
    return found


def _size(frame: Any) -> int:
    return len(frame) if isinstance(frame, bytes) else memoryview(getattr(frame, "buffer", frame)).nbytes


_outboxes: dict[int, Outbox] = {}


def _outbox(thread: Any) -> Outbox:
    """That of an IOPub thread: a process has one."""
    found = _outboxes.get(id(thread))
    if found is None or found.thread is not thread:
        found = _outboxes[id(thread)] = Outbox(thread)
    return found
