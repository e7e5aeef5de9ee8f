"""Attaching: a notebook is killed amidst its cell, and another continues with it: no line lost and all in order, its values, its errors."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.desk import GATED, Desk, killed, killed_daemons, ssh_desk
from tests.lab.notebook import Notebook
from tests.lab.waiting import until

pytestmark = pytest.mark.needs("sshd")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with ssh_desk(tmp_path) as desk:
        yield desk


def test_attach_gets_finished_results_and_running_cells(
    desk: Desk,
) -> None:
    """Each kernel is killed during a cell; the next one attaches after the cell's end, or while it runs."""
    with desk.notebook(desk.made) as notebook:
        desk.left_alone(
            notebook, GATED + "print('after')\nname = [1.5] * 200_000 + [rank]\nlen(name)"
        )
    with desk.notebook() as notebook:
        shown = notebook.run("%sky_attach lab")
        assert "[cell 3 on ranks 0, 1 " in shown.stdout
        assert shown.stdout.count("after") == 1
        lists = [(200_001, 0), (200_001, 1)]
        assert notebook.value("value, [(len(each), each[-1]) for each in name]") == (
            [200_001] * 2,
            lists,
        )
        # a death and a script wait too
        desk.left_alone(
            notebook,
            GATED
            + "import signal, time\nif rank == 0: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(1000)",
        )
    with desk.notebook() as notebook:  # what its user has had is not shown again
        shown = notebook.finish(notebook.start("%sky_attach lab"))
        assert shown.failure.ename == "RankDied"
        assert "after" not in shown.stdout
        assert notebook.value("'value' in globals()") is False
        notebook.run("%%sky_broadcast -o ranks\nimport os\nos.environ['RANK']")
        assert notebook.value("ranks") == ["0", "1"]
        desk.left_alone(
            notebook,
            "%%sky_sh -t 0 -o ends\necho before\ncat {way}\ntouch {over}\necho after\nexit 3",
        )
    with desk.notebook() as notebook:
        cell = notebook.finish(notebook.start("%sky_attach lab"))
        assert cell.failure.ename == "ScriptError"
        assert cell.stdout.count("after") == 1
        assert notebook.value("[(end.status, end.tail) for end in ends]") == [
            (3, "before\ngoafter")
        ]
        gate = desk.gate()
        beside = (
            GATED.replace("-o", "-a -o").format(way=repr(str(gate)), over=repr(os.devnull))
            + "name = rank\nrank"
        )
        shown = notebook.run(beside)
        notebook.watch(shown, lambda seen: "before" in seen.stdout)
    with desk.notebook() as notebook:  # the last one's kernel was shut down, and left what goes on
        cell = notebook.start("%sky_attach lab")
        notebook.watch(cell, lambda seen: "is still running" in seen.text)
        gate.write_text("go")
        notebook.finish(cell)
        assert cell.error is None, cell.error
        assert notebook.value("value") == [0, 1]
    with desk.notebook() as notebook:  # and this one's at rest: the pool has ended
        assert "no pool 'lab' was left" in notebook.fail("%sky_attach lab").evalue


def test_live_notebook_keeps_its_pool_unless_taken_over(
    desk: Desk,
) -> None:
    with desk.notebook(desk.made) as first, desk.notebook() as second:
        assert "available: lab" in second.fail("%sky_attach other", "no-pool").evalue
        first.fail("%sky_attach lab", "pool-exists")
        assert "%sky_attach lab --take-over" in second.fail("%sky_attach lab", "pool-held").evalue
        second.fail("%%sky_broadcast\n1", "no-pool")
        first.run("%%sky_broadcast\nkept = 5")
        cell = first.start(
            "%%sky_broadcast\nimport time\nprint('begun', flush=True)\nwhile True: time.sleep(0.05)"
        )
        first.watch(cell, lambda seen: "begun" in seen.stdout)
        taking = second.start("%sky_attach lab --take-over")
        second.watch(taking, lambda seen: "is still running" in seen.stdout)
        lost = first.finish(cell)
        assert lost.failure.ename == "PoolError"
        assert f"was taken over by the notebook in {second.folder} (process {second.pid} on" in (
            lost.failure.evalue
        )
        second.interrupt()
        stopped = second.finish(taking).error
        assert stopped is not None
        assert stopped.ename == "RunInterrupted"
        second.run("%sky_pull kept")
        assert second.value("kept") == [5, 5]
        first.run("%sky_down --all")  # which ends what is its own no more
        second.run("%%sky_broadcast -o still\nkept")
        assert second.value("still") == [5, 5]
        taken_by_another_machine(desk, second)


