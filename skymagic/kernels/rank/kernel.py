"""The kernel of a rank: an ipyparallel engine's kernel that carries out orders.

An order is the first line of the code that it is sent: what to bind, what to run, what to send back. The reply holds the outcome
as plain values; its status is always "ok", for ipyparallel would otherwise replace the outcome by an exception of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from os import EX_SOFTWARE, _exit, write
from time import time as wall_clock
from types import SimpleNamespace
from typing import Any

from ipyparallel.engine.kernel import IPythonParallelKernel
from traitlets import Type

from skymagic.kernels import network, stacks
from skymagic.kernels.rank import context, gpu, tracebacks
from skymagic.kernels.rank.interrupts import Interrupts, hide_handler_frames
from skymagic.kernels.rank.lending import define_in_children, lend
from skymagic.kernels.rank.missing import missing_files
from skymagic.kernels.rank.namespace import BindError, Namespace
from skymagic.kernels.rank.profiling import profiled
from skymagic.kernels.rank.refusals import INPUT_REFUSED, refuse_debuggers, refuse_launchers
from skymagic.kernels.rank.shell import Flusher, RankShell, Stdio, flush_text
from skymagic.kernels.rank.tracebacks import PostMortem
from skymagic.runtime import info as runtime
from skymagic.runtime import rendezvous, reporting, silence, usage
from skymagic.wire import agent as wire
from skymagic.wire.order import (
    LAST_VALUE,
    NOT_DEFINED,
    PREFIX,
    PROFILE,
    Debug,
    Lend,
    Order,
    Rejoin,
    RunCell,
    decode,
)
from skymagic.wire.processes import UNFIT


def end_process(problem: BaseException | None) -> None:
    """End this process, whose kernel can reply to nobody; its log says why. Functions of `os` are those of the rank's start."""
    why = "no reply was made" if problem is None else f"{type(problem).__name__}: {problem}"
    with contextlib.suppress(Exception):
        write(2, f"{UNFIT} ({why})\n".encode(errors="replace"))
    _exit(EX_SOFTWARE)


def log_whole(log: str, name: str, message: str) -> None:
    """Write into the log what is too long to be sent."""
    flush_text()
    with contextlib.suppress(OSError), open(log, "a", errors="backslashreplace") as file:
        file.write(f"{name}: {message}\n")


KEPT_ENDS = 10
"""How many runs a rank tells the end of."""


