"""The gate of a node: ``python -m skymagic.kernels.daemon.attach NAME [COMMAND…]``, run through a connection that may break.

It starts the daemon NAME, or finds it again, and relays between its standard input and output and the daemon's socket until either
ends. The daemon owns the agent (or COMMAND in its place), so that the agent outlives the connection.

The first line of the input is a `handshake.HandshakeRequest`; the daemon, or the gate when there is none, answers it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

from skymagic.kernels.daemon import rundir
from skymagic.kernels.daemon.fork import close_from
from skymagic.kernels.daemon.rundir import Berth, BerthError
from skymagic.wire.boot import boot_id
from skymagic.wire.session.handshake import REPLY, REQUEST, HandshakeReply, HandshakeRequest
from skymagic.wire.transport import read_line, write_all

VANISHED = (
    "its daemon is not there any more: it was killed from outside (out of memory, an administrator, or systemd with "
    "KillUserProcesses=yes when you logged out; `loginctl enable-linger` on the node prevents that)"
)


def main(arguments: list[str]) -> int:
    """Attach to the daemon, starting it if it may be new."""
    name, *command = arguments
    line = read_line(0)
    os.write(1, b"\n")  # ends what a login shell has printed: the reply begins a line
    try:
        sock = _attach(name, command, REQUEST.decode(line))
    except BerthError as problem:
        return _refuse(str(problem), gone=True)
    except (ValueError, OSError) as problem:
        return _refuse(f"{type(problem).__name__}: {problem}", gone=False)
    if sock is None:
        return _refuse(VANISHED, gone=True)
    with contextlib.suppress(OSError):
        sock.sendall(line)
        _relay(sock)
    return 0


def _refuse(reason: str, gone: bool) -> int:
    write_all(1, REPLY.encode(HandshakeReply(boot_id(), error=reason, gone=gone)))
    return 1


def _attach(name: str, command: list[str], request: HandshakeRequest) -> socket.socket | None:
    if not request.resume:
        place = rundir.make(name)
        with place.locked():
            return place.connect() or _start(place, command, request.secret)
    found = rundir.find(name)
    if found is None or (sock := found.connect()) is not None:
        return None if found is None else sock
    words = found.last_words()
    found.remove()
    if words:
        raise BerthError(f"its daemon failed:\n{words}")
    return None


def _start(place: Berth, command: list[str], secret: str) -> socket.socket | None:
    """Fork the daemon; it listens before anybody connects."""
    listener = place.listen()
    if os.fork() == 0:
        code = 1
        try:
            _leave(place, listener)
            from skymagic.kernels.daemon.daemon import Daemon

            Daemon(listener, place, command, secret).run()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()  # into the daemon's log
        finally:
            os._exit(code)
    listener.close()
    return place.connect()


def _leave(place: Berth, listener: socket.socket) -> None:
    """Become a process that nothing of the login holds, and that holds nothing of it: sshd waits for whoever has its pipes."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(place.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for fd, target in enumerate((null, null, log)):
        os.dup2(target, fd)
    close_from(3, but=listener.fileno())
    signal.signal(
        signal.SIGHUP, lambda *_: None
    )  # a handler, for what is ignored stays so in the agent's ranks


def _relay(sock: socket.socket) -> None:
    """Both ways, until either end closes; each way on its own, for a slow one must not hold up the other."""
    import threading

    def inward() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(0, 1 << 18):
                sock.sendall(data)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)  # upon which the daemon closes

    threading.Thread(target=inward, daemon=True).start()
    while data := sock.recv(1 << 18):
        write_all(1, data)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
