"""Packages for four machines that reach no index: the bytes on the notebook's link, against the wheels themselves."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, say
from skymagic.bootstrap.provision import probe, requirements_of
from skymagic.bootstrap.wheelhouse import Wanted, fetch
from skymagic.plan.image import Image
from skymagic.providers.sending import Target, send
from skymagic.ssh.config import SshConfig
from skymagic.ssh.connecting import connect
from skymagic.ssh.hostlist import HostSpec
from tests.lab.machines import Machines, machines

MACHINES = 4
RATE = 100.0
"""Mbit/s of the link."""
DELAY = 25.0
"""Its delay, one way, in milliseconds."""
PACKAGES = ("numpy", "pandas", "scikit-learn")


def figures() -> Iterator[Figure]:
    """Wheels that are fetched beforehand, from this process to all machines."""
    with (
        tempfile.TemporaryDirectory() as folder,
        machines(Path(folder) / "hosts", MACHINES, rate_mbit=RATE, delay_ms=DELAY) as hosts,
    ):
        yield from sent(hosts)


def sent(hosts: Machines) -> Iterator[Figure]:
    """Bytes and seconds on the link; what was probed is not counted."""
    requirements = requirements_of(Image(pip=PACKAGES))
    config = SshConfig(hosts.config)
    connections = [connect(config.endpoint(HostSpec(name, name))) for name in hosts.names]
    try:
        facts = [probe(connection, requirements) for connection in connections]
        wanted = Wanted((*requirements.packages, "uv"), requirements.minor, requirements.preferences)
        house = fetch(wanted, facts[0], say)
        targets = [
            Target(name, connection, each, next(one.path for one in each.pythons if one.version == requirements.minor))
            for name, connection, each in zip(hosts.names, connections, facts, strict=True)
        ]
        before, begun = sum(hosts.link.traffic()), time.perf_counter()
        send(targets, requirements, house.files, say)
        seconds, crossed = time.perf_counter() - begun, sum(hosts.link.traffic()) - before
    finally:
        for connection in connections:
            connection.close()
    name = f"{len(house.files)} wheels to {MACHINES} machines without an index"
    yield Figure(f"{name}: bytes on the link", crossed / 1e6, "MB", house.nbytes / 1e6, "the wheels", 1.05, True)
    yield Figure(f"{name}: time", seconds, "s", house.nbytes * 8 / (RATE * 1e6), "the link's floor")
