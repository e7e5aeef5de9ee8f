"""The clock of a machine is set, a day ahead or back, while a pool runs: nothing that waits takes it for time that has passed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab.notebook import ROOT, Notebook, gate, opened

DAY = 86_400
SITE = """
import time
wall, wall_ns = time.time, time.time_ns
def offset():
    try:
        with open({path!r}) as file:
            return int(file.read() or 0)
    except OSError:
        return 0
time.time = lambda: wall() + offset()
time.time_ns = lambda: wall_ns() + offset() * 10**9
"""
"""A clock of all processes below the notebook that a file sets; the system's is everybody's."""
Jump = Callable[[int], None]


@pytest.fixture
def jump(tmp_path: Path) -> Iterator[tuple[Notebook, Jump]]:
    """A notebook with a pool, and what sets the clock of both."""
    path = tmp_path / "clock"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE.format(path=str(path)))
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)])}
    with opened(
        tmp_path, "%sky_pool --ranks 2 --idle 1h --max-lifetime 2h", env=env, fresh=True
    ) as notebook:

        def jumps(seconds: int) -> None:
            before = notebook.value("__import__('time').time()")
            path.write_text(str(seconds))
            assert abs(notebook.value("__import__('time').time()") - before) > DAY / 2

        yield notebook, jumps


@pytest.mark.parametrize("seconds", [DAY, -DAY], ids=["ahead", "back"])
def test_pool_continues(jump: tuple[Notebook, Jump], seconds: int) -> None:
    notebook, jumps = jump
    notebook.run("%%sky_broadcast -o before\nimport time\nkept = 7; time.time()")
    jumps(seconds)
    notebook.run("%%sky_broadcast --timeout 60s -o after\n(kept, time.time())")
    before, after = notebook.value("before, after")
    assert [kept for kept, _ in after] == [7, 7]
    # the ranks' clock has jumped too
    assert all(abs(now - then) > DAY / 2 for then, (_, now) in zip(before, after, strict=True))
    kills = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    assert notebook.fail(f"%%sky_broadcast -t 0\n{kills}").ename == "RankDied"
    notebook.run("%%sky_broadcast -o found\n'kept' in globals()")
    assert notebook.value("found") == [False, True]
    notebook.run("%sky_restart")
    assert "ready" in notebook.run("%sky_status").said
    assert (
        notebook.fail(
            "%%sky_broadcast --timeout 1s\ntime = __import__('time'); time.sleep(60)"
        ).ename
        == "RunTimeout"
    )
    notebook.run("%sky_down")
    notebook.run("%sky_pool --ranks 2")
    notebook.run("%%sky_broadcast -o found\n1")
    assert notebook.value("found") == [1, 1]


@pytest.mark.parametrize("seconds", [DAY, -DAY], ids=["ahead", "back"])
def test_running_cell_continues(jump: tuple[Notebook, Jump], tmp_path: Path, seconds: int) -> None:
    notebook, jumps = jump
    way = gate(tmp_path)
    cell = notebook.start(
        "%%sky_broadcast -a -t 0 --timeout 10m\n"
        f"print('at work', flush=True)\nopen({str(way)!r}).read()"
    )
    notebook.watch(cell, lambda seen: "at work" in seen.text)
    notebook.run("run = _")
    jumps(seconds)
    assert notebook.value("run.status") == "running"
    way.write_text("go")
    notebook.run("run.result(60)")
    assert notebook.value("run.status") == "done"
