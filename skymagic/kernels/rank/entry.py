"""What a forked rank does: its environment, its streams, its control thread, its engine.

Imported by the forkserver before it forks, so that a rank finds everything loaded.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import logging
import os
import signal
import socket
import sys
import traceback
import types
import warnings
from typing import Any, TextIO

import ipyparallel.engine.app as engine_app
from traitlets.config import Config

from skymagic.data.values import descriptions
from skymagic.kernels import stacks
from skymagic.kernels.fork import signal_pipe
from skymagic.kernels.network import environment, interfaces
from skymagic.kernels.rank import bars, context, gpu, importer, tracebacks, widgets
from skymagic.kernels.rank.context import AgentControl, Hooks
from skymagic.kernels.rank.kernel import RankKernel
from skymagic.kernels.rank.shell import text_stream
from skymagic.runtime import info as runtime
from skymagic.runtime import interruption, rendezvous, reporting, silence
from skymagic.wire import agent as wire
from skymagic.wire import metrics
from skymagic.wire.streams import MOST, frame

# ipyparallel has no trait for the kernel's class, but looks it up here.
engine_app.Kernel = RankKernel

# What each rank would import as it starts.
for _late in (
    "tornado.platform.asyncio",
    "IPython.core.completerlib",
    "IPython.extensions.storemagic",
):
    importlib.import_module(_late)

# ipykernel imports debugpy, in half of a rank's start, for the front end's debugger, which cannot reach a rank.
_no_debugger = types.ModuleType("ipykernel.debugger", "What a rank has in its place")
_no_debugger.__dict__.update(_is_debugpy_available=False, Debugger=object)
sys.modules[_no_debugger.__name__] = _no_debugger


class RankEngineApp(engine_app.IPEngine):  # type: ignore[misc]  # untyped base
    """ipyparallel's engine with a rank's streams and hooks."""

    def redirect_output(self, iopub_socket: Any) -> None:
        """The agent reads the file descriptors; Python's own streams stay."""

    def init_signal(self) -> None:
        """Ranks end with their control socket. Handlers of ours would be inherited by what user code forks, and print there."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def complete_registration(self, msg: Any, connect: Any, maybe_tunnel: Any) -> None:
        """Register, then run the plugins' hooks while the controller waits for the first heartbeat."""
        await super().complete_registration(msg, connect, maybe_tunnel)
        kernel, rank = self.kernel, context.current()
        rank.control.procedures.update(
            release=kernel.release,
            interrupt=kernel.interrupts.again,
            leaving=kernel.interrupts.will_return,
            waits=kernel.interrupts.waits,
            joining=kernel.interrupts.joining,
            stacks=lambda: gpu.with_collective(stacks.of_main_thread(kernel)),
            variables=lambda: descriptions.described(
                kernel.shell.user_ns, kernel.shell.user_ns_hidden
            ),
            installed=importer.installed_packages,
            rescan=importer.rescan_packages,
            recall=kernel.runs.recall,
            stop=lambda: self.loop.add_callback(self.loop.stop),
        )
        try:
            rank.hooks.enter()
            if "MASTER_PORT" not in os.environ:  # no plugin has a store of its own
                os.environ["MASTER_PORT"] = str(rank.info.head_port)
        except BaseException as problem:
            _report_failure(rank.control, problem)
            self.loop.add_callback(self.loop.stop)
            return
        gc.freeze()  # what is here stays: collections look at what cells make
        rank.control.send(wire.RankReady(rank.info.rank))

    def start(self) -> None:
        """Serve until stopped, then let the plugins tidy up."""
        self.loop.add_callback(self.register)
        # an idle rank would sleep through a signal that comes just before it waits
        self.loop.add_handler(signal_pipe(), lambda woken, _: os.read(woken, 4096), self.loop.READ)
        self.loop.start()
        context.current().hooks.leave()


