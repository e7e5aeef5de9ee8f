"""A cluster seen from elsewhere: Slurm's programs run on its login node, over SSH.

    notebook ──SSH──▶ login node: sbatch, squeue, …
             └─SSH──▶ login node: srun --overlap … ──▶ node: /bin/sh      a channel; values go this way to the first node

Its connections are opened as they are needed, for an sshd allows a connection so many sessions, and are shared by all nodes of a pool.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

from skymagic.display.live import asks_secrets
from skymagic.errors import HostError, ProvisionError, RequestError
from skymagic.providers.slurm_jobs import SECONDS, LoginNode, environment
from skymagic.ssh import config, connecting
from skymagic.ssh.host import HostConnection
from skymagic.ssh.process import Channel

SETTINGS = """\
command -v sbatch >/dev/null 2>&1 && env || "${SHELL:-/bin/sh}" -lc env </dev/null
"""
"""Where Slurm's programs are: for many sites only a login shell knows."""


class RemoteLogin(LoginNode):
    """A login node that this machine reaches over SSH.

    Args:
        name: as `--hosts` takes one. client: as `--ssh` takes it.

    Raises:
        RequestError: it is no host's name, or several.
    """

    def __init__(self, name: str, client: str) -> None:
        super().__init__()
        self._endpoint, *more = config.endpoints((name,), client)
        if more:
            raise RequestError(f"--login {name}: a cluster is reached through one login node")
        self._connections: list[HostConnection] = []
        self._lock = threading.Lock()
        self._settings = ["env", "-i"]
        """Words that give a program its environment there, which jobs have as well."""

    def open(self) -> None:
        """Connect, and find Slurm there; on the main thread, where a passphrase or a code can be asked for.

        Raises:
            HostError: nobody can log in. ProvisionError: Slurm's programs are not there.
        """
        (connection,) = connecting.connect_all([self._endpoint], asks_secrets())
        self._connections.append(connection)
        found = connection.run(SETTINGS, timeout=SECONDS).out
        there = dict(line.split("=", 1) for line in found.splitlines() if "=" in line)
        self._settings += [f"{name}={value}" for name, value in environment(there).items()]
        if self.run("sh", "-c", "command -v sbatch").returncode:
            raise ProvisionError(
                f"--login: {self._endpoint.label} has no sbatch on its PATH: is it the cluster's login node?"
            )

    def run(self, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's programs there; one that takes too long, or whose connection is lost, has failed."""
        mark = f"END-{secrets.token_hex(8)}"
        script = f"{shlex.join([*self._settings, *words])} <<'{mark}'\n{text}\n{mark}\n"
        try:
            done = self._connection().run(script, timeout=SECONDS)
            return subprocess.CompletedProcess(words, done.status, done.out, done.err)
        except HostError as problem:
            return subprocess.CompletedProcess(words, -1, "", f"{words[0]}: connection to {problem}")

    def channel(self, words: Sequence[str], variables: Mapping[str, str], timeout: float) -> Channel:
        """What passes a shell's streams through one of Slurm's programs there."""
        settings = [*self._settings, *(f"{name}={value}" for name, value in variables.items())]
        command = shlex.join(["exec", *settings, *words])
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(HostError):  # it has as many sessions as it may have, or is lost
                    return cast(Channel, LoginChannel(connection.open_channel(timeout), command))
        return cast(Channel, LoginChannel(self._connected().open_channel(timeout), command))

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


class LoginChannel:
    """A channel of the login node's, on which a program passes another shell through.

    Args:
        channel: what it is otherwise. command: that program's, for a login shell; the shell's command line is its last argument.
    """

    def __init__(self, channel: Channel, command: str) -> None:
        self._channel, self._command = channel, command

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def exec_command(self, command: str) -> None:
        """Start the program with this as its last argument."""
        self._channel.exec_command(f"{self._command} {shlex.quote(command)}")
