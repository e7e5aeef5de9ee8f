"""A fork server (zygote): one process per node that has the heavy imports done, forks ranks from there, and ends what they have left.

A rank forked from here has torch at once, so that starting or replacing one costs milliseconds instead of seconds. This process
starts no thread and touches no GPU: both would be broken in its children. It outlives them.

It is a subreaper (prctl PR_SET_CHILD_SUBREAPER): a process whose parent has ended becomes its child, as the ranks are, also one with a session
of its own. Whose it was is told by its environment, its process group, or the pipes of its rank that it still holds; if none of them tells,
it ends with the last of the ranks that could have started it. A process is kept that asks for it in its environment:
``SKYMAGIC_KEEP=1 nohup …``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
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
from skymagic.kernels.proc import PR_SET_CHILD_SUBREAPER, TRACKER_SECONDS, is_tracker, prctl, told
from skymagic.wire import processes
from skymagic.wire.agent import AgentMessage, ChildExited, RankForked, RankSpec, decode, encode
from skymagic.wire.processes import started

PIECE = 1 << 16
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def send_spec(channel: socket.socket, spec: RankSpec, fds: Sequence[int]) -> None:
    """Ask the forkserver for a rank; `fds` are its control socket, standard output and standard error."""
    line = encode(spec)
    socket.send_fds(channel, [len(line).to_bytes(8, "big")], list(fds))
    channel.sendall(line)


def _receive_spec(channel: socket.socket) -> tuple[RankSpec, list[int]] | None:
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


def preload(modules: Sequence[str]) -> None:
    """Import what ranks will need; a module that fails is left to the rank, which reports it properly."""
    from skymagic.runtime.on_import import IPYPARALLEL, import_without  # the agent does without

    # torch asks NVML then, not the driver, which no process that is forked from here could use any more
    check = os.environ.setdefault(NVML_CHECK, "1")
    gc.disable()  # a fifth of the time would go into collections, for a megabyte of garbage
    import_without(*IPYPARALLEL)
    for name in (processes.RANK, *modules):
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
    if check == "1":
        os.environ.pop(NVML_CHECK)  # in a rank the driver itself answers
    gc.freeze()  # shared pages stay shared: the collector does not write into them
    gc.enable()


def serve(channel: socket.socket, modules: Sequence[str]) -> None:
    """Fork ranks on request and report each one's end, until the agent closes the channel, or ends; then end all that is left of them."""
    os.setpgid(0, 0)  # who ends the agent's group leaves this process the time to tidy up
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in ENDING:  # the agent's handlers are not for what it forks
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(signal.SIGTERM)  # the import below may be long
    preload(modules)
    adopt()
    for number in (*ENDING, *PASSED_ON):  # the end of the channel counts
        signal.signal(number, lambda *_: None)
    try:
        Forks(channel).serve()
    finally:
        end_all()


class Forks:
    """The ranks that were forked."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._orphans = Orphans()
        self._unsent = bytearray()
        """Reports that the channel did not take yet: the agent may be asking for ranks, and reads nothing until all its requests are sent."""

    def serve(self) -> None:
        """Fork ranks and report their ends until the channel is closed."""
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
            for number in (signal.SIGCHLD, *ENDING, *PASSED_ON):
                signal.signal(number, signal.SIG_DFL)
            self._channel.close()
            end_with_parent()  # native code may hold the interpreter, and nothing else would end it
            return sys.modules[processes.RANK].main(spec, fds)

        pid = fork(rank)
        ident = spec.env["SKYMAGIC_IDENT"]
        owner = Owner(pid, ident, fds)
        self._orphans.forked(owner)
        for fd in fds:
            os.close(fd)
        self._report(RankForked(spec.rank, pid, ident, owner.started))

    def _reap(self) -> None:
        """Report ranks that have ended, and end what they have left."""
        ended = []
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended.append(found)
        ranks = [(pid, status) for pid, status in ended if self._orphans.exited(pid)]
        if ended or self._orphans.look_again is not None:
            self._orphans.end()
        for pid, status in ranks:
            self._report(ChildExited(pid, os.waitstatus_to_exitcode(status)))

    def _report(self, message: AgentMessage) -> None:
        self._unsent += encode(message)

    def _send(self) -> None:
        """Send what the channel takes now, without waiting."""
        try:
            del self._unsent[: self._channel.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:  # the agent has ended, which reading tells
            self._unsent.clear()


IDENT = b"SKYMAGIC_IDENT"
KEEP = b"SKYMAGIC_KEEP"

LOOK_AGAIN = 0.1
"""Seconds until processes are looked at again whose environment could not be read: one that is just calling exec shows none."""
UNREADABLE = 2.0
"""Seconds after a rank's end in which that is done; later they are taken for processes without an environment."""
TRACKER_POLL = 0.02

