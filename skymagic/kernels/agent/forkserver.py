"""Fork server (zygote): one process per node that has done the heavy imports and forks ranks.

A rank forked from here has torch at once, so that starting or replacing one costs milliseconds
instead of seconds. This process starts no thread and touches no GPU, because both would be broken
in its children. It outlives them, and ends the processes that they leave behind.

It is a subreaper (prctl PR_SET_CHILD_SUBREAPER): a process whose parent has ended becomes its
child, even one with a session of its own. The rank that started such a process is known by its
environment, its process group, or the rank's pipes that it still holds; without any of these, it
ends with the last of the ranks that could have started it. A process that asks for it in its
environment is kept: ``SKYMAGIC_KEEP=1 nohup …``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Sequence

from skymagic.kernels.agent.ending import ENDING, PASSED_ON
from skymagic.kernels.fork import end_with_parent, fork, signal_pipe
from skymagic.kernels.proc import (
    PR_SET_CHILD_SUBREAPER,
    TRACKER_SECONDS,
    is_tracker,
    prctl,
    read_proc,
)
from skymagic.wire import debug_log, processes
from skymagic.wire.agent import AgentMessage, ChildExited, RankForked, RankSpec, decode, encode
from skymagic.wire.processes import started

logger = logging.getLogger(__name__)

PIECE = 1 << 16
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def send_spec(channel: socket.socket, spec: RankSpec, fds: Sequence[int]) -> None:
    """Ask the forkserver for a rank.

    Args:
        fds: its control socket, standard output and standard error.
    """
    line = encode(spec)
    socket.send_fds(channel, [len(line).to_bytes(8, "big")], list(fds))
    channel.sendall(line)


def _receive_spec(channel: socket.socket) -> tuple[RankSpec, list[int]] | None:
    # the descriptors arrive with the first 8 bytes, the length of the message
    head, fds, _, _ = socket.recv_fds(channel, 8, 8)
    if not head:
        return None
    while len(head) < 8:
        head += channel.recv(8 - len(head))
    size = int.from_bytes(head, "big")
    line = b""
    while len(line) < size:
        piece = channel.recv(min(PIECE, size - len(line)))
        if not piece:
            return None
        line += piece
    spec = decode(line)
    assert isinstance(spec, RankSpec)
    return spec, fds


def preload(modules: Sequence[str], profile: str) -> None:
    """Import what ranks will need, and create their kernel.

    What fails is left to the rank, which reports the error properly.
    """
    # makes torch ask NVML, not the driver, which would be unusable in every process forked from
    # here
    check = os.environ.setdefault(NVML_CHECK, "1")
    gc.disable()  # collections would take a fifth of the time, for a megabyte of garbage
    for name in (processes.RANK, *modules):
        try:
            importlib.import_module(name)
        except Exception as problem:
            logger.warning("module not preloaded: %s: %s", name, type(problem).__name__)
            traceback.print_exc()
    if check == "1":
        os.environ.pop(NVML_CHECK)  # in a rank, torch asks the driver itself
    try:
        sys.modules[processes.RANK].prepare(profile)
    except Exception as problem:
        logger.warning("kernel is not prepared: error=%s", type(problem).__name__)
        traceback.print_exc()
    gc.freeze()  # shared pages stay shared: the collector does not write into them
    gc.enable()


def serve(channel: socket.socket, modules: Sequence[str], profile: str) -> None:
    """Fork ranks on request and report the end of each, until the agent closes the channel or ends.

    Then end every process that the ranks left behind.

    Args:
        modules: what is imported before.
        profile: directory that serves as the IPython profile of the ranks.
    """
    debug_log.setup_beside("forkserver")
    os.setpgid(0, 0)  # ending the agent's group leaves this process the time to tidy up
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in ENDING:  # the agent's handlers must not run in its children
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(signal.SIGTERM)  # the import below may be long
    logger.debug("forkserver imports: %s", ", ".join(modules) or "nothing")
    preload(modules, profile)
    logger.info("forkserver ready: pid=%s", os.getpid())
    adopt()
    for number in (*ENDING, *PASSED_ON):  # this process ends with the channel, not on a signal
        signal.signal(number, lambda *_: None)
    try:
        Forks(channel).serve()
    finally:
        logger.info("forkserver ends, with all processes that ranks have left")
        end_all()


class Forks:
    """Ranks that were forked by this process."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._orphans = Orphans()
        self._unsent = bytearray()
        """Reports that did not fit into the channel.

        The agent may be asking for ranks, and reads nothing until all its requests are sent.
        """

    def serve(self) -> None:
        """Fork ranks and report their ends until the channel is closed."""
        # only a signal with a handler, even an empty one, writes to the wakeup descriptor
        signal.signal(signal.SIGCHLD, lambda *_: None)
        woken = signal_pipe()
        with selectors.DefaultSelector() as ready:
            ready.register(self._channel, selectors.EVENT_READ)
            ready.register(woken, selectors.EVENT_READ)
            while True:
                for key, events in ready.select(self._orphans.look_again):
                    if key.fd == woken:
                        os.read(woken, 4096)
                    elif events & selectors.EVENT_READ:
                        request = _receive_spec(self._channel)
                        if request is None:
                            return
                        self._fork(*request)
                self._reap()
                self._send()
                ready.modify(
                    self._channel,
                    selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0),
                )

    def _fork(self, spec: RankSpec, fds: list[int]) -> None:
        def rank() -> object:
            # this process's empty handlers are inherited: the rank would ignore these signals
            for number in (signal.SIGCHLD, *ENDING, *PASSED_ON):
                signal.signal(number, signal.SIG_DFL)
            self._channel.close()
            end_with_parent()  # native code may hold the GIL, and nothing else would end it
            return sys.modules[processes.RANK].main(spec, fds)

        debug_log.set_level(spec.log_level)  # it may have changed since the start
        pid = fork(rank)
        logger.debug("forked: rank=%s pid=%s", spec.rank, pid)
        ident = spec.env["SKYMAGIC_IDENT"]
        # while the descriptors are open: it looks up which pipes they are
        owner = Owner(pid, ident, fds)
        self._orphans.record_fork(owner)
        # copies here would hide the end of the rank from the agent, which reads its pipes
        for fd in fds:
            os.close(fd)
        self._report(RankForked(spec.rank, pid, ident, owner.started))

    def _reap(self) -> None:
        """Report ranks that have ended, and end the processes that they left behind."""
        ended = []
        with contextlib.suppress(ChildProcessError):
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                ended.append(child)
        ranks = [(pid, status) for pid, status in ended if self._orphans.record_exit(pid)]
        if ended or self._orphans.look_again is not None:
            self._orphans.end()
        for pid, status in ranks:
            logger.debug("reaped: pid=%s status=%s", pid, status)
            self._report(ChildExited(pid, os.waitstatus_to_exitcode(status)))

    def _report(self, message: AgentMessage) -> None:
        self._unsent += encode(message)

    def _send(self) -> None:
        """Send as much as the channel accepts without waiting."""
        try:
            del self._unsent[: self._channel.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:  # the agent has ended, which the next read reports
            self._unsent.clear()


IDENT = b"SKYMAGIC_IDENT"
KEEP = b"SKYMAGIC_KEEP"

LOOK_AGAIN = 0.1
"""Seconds between looks at processes whose environment is unreadable, as it is during exec."""
UNREADABLE = 2.0
"""Seconds after a rank's end to keep looking; later such processes count as unmarked."""
TRACKER_POLL = 0.02

SUPPORTED = sys.platform == "linux" and os.path.exists(
    f"/proc/{os.getpid()}/task/{os.getpid()}/children"
)
"""Whether the system lists a process's children and lets it adopt theirs.

If not, only a rank's process group ends with it.
"""


def adopt() -> None:
    """Make this process the parent of all its descendants whose own parent ends."""
    if SUPPORTED:
        prctl(PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Return the children of this (single-threaded) process, including adopted ones."""
    if not SUPPORTED:
        return []
    me = os.getpid()
    with open(f"/proc/{me}/task/{me}/children", "rb") as file:
        return [int(pid) for pid in file.read().split()]


def environment(pid: int) -> dict[bytes, bytes]:
    """Return the environment that a process was started with; empty if unreadable."""
    entries = (entry.partition(b"=") for entry in read_proc(pid, "environ").split(b"\0") if entry)
    return {name: value for name, _, value in entries}


def held(pid: int | str) -> set[str]:
    """Return the targets of a process's file descriptors."""
    targets = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                targets.add(os.readlink(entry.path))
    return targets


def end(pids: Iterable[int]) -> list[int]:
    """SIGKILL processes, except those that ask to be kept or now belong to another user.

    Returns the ones that were killed.
    """
    ended = []
    # a value inherited from this process's own environment is not a request to be kept
    own = environment(os.getpid()).get(KEEP)
    for pid in pids:
        if environment(pid).get(KEEP, b"") in (b"", b"0", own):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                ended.append(pid)
    return ended


def end_all() -> None:
    """SIGKILL and reap all children of this process, and those that it then adopts.

    Resource trackers end by themselves.
    """
    until = time.monotonic() + TRACKER_SECONDS
    with contextlib.suppress(ChildProcessError):
        while remaining := children():
            trackers = set(filter(is_tracker, remaining)) if time.monotonic() < until else set()
            if end({*remaining} - trackers):
                os.waitpid(-1, 0)
            elif trackers:
                time.sleep(TRACKER_POLL)
                os.waitpid(-1, os.WNOHANG)
            else:
                # the remaining processes asked to be kept, or belong to another user
                return


class Owner:
    """A forked rank, with the marks by which processes that it started are recognized.

    Args:
        ident: set in the environment of the processes that it starts.
        descriptors: of its control socket and its pipes.
    """

    def __init__(self, pid: int, ident: str, descriptors: Iterable[int]) -> None:
        self.pid = pid
        self.ident = ident.encode()
        self.pipes = (
            {os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors} if SUPPORTED else set()
        )
        self.started = started(pid)
        self.lives = True


class Orphans:
    """Tracker of ranks, which ends the processes that ended ranks leave behind."""

    def __init__(self) -> None:
        self._owners: list[Owner] = []  # live ranks, and those that may have left processes behind
        self._ended = -UNREADABLE  # when a rank ended last
        self.look_again: float | None = None
        """Seconds after which `end` must be called again in any case; None if it need not be."""

    def record_fork(self, owner: Owner) -> None:
        """Record that a rank was started."""
        self._owners.append(owner)

    def record_exit(self, pid: int) -> bool:
        """Record that a child was reaped; return True if it was a rank."""
        owner = next((rank for rank in self._owners if rank.lives and rank.pid == pid), None)
        if owner is None:
            return False
        owner.lives = False
        self._ended = time.monotonic()
        if not SUPPORTED:
            with contextlib.suppress(OSError):
                # without a subreaper, its process group is all that can be found
                os.killpg(pid, signal.SIGKILL)
        return True

    def end(self) -> None:
        """SIGKILL processes that ended ranks left behind.

        Those that these leave behind in turn are found when they end: call this after each.
        """
        ranks = {rank.pid for rank in self._owners if rank.lives}
        adopted = [pid for pid in children() if pid not in ranks]
        owned = [pid for pid in adopted if self._belongs_to_rank(pid)]
        abandoned, now = set(adopted).difference(owned), time.monotonic()
        trackers = (
            set(filter(is_tracker, abandoned)) if now < self._ended + TRACKER_SECONDS else set()
        )
        if ended := end(abandoned - trackers):
            logger.info("processes left by ranks were killed: pids=%s", ended)
        if not adopted:
            self._owners = [rank for rank in self._owners if rank.lives]
        fresh = now < self._ended + UNREADABLE
        self.look_again = (
            LOOK_AGAIN if trackers or fresh and not all(map(environment, owned)) else None
        )

    def _belongs_to_rank(self, pid: int) -> bool:
        """Return True if a process belongs to a live rank."""
        owner = self._owner(pid)
        if owner is not None:
            return owner.lives
        start_time = started(pid)
        return any(rank.lives and rank.started <= start_time for rank in self._owners)

    def _owner(self, pid: int) -> Owner | None:
        mark = environment(pid).get(IDENT)
        groups: Collection[int] = ()
        with contextlib.suppress(OSError):
            groups = os.getpgid(pid), os.getsid(pid)
        latest_first = self._owners[::-1]  # a process id may have been an earlier rank's too
        for owner in latest_first:
            if owner.ident == mark or owner.pid in groups:
                return owner
        pipes = held(pid)
        return next((owner for owner in latest_first if owner.pipes & pipes), None)
