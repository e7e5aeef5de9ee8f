"""Pools of this machine that outlive their notebook: left, listed, attached to, and ended."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from skymagic.plan.planning import fits, plan
from skymagic.plan.plans import Inventory
from skymagic.plan.requests import PoolRequest
from skymagic.pool import records
from skymagic.pool.records import PoolRecord
from skymagic.providers import Local
from skymagic.wire.record import answers
from tests.lab.desk import Desk, daemons, killed, local_desk
from tests.lab.golden import Golden
from tests.lab.hosts import still_there
from tests.lab.notebook import Notebook, buttons
from tests.lab.waiting import until

WAITS = """%%sky_broadcast -o value
import os, time
print('before', flush=True)
while not os.path.exists(GATE): time.sleep(0.02)
print('after')
int(os.environ['RANK'])"""

REPORTS = """%%sky_broadcast -o value
import os, time
import skymagic as sky
rank = int(os.environ['RANK'])
sky.report(step=0, loss=rank)
print('before', flush=True)
while not os.path.exists(FIRST): time.sleep(0.02)
sky.report(step=1, loss=rank + 0.5)
while not os.path.exists(GATE): time.sleep(0.02)
sky.report(step=2, loss=rank + 0.25)
print('after')
rank"""
"""Like `WAITS`, and reports at three times: while its notebook is there, when it is gone, and when another one is there."""

DIES_AMIDST = """import os, signal, time
from skymagic.display.screen import NotebookScreen
def dies(*_):
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
NotebookScreen.text = dies"""
"""The kernel is killed half a second after it has shown what comes before a text of a rank."""


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with local_desk(tmp_path) as desk:
        yield desk


def test_local_pool_continues_without_its_notebook(desk: Desk) -> None:
    """The first kernel is killed during a cell; the second one attaches to the detached pool."""
    gone, gate = desk.folder / "gone", desk.folder / "gate"
    with desk.notebook(desk.made) as first:
        cell = first.start(
            REPORTS.replace("FIRST", repr(str(gone))).replace("GATE", repr(str(gate)))
        )
        first.watch(cell, lambda seen: "before" in seen.stdout)
        killed(first)
    gone.write_text("")
    with desk.notebook() as second:
        left = f"pool {desk.pool!r} was left on "
        assert left in second.run("%reload_ext skymagic").text
        assert left in second.run("%sky_status").text
        cell = second.start(f"%sky_attach {desk.pool}")
        second.watch(cell, lambda seen: "is still running" in seen.text)
        gate.write_text("")
        second.finish(cell)
        assert cell.error is None, cell.error
        assert cell.stdout.count("after") == 1
        # what the first notebook has shown, whether or not its page was open, is not repeated
        logs = re.search(r"is still running; earlier output: (%sky_logs --run \d+)\]", cell.text)
        assert logs is not None, cell.text
        assert "before" in second.run(logs[1]).text
        reported = second.value("__import__('skymagic').find().metrics.loss.to_dict()")
        assert reported == {
            (0, 0): 0,
            (1, 0): 0.5,
            (2, 0): 0.25,
            (0, 1): 1,
            (1, 1): 1.5,
            (2, 1): 1.25,
        }
        second.run("%%sky_broadcast -o kept\nvalue = [3] * 200_000\nlen(value)")
        assert second.value("value, kept") == ([0, 1], [200_000, 200_000])
        killed(second)
    (pool,) = json.loads(desk.ran("pools", "--json")[1])["pools"]
    assert (pool["name"], pool["provider"], pool["left"]) == (desk.pool, "local", True)
    found = json.loads(desk.ran("status", desk.pool, "--json")[1])["pools"]
    ranks = [psutil.Process(pid) for node in found[0]["nodes"] for pid in node["ranks"].values()]
    assert (found[0]["job_id"], len(ranks)) == (pool["job_id"], 2)
    (hint,) = [line for line in desk.ran("status", desk.pool)[1].splitlines() if "%sky_" in line]
    assert hint.endswith(f"%sky_down {desk.pool}")
    with desk.notebook() as third:
        assert (
            f"pool {desk.pool!r} ({pool['job_id']}) is down on"
            in third.run(f"%sky_down {desk.pool}").stdout
        )
        assert still_there(ranks) == []
        until(lambda: not answers(f"{pool['job_id']}-0"))  # its daemon goes last
        assert left not in third.run("%sky_status").text
    assert json.loads(desk.ran("pools", "--json")[1])["pools"] == []
    assert desk.ran("down", desk.pool)[0] == 2


def restarted_amid_a_cell(notebook: Notebook, gate: Path) -> list[psutil.Process]:
    """Restart a kernel from its menu while a cell holds it; the ranks that the cell ran on, which go on if they were left waiting."""
    notebook.watched = True
    notebook.run("%config SkyMagic.view_after = 0.0\nimport os")
    notebook.run("%%sky_broadcast -o pids\nkept = 7\nos.getpid()")
    ranks = [psutil.Process(pid) for pid in notebook.value("pids")]
    cell = notebook.start(WAITS.replace("GATE", repr(str(gate))))
    notebook.watch(
        cell, lambda seen: "before" in seen.stdout and bool(seen.rich)
    )  # its line is there, and moves
    notebook.restart()
    gate.write_text("")
    return ranks


def test_kernel_restart_during_a_cell_replaces_the_pool(desk: Desk) -> None:
    with desk.notebook("%sky_pool brief --ranks 2") as notebook:
        assert "--detach" in notebook.fail("%%sky_sh --detach\ntrue").text
        ranks = restarted_amid_a_cell(notebook, desk.folder / "gate")
        assert still_there(ranks) == []
        assert "was left" not in notebook.run("%load_ext skymagic").text
        assert "brief" not in notebook.run("%sky_status").said
        gone = notebook.fail("%sky_attach brief", "pool-ended").evalue
        assert "%sky_pool brief … --detach" in gone
        notebook.run("%sky_pool brief --ranks 2")
        assert "again" in (said := notebook.run("%%sky_broadcast\nprint('again')")).lines, (
            said.outputs
        )


def test_restarted_kernel_attaches_to_its_detached_pool(
    desk: Desk,
) -> None:
    """The kernel is restarted during a cell, and later shut down during a script."""
    gate = desk.folder / "gate-of-the-script"
    with desk.notebook(desk.made) as first:
        ranks = restarted_amid_a_cell(first, desk.folder / "gate")
        assert f"pool {desk.pool!r} was left on " in first.run("%load_ext skymagic").text
        first.finish(first.start(f"%sky_attach {desk.pool}"))  # which may tell how the cell ended
        first.run("%sky_pull kept -o kept")
        assert first.value("kept") == [7, 7]
        assert all(rank.is_running() for rank in ranks)
        assert "again" in (said := first.run("%%sky_broadcast\nprint('again')")).lines, said.outputs
        shown = first.start(
            f"%%sky_sh --detach -o ends\necho before\nuntil [ -e {gate} ]; do sleep 0.05; done\necho after\nexit 3"
        )
        first.watch(shown, lambda seen: "before" in seen.stdout)
        first.finish(shown)  # the script goes on beside the notebook
    with desk.notebook() as second:  # the first was shut down as by the menu
        for line in "%sky_down", "%sky_down --all":  # end what is this notebook's own
            second.run("%sky_pool another --ranks 1 --lazy")
            ended = second.run(line).stdout.splitlines()
            assert ended[0] == "pool 'another' is down"
        assert re.fullmatch(
            rf"pool '{desk.pool}', which was left on this machine, is still running: %sky_down {desk.pool}-\w+ ends it",
            ended[1],
        )
        cell = second.start(f"import skymagic as sky\nsky.attach({desk.pool!r})")
        second.watch(cell, lambda seen: "is still running" in seen.text)
        gate.write_text("")
        second.finish(cell)
        assert cell.failure.ename == "ScriptError"
        assert cell.stdout.count("after") == 1
        assert (
            second.value("[(end.status, end.tail) for end in ends]") == [(3, "before\nafter")] * 2
        )
        second.run(f"%sky_down {desk.pool}")


def test_abandoned_pool_ends(desk: Desk) -> None:
    with desk.notebook("%config SkyMagic.away = '1s'", desk.made) as first:
        found = json.loads(desk.ran("status", desk.pool, "--json")[1])["pools"]
        ranks = [
            psutil.Process(pid) for node in found[0]["nodes"] for pid in node["ranks"].values()
        ]
        killed(first)
    assert still_there(ranks, 30.0) == []
    for daemon in daemons(found[0]["job_id"]):
        with suppress(psutil.NoSuchProcess):
            daemon.terminate()  # it would wait for a notebook that asks why
        assert still_there([daemon]) == []
    with desk.notebook() as second:
        second.fail(f"%sky_attach {desk.pool}", "no-pool")
        assert desk.pool not in second.run("%sky_status").text


def test_one_that_ends_with_its_notebook_does_not_fit(golden: Golden) -> None:
    here = Inventory("laptop", 8, 16.0)
    stays, goes = plan(PoolRequest(nodes=2, detached=True), here), plan(PoolRequest(nodes=2), here)
    assert (stays.outlives, goes.outlives) == (True, False)
    golden(fits(PoolRequest(detached=True), goes))
    assert fits(PoolRequest(detached=True), stays) == fits(PoolRequest(), stays) == []
    golden(stays.text())
    golden(goes.text())
    assert Local(detached=True).fields == {"detached": True}


def test_reminder_says_how_to_end_the_pool(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    gone = PoolRecord(
        "lab", "lab-0a1b2c3d", "local", ("laptop",), "/home/ann", process="1 1 long-ago"
    )
    golden(records.reminders([gone]))
    records.write(gone)
    assert records.readable_records() == []  # its daemon is not there any more
    assert list((tmp_path / "skymagic" / "pools").iterdir()) == []


def test_possibly_seen_output_is_repeated_with_a_note(desk: Desk) -> None:
    gate = desk.folder / "gate"
    with desk.notebook(desk.made) as first:  # killed before it acknowledges what it has shown
        seen = first.start(WAITS.replace("GATE", repr(str(gate))))
        first.watch(seen, lambda seen: "before" in seen.stdout)
        killed(first)
    with desk.notebook(
        DIES_AMIDST
    ) as second:  # killed between that line and what it announces: which is not lost
        second.start(f"%sky_attach {desk.pool}")
        assert still_there([psutil.Process(second.pid)], 60.0) == []
    with desk.notebook() as third:
        cell = third.start(f"%sky_attach {desk.pool}")
        third.watch(cell, lambda seen: "before" in seen.stdout)
        gate.write_text("")
        third.finish(cell)
        *_, said, before, after = cell.text.splitlines()
        assert said.startswith("[rank 0: the next line may have been shown before")
        assert (before, after) == ("before", "after")
        third.run(f"%sky_down {desk.pool}")


def test_a_second_pool_of_the_same_name_is_refused(desk: Desk) -> None:
    name = desk.pool
    with desk.notebook(desk.made) as first, desk.notebook() as second:
        for line in (desk.made, f"{desk.made} --lazy", f"%sky_pool {name} --ranks 1 --detach"):
            refused = second.fail(line, "pool-exists")
            assert f"{name} ({name}-" in refused.evalue
            assert f"process {first.pid} on " in refused.evalue
            assert f"%sky_attach {name} --take-over" in refused.evalue
        assert f"not made: {name} ({name}-" in second.run(f"{desk.made} --dry-run").stdout
        # one that ends with its notebook is no obstacle to attaching
        second.run(f"%sky_pool {name} --ranks 1")
        second.run(f"%sky_down {name}")
        killed(first)
        refused = second.fail(desk.made)
        assert f"continue with it (%sky_attach {name}), end it (%sky_down {name}-" in refused.evalue
        ends = re.search(r"%sky_down \S+(?=\))", refused.evalue)
        assert ends is not None
        second.run(ends[0])
        second.run(desk.made)  # which is free again
        second.run(f"%sky_down {name}")


def test_a_pool_that_was_taken_over_is_not_called_dead(desk: Desk) -> None:
    """Each message of the first notebook names the second one, which took the pool over."""
    name, gate = desk.pool, desk.folder / "gate"
    with desk.notebook(desk.made) as first, desk.notebook() as second:
        first.run("%%sky_broadcast\nkept = 5")
        cell = first.start(WAITS.replace("GATE", repr(str(gate))))
        first.watch(cell, lambda seen: "before" in seen.stdout)
        taking = second.start(f"%sky_attach {name} --take-over")
        second.watch(taking, lambda seen: "is still running" in seen.text)
        failed = first.finish(cell).failure
        who = f"the notebook in {second.folder} (process {second.pid} on "
        back = f"%sky_attach {name} --take-over takes it back"
        for said in (
            f"{failed.ename}: {failed.evalue}",
            first.fail("%sky_restart").text,
            first.fail("%%sky_broadcast\n1").text,
            first.run("%sky_status").text,
            first.run("%sky_down").text,
        ):
            assert f"pool {name!r} " in said
            assert who in said
            assert " since " in said
            assert back in said
            assert "died" not in said.casefold()
            assert "is down" not in said
        assert failed.ename == "PoolError"
        gate.write_text("")
        second.finish(taking)
        assert taking.error is None, taking.error
        assert second.value("value") == [0, 1]
        # and back again, also after %sky_down in the notebook that lost it
        taking = first.start(f"%sky_attach {name} --take-over")
        assert first.finish(taking).error is None, taking.error
        first.run("%sky_pull kept")
        assert first.value("kept") == [5, 5]
        # this time without a %sky_down in between
        until(lambda: "--take-over" in second.run("%sky_status").text)
        second.fail("%%sky_broadcast\n1", "pool-ended")
        second.run(f"%sky_attach {name} --take-over")
        second.run("%%sky_broadcast -o again\nkept")
        assert second.value("again") == [5, 5]
        second.run("%sky_down")


@pytest.mark.parametrize("how", ["restart", "restart-now", "shutdown"])
def test_a_blocking_cell_survives_the_menus_restart(desk: Desk, how: str) -> None:
    gate = desk.folder / "gate"
    with desk.notebook(desk.made) as notebook:
        cell = notebook.start(WAITS.replace("GATE", repr(str(gate))))
        notebook.watch(cell, lambda seen: "before" in seen.stdout)
        if how != "shutdown":
            notebook._manager.restart_kernel(now=how == "restart-now")
            notebook.wait_until_ready()
            notebook.run("%load_ext skymagic")
            attached_to_the_rest(desk, notebook, gate)
    if how == "shutdown":
        with desk.notebook() as notebook:
            attached_to_the_rest(desk, notebook, gate)


def attached_to_the_rest(desk: Desk, notebook: Notebook, gate: Path) -> None:
    """Attach while the cell goes on, and let it come to its end."""
    cell = notebook.start(f"%sky_attach {desk.pool}")
    notebook.watch(cell, lambda seen: "is still running" in seen.text)
    gate.write_text("")
    notebook.finish(cell)
    assert cell.error is None, cell.error
    assert "after" in cell.stdout
    assert notebook.value("value") == [0, 1]
    # the stop button stops as ever
    cell = notebook.start("%%sky_broadcast\nprint('x', flush=True)\n__import__('time').sleep(600)")
    notebook.watch(cell, lambda seen: "x" in seen.stdout)
    notebook.interrupt()
    assert notebook.finish(cell).failure.ename == "RunInterrupted"
    notebook.run(f"%sky_down {desk.pool}")


def test_attach_names_the_interrupted_cell(desk: Desk) -> None:
    cell = REPORTS.replace("FIRST", "'/dev/null'").replace("GATE", repr(str(desk.folder / "gate")))
    with desk.notebook(desk.made) as notebook:
        shown = notebook.start(cell)
        notebook.watch(shown, lambda seen: "before" in seen.stdout)
        notebook.interrupt()
        assert notebook.finish(shown).failure.ename == "RunInterrupted"
        notebook.restart()
        notebook.run("%load_ext skymagic")
        said = notebook.run(f"%sky_attach {desk.pool}").said
        assert re.search(
            r"cell 3 .*\b0, 1 .* \d\d:\d\d:\d\d, .*step 1 .*line \d+.*: value ",
            said,
        ), said
        notebook.run(f"%sky_down {desk.pool}")


@pytest.mark.parametrize(
    "attach", ["%sky_attach {}", "import skymagic as sky\npool = sky.attach({!r})"]
)
def test_a_followed_cell_has_its_line_and_buttons(desk: Desk, attach: str) -> None:
    gate = desk.folder / "gate"
    cell = f"""%%sky_broadcast -o value
