"""Packages that a cell needs on hosts of a pool that runs, and an index that hangs while one starts."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks import cluster
from benchmarks.figures import Figure, alternate, median, say, timed
from skymagic.plan.requests import Defaults, PoolRequest
from skymagic.pool import Pool, launch, registry
from tests.lab.distributions import Shelf
from tests.lab.hosts import loopback
from tests.lab.notebook import Notebook, opened
from tests.lab.places import home_that_knows
from tests.lab.shells import pip_settings
from tests.lab.wheels import mute

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
        caches = {"UV_CACHE_DIR": str(folder / "uv"), "PIP_CACHE_DIR": str(folder / "pip")}
        env = {**pip_settings(), **caches}
        env["PIP_FIND_LINKS"] = f"{env.get('PIP_FIND_LINKS', '')} {shelf.links}".strip()
        with loopback(folder / "hosts", HOSTS, env=env) as hosts:
            home = home_that_knows(hosts, folder / "client", fresh=True)
            (folder / "notebook").mkdir()
            pool = f"%sky_pool lab --provider ssh --hosts {','.join(hosts.names)}"
            with opened(
                folder / "notebook", pool, env={"HOME": str(home), **shelf.of_notebook}
            ) as notebook:
                yield from small(notebook)
        yield from hanging(folder, env)


def small(notebook: Notebook) -> Iterator[Figure]:
    """Cells that need one more package each, and cells that need nothing new."""
    seconds = [timed(lambda: notebook.run("%%sky_broadcast\npass")) for _ in range(CELLS)]
    found: list[float] = []
    for number in range(ROUNDS):
        begun = time.perf_counter()
        shown = notebook.run(f"%%sky_broadcast\nimport small{number}")
        found.append(time.perf_counter() - begun)
        assert f"installing small_{number} 1.0" in shown.said, shown.said
    yield Figure(
        f"a cell that needs a small package, {HOSTS} hosts",
        median(found) - median(seconds),
        "s",
        limit=3.0,
    )

    def milliseconds(packages: str) -> float:
        notebook.run(f"%config SkyMagic.packages = {packages!r}")
        return median(
            [
                1000 * timed(lambda: notebook.run("%%sky_broadcast\nimport small0"))
                for _ in range(CELLS)
            ]
        )

    say("a cell that needs nothing new: looked at, not looked at")
    ours, theirs = alternate(ROUNDS, lambda: milliseconds("sync"), lambda: milliseconds("off"))
    name = f"a cell that needs nothing new, {HOSTS} hosts"
    yield Figure(name, median(ours), "ms", median(theirs), '"off"', 1.1, True)


def hanging(folder: Path, env: Mapping[str, str]) -> Iterator[Figure]:
    """First starts of one host, of whose indexes one more accepts connections and never answers."""

    def first(name: str, more: Mapping[str, str]) -> float:
        with (
            loopback(folder / name, 1, env={**env, **more}) as hosts,
            cluster.at_home(home_that_knows(hosts, folder / f"{name}-client", fresh=True)),
        ):
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
    yield Figure(
        "an index that hangs, what it adds to a first start",
        median(hung) - median(plain),
        "s",
        limit=10.0,
    )


def start(names: tuple[str, ...]) -> Pool:
    """A pool of one rank each."""
    name = f"bench-{os.getpid()}-{len(registry.pools())}"
    request = PoolRequest(name=name, provider="ssh", hosts=names, procs_per_node=1)
    return launch.ensure(request, {}, Defaults(), lambda text: say(f"  {text}"))
