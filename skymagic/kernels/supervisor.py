"""A subreaper (prctl PR_SET_CHILD_SUBREAPER) of one command: nothing that the command starts outlives it, or the rank.

A process of its own, started as a plain file by the bare interpreter (``python -I -S``), so that it is there within milliseconds: it
imports the standard library alone. A process that leaves its parent (a double fork, a session
of its own) becomes the child of its nearest subreaper instead of init's, and is found. Its argument is the descriptor of a socket to the rank:

    rank → supervisor    first a line of JSON: argv, cwd, env, grace (seconds between TERM and KILL); then "stop"; its end means: kill
    supervisor → rank    a line of JSON: {"started": pid}, then {"status": …, "left": […]}; or {"problem": "why it could not start"}
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LINGER_SECONDS = 0.5
"""Seconds that processes may go on which the command leaves: the end of a pipe, a resource tracker."""
KILL_INTERVAL = 0.05
"""Seconds between two rounds of killing: a process may start another one meanwhile."""
TRACKER_SECONDS = 3.0
"""For which resource trackers (of multiprocessing and loky) may delete what the killed have left in shared memory: gigabytes take one.
Less than the agent waits for the forkserver, which gives them the same time."""
PIECE = 1 << 16
MAX_COMMAND_LINE = 120
"""Characters of a command line that are told."""


def prctl(option: int, value: int) -> None:
    """Linux's prctl; elsewhere nothing happens."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def processes() -> list[tuple[int, int, int, int]]:
    """(pid, parent's pid, process group, start in the system's ticks or 0) of all living processes.

    Those that have ended and were not waited for are left out.
    """
    if not os.path.isdir("/proc/self"):
        ps = subprocess.Popen(["ps", "-A", "-o", "pid=,ppid=,pgid=,stat="], stdout=subprocess.PIPE, text=True)
        rows = [line.split() for line in ps.communicate()[0].splitlines()]
        living = [tuple(map(int, row[:3])) for row in rows if len(row) == 4 and row[3][0] != "Z"]
        return [(pid, parent, group, 0) for pid, parent, group in living if pid != ps.pid]
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                state, parent, group, *_ = fields = status(int(name))
                if state not in (b"Z", b"X"):
                    found.append((int(name), int(parent), int(group), int(fields[19])))
    return found


def status(pid: int | str) -> list[bytes]:
    """What the system tells of a process, or of a thread (``PID/task/TID``), from its state on (proc(5), ``/proc/PID/stat``). Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()  # a name may hold blanks and brackets


def processor_seconds(fields: list[bytes]) -> float:
    """Seconds on the processor, of a `status`."""
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def told(pid: int, name: str) -> bytes:
    """What the system tells of a process in ``/proc/PID/NAME``; nothing where it cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""


def is_tracker(pid: int) -> bool:
    """Whether it is a resource tracker: it ends by itself once all others are gone that hold the other end of its pipe."""
    return b"resource_tracker" in told(pid, "cmdline")


def command_line(pid: int) -> str:
    """What a process was started as, shortened; its number where the system does not tell."""
    if words := " ".join(told(pid, "cmdline").decode(errors="replace").split("\0")).strip():
        return words if len(words) <= MAX_COMMAND_LINE else words[: MAX_COMMAND_LINE - 1] + "…"
    return f"process {pid}"


