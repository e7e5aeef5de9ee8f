"""Packages that a cell needs on hosts of a pool that runs, and an index that hangs while one starts."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from benchmarks import cluster
from benchmarks.figures import Figure, alternate, median, say, timed
from skymagic.plan.requests import Defaults, PoolRequest
from skymagic.pool import Pool, registry
from tests.lab.distributions import Shelf
from tests.lab.hosts import Hosts, loopback
from tests.lab.shells import pip_settings
from tests.lab.wheels import mute
from tests.providers.test_ssh_pools import write_ssh_config

HOSTS = 4
ROUNDS = 5
CELLS = 25


def figures() -> Iterator[Figure]:
    """Hosts with empty homes, which find skymagic's own packages in a cache from the second start on."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        shelf = Shelf(folder / "shelf")
        for number in range(ROUNDS):
            shelf.add(f"small-{number}", "1.0", {f"small{number}.py": f"number = {number}\n"})
        sys.path.insert(0, str(shelf.site))  # the notebook has them
        caches = {"UV_CACHE_DIR": str(folder / "uv"), "PIP_CACHE_DIR": str(folder / "pip")}
        env = {**pip_settings(), **caches}
        env["PIP_FIND_LINKS"] = f"{env.get('PIP_FIND_LINKS', '')} {shelf.links}".strip()
        with loopback(folder / "hosts", HOSTS, env=env) as hosts, home(folder / "client", hosts):
            yield from small(hosts)
        yield from hanging(folder, env)


def small(hosts: Hosts) -> Iterator[Figure]:
    """Cells that need one more package each, and cells that need nothing new."""
    with start(hosts.names) as pool, start(hosts.names, "off") as without:
        cells = [1000 * timed(lambda: cluster.run(pool, "pass")) for _ in range(CELLS)]
        found = [timed(partial(cluster.run, pool, f"import small{number}")) for number in range(ROUNDS)]
        yield Figure(
            f"a cell that needs a small package, {HOSTS} hosts", median(found) - median(cells) / 1000, "s", limit=3.0
        )

        def milliseconds(one: Pool) -> float:
            return median([1000 * timed(lambda: cluster.run(one, "import small0")) for _ in range(CELLS)])

        say("a cell that needs nothing new: looked at, not looked at")
        ours, theirs = alternate(ROUNDS, lambda: milliseconds(pool), lambda: milliseconds(without))
        yield Figure(
            f"a cell that needs nothing new, {HOSTS} hosts", median(ours), "ms", median(theirs), '"off"', 1.1, True
        )


def hanging(folder: Path, env: Mapping[str, str]) -> Iterator[Figure]:
    """First starts of one host, of whose indexes one more accepts connections and never answers."""

    def first(name: str, more: Mapping[str, str]) -> float:
        with loopback(folder / name, 1, env={**env, **more}) as hosts, home(folder / f"{name}-client", hosts):
            made: list[Pool] = []
            seconds = timed(lambda: made.append(start(hosts.names)))
            made[0].close()
            return seconds

    say("a first start: as it is, with an index that hangs")
    numbers = iter(range(1, 1 + 2 * ROUNDS))
    with mute() as (url, _):
        further = f"{url} {env.get('PIP_EXTRA_INDEX_URL', '')}".strip()
        plain, hung = alternate(
            3,
            lambda: first(f"first-{next(numbers)}", {}),
            lambda: first(f"first-{next(numbers)}", {"PIP_EXTRA_INDEX_URL": further}),
        )
    yield Figure("an index that hangs, what it adds to a first start", median(hung) - median(plain), "s", limit=10.0)


def home(folder: Path, hosts: Hosts) -> AbstractContextManager[None]:
    """For a block, a HOME from which ssh knows these hosts."""
    return cluster.at_home(write_ssh_config(folder, hosts))


def start(names: tuple[str, ...], packages: str = "sync") -> Pool:
    """A pool of one rank each."""
    name = f"bench-{os.getpid()}-{len(registry.every())}"
    request = PoolRequest(name=name, provider="ssh", hosts=names, procs_per_node=1)
    return registry.ensure(request, {}, Defaults(packages=packages), lambda text: say(f"  {text}"))
