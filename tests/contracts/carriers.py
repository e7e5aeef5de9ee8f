"""What carries a channel, an implementation each: how a node is reached, and how its connection is cut.

The suite sees a `Carrier` and the `HostConnection` that it makes. A carrier of yours is one function here, and one line in `test_channel.py`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from skymagic.magics.arguments.cell_magics import parse_pool
from skymagic.providers import ray as ray_provider
from skymagic.providers.cluster import ClusterSurvey
from skymagic.providers.kubernetes import Kubernetes
from skymagic.providers.ray import Ray
from skymagic.providers.slurm import Slurm
from skymagic.ssh.command import CommandChannel
from skymagic.ssh.config import endpoints
from skymagic.ssh.connecting import connect
from skymagic.ssh.host import ChannelConnection, HostConnection
from tests.lab import ray as ray_lab
from tests.lab.ending import cmdline
from tests.lab.hosts import loopback, masters
from tests.lab.kube import kube
from tests.lab.slurm import cluster as slurm_cluster


@dataclass(frozen=True)
class Carrier:
    """A way to one node.

    Attributes:
        connect: opens a connection to the node.
        cut: breaks all connections without a word to either end; None where there is nothing between the ends.
        large: bytes of a large transfer; fewer where each costs the carrier much.
    """

    connect: Callable[[], HostConnection]
    cut: Callable[[], object] | None
    large: int = 64 << 20


def _kill_children(of: Callable[[list[str]], bool]) -> None:
    """Kill this process's children with such a command line."""
    for child in psutil.Process().children():
        if of(cmdline(child)):
            child.kill()


@contextmanager
def local(folder: Path) -> Iterator[Carrier]:
    """A shell that this process starts."""

    def connect_here() -> HostConnection:
        return ChannelConnection(
            "here", "/bin/sh", lambda _: CommandChannel(["/bin/sh", "-c"], dict(os.environ))
        )

    yield Carrier(connect_here, None)


@contextmanager
def ssh(folder: Path, client: str) -> Iterator[Carrier]:
    """An sshd on this machine, spoken to by paramiko or by OpenSSH's client."""
    with (
        loopback(folder / "hosts", 1) as hosts,
        masters(hosts) as env,
        pytest.MonkeyPatch.context() as patched,
    ):
        for name, value in env.items():
            patched.setenv(name, value)
        (endpoint,) = endpoints(["h1"], client)
        yield Carrier(lambda: connect(endpoint), hosts[0].kill_sessions)


@contextmanager
def _allocated(
    provider: Any, options: str, env: dict[str, str]
) -> Iterator[Callable[[], HostConnection]]:
    """A node that a scheduler gives, before anything is set up on it."""
    with contextlib.ExitStack() as stack:
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in env.items():
            patched.setenv(name, value)
        patched.setattr(ClusterSurvey, "prepare_nodes", lambda survey, places, *_, **__: places)
        survey = provider.plan(parse_pool(options), print)
        stack.callback(survey.close)
        (place,) = provider.acquire(survey, f"lab-{secrets.token_hex(4)}", print)
        yield place.connection


@contextmanager
def slurm(folder: Path) -> Iterator[Carrier]:
    """A step of a Slurm job, by srun; encrypted."""
    (home := folder / "home").mkdir()
    with (
        slurm_cluster(folder / "slurm", 1) as lab,
        _allocated(
            Slurm(), "--provider slurm --time 10m", {**lab.env, "HOME": str(home)}
        ) as connection,
    ):
        yield Carrier(
            connection, lambda: _kill_children(lambda words: words[:1] == ["srun"]), 24 << 20
        )


@contextmanager
def kubernetes(folder: Path) -> Iterator[Carrier]:
    """Exec into a pod of the imitated cluster."""
    with (
        kube(folder / "kube") as lab,
        _allocated(Kubernetes(), "--provider kubernetes", lab.env) as connection,
    ):
        yield Carrier(connection, lab.cut)


@contextmanager
def ray(folder: Path) -> Iterator[Carrier]:
    """Calls of a Ray actor; encrypted. An actor ends shells that nobody has asked for after 6 s instead of 30."""
    (home := folder / "home").mkdir()
    driver, text = folder / "driver.py", ray_provider.DRIVER.read_text()
    for patient, impatient in (
        ("last_read > FORGOTTEN", "last_read > 6"),
        ("POLL, LOOK = 10.0, 2.0", "POLL, LOOK = 1.0, 0.5"),
    ):
        assert patient in text
        text = text.replace(patient, impatient)
    driver.write_text(text)
    with ray_lab.lent() as lab, pytest.MonkeyPatch.context() as patched:
        patched.setattr(ray_provider, "DRIVER", driver)
        options = f"--provider ray --address {lab.address}"
        with _allocated(Ray(), options, {"HOME": str(home)}) as connection:
            yield Carrier(connection, lambda: _kill_children(lambda words: str(driver) in words))