import os, time
import skymagic as sky
step = 0
while not os.path.exists({str(gate)!r}):
    sky.report(step=step, total=100_000, loss=0.5)
    if step == 60: print('before', flush=True)
    step += 1
    time.sleep(0.05)
step"""
    with desk.notebook(desk.made) as first:
        shown = first.start(cell)
        first.watch(shown, lambda seen: "before" in seen.stdout)
        before = time.monotonic()
        killed(first)
    with desk.notebook("%config SkyMagic.view_after = 0.0") as second:
        second.watched = True
        shown = second.start(attach.format(desk.pool))
        found = buttons(second, shown)
        assert {"stop", "ranks"} <= {*found}

        def line() -> str:
            return " ".join(str(one.get("value", "")) for one in second.widgets.values())

        attached = time.monotonic()
        second.watch(shown, lambda _: "loss 0.5" in line() and " left" in line())
        clock = re.search(r"\b0:(\d\d)\b", line())
        assert clock is not None, line()
        assert int(clock[1]) >= int(3 + attached - before), "it goes on from the cell's real start"
        gate.write_text("")
        second.finish(shown)
        assert shown.error is None, shown.error
        assert "results → `value`" in shown.said
        shown = second.start("%%sky_broadcast\n__import__('time').sleep(600)")
        second.click(buttons(second, shown)["stop"])
        assert second.finish(shown).failure.ename == "RunInterrupted"
        second.run(f"%sky_down {desk.pool}")
