"""Entry point of a forked rank: environment, streams, control thread, kernel.

The forkserver imports this module before it forks, so that a rank finds everything loaded.
"""

from __future__ import annotations

import asyncio
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
import warnings
from typing import TextIO

from traitlets.config import Config

from skymagic.data.values import descriptions
from skymagic.kernels import stacks
from skymagic.kernels.fork import signal_pipe
from skymagic.kernels.network import environment, interfaces
from skymagic.kernels.rank import bars, context, gpu, importer, tracebacks, widgets
from skymagic.kernels.rank.context import AgentControl, Hooks
from skymagic.kernels.rank.kernel import RankKernel, end_process
from skymagic.kernels.rank.shell import text_stream
from skymagic.runtime import info as runtime
from skymagic.runtime import interruption, rendezvous, reporting, silence
from skymagic.wire import agent as wire
from skymagic.wire import debug_log, metrics
from skymagic.wire.order import Order, RunCell, unpacked_order
from skymagic.wire.streams import MAX_TEXT_BYTES, frame

logger = logging.getLogger(__name__)

# imported here, because each rank would import them at its start
for _late in (
    "tornado.platform.asyncio",
    "IPython.core.completerlib",
    "IPython.extensions.storemagic",
):
    importlib.import_module(_late)
from ipykernel.kernelapp import IPKernelApp  # noqa: E402  # imports the debugger


class PreparedKernel:
    """The kernel of ranks that are not forked yet.

    Creating one takes 15 ms and 4 MB, which ranks share if the forkserver does it.

    Args:
        profile: an empty directory that serves as the IPython profile.
    """

    def __init__(self, profile: str) -> None:
        config = Config()
        config.HistoryManager.enabled = False
        config.ProfileDir.location = profile
        log = logging.getLogger("skymagic.rank")
        # otherwise each message creates log records that no handler takes
        log.setLevel(logging.CRITICAL)
        plain = dict(os.environ)
        self._kernel: RankKernel = RankKernel.instance(config=config, log=log)
        # Libraries look for it: ``%matplotlib`` finds the kernel through the application.
        self._application = IPKernelApp.instance(
            config=config, shell=self._kernel.shell, kernel=self._kernel, log=log
        )
        self._application.init_profile_dir()
        self._application.init_extensions()
        # what a kernel sets, such as TERM and PAGER, is for cells, not for what else is forked
        self._environment = {
            name: value for name, value in os.environ.items() if plain.get(name) != value
        }
        for name in self._environment:
            del os.environ[name]
        os.environ.update(plain)

    def attached(self, rank: context.Context) -> RankKernel:
        """Return the kernel, as that of a rank; called in the rank's process."""
        os.environ.update(self._environment)
        self._kernel.attach(rank)
        self._application.init_gui_pylab()
        self._application.init_code()
        return self._kernel


_prepared: PreparedKernel | None = None


def prepare(profile: str) -> None:
    """Create the kernel of the ranks that this process will fork."""
    global _prepared
    _prepared = PreparedKernel(profile)


