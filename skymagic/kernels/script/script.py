"""A shell script on a node: the node's first rank starts it beside itself, waits for it, and says how it ended.

The script's processes hold the rank's own standard output and error, so that what they write goes the way of every cell's output.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from skymagic.kernels import proc
from skymagic.kernels.agent import resources
from skymagic.kernels.rank import tracebacks
from skymagic.kernels.rank.context import current
from skymagic.kernels.rank.shell import flush_text
from skymagic.kernels.script import environment, root_cause
from skymagic.runtime import info as runtime
from skymagic.runtime import rendezvous
from skymagic.wire import agent as wire
from skymagic.wire import processes

MARK = "SKYMAGIC_SCRIPT"
"""In the environment of all processes of a script on one node; several nodes may be one machine."""
NAME = "sky_sh"
"""The script's file, as the shell's complaints name it."""
TAIL_LINES = 60
LAST_LINES = 10
CAUSE_TIMEOUT = 2.0
"""Seconds that other nodes have to tell the cause when all that is known here is that a process went away: torchrun ends its other
workers before it says which one has failed."""
TAIL_BYTES = 1 << 16
LINGER_SECONDS = 0.5
"""Seconds that processes may go on which the script leaves: the end of a pipe, a resource tracker."""
POLL, POLL_GONE = 0.05, 0.01
"""Seconds between two looks at what is left of it: no event tells of processes with other parents. One look that shows nothing is not
enough, for a process that is just calling exec shows no environment."""


@dataclass(frozen=True)
class End:
    """How a script ended on one node, as plain values.

    Attributes:
        status: its exit code; negative for the signal that ended it; None when it did not begin, or nobody could tell.
        tail: the last lines that it wrote. words: the last of them that are not torchrun's own.
        cause: `rootcause.Cause` as a dictionary, None if nothing tells it.
        left: command lines of processes that went on after the script's end and were ended.
        problem: why it could not be started.
    """

    status: int | None = None
    tail: str = ""
    words: str = ""
    cause: Mapping[str, Any] | None = None
    left: tuple[str, ...] = ()
    problem: str = ""


class Failed(Exception):
    """The script did not end well."""

    def __init__(self, end: Mapping[str, Any]) -> None:
        super().__init__(end)
        cause = end["cause"]
        self.cause_timeout = CAUSE_TIMEOUT if cause is not None and cause["follows"] else 0.0
        """Seconds for which others may go on, for one of them may know why."""

    def _render_traceback_(self) -> list[str]:
        return ["the script failed"]


class Stopped(KeyboardInterrupt):
    """The script was stopped, and nothing of it is left; its argument is the `End` as a dictionary."""


def run(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Run a script on this node; the code of an order calls it on one rank of each node that takes part.

    Args:
        asked: ``text`` of the script; ``workdir``, "" for the rank's own; ``as_rank``: whether it gets the variables that tell
            this rank its place; ``env`` and ``without``: variables to add, and to leave out; ``grace``: seconds between TERM and KILL.

    Returns an `End` as a dictionary; it is the argument of Failed, raised when the status is not 0, and of Stopped, raised when the
    run was interrupted.
    """
    current().outside_groups = True
    try:
        beside_log = os.path.dirname(current().log)
        with tempfile.TemporaryDirectory(
            prefix="script-", dir=beside_log, ignore_cleanup_errors=True
        ) as folder:
            error_file = os.path.join(folder, "error.json")
            order = _order(asked, folder, error_file)
            end = _carry_out(order, _written(), error_file)
    finally:
        current().outside_groups = False
    if end["status"] != 0:
        raise Failed(end)
    return end


# -- before ----------------------------------------------------------------------------------------------------------


