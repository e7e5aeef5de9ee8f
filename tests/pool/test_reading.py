"""Reading: a second notebook, and programs, see a pool whose notebook is alive, and change nothing there."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def test_a_second_notebook_follows_and_runs_nothing(room: Room) -> None:
    gate = room.gate()
    room.begin(waiting(gate))
    following = room.second.start("%sky_attach lab")
    room.second.watch(
        following, lambda seen: {"[0] before 0", "[1] before 1", "[1] after 1"} <= {*seen.lines}
    )
    room.second.interrupt()  # which leaves the run as it is
    assert room.second.finish(following).error is None
    assert f"(process {room.holder.pid} on " in following.text
    assert "%sky_attach lab --take-over" in following.text
    assert "there is no pool 'lab'" in room.second.fail("%%sky_broadcast --pool lab\n1").evalue
    again = room.second.start("%sky_attach lab")
    room.second.watch(again, lambda seen: "[0] before 0" in seen.lines)
    gate.write_text("go")
    shown = room.second.finish(again)
    ours = sorted(line for line in shown.lines if line[:4] in ("[0] ", "[1] "))
    assert ours == ["[0] after 0", "[0] before 0", "[1] after 1", "[1] before 1"]
    assert "has finished" in shown.text
    assert room.holder.run("%%sky_broadcast -o still\nrank").error is None
    assert room.holder.value("still") == [0, 1]


def test_programs_follow_and_exit_as_the_run_has_ended(room: Room) -> None:
    assert room.ran("attach", "lab")[0] == 0  # nothing runs
    ends = {"print('after', rank)": 0, "1 / rank": 3, "'stopped'": 4}
    for end, code in ends.items():
        gate = room.gate()
        room.begin(waiting(gate, end))
        process = room.program("attach", "lab", "--json")
        assert process.stdout is not None
        seen: list[dict[str, Any]] = []
        while not any(one.get("text") == "before 0\n" for one in seen):
            seen.append(json.loads(process.stdout.readline()))
        if code == 4:
            room.holder.run("_.cancel();")
        else:
            gate.write_text("go")
        out, err = process.communicate(timeout=60)
        seen += map(json.loads, out.splitlines())
        assert process.returncode == code, (end, seen, err)
        assert [one["event"] for one in seen if one["event"] in ("attached", "run", "end")] == [
            "attached",
            "run",
            "end",
        ]
        assert seen[-1]["status"] == {0: "done", 3: "failed", 4: "stopped"}[code]


def test_ctrl_c_leaves_the_run(room: Room) -> None:
    gate = room.gate()
    room.begin(waiting(gate))
    process = room.program("attach", "lab")
    says(process, "before")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    gate.write_text("go")
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
    code, out, err = room.ran("attach", "other")
    assert (code, out) == (1, "")
    assert "available: lab" in err
    (pool,) = json.loads(room.ran("pools", "--json")[1])["pools"]
    assert (pool["name"], pool["left"], pool["hosts"]) == ("lab", False, ["h1", "h2"])


def test_taking_over_and_what_stays(room: Room) -> None:
    room.second.run("%sky_attach lab --take-over")
    room.second.run("%sky_pull held")
    assert room.second.value("held") == [[1, 2, 3]] * 2
    gate = room.gate()
    room.second.run(waiting(gate))
    process = room.program("attach", "lab", "--json")
    says(process, "before 0")
    room.second.run("%sky_down lab")
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, json.loads(out.splitlines()[-1])["status"]) == (5, "lost")
    code, out, _ = room.ran("logs", "lab", "--json", "--grep", "^after", "-n", "1")
    assert (code, json.loads(out)) == (
        0,
        {"pool": "lab", "ended": True, "ranks": {"0": ["after 0"]}},
    )
    assert room.ran("attach", "lab")[0] == 1
