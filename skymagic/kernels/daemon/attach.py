"""Attach to a node's daemon: ``python -m skymagic.kernels.daemon.attach NAME [COMMAND…]``, run through a connection that may break.

It starts the daemon NAME, or finds it again, and relays between its standard streams and the daemon's socket until either ends. The
daemon owns the agent (or COMMAND in the agent's place), so that the agent outlives the connection.

A daemon leaves its login by a double fork, or is started by a holder (`kernels.fork`), as ``attach --held``. Those who only read are led
past it: ``attach --read NAME`` relays between the standard streams and the agent's socket for readers.

The first line of the input is a `HandshakeRequest`; the daemon, or this process when there is none, replies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence

from skymagic.kernels.daemon import rundir
from skymagic.kernels.daemon.rundir import RunDirectory, RunDirectoryError
from skymagic.kernels.fork import close_from, fork, held, holder
from skymagic.wire.codec import read_line, write_all
from skymagic.wire.processes import ATTACH, READERS_ONLY, boot_id
from skymagic.wire.session.frames import (
    HANDSHAKE_REPLY,
    HANDSHAKE_REQUEST,
    HandshakeReply,
    HandshakeRequest,
)

DAEMON_VANISHED = (
    "its daemon is gone: it was killed from outside (out of memory, an administrator, or systemd with "
    "KillUserProcesses=yes when you logged out; `loginctl enable-linger` on the node prevents that)"
)
HELD = "--held"
"""First argument of a daemon that a holder starts; its secret is its standard input."""


def main(arguments: list[str]) -> int:
    """Attach to the daemon, starting it if it may be new."""
    if arguments[0] == HELD:
        return _held(*arguments[1:])
    if arguments[0] == READERS_ONLY:
        return _read(*arguments[1:])
    name, *command = arguments
    line = read_line(0)
    os.write(1, b"\n")  # ends what a login shell has printed: the reply begins a line
    try:
        sock = _attach(name, command, HANDSHAKE_REQUEST.decode(line))
    except RunDirectoryError as problem:
        return _refuse(str(problem), gone=True)
    except (ValueError, OSError) as problem:
        return _refuse(f"{type(problem).__name__}: {problem}", gone=False)
    if sock is None:
        return _refuse(DAEMON_VANISHED, gone=True)
    with contextlib.suppress(OSError):
        sock.sendall(line)
        relay(sock)
    return 0


def _refuse(reason: str, gone: bool) -> int:
    write_all(1, HANDSHAKE_REPLY.encode(HandshakeReply(boot_id(), error=reason, gone=gone)))
    return 1


def _attach(name: str, command: list[str], request: HandshakeRequest) -> socket.socket | None:
    if not request.resume:
        directory = rundir.make(name)
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit(1)
        )  # the job ends before its daemon has begun
        try:
            with directory.locked():
                return directory.connect() or _start(directory, command, request.secret)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with contextlib.suppress(OSError):
                os.rmdir(directory.path)  # where it is empty: there is no daemon
    found = rundir.find(name)
    if found is None or (sock := found.connect()) is not None:
        return None if found is None else sock
    log = found.log_tail()
    found.remove()
    if log:
        raise RunDirectoryError(f"its daemon failed:\n{log}")
    return None


def _start(directory: RunDirectory, command: list[str], secret: str) -> socket.socket | None:
    """Fork the daemon, or have it started by the holder; it listens before anybody connects. Raises OSError where there is no holder."""
    if place := holder():
        words = ["-P", "-m", ATTACH, HELD, directory.path, *command]
        return held(place, os.path.basename(directory.path), words, secret, directory.connect)
    listener = directory.listen()
    fork(lambda: _serve(directory, listener, command, secret))
    listener.close()
    return directory.connect()


def _held(path: str, *command: str) -> int:
    """Become the daemon of this run directory."""
    secret = read_line(0).decode().strip()
    directory = RunDirectory(path)
    _serve(directory, directory.listen(), command, secret)
    return 0


def _serve(
    directory: RunDirectory, listener: socket.socket, command: Sequence[str], secret: str
) -> None:
    daemonize(directory, listener)
    from skymagic.kernels.daemon.daemon import Daemon

    Daemon(listener, directory, command, secret).run()


def _read(name: str) -> int:
    """Relay between the standard streams and the agent's socket for readers, until either end closes."""
    try:
        found = rundir.find(name)
        if found is None:
            print(f"no pool's agent {name} is here: it has ended", file=sys.stderr)
            return 1
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(found.readers)
    except (OSError, RunDirectoryError) as problem:
        print(f"the agent {name} does not serve readers: {problem}", file=sys.stderr)
        return 1
    with contextlib.suppress(OSError):
        relay(sock)
    return 0


def daemonize(directory: RunDirectory, listener: socket.socket) -> None:
    """Leave the login: a session of its own, and none of its descriptors, for sshd waits for whoever has its pipes."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(directory.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for fd, target in enumerate((null, null, log)):
        os.dup2(target, fd)
    close_from(3, but=listener.fileno())
    # A handler and not SIG_IGN, which the agent's ranks would inherit.
    signal.signal(signal.SIGHUP, lambda *_: None)


def relay(sock: socket.socket) -> None:
    """Copy both ways until either end closes, each on a thread: a slow one must not hold up the other."""
    import threading

    def stdin_to_socket() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(0, 1 << 18):
                sock.sendall(data)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)  # upon which the daemon closes

    threading.Thread(target=stdin_to_socket, daemon=True).start()
    while data := sock.recv(1 << 18):
        write_all(1, data)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
