"""``sky.report``: what a call costs, what it costs steps of a millisecond, and what the line of a cell costs an empty one."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cells import do, shell_of_its_own
from benchmarks.figures import Figure, alternate, median, say, timed

CALLS = 20_000
STEPS = 1000
ROUNDS = 7
CELLS = 10

CALL = f"""%%sky_broadcast -o found --head
import time, skymagic as sky
begun = time.perf_counter()
for step in range({CALLS}):
    sky.report(step=step, total={CALLS}, loss=0.5)
(time.perf_counter() - begun) / {CALLS} * 1e6;
"""
STEP = f"""%%sky_broadcast -o found --head
import time, skymagic as sky
def step():
    end = time.thread_time() + 0.001  # of work, whatever else the machine does
    while time.thread_time() < end:
        pass
def loop(report):
    begun = time.perf_counter(), time.thread_time()
    for number in range({STEPS}):
        step()
        if report:
            sky.report(step=number, total={STEPS}, loss=0.5, lr=0.1)
    return time.perf_counter() - begun[0], time.thread_time() - begun[1]
times = [[], []]
for _ in range({ROUNDS}):
    for report in (False, True):
        times[report].append(loop(report))
times;
"""


def figures() -> Iterator[Figure]:
    """On a pool of one rank, so that ranks do not share the machine's cores."""
    shell = shell_of_its_own()
    do(shell, "%sky_pool bench --ranks 1")
    say("sky.report: a call, then steps of a millisecond")
    calls = []
    for _ in range(ROUNDS):
        do(shell, CALL)
        calls.append(shell.user_ns["found"])
    do(shell, STEP)
    without, with_ = shell.user_ns["found"]
    yield Figure("sky.report, a call", median(calls), "µs", limit=20)
    wall, cpu = (
        100 * (median([w[i] for w in with_]) / median([w[i] for w in without]) - 1) for i in (0, 1)
    )
    yield Figure("sky.report, what it adds to steps of 1 ms, on the clock", wall, "%", limit=2)
    yield Figure("sky.report, what it adds to steps of 1 ms, of the processor", cpu, "%", limit=2)
    say("an empty cell: with its line, without")

    def cell(view_after: str) -> float:
        do(shell, f"%config SkyMagic.view_after = {view_after}")
        return median([timed(lambda: do(shell, "%%sky_broadcast\npass")) for _ in range(CELLS)])

    cell("1.0")
    ours, plain = (
        1000 * median(found)
        for found in alternate(ROUNDS, lambda: cell("1.0"), lambda: cell("float('inf')"))
    )
    yield Figure("an empty cell, with its line against without", ours - plain, "ms", limit=2)
    do(shell, "%sky_down bench")
