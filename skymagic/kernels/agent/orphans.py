"""Processes that outlive the one that started them, in sessions of their own too: found, and ended with the rank whose cell began them.

The forkserver is a subreaper (prctl PR_SET_CHILD_SUBREAPER): a process whose parent has ended becomes its child, as the ranks are. Whose it was
is told by its environment, its process group, or the pipes of its rank that it still holds; if none of them tells, it ends with
the last of the ranks that could have started it. A process is kept that asks for it in its environment: ``SKYMAGIC_KEEP=1 nohup …``.

Resource trackers (of multiprocessing and loky) delete what their rank has left in shared memory, and end, once all others are gone that
hold the other end of their pipe: they are given time for that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable

from skymagic.kernels.fork import prctl
from skymagic.wire.processes import started

PR_SET_CHILD_SUBREAPER = 36
IDENT = b"SKYMAGIC_IDENT"
KEEP = b"SKYMAGIC_KEEP"

LOOK_AGAIN = 0.1
"""Seconds until processes are looked at again whose environment could not be read: one that is just calling exec shows none."""
UNREADABLE = 2.0
"""Seconds after a rank's end in which that is done; later they are taken for processes without an environment."""
TRACKER_SECONDS = 3.0
"""For which resource trackers may delete what is left: gigabytes in memory take one. Less than the agent waits for the forkserver."""
TRACKER_POLL = 0.02

SUPPORTED = sys.platform == "linux" and os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
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
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return {
            name: value for name, _, value in (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
        }
    return {}


def held(pid: int | str) -> set[str]:
    """What the descriptors of a process lead to."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry.path))
    return found


def asks_to_be_kept(pid: int) -> bool:
    """Whether it was started with ``SKYMAGIC_KEEP=1``; what this process itself was started with is nobody's wish here."""
    return environment(pid).get(KEEP, b"") not in (b"", b"0", environment(os.getpid()).get(KEEP))


def end(pids: Iterable[int]) -> list[int]:
    """SIGKILL these, but not those that ask to be kept, nor those that are another user's by now; returns the others."""
    ended = []
    for pid in pids:
        if not asks_to_be_kept(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                ended.append(pid)
    return ended


def is_tracker(pid: int) -> bool:
    """Whether it is a resource tracker of multiprocessing's or loky's."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"resource_tracker" in file.read()
    return False


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
        self.pipes = {os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors} if SUPPORTED else set()
        self.started = started(pid)
        self.lives = True


class Orphans:
    """Knows the ranks of this process, and ends what those have left that are gone."""

    def __init__(self) -> None:
        self._owners: list[Owner] = []
        """Ranks that live, and those that may have left something."""
        self._ended = -UNREADABLE
        """When a rank ended last."""
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
        self.look_again = LOOK_AGAIN if trackers or fresh and not all(map(environment, others)) else None

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
