"""What a forked rank does: its environment, its streams, its control thread, its engine.

Imported by the forkserver before it forks, so that a rank finds everything loaded.
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import traceback
import types
import warnings
from typing import Any

import ipyparallel.engine.app as engine_app
from traitlets.config import Config

from skymagic.data.values import descriptions
from skymagic.kernels import stacks
from skymagic.kernels.fork import signal_pipe
from skymagic.kernels.network import environment, interfaces
from skymagic.kernels.rank import comms, context, gpu, importer, tracebacks
from skymagic.kernels.rank.comms import relay
from skymagic.kernels.rank.context import AgentControl, Hooks
from skymagic.kernels.rank.kernel import RankKernel
from skymagic.kernels.rank.shell import flush_text, refresh_widgets
from skymagic.kernels.rank.stdio import open_streams
from skymagic.runtime import info as runtime
from skymagic.runtime import interruption, rendezvous, reporting, silence
from skymagic.wire import agent as wire
from skymagic.wire import metrics

# ipyparallel has no trait for the kernel's class, but looks it up here.
engine_app.Kernel = RankKernel

# What each rank would import as it starts.
for _late in ("tornado.platform.asyncio", "IPython.core.completerlib", "IPython.extensions.storemagic"):
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
            variables=lambda: descriptions.described(kernel.shell.user_ns, kernel.shell.user_ns_hidden),
            installed=importer.installed_packages,
            rescan=importer.rescan_packages,
            recall=kernel.runs.recall,
            stop=lambda: self.loop.add_callback(self.loop.stop),
        )
        try:
            between = BetweenCells(kernel, self.loop)
            kernel.on_cell_end, rank.control.on_widget_input = between.cell_ended, between.received
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
    warnings.filterwarnings("ignore", "To exit: use", UserWarning)  # IPython's advice to who calls sys.exit()
    runtime.enter(info)
    sys.argv = ["ipykernel_launcher.py"]  # as in a notebook: usage lines of argparse begin so
    # what user code silences (``@sky.silent``) is not shown, and is in the log all the same
    log = os.open(spec.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    silence.sinks.update(stdout=log, stderr=log)
    _progress_bars_as_text()
    comms.install()
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
    control.send(wire.RankFailed(control.rank, type(problem).__name__, tracebacks.message(problem), text))


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


def _progress_bars_as_text() -> None:
    """tqdm.auto takes a rank for a notebook and would make a widget, which a saved notebook cannot show."""
    plain = types.ModuleType("tqdm.autonotebook", "tqdm's choice on a rank: text")
    plain.__file__ = None  # who looks at all modules asks for it, and would import tqdm
    plain.__getattr__ = lambda name: getattr(importlib.import_module("tqdm.std"), name)  # type: ignore[method-assign]
    sys.modules.setdefault(plain.__name__, plain)


INTERVAL = 0.05
"""Seconds between two messages on what has changed."""
MAX_WAITING = 1000
"""Messages from front ends that wait at once; of more, the oldest are dropped."""


class BetweenCells:
    """Handles what front ends send to the widgets of one rank, on the idle main thread: a callback must not run in the middle of a cell."""

    def __init__(self, kernel: Any, loop: Any) -> None:
        self._kernel, self._loop = kernel, loop
        self._waiting: list[wire.WidgetInput] = []
        self._lock = threading.Lock()
        self._due = False
        relay.wake = self._wake

    def received(self, message: wire.WidgetInput) -> None:
        """A front end's message, or the agent's own, that the notebook is back; called on the control thread."""
        if message.model:
            with self._lock:
                last = self._waiting[-1] if self._waiting else None
                if last is not None and _values(last) and _values(message) and last.model == message.model:
                    last.data["state"] |= message.data["state"]  # of one slider the newest value
                else:
                    self._waiting = [*self._waiting[1 - MAX_WAITING :], message]
        else:
            relay.tell_all()
        self._loop.add_callback(self._handle)

    def cell_ended(self) -> None:
        """Handle what has come while a cell ran."""
        if self._waiting:
            self._loop.add_callback(self._handle)

    def _handle(self) -> None:
        """Hand what waits to its widgets, whose callbacks run."""
        if self._kernel.busy:  # a cell that awaits
            return
        from comm import get_comm_manager

        with self._lock:
            waiting, self._waiting = self._waiting, []
        shell, comms = self._kernel.shell, get_comm_manager().comms
        shell._last_traceback = None
        for one in waiting:
            if one.model in comms:
                buffers = [base64.b64decode(each) for each in one.buffers]
                content = {"comm_id": one.model, "data": one.data}
                comms[one.model].handle_msg({"header": {}, "content": content, "buffers": buffers})
        if shell._last_traceback:  # of a callback; nobody looks but at the log
            print("\n".join(shell._last_traceback), file=sys.stderr)
        flush_text()

    def _wake(self) -> None:
        if not self._due:
            self._due = True
            self._loop.add_callback(self._loop.call_later, INTERVAL, self._flush)

    def _flush(self) -> None:
        self._due = False
        if not self._kernel.busy:  # else the cell's flusher sends it
            refresh_widgets()


def _values(message: wire.WidgetInput) -> bool:
    """Whether a message has new values, and no bytes."""
    return message.data.get("method") == "update" and not message.buffers
