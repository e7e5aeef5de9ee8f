"""Pools in jobs of a real Slurm cluster on this machine, beside pools of the machine itself: their start with torch, an empty cell, bulk, and
how often Slurm is asked. As root, with slurmctld, slurmd and munged installed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import cluster
from benchmarks.figures import Figure, alternate, median, say
from skymagic.display.panel import StartStep
from skymagic.plan.requests import Defaults, PluginSpec, PoolRequest
from skymagic.pool import Pool, launch
from skymagic.providers import cluster as cluster_nodes
from skymagic.providers import slurm as provider
from tests.lab import slurm as lab

RANKS = 2
ROUNDS = 3
CELLS = 200
SIZE = 1 << 28
NODES = 64
IDLE_SECONDS = 30.0
LIMIT = {"slurm": (("time", "20m"),)}


def figures() -> Iterator[Figure]:
    """One node of two ranks, against two ranks here."""
    with tempfile.TemporaryDirectory() as name, lab.cluster(Path(name) / "slurm", 1) as slurm:
        log = Path(name) / "squeue.log"
        environ = slurm.instead_of("squeue", f'echo >>{log}; exec "$REAL" "$@"')
        with environment({**environ, "XDG_STATE_HOME": str(Path(name) / "state")}):
            say(f"{RANKS} ranks with torch, from the job that runs to ready: Slurm, here")
            waited: list[float] = []
            ours, local = alternate(
                ROUNDS, lambda: started("slurm", waited, **LIMIT), lambda: started("local", [])
            )
            yield Figure(
                "start in a Slurm job that runs, with torch",
                once_given(ours, waited),
                "s",
                median(local),
                "local",
                1.3,
                True,
            )
            yield Figure("squeue while a pool starts", asked(log) / ROUNDS, "calls", limit=6)
            with closing(pool("slurm", [], **LIMIT)) as there, closing(pool("local", [])) as here:
                before = asked(log)
                ours, local = alternate(3, lambda: cells(there), lambda: cells(here))
                yield Figure(
                    "empty cell in a Slurm job",
                    median(ours),
                    "ms",
                    median(local),
                    "local",
                    1.5,
                    True,
                )
                time.sleep(IDLE_SECONDS)
                yield Figure(
                    f"squeue in {IDLE_SECONDS:.0f} s and {3 * CELLS} cells",
                    asked(log) - before,
                    "calls",
                    limit=1,
                )
            ours, by_srun = [bulk()], [bulk(())]
            yield Figure(
                f"{SIZE >> 20} MB to a node",
                median(ours),
                "MB/s",
                median(by_srun),
                "srun",
                2.0,
                relative=True,
                least=True,
            )

    with tempfile.TemporaryDirectory() as name, lab.cluster(Path(name) / "slurm", NODES) as slurm:
        say(f"a job of {NODES} nodes, from the request to all nodes connected and set up")
        yield Figure(f"{NODES} simulated nodes connected and set up", many(slurm.env), limit=60.0)


def many(variables: dict[str, str]) -> float:
    """Seconds from a request for as many nodes to machines that could start agents."""
    slurm = provider.Slurm()
    request = PoolRequest(
        provider="slurm", nodes=NODES, python=sys.executable, slurm=(("time", "10m"),)
    )
    begun = time.perf_counter()
    with environment(variables), closing(slurm.plan(request, say)) as survey:
        nodes = slurm.acquire(survey, f"bench-{os.getpid():08x}", say)
        assert [node.name for node in nodes] == [f"n{number}" for number in range(1, NODES + 1)]
        return time.perf_counter() - begun


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """This process's own environment, for the length of the block."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def asked(log: Path) -> int:
    """How many times squeue has run."""
    return log.read_text().count("\n") if log.exists() else 0


def pool(kind: str, waited: list[float], **known: Any) -> Pool:
    """A pool with torch; `waited` gets the seconds until its nodes were given."""
    begun = time.perf_counter()

    def tell(text: str) -> None:
        if isinstance(text, StartStep) and text.phase == "connecting":
            waited.append(time.perf_counter() - begun)

    request = PoolRequest(
        name=f"bench-{kind}", provider=kind, nodes=1, procs_per_node=RANKS, plugins=(PluginSpec("torch"),), yes=True,
        python=None if kind == "local" else sys.executable, **known,
    )  # fmt: skip
    return launch.ensure(request, {}, Defaults(), tell)


def started(kind: str, waited: list[float], **known: Any) -> float:
    """Seconds from a request to ranks that are ready."""
    begun = time.perf_counter()
    made = pool(kind, waited, **known)
    seconds = time.perf_counter() - begun
    made.close()
    return seconds


def once_given(whole: list[float], waited: list[float]) -> float:
    """Seconds of the median start, from its nodes."""
    return median([seconds - until for seconds, until in zip(whole, waited, strict=True)])


def cells(there: Pool) -> float:
    """Milliseconds for an empty cell."""
    cluster.run(there, "pass")
    begun = time.perf_counter()
    for _ in range(CELLS):
        cluster.run(there, "pass")
    return (time.perf_counter() - begun) * 1e3 / CELLS


def bulk(direct: tuple[str, ...] = cluster_nodes.BULK) -> float:
    """MB/s to a node, for a value that it does not have."""
    before: tuple[str, ...] = cluster_nodes.BULK
    cluster_nodes.BULK = direct
    try:
        with closing(pool("slurm", [], **LIMIT)) as there:
            cluster.run(there, "pass")
            there.namespace["small"] = os.urandom(1 << 20)
            cluster.run(there, "len(small)")
            there.namespace["big"] = os.urandom(SIZE)
            begun = time.perf_counter()
            cluster.run(there, "len(big)")
            return SIZE / 1e6 / (time.perf_counter() - begun)
    finally:
        cluster_nodes.BULK = before