SUPPORTED = sys.platform == "linux" and os.path.exists(
    f"/proc/{os.getpid()}/task/{os.getpid()}/children"
)
"""Whether the system tells a process's children, and lets it adopt theirs; else a rank ends with its process group alone."""


def adopt() -> None:
    """From now on, what descends from this process becomes its child when its own parent ends."""
    if SUPPORTED:
        prctl(PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """The children of this process, which has one thread, adopted ones among them."""
    if not SUPPORTED:
        return []
    me = os.getpid()
    with open(f"/proc/{me}/task/{me}/children", "rb") as file:
        return [int(pid) for pid in file.read().split()]


def environment(pid: int) -> dict[bytes, bytes]:
    """The environment that a process was started with; empty where it cannot be read."""
    entries = (entry.partition(b"=") for entry in told(pid, "environ").split(b"\0") if entry)
    return {name: value for name, _, value in entries}


def held(pid: int | str) -> set[str]:
    """What the descriptors of a process lead to."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry.path))
    return found


def end(pids: Iterable[int]) -> list[int]:
    """SIGKILL these, but not those that ask to be kept, nor those that are another user's by now; returns the others."""
    ended = []
    own = environment(os.getpid()).get(
        KEEP
    )  # what this process itself was started with is nobody's wish here
    for pid in pids:
        if environment(pid).get(KEEP, b"") in (b"", b"0", own):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                ended.append(pid)
    return ended


def end_all() -> None:
    """SIGKILL and await all children of this process, and those that it adopts thereby; resource trackers end by themselves."""
    until = time.monotonic() + TRACKER_SECONDS
    with contextlib.suppress(ChildProcessError):
        while left := children():
            trackers = set(filter(is_tracker, left)) if time.monotonic() < until else set()
            if end({*left} - trackers):
                os.waitpid(-1, 0)
            elif trackers:
                time.sleep(TRACKER_POLL)
                os.waitpid(-1, os.WNOHANG)
            else:
                return


class Owner:
    """A rank, as what it has started can be told to be its own.

    Args:
        ident: in the environment of what it starts.
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
    """Knows the ranks of this process, and ends what those have left that are gone."""

    def __init__(self) -> None:
        self._owners: list[Owner] = []  # ranks that live, and those that may have left something
        self._ended = -UNREADABLE  # when a rank ended last
        self.look_again: float | None = None
        """Seconds after which `end` must be called again, whatever happens; None if there is no need."""

    def forked(self, owner: Owner) -> None:
        """A rank was started."""
        self._owners.append(owner)

    def exited(self, pid: int) -> bool:
        """A child was waited for; whether it was a rank."""
        owner = next((one for one in self._owners if one.lives and one.pid == pid), None)
        if owner is None:
            return False
        owner.lives = False
        self._ended = time.monotonic()
        if not SUPPORTED:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        return True

    def end(self) -> None:
        """SIGKILL what ranks have left that have ended. What these leave in turn is found at their end: call this after each."""
        ranks = {one.pid for one in self._owners if one.lives}
        adopted = [pid for pid in children() if pid not in ranks]
        others = [pid for pid in adopted if self._owned(pid)]
        left, now = set(adopted).difference(others), time.monotonic()
        trackers = set(filter(is_tracker, left)) if now < self._ended + TRACKER_SECONDS else set()
        end(left - trackers)
        if not adopted:
            self._owners = [one for one in self._owners if one.lives]
        fresh = now < self._ended + UNREADABLE
        self.look_again = (
            LOOK_AGAIN if trackers or fresh and not all(map(environment, others)) else None
        )

    def _owned(self, pid: int) -> bool:
        """Whether it belongs to a rank that lives."""
        owner = self._owner(pid)
        if owner is not None:
            return owner.lives
        begun = started(pid)
        return any(one.lives and one.started <= begun for one in self._owners)

    def _owner(self, pid: int) -> Owner | None:
        mark = environment(pid).get(IDENT)
        groups: Collection[int] = ()
        with contextlib.suppress(OSError):
            groups = os.getpgid(pid), os.getsid(pid)
        latest_first = self._owners[::-1]  # a process id may be an earlier rank's, too
        for one in latest_first:
            if one.ident == mark or one.pid in groups:
                return one
        pipes = held(pid)
        return next((one for one in latest_first if one.pipes & pipes), None)
