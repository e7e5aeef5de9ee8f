"""The kernel of a rank: an ipykernel without sockets that carries out orders.

It is made in the manner of `ipykernel.inprocess`. Orders arrive over the rank's control socket
(`wire.agent.Request`) and say what to bind, run and send back; the outcome returns the same way.
Output goes to the agent: text through the rank's pipes, displays over the control socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from os import EX_SOFTWARE, _exit, write
from time import monotonic
from time import time as wall_clock
from types import SimpleNamespace
from typing import Any

import skymagic.kernels.rank.no_debugger  # noqa: F401  # before ipykernel

# isort: split
from ipykernel.ipkernel import IPythonKernel
from traitlets import Type

from skymagic.kernels import network, stacks
from skymagic.kernels.rank import context, gpu, tracebacks
from skymagic.kernels.rank.interrupts import Interrupts, hide_handler_frames
from skymagic.kernels.rank.missing import missing_files
from skymagic.kernels.rank.namespace import BindError, RankNamespace
from skymagic.kernels.rank.profiling import profiled
from skymagic.kernels.rank.refusals import INPUT_REFUSED, refuse_debuggers, refuse_launchers
from skymagic.kernels.rank.shell import Flusher, RankShell, Stdio, flush_text
from skymagic.kernels.rank.tracebacks import PostMortem
from skymagic.kernels.rank.variable_export import define_in_children, pack_for_ranks
from skymagic.runtime import info as runtime
from skymagic.runtime import rendezvous, reporting, silence, usage
from skymagic.wire import agent as wire
from skymagic.wire import debug_log
from skymagic.wire.order import (
    LAST_VALUE,
    NOT_DEFINED,
    SOURCE_NAME,
    Debug,
    Lend,
    Order,
    Rejoin,
    RunCell,
)
from skymagic.wire.outcome import Failure, Outcome, Recollection
from skymagic.wire.processes import UNFIT
from skymagic.wire.typed import JsonObject, plain
from skymagic.wire.values import BindOrder, PackedValue

logger = logging.getLogger(__name__)


def end_process(problem: BaseException | None) -> None:
    """End this process, whose kernel cannot reply any more, and log the reason.

    It uses the functions of `os` as they were at the rank's start, because a cell may have replaced
    them.
    """
    reason = "no reply was made" if problem is None else f"{type(problem).__name__}: {problem}"
    with contextlib.suppress(Exception):
        write(2, f"{UNFIT} ({reason})\n".encode(errors="replace"))
    _exit(EX_SOFTWARE)


def log_whole(log: str, name: str, message: str) -> None:
    """Write an error's message, which is too long to be sent, to the rank's log."""
    flush_text()
    with contextlib.suppress(OSError), open(log, "a", errors="backslashreplace") as file:
        file.write(f"{name}: {message}\n")


class RunMemory:
    """Record of the current or latest run, for a notebook that takes over."""

    def __init__(self) -> None:
        self._last = Recollection()
        self._began = monotonic()

    def begin(self, order: RunCell) -> None:
        """Record the start of a run; its values are not kept. Called on the control thread."""
        if order.run:
            self._began = monotonic()
            self._last = Recollection(order=replace(order, manifest=BindOrder()))

    def end(self, order: RunCell, outcome: Outcome) -> None:
        """Record the end of a run."""
        if order.run and order.run == self._last.run:
            self._last = replace(
                self._last,
                outcome=outcome,
                ended_at=wall_clock(),
                seconds=monotonic() - self._began,
                step=reporting.last_step(),
            )

    def recall(self) -> Recollection:
        """Return the record and the process group's generation; called on the control thread.

        The time since the run began is a duration, because the notebook's clock may differ.
        """
        last = self._last
        seconds = monotonic() - self._began if last.outcome is None else last.seconds
        return replace(last, seconds=seconds, generation=rendezvous.generation())


class RankKernel(IPythonKernel):
    """Kernel that carries out orders, one after another; everything else is ipykernel's.

    The forkserver creates it, so that ranks share its memory; `attach` makes it a rank's.
    """

    shell_class = Type(RankShell)
    shell_channel_thread: Any
    interrupts: Interrupts

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._parent: JsonObject = {}
        """Stands in for the Jupyter message that would have started the cell."""
        # Out[…] would keep every result alive, GPU memory included. A cache_size of 0 is read when
        # the hook is created, and would disable `_` too.
        self.shell.displayhook.do_full_cache = False
        self._result: Any = None
        self.busy = False
        self._post_mortem: PostMortem | None = None
        """Debugger on the frames of the last cell's error, which it keeps alive."""
        self.runs = RunMemory()
        self.shell.events.register("post_run_cell", self._keep_result)

    def attach(self, rank: context.Context) -> None:
        """Become the kernel of a rank, in its process."""
        # ipykernel 7 asks it whether a top-level await runs on the main thread
        self.shell_channel_thread = SimpleNamespace(parent_thread=threading.main_thread())
        self._context = rank
        self._namespace = RankNamespace(
            self.shell.user_ns, rank.store, rank.info.rank, rank.info.node
        )
        self.shell.compile.compiled = self._namespace.reads.add_compiled
        self._stdio = Stdio()
        self._flusher = Flusher()
        self.interrupts = Interrupts(self)
        # open as long as the process
        self._stack_file = open(f"{rank.log}.stack", "ab", buffering=0)  # noqa: SIM115
        stacks.dump_stack_on_signal(self._stack_file)
        hide_handler_frames()
        refuse_debuggers()
        refuse_launchers()
        define_in_children(self.shell.user_ns)

    def _keep_result(self, result: Any) -> None:
        self._result = result

    def get_parent(self, channel: str | None = None) -> JsonObject:
        """Return a header with the request's id, for libraries that ask for Jupyter's message."""
        return self._parent

    def raw_input(self, prompt: str = "") -> str:
        raise RuntimeError(INPUT_REFUSED)

    def getpass(self, prompt: str = "", stream: Any = None) -> str:
        raise RuntimeError(INPUT_REFUSED)

    def release(self) -> int:
        """Release the main thread from a collective; called on the control thread."""
        self._context.freed = self.busy and not self._context.outside_groups
        logger.info("main thread is released from collectives: freed=%s", self._context.freed)
        # a wait for a rendezvous value must end too
        self._context.control.cancel(self._context.freed)
        return self._context.hooks.release() if self._context.freed else 0

    async def carry_out(self, request: wire.Request, order: Order) -> None:
        """Carry out an order, and send its outcome.

        If that fails, the process ends: the notebook would wait for this rank forever.
        """
        failure: BaseException | None = None
        try:
            self.pre_handler_hook()
            header = {"msg_id": request.request, "msg_type": "execute_request", "session": ""}
            self._parent = {"header": header}
            self.shell.set_parent(self._parent)
            try:
                outcome = await self._serve(request, order)
            except BaseException as problem:
                outcome = self._failed(problem)
            rank = self._context.info.rank
            finished = wire.OrderFinished(rank, request.request, plain(outcome))
            self._context.control.send(finished)
            self.post_handler_hook()
            return
        except BaseException as problem:
            failure = problem
        logger.error(
            "process ends, because an order was not carried out: error=%s", type(failure).__name__
        )
        end_process(failure)

    async def _serve(self, request: wire.Request, order: Order) -> Outcome:
        rank = self._context.info.rank
        cell = order.execution_count if isinstance(order, RunCell) else 0
        visible = rank in order.visible_ranks
        self._context.control.send(
            wire.BeginOutput(rank, request.request, visible, order.screen_limit, cell, request.run)
        )
        logger.info("order begins: kind=%s run=%s cell=%s", type(order).__name__, order.run, cell)
        self._context.freed, self.busy = False, True
        self._context.control.cancel(False)
        self.interrupts.begin()
        reporting.begin()
        usage.begin(self._context.info.node)
        try:
            with (
                runtime.participation(order.ranks, order.run),
                self._context.hooks.around_run(),
                self._flusher,
            ):
                try:
                    self.interrupts.allowed = isinstance(order, RunCell | Debug)
                    outcome = await self._by_kind(order, request.source)
                finally:
                    self.interrupts.allowed = False
        except BaseException as problem:  # an interrupt between two lines of this code
            self.interrupts.allowed = False
            outcome = self._failed(problem)
        self.busy = False
        debug_log.protect()  # the cell may have configured logging
        logger.info(
            "order ends: kind=%s run=%s status=%s error=%s interrupted=%s",
            type(order).__name__,
            order.run,
            "ok" if outcome.failure is None else "error",
            outcome.failure and outcome.failure.ename,
            self.interrupts.was_raised,
        )
        silence.end_all()  # in case the cell left a silenced block open
        self._stdio.restore()
        flush_text()
        reporting.flush()
        if isinstance(order, RunCell):
            self.runs.end(order, outcome)
        # after all output, because the agent then closes the request
        self._context.control.send(wire.EndOutput(rank))
        return outcome

    def pre_handler_hook(self) -> None:
        """Let interrupts reach cells only, never the code that cleans up after them."""
        signal.signal(signal.SIGINT, self.interrupts.on_sigint)
        stacks.dump_stack_on_signal(self._stack_file)

    def post_handler_hook(self) -> None:
        """Ignore interrupts between cells."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    @contextlib.contextmanager
    def _cancel_on_sigint(self, future: asyncio.Task[Any]) -> Iterator[None]:
        """Replace ipykernel's SIGINT handling around a cell that awaits.

        Its own handler would neither wake an idle event loop nor interrupt code that does not
        await.
        """
        self.interrupts.awaited = future
        try:
            yield
        finally:
            self.interrupts.awaited = None

    async def _by_kind(self, order: Order, source: str) -> Outcome:
        if isinstance(order, Rejoin):
            self._forget_failure()
            # if a group is formed, the plugin frees the memory, once it has aborted the GPU's work
            if not order.form:
                gpu.free_memory()
            if (info := order.infos.get(self._context.info.rank)) is not None:
                # the pool was resized: this rank's new position in it
                self._context.info = self._context.hooks.info = runtime.InstanceInfo.from_plain(
                    info
                )
                os.environ.update(network.environment(self._context.info))
                runtime.enter(self._context.info)
            hooks = self._context.hooks
            notes = hooks.rejoin(order.generation) if order.form else hooks.settle()
            return Outcome(notes=tuple(notes))
        if isinstance(order, Lend):
            return Outcome(lent=pack_for_ranks(self._namespace, order.names, order.held))
        if isinstance(order, Debug):
            if self._post_mortem is not None:
                self._post_mortem.command(order.command)
            return Outcome(inspectable=self._post_mortem is not None)
        outcome, bound = Outcome(), False
        # the frames of the last cell's error can no longer be inspected
        if self._post_mortem is not None:
            tracebacks.clear_frames(self._post_mortem.problem)
            self._post_mortem = None
            gpu.free_memory()
        self.shell.displayhook.bound_outputs = ()
        try:
            # for the names of these cells in tracebacks
            self.shell.compile._filename_map.update(order.manifest.cells)
            self._namespace.bind(order.manifest)
            self.shell.displayhook.bind_shown_values(order.manifest.shown)
            bound = True
            source = self.shell.user_ns.pop(SOURCE_NAME, source)
            logger.debug("variables are bound: run=%s", order.run)
            outcome = await self._run(order, source)
        except BindError as problem:
            outcome = self._failed(problem, while_binding=True)
        except BaseException as problem:  # an interrupt between binding and running
            outcome = self._failed(problem)
        self._namespace.drop_temporary(order.manifest)
        return replace(
            outcome,
            bound=bound,
            changes=self._namespace.changes(self.shell.displayhook.bound_outputs),
            joined=self._context.hooks.are_intact(),
            interrupted=outcome.interrupted or self.interrupts.was_raised,
            stopped_at=self.interrupts.stopped_at,
            collectives=self._context.hooks.sequence(),
        )

    def _forget_failure(self) -> None:
        """Release the last error's frames, which hold objects that use the broken group."""
        self._result = None
        self.shell.InteractiveTB.tb = self.shell.last_execution_result = None
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)

    async def _run(self, order: RunCell, source: str) -> Outcome:
        shell = self.shell
        shell.execution_count = order.execution_count
        shell.compile.flags |= order.compiler_flags
        # drop references, so that this cell can free objects that an earlier one has shown
        shell.displayhook.value = self._result = shell.last_execution_result = None
        shell.displayhook.cell = source
        shell._last_traceback = None
        rank = self._context.info.rank
        try:
            with profiled(rank in order.profile, rank) as profile:
                reply = await self.do_execute(source, False, False)
        except Exception:  # ipykernel fails on an exception whose __str__ raises
            if self._result is None or self._result.error_in_exec is None:
                raise
            reply = {"status": "error", "traceback": shell._last_traceback}
        result = self._result
        error = result.error_before_exec or result.error_in_exec if result is not None else None
        if reply["status"] != "ok" or error is not None:
            outcome = self._failed(
                error, lines=reply.get("traceback") or [], ename=reply.get("ename")
            )
            packed_profile = self._pack_profile(order, profile)
            # a rank stopped because of another one has no error of interest; its frames may hold
            # the broken group
            stopped = self._context.freed or self.interrupts.was_raised
            if error is not None and error.__traceback__ is not None and not stopped:
                with contextlib.suppress(Exception):  # a cell may have broken what pdb needs
                    self._post_mortem = PostMortem(error, shell.compile._filename_map)
            gpu_lost = gpu.is_device_lost(error)
            if self._post_mortem is None:
                tracebacks.clear_frames(error)
            return replace(outcome, profile=packed_profile, gpu_lost=gpu_lost)
        if shell._last_traceback:  # an error that does not fail a cell, such as one in a __repr__
            print("\n".join(shell._last_traceback), file=sys.stderr)
        names = {name: shell.user_ns[name] for name in order.gather if name in shell.user_ns}
        if order.value_ranks:
            names[LAST_VALUE] = shell.displayhook.value
        senders = {
            **dict.fromkeys(order.gather, order.gather_ranks),
            LAST_VALUE: order.value_ranks,
        }
        own_names = {name for name, ranks in senders.items() if rank in ranks}
        undefined = PackedValue(error=NOT_DEFINED, type="NameError")
        missing = [name for name in order.gather if name in own_names and name not in names]
        with self._namespace.gathered(names, own_names) as parts:
            values = self._namespace.pack(
                {name: names[name] for name in names if name in own_names}, parts
            )
        shell.displayhook.value = None
        return Outcome(
            values={**values, **dict.fromkeys(missing, undefined)},
            profile=self._pack_profile(order, profile),
        )

    def _pack_profile(self, order: RunCell, profile: dict[str, object]) -> PackedValue | None:
        if self._context.info.rank not in order.profile:
            return None
        return self._namespace.pack({"profile": profile})["profile"]

    def _failed(
        self,
        problem: BaseException | None,
        *,
        lines: list[str] | None = None,
        ename: str | None = None,
        while_binding: bool = False,
    ) -> Outcome:
        message, packed = tracebacks.message(problem), None
        if tracebacks.is_too_long(message):
            log_whole(self._context.log, ename or type(problem).__name__, message)
        elif problem is not None and not while_binding:
            packed = self._namespace.pack_exception(problem)
        failure = Failure(
            ename=ename or type(problem).__name__,
            evalue=tracebacks.shortened(message),
            traceback=tuple(tracebacks.shortened_lines(lines or [])),
            exception=packed,
            missing="" if while_binding else self._namespace.missing(problem),
            missing_files=None if while_binding else missing_files(problem),
            freed=self._context.freed,
            cause_timeout=getattr(problem, "cause_timeout", 0.0),
        )
        # an error after an interrupt is a consequence of it
        interrupted = self.interrupts.was_raised or isinstance(
            problem, (KeyboardInterrupt, asyncio.CancelledError)
        )
        return Outcome(failure=failure, interrupted=interrupted)
