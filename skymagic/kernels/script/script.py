"""Shell script on a node, started by the node's first rank, which waits for it and reports its end.

The script's processes inherit the rank's standard output and error, so that their output takes the
same path as every cell's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

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
from skymagic.wire.script import ScriptOrder, ScriptResult

logger = logging.getLogger(__name__)

MARK = "SKYMAGIC_SCRIPT"
"""Environment variable of all processes of a script on one node.

Several nodes may share a machine.
"""
NAME = "sky_sh"
"""Name of the script's file in the shell's error messages."""
TAIL_LINES = 60
LAST_LINES = 10
CAUSE_TIMEOUT = 2.0
"""Seconds for other nodes to report the cause if this one only knows that a process went away.

torchrun ends its other workers before it reports which one has failed.
"""
TAIL_BYTES = 1 << 16
LINGER_SECONDS = 0.5
"""Seconds for left-over processes to end: the end of a pipe, a resource tracker."""
POLL, POLL_GONE = 0.05, 0.01
"""Seconds between two looks at the remaining processes.

No event reports the end of other parents' children. A single look that shows nothing is not enough,
because a process that is calling exec shows no environment.
"""


@dataclass(frozen=True)
class CommandLine:
    """A script's command.

    Attributes:
        argv: the shell and the path of the script's file.
        cwd: working folder.
        env: environment variables.
        grace: seconds between SIGTERM and SIGKILL.
    """

    argv: tuple[str, str]
    cwd: str
    env: Mapping[str, str]
    grace: float


class Failed(Exception):
    """The script failed. The argument is its result."""

    def __init__(self, result: ScriptResult) -> None:
        super().__init__(result)
        follows = result.cause is not None and result.cause.follows
        self.cause_timeout = CAUSE_TIMEOUT if follows else 0.0
        """Seconds that other nodes may continue, because one of them may know the cause."""

    def _render_traceback_(self) -> list[str]:
        return ["the script failed"]


class Stopped(KeyboardInterrupt):
    """The script was stopped and all its processes ended. The argument is its result."""


def run(order: ScriptOrder) -> ScriptResult:
    """Run a script on this node; a run's source calls it on one rank of each participating node.

    Raises:
        Failed: the exit code is not 0.
        Stopped: the run was interrupted.
    """
    # a script does not use the rank's process groups: there is nothing to release
    current().outside_groups = True
    try:
        beside_log = os.path.dirname(current().log)
        with tempfile.TemporaryDirectory(
            prefix="script-", dir=beside_log, ignore_cleanup_errors=True
        ) as folder:
            error_file = os.path.join(folder, "error.json")
            command_line = _command_line(order, folder, error_file)
            result = _carry_out(command_line, _log_length(), error_file)
    finally:
        current().outside_groups = False
    if result.status != 0:
        raise Failed(result)
    return result


# -- before ----------------------------------------------------------------------------------------


def _command_line(order: ScriptOrder, folder: str, error_file: str) -> CommandLine:
    """Prepare the script's command, folder and environment.

    The text goes into a file: other users could read it in a command line.
    """
    path = os.path.join(folder, NAME)
    with open(
        os.open(path, os.O_CREAT | os.O_WRONLY, 0o600),
        "w",
        encoding="utf-8",
        errors="surrogateescape",
    ) as file:
        file.write(f"{order.text}\n")
    info = current().info
    ranks = runtime.participants()
    nodes = sorted({rank // info.local_world_size for rank in ranks})
    task = f"{info.job_id}-{runtime.run_number()}"
    cluster = environment.cluster_of(info, nodes, task, _port(nodes))
    base = {name: value for name, value in current().base_env.items() if name not in order.without}
    processes = info.accelerators or info.local_world_size
    hostfile = os.path.join(folder, "hostfile")
    with open(hostfile, "w", encoding="utf-8") as file:
        file.write(environment.hostfile(cluster, processes))
    position = environment.rank_place(info) if order.as_rank else {}
    variables = {
        environment.HOSTFILE: hostfile,
        **position,
        **order.env,
        # last, so that no variable of the user replaces it
        MARK: f"{task}-{info.node}",
    }
    env = environment.environment(base, cluster, processes, variables, error_file, order.text)
    shell = (
        shutil.which("bash", path=env["PATH"]) or shutil.which("sh", path=env["PATH"]) or "/bin/sh"
    )
    cwd = os.path.expanduser(order.workdir) or os.getcwd()
    return CommandLine((shell, path), cwd, env, order.grace)


def _port(nodes: list[int]) -> int:
    """Return a free port of the script's head, which finds it and sends it to the other nodes."""
    run = runtime.run_number()
    if nodes[0] == current().info.node:
        # the port of this rank's previous script
        rendezvous.delete(f"script {current().last_script_run}")
        current().last_script_run = run
        port = rendezvous.free_port(
            {peer.node: peer.addr for peer in current().info.peers}[nodes[0]]
        )
        if len(nodes) > 1:
            rendezvous.put(f"script {run}", port)
        return port
    return int(rendezvous.get(f"script {run}"))