class Supervisor:
    """Owns one command and its descendants."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.received = b""
        self.child: subprocess.Popen[bytes] | None = None
        """Kept: one that is forgotten waits for its process, whose end would then be unknown here."""
        self.main = 0  # the command's own pid, which is its process group's too
        self.status: int | None = None
        self.left: list[str] = []
        self.grace = 2.0
        self.deadlines: list[tuple[float, str]] = []  # when to go a step further: ``left``, ``rest``, ``kill``
        self.ending = False
        self.killing_since: float | None = None

    # -- start -------------------------------------------------------------------------------------------------------

    def read_order(self, wake: socket.socket) -> dict[str, Any] | None:
        """The first line; None if the rank is gone before it came, which its own end says where a fork of it holds the socket."""
        while b"\n" not in self.received:
            ready = select.select([self.link, wake], [], [])[0]
            if wake in ready and signal.SIGHUP in wake.recv(PIECE):
                return None
            if self.link not in ready:
                continue
            piece = self.link.recv(PIECE)
            if not piece:
                return None
            self.received += piece
        line, _, self.received = self.received.partition(b"\n")
        order: dict[str, Any] = json.loads(line)
        return order

    def start(self, order: dict[str, Any]) -> bool:
        """Start the command in a process group of its own; whether that worked."""
        self.grace = float(order["grace"])
        try:
            self.child = subprocess.Popen(
                order["argv"], cwd=order["cwd"], env=order["env"], stdin=subprocess.DEVNULL, process_group=0,
                preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )  # fmt: skip
        except (OSError, ValueError) as problem:
            self.send({"problem": str(problem)})
            return False
        self.main = self.child.pid
        self.send({"started": self.main})
        return True

    def send(self, message: dict[str, Any]) -> None:
        """Send to the rank; to one that is gone nothing is sent."""
        with contextlib.suppress(OSError):
            self.link.sendall(json.dumps(message).encode() + b"\n")

    # -- until all are gone ------------------------------------------------------------------------------------------

    def serve(self, wake: socket.socket) -> None:
        """Until the command and all that it started are gone."""
        with selectors.DefaultSelector() as ready:
            ready.register(self.link, selectors.EVENT_READ)
            ready.register(wake, selectors.EVENT_READ)
            self.obey()  # of a rank that was stopped while this process started, it has come with the order
            while not self.finished():
                timeout = max(0.0, self.deadlines[0][0] - time.monotonic()) if self.deadlines else None
                for key, _ in ready.select(timeout):
                    if key.fileobj is wake:
                        signals = wake.recv(PIECE)
                        if signal.SIGHUP in signals:  # the rank is gone, though a fork of it holds the socket
                            self.kill()
                    elif not self.receive():
                        ready.unregister(self.link)
                self.reap()
                self.run_due_steps()
        self.send({"status": self.status, "left": self.left})

    def finished(self) -> bool:
        """Whether everything has ended; when only the command has, the others' time begins to run."""
        if self.status is None:
            return False
        if not self.descendants():
            return True
        if not self.deadlines and not self.ending:
            self.deadlines = [(time.monotonic() + LINGER_SECONDS, "left")]
        return False

    def receive(self) -> bool:
        """Take what the rank sends; False when it is gone."""
        try:
            piece = self.link.recv(PIECE)
        except OSError:
            piece = b""
        self.received += piece
        if not piece:
            self.kill()
        self.obey()
        return bool(piece)

    def obey(self) -> None:
        """End the command if the rank has said so."""
        if b"stop\n" in self.received:
            self.received = b""
            self.end()

    def reap(self) -> None:
        """Wait for children that have ended, adopted ones too."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.main:
                    self.status = os.waitstatus_to_exitcode(ended[1])

    def run_due_steps(self) -> None:
        """Carry out the steps that are due."""
        while self.deadlines and self.deadlines[0][0] <= time.monotonic():
            step = self.deadlines.pop(0)[1]
            others = self.descendants()
            if step == "left":
                self.left = [command_line(pid) for pid in others]
                self.signal(others, signal.SIGTERM)
                self.ending = True
                self.deadlines = [(time.monotonic() + self.grace, "kill")]
            elif step == "rest":
                self.signal({pid: begun for pid, begun in others.items() if not self.in_group(pid)}, signal.SIGTERM)
            else:
                self.signal(self.without_trackers(others), signal.SIGKILL)
                self.deadlines = [(time.monotonic() + KILL_INTERVAL, "kill")]

    def without_trackers(self, others: dict[int, int]) -> dict[int, int]:
        """The processes (pid → start) of these that are killed now: trackers have until `TRACKER_SECONDS` after the first round."""
        now = time.monotonic()
        if self.killing_since is None:
            self.killing_since = now
        if now - self.killing_since > TRACKER_SECONDS:
            return others
        return {pid: begun for pid, begun in others.items() if not is_tracker(pid)}

    def end(self) -> None:
        """TERM to the command's group, which may pass it on; then to those with groups of their own; then KILL."""
        if self.ending:
            return
        self.ending = True
        with contextlib.suppress(OSError):
            os.killpg(self.main, signal.SIGTERM)
        now = time.monotonic()
        self.deadlines = [(now + self.grace / 2, "rest"), (now + self.grace, "kill")]

    def kill(self) -> None:
        """KILL, at once and until none is left."""
        self.ending = True
        self.deadlines = [(time.monotonic(), "kill")]

    def in_group(self, pid: int) -> bool:
        """Whether a process has had the signal that its group got."""
        with contextlib.suppress(OSError):
            return os.getpgid(pid) == self.main
        return True

    def signal(self, others: dict[int, int], number: int) -> None:
        """Send a signal to each of these processes (pid → start), but not to another one that has its number by now."""
        for pid, begun in others.items():
            with contextlib.suppress(OSError):
                if not begun or int(status(pid)[19]) == begun:
                    os.kill(pid, number)

    def descendants(self) -> dict[int, int]:
        """(pid → start) of all living processes below this one, and, where the system has no subreapers, of the command's group."""
        children: dict[int, list[int]] = {}
        group, starts = [], {}
        for pid, parent, member_of, begun in processes():
            starts[pid] = begun
            children.setdefault(parent, []).append(pid)
            group += [pid] if member_of == self.main else []
        found: dict[int, None] = {}
        waiting = [os.getpid()]
        while waiting:
            below = [pid for pid in children.get(waiting.pop(), ()) if pid not in found]
            found.update(dict.fromkeys(below))
            waiting += below
        return {pid: starts[pid] for pid in {**found, **dict.fromkeys(group)}}


def main() -> None:
    """Serve one command."""
    os.set_inheritable(int(sys.argv[1]), False)
    link = socket.socket(fileno=int(sys.argv[1]))
    parent = os.getppid()
    wake, bell = socket.socketpair()
    for end in (wake, bell):
        end.setblocking(False)
    # handlers, not SIG_IGN, which the command would inherit
    for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(bell.fileno())
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    # the rank may have ended before that took effect: then our parent is another one by now
    supervisor = Supervisor(link)
    order = supervisor.read_order(wake)
    if order is not None and os.getppid() == parent and supervisor.start(order):
        supervisor.serve(wake)


if __name__ == "__main__":
    main()
