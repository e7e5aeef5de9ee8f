"""The ranks of a node: started, watched, replaced and ended; their messages, their output, and the values that they share."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from skymagic.kernels.agent.children import Forkserver, Sink
from skymagic.kernels.agent.directories import Directories
from skymagic.kernels.agent.logs import RankLog, RankLogs
from skymagic.kernels.agent.output import Iopub, OutputFilter, Pipe, RankScreen, enlarge
from skymagic.kernels.agent.resources import oom_kills
from skymagic.kernels.fork import EventLoop
from skymagic.kernels.proc import processor_seconds, status
from skymagic.plan.limits import Lifetime
from skymagic.wire import agent as wire
from skymagic.wire import processes

TAIL_LINES = 200
"""Lines of its log that are told of a rank that has ended: a crash report has 100 frames of Python, and since Python 3.14 some of C."""


class Rank:
    """One running rank; owns its control socket, its log and the read ends of its pipes."""

    def __init__(
        self, number: int, ident: str, control: socket.socket, output: OutputFilter
    ) -> None:
        self.number = number
        self.ident = ident
        self.control = control
        self.output = output
        self.decoder = wire.decoder()
        self.pid: int | None = None
        self.started = 0  # when its process was, which tells it from a later one of that number
        self.ready = False  # whether it has run its plugins' hooks
        self.expected = False  # whether its end was asked for
        self.hook: int | None = (
            None  # how many times its `on_interruption` hook has ended; None while it has none
        )

    def send(self, message: wire.AgentMessage) -> None:
        """Send to its control thread; to a rank that is gone nothing is sent."""
        with contextlib.suppress(OSError):
            self.control.sendall(wire.encode(message))

    def signal(self, signum: int) -> None:
        """Send it a signal; one that has ended gets none."""
        if self.pid is not None:
            processes.send_signal(self.pid, self.started, signum)

    def usage(self) -> list[Any] | None:
        """The state of its main thread, as a letter of Linux's, and the processor time that it has used, in seconds."""
        try:
            fields = status(f"{self.pid}/task/{self.pid}")
        except OSError:
            return None
        return [fields[0].decode(), processor_seconds(fields)]

    def kill(self) -> None:
        """SIGKILL it; the forkserver ends what it started."""
        self.signal(signal.SIGKILL)

    def close(self, loop: EventLoop) -> None:
        """Close the agent's ends of the rank's control socket, pipes and log."""
        loop.unwatch(self.control)
        for pipe in self.output.pipes:
            loop.unwatch(pipe.fd)
        self.control.close()
        self.output.close()


