"""The ranks of a node: start, watch, replace and end them.

Dispatches their messages and output, and shares rendezvous values among them.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from skymagic.kernels.agent.children import Forkserver, Sink
from skymagic.kernels.agent.directories import Directories
from skymagic.kernels.agent.logs import RankLog, RankLogs
from skymagic.kernels.agent.output import OutputFilter, Pipe, RankScreen, enlarge
from skymagic.kernels.agent.resources import oom_kills
from skymagic.kernels.agent.uplink import RankInput
from skymagic.kernels.fork import EventLoop
from skymagic.kernels.proc import processor_seconds, status
from skymagic.plan.limits import Lifetime
from skymagic.runtime import rendezvous
from skymagic.wire import agent as wire
from skymagic.wire import debug_log, processes
from skymagic.wire.output import OutputComplete
from skymagic.wire.queries import ThreadUsage

logger = logging.getLogger(__name__)

TAIL_LINES = 200
"""Lines of its log that are reported when a rank ends.

A crash report has 100 Python frames, and since Python 3.14 some C frames too.
"""


class Rank:
    """A running rank; owns its control socket, its log and the read ends of its pipes."""

    def __init__(
        self,
        loop: EventLoop,
        number: int,
        ident: str,
        control: socket.socket,
        output: OutputFilter,
    ) -> None:
        self.number = number
        self.ident = ident
        self.control = control
        self._input = RankInput(loop, control.fileno())
        self.output = output
        self.decoder = wire.decoder()
        self.pid: int | None = None
        # start time of its process, which tells it from a later process with the same id
        self.started = 0
        self.ready = False  # whether its plugins' hooks have run
        self.expected = False  # whether its end was requested
        # how many times its `on_interruption` hook has finished; None if it has none
        self.hook: int | None = None
        self.request = ""  # identity of the latest request sent to it
        self.finished: wire.OrderFinished | None = None
        """Outcome of that request, for a notebook that takes over."""
        self.delivered = False  # whether the user has the results of that request

    def send(self, message: wire.AgentMessage) -> None:
        """Send a message to its control thread; ignored if the rank is gone."""
        self.send_line(wire.encode(message))

    def send_line(self, line: bytes) -> None:
        """Send an encoded message; ignored if the rank is gone."""
        self._input.send(line)

    def signal(self, signum: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.pid is not None:
            processes.send_signal(self.pid, self.started, signum)

    def usage(self) -> ThreadUsage | None:
        """Return the state of its main thread, or None if it has ended."""
        try:
            fields = status(f"{self.pid}/task/{self.pid}")
        except OSError:
            return None
        return ThreadUsage(fields[0].decode(), processor_seconds(fields))

    def kill(self) -> None:
        """SIGKILL it; the forkserver ends the processes that it started."""
        self.signal(signal.SIGKILL)

    def close(self, loop: EventLoop) -> None:
        """Close the agent's ends of the rank's control socket, pipes and log."""
        self._input.close()
        loop.unwatch(self.control)
        for pipe in self.output.pipes:
            loop.unwatch(pipe.fd)
        self.control.close()
        self.output.close()


class Ranks:
    """Manager of this node's ranks.

    Args:
        job_id: part of each rank's identity.
        directories: hold the logs and the node's store.
        log_limit: maximum bytes of a rank's log; None for no limit.
        lifetime: informed when a rank starts and stops working.
        send: sends a message to the notebook.
        show: sends output to the notebook.
    """

    def __init__(
        self,
        loop: EventLoop,
        job_id: str,
        directories: Directories,
        log_limit: int | None,
        lifetime: Lifetime,
        send: Sink,
        show: Callable[[wire.Output], None],
    ) -> None:
        self._loop, self._lifetime, self._send, self._log_limit = loop, lifetime, send, log_limit
        self._job_id, self._directories, self._show = job_id, directories, show
        self.logs = RankLogs(directories.work, send)
        self._profile = directories.work / "ipython"
        self.forkserver: Forkserver
        self.running: dict[int, Rank] = {}  # by number
        self.dead: dict[int, tuple[wire.RankExited, Rank]] = {}
        """Exit report of each dead rank, until it is restarted."""
        # by pid: replaced ranks that have not ended yet
        self._replaced: dict[int, Rank] = {}
        # by key: values that ranks have put, for ranks that start later
        self.values: dict[str, wire.RendezvousKey] = {}
        self._spawned = 0
        # an agent that replaces a lost one must create other identities
        self._nonce = os.urandom(4).hex()
        self._oom_kills = oom_kills()
        self.away = False  # whether the notebook is away

    def __len__(self) -> int:
        return len(self.running)

    def pids(self) -> dict[int, int]:
        """Return the process id of each rank that was forked."""
        return {number: rank.pid for number, rank in self.running.items() if rank.pid is not None}

    # -- start -------------------------------------------------------------------------------------

    def spawn(self, message: wire.Spawn) -> None:
        """Start ranks."""
        self._restore_folders()
        for spec in message.ranks:
            self._spawn(spec)

    def _restore_folders(self) -> None:
        """Create folders again that others have deleted."""
        for folder in self._directories.restore():
            logger.warning("folder was deleted and is created again: path=%s", folder)
            self._tell(f"{folder} was deleted while the pool was running; it is created again")
        self.make_profile()

    def make_profile(self) -> Path:
        """Create the directory that serves as the ranks' IPython profile, if it is missing."""
        self._profile.mkdir(exist_ok=True)
        return self._profile

    def _spawn(self, spec: wire.RankSpec) -> None:
        self._replace(spec.rank)
        self.dead.pop(spec.rank, None)
        # values of earlier generations concern ranks that have read them
        self.values = {
            key: entry
            for key, entry in self.values.items()
            if rendezvous.belongs_to(key, spec.generation)
        }
        self._spawned += 1
        ident = f"{self._job_id}-{spec.rank}-{self._nonce}-{self._spawned}"
        control, rank_control = socket.socketpair()
        pipes = {name: os.pipe() for name in ("stdout", "stderr")}
        for reader, _ in pipes.values():
            enlarge(reader)
        log = RankLog(
            spec.rank,
            self.logs.path(spec.rank),
            self.logs.spans(spec.rank),
            self._log_limit,
            self._tell,
        )
        screen = RankScreen(spec.rank, self._show)
        output = OutputFilter(log, screen, {name: reader for name, (reader, _) in pipes.items()})
        rank = self.running[spec.rank] = Rank(self._loop, spec.rank, ident, control, output)
        self._lifetime.begin(spec.rank)
        logger.info(
            "rank starts: rank=%s ident=%s generation=%s gpus=%s",
            spec.rank,
            ident,
            spec.generation,
            len(spec.gpus),
        )
        env, store, profile = (
            {**spec.env, "SKYMAGIC_IDENT": ident},
            str(self._directories.store),
            str(self._profile),
        )
        full_spec = replace(
            spec,
            env=env,
            store=store,
            profile=profile,
            log=str(log.path),
            log_level=debug_log.level(),
        )
        self.forkserver.fork(
            full_spec, [rank_control.detach(), *(writer for _, writer in pipes.values())]
        )
        self._loop.watch(control, self._guarded(rank, lambda: self._on_control(rank)))
        for pipe in output.pipes:
            self._loop.watch(pipe.fd, self._guarded(rank, partial(self._on_output, rank, pipe)))
        # values that were put before this rank started
        for entry in self.values.values():
            rank.send(entry)

    def _replace(self, number: int) -> None:
        old = self.running.pop(number, None)
        if old is not None:
            logger.info("rank is replaced: rank=%s pid=%s", number, old.pid)
            old.expected = True
            old.kill()
            old.close(self._loop)
            if old.pid is not None:
                self._replaced[old.pid] = old

    def on_forkserver(self, message: wire.AgentMessage) -> None:
        """Handle the start or the end of a rank."""
        match message:
            case wire.RankForked():
                rank = self.running.get(message.rank)
                if rank is None or rank.ident != message.ident:  # replaced before it was forked
                    logger.info(
                        "rank was replaced before it was forked: rank=%s pid=%s",
                        message.rank,
                        message.pid,
                    )
                    processes.send_signal(message.pid, message.started, signal.SIGKILL)
                    return
                rank.pid, rank.started = message.pid, message.started
                logger.info("rank forked: rank=%s pid=%s", rank.number, rank.pid)
                self._send(message)
                if rank.ready:  # race: its RankReady arrived first
                    self._send(wire.RankReady(rank.number))
            case wire.ChildExited():
                self._exited(message.pid, message.status)

    # -- requests ----------------------------------------------------------------------------------

    def execute(self, message: wire.Request) -> None:
        """Pass a request on to its ranks."""
        line = wire.encode(message)
        for number in message.ranks:
            rank = self.running.get(number)
            if rank is None:  # its end was reported already; nothing else will come from it
                self._show(OutputComplete(number, request=message.request))
                continue
            rank.request, rank.finished, rank.delivered = message.request, None, False
            rank.send_line(line)
        logger.debug("request for ranks: request=%s ranks=%s", message.request, message.ranks)

    def follow(self, message: wire.Follow) -> None:
        """Send the notebook what it has missed of a request, on each rank.

        That is the output that was not acknowledged, and the outcome. Ranks that never got the
        request are reported.
        """
        for number in message.ranks:
            rank = self._with_request(number, message.request)
            if rank is None:
                self._send(wire.RequestUnknown(number, message.request))
                continue
            # else its output has not begun, and will be sent as it comes
            if rank.output.screen.request == message.request:
                rank.output.screen.follow()
            if rank.finished is not None:
                self._send(rank.finished)

    def acknowledge(self, message: wire.Shown) -> None:
        """Forget output that the user has seen."""
        for number, shown in message.last.items():
            if (rank := self._with_request(number, message.request)) is not None:
                rank.output.screen.acknowledge(message.request, shown)

    def deliver(self, message: wire.Delivered) -> None:
        """Record that the user has the results of a request, and forget its output."""
        for number in message.ranks:
            if (rank := self._with_request(number, message.request)) is not None:
                # kept until the next request: a notebook that takes over must not show it again
                rank.delivered = True
                rank.output.screen.forget()

    def delivered(self) -> list[wire.Delivered]:
        """Return the latest requests whose results the user has, for a notebook that takes over."""
        ranks = [*self.running.values(), *(rank for _, rank in self.dead.values())]
        return [wire.Delivered(rank.request, (rank.number,)) for rank in ranks if rank.delivered]

    def _with_request(self, number: int, request: str) -> Rank | None:
        """Return a rank, running or dead, if this is its latest request."""
        rank = self.running.get(number) or self.dead.get(number, (None, None))[1]
        return rank if rank is not None and rank.request == request else None

    # -- messages and output of ranks --------------------------------------------------------------

    def _guarded(self, rank: Rank, serve: Callable[[], None]) -> Callable[[], None]:
        """Wrap a handler so that an error in one rank's messages or output only kills that rank."""

        def call() -> None:
            try:
                serve()
            except Exception as problem:
                logger.warning(
                    "rank is killed because it cannot be served: rank=%s",
                    rank.number,
                    exc_info=problem,
                )
                traceback.print_exception(problem)
                self._tell(
                    f"rank {rank.number} is killed because it cannot be served: "
                    f"{type(problem).__name__}: {problem}"
                )
                self._loop.unwatch(rank.control)
                rank.kill()

        return call

    def _tell(self, text: str) -> None:
        self._send(wire.AgentProblem(text))

    def _on_output(self, rank: Rank, pipe: Pipe) -> None:
        self._on_control(rank)  # handle a BeginOutput that was sent before this text
        if not rank.output.read(pipe, time.monotonic()):
            self._loop.unwatch(pipe.fd)
        self.logs.follow(rank.number)

    def _on_control(self, rank: Rank) -> None:
        try:
            data = rank.control.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            logger.debug("control socket closed: rank=%s pid=%s", rank.number, rank.pid)
            self._loop.unwatch(rank.control)
            return
        for message in rank.decoder.feed(data):
            self._on_message(rank, message)

    def _on_message(self, rank: Rank, message: wire.AgentMessage) -> None:
        now = time.monotonic()
        match message:
            case wire.BeginOutput():
                logger.debug(
                    "run begins on the rank: rank=%s run=%s cell=%s",
                    rank.number,
                    message.run,
                    message.cell,
                )
                self._lifetime.begin(rank.number)
                rank.output.begin(message, now)
            case wire.Publish():
                rank.output.publish(message, now)
                # the rank waits for this acknowledgment
                rank.send(wire.Published())
            case wire.MetricsReport():
                rank.output.screen.report(message)
            case wire.EndOutput():
                logger.debug("run ends on the rank: rank=%s", rank.number)
                self._lifetime.end(rank.number, now)
                rank.output.end(now)
            case wire.OrderFinished():
                # do not trust the rank number in the message: cells run in the rank's process
                rank.finished = replace(message, rank=rank.number)
                self._send(rank.finished)
            case wire.RendezvousKey():
                self.put(message)
                self._send(message)
            case wire.RankReady():
                rank.ready = True
                logger.info("rank ready: rank=%s pid=%s", rank.number, rank.pid)
                self._lifetime.end(rank.number, now)
                # else `on_forkserver` sends it: the notebook needs RankForked first
                if rank.pid is not None:
                    self._send(message)
            case wire.HookPresence():
                rank.hook = 0 if message.is_present else None
            case wire.HookEnded():
                rank.hook = (rank.hook or 0) + 1
                logger.info(
                    "interruption hook has run: rank=%s seconds=%.1f failed=%s",
                    rank.number,
                    message.seconds,
                    bool(message.error),
                )
                self._send(message)
            case wire.RankFailed():
                logger.warning("rank failed at its start: rank=%s", rank.number)
                self._send(message)
            case _:
                self._send(message)

    def put(self, message: wire.RendezvousKey) -> None:
        """Set a value on all ranks of this node; None deletes it."""
        self.values.pop(message.key, None)
        if message.value is not None:
            self.values[message.key] = message
        self.send_all(message)

    def send_all(self, message: wire.AgentMessage) -> None:
        """Send a message to the control threads of all ranks."""
        for rank in self.running.values():
            rank.send(message)

    @property
    def flush_due(self) -> float | None:
        """Deadline for sending the oldest batched text (monotonic seconds)."""
        times = [rank.output.due for rank in self.running.values() if rank.output.due is not None]
        return min(times, default=None)

    def flush(self, now: float) -> None:
        """Send the batched text that is due."""
        for rank in list(self.running.values()):
            if rank.output.due is not None and rank.output.due <= now:
                rank.output.flush(now)

    # -- end ---------------------------------------------------------------------------------------

    def _exited(self, pid: int, status: int) -> None:
        # race: a replaced rank may end before or after its successor was forked
        rank = next((rank for rank in self.running.values() if rank.pid == pid), None)
        if rank is None:
            logger.debug("replaced rank exited: pid=%s status=%s", pid, status)
            self._replaced.pop(pid, None)
            return
        rank.output.end(time.monotonic())
        # race: it died before it began to carry out its request, whose run waits for this end
        if rank.request and rank.output.screen.request != rank.request:
            self._show(OutputComplete(rank.number, request=rank.request))
        self._lifetime.end(rank.number, time.monotonic())
        # the kernel's counters tell an out-of-memory kill from any other SIGKILL
        before, self._oom_kills = self._oom_kills, oom_kills()
        # an expected SIGKILL is the agent's own
        oom = status == -signal.SIGKILL and not rank.expected and self._oom_kills > before
        exited = wire.RankExited(
            rank.number, pid, status, rank.expected, oom, rank.output.log.tail(TAIL_LINES)
        )
        log = logger.info if rank.expected else logger.warning
        log(
            "rank exited: rank=%s pid=%s status=%s expected=%s out_of_memory=%s",
            rank.number,
            pid,
            processes.status_words(status),
            rank.expected,
            oom,
        )
        self.dead[rank.number] = exited, rank
        self._send(exited)
        del self.running[rank.number]
        rank.close(self._loop)

    def stop(self) -> None:
        """Ask all ranks to run their plugins' teardown and end; busy ones cannot do so yet."""
        for rank in self.running.values():
            rank.expected = True
            rank.send(wire.RankRequest((rank.number,), "stop"))

    def kill(self) -> None:
        """SIGKILL all ranks, and the processes that they started."""
        for rank in [*self.running.values(), *self._replaced.values()]:
            rank.kill()
