"""Value server of a node: writes received values into the node's store, and sends files back.

Values come from the notebook and from other nodes. ``python -m skymagic.kernels.store.server
STORE`` speaks over its standard input and output (`skymagic.wire.store`) and ends when its input
does. Complete values stay in the store, where the next server finds them. Received data is never
unpickled or executed; it is written under a validated name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skymagic.content.store import overflow, private
from skymagic.kernels.fork import signal_pipe
from skymagic.kernels.network import private_addresses
from skymagic.kernels.store.incoming import IncomingValue, StoreFolder, file_name_of, read_slices
from skymagic.kernels.store.outgoing import FileReader, Sender
from skymagic.wire import debug_log, processes
from skymagic.wire.store import (
    ANY_PRIVATE,
    Adopt,
    AdoptReply,
    Assemble,
    CancelRead,
    Delete,
    Heartbeat,
    Put,
    PutChunk,
    PutEnd,
    Read,
    Ready,
    Replicate,
    Settings,
    Stored,
    StoreFailed,
    decoder,
)

logger = logging.getLogger(__name__)

LOCK = ".value-server"
"""File in the store whose lock the store's server holds."""
HOLDER = 40
"""Length in bytes of the holder's identity in that file."""
LOOPBACK = "127.0.0.1"
HEARTBEAT_INTERVAL = 2.0
"""Seconds between heartbeats."""


