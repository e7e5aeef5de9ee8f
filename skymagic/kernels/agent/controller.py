"""Entry of ipyparallel's controller on the head node: ends when its standard input does, says when it listens.

Tuned: threads instead of processes for its relays (a third of the memory at the same latency), a fast first heartbeat (an engine
counts as registered after one), no broadcast tree (cells go directly).
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import types
from typing import Any, cast

from skymagic.kernels.fork import signal_pipe
from skymagic.runtime.on_import import import_with, stand_in
from skymagic.wire.agent import MAX_LINE

FLAGS = (
    "--HeartMonitor.period=200",
    # Silence is no death: a rank may be stopped for a while, or its machine cut off, and the hub never takes back an engine that it
    # has given up. Agents watch processes and nodes, and the notebook says which engines are gone (`RankEngine.forget`).
    "--HeartMonitor.max_heartmonitor_misses=2147483647",
    "--IPController.use_threads=True",
    "--IPController.broadcast_scheduler_depth=0",
    "--IPController.db_class=ipyparallel.controller.dictdb.DictDB",
    "--log-level=50",
)


MAX_FRAME = MAX_LINE + (MAX_LINE >> 2)
"""Bytes: a rank's largest output, written by another JSON encoder."""
PORTS = 16  # more than it uses; those that are left over are never listened on


def reserve(count: int) -> list[socket.socket]:
    """Bound sockets on ports that nobody else is given, and that this machine lets zmq listen on all the same.

    ipyparallel asks for a free port, closes it, and listens later: whoever is given the same port in between makes it fail.
    """
    sockets = []
    for _ in range(count):
        holder = socket.socket()
        holder.bind(("", 0))
        # after the bind: others, who bind without it, see a port in use
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sockets.append(holder)
    return sockets


def _end_with_stdin() -> None:
    while os.read(0, 1024):
        pass
    os.killpg(0, signal.SIGKILL)  # its heartbeat is a process of its own


_CLIENT = {
    "ipyparallel.client": (),
    "ipyparallel.client.asyncresult": ("AsyncResult",),
    "ipyparallel.client.client": ("Client",),
    "ipyparallel.client.remotefunction": (),
    "ipyparallel.client.view": (),
    "ipyparallel.cluster": ("Cluster", "ClusterManager"),
}
"""Modules that ``import ipyparallel`` loads for its users, with the names that it takes from them: a controller uses none."""


def _controller() -> type[Any]:
    """ipyparallel's controller, without its client, IPython's shell and numpy: 0.43 s of processor time in place of 0.69 s."""
    found: dict[str, types.ModuleType | None] = {
        name: stand_in(name, taken) for name, taken in _CLIENT.items()
    }
    shell = importlib.util.find_spec("IPython")
    found["IPython"] = stand_in("IPython")
    # what the controller does need of it is in modules below it
    vars(found["IPython"]).update(
        __path__=list(shell.submodule_search_locations or ()) if shell else [],
        get_ipython=lambda: None,
    )
    if "numpy" not in sys.modules:  # it is hidden from the import alone
        found["numpy"] = None
    module = import_with(found, "ipyparallel.controller.app")
    if sys.modules.get("numpy", module) is None:
        del sys.modules["numpy"]
    return cast("type[Any]", module.IPController)


def bound_frames() -> None:
    """Let no socket of this process, and of what it forks, take a frame that no sender of ours makes.

    libzmq makes room for a frame as it arrives, also for a handshake's from somebody without a key.
    """
    import zmq

    made = zmq.Context.socket

    def bounded(self: Any, *args: Any, **kwargs: Any) -> Any:
        socket = made(self, *args, **kwargs)
        socket.maxmsgsize = MAX_FRAME
        return socket

    zmq.Context.socket = bounded  # type: ignore[method-assign]  # the relays and the heartbeat make contexts of their own


def use_monotonic_clock() -> None:
    """Let tornado's loops in this process measure time by a clock that nobody sets.

    Its own is `time.time`: where that is set back, the heartbeat would pause until the old time is reached again, and no rank
    could register meanwhile (`tornado.ioloop.PeriodicCallback`).
    """
    from tornado.ioloop import IOLoop

    IOLoop.time = lambda self: time.monotonic()  # type: ignore[method-assign]


def main(argv: list[str]) -> None:
    """Run the controller; `argv` are further flags of ``ipcontroller``."""
    # not the default since Python 3.14: the heartbeat's process takes over what is set here
    multiprocessing.set_start_method("fork")
    bound_frames()
    use_monotonic_clock()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    gc.disable()  # while it starts: collections would take a fifth of the time and find nothing
    app = _controller().instance()
    if sys.platform == "linux":  # elsewhere a port that is held so cannot be listened on
        app.holders = reserve(PORTS)
        app.ports = [holder.getsockname()[1] for holder in app.holders]
    app.initialize([*FLAGS, *argv])
    # The hub writes its engines to this file amid each registration, for a controller that is started again. Ours never
    # is; and where somebody has deleted the folder, the error would leave registrations half done.
    app.hub.engine_state_file = ""
    app.log.setLevel(logging.CRITICAL)  # else each message makes records that no handler takes
    gc.freeze()
    gc.enable()
    # its loop would sleep through a signal that comes just before it waits
    app.loop.add_handler(signal_pipe(), lambda woken, _: os.read(woken, 4096), app.loop.READ)
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    app.start()


if __name__ == "__main__":
    main(sys.argv[1:])