def taken_by_another_machine(desk: Desk, first: Notebook) -> None:
    """Another machine that was given the pool's key continues with it."""
    gate = desk.gate()
    cell = first.start(
        GATED.format(way=repr(str(gate)), over=repr(os.devnull))
        + "name = [rank]\nprint('after')\nrank"
    )
    first.watch(cell, lambda seen: "before" in seen.stdout)
    laptop = desk.elsewhere()
    with laptop.notebook() as second:
        refused = second.fail("%sky_attach lab").evalue
        assert f"(process {first.pid} on the-first-desk)" in refused
        assert "--take-over" in refused
        killed(first)
        taking = second.start("%sky_attach lab --take-over")
        second.watch(taking, lambda seen: "still running" in seen.stdout)
        gate.write_text("go")
        second.finish(taking)
        assert taking.error is None, taking.error
        shown = [line for line in taking.lines if line in ("before", "after")]
        # what the first notebook showed in its last seconds comes again
        assert shown in (["before", "after"], ["after"])
        assert second.value("value, name") == ([0, 1], [[0], [1]])
        second.run("%%sky_broadcast -o still\nname")
        assert second.value("still") == [[0], [1]]
        second.run("%sky_down lab")
    assert [one for one in laptop.records.iterdir() if one.suffix != ".lock"] == []


def test_abandoned_cell_is_stopped_and_lost_pool_reported(
    desk: Desk,
) -> None:
    said = desk.folder / "said"
    body = f"""%%sky_broadcast
import os, time
print('begun', flush=True)
try:
    while True: time.sleep(0.05)
finally:
    if os.environ['RANK'] == '0':
        open({str(said)!r}, 'w').close()"""
    with desk.notebook(f"{desk.made} --max-away 1s") as first:
        cell = first.start(body)
        first.watch(cell, lambda seen: "begun" in seen.stdout)
        killed(first)
    until(said.exists)
    with desk.notebook() as second:
        cell = second.finish(second.start("%sky_attach lab"))
        assert cell.failure.ename == "KeyboardInterrupt"
        assert re.search(r"^\[rank 0: .*\b1s\b.*--max-away 1s", cell.stderr, re.MULTILINE)
        second.run("%%sky_broadcast -o fine\n'fine'")
        assert second.value("fine") == ["fine", "fine"]
        (record,) = desk.records.glob("*.json")
        assert record.stat().st_mode & 0o777 == 0o600
        killed(second)
    cannot_be_attached(desk, record)


def cannot_be_attached(desk: Desk, record: Path) -> None:
    """A pool whose daemons are gone, and whose key is another version's, damaged, open to others, or not here."""
    values = json.loads(record.read_text())
    key = values["key"]
    assert (key["python"], key["interpreter"]) == (platform.python_version(), sys.executable)

    def write(**changes: str) -> None:
        record.write_text(json.dumps({**values, "key": {**key, **changes}}))

    with killed_daemons(record.stem), desk.notebook() as second:
        write(version="0.0.1")
        assert "skymagic 0.0.1" in second.fail("%sky_attach lab", "other-version").evalue
        write(python="3.9.18", interpreter="/opt/the lab/bin/python")
        # and nobody has looked whether it is there
        refused = second.fail("%sky_attach lab", "other-python").evalue
        assert "Python 3.9.18" in refused
        assert platform.python_version() in refused
        assert "/opt/the lab/bin/python" in refused
        code, _, said = desk.ran("logs", "lab")
        assert (code, refused in said) == (1, True), "a reader is refused too"
        write(pickle=key["pickle"][: len(key["pickle"]) // 2])
        second.fail("%sky_attach lab", "key-damaged")
        write()
        record.chmod(0o644)
        second.fail("%sky_attach lab", "key-exposed")
        record.chmod(0o600)
        second.fail("%sky_attach lab", "attach")
        record.write_text(json.dumps({**values, "key": None}))
        second.fail("%sky_attach lab", "key-missing")
