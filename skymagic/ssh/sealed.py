"""A channel that a scheduler transports unencrypted, with TLS inside.

The node's shells run within the session.

::

    Process ── SealedChannel ══ TLS, over srun or a Ray actor ══ program on the node
                                                                 program ── pipes ── /bin/sh

`wire.sealed` has the session's protocol.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import logging
import re
import socket
import ssl
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Mapping
from typing import Protocol

from skymagic.errors import HostError
from skymagic.ssh.command import SocketChannel
from skymagic.ssh.process import Channel
from skymagic.wire import sealed, tls
from skymagic.wire.sealed import SealedStream

logger = logging.getLogger(__name__)
PIECE = 1 << 16
JOIN_TIMEOUT = 5.0
COMPLAINT_TIMEOUT = 1.0
"""Seconds to wait for the scheduler's own error messages when a session ends early."""
INTERPRETERS = ("/usr/bin/python3", "python3", "/usr/libexec/platform-python")
"""Candidates for a node's Python.

The system's is on the node's own disk, so it starts faster than one of a module or a home folder.
The notebook's own Python and that of a site's prologue come last.
"""
NO_PYTHON = "skymagic: no Python with TLS 1.3"
NO_PYTHON_REASON = (
    "no Python 3.6 or newer with TLS 1.3 is there, which encrypts what goes through the scheduler",
    "install one, or load one in what this cluster's jobs begin with (docs/how-to/slurm.md), "
    "as in: module load python",
)


class UntrustedHost(HostError):
    """A node could not prove that it belongs to the pool. Retrying does not help."""


class Trust(Protocol):
    """Decides which node may have an encrypted session; called on any thread."""

    def check(
        self, node: str, claim: Mapping[str, str], session_fingerprint: str
    ) -> dict[str, str]:
        """Check a node's claim and return the notebook's answer.

        Args:
            claim: the message of kind `sealed.CLAIM`.
            session_fingerprint: the session's fingerprint.

        Raises:
            UntrustedHost: the node is not known.
        """

    def accepted(self, node: str) -> None:
        """Record that the node has stored the key sent to it."""


