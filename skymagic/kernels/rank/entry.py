"""Entry point of a forked rank: environment, streams, control thread, engine.

The forkserver imports this module before it forks, so that a rank finds everything loaded.
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
from skymagic.wire import debug_log, metrics
from skymagic.wire.streams import MAX_TEXT_BYTES, frame

logger = logging.getLogger(__name__)

# ipyparallel has no trait for the kernel's class, but looks it up here.
engine_app.Kernel = RankKernel

# imported here, because each rank would import them at its start
for _late in (
    "tornado.platform.asyncio",
    "IPython.core.completerlib",
    "IPython.extensions.storemagic",
):
    importlib.import_module(_late)

# ipykernel imports debugpy for the front end's debugger, which cannot reach a rank; that would take
# half of a rank's start.
_no_debugger = types.ModuleType("ipykernel.debugger", "What a rank has in its place")
_no_debugger.__dict__.update(_is_debugpy_available=False, Debugger=object)
sys.modules[_no_debugger.__name__] = _no_debugger


class RankEngineApp(engine_app.IPEngine):  # type: ignore[misc]  # untyped base
    """ipyparallel's engine with a rank's streams and hooks."""

    def redirect_output(self, iopub_socket: Any) -> None:
        """Leave Python's streams alone: the agent reads the file descriptors."""

    def init_signal(self) -> None:
        """Install no handlers: ranks end with their control socket.

        Child processes forked by user code would inherit handlers, and print there.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def complete_registration(self, msg: Any, connect: Any, maybe_tunnel: Any) -> None:
        """Register, and run plugins' hooks while the controller waits for the first heartbeat."""
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
            logger.debug("plugins are set up: plugins=%s", [p.name for p in rank.hooks.plugins])
            if "MASTER_PORT" not in os.environ:  # no plugin has its own store
                os.environ["MASTER_PORT"] = str(rank.info.head_port)
        except BaseException as problem:
            _report_failure(rank.control, problem)
            self.loop.add_callback(self.loop.stop)
            return
        logger.info("rank is registered and ready for cells")
        gc.freeze()  # later collections only look at objects of cells
        rank.control.send(wire.RankReady(rank.info.rank))

    def start(self) -> None:
        """Serve until stopped, then let the plugins clean up."""
        self.loop.add_callback(self.register)
        # an idle rank would sleep through a signal that arrives just before it waits
        self.loop.add_handler(signal_pipe(), lambda woken, _: os.read(woken, 4096), self.loop.READ)
        self.loop.start()
        logger.info("rank stops and runs its plugins' teardown")
        context.current().hooks.leave()


def main(spec: wire.RankSpec, fds: list[int]) -> int:
    """Become a rank, and return its exit code when it is stopped."""
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
        # ranks are forked from one process, and would all draw the same numbers; Python reseeds its
        # own generator
        numpy.random.seed()
    # IPython's advice after sys.exit()
    warnings.filterwarnings("ignore", "To exit: use", UserWarning)
    runtime.enter(info)
    debug_log.setup_beside(f"rank-{spec.rank}", node=info.node, rank=spec.rank)
    debug_log.set_level(spec.log_level)
    logger.info("rank process started: pid=%s generation=%s", os.getpid(), spec.generation)
    # as in a notebook, because argparse prints it in usage lines
    sys.argv = ["ipykernel_launcher.py"]
    # output that user code silences (``@sky.silent``) is hidden, but still goes to the log
    log = os.open(spec.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    silence.sinks.update(stdout=log, stderr=log)
    bars.install()
    widgets.install()
    control = AgentControl(socket.socket(fileno=control_fd), spec.rank)
    rendezvous.attach(control, spec.generation)
    interruption.attach(
        spec.rank,
        lambda seconds, error: control.send(wire.HookEnded(spec.rank, seconds, error)),
        lambda there: control.send(wire.HookPresence(spec.rank, there)),
    )
    control.on_interruption = lambda said: interruption.notify(
        interruption.Interruption(said.reason, said.ranks, spec.rank in said.ranks, said.at)
    )
    reporting.attach(lambda rows: control.send(wire.MetricsReport(spec.rank, metrics.packed(rows))))
    try:
        hooks = Hooks(spec.plugins, info)
    except Exception as problem:
        _report_failure(control, problem)
        return 1
    context.enter(context.Context(control, hooks, info, spec.store, spec.log, base_env))
    _run_engine(spec)
    return 0


def _report_failure(control: AgentControl, problem: BaseException) -> None:
    logger.warning("rank cannot start: error=%s", type(problem).__name__)
    tb = tracebacks.user_frames(problem.__traceback__, contextlib.__file__)
    text = "".join(traceback.format_exception(type(problem), problem, tb))
    control.send(
        wire.RankFailed(control.rank, type(problem).__name__, tracebacks.message(problem), text)
    )


def _run_engine(spec: wire.RankSpec) -> None:
    config = Config()
    config.IPEngine.enable_nanny = False  # the agent watches ranks, at no cost per rank
    config.IPEngine.max_heartbeat_misses = 0
    config.IPEngine.url_file = spec.engine_file
    config.IPEngine.log_level = logging.CRITICAL
    config.IPEngine.timeout = 60.0
    config.HistoryManager.enabled = False
    config.ProfileDir.location = spec.profile
    engine = RankEngineApp.instance(config=config, ident=os.environ["SKYMAGIC_IDENT"])
    engine.initialize([])
    # otherwise each message creates log records that no handler takes
    engine.log.setLevel(logging.CRITICAL)
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


# -- standard output and error of Python code, in one order ----------------------------------------


class StderrWriter(io.BufferedIOBase):
    """Standard error of Python code, sent as frames through the pipe of standard output.

    Text written to both streams reaches the agent in order. If descriptor 2 leads elsewhere (a
    silenced cell, a closed pipe), text goes there. There is no buffer: io.BufferedWriter would
    refuse a signal handler that writes during a write of the same thread, as a hook does during a
    progress bar.
    """

    name, mode = "<stderr>", "wb"

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._pipe = os.dup(1)
        self._places = [(fd, _place(fd)) for fd in (2, self._pipe)]

    def writable(self) -> bool:
        """Return True: the stream always accepts text."""
        return True

    def fileno(self) -> int:
        """Return descriptor 2, for child processes and C libraries, which do not write frames."""
        return 2

    def write(self, text: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Write all of the data."""
        data = bytes(text)
        for piece in (
            data[start : start + MAX_TEXT_BYTES] for start in range(0, len(data), MAX_TEXT_BYTES)
        ):
            if any(_place(fd) != place for fd, place in self._places):
                os.write(2, piece)
            else:
                # flush an incomplete line of standard output first
                with contextlib.suppress(Exception):
                    self._output.flush()
                os.write(self._pipe, frame(piece))
        return len(data)


def open_streams() -> None:
    """Create Python's own streams of descriptors 1 and 2."""
    sys.stdout = text_stream(1)
    writer = StderrWriter(sys.stdout)
    sys.stderr = io.TextIOWrapper(
        writer, encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def _place(fd: int) -> tuple[int, int] | None:
    """Return the device and inode of a descriptor, or None if it is closed."""
    try:
        info = os.fstat(fd)
    except OSError:
        return None
    return info.st_dev, info.st_ino
