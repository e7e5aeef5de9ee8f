"""The node agent: one process per machine that starts ranks, watches them, and passes on what they print.

It speaks `skymagic.wire.agent` over its standard input and output and ends, with everything it started, when that link closes. It owns
the node's directories (mode 0700) and removes them. User code never runs in here.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from skymagic.data.store import store
from skymagic.kernels import stacks
from skymagic.kernels.agent import discovery, forkserver, logs
from skymagic.kernels.agent.iopub import Iopub
from skymagic.kernels.agent.oom import oom_kills
from skymagic.kernels.agent.output import Pipe, RankOutput, enlarge
from skymagic.plan.lifetime import Lifetime
from skymagic.wire import agent as wire
from skymagic.wire import processes
from skymagic.wire.transport import read_line, write_all

GRACE = 1.0
"""Seconds that idle ranks have to run their plugins' teardown before they are killed."""
DUMP_SECONDS = 0.1
"""For which a rank may write its stack."""
SHM = Path("/dev/shm")


class Rank:
    """One running rank as the agent sees it."""

    def __init__(self, spec: wire.RankSpec, ident: str, control: socket.socket, output: RankOutput) -> None:
        self.rank = spec.rank
        self.ident = ident
        self.control = control
        self.output = output
        self.decoder = wire.decoder()
        self.pid: int | None = None
        self.ready = False
        """Whether it has run its plugins' hooks."""
        self.expected = False
        """Whether its end was asked for."""

    def tell(self, message: wire.Message) -> None:
        """Write to its control thread; a rank that is gone hears nothing."""
        with contextlib.suppress(OSError):
            self.control.sendall(wire.encode(message))

    def kill(self) -> None:
        """SIGKILL it and what it started."""
        if self.pid is not None:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    kill(self.pid, signal.SIGKILL)