def _order(asked: Mapping[str, Any], folder: str, error_file: str) -> dict[str, Any]:
    """How the script is started. The text goes into a file: in a command line everyone could read it."""
    path = os.path.join(folder, NAME)
    with open(
        os.open(path, os.O_CREAT | os.O_WRONLY, 0o600),
        "w",
        encoding="utf-8",
        errors="surrogateescape",
    ) as file:
        file.write(f"{asked['text']}\n")
    info = current().info
    ranks = runtime.participants()
    nodes = sorted({rank // info.local_world_size for rank in ranks})
    task = f"{info.job_id}-{runtime.run_number()}"
    cluster = environment.cluster_of(info, nodes, task, _port(nodes))
    base = {
        name: value for name, value in current().base_env.items() if name not in asked["without"]
    }
    processes = info.accelerators or info.local_world_size
    hostfile = os.path.join(folder, "hostfile")
    with open(hostfile, "w", encoding="utf-8") as file:
        file.write(environment.hostfile(cluster, processes))
    place = environment.rank_place(info) if asked["as_rank"] else {}
    own = {environment.HOSTFILE: hostfile, **place, **asked["env"], MARK: f"{task}-{info.node}"}
    env = environment.environment(base, cluster, processes, own, error_file, asked["text"])
    shell = (
        shutil.which("bash", path=env["PATH"]) or shutil.which("sh", path=env["PATH"]) or "/bin/sh"
    )
    return {
        "argv": [shell, path],
        "cwd": os.path.expanduser(asked["workdir"]) or os.getcwd(),
        "env": env,
        "grace": asked["grace"],
    }


def _port(nodes: list[int]) -> int:
    """A port that is free on the script's head, which finds it and tells the other nodes."""
    run = runtime.run_number()
    if nodes[0] == current().info.node:
        rendezvous.delete(f"script {current().last_script_run}")
        current().last_script_run = run
        port = rendezvous.free_port(
            {peer.node: peer.addr for peer in current().info.peers}[nodes[0]]
        )
        if len(nodes) > 1:
            rendezvous.put(f"script {run}", port)
        return port
    return int(rendezvous.get(f"script {run}"))


# -- meanwhile -------------------------------------------------------------------------------------------------------


def _carry_out(order: Mapping[str, Any], begun: int, error_file: str) -> dict[str, Any]:
    """The `End` of a command as a dictionary; Stopped when it was interrupted. `begun`: the log's length before."""
    with Command(order) as command:
        try:
            if note := resources.gpus_in_use(order["env"].get("CUDA_VISIBLE_DEVICES", "")):
                os.write(2, f"[{note}]\n".encode())
            told = command.wait()
        except KeyboardInterrupt:
            # Only inside this clause the rank counts as one that is on its way out, and is not killed: all that is left to do is
            # done here. What hears no TERM ends when the grace period does, and the notebook asks at that very moment.
            with tracebacks.interrupts_ignored():
                raise Stopped(_end(command.stop(), order, begun, error_file)) from None
    return _end(told, order, begun, error_file)


class Command:
    """A command with all that it starts: what has its mark in the environment, whatever its session and its parent, or is in its group.

    A rank that ends takes it along, for the node's forkserver ends what ranks leave (`kernels.agent.forkserver`).
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._mark, self._grace = f"{MARK}={order['env'][MARK]}".encode(), float(order["grace"])
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""  # why it could not be started
        self._since = int(proc.status("self")[19])  # when the first of it can have been started
        try:
            self._process = subprocess.Popen(
                order["argv"],
                cwd=order["cwd"],
                env=order["env"],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
            self._since = int(proc.status(self._process.pid)[19])
        except (OSError, ValueError) as problem:
            self._problem = str(problem)
        except BaseException:  # an interrupt, when it may have been started
            self._kill()
            raise

    def __enter__(self) -> Command:
        return self

    def wait(self) -> dict[str, Any]:
        """Until nothing of it is left; how it ended.

        What it leaves running has `LINGER_SECONDS`, then gets SIGTERM, after the grace period SIGKILL.
        """
        if self._process is not None:
            # not Popen's own, which goes on for a moment after an interrupt
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        if self._gone_within(LINGER_SECONDS):
            return self._ended([])
        left = [proc.command_line(pid) for pid in self._others()]
        self._signal(signal.SIGTERM)
        if not self._gone_within(self._grace):
            self._kill()
        return self._ended(left)

    def stop(self) -> dict[str, Any]:
        """SIGTERM to its group, which may pass it on; half the grace period later to those with groups of their own, at its end SIGKILL."""
        group = self._process.pid if self._process is not None else -1
        self._signal(signal.SIGTERM, lambda member_of: member_of == group)
        if not self._gone_within(self._grace / 2):
            self._signal(signal.SIGTERM, lambda member_of: member_of != group)
            if not self._gone_within(self._grace / 2):
                self._kill()
        return self._ended([])

    def _ended(self, left: list[str]) -> dict[str, Any]:
        if self._process is None:
            return {"problem": self._problem}
        return {"status": self._process.wait(), "left": left}

    def _others(self) -> dict[int, tuple[int, int]]:
        """All that lives of it (pid → start, process group)."""
        if self._process is None:
            return proc.marked(self._mark, -1, self._since)
        self._process.poll()
        return proc.marked(self._mark, self._process.pid, self._since)

    def _gone_within(self, seconds: float) -> bool:
        """Whether nothing of it is left before the time is over."""
        deadline, looks = time.monotonic() + seconds, 0
        while looks < 2:
            looks = 0 if self._others() else looks + 1
            if not looks and time.monotonic() > deadline:
                return False
            if looks < 2:
                time.sleep(POLL if not looks else POLL_GONE)
        return True

    def _signal(self, number: int, chosen: Callable[[int], bool] = lambda group: True) -> None:
        """Signal those that live whose group is `chosen`, but not another process that has the number of one by now."""
        for pid, (begun, group) in self._others().items():
            if chosen(group):
                with contextlib.suppress(OSError):  # another user's, by sudo
                    processes.send_signal(pid, begun, number)

    def _kill(self) -> None:
        """SIGKILL until nothing is left; resource trackers end by themselves, or when their time is over."""
        patience = time.monotonic() + proc.TRACKER_SECONDS
        while others := self._others():
            for pid, (begun, _) in others.items():
                if time.monotonic() > patience or not proc.is_tracker(pid):
                    with contextlib.suppress(OSError):
                        processes.send_signal(pid, begun, signal.SIGKILL)
            time.sleep(POLL)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._kill()


# -- after -----------------------------------------------------------------------------------------------------------


def _written() -> int:
    """Bytes of this rank's log, with all that was written so far."""
    flush_text()
    # shows nothing, and is acknowledged when the agent has emptied the pipes
    current().control.request(wire.Publish(current().info.rank, "", {}))
    return os.path.getsize(current().log)


def _tail(begun: int) -> str:
    """The end of what was logged from `begun` on."""
    size = _written()
    with open(current().log, "rb") as log:
        log.seek(max(begun, size - TAIL_BYTES))
        return log.read().decode(errors="replace")


def _end(
    told: Mapping[str, Any], order: Mapping[str, Any], begun: int, error_file: str
) -> dict[str, Any]:
    """How the command ended, with the last lines, and the cause of a failure: an `End` as a dictionary."""
    tail = _tail(begun).replace(order["argv"][-1], NAME)
    status = told.get("status")
    cause = None
    if status != 0:
        recorded = ""
        with (
            contextlib.suppress(OSError),
            open(error_file, encoding="utf-8", errors="replace") as file,
        ):
            recorded = file.read()
        cause = root_cause.root_cause(recorded, tail)
    lines = tail.splitlines()
    words = root_cause.without_launcher(tail)
    end = End(
        status, "\n".join(lines[-TAIL_LINES:]), "\n".join(words[-LAST_LINES:]), asdict(cause) if cause else None,
        tuple(told.get("left", ())), told.get("problem", ""),
    )  # fmt: skip
    return asdict(end)
