"""The node agent: one process per machine that starts ranks and watches them.

It passes on their output, speaks `skymagic.wire.agent` over its standard input and output, and when
that link closes it ends with everything that it started. It owns the node's directories (mode 0700)
and removes them. User code never runs in this process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback

from skymagic.errors import PoolError
from skymagic.kernels.agent import directories, discovery, forkserver, logs
from skymagic.kernels.agent.children import Forkserver
from skymagic.kernels.agent.directories import Directories, RecordFile
from skymagic.kernels.agent.discovery import Candidates
from skymagic.kernels.agent.ending import (
    ABANDONED_SECONDS,
    ENDING,
    SIGNALLED,
    SLURM,
    Notice,
    NoticeWatch,
    SignalledEnd,
    UnattendedRuns,
)
from skymagic.kernels.agent.ranks import Ranks
from skymagic.kernels.agent.readers import NodeReaders, RankAudience, RankRequests
from skymagic.kernels.agent.resources import GpuClaims, Measurements
from skymagic.kernels.agent.uplink import Uplink
from skymagic.kernels.fork import EventLoop, signal_pipe
from skymagic.kernels.network import private_addresses
from skymagic.plan.limits import MOST_DESCRIPTORS, Lifetime
from skymagic.runtime import rendezvous
from skymagic.wire import agent as wire
from skymagic.wire import debug_log
from skymagic.wire.codec import read_line, write_all
from skymagic.wire.processes import signal_name
from skymagic.wire.record import READERS

logger = logging.getLogger(__name__)

STOP_TIMEOUT = 1.0
"""Seconds that idle ranks have to run their plugins' teardown before they are killed."""

LAST_LINES = 40
"""Lines of its log that an agent sends when it fails."""

TOUCH_SECONDS = 3600.0
"""Seconds between two updates of the time stamps of the node's files.

Cleaners of temporary folders delete files older than ten days, or one.
"""

# seconds that a closing agent waits for a notebook that does not read
LISTENING_TIMEOUT = 1.0