class SealedChannel(SocketChannel):
    """A shell on a node in an encrypted session.

    Args:
        channel: carries the session; owned by this channel.
        node: the node's name.
        job: the pool's job id.
        trust: decides whether the node belongs to the pool.
        pem: certificate and key of the notebook, if the node already knows their fingerprint; new
            ones by default.
    """

    def __init__(self, channel: Channel, node: str, job: str, trust: Trust, pem: str = "") -> None:
        super().__init__()
        self._channel, self._node, self._job, self._trust = channel, node, job, trust
        self._pem, self._pinned = pem or tls.certificate(), bool(pem)
        self._timeout: float | None = None
        self._ready = threading.Event()
        """Set once the node has stored the key."""
        self._threads: list[threading.Thread] = []

    def settimeout(self, timeout: float | None) -> None:
        """Set the timeout of the streams and of the handshake, in seconds."""
        self._timeout = timeout
        super().settimeout(timeout)

    def exec_command(self, command: str) -> None:
        """Start the program on the node, authenticate both ends, and have it run this command line.

        Raises:
            HostError: the node has no suitable Python, or cannot prove that it belongs to the pool.
            OSError: the session ended before that.
        """
        self._channel.settimeout(self._timeout)
        pinned = sealed.fingerprint_of(self._pem) if self._pinned else ""
        self._channel.exec_command(bootstrap(self._job, pinned))
        self._start(self._copy_errors)
        stream = self._open_session()
        if stream is None:
            return
        self._channel.settimeout(None)
        stream.put_message(sealed.GRANT, {**self._grant, "command": command})
        logger.debug("encrypted session with node=%s job=%s", self._node, self._job)
        self._start(lambda: self._copy_output(stream))
        self._start(lambda: self._copy_input(stream))

    def introduce(self, timeout: float) -> None:
        """Open a session without a command: the node gets the key, and the channel is closed.

        Raises:
            HostError: the node has not stored the key within `timeout` seconds.
        """
        self.settimeout(timeout)
        try:
            self.exec_command("")
            self.status_event.wait(timeout)
            if not self._ready.is_set():
                output = self.recv_stderr(PIECE) or self.recv(PIECE)
                raise HostError(
                    self._node,
                    f"it got no channel key: {output.decode(errors='replace')}",
                    code="channel-key",
                )
        except TimeoutError:
            raise HostError(
                self._node, f"it got no channel key within {timeout:.0f} s", code="channel-key"
            ) from None
        finally:
            self.close()

    def _open_session(self) -> SealedStream | None:
        """Return the session once the node is trusted; None if the shell ended before, which
        `Process` explains.
        """
        noise = b""
        while (end := noise.find(sealed.MARK)) < 0:
            piece = self._channel.recv(PIECE)
            noise += piece
            if not piece or len(noise) > sealed.MAX_NOISE:
                logger.warning(
                    "no encrypted session: node=%s job=%s bytes=%s",
                    self._node,
                    self._job,
                    len(noise),
                )
                if NO_PYTHON.encode() in noise:
                    raise HostError(self._node, *NO_PYTHON_REASON, code="setup-python")
                with contextlib.suppress(OSError):
                    self._theirs.sendall(noise)
                self._ended()
                return None
        stream = SealedStream(
            _context(self._pem), True, lambda: self._channel.recv(PIECE), self._send
        )
        stream.feed(noise[end + len(sealed.MARK) :])
        try:
            stream.handshake()
            claim = stream.get_message(sealed.CLAIM)
        except TimeoutError:
            raise
        except (ssl.SSLError, EOFError, ValueError) as problem:
            raise HostError(
                self._node,
                f"no encrypted session with it could be opened: {problem}",
                code="channel-unsealed",
            ) from None
        try:
            self._grant = self._trust.check(self._node, claim, sealed.fingerprint_of(self._pem))
        except UntrustedHost as refused:
            logger.warning("node=%s job=%s is not trusted: %s", self._node, self._job, refused)
            with contextlib.suppress(OSError):
                stream.put_message(sealed.GRANT, {"refused": refused.reason})
            raise
        return stream

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            # paramiko's channels accept a memoryview as well
            sent = self._channel.send(view)  # type: ignore[arg-type]
            if not sent:
                raise BrokenPipeError("the channel is closed")
            view = view[sent:]

    def _copy_output(self, stream: SealedStream) -> None:
        """Forward output until the shell has ended or the channel is lost."""
        with contextlib.suppress(OSError, ValueError):
            while (frame := stream.get()) is not None:
                kind, data = frame
                if kind == sealed.OUTPUT:
                    self._theirs.sendall(data)
                elif kind == sealed.ERRORS:
                    self._their_errors.sendall(data)
                elif kind == sealed.INPUT:  # the shell no longer reads its input
                    self._theirs.shutdown(socket.SHUT_RD)
                elif kind == sealed.READY:
                    self._on_ready(data)
                elif kind == sealed.STATUS:
                    self._status = int(data)
                    self._ended()
                    return
        self._ended()

    def _on_ready(self, data: bytes) -> None:
        problem = sealed.parse_message(data).get("problem", "")
        if problem:
            logger.warning("channel key not stored: node=%s job=%s", self._node, self._job)
            self._their_errors.sendall(problem.encode())
        else:
            logger.debug("channel key stored: node=%s job=%s", self._node, self._job)
            self._trust.accepted(self._node)
            self._ready.set()

    def _copy_input(self, stream: SealedStream) -> None:
        with contextlib.suppress(OSError):
            while data := self._theirs.recv(PIECE):
                stream.put(sealed.INPUT, data)
            if not self.status_event.is_set():
                stream.put(sealed.INPUT)

    def _copy_errors(self) -> None:
        """Forward errors from outside the shell: the scheduler's, and the program's own."""
        with contextlib.suppress(OSError):
            while True:
                try:
                    data = self._channel.recv_stderr(PIECE)
                except TimeoutError:  # the handshake's timeout does not apply here
                    continue
                if not data:
                    return
                self._their_errors.sendall(data)

    def _ended(self) -> None:
        """End all reads and writes on the streams, and set the status event."""
        with contextlib.suppress(OSError):
            self._theirs.shutdown(socket.SHUT_RDWR)
        if self._status < 0:  # wait for the scheduler's reason
            self._threads[0].join(COMPLAINT_TIMEOUT)
        with contextlib.suppress(OSError):
            self._their_errors.shutdown(socket.SHUT_RDWR)
        self.status_event.set()

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="skymagic-sealed", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _end(self) -> None:
        for stream in (self._theirs, self._their_errors):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        self._channel.close()
        self.status_event.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_TIMEOUT)


@functools.cache
def _program() -> str:
    return base64.b64encode(zlib.compress(sealed.program_text().encode(), 9)).decode()


def bootstrap(job: str, pinned: str = "") -> str:
    """Return the sh command line that starts the program on a node; pure.

    It also passes through any kind of login shell: it has no newlines, exclamation marks or single
    quotes.
    """
    own = [sys.executable] if re.fullmatch(r"[\w./+-]+", sys.executable) else []
    interpreters = " ".join([*INTERPRETERS, *own])
    load = (
        f"import sys;sys.version_info<(3,6) and sys.exit({sealed.NO_TLS});"
        "import zlib,base64;exec(zlib.decompress(base64.b64decode(sys.argv[1])))"
    )
    return (
        # Never run a file that another user may have put in the holder's place.
        'loaded=$(for folder in "$SKYMAGIC_HOLDER" "$SKYMAGIC_HOLDER"+*; do '
        '[ -L "$folder" ] || { [ -O "$folder" ] && cat "$folder/python"; }; '
        "done 2>/dev/null | head -n 1); "
        f'for python in "$SKYMAGIC_PYTHON" {interpreters} "$loaded"; do '
        'command -v "$python" >/dev/null 2>&1 || continue; '
        f'"$python" -I -S -c "{load}" {_program()} {job} {pinned}; status=$?; '
        f"[ $status -eq {sealed.NO_TLS} ] || exit $status; done; echo {NO_PYTHON}"
    )


def _context(pem: str) -> ssl.SSLContext:
    """Return the notebook's TLS settings."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # sessions are not resumed
    with tempfile.NamedTemporaryFile("w") as file:  # mode 0600; `ssl` reads keys from files only
        file.write(pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context