class Agent:
    """The event loop: link, forkserver, controller, ranks."""

    def __init__(self, spec: wire.AgentSpec, link_in: int, link_out: int) -> None:
        self.spec = spec
        self.link_in, self.link_out = link_in, link_out
        self.directory = Path(tempfile.mkdtemp(prefix=f"skymagic-{spec.job_id}-"))
        shm = SHM if SHM.is_dir() and os.access(SHM, os.W_OK) else self.directory
        self.store = Path(tempfile.mkdtemp(prefix=f"skymagic-{spec.job_id}-", dir=shm))
        self.ranks_profile = self.directory / "ipython"
        self.ranks_profile.mkdir()
        self.select = selectors.DefaultSelector()
        self.link_decoder = wire.decoder()
        self.ranks: dict[int, Rank] = {}
        self.leaving: dict[int, Rank] = {}
        """By pid: ranks that were replaced and have not ended yet."""
        self.waiting: list[wire.Spawn] = []
        """Ranks asked for before the controller listened."""
        self.controller: subprocess.Popen[bytes] | None = None
        self.controller_end = -1
        """A descriptor that says when the controller has ended, where the system has such."""
        self.places = discovery.Places()
        self.engine_file = ""
        self.iopub: Iopub | None = None
        self.offers: list[wire.Offer] = []
        self.spawned = 0
        self.nonce = os.urandom(4).hex()
        """An agent that is started in the place of one that was lost makes other identities."""
        self.stop_at: float | None = None
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.oom_before = oom_kills()
        self.readers: dict[int, wire.ReadLog] = {}
        """By rank: who follows its log."""
        self.lifetime = Lifetime(
            spec.idle_timeout, spec.max_lifetime, time.monotonic(), spec.detached_timeout
        )

    # -- start -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start controller and forkserver side by side; the agent's own imports come after."""
        log = os.open(self.directory / "agent.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.update(self.spec.env)
        if self.spec.head and self.spec.address is not None:
            self._start_controller(self.spec.address)
        self._start_forkserver()
        self._watch(self.link_in, self._on_link)
        if self.spec.head and self.spec.address is None:
            self._be_at(discovery.addresses())
        self.tell(
            wire.AgentStarted(
                socket.gethostname(),
                discovery.machine(),
                str(self.directory),
                str(self.store),
                self.places.ports,
            )
        )

    def _be_at(self, addresses: Iterable[str]) -> None:
        """Listen there, so that other nodes can tell whether this one is to be reached."""
        self.places = discovery.Places(self.spec.job_id, addresses)
        for listener in self.places.listeners:
            self._watch(listener, lambda listener=listener: self.places.answer(listener))  # type: ignore[misc]

    def _leave(self, but: str = "") -> None:
        """Listen no longer, but at this address."""
        for listener in self.places.listeners:
            if listener.getsockname()[0] != but:
                self._unwatch(listener)
        self.places.close(but)

    def _lead(self, address: str) -> None:
        self._leave(but=address)
        self._start_controller(address)

    def _reach(self, message: wire.ProbeAddresses) -> None:
        """Look for other nodes beside the event loop: a place that drops packets takes its time."""
        ours, theirs = socket.socketpair()

        def look() -> None:
            with theirs:
                theirs.sendall(json.dumps(discovery.reach(message.addresses, message.secret)).encode())

        def found() -> None:
            self._unwatch(ours)
            with ours:
                ways = json.loads(ours.recv(1 << 16))
            if message.listen:
                self._leave()
                self._be_at(set(ways.values()))
            self.tell(wire.ProbeReply(message.number, ways, self.places.ports if message.listen else {}))

        self._watch(ours, found)
        threading.Thread(target=look, name="skymagic-reach", daemon=True).start()

    def _start_controller(self, address: str) -> None:
        self.profile = self.directory / "profile"
        command = [
            sys.executable,
            *(["-P"] if sys.flags.safe_path else []),
            "-m",
            processes.CONTROLLER,
            f"--profile-dir={self.profile}",
            f"--ip={address}",
            f"--IPController.enable_curve={self.spec.curve}",
        ]
        self.controller = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        assert self.controller.stdout is not None
        self._watch(self.controller.stdout, self._on_controller)
        if hasattr(os, "pidfd_open"):  # its heartbeat, a process of its own, may keep its output open
            self.controller_end = os.pidfd_open(self.controller.pid)
            self._watch(self.controller_end, self._controller_ended)

    def _start_forkserver(self) -> None:
        ours, theirs = socket.socketpair()
        keep = {theirs.fileno(), 0, 1, 2}
        self.forkserver_pid = os.fork()
        if self.forkserver_pid == 0:
            code = 1
            try:
                for fd in {ours.fileno(), self.link_in, self.link_out, *self._controller_fds()} - keep:
                    os.close(fd)
                forkserver.serve(theirs, self.spec.preload)
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        self.forkserver = ours
        self.forkserver_decoder = wire.decoder()
        self._watch(ours, self._on_forkserver)

    def _controller_fds(self) -> set[int]:
        pipes: list[IO[bytes] | None] = (
            [self.controller.stdin, self.controller.stdout] if self.controller else []
        )
        return {pipe.fileno() for pipe in pipes if pipe is not None}

    # -- events ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the link closes, Shutdown comes, or a limit is over; then end everything."""
        try:
            while self.stop_at is None or (self.ranks and time.monotonic() < self.stop_at):
                for key, _ in self.select.select(self._timeout()):
                    key.data()
                now = time.monotonic()
                due = [call for when, call in self.later if when <= now]
                self.later = [one for one in self.later if one[0] > now]
                for call in due:
                    call()
                for rank in list(self.ranks.values()):
                    if rank.output.due is not None and rank.output.due <= now:
                        rank.output.flush(now)
                if self.stop_at is None and (reason := self.lifetime.reason(now)):
                    self.tell(wire.PoolEnded(reason))
                    self._stop()
        finally:
            self.close()

    def _timeout(self) -> float | None:
        times = [rank.output.due for rank in self.ranks.values() if rank.output.due is not None]
        times += [when for when, _ in self.later]
        ends = self.lifetime.due if self.stop_at is None else self.stop_at
        times += [ends] if ends is not None else []
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _watch(self, source: Any, call: Callable[[], None]) -> None:
        self.select.register(source, selectors.EVENT_READ, call)

    def _unwatch(self, source: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.select.unregister(source)

    def tell(self, message: wire.Message) -> None:
        """Write to the notebook."""
        try:
            write_all(self.link_out, wire.encode(message))
        except OSError:
            self._link_lost()

    def _link_lost(self) -> None:
        self._unwatch(self.link_in)
        for rank in self.ranks.values():
            rank.kill()
        self.stop_at = time.monotonic()

    def _on_link(self) -> None:
        data = os.read(self.link_in, 1 << 16)
        if not data:
            self._link_lost()
            return
        for message in self.link_decoder.feed(data):
            self._obey(message)

    def _obey(self, message: wire.Message) -> None:
        match message:
            case wire.Spawn():
                self._spawn_all(message)
            case wire.Signal():
                for rank in message.ranks:
                    self._signal(rank, message.signum)
            case wire.Request() if message.method == "native":
                for number in message.ranks:
                    self._dump_stack(number, message.number)
            case wire.Request():
                for rank in message.ranks:
                    if rank in self.ranks:
                        self.ranks[rank].tell(message)
            case wire.ReadLog() if message.start is None:
                found = logs.last(str(self._log(message.rank)), message.lines)
                self.tell(wire.Reply(message.rank, message.number, found))
            case wire.ReadLog():
                self.readers[message.rank] = message
                self._read_on(message.rank)
            case wire.Offer():
                self._spread(message)
            case wire.ProbeAddresses():
                self._reach(message)
            case wire.StartController():
                self._lead(message.address)
            case wire.RunElsewhere() if message.busy:
                self.lifetime.begin(f"run {message.run}")
            case wire.RunElsewhere():
                self.lifetime.end(f"run {message.run}", time.monotonic())
            case wire.NotebookDetached():
                self.lifetime.left(time.monotonic())
            case wire.NotebookAttached():
                self.lifetime.returned()
            case wire.Shutdown():
                self._stop()

    def _stop(self) -> None:
        """Let idle ranks run their plugins' teardown; the rest is for `close`."""
        self.stop_at = time.monotonic() + GRACE
        for known in self.ranks.values():
            known.expected = True
            known.tell(wire.Request((known.rank,), "stop"))

    def _signal(self, number: int, signum: int) -> None:
        rank = self.ranks.get(number)
        if rank is None or rank.pid is None:
            return
        if signum == signal.SIGKILL:
            rank.expected = True
            rank.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signum)

    def _dump_stack(self, number: int, question: int) -> None:
        """Let a rank whose interpreter is busy write its stack from a signal handler, and answer in its place."""
        rank = self.ranks.get(number)
        if rank is None or rank.pid is None:
            return
        path = Path(f"{self._log(number)}.stack")
        before = path.stat().st_size if path.exists() else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, stacks.SIGNAL)

        def answer() -> None:
            text = path.read_bytes()[before:].decode(errors="replace") if path.exists() else ""
            self.tell(wire.Reply(number, question, stacks.parse(text)))

        self.later.append((time.monotonic() + DUMP_SECONDS, answer))

    def _on_controller(self) -> None:
        assert self.controller is not None and self.controller.stdout is not None
        line = os.read(self.controller.stdout.fileno(), 4096)
        if not line:
            self._controller_ended()
            return
        if b"listening" in line and self.iopub is None:
            security = self.profile / "security"
            self.engine_file = str(security / "ipcontroller-engine.json")
            engine = json.loads(Path(self.engine_file).read_text())
            client = json.loads((security / "ipcontroller-client.json").read_text())
            self.tell(wire.ControllerUp(client, engine))
            self._connect(engine)

    def _controller_ended(self) -> None:
        assert self.controller is not None and self.controller.stdout is not None
        self._unwatch(self.controller.stdout)
        if self.controller_end >= 0:
            self._unwatch(self.controller_end)
            os.close(self.controller_end)
            self.controller_end = -1
        status = self.controller.wait()
        log = (self.directory / "agent.log").read_text(errors="replace") if status > 0 else ""
        self.tell(
            wire.AgentFailed(f"ipyparallel's controller ended with status {status}\n{log[-2000:]}".strip())
        )

    def _connect(self, engine: dict[str, Any]) -> None:
        self.iopub = Iopub(engine)
        waiting, self.waiting = self.waiting, []
        for spawn in waiting:
            self._spawn_all(spawn)

    # -- ranks -------------------------------------------------------------------------------------------------------

    def _spawn_all(self, request: wire.Spawn) -> None:
        if request.connection is not None and self.iopub is None:
            path = self.directory / "engine.json"
            with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                json.dump(request.connection, file)
            self.engine_file = str(path)
            self._connect(request.connection)
        if self.iopub is None:
            self.waiting.append(request)
            return
        for values in request.ranks:
            self._spawn(wire.RankSpec(**{**values, "plugins": tuple(values.get("plugins", ()))}))

    def _spawn(self, spec: wire.RankSpec) -> None:
        old = self.ranks.pop(spec.rank, None)
        if old is not None:
            old.expected = True
            old.kill()
            self._close(old)
            if old.pid is not None:
                self.leaving[old.pid] = old
        lasting = ("", str(spec.generation))  # what is told once for all, and what belongs to this generation
        self.offers = [offer for offer in self.offers if offer.key.partition("/")[2] in lasting]
        self.spawned += 1
        ident = f"{self.spec.job_id}-{spec.rank}-{self.nonce}-{self.spawned}"
        ours, theirs = socket.socketpair()
        pipes = {name: os.pipe() for name in ("stdout", "stderr")}
        rank = Rank(spec, ident, ours, self._output(spec, ident, {n: read for n, (read, _) in pipes.items()}))
        self.ranks[spec.rank] = rank
        self.lifetime.begin(spec.rank)
        full = wire.RankSpec(
            rank=spec.rank, info=spec.info, plugins=spec.plugins, generation=spec.generation,
            env={**spec.env, "SKYMAGIC_IDENT": ident}, engine_file=self.engine_file, store=str(self.store),
            profile=str(self.ranks_profile), log=str(self._log(spec.rank)),
        )  # fmt: skip
        writers = [write for _, write in pipes.values()]
        forkserver.send_spec(self.forkserver, full, [theirs.fileno(), *writers])
        theirs.close()
        for fd in writers:
            os.close(fd)
        self._watch(ours, lambda: self._on_rank(rank))
        for pipe in rank.output.pipes:
            self._watch(pipe.fd, lambda pipe=pipe: self._on_text(rank, pipe))  # type: ignore[misc]
        for offer in self.offers:
            rank.tell(offer)

    def _log(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.log"

    def _output(self, spec: wire.RankSpec, ident: str, readers: dict[str, int]) -> RankOutput:
        for fd in readers.values():
            enlarge(fd)
        assert self.iopub is not None
        iopub = self.iopub
        return RankOutput(
            spec.rank, self._log(spec.rank), readers,
            lambda parent, content: iopub.send(ident, parent, content),
        )  # fmt: skip

    def _on_text(self, rank: Rank, pipe: Pipe) -> None:
        self._on_rank(rank)  # a Begin that was said before this text was written
        if not rank.output.read(pipe, time.monotonic()):
            self._unwatch(pipe.fd)
        if rank.rank in self.readers:
            self._read_on(rank.rank)

    def _read_on(self, number: int) -> None:
        """Tell the one who follows a log what is new in it, once there is something."""
        asked = self.readers[number]
        found = logs.since(str(self._log(number)), asked.start or 0)
        if found["text"]:
            del self.readers[number]
            self.tell(wire.Reply(number, asked.number, found))

    def _on_rank(self, rank: Rank) -> None:
        try:
            data = rank.control.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._unwatch(rank.control)
            return
        for message in rank.decoder.feed(data):
            self._heard(rank, message)

    def _heard(self, rank: Rank, message: wire.Message) -> None:
        now = time.monotonic()
        match message:
            case wire.BeginOutput():
                self.lifetime.begin(rank.rank)
                rank.output.begin(message, now)
            case wire.Publish():
                rank.output.publish(message, now)
                rank.tell(wire.Published())
            case wire.EndOutput():
                self.lifetime.end(rank.rank, now)
                rank.output.end(now)
            case wire.Offer():
                self._spread(message)
                self.tell(message)
            case wire.RankReady():
                rank.ready = True
                self.lifetime.end(rank.rank, now)
                self.tell(message)
                if self.iopub is not None and all(one.ready for one in self.ranks.values()):
                    self.iopub.open()
            case _:
                self.tell(message)

    def _spread(self, offer: wire.Offer) -> None:
        self.offers = [other for other in self.offers if other.key != offer.key]
        if offer.value is not None:  # None takes back what was told
            self.offers.append(offer)
        for rank in self.ranks.values():
            rank.tell(offer)

    def _on_forkserver(self) -> None:
        data = self.forkserver.recv(1 << 16)
        if not data:
            self._unwatch(self.forkserver)
            self.tell(wire.AgentFailed("the process that forks ranks ended"))
            return
        for message in self.forkserver_decoder.feed(data):
            if isinstance(message, wire.RankForked):
                self._forked(message)
            else:
                self._exited(message.pid, message.status)

    def _forked(self, message: wire.RankForked) -> None:
        rank = self.ranks.get(message.rank)
        if rank is None or rank.ident != message.ident:  # replaced before it was there
            with contextlib.suppress(OSError):
                os.kill(message.pid, signal.SIGKILL)
            return
        rank.pid = message.pid
        self.tell(message)

    def _exited(self, pid: int, status: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)  # what it started: loader workers, commands
        rank = next((rank for rank in self.ranks.values() if rank.pid == pid), None)
        if rank is None:
            self.leaving.pop(pid, None)
            return
        rank.output.end(time.monotonic())
        self.lifetime.end(rank.rank, time.monotonic())
        oom = status == -signal.SIGKILL and not rank.expected and oom_kills() > self.oom_before
        self.oom_before = oom_kills()
        self.tell(wire.RankExited(rank.rank, pid, status, rank.expected, oom, rank.output.tail()))
        del self.ranks[rank.rank]
        self._close(rank)

    def _close(self, rank: Rank) -> None:
        self._unwatch(rank.control)
        for pipe in rank.output.pipes:
            self._unwatch(pipe.fd)
        rank.control.close()
        rank.output.close()

    # -- end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything that was started and remove the node's directories."""
        self.places.close()
        for rank in [*self.ranks.values(), *self.leaving.values()]:
            rank.kill()
        self.forkserver.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.forkserver_pid, signal.SIGKILL)  # it may be in the middle of a long import
            os.waitpid(self.forkserver_pid, 0)
        if self.controller is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.controller.pid, signal.SIGKILL)  # its heartbeat is a process of its own
            self.controller.wait()
        self.remove_directories()

    def remove_directories(self) -> None:
        """Delete what the node has written; twice is safe."""
        store.remove(self.store)
        shutil.rmtree(self.directory, ignore_errors=True)


def main() -> None:
    """Run the agent on standard input and output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link_in, link_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    spec = wire.decode(read_line(link_in))  # the rest belongs to the event loop
    assert isinstance(spec, wire.AgentSpec)
    agent = Agent(spec, link_in, link_out)
    try:
        agent.start()
    except BaseException:
        agent.remove_directories()
        raise
    agent.run()


if __name__ == "__main__":
    main()
