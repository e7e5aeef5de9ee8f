"""A node's depot: brings values from the notebook and from other nodes into the node's store, and files back.

``python -m skymagic.kernels.store.server STORE`` speaks over its standard input and output (`skymagic.wire.store`) and ends when
its input does. What is complete stays in the store; a depot that follows on the same store finds it.
Nothing that comes is unpickled or executed: it is bytes, written under a name that leads nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skymagic.data.store.store import overflow, private
from skymagic.kernels.store.cache import Cellar, pieces, place
from skymagic.kernels.store.incoming import Arrival, Ground, renamed
from skymagic.kernels.store.outgoing import Outlet, Reading
from skymagic.wire.store import (
    CancelRead,
    Delete,
    Heartbeat,
    Put,
    PutChunk,
    PutEnd,
    Query,
    QueryReply,
    Read,
    Ready,
    Replicate,
    Settings,
    Stored,
    StoreFailed,
    decoder,
)

LOCK = ".depot"
"""A file in the store: its lock is held by the store's depot."""
BEAT = 2.0
"""Seconds between signs of life."""


class Depot:
    """Carries out what the notebook says.

    Args:
        directory: the node's store.
        outlet: where answers go.
        terms: the pool's.
    """

    def __init__(self, directory: Path, outlet: Outlet, terms: Settings) -> None:
        self._ground = Ground(directory, terms.share)
        self._ground.clear()
        self._outlet = outlet
        self._lock = threading.Lock()
        self._arrivals: dict[str, Arrival] = {}
        self._renamed: dict[str, str] = {}
        self._reading = Reading(outlet, self._ground.find)
        self._into: Arrival | None = None
        self._cellar = Cellar(place(), terms.keep, terms.keep_after) if terms.keep else None
        self._server: Any = None
        self._follower: Any = None
        if terms.address:
            from skymagic.kernels.store.peers import Follower, Server

            self._server = Server(terms.address, terms.public, terms.secret, self._supply)
            self._follower = Follower(terms.public, terms.secret, self._more, self._land, self._fail)
        outlet.say(Ready(self._server.port if self._server else 0, self._ground.room()))

    def carry_out(self, order: Any) -> None:
        """One message of the notebook's, or raw bytes that follow one."""
        match order:
            case memoryview():
                self._write(order)
            case PutChunk():
                self._into = self._arrivals.get(order.name)
            case Put():
                self._abandon(order.name)
                self._arrive(order.name, order.nbytes)
            case PutEnd():
                self._try_to_land(order.name, order.key)
            case Query():
                self._look(order)
            case Replicate():
                self._follow(order)
            case Delete():
                for name in order.names:
                    self._abandon(name)
                self._ground.drop(order.names)
            case Read():
                self._reading.read(order)
            case CancelRead():
                self._reading.stop(order.number)
            case _:
                raise ValueError(f"not a message to a depot: {order!r}")

    def close(self) -> None:
        """Give up what has not landed."""
        for arrival in list(self._arrivals.values()):
            arrival.close()

    # -- values that arrive ------------------------------------------------------------------------------------------

    def _news(self) -> None:
        if self._server is not None:
            self._server.news()

    def _arrive(self, name: str, nbytes: int) -> Arrival | None:
        try:
            arrival = Arrival(self._ground, name, nbytes, self._news)
        except OSError as problem:
            self._fail(name, problem)
            return None
        with self._lock:
            self._arrivals[name] = arrival
        return arrival

    def _write(self, data: memoryview) -> None:
        if self._into is not None:
            try:
                self._into.write(data)
            except OSError as problem:
                self._fail(self._into.name, problem)
                self._into = None

    def _try_to_land(self, name: str, key: str) -> None:
        self._into = None
        if name in self._arrivals:  # else it has failed, and that was said
            try:
                self._land(name, key)
            except OSError as problem:
                self._fail(name, problem)

    def _land(self, name: str, key: str) -> None:
        arrival = self._arrivals.get(name)
        if arrival is None:
            raise OSError(errno.ECANCELED, "it was given up")
        arrival.seal(key)
        with self._lock:
            self._arrivals.pop(name, None)
            if arrival.final != name:
                self._renamed[name] = renamed(name, key)
        self._news()
        path = self._ground.find(renamed(name, key))
        spilled = path is not None and path.parent == overflow(self._ground.directory)
        if self._cellar is not None:
            self._cellar.keep(key, arrival.come, lambda: self._ground.find(renamed(name, key)))
        note = f"it is kept on disk, in {path.parent}" if path is not None and spilled else ""
        self._outlet.say(Stored(name, key, self._ground.room(), note))

    def _fail(self, name: str, problem: OSError) -> None:
        """Say so; what has come is kept for going on with another node, unless that cannot help."""
        if not isinstance(problem, TimeoutError):
            self._abandon(name)
        self._outlet.say(StoreFailed(name, problem.strerror or str(problem), problem.errno or 0))

    def _abandon(self, name: str) -> None:
        if self._follower is not None:
            self._follower.abandon(name)
        with self._lock:
            arrival = self._arrivals.pop(name, None)
        if arrival is not None:
            arrival.close()

    # -- other nodes -------------------------------------------------------------------------------------------------

    def _follow(self, order: Replicate) -> None:
        if self._follower is None:
            self._fail(order.name, OSError(errno.ENOTCONN, "this node knows no other"))
        elif self._ground.find(order.name) is not None:  # it has landed while the line was down
            self._outlet.say(Stored(order.name, order.name.partition("-")[2], self._ground.room()))
        elif order.name in self._arrivals or self._arrive(order.name, order.nbytes):
            self._follower.follow(order)

    def _more(self, name: str, data: memoryview) -> int:
        arrival = self._arrivals.get(name)
        if arrival is None:
            raise OSError(errno.ECANCELED, "it was given up")
        arrival.write(data)
        return arrival.come

    def _supply(self, name: str, offset: int, limit: int) -> tuple[bytes, str]:
        with self._lock:
            arrival, final = self._arrivals.get(name), self._renamed.get(name, name)
        if arrival is not None:
            return arrival.read(offset, limit), ""
        path = self._ground.find(final)
        if path is None:  # it has not begun to arrive
            return b"", ""
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            data = file.read(limit)
        return (data, "") if data else (b"", final.partition("-")[2])

    # -- what is here ------------------------------------------------------------------------------------------------

    def _look(self, order: Query) -> None:
        here: list[str] = []
        lacks: list[str] = []
        kept: list[tuple[str, str, Path]] = []
        for key, name, nbytes in order.values:
            if self._ground.find(name):
                here.append(name)
            elif name not in self._arrivals:
                path = self._cellar.find(key, nbytes) if self._cellar is not None else None
                if path is None or self._arrive(name, nbytes) is None:
                    lacks.append(name)
                else:
                    kept.append((key, name, path))
        self._outlet.say(QueryReply(order.number, lacks, here, self._ground.room()))
        threading.Thread(target=self._restore, args=(kept,), name="depot-restore", daemon=True).start()

    def _restore(self, kept: list[tuple[str, str, Path]]) -> None:
        """Copy what an earlier pool has left, which other nodes may follow."""
        for key, name, path in kept:
            try:
                for piece in pieces(path):
                    self._more(name, piece)
                self._land(name, key)
            except OSError as problem:
                if problem.errno == errno.EBADMSG and self._cellar is not None:
                    self._cellar.forget(key)
                if problem.errno != errno.ECANCELED:
                    self._fail(name, problem)


