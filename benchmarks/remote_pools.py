"""Pools on separate machines: the second start, and DDP over two hosts beside torchrun by hand."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from benchmarks import cluster, ddp, peers
from benchmarks.figures import Figure, alternate, median, say, timed
from skymagic.plan.requests import Defaults, PluginSpec, PoolRequest
from skymagic.pool import Pool, registry
from skymagic.pool.launch import ensure
from tests.lab.machines import Machine, Machines, machines
from tests.lab.places import home_that_knows

DELAY = 25.0
"""Milliseconds, one way."""
CELLS = 20
STARTS = 9
ROUNDS = 7


def figures() -> Iterator[Figure]:
    """Machines near by; a process can be on one network alone, so what is far away is measured in `wan` and `wan64`."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with lab(4) as hosts:
        yield from starts(hosts)
        yield from two_hosts(hosts)


@contextlib.contextmanager
def lab(count: int, **wan: float) -> Iterator[Machines]:
    """Machines, and this process as a client of theirs."""
    with (
        tempfile.TemporaryDirectory() as folder,
        machines(Path(folder) / "hosts", count, **wan) as hosts,  # type: ignore[arg-type]
        cluster.at_home(home_that_knows(hosts, Path(folder) / "client", fresh=True)),
    ):
        yield hosts


def start(hosts: Machines, per_node: int, *plugins: str, defaults: Defaults | None = None) -> Pool:
    """A pool on all of these."""
    request = PoolRequest(
        name=f"bench-{os.getpid()}-{len(registry.pools())}", provider="ssh", hosts=hosts.names, procs_per_node=per_node,
        python=sys.executable, env=(("OMP_NUM_THREADS", "1"),), plugins=tuple(PluginSpec(name) for name in plugins),
    )  # fmt: skip
    return ensure(request, {}, defaults or Defaults(), lambda text: None)


def starts(hosts: Machines) -> Iterator[Figure]:
    """From nothing to ranks that wait for a cell; what the hosts need is there."""
    say(f"start of a pool of {len(hosts)} machines, of as many ranks here")
    start(hosts, 1, "torch").close()

    def ours() -> float:
        made: list[Pool] = []
        seconds = timed(lambda: made.append(start(hosts, 1, "torch")))
        made[0].close()
        return seconds

    def local() -> float:
        made: list[Pool] = []
        seconds = timed(lambda: made.append(cluster.start(len(hosts), "torch")))
        made[0].close()
        return seconds

    there, here = alternate(STARTS, ours, local)
    yield Figure(
        f"second start, {len(hosts)} hosts with torch", mean(there), "s", mean(here), "on this machine",
        limit=2.0, relative=True,
    )  # fmt: skip


def two_hosts(hosts: Machines) -> Iterator[Figure]:
    """Steps of DDP per second: in a cell, and in the same script that torchrun starts by hand on both machines."""
    two = Machines(hosts.folder, hosts[:2], hosts.key)
    script = (
        peers.INIT
        + ddp.BODY
        + "print(f'rate {rate}\\n', end='', flush=True) if dist.get_rank() == 0 else None"
        + peers.DDP_END
    )
    steady(two)
    ports = itertools.count(29400)  # a torchrun that begins can find the store of one that ends

    def ours() -> float:
        # anew: where a process lies in memory makes 5 % either way, for its whole life
        with contextlib.closing(start(two, 1, "torch")) as pool:
            return float(cluster.run(pool, ddp.BODY + "rate")[0])

    say("DDP on 2 machines, steps/s: ours, torchrun")
    mine, theirs = alternate(ROUNDS, ours, lambda: by_hand(two, script, next(ports)))
    yield Figure(
        "DDP on 2 hosts, steps per second", median(mine), "/s", median(theirs), "torchrun", limit=0.97, relative=True,
        least=True,
    )  # fmt: skip


def steady(hosts: Machines) -> None:
    """CUBIC between these machines, for both tools.

    Where a machine's default is BBR, a connection older than ten seconds stands still for 200 ms now and then: that of
    a pool does, that of a script which has just begun does not yet.
    """
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    if "cubic" not in available.read_text().split():
        return
    for host in hosts:
        assert isinstance(host, Machine)
        network = host.address.rpartition(".")[0] + ".0/24"
        subprocess.run(
            [*host.space.enter, "ip", "route", "change", network, "dev", "eth0", "src", host.address, "congctl", "cubic"],
            check=True,
        )  # fmt: skip


def by_hand(hosts: Machines, script: str, port: int) -> float:
    """What a person types on both machines; the head's figure."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(script)
        running = [
            launch(host, number, path, port)
            for number, host in enumerate(hosts)
            if isinstance(host, Machine)
        ]
        outputs = [process.communicate(timeout=300)[0] for process in running]
    found = re.search(r"rate ([\d.]+)", outputs[0])
    assert found is not None, outputs
    return float(found[1])


def launch(host: Machine, number: int, script: Path, port: int) -> subprocess.Popen[str]:
    """torchrun on one of them."""
    words = [
        "env", "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1", sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
        f"--node_rank={number}", "--nproc_per_node=1", "--master_addr=10.77.0.1", f"--master_port={port}", str(script),
    ]  # fmt: skip
    return subprocess.Popen(
        [*host.space.enter, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def empty_cells(hosts: Machines, per_node: int, more: float) -> Iterator[Figure]:
    """As the user waits for it."""
    ranks = per_node * len(hosts)
    say(f"an empty cell on {ranks} ranks of {len(hosts)} machines, {2 * DELAY:.0f} ms away")
    with contextlib.closing(start(hosts, per_node)) as pool:
        for _ in range(3):
            cluster.run(pool, "pass")
        found = [1000 * timed(lambda: cluster.run(pool, "pass")) for _ in range(CELLS)]
    yield Figure(
        f"empty cell, {ranks} ranks on {len(hosts)} hosts, round trip {2 * DELAY:.0f} ms", median(found), "ms",
        limit=2 * DELAY + more,
    )  # fmt: skip