class RankLoop:
    """Event loop of a rank, which carries out its requests one after another.

    Cells with a top-level ``await`` run on this loop, and tasks that they create continue between
    cells.
    """

    def __init__(self, kernel: PreparedKernel) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._requests: asyncio.Queue[tuple[wire.Request, Order]] = asyncio.Queue()
        sys.path.insert(0, "")  # as in a notebook: modules beside it can be imported
        self._kernel = kernel.attached(context.current())

    def run(self) -> None:
        """Carry out requests until stopped, then let the plugins clean up."""
        # No handlers of signals: a rank ends when its control socket closes, and child processes
        # that user code forks would inherit a handler, and print from it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # an idle rank would sleep through a signal that arrives just before it waits
        woken = signal_pipe()
        self._loop.add_reader(woken, os.read, woken, 4096)
        serving = self._loop.create_task(self._serve())
        self._loop.run_forever()
        logger.info("rank stops and runs its plugins' teardown: idle=%s", not serving.done())
        context.current().hooks.close()

    async def _serve(self) -> None:
        if not self._enter():
            self._loop.stop()
            return
        while True:
            await self._kernel.carry_out(*await self._requests.get())

    def _enter(self) -> bool:
        """Run the plugins' hooks and report that the rank is ready; return False if one failed."""
        kernel, rank = self._kernel, context.current()
        rank.control.procedures.update(
            release=kernel.release,
            interrupt=kernel.interrupts.repeat,
            leaving=kernel.interrupts.will_return,
            waits=kernel.interrupts.blocked_frames,
            joining=kernel.interrupts.joining,
            stacks=lambda: gpu.with_collective(stacks.of_main_thread(kernel)),
            variables=lambda: descriptions.described(
                kernel.shell.user_ns, kernel.shell.user_ns_hidden
            ),
            installed=importer.installed_packages,
            rescan=importer.rescan_packages,
            recall=kernel.runs.recall,
            stop=self._stop,
        )
        rank.control.on_request = self._on_request
        try:
            rank.hooks.enter()
            logger.debug("plugins are set up: plugins=%s", [p.name for p in rank.hooks.plugins])
            if "MASTER_PORT" not in os.environ:  # no plugin has started a store
                os.environ["MASTER_PORT"] = str(rank.info.head_port)
        except BaseException as problem:
            _report_failure(rank.control, problem)
            return False
        logger.info("rank is ready for cells")
        gc.freeze()  # later collections only look at objects of cells
        rank.control.send(wire.RankReady(rank.info.rank))
        return True

    def _stop(self) -> None:
        """End the event loop; called on the control thread, whose answer has no value."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _on_request(self, request: wire.Request) -> None:
        """Queue a request for the main thread; called on the control thread.

        From now on, a notebook that takes over learns of the run.
        """
        try:
            order = unpacked_order(request.order)
        except ValueError as problem:
            end_process(problem)
        else:
            if isinstance(order, RunCell):
                self._kernel.runs.begin(order)
            self._loop.call_soon_threadsafe(self._requests.put_nowait, (request, order))


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
        lambda is_present: control.send(wire.HookPresence(spec.rank, is_present)),
    )
    control.on_interruption = lambda notice: interruption.notify(
        interruption.Interruption(notice.reason, notice.ranks, spec.rank in notice.ranks, notice.at)
    )
    reporting.attach(lambda rows: control.send(wire.MetricsReport(spec.rank, metrics.packed(rows))))
    try:
        hooks = Hooks(spec.plugins, info)
    except Exception as problem:
        _report_failure(control, problem)
        return 1
    context.enter(context.Context(control, hooks, info, spec.store, spec.log, base_env))
    RankLoop(_prepared or PreparedKernel(spec.profile)).run()
    return 0


def _report_failure(control: AgentControl, problem: BaseException) -> None:
    logger.warning("rank cannot start: error=%s", type(problem).__name__)
    tb = tracebacks.user_frames(problem.__traceback__, contextlib.__file__)
    text = "".join(traceback.format_exception(type(problem), problem, tb))
    control.send(
        wire.RankFailed(control.rank, type(problem).__name__, tracebacks.message(problem), text)
    )


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
        self._places = [(fd, _file_identity(fd)) for fd in (2, self._pipe)]

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
            if any(_file_identity(fd) != place for fd, place in self._places):
                os.write(2, piece)
            else:
                # flush an incomplete line of standard output first
                with contextlib.suppress(Exception):
                    self._output.flush()
                os.write(self._pipe, frame(piece))
        return len(data)


def open_streams() -> None:
    """Create `sys.stdout` and `sys.stderr` for descriptors 1 and 2."""
    sys.stdout = text_stream(1)
    writer = StderrWriter(sys.stdout)
    sys.stderr = io.TextIOWrapper(
        writer, encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def _file_identity(fd: int) -> tuple[int, int] | None:
    """Return the device and inode of a descriptor, or None if it is closed."""
    try:
        info = os.fstat(fd)
    except OSError:
        return None
    return info.st_dev, info.st_ino
