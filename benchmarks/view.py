"""What views cost with 64 ranks: an update of a running line and of what its ranks use, and an empty cell with its line and without.

In a real kernel, as a front end has it that shows widgets: nothing draws where nobody looks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, alternate, median, say
from tests.lab.notebook import Notebook, opened

RANKS = 64
UPDATES = 100
CELLS = 10
ROUNDS = 7
CELL_ROUNDS = 30
"""Cells of 64 ranks scatter by 15 ms."""
REPORTS = """\
%%sky_broadcast
import skymagic as sky
for step in range(200):
    sky.report(step=step, total=1000, loss=1 / (step + 1), lr=0.1)
"""
PREPARE = f"""\
import os, time, ipywidgets
from skymagic.display import run_line
from skymagic.display.controls import RANKS_INTERVAL
from skymagic.display.run_line import INTERVAL
from skymagic.run.state import RankRun, Report
from skymagic.run.state import state_of
pool = %sky_pool
line, panel = ipywidgets.HTML(), ipywidgets.HTML()
report = Report({{rank: RankRun() for rank in range({RANKS})}}, 1, metrics=pool.pool.runs.reported[-1])
def times_of(pid):
    return open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()
forkserver = int(times_of(pool.status()[0][3])[1])
agent = int(times_of(forkserver)[1])
ticks = os.sysconf("SC_CLK_TCK")
def used():
    fields = times_of(agent)
    return time.process_time() + (int(fields[11]) + int(fields[12])) / ticks
def share(draw, interval):
    begun = used()
    for number in range({UPDATES}):
        draw(number)
    return 100 * (used() - begun) / {UPDATES} / interval
def draw_line(number):
    state = state_of(report, [])
    line.value = run_line.as_html(run_line.line(state) + str(number))
def draw_panel(number):
    panel.value = pool.picture() + str(number)
"""
TIMED = f"""\
times = []
for _ in range({CELLS}):
    begun = time.perf_counter()
    get_ipython().run_cell_magic("sky_broadcast", "", "pass")
    times.append(time.perf_counter() - begun)
"""


def figures() -> Iterator[Figure]:
    """On one pool of this machine."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-view-") as folder,
        opened(Path(folder), watched=True) as notebook,
    ):
        say(f"a pool of {RANKS} ranks")
        notebook.run(f"%sky_pool bench --ranks {RANKS} -y;")
        notebook.run(REPORTS)
        notebook.run(PREPARE)
        for what, name in (("line", "its line"), ("panel", "what its ranks use")):
            interval = "INTERVAL" if what == "line" else "RANKS_INTERVAL"
            found = [
                float(notebook.value(f"share(draw_{what}, {interval})")) for _ in range(ROUNDS)
            ]
            yield Figure(
                f"{RANKS} ranks, {name} while it is looked at", median(found), "% core", limit=1
            )
        say("an empty cell: with its line, without")
        sides = alternate(
            CELL_ROUNDS, lambda: _cell(notebook, "1.0"), lambda: _cell(notebook, "float('inf')")
        )
        ours, plain = (1000 * median(found) for found in sides)
        yield Figure(
            f"{RANKS} ranks, an empty cell with its line against without",
            ours - plain,
            "ms",
            limit=2,
        )
        notebook.run("%sky_down bench")


def _cell(notebook: Notebook, view_after: str) -> float:
    notebook.run(f"%config SkyMagic.view_after = {view_after}")
    notebook.run(TIMED)
    return median(notebook.value("times"))
