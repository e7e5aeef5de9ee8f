"""Packages for four machines that reach no index: the bytes on the notebook's link, against the wheels themselves."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, say
from skymagic.bootstrap.provision import probe, requirements_of
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.wheelhouse import Wanted, Wheelhouse, fetch
from skymagic.plan.image import Image
from skymagic.providers.sending import Target, send
from skymagic.ssh.config import SshConfig
from skymagic.ssh.connecting import connect
from skymagic.ssh.hostlist import HostSpec
from tests.lab.machines import Machines, machines
from tests.lab.shells import ShellHost

MACHINES = 4
RATE = 100.0
"""Mbit/s of the link."""
DELAY = 25.0
"""Its delay, one way, in milliseconds."""
PACKAGES = ("torch", "numpy", "pandas", "scikit-learn")


def figures() -> Iterator[Figure]:
    """Wheels that are fetched beforehand, for this process is then on the machines' network alone."""
    requirements = requirements_of(Image(pip=PACKAGES))
    wanted = Wanted((*requirements.packages, "uv"), requirements.minor, requirements.preferences)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        house = fetch(wanted, probe(ShellHost(folder), requirements), say)
        with machines(folder / "hosts", MACHINES, rate_mbit=RATE, delay_ms=DELAY) as hosts:
            yield from sent(hosts, requirements, house)


def sent(hosts: Machines, requirements: Requirements, house: Wheelhouse) -> Iterator[Figure]:
    """Bytes and seconds on the link; what was probed is not counted."""
    config = SshConfig(hosts.config)
    connections = [connect(config.endpoint(HostSpec(name, name))) for name in hosts.names]
    try:
        facts = [probe(connection, requirements) for connection in connections]
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