def orders(descriptor: int) -> Iterator[Any]:
    """Messages and raw bytes that the notebook sends, until it has closed."""
    cutter = decoder()
    while data := os.read(descriptor, 1 << 18):
        yield from cutter.feed(data)


def _beat(outlet: Outlet, directory: Path, end: threading.Event) -> None:
    """Show that the depot lives; end it when its store is gone, for then so is the pool."""
    while not end.wait(BEAT):
        if not directory.exists():
            os.kill(os.getpid(), signal.SIGTERM)
        outlet.say(Heartbeat())


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Be the one depot on a store: end an older one, which has lost its notebook and does not know it yet."""
    path = directory / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).strip()
            if holder.isdigit():  # whoever holds the lock lives and has written its number
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(holder), signal.SIGKILL)
            time.sleep(0.01)
        else:
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        os.close(descriptor)
    os.pwrite(descriptor, f"{os.getpid():<20}".encode(), 0)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _leave(*_: object) -> None:
    raise SystemExit(0)


def main(directory: str) -> None:
    """Serve until the input ends, or until another depot takes over."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    out = os.dup(1)
    os.dup2(2, 1)  # nothing else speaks there
    os.write(out, b"\n")  # after whatever a login shell has printed
    end = threading.Event()
    outlet = Outlet(out, lambda: os.kill(os.getpid(), signal.SIGTERM))
    asked = orders(0)
    terms = next(asked, None)
    if not isinstance(terms, Settings):
        return
    store = Path(directory)
    private(store)
    with alone(store):
        depot = Depot(store, outlet, terms)
        threading.Thread(target=_beat, args=(outlet, store, end), daemon=True).start()
        try:
            for order in asked:
                depot.carry_out(order)
        finally:
            end.set()
            depot.close()
            outlet.close()


if __name__ == "__main__":
    status = 0
    try:
        main(sys.argv[1])
    except (BrokenPipeError, SystemExit):
        pass
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # threads that wait for other nodes need not be waited for
