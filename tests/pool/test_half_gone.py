"""A pool of which a machine is gone when another notebook attaches: what is left can be used, what is lost is said, and what can be done."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.kernels.daemon import rundir
from tests.lab.desk import GATED, Desk, killed, ssh_desk
from tests.lab.notebook import Notebook

pytestmark = pytest.mark.needs("sshd")
ENDS = (
    GATED
    + """print('after')
name = rank + 40
rank + 1"""
)
FOREVER = "%%sky_broadcast -o value\nimport time\nprint('begun', flush=True)\nwhile True: time.sleep(0.05)"


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with ssh_desk(tmp_path) as desk:
        yield desk


def test_attach_uses_live_nodes_and_names_lost_ones(desk: Desk) -> None:
    """Two hosts; the second one loses its power while no notebook is attached."""
    first, second = desk.hosts
    with desk.notebook(desk.made) as notebook:
        notebook.run("%%sky_broadcast\nimport os\nkept = 40 + int(os.environ['RANK'])")
        killed(notebook)
    with desk.notebook() as notebook:
        stopped_while_it_attaches(desk, notebook)
        desk.left_alone(notebook, ENDS)
    second.power_cut()
    with desk.notebook() as notebook:  # its cell has ended meanwhile
        shown = notebook.finish(notebook.start("%sky_attach lab"))
        assert shown.stdout.count("after") == 1
        assert re.search(r"rank 1 .*rank 0 .*\(-t 0 ", shown.stdout)
        assert shown.failure.ename == "ResultError"
        assert "rank 1 " in shown.failure.text
        assert re.search(r"\bname, value\b|\bvalue, name\b", shown.failure.text)
        assert notebook.value("value[0], name[0], type(value[1]).__name__") == (
            1,
            40,
            "Unavailable",
        )
        notebook.run("%%sky_broadcast -t 0 -o there\nname")
        assert notebook.value("there") == [40]
        second.start()
        notebook.run("%sky_restart")
        notebook.run("%%sky_broadcast -o ranks\nimport os\nkept = int(os.environ['RANK'])\nkept")
        assert notebook.value("ranks") == [0, 1]
        going = notebook.start(FOREVER)
        notebook.watch(going, lambda seen: "begun" in seen.stdout)
        killed(notebook)
    second.power_cut()
    with desk.notebook() as notebook:  # its cell goes on
        shown = notebook.finish(notebook.start("%sky_attach lab"))
        died = shown.error
        assert died is not None
        assert "reconnects" not in shown.text
        assert died.ename == "RankDied"
        fields = notebook.fields()
        assert (fields["rank"], fields["host"]) == (1, "h2")
        assert "rank 0 " in died.evalue
        assert "%sky_restart" in died.evalue
        second.start()
        notebook.run("%sky_restart")
        killed(notebook)
    first.power_cut()
    (record,) = desk.records.glob("*.json")
    with desk.notebook() as notebook:  # the first machine is a machine like the others
        shown = notebook.run("%sky_attach lab")
        assert "rank 0 and its variables are lost; rank 1 keeps its variables" in shown.stdout
        notebook.run("%%sky_broadcast -t 1 -o there\nimport os\nint(os.environ['RANK'])")
        assert notebook.value("there") == [1]
        assert "is down" in notebook.run("%sky_down lab").text
    left = rundir.find(f"{record.stem}-0")  # a machine that is started anew has an empty /tmp
    assert left is not None
    left.remove()
    for store in Path("/dev/shm").glob(f"skymagic-{record.stem}-*"):
        shutil.rmtree(store)


def stopped_while_it_attaches(desk: Desk, notebook: Notebook) -> None:
    """The stop button while a machine does not answer leaves the pool as it is."""
    first, second = desk.hosts
    second.freeze()
    begun = len(first.log)
    shown = notebook.start("%sky_attach lab")
    assert first.wait_log("Accepted publickey", begun)
    notebook.interrupt()
    assert notebook.finish(shown).error is not None
    second.thaw()
    notebook.run("%sky_attach lab")
    notebook.run("%sky_pull kept")
    assert notebook.value("kept") == [40, 41]