class RunMemory:
    """The run that goes on, or has ended last, for a notebook that takes over; and how the last few ended, for readers."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {"order": None, "outcome": None}
        self._ended: dict[
            str, dict[str, Any]
        ] = {}  # by number: readers may ask when the next one has begun

    def begin(self, order: RunCell) -> None:
        """A run begins: its number, and what was asked."""
        if order.run:
            self._last = {
                "order": {name: value for name, value in vars(order).items() if name != "manifest"},
                "outcome": None,
            }

    def end(self, order: RunCell, outcome: dict[str, Any]) -> None:
        """How it ended."""
        if self._last["order"] is None:
            return
        self._last = {
            **self._last,
            "outcome": outcome,
            "ended_at": wall_clock(),
            "step": reporting.last_step(),
        }
        words = {
            "status": outcome["status"],
            "interrupted": bool(outcome.get("interrupted")),
            "error": f"{outcome.get('ename')}: {outcome.get('evalue')}"[:500],
        }
        self._ended = dict([*self._ended.items(), (str(order.run), words)][-KEPT_ENDS:])

    def recall(self) -> dict[str, Any]:
        """Called on the control thread: all that is known, and the generation of the process group."""
        return {**self._last, "ended": self._ended, "generation": rendezvous.generation()}


@contextlib.contextmanager
def _parent_thread_known(kernel: RankKernel) -> Iterator[None]:
    """ipykernel 7 asks a thread that engines do not have whether a top-level await runs on the main thread."""
    missing = getattr(kernel, "shell_channel_thread", kernel) is None
    if missing:
        kernel.shell_channel_thread = SimpleNamespace(parent_thread=threading.main_thread())
    try:
        yield
    finally:
        if missing:
            kernel.shell_channel_thread = None


class RankKernel(IPythonParallelKernel):
    """Carries out orders; everything else is ipyparallel's."""

    shell_class = Type(RankShell)
    shell_channel_thread: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Out[…] would hold on to every result, GPU memory included. A cache_size of 0 is read when the hook is made, and ends `_` too.
        self.shell.displayhook.do_full_cache = False
        self._context = context.current()
        self._namespace = Namespace(
            self.shell.user_ns,
            self._context.store,
            self._context.info.rank,
            self._context.info.node,
        )
        self.shell.compile.compiled = self._namespace.reads.compiled
        self._stdio = Stdio()
        self._flusher = Flusher()
        self._result: Any = None
        self.busy = False
        self.interrupts = Interrupts(self)
        self._stack_file = open(f"{self._context.log}.stack", "ab", buffering=0)  # noqa: SIM115  # open as long as the process
        stacks.on_signal(self._stack_file)
        self._post_mortem: PostMortem | None = None
        """On the frames of the error with which the last cell has ended, which it keeps."""
        self.runs = RunMemory()
        self._answered_count = 0  # counts the requests that were replied to
        self._unanswered: BaseException | None = (
            None  # what has kept the kernel from replying to one
        )
        self.shell.events.register("post_run_cell", self._keep_result)
        hide_handler_frames()
        refuse_debuggers()
        refuse_launchers()
        define_in_children(self.shell.user_ns)

    def _keep_result(self, result: Any) -> None:
        self._result = result

    def _publish_execute_input(
        self, code: str, parent: dict[str, Any], execution_count: int
    ) -> None:
        """The notebook has the cell already."""

    def _publish_status(self, status: str, channel: str, parent: Any = None) -> None:
        """The agent says when a request is over, after its last output."""

    def raw_input(self, prompt: str = "") -> str:
        raise RuntimeError(INPUT_REFUSED)

    def getpass(self, prompt: str = "", stream: Any = None) -> str:
        raise RuntimeError(INPUT_REFUSED)

    def release(self) -> int:
        """Called on the control thread: let the main thread out of a collective."""
        self._context.freed = self.busy and not self._context.outside_groups
        self._context.control.cancel(self._context.freed)
        return self._context.hooks.release() if self._context.freed else 0

    async def dispatch_shell(self, *args: Any, **kwargs: Any) -> None:
        """Serve a request. ipykernel only logs what keeps it from that, and so nobody would ever hear of this rank again: it ends."""
        before = self._answered_count
        try:
            await super().dispatch_shell(*args, **kwargs)
        except Exception as problem:
            self._unanswered = problem
        if self._answered_count == before:
            end_process(self._unanswered)

    async def execute_request(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super().execute_request(*args, **kwargs)
        except Exception as problem:
            self._unanswered = problem
        else:
            self._answered_count += 1

    async def do_execute(
        self, code: str, silent: bool, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        if not code.startswith(PREFIX):
            reply: dict[str, Any] = await super().do_execute(code, silent, *args, **kwargs)
            return reply
        order, source = decode(code)
        try:
            outcome = await self._serve(order, source)
        except BaseException as problem:
            outcome = self._failure(problem)
        return {
            "status": "ok",
            "execution_count": 0,
            "user_expressions": {},
            "payload": [],
            "sky": outcome,
        }

    async def _serve(self, order: Order, source: str) -> dict[str, Any]:
        header = {key: str(value) for key, value in self.get_parent("shell")["header"].items()}
        rank = self._context.info.rank
        cell = order.execution_count if isinstance(order, RunCell) else 0
        visible = rank in order.visible_ranks
        self._context.control.send(
            wire.BeginOutput(rank, header, visible, order.screen_limit, cell, order.run)
        )
        self._context.freed, self.busy = False, True
        self._context.control.cancel(False)
        self.interrupts.begin()
        if isinstance(order, RunCell):
            self.runs.begin(order)
        reporting.begin()
        usage.begin(self._context.info.node)
        try:
            with (
                runtime.taking_part(order.ranks, order.run),
                self._context.hooks.around_run(),
                self._flusher,
                _parent_thread_known(
                    self
                ),  # an interrupt may not tear it: no later order would be heard
            ):
                try:
                    self.interrupts.allowed = isinstance(order, RunCell | Debug)
                    outcome = await self._carry_out(order, source)
                finally:
                    self.interrupts.allowed = False
        except BaseException as problem:  # an interrupt between two lines of ours
            self.interrupts.allowed = False
            outcome = self._failure(problem)
        self.busy = False
        silence.end_all()  # a silence that the cell left open
        self._stdio.restore()
        flush_text()
        reporting.flush()
        if isinstance(order, RunCell):
            self.runs.end(order, outcome)
        self._context.control.send(
            wire.EndOutput(rank)
        )  # after all that shows something: the agent closes the request
        return outcome

    def pre_handler_hook(self) -> None:
        """Let an interrupt fall into cells alone: what tidies up after them must not be torn."""
        signal.signal(signal.SIGINT, self.interrupts.fall)
        stacks.on_signal(self._stack_file)

    def post_handler_hook(self) -> None:
        """Between cells there is nothing to interrupt."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    @contextlib.contextmanager
    def _cancel_on_sigint(self, future: asyncio.Task[Any]) -> Iterator[None]:
        """Entered by ipykernel around a cell that awaits. Its own handler would neither wake an idle event loop nor interrupt
        what does not await."""
        self.interrupts.awaited = future
        try:
            yield
        finally:
            self.interrupts.awaited = None

    async def _carry_out(self, order: Order, source: str) -> dict[str, Any]:
        if isinstance(order, Rejoin):
            self._forget_failure()
            if (
                not order.form
            ):  # else the plugin frees it: not before it has aborted what runs on the GPU
                gpu.free_memory()
            if (info := order.infos.get(str(self._context.info.rank))) is not None:
                # the pool has another number of nodes: this rank's place in it
                self._context.info = self._context.hooks.info = runtime.InstanceInfo.from_plain(
                    info
                )
                os.environ.update(network.environment(self._context.info))
                runtime.enter(self._context.info)
            hooks = self._context.hooks
            return {
                "status": "ok",
                "notes": hooks.rejoin(order.generation) if order.form else hooks.settle(),
            }
        if isinstance(order, Lend):
            return {"status": "ok", **lend(self._namespace, order.names, order.held)}
        if isinstance(order, Debug):
            if self._post_mortem is not None:
                self._post_mortem.command(order.command)
            return {"status": "ok", "kept": self._post_mortem is not None}
        outcome: dict[str, Any] = {"status": "ok", "bound": False, "joined": True}
        if (
            self._post_mortem is not None
        ):  # nobody can look any more at what the frames of the last cell's error hold
            tracebacks.clear_frames(self._post_mortem.problem)
            self._post_mortem = None
            gpu.free_memory()
        self.shell.displayhook.bound = ()
        try:
            self.shell.compile._filename_map.update(
                order.manifest.get("cells", {})
            )  # tracebacks name these cells
            self._namespace.bind(order.manifest)
            self.shell.displayhook.know_shown(order.manifest.get("shown", ()))
            outcome["bound"] = True
            await self._run(order, source, outcome)
        except BindError as problem:
            outcome.update(self._failure(problem, phase="bind"))
        except BaseException as problem:  # an interrupt between binding and running
            outcome.update(self._failure(problem))
        self._namespace.drop_temporary(order.manifest)
        outcome |= self._namespace.changes(self.shell.displayhook.bound)
        outcome["joined"] = self._context.hooks.joined()
        outcome.setdefault("interrupted", self.interrupts.fallen)
        outcome["stopped_at"] = self.interrupts.stopped_at
        outcome["collectives"] = self._context.hooks.sequence()
        return outcome

    def _forget_failure(self) -> None:
        """Let go of the last error's frames, which hold what the group that broke was used with."""
        self._result = None
        self.shell.InteractiveTB.tb = self.shell.last_execution_result = None
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)

    async def _run(self, order: RunCell, source: str, outcome: dict[str, Any]) -> None:
        shell = self.shell
        shell.execution_count = order.execution_count
        shell.compile.flags |= order.compiler_flags
        # what an earlier cell has shown may be freed by this one
        shell.displayhook.value = self._result = shell.last_execution_result = None
        shell.displayhook.cell = source
        shell._last_traceback = None
        rank = self._context.info.rank
        try:
            with profiled(rank in order.profile, rank) as profile:
                reply = await super().do_execute(source, False, False)
        except Exception:  # ipykernel fails over an exception whose __str__ raises
            if self._result is None or self._result.error_in_exec is None:
                raise
            reply = {"status": "error", "traceback": shell._last_traceback}
        result = self._result
        error = result.error_before_exec or result.error_in_exec if result is not None else None
        if reply["status"] != "ok" or error is not None:
            outcome.update(
                self._failure(error, lines=reply.get("traceback") or [], ename=reply.get("ename"))
            )
            if rank in order.profile:
                outcome["values"] = self._namespace.pack({PROFILE: profile})
            # one that was stopped because of another rank has nothing to tell; its frames may hold the broken group
            stopped = self._context.freed or self.interrupts.fallen
            if error is not None and error.__traceback__ is not None and not stopped:
                with contextlib.suppress(Exception):  # a cell may have broken what pdb needs
                    self._post_mortem = PostMortem(error, shell.compile._filename_map)
            outcome["gpu_lost"] = gpu.lost(error)
            if self._post_mortem is None:
                tracebacks.clear_frames(error)
            return
        if shell._last_traceback:  # of something that does not fail a cell, such as a __repr__
            print("\n".join(shell._last_traceback), file=sys.stderr)
        names = {name: shell.user_ns[name] for name in order.gather if name in shell.user_ns}
        if order.value_ranks:
            names[LAST_VALUE] = shell.displayhook.value
        if order.profile:
            names[PROFILE] = profile
        returned = {LAST_VALUE: order.value_ranks, PROFILE: order.profile}
        senders = {**dict.fromkeys(order.gather, order.gather_ranks), **returned}
        mine = {name for name, ranks in senders.items() if rank in ranks}
        with self._namespace.gathered(names, mine) as parts:
            outcome["values"] = self._namespace.pack(
                {name: names[name] for name in names if name in mine}, parts
            )
        missing = [name for name in order.gather if name in mine and name not in names]
        outcome["values"].update(
            {name: {"error": NOT_DEFINED, "type": "NameError"} for name in missing}
        )
        shell.displayhook.value = None

    def _failure(
        self,
        problem: BaseException | None,
        *,
        lines: list[str] | None = None,
        ename: str | None = None,
        phase: str = "run",
    ) -> dict[str, Any]:
        message, packed = tracebacks.message(problem), {}
        if tracebacks.too_long(message):
            log_whole(self._context.log, ename or type(problem).__name__, message)
        elif problem is not None and phase == "run":
            packed = self._namespace.pack_exception(problem)
        return {
            "status": "error",
            "phase": phase,
            "ename": ename or type(problem).__name__,
            "evalue": tracebacks.shortened(message),
            "traceback": tracebacks.shortened_lines(lines or []),
            "exception": packed,
            "missing": self._namespace.missing(problem) if phase == "run" else "",
            "missing_files": missing_files(problem) if phase == "run" else None,
            "freed": self._context.freed,
            "cause_timeout": getattr(problem, "cause_timeout", 0.0),
            # an error that came after an interrupt comes of it
            "interrupted": self.interrupts.fallen
            or isinstance(problem, (KeyboardInterrupt, asyncio.CancelledError)),
        }
