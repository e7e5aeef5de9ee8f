"""The first start on hosts that have nothing of skymagic's, with a package cache that has all it needs."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import cluster
from benchmarks.figures import Figure, say, timed
from skymagic.bootstrap.provision import setup
from skymagic.bootstrap.remote import Installation
from skymagic.plan.requests import Defaults, PoolRequest
from skymagic.pool import Pool, launch, registry
from skymagic.providers import ssh
from tests.lab.hosts import Hosts, loopback
from tests.lab.places import home_that_knows
from tests.lab.shells import pip_settings

HOSTS = 4


def figures() -> Iterator[Figure]:
    """One host fills the cache; then all others are new."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        env = {
            **pip_settings(),
            "UV_CACHE_DIR": str(folder / "uv"),
            "PIP_CACHE_DIR": str(folder / "pip"),
        }
        with (
            loopback(folder / "hosts", 1 + HOSTS, env=env) as hosts,
            cluster.at_home(home_that_knows(hosts, folder / "client", fresh=True)),
        ):
            yield from starts(hosts)


def starts(hosts: Hosts) -> Iterator[Figure]:
    """All of it, and the part of it that is the slowest host's own."""
    say("first start: one host fills the cache")
    start(hosts.names[:1]).close()
    spent: list[float] = []

    def measured(*args: Any, **kwargs: Any) -> Installation:
        begun = time.perf_counter()
        try:
            return setup(*args, **kwargs)
        finally:
            spent.append(time.perf_counter() - begun)

    ssh.setup = measured  # type: ignore[attr-defined]
    made: list[Pool] = []
    say(f"first start of {HOSTS} hosts")
    try:
        whole = timed(lambda: made.append(start(hosts.names[1:])))
    finally:
        ssh.setup = setup  # type: ignore[attr-defined]
    made[0].close()
    assert len(spent) == HOSTS
    yield Figure(
        f"first start, {HOSTS} hosts, warm cache", whole, "s", max(spent), "slowest install"
    )
    yield Figure(
        f"first start, {HOSTS} hosts: all but the slowest install",
        whole - max(spent),
        "s",
        limit=3.0,
    )


def start(names: tuple[str, ...]) -> Pool:
    """A pool of one rank each, in an environment that is made for it."""
    request = PoolRequest(
        name=f"bench-{os.getpid()}-{len(registry.pools())}",
        provider="ssh",
        hosts=names,
        procs_per_node=1,
    )
    return launch.ensure(request, {}, Defaults(), lambda text: say(f"  {text}"))
