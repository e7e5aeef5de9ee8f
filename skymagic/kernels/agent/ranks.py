"""The ranks of a node: asked for, watched, replaced and ended; their messages, their output, and the values that they share."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from skymagic.kernels import stacks
from skymagic.kernels.agent.children import Forkserver, Sink
from skymagic.kernels.agent.directories import Directories
from skymagic.kernels.agent.iopub import Iopub
from skymagic.kernels.agent.loop import Loop
from skymagic.kernels.agent.oom import oom_kills
from skymagic.kernels.agent.output import Pipe, RankOutput, Watcher, enlarge
from skymagic.kernels.agent.rank import Rank
from skymagic.kernels.agent.rank_logs import RankLogs
from skymagic.plan.limits import Lifetime
from skymagic.wire import agent as wire
from skymagic.wire import processes

STACK_DUMP_TIMEOUT = 0.1
"""Seconds for which a rank may write its stack."""


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
        loop: Loop,
        job_id: str,
        directories: Directories,
        log_limit: int | None,
        lifetime: Lifetime,
        send: Sink,
    ) -> None:
        self._loop, self._lifetime, self._send, self._log_limit = loop, lifetime, send, log_limit
        self._job_id, self._directories = job_id, directories
        self._logs = RankLogs(directories.work, send)
        self._profile = directories.work / "ipython"
        self.forkserver: Forkserver
        self._ranks: dict[int, Rank] = {}
        self._dead: dict[int, tuple[wire.RankExited, RankOutput]] = {}
        """By rank: how it ended, and what it had shown, while it is not started anew."""
        self._replaced: dict[int, Rank] = {}
        """By pid: ranks that were replaced and have not ended yet."""
        self._waiting: list[wire.Spawn] = []
        """Ranks asked for before the controller listened."""
        self._engine_file = directories.work / "engine.json"
        self._iopub: Iopub | None = None
        self._connection: dict[str, Any] | None = None
        """Of the controller, for ranks."""
        self._values: dict[str, wire.RendezvousKey] = {}
        """By key: what ranks have put, for those that start later."""
        self._spawned = 0
        # an agent that is started in the place of one that was lost must make other identities
        self._nonce = os.urandom(4).hex()
        self._oom_kills = oom_kills()
        self._away = False
        """Whether the notebook is."""
        self._watchers: dict[int, Watcher] = {}
        """By reader: who gets what the ranks show, beside the notebook."""

    def __len__(self) -> int:
        return len(self._ranks)

    def pids(self) -> dict[int, int]:
        """Rank → process id, of those that were forked."""
        return {number: rank.pid for number, rank in self._ranks.items() if rank.pid is not None}

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
        if request.connection is not None and request.connection != self._connection:  # the head may have a new agent
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
            self._tell(f"{folder} was deleted while the pool is alive, with what was in it; it is made again")
        self._profile.mkdir(exist_ok=True)
        if not self._engine_file.exists():
            with open(os.open(self._engine_file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
                json.dump(self._connection, file)

    def _spawn(self, spec: wire.RankSpec, iopub: Iopub) -> None:
        self._replace(spec.rank)
        self._dead.pop(spec.rank, None)
        # what was put once for all, and what belongs to this generation
        lasting = ("", str(spec.generation))
        self._values = {k: put for k, put in self._values.items() if k.partition("/")[2] in lasting}
        self._spawned += 1
        ident = f"{self._job_id}-{spec.rank}-{self._nonce}-{self._spawned}"
        ours, theirs = socket.socketpair()
        pipes = {name: os.pipe() for name in ("stdout", "stderr")}
        for reader, _ in pipes.values():
            enlarge(reader)
        log, readers = self._logs.path(spec.rank), {name: reader for name, (reader, _) in pipes.items()}
        output = RankOutput(
            spec.rank, log, readers, lambda parent, content: iopub.send(ident, parent, content), self._tell,
            self._logs.spans(spec.rank), self._watchers, self._log_limit,
        )  # fmt: skip
        rank = self._ranks[spec.rank] = Rank(spec.rank, ident, ours, output)
        self._lifetime.begin(spec.rank)
        env, store, profile = {**spec.env, "SKYMAGIC_IDENT": ident}, str(self._directories.store), str(self._profile)
        full = replace(spec, env=env, engine_file=str(self._engine_file), store=store, profile=profile, log=str(log))
        self.forkserver.fork(full, [theirs.detach(), *(writer for _, writer in pipes.values())])
        self._loop.watch(ours, self._guarded(rank, lambda: self._on_control(rank)))
        for pipe in output.pipes:
            self._loop.watch(pipe.fd, self._guarded(rank, partial(self._on_output, rank, pipe)))
        for put in self._values.values():
            rank.send(put)

    def _replace(self, number: int) -> None:
        old = self._ranks.pop(number, None)
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
                rank = self._ranks.get(message.rank)
                if rank is None or rank.ident != message.ident:  # replaced before it was there
                    processes.send_signal(message.pid, message.started, signal.SIGKILL)
                    return
                rank.pid, rank.started = message.pid, message.started
                self._send(message)
            case wire.ChildExited():
                self._exited(message.pid, message.status)

    # -- what the notebook asks --------------------------------------------------------------------------------------

    def signal(self, number: int, signum: int) -> None:
        """Send a signal; SIGKILL to what the rank started, too."""
        rank = self._ranks.get(number)
        if rank is None or rank.pid is None:
            return
        if signum == signal.SIGKILL:
            rank.expected = True
            rank.kill()
        else:
            rank.signal(signum)

    def interrupt(self, message: wire.InterruptionNotice) -> None:
        """Tell the ranks that a machine will be taken away."""
        for rank in self._ranks.values():
            rank.send(message)

    def pass_on(self, message: wire.WidgetInput) -> None:
        """Give a rank what a front end has sent to its widget."""
        if (rank := self._ranks.get(message.rank)) is not None:
            rank.send(message)

    def hooks(self) -> dict[int, int]:
        """Rank → how many times its hook has ended, of the ranks that have one."""
        return {number: rank.hook for number, rank in list(self._ranks.items()) if rank.hook is not None}

    def note(self, number: int, text: str) -> None:
        """Say something beside what a rank shows, to the notebook that takes its run up."""
        if (rank := self._ranks.get(number)) is not None:
            rank.output.note(text)

    def call(self, message: wire.RankRequest) -> None:
        """Pass a remote call on to ranks' control threads; ``native`` and ``usage`` are carried out here."""
        for number in message.ranks:
            if message.method == "native":
                self._dump_stack(number, message.number)
            elif message.method == "usage":
                rank = self._ranks.get(number)
                self._send(wire.RankReply(number, message.number, rank.usage() if rank is not None else None))
            elif number in self._ranks:
                self._ranks[number].send(message)

    def _dump_stack(self, number: int, call: int) -> None:
        """Let a rank whose interpreter is busy write its stack from a signal handler, and answer in its place."""
        rank = self._ranks.get(number)
        if rank is None or rank.pid is None:
            return
        path = Path(f"{self._logs.path(number)}.stack")
        before = path.stat().st_size if path.exists() else 0
        if stacks.catches(rank.pid):
            rank.signal(stacks.SIGNAL)

        def answer() -> None:
            text = path.read_bytes()[before:].decode(errors="replace") if path.exists() else ""
            self._send(wire.RankReply(number, call, stacks.parse(text)))

        self._loop.call_later(STACK_DUMP_TIMEOUT, answer)

    def read_log(self, message: wire.ReadLog, asker: int = 0) -> None:
        """Answer who asks for a rank's log: 0 is the notebook, else a reader."""
        self._logs.read(message, asker)

    # -- what ranks send ---------------------------------------------------------------------------------------------

    def _guarded(self, rank: Rank, serve: Callable[[], None]) -> Callable[[], None]:
        """What goes wrong with one rank's messages or output costs that rank alone."""

        def call() -> None:
            try:
                serve()
            except Exception as problem:
                traceback.print_exception(problem)
                self._tell(f"rank {rank.number} is ended, for it cannot be served: {type(problem).__name__}: {problem}")
                self._loop.unwatch(rank.control)
                rank.kill()

        return call

    def _tell(self, text: str) -> None:
        self._send(wire.AgentProblem(text))

    def _on_output(self, rank: Rank, pipe: Pipe) -> None:
        self._on_control(rank)  # a BeginOutput that was sent before this text was written
        if not rank.output.read(pipe, time.monotonic()):
            self._loop.unwatch(pipe.fd)
        self._logs.follow(rank.number)

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
                rank.output.report(message)
            case wire.EndOutput():
                self._lifetime.end(rank.number, now)
                rank.output.end(now)
            case wire.RendezvousKey():
                self.put(message)
                self._send(message)
            case wire.RankReady():
                rank.ready = True
                self._lifetime.end(rank.number, now)
                self._send(message)
                if self._iopub is not None and all(one.ready for one in self._ranks.values()):
                    self._iopub.open()
            case wire.WidgetUpdate() if self._away:  # nobody would take it; all is told when the notebook is back
                pass
            case wire.HookSet():
                rank.hook = 0 if message.there else None
            case wire.HookEnded():
                rank.hook = (rank.hook or 0) + 1
                self._send(message)
            case _:
                self._send(message)

    def put(self, message: wire.RendezvousKey) -> None:
        """Set a value on all ranks of this node; None deletes it."""
        self._values.pop(message.key, None)
        if message.value is not None:
            self._values[message.key] = message
        for rank in self._ranks.values():
            rank.send(message)

    @property
    def flush_due(self) -> float | None:
        """When the first text that waits for more must be sent (monotonic seconds)."""
        times = [rank.output.due for rank in self._ranks.values() if rank.output.due is not None]
        return min(times, default=None)

    def flush(self, now: float) -> None:
        """Send the text that has waited long enough."""
        for rank in list(self._ranks.values()):
            if rank.output.due is not None and rank.output.due <= now:
                rank.output.flush(now)

    def detach(self) -> None:
        """The notebook is away."""
        self._away = True
        for rank in self._ranks.values():
            rank.output.detach()

    def attach(self) -> None:
        """The notebook is back."""
        self._away = False
        for rank in self._ranks.values():
            rank.output.attach()
            rank.send(wire.WidgetInput(rank.number, "", {}))  # whose widgets it does not know as they are now

    def tell(self) -> None:
        """Another notebook is there: it is told how the ranks are, and what they have put once for all."""
        self._away = False
        self._logs.forget(0)
        for rank in self._ranks.values():
            rank.output.replaced()
        for message in self.states():
            self._send(message)
        for key, put in self._values.items():
            if "/" not in key:
                self._send(put)

    def states(self) -> Iterator[wire.AgentMessage]:
        """What tells how the ranks are."""
        for rank in self._ranks.values():
            if rank.pid is not None:
                yield wire.RankForked(rank.number, rank.pid, rank.ident, rank.started)
            if rank.ready:
                yield wire.RankReady(rank.number)
        for exited, _ in self._dead.values():
            yield wire.RankForked(exited.rank, exited.pid, "")
            yield exited

    def watch(self, message: wire.Follow, reader: int, send: Sink) -> None:
        """Tell a reader what ranks have shown in their last runs, and all that they show from now on."""
        outputs = self._outputs()

        def tell(content: dict[str, Any]) -> None:
            send(wire.FollowedOutput(content["rank"], content))

        for number, shown in message.shown.items():
            if (output := outputs.get(int(number))) is not None:
                output.tell_kept(shown, tell)
        self._watchers[reader] = tell

    def leave(self, reader: int) -> None:
        """A reader is gone; twice is safe."""
        self._watchers.pop(reader, None)
        self._logs.forget(reader)

    def _outputs(self) -> dict[int, RankOutput]:
        outputs = {number: output for number, (_, output) in self._dead.items()}
        return outputs | {number: rank.output for number, rank in self._ranks.items()}

    def follow(self, message: wire.Follow) -> None:
        """Tell the notebook what ranks show, after what it has shown."""
        outputs = self._outputs()
        for number, shown in message.shown.items():
            if (output := outputs.get(int(number))) is not None:
                output.follow(shown, lambda content: self._send(wire.FollowedOutput(content["rank"], content)))

    # -- end ---------------------------------------------------------------------------------------------------------

    def _exited(self, pid: int, status: int) -> None:
        rank = next((rank for rank in self._ranks.values() if rank.pid == pid), None)
        if rank is None:
            self._replaced.pop(pid, None)
            return
        rank.output.end(time.monotonic())
        self._lifetime.end(rank.number, time.monotonic())
        before, self._oom_kills = self._oom_kills, oom_kills()
        oom = status == -signal.SIGKILL and not rank.expected and self._oom_kills > before
        exited = wire.RankExited(rank.number, pid, status, rank.expected, oom, rank.output.tail())
        self._dead[rank.number] = exited, rank.output
        self._send(exited)
        del self._ranks[rank.number]
        rank.close(self._loop)

    def stop(self) -> None:
        """Let idle ranks run their plugins' teardown."""
        for rank in self._ranks.values():
            rank.expected = True
            rank.send(wire.RankRequest((rank.number,), "stop"))

    def kill(self) -> None:
        """SIGKILL all of them, and what they started."""
        for rank in [*self._ranks.values(), *self._replaced.values()]:
            rank.kill()
