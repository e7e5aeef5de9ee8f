"""A pool whose notebook is alive: another notebook is refused or takes it over, and programs read its logs."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.desk import Desk, ssh_desk
from tests.lab.notebook import Notebook
from tests.lab.waiting import says

pytestmark = pytest.mark.needs("sshd")


@dataclass
class Room:
    """A pool of two hosts, the notebook that has it, another one of the same user, and where his shell is."""

    desk: Desk
    holder: Notebook
    second: Notebook

    def __post_init__(self) -> None:
        self.gate, self.program, self.ran = self.desk.gate, self.desk.program, self.desk.ran

    def begin(self, cell: str) -> None:
        """The holder begins a cell, and both ranks are in it."""
        shown = self.holder.run(cell)
        self.holder.watch(shown, lambda seen: {"[0] before 0", "[1] before 1"} <= {*seen.lines})


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    folder = tmp_path_factory.mktemp("reading")
    with ssh_desk(folder) as desk, desk.notebook(desk.made) as holder, desk.notebook() as second:
        holder.run(
            "%%sky_broadcast\nimport os, time\nrank = int(os.environ['RANK'])\nheld = [1, 2, 3]"
        )
        yield Room(desk, holder, second)


def waiting(gate: Path, end: str = "print('after', rank)") -> str:
    return f"%%sky_broadcast -a --only all\nprint('before', rank, flush=True)\nif rank == 0: open({str(gate)!r}).read()\n{end}"


def test_second_notebook_learns_who_has_the_pool(room: Room) -> None:
    for name in ("lab", next(room.desk.records.glob("*.json")).stem):
        refused = room.second.fail(f"%sky_attach {name}")
        assert "\n" not in refused.evalue
        assert f"(process {room.holder.pid} on " in refused.evalue
        assert refused.evalue.endswith(f"%sky_attach {name} --take-over")
    room.second.fail("%%sky_broadcast --pool lab\n1", "no-pool")
    assert room.holder.run("%%sky_broadcast -o still\nrank").error is None
    assert room.holder.value("still") == [0, 1]


@pytest.mark.parametrize("line", ["logs lab -t 0 -f", "attach lab"])
def test_programs_follow_logs(room: Room, line: str) -> None:
    gate = room.gate()
    room.begin(waiting(gate))
    process = room.program(*line.split())
    says(process, "before")
    gate.write_text("go")
    says(process, "after 0")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert room.holder.value("_.result()") == [None, None]  # of print


def test_programs_read_logs(room: Room) -> None:
    code, out, _ = room.ran("logs", "lab", "--grep", "^before", "--rank", "1", "-n", "1")
    assert (code, out) == (0, "before 1\n")
    code, out, _ = room.ran("logs", "lab", "--grep", "^before", "-n", "1", "--json")
    assert (code, json.loads(out)) == (
        0,
        {"pool": "lab", "ended": False, "ranks": {"0": ["before 0"], "1": ["before 1"]}},
    )
    code, out, err = room.ran("logs", "lab", "--rank", "7", "--run", "999", "--grep", "(")
    assert (code, out) == (2, "")
    assert all(
        part in err for part in ("there is no rank 7", "no run 999", "not a regular expression")
    )
    code, out, err = room.ran("logs", "other")
    assert (code, out) == (1, "")
    assert "available: lab" in err
    (pool,) = json.loads(room.ran("pools", "--json")[1])["pools"]
    assert (pool["name"], pool["left"], pool["hosts"]) == ("lab", False, ["h1", "h2"])


def test_take_over_keeps_the_pools_settings(room: Room) -> None:
    room.second.run("%sky_attach lab --take-over")
    room.second.run("%sky_pull held")
    assert room.second.value("held") == [[1, 2, 3]] * 2
    gate = room.gate()
    room.second.run(waiting(gate))
    gate.write_text("go")
    room.second.run("_.result()")
    room.second.run("%sky_down lab")
    code, out, _ = room.ran("logs", "lab", "--json", "--grep", "^after", "-n", "1")
    assert (code, json.loads(out)) == (
        0,
        {"pool": "lab", "ended": True, "ranks": {"0": ["after 0"]}},
    )
