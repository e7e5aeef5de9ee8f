"""What it costs that runs outlive their notebook: memory while nobody listens, the way back, and what every notebook pays for it."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figures import Figure, alternate, median, say, timed
from skymagic.kernels.agent.logs import RankLog, Spans
from skymagic.kernels.agent.output import OutputFilter, RankScreen
from skymagic.ssh.config import SshConfig
from skymagic.ssh.connecting import connect
from skymagic.ssh.hostlist import HostSpec
from skymagic.wire.agent import BeginOutput, Publish
from tests.lab.desk import Desk, daemons, killed, local_desk, ssh_desk

SECONDS = 8 * 3600
PLOT_BYTES = 500_000
PRINTED_BYTES = 200_000_000
ROUNDS = 5
STARTS = 15
PRINTS = """%%sky_broadcast
import os
print('before', flush=True)
while not os.path.exists({gate!r}): pass
if os.environ['RANK'] == '0':
    for _ in range({count}): print('x' * 99)
    open({over!r}, 'w').close()"""
LOAD = """
import sys, time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
begun = time.perf_counter()
shell.run_line_magic("load_ext", "skymagic")
print("took", time.perf_counter() - begun)
"""


def figures() -> Iterator[Figure]:
    """Each in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        yield Figure("8 h of a 0.5 MB plot a second, nobody there", plots(folder), "MB", limit=200)
        (folder / "local").mkdir()
        with local_desk(folder / "local") as desk:
            yield Figure("200 MB printed, nobody there", printed(desk), "MB", limit=200)
        yield from loading(folder)
        (folder / "ssh").mkdir()
        with ssh_desk(folder / "ssh") as desk:
            yield attaching(desk)


def plots(folder: Path) -> float:
    """Megabytes by which a process grows that takes a rank's plots for a notebook that is away, one for each second of eight hours."""
    reader, writer = os.pipe()
    output = OutputFilter(
        RankLog(0, folder / "log", Spans(), None, print),
        RankScreen(0, lambda *_: None),
        {"stdout": reader},
    )
    output.begin(BeginOutput(0, "run-1", True, 1_000_000, 1), 0.0)
    output.screen.detach()
    process, most = psutil.Process(), 0
    before = process.memory_info().rss
    for second in range(SECONDS):
        picture = os.urandom(8).hex() * (PLOT_BYTES // 16)
        content: dict[str, Any] = {
            "data": {"image/png": picture, "text/plain": "<Figure>"},
            "metadata": {},
        }
        output.publish(Publish(0, "display_data", content), float(second))
        if second % 100 == 0:
            most = max(most, process.memory_info().rss - before)
    output.screen.attach()
    most = max(most, process.memory_info().rss - before)
    os.close(writer)
    output.close()
    return most / 1e6


def printed(desk: Desk) -> float:
    """Megabytes by which all that a pool has beside its ranks grows at most, while a cell whose notebook was killed prints."""
    gate, over = desk.folder / "gate", desk.folder / "over"
    with desk.notebook(desk.made) as notebook:
        cell = PRINTS.format(gate=str(gate), over=str(over), count=PRINTED_BYTES // 100)
        shown = notebook.start(cell)
        notebook.watch(shown, lambda seen: "before" in seen.stdout)
        ranks = set(notebook_ranks(desk))
        killed(notebook)
    beside = [one for one in family(desk) if one.pid not in ranks]
    before = sum(one.memory_info().rss for one in beside)
    most = 0
    gate.touch()
    while not over.exists():
        most = max(most, sum(one.memory_info().rss for one in beside) - before)
        time.sleep(0.02)
    most = max(most, sum(one.memory_info().rss for one in beside) - before)
    say(f"  {len(beside)} processes: {before / 1e6:.0f} MB before, {most / 1e6:.0f} MB more")
    assert desk.ran("down", desk.pool)[0] == 0
    return most / 1e6


def family(desk: Desk) -> list[psutil.Process]:
    """The processes of the desk's pool."""
    (record,) = desk.records.glob("*.json")
    found = {
        one.pid: one
        for daemon in daemons(record.stem)
        for one in [daemon, *daemon.children(recursive=True)]
    }
    return list(found.values())


def notebook_ranks(desk: Desk) -> Iterator[int]:
    """The process numbers of its ranks."""
    import json

    for pool in json.loads(desk.ran("status", desk.pool, "--json")[1])["pools"]:
        for node in pool["nodes"]:
            yield from node["ranks"].values()


def loading(folder: Path) -> Iterator[Figure]:
    """``%load_ext skymagic`` where a notebook has left three pools, beside a user who has never left one."""
    from dataclasses import replace

    from skymagic.pool import records
    from skymagic.pool.records import PoolRecord

    left = folder / "left"
    os.environ["XDG_STATE_HOME"] = str(left)
    made = PoolRecord(
        "lab", "lab-0", "ssh", ("gpu1", "gpu2"), "/home/ann", process="1 1 an-earlier-boot"
    )
    for number in range(3):
        records.write(replace(made, job_id=f"lab-0000000{number}"))
    del os.environ["XDG_STATE_HOME"]
    with_pools, without = alternate(STARTS, lambda: loaded(left), lambda: loaded(folder / "never"))
    yield Figure(
        "%load_ext: three pools were left",
        1000 * (median(with_pools) - median(without)),
        "ms",
        limit=20,
    )


def loaded(state: Path) -> float:
    """Seconds that loading takes in a fresh Python."""
    env = {**os.environ, "XDG_STATE_HOME": str(state)}
    said = subprocess.run(
        [sys.executable, "-c", LOAD], env=env, capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"took (\S+)", said)
    assert found is not None
    return float(found[1])


def attaching(desk: Desk) -> Figure:
    """``%sky_attach`` of a pool on two hosts whose notebook was killed amidst a cell, less a connection to one of them."""
    config = desk.folder / "client" / ".ssh" / "config"
    waits = f"%%sky_broadcast\nimport os\nprint('before', flush=True)\nwhile not os.path.exists({str(desk.folder / 'gate')!r}): pass"
    beyond: list[float] = []
    with desk.notebook(desk.made) as notebook:
        shown = notebook.start(waits)
        notebook.watch(shown, lambda seen: "before" in seen.stdout)
        killed(notebook)
    for number in range(ROUNDS):
        connection = statistics.median(
            timed(lambda: connect(SshConfig(config).endpoint(HostSpec("h1", "h1"))).close())
            for _ in range(3)
        )
        with desk.notebook() as notebook:
            begun = time.perf_counter()
            shown = notebook.start(f"%sky_attach {desk.pool}")
            notebook.watch(shown, lambda seen: "goes on" in seen.text)
            beyond.append(time.perf_counter() - begun - connection)
            say(f"  {number + 1}/{ROUNDS}: {beyond[-1]:.2f} beyond {connection:.2f}")
            if number == ROUNDS - 1:
                (desk.folder / "gate").touch()
                notebook.finish(shown)
                notebook.run(f"%sky_down {desk.pool}")
            else:
                killed(notebook)
    return Figure(
        "attach to a live pool, beyond the SSH connection", median(beyond), "s", limit=1.5
    )
