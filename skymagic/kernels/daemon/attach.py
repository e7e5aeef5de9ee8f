"""Attach to a node's daemon, over a connection that may break.

``python -m skymagic.kernels.daemon.attach NAME [COMMAND…]`` starts or finds the daemon NAME, and
relays between its standard streams and the daemon's socket until either closes. The daemon owns the
agent (or COMMAND instead), so that the agent outlives the connection.

A daemon leaves its login by a double fork, or is started by a holder (`kernels.fork`) as ``attach
--held``. Readers bypass the daemon: ``attach --read NAME`` relays between the standard streams and
the agent's socket for readers.

The first line of the input is a `HandshakeRequest`; the daemon replies, or this process if there is
no daemon.
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
from skymagic.kernels.fork import close_from, fork, holder, run_below_holder
from skymagic.wire.codec import read_line, write_all
from skymagic.wire.processes import ATTACH, READERS_ONLY, boot_id
from skymagic.wire.session.frames import (
    HANDSHAKE_REPLY,
    HANDSHAKE_REQUEST,
    HandshakeReply,
    HandshakeRequest,
)

DAEMON_VANISHED = (
    "its daemon is gone: it was killed from outside (out of memory, an administrator, "
    "or systemd with KillUserProcesses=yes when you logged out; "
    "`loginctl enable-linger` on the node prevents that)"
)
HELD = "--held"
"""First argument of a daemon that a holder starts; its standard input holds its secret."""


def main(arguments: list[str]) -> int:
    """Attach to the daemon; a first connection starts it."""
    if arguments[0] == HELD:
        return _become_daemon(*arguments[1:])
    if arguments[0] == READERS_ONLY:
        return _read(*arguments[1:])
    name, *command = arguments
    line = read_line(0)
    os.write(1, b"\n")  # ends the output of a login shell, so that the reply begins a line
    try:
        sock = _attach(name, command, HANDSHAKE_REQUEST.decode(line))
    except RunDirectoryError as problem:
        return _refuse(str(problem), is_lost=True)
    except (ValueError, OSError) as problem:
        return _refuse(f"{type(problem).__name__}: {problem}", is_lost=False)
    if sock is None:
        return _refuse(DAEMON_VANISHED, is_lost=True)
    with contextlib.suppress(OSError):
        sock.sendall(line)
        relay(sock)
    return 0


def _refuse(reason: str, is_lost: bool) -> int:
    write_all(1, HANDSHAKE_REPLY.encode(HandshakeReply(boot_id(), error=reason, is_lost=is_lost)))
    return 1


def _attach(name: str, command: list[str], request: HandshakeRequest) -> socket.socket | None:
    if not request.resume:
        directory = rundir.make(name)
        # the job may end before its daemon has started
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        try:
            # simultaneous connections must not start two daemons
            with directory.locked():
                return directory.connect() or _start(directory, command, request.secret)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with contextlib.suppress(OSError):
                os.rmdir(directory.path)  # succeeds only if it is empty, that is without a daemon
    existing = rundir.find(name)
    if existing is None or (sock := existing.connect()) is not None:
        return None if existing is None else sock
    log = existing.log_tail()
    existing.remove()
    if log:
        raise RunDirectoryError(f"its daemon failed:\n{log}")
    return None


def _start(directory: RunDirectory, command: list[str], secret: str) -> socket.socket | None:
    """Fork the daemon, or have a holder start it; it listens before the first connection.

    Raises OSError if the holder is missing.
    """
    if holder_path := holder():
        arguments = ["-P", "-m", ATTACH, HELD, directory.path, *command]
        return run_below_holder(
            holder_path, os.path.basename(directory.path), arguments, secret, directory.connect
        )
    listener = directory.listen()
    fork(lambda: _serve(directory, listener, command, secret))
    # or connections would queue here, even if the daemon has failed
    listener.close()
    return directory.connect()


def _become_daemon(path: str, *command: str) -> int:
    """Become the daemon of a run directory."""
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
    """Relay between the standard streams and the agent's socket for readers.

    Ends when either closes.
    """
    try:
        directory = rundir.find(name)
        if directory is None:
            print(f"no pool's agent {name} is here: it has ended", file=sys.stderr)
            return 1
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(directory.readers)
    except (OSError, RunDirectoryError) as problem:
        print(f"the agent {name} does not serve readers: {problem}", file=sys.stderr)
        return 1
    with contextlib.suppress(OSError):
        relay(sock)
    return 0


def daemonize(directory: RunDirectory, listener: socket.socket) -> None:
    """Leave the login: start a session, and close all inherited descriptors.

    sshd waits for every process that holds its pipes.
    """
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(directory.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for fd, target in enumerate((null, null, log)):
        os.dup2(target, fd)
    close_from(3, but=listener.fileno())
    # a handler, not SIG_IGN, which the agent's ranks would inherit
    signal.signal(signal.SIGHUP, lambda *_: None)


def relay(sock: socket.socket) -> None:
    """Copy in both directions until either end closes.

    Each direction has a thread, so that a slow one does not hold up the other.
    """
    import threading

    def stdin_to_socket() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(0, 1 << 18):
                sock.sendall(data)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)  # makes the daemon close its end

    threading.Thread(target=stdin_to_socket, daemon=True).start()
    while data := sock.recv(1 << 18):
        write_all(1, data)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