class Agent:
    """The agent process; owns the link, the node's directories, and everything that it starts."""

    def __init__(
        self,
        spec: wire.AgentSpec,
        woken: int,
        link_in: int,
        link_out: int,
        errors: int,
        record: str | None = None,
    ) -> None:
        self.spec, self._woken = spec, woken
        self._record = RecordFile(record, spec)
        self._link_in, self._link_out, self._errors = link_in, link_out, errors
        self.directories = Directories(spec.job_id)
        self._directory = self.directories.work
        debug_log.setup(
            self._directory / debug_log.file_name(spec.node, "agent"),
            {"pool": spec.pool, "node": spec.node},
        )
        debug_log.set_level(spec.log_level)
        self._loop = EventLoop(self._report_error)
        self._uplink = Uplink(self._loop, link_out, wire.window(spec.nodes), self._link_lost)
        self._decoder = wire.decoder()
        self._lifetime = Lifetime(
            spec.idle_timeout,
            spec.max_lifetime,
            time.monotonic(),
            spec.detached_timeout,
            spec.max_away,
        )
        self._candidates = Candidates(self._loop)
        self._ranks = Ranks(
            self._loop,
            spec.job_id,
            self.directories,
            spec.log_limit,
            self._lifetime,
            self._send,
            self._uplink.show,
        )
        self._requests = RankRequests(self._loop, self._ranks, self._send)
        self._audience = RankAudience(self._ranks, self._send)
        self._unattended = UnattendedRuns(
            self._lifetime, spec.max_away or 0.0, self._requests.note, self._requests.signal
        )
        self._resources = Measurements()
        self._gpus = GpuClaims(spec.job_id, spec.pool)
        self._readers: NodeReaders | None = None
        self._notices: NoticeWatch | None = None
        self._ending: SignalledEnd | None = None
        # by node: the latest notice of its end
        self._interrupted: dict[int, wire.InterruptionNotice] = {}
        self._lasting_messages: dict[type[wire.AgentMessage], wire.AgentMessage] = {}
        """Messages that every notebook needs to know about this node, by type."""
        self._stop_at: float | None = None
        self._linked = True
        self._parent = -1

    # -- start -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the forkserver, and report."""
        spec = self.spec
        logger.info(
            "agent started: pid=%s job=%s nodes=%s version=%s detached=%s",
            os.getpid(),
            spec.job_id,
            spec.nodes,
            spec.version,
            self._record.path is not None,
        )
        log = os.open(self._directory / "agent.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        # the link has its own descriptors: whatever else is printed goes to the log
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.update(self.spec.env)
        # processes of ranks become children of this one if the forkserver is killed
        forkserver.adopt()
        self._ending = SignalledEnd(self._loop, self._woken, self._requests.hooks, self._on_signal)
        links = {self._woken, self._link_in, self._link_out, self._errors}
        # the forkserver must close these: a copy would keep a link or a lock open
        foreign = {*links, *self.directories.locks}
        self._ranks.forkserver = Forkserver(
            self._loop,
            self.spec.preload,
            self._ranks.make_profile(),
            foreign,
            self._ranks.on_forkserver,
            self._send,
        )
        self._loop.watch(self._link_in, self._on_link)
        self._watch_parent()
        if self._record.path is not None:
            socket_path = self._record.path.with_name(READERS)

            def told() -> list[wire.AgentMessage]:
                return [
                    message
                    for message in self._lasting_messages.values()
                    if isinstance(message, wire.AgentStarted)
                ]

            self._readers = NodeReaders(
                self._loop,
                str(socket_path),
                self._ranks,
                self._audience,
                told,
                self._requests.call,
            )
        if self.spec.notices.startswith(SLURM):
            self._ending.warn(float(self.spec.notices.removeprefix(SLURM)), self._on_notice)
        elif self.spec.notices:
            self._notices = NoticeWatch(self._loop, self._on_notice)
            logger.debug("watching for notices of the machine's end: source=%s", self.spec.notices)
        # remove the folders of agents that were killed
        directories.sweep()
        self._loop.call_later(TOUCH_SECONDS, self._touch)
        if self.spec.head and self.spec.address is None:
            self._candidates.listen(private_addresses())
        name, folder, store = (
            socket.gethostname(),
            str(self._directory),
            str(self.directories.store),
        )
        port = rendezvous.free_port(self.spec.address or "") if self.spec.head else 0
        candidates = self._candidates
        self._send(
            wire.AgentStarted(
                name, discovery.machine(), folder, store, candidates.ports, port, candidates.secret
            )
        )

    def _touch(self) -> None:
        self.directories.touch()
        self._loop.call_later(TOUCH_SECONDS, self._touch)

    def _watch_parent(self) -> None:
        """End with the parent process.

        The link alone is not enough: it stays open while a process that the parent forked holds its
        other end.
        """
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._parent = os.pidfd_open(os.getppid())
                self._loop.watch(self._parent, self._link_lost)

    # -- events ------------------------------------------------------------------------------------

    def _is_needed(self) -> bool:
        """Write what there is to write, and return True until the agent has to end."""
        # First: it may find that the link is lost, after which no event ends the wait for one.
        self._uplink.flush()
        return self._stop_at is None or (bool(self._ranks) and time.monotonic() < self._stop_at)

    def run(self) -> None:
        """Serve until the link closes, Shutdown arrives, or a limit is reached.

        Ends everything before it returns or raises.
        """
        try:
            while self._is_needed():
                ends = self._lifetime.due if self._stop_at is None else self._stop_at
                signalled = None if self._ending is None else self._ending.due
                times = (
                    ends,
                    self._ranks.flush_due,
                    self._record.due,
                    self._unattended.due,
                    signalled,
                )
                due = [when for when in times if when is not None]
                self._loop.run_once(min(due, default=None))
                now = time.monotonic()
                self._ranks.flush(now)
                self._unattended.stop_if_due(now)
                self._record.update(self._lifetime, self._ranks.pids)
                if self._ending is not None:
                    self._ending.end_if_over(now)
                if self._stop_at is None and (reason := self._lifetime.reason(now)):
                    logger.info("pool ends by itself: reason=%s", reason)
                    self._send(wire.PoolEnded(f"ended {reason}"))
                    self._stop()
        except BaseException as problem:
            self.report_end(problem)
            raise
        finally:
            self.close()

    def report_end(self, problem: BaseException) -> None:
        """Report why the agent ends.

        The report goes over the link and to the original standard error, because the agent's log is
        deleted next.
        """
        if isinstance(problem, SystemExit):
            logger.warning("agent was signalled from outside: code=%s", problem.code)
            if ender := self._record.ended_by():
                self._send(wire.PoolEnded(f"was ended by {ender}"))
            else:
                name = signal_name(int(problem.code or 0) - SIGNALLED)
                self._send(wire.AgentFailed(f"the agent was killed from outside ({name})"))
            self._uplink.drain(LISTENING_TIMEOUT)
            return
        logger.error("agent failed", exc_info=problem)
        traceback.print_exception(problem)
        log = logs.last_lines(str(self._directory / "agent.log"), LAST_LINES).text
        with contextlib.suppress(OSError):
            write_all(self._errors, log.encode())
        self._send(
            wire.AgentFailed(
                (
                    f"the agent failed: {traceback.format_exception_only(problem)[-1].strip()}"
                    f"\n{log}"
                ).strip()
            )
        )
        self._uplink.drain(LISTENING_TIMEOUT)

    def _send(self, message: wire.AgentMessage) -> None:
        """Send a message to the notebook, and to the readers that it concerns."""
        if self._readers is not None and self._readers.send(message):
            return
        # kept for a notebook that takes over
        if isinstance(message, wire.AgentStarted | wire.InterruptionNotice):
            self._lasting_messages[type(message)] = message
        self._uplink.send(message)

    def _link_lost(self) -> None:
        if not self._linked:
            return
        logger.info("link to the notebook has ended: ranks=%s", sorted(self._ranks.running))
        self._linked = False
        self._uplink.close()
        for source in (self._link_in, self._parent):
            self._loop.unwatch(source)
        if self._ending is not None and self._ending.due is not None:
            logger.debug("waiting for hooks before the end")
            return  # it ends once the hooks have run
        if self._requests.hooks():
            # Slurm signals all processes of a job, and the notebook may have exited first: wait for
            # this agent's own signal, so that the hooks run
            self._stop_at = time.monotonic() + ABANDONED_SECONDS
            return
        self._ranks.kill()
        self._stop_at = time.monotonic()

    def _on_link(self) -> None:
        try:
            data = os.read(self._link_in, 1 << 16)
        except BlockingIOError:  # both ends of the link may be one socket
            return
        if not data:
            self._link_lost()
        for message in self._decoder.feed(data):
            try:
                self._on_message(message)
            except Exception as problem:
                self._report_error(problem, type(message).__name__)
                if isinstance(message, wire.RankRequest):
                    for number in message.ranks:
                        self._send(wire.RankReply(number, message.number, None))

    def _report_error(self, problem: Exception, what: str = "an event") -> None:
        """Log and report an error of one message or event, and keep serving the others."""
        logger.warning("error ignored, the agent continues: in=%s", what, exc_info=problem)
        traceback.print_exception(problem)
        description = f"{type(problem).__name__}: {problem}"
        self._send(
            wire.AgentProblem(
                f"the agent could not run {what}: {description}; its log has the traceback"
            )
        )

    def _on_message(self, message: wire.AgentMessage) -> None:
        match message:
            case wire.Spawn():
                try:
                    self._gpus.claim(uuid for spec in message.ranks for uuid in spec.gpus)
                except PoolError as conflict:
                    logger.warning("ranks not started: %s", conflict)
                    self._send(wire.AgentFailed(str(conflict)))
                    return
                self._ranks.spawn(message)
            case wire.Signal():
                for number in message.ranks:
                    self._requests.signal(number, message.signum)
            case wire.RankRequest():
                self._requests.call(message)
            case wire.LogLevel():
                logger.info("log level changes: level=%s", message.level)
                debug_log.set_level(message.level)
                self._ranks.send_all(message)
            case wire.Measure():
                self._send(self._resources.reply(message, self._ranks.pids()))
            case wire.ReadLog():
                self._ranks.logs.read(message, asker=0)
            case wire.RendezvousKey():
                self._ranks.put(message)
            case wire.ProbeAddresses():
                self._probe(message)
            case wire.ListenForProbes():
                self._candidates.listen([message.address])
                ports = self._candidates.ports
                self._send(wire.ProbeReply(message.number, {}, ports))
            case wire.HeadAddress():
                logger.info("other nodes reach this one: address=%s", message.address)
                self._candidates.close(but=message.address)
            case wire.Credit():
                self._uplink.grant(message.cost)
            case wire.Request():
                self._ranks.execute(message)
            case wire.InterruptionNotice():
                self._interrupt(message)
            case wire.RunElsewhere() if message.busy:
                self._lifetime.begin(f"run {message.run}")
            case wire.RunElsewhere():
                self._lifetime.end(f"run {message.run}", time.monotonic())
            case wire.NotebookDetached():
                logger.info("notebook is away: ranks=%s", sorted(self._ranks.running))
                self._lifetime.notebook_left(time.monotonic())
                self._audience.detach()
            case wire.NotebookAttached():
                logger.info("notebook is back")
                self._lifetime.returned()
                self._audience.attach()
            case wire.NotebookReplaced():
                logger.info("another notebook has taken over")
                self._brief_new_notebook()
            case wire.Follow():
                logger.debug("notebook follows the output of a run: ranks=%s", message.ranks)
                self._ranks.follow(message)
            case wire.Shown():
                self._ranks.acknowledge(message)
            case wire.Delivered():
                self._ranks.deliver(message)
            case wire.Shutdown():
                logger.info("notebook ends the pool")
                self._stop()

    def _on_notice(self, notice: Notice) -> None:
        """Announce that this machine will, or may, be taken away."""
        logger.warning("machine will be taken away: reason=%s at=%s", notice.reason, notice.at)
        message = wire.InterruptionNotice(
            self.spec.node, tuple(sorted(self._ranks.pids())), notice.reason, notice.at
        )
        self._interrupt(message)
        self._send(message)

    def _on_signal(self, reason: str, at: float) -> None:
        """Announce that a signal ends this agent."""
        # a link that was lost may have set it: now the end waits for the hooks
        self._stop_at = None
        message = wire.InterruptionNotice(
            self.spec.node, tuple(sorted(self._ranks.pids())), reason, at
        )
        self._interrupt(message)
        self._send(message)

    def _interrupt(self, message: wire.InterruptionNotice) -> None:
        """Have the ranks run their hooks, once per notice.

        A notebook that takes over sends the same notice again.
        """
        if message.at is not None and self._interrupted.get(message.node) != message:
            self._interrupted[message.node] = message
            for rank in self._ranks.running.values():
                rank.send(message)

    def _brief_new_notebook(self) -> None:
        """Send another notebook, which has taken over, all that it must know."""
        self._uplink.restart()
        self._lifetime.returned()
        for run in self._lifetime.elsewhere():
            self._lifetime.end(run, time.monotonic())  # the new notebook reports what runs
        for message in self._lasting_messages.values():
            self._send(message)
        self._audience.brief_new_notebook()

    def _probe(self, message: wire.ProbeAddresses) -> None:
        def result(routes: dict[str, str]) -> None:
            self._send(wire.ProbeReply(message.number, routes))

        discovery.probe(self._loop, message.addresses, message.secret, result)

    # -- end ---------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Let idle ranks run their plugins' teardown; `close` ends the rest."""
        logger.debug("ranks get %s s for their teardown", STOP_TIMEOUT)
        self._stop_at = time.monotonic() + STOP_TIMEOUT
        self._ranks.stop()

    def close(self) -> None:
        """End everything that was started, and remove the node's directories."""
        logger.info("agent ends everything on its node: ranks=%s", sorted(self._ranks.running))
        self._candidates.close()
        for listener in (self._readers, self._notices, self._ending):
            if listener is not None:
                listener.close()
        self._ranks.kill()
        self._resources.close()
        self._ranks.forkserver.close()
        forkserver.end_all()  # in case the forkserver was killed
        if self._linked:
            self._send_log_ends()
        self.directories.remove()

    def _send_log_ends(self) -> None:
        """Send the ends of the logs, as long as the notebook reads them.

        It can show them when the logs are gone.
        """
        for rank, text in logs.log_tails(self._directory):
            self._uplink.send(wire.LastLines(rank, text))
        self._uplink.drain(LISTENING_TIMEOUT)


def _raise_descriptor_limit() -> None:
    """Raise the limit on open files to the maximum that the system allows.

    Each rank needs some in the agent, and child processes inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(OSError, ValueError):  # macOS has another limit below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def main(record: str | None = None) -> None:
    """Run the agent on standard input and output.

    Args:
        record: file that shows this agent to other processes on this machine; None if it ends with
            its notebook.
    """
    _raise_descriptor_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in ENDING:  # on a logout, systemd stop or scancel, leave nothing behind
        signal.signal(number, lambda number, _: sys.exit(SIGNALLED + number))
    woken = signal_pipe()
    link_in, link_out, errors = os.dup(0), os.dup(1), os.dup(2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # a read alone could miss a signal that arrives just before it
    select.select([link_in, woken], [], [])
    spec = wire.decode(read_line(link_in))  # the rest belongs to the event loop
    assert isinstance(spec, wire.AgentSpec)
    agent = Agent(spec, woken, link_in, link_out, errors, record)
    try:
        agent.start()
    except BaseException as problem:
        agent.report_end(problem)
        agent.directories.remove()
        raise
    agent.run()


if __name__ == "__main__":
    main()
