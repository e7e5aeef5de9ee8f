"""A rented pool is found again and not rented twice: after a kernel's death, by a second notebook, without local state."""

from __future__ import annotations

import getpass
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab import ec2 as lab
from tests.lab.desk import killed
from tests.lab.ec2 import REGION, ec2
from tests.lab.instances import Machines, booting
from tests.lab.notebook import Notebook, opened

pytestmark = pytest.mark.needs("sshd")
REQUEST = f"--provider aws --region {REGION} --nodes 2 --python {sys.executable}"
POOL = f"%sky_pool lab {REQUEST}"


@dataclass
class Desk:
    """Where notebooks of one user come and go."""

    folder: Path
    machines: Machines
    notebooks: int = 0

    @contextmanager
    def notebook(self, state: str = "state") -> Iterator[Notebook]:
        self.notebooks += 1
        folder = self.folder / f"notebook-{self.notebooks}"
        folder.mkdir()
        env = {
            **lab.environment(),
            "HOME": str(self.folder),
            "XDG_STATE_HOME": str(self.folder / state),
        }
        with opened(folder, self.machines.settings, env=env) as one:
            yield one

    @property
    def launches(self) -> int:
        return sum(call.action == "RunInstances" for call in self.machines.cloud.calls)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("reuse")
    with ec2() as cloud, booting(cloud, folder / "machines") as machines:
        yield Desk(folder, machines)
        assert lab.left() == {}


def test_same_line_reuses_the_pool_and_warns_other_notebooks(desk: Desk) -> None:
    """Four notebooks: one is killed, one reuses the pool, one is refused, and one has no local records."""
    with desk.notebook() as first:
        first.run(f"{POOL} -y")
        first.run("%%sky_broadcast\nimport os\nkept = 41 + int(os.environ['RANK'])")
        killed(first)
    with desk.notebook() as second:
        assert second.run(POOL).error is None
        second.run("%%sky_broadcast -o found\nkept")
        assert second.value("found") == [41, 42]
        with desk.notebook() as third:
            refused = third.fail(f"{POOL} -y").text
            assert "lab (lab-" in refused
            assert "%sky_attach lab --take-over" in refused
            # it is told the same where it attaches, and the machines stay as they are
            assert "%sky_attach lab --take-over" in third.fail("%sky_attach lab").text
        with desk.notebook(state="elsewhere") as stranger:
            refused = stranger.fail(f"{POOL} -y").text
            assert " key " in refused
            assert re.search(r"%sky_down lab-\S+ --provider aws\b", refused)
            listed = stranger.run("%sky_status lab --provider aws").stdout
            assert f"started by {getpass.getuser()}@{socket.gethostname()}" in listed
            assert re.findall(r"%sky_down [^;\n]*", listed)[0].strip() in refused
        killed(second)
    with desk.notebook() as fourth:
        fourth.run(f"%%sky_broadcast {REQUEST} -o found\nkept")
        assert fourth.value("found") == [41, 42], (
            "a cell's own line finds it too, whatever it is called"
        )
        assert desk.launches == 1
        running = fourth.run("%sky_status --cost").stdout
        fourth.run("%sky_down")
        assert lab.left() == {}
        assert [line.split()[0] for line in running.splitlines()] == ["pool", "lab"]
    with desk.notebook() as fifth:
        assert fifth.run("%sky_status lab --cost").stdout.splitlines()[1].split()[:2] == [
            "lab",
            "nothing",
        ], "kept over restarts"


def test_ended_pool_is_rented_again_and_left_pool_ends_by_name(
    desk: Desk,
) -> None:
    with desk.notebook() as first:
        first.run(f"{POOL} -y")
        ids = [one.id for one in lab.instances() if one.state == "running"]
        killed(first)
    with desk.notebook() as second:
        for one in lab.instances():
            if one.id in ids[:1]:
                lab.set_state(one, "terminated", "Server.SpotInstanceTermination")
                desk.machines.end(one.id)
        assert f"1 of its 2 machines no longer run ({ids[0]})" in second.fail(POOL).text
        second.run("%sky_pool another --ranks 1 --lazy")
        assert second.run("%sky_down").stdout == "pool 'another' is down\n", (
            "its own, and not what was left"
        )
        assert "pool 'lab' (lab-" in second.run("%sky_down").text, "the only one that was left"
        assert lab.left() == {}
        assert "add -y" in second.fail(POOL).text, "nothing is known of it any more"