class Ranks:
    """The ranks of this node.

    Args:
        job_id: part of each rank's identity.
        directories: where logs and the node's store are.
        log_limit: bytes that the log of a rank may have; None for no limit.
        lifetime: is told when a rank begins and ends its work.
        send: sends a message to the notebook.
    """

    def __init__(
        self,
        loop: EventLoop,
        job_id: str,
        directories: Directories,
        log_limit: int | None,
        lifetime: Lifetime,
        send: Sink,
    ) -> None:
        self._loop, self._lifetime, self._send, self._log_limit = loop, lifetime, send, log_limit
        self._job_id, self._directories = job_id, directories
        self.logs = RankLogs(directories.work, send)
        self._profile = directories.work / "ipython"
        self.forkserver: Forkserver
        self.running: dict[int, Rank] = {}  # by number
        self.dead: dict[int, tuple[wire.RankExited, OutputFilter]] = {}
        """By rank: how it ended, and what it had shown, while it is not started anew."""
        self._replaced: dict[
            int, Rank
        ] = {}  # by pid: ranks that were replaced and have not ended yet
        self._waiting: list[wire.Spawn] = []  # ranks asked for before the controller listened
        self._engine_file = directories.work / "engine.json"
        self._iopub: Iopub | None = None
        self._connection: dict[str, Any] | None = (
            None  # the controller's connection information, for ranks
        )
        self.values: dict[
            str, wire.RendezvousKey
        ] = {}  # by key: what ranks have put, for those that start later
        self._spawned = 0
        # an agent that is started in the place of one that was lost must make other identities
        self._nonce = os.urandom(4).hex()
        self._oom_kills = oom_kills()
        self.away = False  # whether the notebook is

    def __len__(self) -> int:
        return len(self.running)

    def pids(self) -> dict[int, int]:
        """Rank → process id, of those that were forked."""
        return {number: rank.pid for number, rank in self.running.items() if rank.pid is not None}

    # -- start -------------------------------------------------------------------------------------------------------

    def connect(self, engine: dict[str, Any]) -> None:
        """The controller listens: `engine` is its connection information for ranks."""
        self._connection, self._iopub = engine, Iopub(engine)
        self._engine_file.unlink(missing_ok=True)
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self.spawn(request)

    def spawn(self, request: wire.Spawn) -> None:
        """Start ranks, or remember to when the controller listens."""
        if (
            request.connection is not None and request.connection != self._connection
        ):  # the head may have a new agent
            self.connect(request.connection)
        if self._iopub is None:
            self._waiting.append(request)
            return
        self._restore_files()
        for values in request.ranks:
            self._spawn(wire.RankSpec(**values), self._iopub)

    def _restore_files(self) -> None:
        """Write what ranks read at their start, and have what others have deleted made again."""
        for folder in self._directories.restore():
            self._tell(f"{folder} was deleted while the pool was running; it is created again")
        self._profile.mkdir(exist_ok=True)
        if not self._engine_file.exists():
            with open(
                os.open(self._engine_file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w"
            ) as file:
                json.dump(self._connection, file)

    def _spawn(self, spec: wire.RankSpec, iopub: Iopub) -> None:
        self._replace(spec.rank)
        self.dead.pop(spec.rank, None)
        # what was put once for all, and what belongs to this generation
        lasting = ("", str(spec.generation))
        self.values = {k: put for k, put in self.values.items() if k.partition("/")[2] in lasting}
        self._spawned += 1
        ident = f"{self._job_id}-{spec.rank}-{self._nonce}-{self._spawned}"
        ours, theirs = socket.socketpair()
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
        screen = RankScreen(spec.rank, lambda parent, content: iopub.send(ident, parent, content))
        output = OutputFilter(log, screen, {name: reader for name, (reader, _) in pipes.items()})
        rank = self.running[spec.rank] = Rank(spec.rank, ident, ours, output)
        self._lifetime.begin(spec.rank)
        env, store, profile = (
            {**spec.env, "SKYMAGIC_IDENT": ident},
            str(self._directories.store),
            str(self._profile),
        )
        full = replace(
            spec,
            env=env,
            engine_file=str(self._engine_file),
            store=store,
            profile=profile,
            log=str(log.path),
        )
        self.forkserver.fork(full, [theirs.detach(), *(writer for _, writer in pipes.values())])
        self._loop.watch(ours, self._guarded(rank, lambda: self._on_control(rank)))
        for pipe in output.pipes:
            self._loop.watch(pipe.fd, self._guarded(rank, partial(self._on_output, rank, pipe)))
        for put in self.values.values():
            rank.send(put)

    def _replace(self, number: int) -> None:
        old = self.running.pop(number, None)
        if old is not None:
            old.expected = True
            old.kill()
            old.close(self._loop)
            if old.pid is not None:
                self._replaced[old.pid] = old

    def on_forkserver(self, message: wire.AgentMessage) -> None:
        """A rank was forked, or has ended."""
        match message:
            case wire.RankForked():
                rank = self.running.get(message.rank)
                if rank is None or rank.ident != message.ident:  # replaced before it was there
                    processes.send_signal(message.pid, message.started, signal.SIGKILL)
                    return
                rank.pid, rank.started = message.pid, message.started
                self._send(message)
                if rank.ready:  # race: it was sooner
                    self._send(wire.RankReady(rank.number))
            case wire.ChildExited():
                self._exited(message.pid, message.status)

    # -- what ranks send ---------------------------------------------------------------------------------------------

    def _guarded(self, rank: Rank, serve: Callable[[], None]) -> Callable[[], None]:
        """What goes wrong with one rank's messages or output costs that rank alone."""

        def call() -> None:
            try:
                serve()
            except Exception as problem:
                traceback.print_exception(problem)
                self._tell(
                    f"rank {rank.number} is killed because it cannot be served: {type(problem).__name__}: {problem}"
                )
                self._loop.unwatch(rank.control)
                rank.kill()

        return call

    def _tell(self, text: str) -> None:
        self._send(wire.AgentProblem(text))

    def _on_output(self, rank: Rank, pipe: Pipe) -> None:
        self._on_control(rank)  # a BeginOutput that was sent before this text was written
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
            self._loop.unwatch(rank.control)
            return
        for message in rank.decoder.feed(data):
            self._on_message(rank, message)

    def _on_message(self, rank: Rank, message: wire.AgentMessage) -> None:
        now = time.monotonic()
        match message:
            case wire.BeginOutput():
                self._lifetime.begin(rank.number)
                rank.output.begin(message, now)
            case wire.Publish():
                rank.output.publish(message, now)
                rank.send(wire.Published())
            case wire.Reported():
                rank.output.screen.report(message)
            case wire.EndOutput():
                self._lifetime.end(rank.number, now)
                rank.output.end(now)
            case wire.RendezvousKey():
                self.put(message)
                self._send(message)
            case wire.RankReady():
                rank.ready = True
                self._lifetime.end(rank.number, now)
                if (
                    rank.pid is not None
                ):  # else `on_forkserver` does: the notebook hears first who it is
                    self._send(message)
                if self._iopub is not None and all(one.ready for one in self.running.values()):
                    self._iopub.open()
            case wire.HookSet():
                rank.hook = 0 if message.there else None
            case wire.HookEnded():
                rank.hook = (rank.hook or 0) + 1
                self._send(message)
            case _:
                self._send(message)

    def put(self, message: wire.RendezvousKey) -> None:
        """Set a value on all ranks of this node; None deletes it."""
        self.values.pop(message.key, None)
        if message.value is not None:
            self.values[message.key] = message
        for rank in self.running.values():
            rank.send(message)

    @property
    def flush_due(self) -> float | None:
        """When the first text that waits for more must be sent (monotonic seconds)."""
        times = [rank.output.due for rank in self.running.values() if rank.output.due is not None]
        return min(times, default=None)

    def flush(self, now: float) -> None:
        """Send the text that has waited long enough."""
        for rank in list(self.running.values()):
            if rank.output.due is not None and rank.output.due <= now:
                rank.output.flush(now)

    # -- end ---------------------------------------------------------------------------------------------------------

    def _exited(self, pid: int, status: int) -> None:
        # race: a rank that was replaced may end before or after its successor was forked
        rank = next((rank for rank in self.running.values() if rank.pid == pid), None)
        if rank is None:
            self._replaced.pop(pid, None)
            return
        rank.output.end(time.monotonic())
        self._lifetime.end(rank.number, time.monotonic())
        before, self._oom_kills = self._oom_kills, oom_kills()
        oom = status == -signal.SIGKILL and not rank.expected and self._oom_kills > before
        exited = wire.RankExited(
            rank.number, pid, status, rank.expected, oom, rank.output.log.tail(TAIL_LINES)
        )
        self.dead[rank.number] = exited, rank.output
        self._send(exited)
        del self.running[rank.number]
        rank.close(self._loop)

    def stop(self) -> None:
        """Let idle ranks run their plugins' teardown."""
        for rank in self.running.values():
            rank.expected = True
            rank.send(wire.RankRequest((rank.number,), "stop"))

    def kill(self) -> None:
        """SIGKILL all of them, and what they started."""
        for rank in [*self.running.values(), *self._replaced.values()]:
            rank.kill()
