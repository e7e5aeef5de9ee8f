"""Processes of this node for the pool's head, where a notebook is executed.

``python -m skymagic.kernels.relay DAEMON ADDRESS`` reads a certificate from its standard input,
writes the port at which it listens, and leaves the login, as an agent's daemon does. Each
connection names a module and its arguments, and is connected to a process that runs it. The relay
ends with the pool, or some time after the last connection.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

from skymagic.kernels.fork import close_from, fork, holder, run_below_holder
from skymagic.wire import atomic, tls
from skymagic.wire.authentication import Door
from skymagic.wire.codec import write_all
from skymagic.wire.processes import RELAY
from skymagic.wire.record import answers

IDLE_SECONDS = 60.0
"""Seconds without a connection after which the relay ends."""
POLL = 2.0
HANDSHAKE_TIMEOUT = 10.0
END = b"-----END PRIVATE KEY-----\n"


class ProcessRelay:
    """Server for the head.

    Args:
        daemon: name of the node's daemon; the relay ends with it.
        listener: accepts the head's connections.
        context: authenticates the head.
    """

    def __init__(self, daemon: str, listener: socket.socket, context: ssl.SSLContext) -> None:
        self._daemon, self._listener = daemon, listener
        self._serving = 0
        self._used = time.monotonic()
        self._lock = threading.Lock()
        self._door = Door(listener, self._serve, context, seconds=HANDSHAKE_TIMEOUT)

    def run(self) -> None:
        """Serve until the pool has ended, or no connection comes."""
        self._listener.settimeout(POLL)
        while answers(self._daemon) and (
            self._serving or time.monotonic() - self._used < IDLE_SECONDS
        ):
            self._door.accept()

    def _serve(self, sock: ssl.SSLSocket) -> None:
        # each connection has its own thread, and `+=` is not atomic
        with self._lock:
            self._serving += 1
        try:
            with sock:
                self._on_joined(sock)
        finally:
            with self._lock:
                self._serving -= 1
                self._used = time.monotonic()

    def _on_joined(self, secure: ssl.SSLSocket) -> None:
        secure.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = b""
        while not line.endswith(b"\n"):  # the bytes after it belong to the process
            byte = secure.recv(1)
            if not byte:
                return
            line += byte
        relay_end, process_end = socket.socketpair()
        # closed here as soon as the process has it, so that its end ends the stream
        with process_end:
            command: list[str] = [sys.executable, "-P", "-m", *json.loads(line)]
            end = process_end.fileno()
            process = subprocess.Popen(
                command, stdin=end, stdout=end, stderr=subprocess.DEVNULL, start_new_session=True
            )
        tls.pump(secure, relay_end)
        process.wait()


def main(daemon: str, address: str, answer: str = "") -> int:
    """Start to listen, and leave the login.

    In a scheduler's job the job's holder starts the relay instead (`kernels.fork`).

    Args:
        answer: path for the port, if a holder starts the relay.
    """
    pem = b""
    while not pem.endswith(END) and (piece := os.read(0, 1 << 16)):
        pem += piece
    if (holder_path := holder()) and not answer:
        file = Path(holder_path, f"relay-{os.getpid()}.port")
        arguments = ["-P", "-m", RELAY, daemon, address, str(file)]
        reply = run_below_holder(
            holder_path,
            file.stem,
            arguments,
            pem.decode(),
            lambda: file.read_text() if file.exists() else None,
        )
        if reply is None:
            raise TimeoutError(f"no process at {address} answers")
        write_all(1, f"\nlistens {reply}\n".encode())  # the port, or an error
        return 0
    context = tls.context(pem.decode(), server=True)
    try:
        listener = socket.create_server((address, 0))
    except OSError as problem:
        if answer:
            # the process that ordered the relay reads the error there
            atomic.write(Path(answer), str(problem).encode())
        raise
    if answer:
        atomic.write(Path(answer), str(listener.getsockname()[1]).encode())
        ProcessRelay(daemon, listener, context).run()
        return 0

    def become() -> None:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        close_from(3, but=listener.fileno())
        ProcessRelay(daemon, listener, context).run()

    fork(become)
    write_all(1, f"\nlistens {listener.getsockname()[1]}\n".encode())
    return 0


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