def main(spec: wire.RankSpec, fds: list[int]) -> int:
    """Become a rank; returns its exit code when it is stopped."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    control_fd, *writers = fds
    _open_streams(writers)
    info = runtime.InstanceInfo.from_plain(spec.info)
    base_env = {**os.environ, **spec.env}
    os.environ.update({**environment(info), **spec.env})
    os.environ.update(interfaces(info, os.environ))
    faulthandler.enable(all_threads=False)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # ranks are forked from one process, and would all draw the same numbers; Python reseeds its own
    warnings.filterwarnings(
        "ignore", "To exit: use", UserWarning
    )  # IPython's advice to who calls sys.exit()
    runtime.enter(info)
    sys.argv = ["ipykernel_launcher.py"]  # as in a notebook: usage lines of argparse begin so
    # what user code silences (``@sky.silent``) is not shown, and is in the log all the same
    log = os.open(spec.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    silence.sinks.update(stdout=log, stderr=log)
    bars.install()
    widgets.install()
    control = AgentControl(socket.socket(fileno=control_fd), spec.rank)
    rendezvous.attach(control, spec.generation)
    interruption.attach(
        spec.rank,
        lambda seconds, error: control.send(wire.HookEnded(spec.rank, seconds, error)),
        lambda there: control.send(wire.HookSet(spec.rank, there)),
    )
    control.on_interruption = lambda said: interruption.notify(
        interruption.Interruption(said.reason, said.ranks, spec.rank in said.ranks, said.at)
    )
    reporting.attach(lambda rows: control.send(wire.Reported(spec.rank, metrics.packed(rows))))
    try:
        hooks = Hooks(spec.plugins, info)
    except Exception as problem:
        _report_failure(control, problem)
        return 1
    context.enter(context.Context(control, hooks, info, spec.store, spec.log, base_env))
    _run_engine(spec)
    return 0


def _report_failure(control: AgentControl, problem: BaseException) -> None:
    tb = tracebacks.telling(problem.__traceback__, contextlib.__file__)
    text = "".join(traceback.format_exception(type(problem), problem, tb))
    control.send(
        wire.RankFailed(control.rank, type(problem).__name__, tracebacks.message(problem), text)
    )


def _run_engine(spec: wire.RankSpec) -> None:
    config = Config()
    config.IPEngine.enable_nanny = False  # the agent watches, at no cost per rank
    config.IPEngine.max_heartbeat_misses = 0
    config.IPEngine.url_file = spec.engine_file
    config.IPEngine.log_level = logging.CRITICAL
    config.IPEngine.timeout = 60.0
    config.HistoryManager.enabled = False
    config.ProfileDir.location = spec.profile
    engine = RankEngineApp.instance(config=config, ident=os.environ["SKYMAGIC_IDENT"])
    engine.initialize([])
    engine.log.setLevel(logging.CRITICAL)  # else each message makes records that no handler takes
    engine.start()


def _open_streams(writers: list[int]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in zip([null, *writers], range(3), strict=True):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    open_streams()
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))


# -- A rank's standard output and error as Python code writes them: in one order ---------------------------------------


class StderrWriter(io.BufferedIOBase):
    """Standard error of Python code, as frames in the pipe of standard output: what is written to both reaches the agent in its order.

    Where descriptor 2 leads elsewhere (a silenced cell, a closed pipe), text goes there. Nothing is held back: io.BufferedWriter would
    refuse a signal handler that writes amid a write of its own thread, as a hook does amid a progress bar.
    """

    name, mode = "<stderr>", "wb"

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._pipe = os.dup(1)
        self._places = [(fd, _place(fd)) for fd in (2, self._pipe)]

    def writable(self) -> bool:
        """True: the stream takes text at any time."""
        return True

    def fileno(self) -> int:
        """For child processes and C libraries, which know nothing of frames."""
        return 2

    def write(self, text: bytes | bytearray | memoryview) -> int:  # type: ignore[override]  # any buffer
        """Write all of it."""
        data = bytes(text)
        for piece in (data[start : start + MOST] for start in range(0, len(data), MOST)):
            if any(_place(fd) != place for fd, place in self._places):
                os.write(2, piece)
            else:
                with contextlib.suppress(
                    Exception
                ):  # a line of standard output that has no end yet comes first
                    self._output.flush()
                os.write(self._pipe, frame(piece))
        return len(data)


def open_streams() -> None:
    """Make Python's own streams of descriptors 1 and 2."""
    sys.stdout = text_stream(1)
    writer = StderrWriter(sys.stdout)
    sys.stderr = io.TextIOWrapper(
        writer, encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def _place(fd: int) -> tuple[int, int] | None:
    """What a descriptor leads to; None where it is closed."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino
