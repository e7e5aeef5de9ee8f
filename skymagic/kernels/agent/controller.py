"""Entry point of ipyparallel's controller on the head node.

It ends when its standard input closes, and reports when it listens. Tuned: threads instead of
processes for its relays (a third of the memory at the same latency), a fast first heartbeat (an
engine counts as registered after one), no broadcast tree (cells go directly).
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
    # A silent rank is not a dead one: it may be stopped for a while, or its machine cut off, and
    # the hub never takes back an engine that it has given up. Agents watch processes and nodes, and
    # the notebook reports which engines are gone (`RankEngine.forget`).
    "--HeartMonitor.max_heartmonitor_misses=2147483647",
    "--IPController.use_threads=True",
    "--IPController.broadcast_scheduler_depth=0",
    "--IPController.db_class=ipyparallel.controller.dictdb.DictDB",
    "--log-level=50",
)


MAX_FRAME = MAX_LINE + (MAX_LINE >> 2)
"""Maximum frame size in bytes: a rank's largest output, encoded by another JSON encoder."""
PORTS = 16  # more than it uses; the unused ones are never listened on


def reserve_ports(count: int) -> list[socket.socket]:
    """Bind sockets to ports that no other process gets, but on which zmq can still listen here.

    ipyparallel asks for a free port, closes it, and listens later: it fails if another process gets
    the same port in between.
    """
    sockets = []
    for _ in range(count):
        holder = socket.socket()
        holder.bind(("", 0))
        # after the bind: other processes, which bind without it, see a port in use
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sockets.append(holder)
    return sockets


def _end_with_stdin() -> None:
    while os.read(0, 1024):
        pass
    os.killpg(0, signal.SIGKILL)  # its heartbeat is a separate process


def _end_with_heartbeat(process: multiprocessing.Process) -> None:
    """End the controller when its heartbeat's process ends: no rank could register any more.

    The agent reports the controller's end, and starts another one on request.
    """
    process.join()
    os.killpg(0, signal.SIGKILL)


_CLIENT = {
    "ipyparallel.client": (),
    "ipyparallel.client.asyncresult": ("AsyncResult",),
    "ipyparallel.client.client": ("Client",),
    "ipyparallel.client.remotefunction": (),
    "ipyparallel.client.view": (),
    "ipyparallel.cluster": ("Cluster", "ClusterManager"),
}
"""Modules that ``import ipyparallel`` loads for its users, with the names imported from them.

A controller uses none of them.
"""


def _controller() -> type[Any]:
    """Import ipyparallel's controller without its client, IPython's shell and numpy.

    That takes 0.43 s of processor time instead of 0.69 s.
    """
    replacements: dict[str, types.ModuleType | None] = {
        name: stand_in(name, names) for name, names in _CLIENT.items()
    }
    shell = importlib.util.find_spec("IPython")
    replacements["IPython"] = stand_in("IPython")
    # the controller does need some modules below IPython
    vars(replacements["IPython"]).update(
        __path__=list(shell.submodule_search_locations or ()) if shell else [],
        get_ipython=lambda: None,
    )
    if "numpy" not in sys.modules:  # hidden from this import only
        replacements["numpy"] = None
    module = import_with(replacements, "ipyparallel.controller.app")
    if sys.modules.get("numpy", module) is None:
        del sys.modules["numpy"]
    return cast("type[Any]", module.IPController)


def bound_frames() -> None:
    """Limit the size of frames that the sockets of this process and of its children accept.

    libzmq allocates a frame as it arrives, even one of a handshake from a peer without a key.
    """
    import zmq

    original = zmq.Context.socket

    def bounded(self: Any, *args: Any, **kwargs: Any) -> Any:
        socket = original(self, *args, **kwargs)
        socket.maxmsgsize = MAX_FRAME
        return socket

    # patch the class, because the relays and the heartbeat have their own contexts
    zmq.Context.socket = bounded  # type: ignore[method-assign]


def use_monotonic_clock() -> None:
    """Make tornado's loops in this process use the monotonic clock.

    By default they use `time.time`. When that clock is set back, the heartbeat would pause until
    the old time is reached again, and no rank could register meanwhile
    (`tornado.ioloop.PeriodicCallback`).
    """
    from tornado.ioloop import IOLoop

    IOLoop.time = lambda self: time.monotonic()  # type: ignore[method-assign]


def main(argv: list[str]) -> None:
    """Run the controller; `argv` holds further flags for ``ipcontroller``."""
    # not the default since Python 3.14: the heartbeat's process inherits what is set here
    multiprocessing.set_start_method("fork")
    bound_frames()
    use_monotonic_clock()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    gc.disable()  # while it starts: collections would take a fifth of the time and find nothing
    app = _controller().instance()
    if sys.platform == "linux":  # on other systems such a port cannot be listened on
        app.holders = reserve_ports(PORTS)
        app.ports = [holder.getsockname()[1] for holder in app.holders]
    app.initialize([*FLAGS, *argv])
    # The hub writes its engines to this file during each registration, for a controller that is
    # restarted. Ours never is; and if the folder was deleted, the error would leave registrations
    # half done.
    app.hub.engine_state_file = ""
    # otherwise each message creates log records that no handler takes
    app.log.setLevel(logging.CRITICAL)
    gc.freeze()
    gc.enable()
    # without it, the loop would sleep through a signal that arrives just before it waits
    app.loop.add_handler(signal_pipe(), lambda woken, _: os.read(woken, 4096), app.loop.READ)
    watch = threading.Thread(
        target=_end_with_heartbeat, args=(app.heartmonitor_process,), daemon=True
    )
    app.loop.add_callback(watch.start)  # the process starts just before the loop does
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    app.start()


if __name__ == "__main__":
    main(sys.argv[1:])
