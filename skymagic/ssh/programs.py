"""A scheduler's programs (``sbatch``, ``squeue``): run to their end, or as what passes a shell through; on this machine or on a host over SSH.

    notebook ──SSH──▶ login node: sbatch, squeue, …
             └─SSH──▶ login node: srun --overlap … ──▶ node: /bin/sh      a channel; values go this way to the first node

Connections are opened as they are needed, for an sshd allows a connection so many sessions, and are shared by all nodes of a pool.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

from skymagic.errors import HostError, ProvisionError, RequestError
from skymagic.ssh import config, connecting
from skymagic.ssh.command import CommandChannel
from skymagic.ssh.host import HostConnection
from skymagic.ssh.process import Channel
from skymagic.wire.untrusted import sanitized

SECONDS = 60.0
"""For which a program may take; a busy controller takes its time."""


class Programs:
    """Programs of this machine.

    Args:
        first: one of them, which is where the others are. kept: names of variables that they have of the notebook's, as a regular expression.
    """

    def __init__(self, first: str, kept: str) -> None:
        self._first, self._kept = first, re.compile(kept)

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment of programs, and of what they start."""
        return {name: value for name, value in environ.items() if self._kept.fullmatch(name)}

    def run(self, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run one of them to its end; what takes too long has failed. A terminal's Ctrl-C does not reach it.

        Raises:
            ProvisionError: there is no such program here.
        """
        try:
            done = subprocess.run(
                words,
                input=text,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS,
                check=False,
                env=self.variables(os.environ),
                start_new_session=True,
            )
            return _completed(words, done.returncode, done.stdout, done.stderr)
        except FileNotFoundError:
            raise ProvisionError(
                f"{words[0]} is not on the PATH here: run the notebook on a login node, or name one with --login"
            ) from None
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(
                words, -1, "", f"{words[0]} timed out after {SECONDS:.0f} s"
            )

    def channel(
        self, words: Sequence[str], variables: Mapping[str, str], timeout: float
    ) -> Channel:
        """What passes a shell's streams through one of them, which is not started yet.

        Args:
            words: the program with its arguments; the shell's command line comes last. variables: of its environment.
        """
        return CommandChannel(words, {**self.variables(os.environ), **variables})

    def close(self) -> None:
        """Close what leads there; twice is safe."""


class HostPrograms(Programs):
    """Programs of a host that this machine reaches over SSH.

    Args:
        name: as `--hosts` takes one. client: as `--ssh` takes it.

    Raises:
        RequestError: it is no host's name, or several.
    """

    def __init__(self, name: str, client: str, first: str, kept: str) -> None:
        super().__init__(first, kept)
        self._endpoint, *more = config.endpoints((name,), client)
        if more:
            raise RequestError(f"--login {name}: a cluster is reached through one login node")
        self._connections: list[HostConnection] = []
        self._lock = threading.Lock()
        self._settings = ["env", "-i"]
        """Words that give a program its environment there, which jobs have as well."""

    def open(self, ask: connecting.Ask | None) -> None:
        """Connect, and find the programs there, which for many sites only a login shell knows.

        Raises:
            HostError: nobody can log in. ProvisionError: the programs are not there.
        """
        (connection,) = connecting.connect_all([self._endpoint], ask)
        self._connections.append(connection)
        settings = f'command -v {self._first} >/dev/null 2>&1 && env || "${{SHELL:-/bin/sh}}" -lc env </dev/null\n'
        found = connection.run(settings, timeout=SECONDS).out
        there = dict(line.split("=", 1) for line in found.splitlines() if "=" in line)
        self._settings += [f"{name}={value}" for name, value in self.variables(there).items()]
        if self.run("sh", "-c", f"command -v {self._first}").returncode:
            raise ProvisionError(
                f"--login: {self._endpoint.label} has no {self._first} on its PATH: is it the cluster's login node?"
            )

    def run(self, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run one of them there; one that takes too long, or whose connection is lost, has failed."""
        mark = f"END-{secrets.token_hex(8)}"
        script = f"{shlex.join([*self._settings, *words])} <<'{mark}'\n{text}\n{mark}\n"
        try:
            done = self._connection().run(script, timeout=SECONDS)
            return _completed(words, done.status, done.out, done.err)
        except HostError as problem:
            return subprocess.CompletedProcess(
                words, -1, "", f"{words[0]}: connection to {problem}"
            )

    def channel(
        self, words: Sequence[str], variables: Mapping[str, str], timeout: float
    ) -> Channel:
        """What passes a shell's streams through one of them there."""
        settings = [*self._settings, *(f"{name}={value}" for name, value in variables.items())]
        command = shlex.join(["exec", *settings, *words])
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(
                    HostError
                ):  # it has as many sessions as it may have, or is lost
                    return cast(Channel, PassedChannel(connection.open_channel(timeout), command))
        return cast(Channel, PassedChannel(self._connected().open_channel(timeout), command))

    def close(self) -> None:
        """Close all connections; twice is safe, and what is run later opens another one."""
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()

    def _connection(self) -> HostConnection:
        return next((one for one in self._connections if one.alive), None) or self._connected()

    def _connected(self) -> HostConnection:
        connection = connecting.connect(self._endpoint)
        with self._lock:
            self._connections = [one for one in self._connections if one.alive] + [connection]
        return connection


def _completed(
    words: Sequence[str], status: int, out: str, err: str
) -> subprocess.CompletedProcess[str]:
    """How a program ended. What a scheduler prints goes into plans, lists and errors: other users name jobs and nodes."""
    return subprocess.CompletedProcess(words, status, sanitized(out), sanitized(err))


class PassedChannel:
    """A host's channel, on which a program passes another shell through.

    Args:
        channel: what it is otherwise. command: that program's, for the host's shell; the other shell's command line is its last argument.
    """

    def __init__(self, channel: Channel, command: str) -> None:
        self._channel, self._command = channel, command

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def exec_command(self, command: str) -> None:
        """Start the program with this as its last argument."""
        self._channel.exec_command(f"{self._command} {shlex.quote(command)}")
