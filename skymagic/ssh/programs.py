"""A scheduler's programs (``sbatch``, ``squeue``), on this machine or on a host over SSH.

They run to their end, or relay a shell::

    notebook ──SSH──▶ login node: sbatch, squeue, …
             └─SSH──▶ login node: srun --overlap … ──▶ node: /bin/sh      a channel

Values for the first node take the second route. Connections are opened as needed, because an sshd
allows a limited number of sessions per connection, and are shared by all nodes of a pool.
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
"""Seconds that a program may take; a busy controller is slow."""


class Programs:
    """Programs on this machine.

    Args:
        first: one of them, whose location is that of the others.
        variable_pattern: regular expression for the names of the notebook's variables that they
            inherit.
    """

    def __init__(self, first: str, variable_pattern: str) -> None:
        self._first, self._variable_pattern = first, re.compile(variable_pattern)

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the programs and their child processes."""
        return {
            name: value for name, value in environ.items() if self._variable_pattern.fullmatch(name)
        }

    def run(self, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program to its end; a timeout counts as a failure.

        A terminal's Ctrl-C does not reach it.

        Raises:
            ProvisionError: the program does not exist here.
        """
        try:
            completed = subprocess.run(
                command,
                input=text,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS,
                check=False,
                env=self.variables(os.environ),
                start_new_session=True,
            )
            return _run(command, completed.returncode, completed.stdout, completed.stderr)
        except FileNotFoundError:
            raise ProvisionError(
                f"{command[0]} is not on the PATH here: run the notebook on a login node, "
                "or name one with --login",
                code="program-missing",
                names=[command[0]],
            ) from None
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(
                command, -1, "", f"{command[0]} timed out after {SECONDS:.0f} s"
            )

    def channel(
        self, arguments: Sequence[str], variables: Mapping[str, str], timeout: float
    ) -> Channel:
        """Return a channel, not started yet, that relays a shell's streams through a program.

        Args:
            arguments: the program with its arguments; the shell's command line is appended.
            variables: additional environment variables.
        """
        return CommandChannel(arguments, {**self.variables(os.environ), **variables})

    def close(self) -> None:
        """Close the connections. Safe to call twice."""


class HostPrograms(Programs):
    """Programs on a host that this machine reaches over SSH.

    Args:
        name: a host, as in `--hosts`.
        client: the SSH client, as in `--ssh`.

    Raises:
        RequestError: it is not a host's name, or several.
    """

    def __init__(self, name: str, client: str, first: str, variable_pattern: str) -> None:
        super().__init__(first, variable_pattern)
        self._endpoint, *more = config.endpoints((name,), client)
        if more:
            raise RequestError(f"--login {name}: a cluster is reached through one login node")
        self._connections: list[HostConnection] = []
        self._lock = threading.Lock()
        self._settings = ["env", "-i"]
        """Words that set the environment of a program there, which jobs inherit."""

    def open(self, ask: connecting.Ask | None) -> None:
        """Connect, and find the programs, which at many sites are only on a login shell's PATH.

        Raises:
            HostError: the login failed.
            ProvisionError: the programs are not there.
        """
        (connection,) = connecting.connect_all([self._endpoint], ask)
        self._connections.append(connection)
        settings = (
            f"command -v {self._first} >/dev/null 2>&1 && env || "
            '"${SHELL:-/bin/sh}" -lc env </dev/null\n'
        )
        output = connection.run(settings, timeout=SECONDS).out
        environment = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
        self._settings += [f"{name}={value}" for name, value in self.variables(environment).items()]
        if self.run("sh", "-c", f"command -v {self._first}").returncode:
            raise ProvisionError(
                f"--login: {self._endpoint.label} has no {self._first} on its PATH: "
                "is it the cluster's login node?",
                code="program-missing",
                names=[self._first],
            )

    def run(self, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program on the host; a timeout, or a lost connection, counts as a failure."""
        mark = f"END-{secrets.token_hex(8)}"
        script = f"{shlex.join([*self._settings, *command])} <<'{mark}'\n{text}\n{mark}\n"
        try:
            result = self._connection().run(script, timeout=SECONDS)
            return _run(command, result.status, result.out, result.err)
        except HostError as problem:
            return subprocess.CompletedProcess(
                command, -1, "", f"{command[0]}: connection to {problem}"
            )

    def channel(
        self, arguments: Sequence[str], variables: Mapping[str, str], timeout: float
    ) -> Channel:
        """Return a channel that relays a shell's streams through a program on the host."""
        settings = [*self._settings, *(f"{name}={value}" for name, value in variables.items())]
        command = shlex.join(["exec", *settings, *arguments])
        with self._lock:
            for connection in self._connections:
                # a connection with as many sessions as sshd allows, or a lost one, is skipped
                with contextlib.suppress(HostError):
                    return cast(
                        Channel, ForwardedChannel(connection.open_channel(timeout), command)
                    )
        return cast(Channel, ForwardedChannel(self._connect().open_channel(timeout), command))

    def close(self) -> None:
        """Close all connections. Safe to call twice; later calls of `run` open new ones."""
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()

    def _connection(self) -> HostConnection:
        return (
            next((connection for connection in self._connections if connection.alive), None)
            or self._connect()
        )

    def _connect(self) -> HostConnection:
        connection = connecting.connect(self._endpoint)
        with self._lock:
            self._connections = [existing for existing in self._connections if existing.alive] + [
                connection
            ]
        return connection


def _run(
    command: Sequence[str], status: int, out: str, err: str
) -> subprocess.CompletedProcess[str]:
    """Return a program's result with its output sanitized.

    A scheduler's output goes into plans, lists and errors, and other users choose the names of jobs
    and nodes.
    """
    return subprocess.CompletedProcess(command, status, sanitized(out), sanitized(err))


class ForwardedChannel:
    """A host's channel on which a program relays another shell.

    Args:
        channel: the host's channel.
        command: the program's command line, for the host's shell; the other shell's command line is
            appended.
    """

    def __init__(self, channel: Channel, command: str) -> None:
        self._channel, self._command = channel, command

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def exec_command(self, command: str) -> None:
        """Start the program with this command line as its last argument."""
        self._channel.exec_command(f"{self._command} {shlex.quote(command)}")