class ValueServer:
    """Handler of the notebook's messages."""

    def __init__(self, directory: Path, sender: Sender, settings: Settings) -> None:
        self._folder = StoreFolder(directory, settings.share, settings.hash)
        # incomplete files of a server that was killed
        self._folder.remove_partials()
        self._sender = sender
        self._lock = threading.Lock()
        self._incoming: dict[str, IncomingValue] = {}
        self._renamed: dict[str, str] = {}
        self._reader = FileReader(sender, self._folder.find)
        self._current: IncomingValue | None = None
        self._server: Any = None
        self._follower: Any = None
        if settings.address:
            from skymagic.content.chain import Follower, PeerServer

            addresses = (
                [*private_addresses(), LOOPBACK]
                if settings.address == ANY_PRIVATE
                else [settings.address]
            )
            self._server = PeerServer(addresses, settings.pem, self._read)
            self._follower = Follower(
                settings.pem, self._append, self._complete, self._fail, self._server.listening
            )
        listening = self._server.listening if self._server else []
        logger.info("value server ready: pid=%s listening=%s", os.getpid(), listening)
        sender.send(Ready(listening, self._folder.room(), self._folder.names()))

    def handle(self, message: Any) -> None:
        """Handle a message, or raw bytes that follow one."""
        match message:
            case memoryview():
                self._write(message)
            case PutChunk():
                self._current = self._incoming.get(message.name)
            case Put():
                self._abandon(message.name)
                self._begin(message.name, message.nbytes)
            case PutEnd():
                self._try_to_complete(message.name, message.key)
            case Assemble():
                self._assemble(message)
            case Replicate():
                self._follow(message)
            case Adopt():
                # on a separate thread, so that other nodes can follow the first files meanwhile
                threading.Thread(
                    target=self._adopt, args=(message,), name="values-adopt", daemon=True
                ).start()
            case Delete():
                for name in message.names:
                    self._abandon(name)
                self._folder.drop(message.names)
            case Read():
                self._reader.read(message)
            case CancelRead():
                self._reader.cancel(message.number)
            case _:
                raise ValueError(f"not a message to a value server: {message!r}")

    def close(self) -> None:
        """Abandon incomplete values."""
        for incoming in list(self._incoming.values()):
            incoming.close()

    # -- incoming values ---------------------------------------------------------------------------

    def _wake_followers(self) -> None:
        if self._server is not None:
            self._server.wake()

    def _begin(self, name: str, nbytes: int) -> IncomingValue | None:
        try:
            incoming = IncomingValue(self._folder, name, nbytes, self._wake_followers)
        except OSError as problem:
            self._fail(name, problem)
            return None
        logger.debug("value is expected: name=%s bytes=%s", name, nbytes)
        # the threads that serve other nodes look it up
        with self._lock:
            self._incoming[name] = incoming
        return incoming

    def _write(self, data: memoryview) -> None:
        if self._current is not None:
            try:
                self._current.write(data)
            except OSError as problem:
                self._fail(self._current.name, problem)
                self._current = None

    def _try_to_complete(self, name: str, key: str) -> None:
        self._current = None
        if name in self._incoming:  # otherwise it has failed, and StoreFailed was sent
            try:
                self._complete(name, key)
            except OSError as problem:
                self._fail(name, problem)

    def _complete(self, name: str, key: str) -> None:
        incoming = self._incoming.get(name)
        if incoming is None:
            raise OSError(errno.ECANCELED, "it was given up")
        incoming.seal(key)
        # in one step, so that followers find either the arriving value or its final name
        with self._lock:
            self._incoming.pop(name, None)
            if incoming.final != name:
                # followers still ask for it by its first name
                self._renamed[name] = file_name_of(name, key)
        self._wake_followers()
        path = self._folder.find(file_name_of(name, key))
        spilled = path is not None and path.parent == overflow(self._folder.directory)
        note = f"it is kept on disk, in {path.parent}" if path is not None and spilled else ""
        logger.debug("value stored: name=%s on_disk=%s", name, spilled)
        self._sender.send(Stored(name, key, self._folder.room(), note))

    def _fail(self, name: str, problem: OSError) -> None:
        """Report a failed value.

        After a timeout the bytes received are kept, to resume with another node as the source.
        """
        logger.warning("value not stored: name=%s reason=%s", name, problem)
        if not isinstance(problem, TimeoutError):
            self._abandon(name)
        self._sender.send(StoreFailed(name, problem.strerror or str(problem), problem.errno or 0))

    def _abandon(self, name: str) -> None:
        if self._follower is not None:
            self._follower.abandon(name)
        with self._lock:
            incoming = self._incoming.pop(name, None)
        if incoming is not None:
            incoming.close()

    # -- other nodes -------------------------------------------------------------------------------

    def _follow(self, message: Replicate) -> None:
        if self._follower is None:
            self._fail(message.name, OSError(errno.ENOTCONN, "this node knows no other"))
        elif (
            self._folder.find(message.name) is not None
        ):  # it was completed while the connection was down
            self._sender.send(
                Stored(message.name, message.name.partition("-")[2], self._folder.room())
            )
        elif message.name in self._incoming or self._begin(message.name, message.nbytes):
            self._follower.follow(message)

    def _append(self, name: str, data: memoryview) -> int:
        incoming = self._incoming.get(name)
        if incoming is None:
            raise OSError(errno.ECANCELED, "it was given up")
        incoming.write(data)
        return incoming.received

    def _read(self, name: str, offset: int, limit: int) -> tuple[bytes, str]:
        with self._lock:
            incoming, final = self._incoming.get(name), self._renamed.get(name, name)
        if incoming is not None:
            # b"" if it was completed meanwhile: the next look finds the file
            return incoming.read(offset, limit), ""
        path = self._folder.find(final)
        if path is None:  # nothing of it has arrived yet
            return b"", ""
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            data = file.read(limit)
        return (data, "") if data else (b"", final.partition("-")[2])

    def _adopt(self, message: Adopt) -> None:
        from skymagic.kernels.store.adopting import adopt

        try:
            for adopted in adopt(self._folder, message):
                self._wake_followers()
                self._sender.send(adopted)
        except OSError as problem:
            self._sender.send(AdoptReply(f"{problem.filename}: {problem.strerror or problem}"))
        else:
            self._sender.send(AdoptReply())

    # -- stored values -----------------------------------------------------------------------------

    def _assemble(self, message: Assemble) -> None:
        try:
            # opened before the next message, which may unlink them
            files = {
                name: self._folder.open(name) for name in {name for name, _, _ in message.slices}
            }
        except OSError as problem:
            self._fail(message.name, problem)
            return
        if self._begin(message.name, message.nbytes) is not None:
            slices = [(files[name], offset, nbytes) for name, offset, nbytes in message.slices]
            # on a separate thread, so that other nodes can follow the value meanwhile
            args = message.key, message.name, read_slices(slices)
            threading.Thread(
                target=self._copy, args=args, name="values-assemble", daemon=True
            ).start()

    def _copy(self, key: str, name: str, pieces: Iterator[memoryview]) -> None:
        try:
            for piece in pieces:
                self._append(name, piece)
            self._complete(name, key)
        except OSError as problem:
            # it was abandoned: on the notebook's order, or after a failure that was reported
            if problem.errno != errno.ECANCELED:
                self._fail(name, problem)