# -- meanwhile -------------------------------------------------------------------------------------


def _carry_out(command_line: CommandLine, log_start: int, error_file: str) -> ScriptResult:
    """Run a command and return its result; raise Stopped if it was interrupted.

    Args:
        log_start: length of the log before.
    """
    with Command(command_line) as command:
        try:
            if note := resources.gpus_in_use(command_line.env.get("CUDA_VISIBLE_DEVICES", "")):
                os.write(2, f"[{note}]\n".encode())
            result = command.wait()
        except KeyboardInterrupt:
            # Only inside this clause the rank counts as one that is stopping and is not killed, so
            # all remaining work is done here. A process that ignores TERM ends with the grace
            # period, and the notebook asks at that very moment.
            with tracebacks.interrupts_ignored():
                result = command.stop()
                raise Stopped(
                    _with_explanation(result, command_line, log_start, error_file)
                ) from None
    return _with_explanation(result, command_line, log_start, error_file)


class Command:
    """A command with all processes that carry its mark in their environment or are in its group.

    Their sessions and parents do not matter. If the rank ends, the node's forkserver ends them too
    (`kernels.agent.forkserver`).
    """

    def __init__(self, command_line: CommandLine) -> None:
        self._mark = f"{MARK}={command_line.env[MARK]}".encode()
        self._grace = command_line.grace
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""  # why it could not be started
        self._since = int(proc.status("self")[19])  # earliest possible start time of its processes
        try:
            self._process = subprocess.Popen(
                command_line.argv,
                cwd=command_line.cwd,
                env=command_line.env,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
            self._since = int(proc.status(self._process.pid)[19])
            logger.info("script started: pid=%s", self._process.pid)
        except (OSError, ValueError) as problem:
            self._problem = str(problem)
            logger.warning("script not started: error=%s", type(problem).__name__)
        except BaseException:  # an interrupt, after which it may be running
            self._kill()
            raise

    def __enter__(self) -> Command:
        return self

    def wait(self) -> ScriptResult:
        """Wait until all of its processes have ended, and return how it ended.

        Processes that outlive it have `LINGER_SECONDS`, then get SIGTERM, and after the grace
        period SIGKILL.
        """
        if self._process is not None:
            # not Popen.wait, which keeps waiting for a moment after an interrupt
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        if self._gone_within(LINGER_SECONDS):
            return self._result()
        logger.warning(
            "processes outlive the script and are ended: pids=%s", [*self._live_processes()]
        )
        survivors = tuple(proc.command_line(pid) for pid in self._live_processes())
        self._signal(signal.SIGTERM)
        if not self._gone_within(self._grace):
            self._kill()
        return self._result(survivors)

    def stop(self) -> ScriptResult:
        """Stop the command and return how it ended.

        SIGTERM goes to its group, which may pass it on, and half the grace period later to
        processes in other groups; SIGKILL follows at the end of the period.
        """
        group = self._process.pid if self._process is not None else -1
        # the command's own group first, which may pass the signal on
        self._signal(signal.SIGTERM, lambda member_of: member_of == group)
        if not self._gone_within(self._grace / 2):
            self._signal(signal.SIGTERM, lambda member_of: member_of != group)
            if not self._gone_within(self._grace / 2):
                self._kill()
        return self._result()

    def _result(self, survivors: tuple[str, ...] = ()) -> ScriptResult:
        if self._process is None:
            return ScriptResult(problem=self._problem)
        status = self._process.wait()
        logger.info("script ended: pid=%s status=%s", self._process.pid, status)
        return ScriptResult(status=status, survivors=survivors)

    def _live_processes(self) -> dict[int, tuple[int, int]]:
        """Return all of its live processes (pid → start time, process group)."""
        if self._process is None:
            return proc.processes_with_mark(self._mark, -1, self._since)
        self._process.poll()
        return proc.processes_with_mark(self._mark, self._process.pid, self._since)

    def _gone_within(self, seconds: float) -> bool:
        """Return True if all of its processes end within the given time."""
        deadline, looks = time.monotonic() + seconds, 0
        # two looks in a row must find nothing, because a process that is calling exec is invisible
        while looks < 2:
            looks = 0 if self._live_processes() else looks + 1
            if not looks and time.monotonic() > deadline:
                return False
            if looks < 2:
                time.sleep(POLL if not looks else POLL_GONE)
        return True

    def _signal(
        self, number: int, should_signal: Callable[[int], bool] = lambda group: True
    ) -> None:
        """Signal its live processes whose group is `should_signal`.

        Start times protect another process that has one of their ids by now.
        """
        for pid, (start_time, group) in self._live_processes().items():
            if should_signal(group):
                with contextlib.suppress(OSError):  # it may be another user's, by sudo
                    processes.send_signal(pid, start_time, number)

    def _kill(self) -> None:
        """SIGKILL until no process remains; resource trackers have some time to end themselves."""
        tracker_deadline = time.monotonic() + proc.TRACKER_SECONDS
        while remaining := self._live_processes():
            for pid, (start_time, _) in remaining.items():
                if time.monotonic() > tracker_deadline or not proc.is_tracker(pid):
                    with contextlib.suppress(OSError):
                        processes.send_signal(pid, start_time, signal.SIGKILL)
            time.sleep(POLL)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._kill()


# -- after -----------------------------------------------------------------------------------------


def _log_length() -> int:
    """Return the length of this rank's log, including all output so far."""
    flush_text()
    # shows nothing; the agent acknowledges it once it has emptied the pipes
    current().control.request(wire.Publish(current().info.rank, "", {}))
    return os.path.getsize(current().log)


def _tail(log_start: int) -> str:
    """Return the end of the log after position `log_start`."""
    size = _log_length()
    with open(current().log, "rb") as log:
        log.seek(max(log_start, size - TAIL_BYTES))
        return log.read().decode(errors="replace")


def _with_explanation(
    result: ScriptResult, command_line: CommandLine, log_start: int, error_file: str
) -> ScriptResult:
    """Return the result with the last lines and the cause of a failure."""
    tail = _tail(log_start).replace(command_line.argv[-1], NAME)
    cause = None
    if result.status != 0:
        recorded = ""
        with (
            contextlib.suppress(OSError),
            open(error_file, encoding="utf-8", errors="replace") as file,
        ):
            recorded = file.read()
        cause = root_cause.root_cause(recorded, tail)
    lines = tail.splitlines()
    own_lines = root_cause.without_launcher(tail)
    return replace(
        result,
        tail="\n".join(lines[-TAIL_LINES:]),
        message="\n".join(own_lines[-LAST_LINES:]),
        cause=cause,
    )
