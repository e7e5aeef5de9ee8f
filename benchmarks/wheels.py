"""Packages for four machines: the bytes that cross a link, against the wheels themselves and against one machine by hand."""

from __future__ import annotations

import gzip
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.figures import Figure, say
from skymagic.bootstrap.provision import Supply, probe
from skymagic.bootstrap.requirements import Requirements, requirements_of
from skymagic.bootstrap.wheelhouse import Wheelhouse, fetch, request_for, uv_for, with_plans
from skymagic.plan.image import Image
from skymagic.providers.environment_copy import pass_wheels
from skymagic.providers.ssh import Machine, call_concurrently, set_up
from skymagic.ssh.config import SshConfig
from skymagic.ssh.connecting import connect
from skymagic.ssh.host import HostConnection
from skymagic.ssh.hostlist import HostSpec
from skymagic.wire.threads import failures, run_all
from tests.lab.machines import Machines, machines
from tests.lab.shells import ShellHost
from tests.lab.wheels import served

MACHINES = 4
RATE = 100.0
"""Mbit/s of the link."""
DELAY = 25.0
"""Its delay, one way, in milliseconds."""
INDEX = ("10.77.0.100", 8080)
"""Where the machines' index listens: on the client, at the other end of the link."""
PACKAGES = ("torch", "numpy", "pandas", "scikit-learn")


def figures() -> Iterator[Figure]:
    """Wheels that are fetched beforehand, for this process is then on the machines' network alone."""
    with tempfile.TemporaryDirectory() as text:
        for packages in (PACKAGES, PACKAGES[1:]):
            folder = Path(text) / str(len(packages))
            folder.mkdir()
            requirements = requirements_of(Image(pip=packages))
            wanted = request_for(requirements, ("pip",))
            facts = probe(ShellHost(folder), requirements)
            house, program = fetch(wanted, facts, say), gzip.decompress(uv_for(facts))
            with machines(folder / "apart", MACHINES, rate_mbit=RATE, delay_ms=DELAY) as hosts:
                yield from sent(hosts, requirements, house)
            index = f"http://{INDEX[0]}:{INDEX[1]}/simple"
            env = {
                "PIP_CONFIG_FILE": "/dev/null",
                "PIP_INDEX_URL": index,
                "PIP_TRUSTED_HOST": INDEX[0],
            }
            with machines(
                folder / "hosts", MACHINES, env=env, rate_mbit=RATE, delay_ms=DELAY
            ) as hosts:
                for host in hosts:
                    (host.home / ".local/bin").mkdir(parents=True)
                    (host.home / ".local/bin/uv").write_bytes(program)
                    (host.home / ".local/bin/uv").chmod(0o700)
                with served(Path(house.folder.name), at=INDEX):
                    yield from passed(
                        hosts, requirements, index, house, 1.25 if "torch" in packages else None
                    )


def passed(
    hosts: Machines, requirements: Requirements, index: str, house: Wheelhouse, limit: float | None
) -> Iterator[Figure]:
    """A start of machines whose index is at the other end of the link, from empty homes; one of them by hand before.

    All of them share this machine's cores, and install four times what one does: beside it, by hand, the same on one, and then
    from its wheels on the three others at once.

    Args:
        limit: of the time, against the one by hand.
    """
    config = SshConfig(hosts.config)
    endpoints = [config.endpoint(HostSpec(name, name)) for name in hosts.names]
    found = [connect(each) for each in endpoints]
    try:
        say("uv pip install on one machine by hand")
        before, begun = sum(hosts.link.traffic()), time.perf_counter()
        by_hand(found[0], requirements, f"--default-index {index}")
        hand, alone = time.perf_counter() - begun, sum(hosts.link.traffic()) - before
        say("the same wheels on the three others")
        begun = time.perf_counter()
        source = f"--no-index -f {house.folder.name}"
        assert not failures(
            run_all([partial(by_hand, each, requirements, source) for each in found[1:]])
        )
        others = time.perf_counter() - begun
        facts = with_plans([probe(each, requirements) for each in found], requirements)
        before, begun = sum(hosts.link.traffic()), time.perf_counter()
        set_up(
            [Machine(*each) for each in zip(endpoints, found, facts, strict=True)],
            requirements,
            say,
        )
        seconds, crossed = time.perf_counter() - begun, sum(hosts.link.traffic()) - before
    finally:
        for each in found:
            each.close()
    name = f"{len(house.files)} wheels from an index, {MACHINES} machines from empty homes"
    who = "uv pip install on one by hand"
    yield Figure(f"{name}: bytes on the link", crossed / 1e6, "MB", alone / 1e6, who, 1.05, True)
    yield Figure(
        f"{name}: time",
        seconds,
        "s",
        hand + others,
        f"{who}, its wheels on the others at once",
        1.25,
        True,
    )
    yield Figure(f"{name}: time", seconds, "s", hand, who, limit, True)


def by_hand(host: HostConnection, requirements: Requirements, source: str) -> None:
    """``uv pip install`` of all, from an empty cache."""
    script = "\n".join([
        "set -e; mkdir hand; cd hand; export UV_CACHE_DIR=$PWD/cache",
        *(f"echo '{each}' >>wanted.txt" for each in requirements.packages),
        *(f"echo '{each}' >>versions.txt" for each in requirements.preferences),
        f"uv=$HOME/.local/bin/uv; $uv venv -q --python {requirements.minor} env",
        f"$uv pip install -q --python env {source} -r wanted.txt -c versions.txt",
    ])  # fmt: skip
    done = host.run(script)
    assert done.status == 0, done.err


def sent(hosts: Machines, requirements: Requirements, house: Wheelhouse) -> Iterator[Figure]:
    """Bytes and seconds of a start from empty homes; what was probed is not counted."""
    config = SshConfig(hosts.config)
    endpoints = [config.endpoint(HostSpec(name, name)) for name in hosts.names]
    connections = [connect(each) for each in endpoints]
    try:
        facts = [replace(probe(each, requirements), indexes=0) for each in connections]
        known = [Machine(*each) for each in zip(endpoints, connections, facts, strict=True)]
        before, begun = sum(hosts.link.traffic()), time.perf_counter()
        known[0].set_up(requirements, say, Supply(house, on_kept=lambda: None))
        with pass_wheels(
            [each.target(requirements) for each in known], requirements, say
        ) as copies:
            call_concurrently(
                lambda each: each.set_up(requirements, say, copies[each.name]), known[1:]
            )
        seconds, crossed = time.perf_counter() - begun, sum(hosts.link.traffic()) - before
    finally:
        for connection in connections:
            connection.close()
    name = f"{len(house.files)} wheels to {MACHINES} machines without an index"
    yield Figure(
        f"{name}: bytes on the link",
        crossed / 1e6,
        "MB",
        house.nbytes / 1e6,
        "the wheels",
        1.05,
        True,
    )
    yield Figure(f"{name}: time", seconds, "s", house.nbytes * 8 / (RATE * 1e6), "the link's floor")