def messages(descriptor: int, wake: int) -> Iterator[Any]:
    """Yield messages and raw bytes from the notebook.

    Ends when the notebook closes its end, or when a signal writes to `wake`.
    """
    cutter = decoder()
    while True:
        # A read alone would miss a signal between the interpreter's last check and the call.
        if wake in select.select([descriptor, wake], [], [])[0]:
            return
        data = os.read(descriptor, 1 << 18)
        if not data:
            return
        yield from cutter.feed(data)


def _send_heartbeats(sender: Sender, directory: Path, end: threading.Event) -> None:
    """Send heartbeats, and end the server when its store is gone, because then the pool is too."""
    while not end.wait(HEARTBEAT_INTERVAL):
        if not directory.exists():
            os.kill(os.getpid(), signal.SIGTERM)
        sender.send(Heartbeat())


def _kill_holder(descriptor: int) -> None:
    """Kill the server that a lock's file names by its process id and start time."""
    holder = os.pread(descriptor, HOLDER, 0).split()
    if len(holder) == 2 and all(map(bytes.isdigit, holder)):
        processes.send_signal(int(holder[0]), int(holder[1]), signal.SIGKILL)


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold the store's lock.

    An older server that has not noticed the loss of its notebook is killed. On a file system
    without locks (NFS without lockd) it is known only by its process id in the file.
    """
    path = directory / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.debug("an older server holds the store and is killed")
            _kill_holder(descriptor)
            time.sleep(0.01)
        except OSError:
            _kill_holder(descriptor)
            break
        else:
            # The older server may have unlinked the file between our open and our lock: then the
            # lock protects nothing.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        os.close(descriptor)
    # padded, or the end of a longer identity would remain behind a shorter one
    os.pwrite(
        descriptor, f"{os.getpid()} {processes.started(os.getpid())}".ljust(HOLDER).encode(), 0
    )
    try:
        yield
    finally:
        # while the lock is held: afterwards, this could be a file that another server has locked
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _exit(*_: object) -> None:
    raise SystemExit(0)


def main(directory: str, *log: str) -> None:
    """Serve until the input ends, or until another server takes over.

    Args:
        log: arguments of the debug log (`wire.debug_log.arguments`).
    """
    debug_log.start(log)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    woken = signal_pipe()
    out = os.dup(1)
    # nothing else may write to the notebook: a library's print would break the protocol
    os.dup2(2, 1)
    os.write(out, b"\n")  # ends the output of a login shell
    end = threading.Event()
    # the server ends when the notebook no longer reads
    sender = Sender(out, lambda: os.kill(os.getpid(), signal.SIGTERM))
    inbox = messages(0, woken)
    settings = next(inbox, None)
    if not isinstance(settings, Settings):
        return
    store = Path(directory)
    private(store)
    with exclusive(store):
        server = ValueServer(store, sender, settings)
        threading.Thread(target=_send_heartbeats, args=(sender, store, end), daemon=True).start()
        try:
            for message in inbox:
                server.handle(message)
        finally:
            logger.info("value server ends")
            end.set()
            server.close()
            sender.close()


if __name__ == "__main__":
    status = 0
    try:
        main(*sys.argv[1:])
    except (BrokenPipeError, SystemExit):
        pass
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # do not wait for threads that wait for other nodes
