"""A notebook as a job on rented machines: executed on their head, not taken for idle between its cells, and lost with them in words."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from tests.lab import ec2 as lab
from tests.lab.desk import Desk, killed, nothing_left
from tests.lab.ec2 import REGION, ec2
from tests.lab.instances import Machines, booting

pytestmark = pytest.mark.needs("sshd")
REQUEST = f"--provider aws --region {REGION} --nodes 2 --python {sys.executable}"
BUSY = """import glob, re, time
def busy():
    records = glob.glob('/tmp/skymagic-daemon-*-JOB-[01]/record')
    found = [re.search('"busy_since": *([0-9.]+)', open(one).read()) for one in records]
    return [one is not None and float(one[1]) > 0 for one in found]
for _ in range(600):
    if busy() == [True, True]: break
    time.sleep(0.05)
print('at work:', busy())"""
"""A plain cell: what the watchdogs of both machines read of their agents."""


@pytest.fixture(scope="module")
def rented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Desk, Machines]]:
    """A pool on two rented machines, whose notebook was killed."""
    folder = tmp_path_factory.mktemp("rented")
    made = f"%sky_pool lab{os.urandom(4).hex()} {REQUEST}"
    with ec2() as cloud, booting(cloud, folder / "machines") as machines:
        desk = Desk(folder, made, {**lab.environment(), "HOME": str(folder)})
        with desk.notebook(machines.settings, f"{made} -y") as first:
            killed(first)
        with nothing_left(desk.env):
            yield desk, machines


def written(folder: Path, *cells: str) -> str:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    path = folder / "train.ipynb"
    nbformat.write(notebook, path)
    return str(path)


def test_notebook_job_keeps_machines_in_use_between_cells(
    rented: tuple[Desk, Machines],
) -> None:
    desk, _ = rented
    (record,) = desk.records.glob("*.json")
    broadcast = "%%sky_broadcast -o ranks\nimport os\nint(os.environ['RANK'])"
    cells = ("%load_ext skymagic", desk.made, broadcast, BUSY.replace("JOB", record.stem), "ranks")
    code, out, err = desk.ran("run", written(desk.folder, *cells), "--pool", desk.pool)
    assert code == 0, err
    assert {"at work: [True, True]", "[0, 1]"} <= {*out.splitlines()}
    fetched = desk.folder / "fetched.ipynb"
    code, _, err = desk.ran("get", desk.pool, "train.executed.ipynb", fetched)
    assert code == 0, err
    assert len(nbformat.read(fetched, as_version=4).cells) == len(cells) + 1


def test_resources_deleted_with_their_machines(rented: tuple[Desk, Machines]) -> None:
    desk, machines = rented
    code, _, err = desk.ran(
        "run", written(desk.folder, "print('kept there')"), "--pool", desk.pool, "--detach"
    )
    assert code == 0, err
    for one in lab.instances():
        lab.set_state(one, "terminated", "Server.SpotInstanceTermination")
        machines.end(one.id)
    code, _, err = desk.ran("logs", desk.pool)
    assert code == 1
    assert "terminated" in err
    assert lab.left() == {}
