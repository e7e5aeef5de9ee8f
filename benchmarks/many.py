"""Hundreds of ranks on one machine: the start, a cell, a failure, the cell after it, and the end.

    python benchmarks/many.py --ranks 128,256,512

Ends with 1 when a pool does not start, a cell does not do what it should, or a process is left. Seconds depend on the machine: a rank
takes some 30 MB and a share of the cores.
"""

from __future__ import annotations

import argparse
import os
import sys

import psutil

from benchmarks import cluster
from benchmarks.figures import say, timed
from skymagic.errors import RankError
from skymagic.pool import Pool

FAILING = "if rank == {victim}: raise ValueError('planted')"


def many(ranks: int) -> list[str]:
    """What went wrong with so many ranks; the seconds of each step are printed."""
    wrong: list[str] = []
    took: dict[str, float] = {}
    pools: list[Pool] = []
    took["start"] = timed(lambda: pools.append(cluster.start(ranks, agreed=True)))
    try:
        pool = pools[0]
        found: list[int] = []
        took["cell"] = timed(
            lambda: found.extend(
                cluster.run(pool, "import os\nrank = int(os.environ['RANK'])\nrank")
            )
        )
        if found != list(range(ranks)):
            wrong.append(f"{ranks} ranks: the cell's values are {found}")
        victim = ranks // 2
        problems: list[BaseException | None] = []
        failing = FAILING.format(victim=victim)
        took["failure"] = timed(
            lambda: problems.append(cluster.problem_of(lambda: cluster.run(pool, failing)))
        )
        if not (isinstance(problems[0], RankError) and "planted" in str(problems[0])):
            wrong.append(f"{ranks} ranks: the failure came as {problems[0]!r}")
        after: list[int] = []
        took["next"] = timed(lambda: after.extend(cluster.run(pool, "rank")))
        if after != list(range(ranks)):
            wrong.append(f"{ranks} ranks: variables are lost after the failure")
    finally:
        took["end"] = timed(pools[0].close)
    print(
        f"{ranks:>4} ranks  "
        + "  ".join(f"{step} {seconds:.2f} s" for step, seconds in took.items()),
        flush=True,
    )
    left = psutil.Process().children(recursive=True)
    return [*wrong, *(f"{ranks} ranks: {process} is left" for process in left)]


def main() -> int:
    """Read the arguments, and start one pool after the other."""
    parser = argparse.ArgumentParser(description="Pools of many ranks on this machine.")
    parser.add_argument("--ranks", default="128,256,512", help="each is a pool of its own")
    counts = [int(count) for count in parser.parse_args().ranks.split(",")]
    say(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    wrong = [problem for count in counts for problem in many(count)]
    print("\n".join(wrong or ["all well"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
