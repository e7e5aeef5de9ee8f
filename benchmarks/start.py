"""From nothing to a pool: against ipyparallel's default cluster, and against torchrun to the end of a first all_reduce."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import peers
from benchmarks.figures import RANKS, Figure, alternate, median, say

ROUNDS = 5
NOTEBOOK = "import IPython, ipykernel.ipkernel, time\n"
"""What a notebook's kernel has imported before its first cell."""
READY = f"""{NOTEBOOK}
begun = time.perf_counter()
from benchmarks import cluster
pool = cluster.start({RANKS})
print("seconds", time.perf_counter() - begun)
pool.close()
"""
FOOTPRINT = f"""{NOTEBOOK}
import psutil
from benchmarks import cluster
begun = time.perf_counter()
pool = cluster.start(64, agreed=True)
took = time.perf_counter() - begun
pool.close()
pool = cluster.start(16)
cluster.run(pool, "pass")
ranks = [psutil.Process(state.pid) for state in pool.agents.ranks.values()]
family = psutil.Process().children(recursive=True)
def used():
    return sum(sum(process.cpu_times()[:2]) for process in family)
before = used()
time.sleep(5)
idle = (used() - before) / 5
def middle(values):
    return sorted(values)[len(values) // 2]
print("start_of_64_ranks", took)
print("memory_of_a_rank,_of_16", middle([one.memory_full_info().pss / 1e6 for one in ranks]))
print("threads_of_a_rank", middle([one.num_threads() for one in ranks]))
print("descriptors_of_a_rank", middle([one.num_fds() for one in ranks]))
print("TCP_sockets_of_the_pool's_processes", sum(len(one.net_connections("tcp")) for one in family))
print("processor_time_of_an_idle_pool,_a_second", 1000 * idle)
pool.close()
"""
IPYPARALLEL = f"""{NOTEBOOK}
import logging
import ipyparallel as ipp
begun = time.perf_counter()
cluster = ipp.Cluster(n={RANKS}, log_level=logging.ERROR)
client = cluster.start_and_connect_sync()
print("\\nseconds", time.perf_counter() - begun)
client.close()
cluster.stop_cluster_sync()
"""
BODY = """\
import torch, torch.distributed as dist
t = torch.full((1,), dist.get_rank() + 1.0)
dist.all_reduce(t)
assert t.item() == 10.0
"""
FIRST_CELL = f"""{NOTEBOOK}
begun = time.perf_counter()
from benchmarks import cluster
pool = cluster.start({RANKS}, "torch")
cluster.run(pool, {BODY!r})
print("seconds", time.perf_counter() - begun)
pool.close()
"""
TORCHRUN = (
    peers.INIT
    + BODY
    + "import time\nprint(f'reduced {time.time()}\\n', end='', flush=True)"
    + peers.END
)


def figures() -> Iterator[Figure]:
    """Fresh processes, each side in turn."""
    say(f"{RANKS} ranks ready: ours, ipyparallel")
    ours, theirs = alternate(ROUNDS, lambda: seconds(READY), lambda: seconds(IPYPARALLEL))
    yield Figure(
        f"pool of {RANKS} ready",
        median(ours),
        peer=median(theirs),
        who="ipyparallel",
        limit=0.2,
        relative=True,
    )
    found = peers.python(FOOTPRINT)
    for what, unit, limit in (
        ("start of 64 ranks", "s", None),
        ("memory of a rank, of 16", "MB", 16.0),
        ("threads of a rank", "", 4),
        ("descriptors of a rank", "", None),
        ("TCP sockets of the pool's processes", "", 0),
        ("processor time of an idle pool, a second", "ms", 1.0),
    ):
        yield Figure(f"  … {what}", found.number(what.replace(" ", "_")), unit, limit=limit)
    say(f"{RANKS} ranks and a first all_reduce: ours, torchrun")
    reduced: list[float] = []

    def torchrun() -> float:
        ran = peers.torchrun(TORCHRUN, RANKS)
        reduced.append(ran.number("reduced") - ran.begun)
        return ran.seconds

    ours, theirs = alternate(ROUNDS, lambda: seconds(FIRST_CELL), torchrun)
    yield Figure(
        "pool with torch, first all_reduce done", median(ours), peer=median(theirs), who="torchrun", limit=0.7, relative=True
    )  # fmt: skip
    yield Figure(
        "  … to torchrun's all_reduce, not its end",
        median(ours),
        peer=median(reduced),
        who="torchrun",
    )


def seconds(script: str) -> float:
    """What a script measures in a fresh process."""
    return peers.python(script).number("seconds")
