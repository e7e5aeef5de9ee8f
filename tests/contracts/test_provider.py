"""What every provider's pools do, in one test for each provider: start, run, fail, stop, attach, lose a node, end, leave nothing.

A provider of yours passes it too: add a `Place` for it to tests/lab/sites.py (CONTRIBUTING.md, "Add a provider").
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.lab.notebook import at_work, opened, seen
from tests.lab.sites import (
    Place,
    hosts_of_ssh,
    machines_of_ec2,
    nodes_of_ray,
    nodes_of_slurm,
    nodes_of_slurm_elsewhere,
    pods_of_kubernetes,
)

PROVIDERS = {
    "aws": pytest.param(machines_of_ec2, marks=pytest.mark.needs("sshd"), id="aws"),
    "ssh": pytest.param(hosts_of_ssh, marks=pytest.mark.needs("sshd"), id="ssh"),
    "openssh": pytest.param(
        partial(hosts_of_ssh, client="openssh"), marks=pytest.mark.needs("sshd"), id="openssh"
    ),
    "slurm-login": pytest.param(
        nodes_of_slurm_elsewhere, marks=pytest.mark.needs("slurm", "root", "sshd"), id="slurm-login"
    ),
    "slurm": pytest.param(nodes_of_slurm, marks=pytest.mark.needs("slurm", "root"), id="slurm"),
    "kubernetes": pytest.param(
        pods_of_kubernetes, marks=pytest.mark.needs("namespaces", "root"), id="kubernetes"
    ),
    "ray": pytest.param(nodes_of_ray, marks=pytest.mark.needs("ray"), id="ray"),
}


@pytest.mark.parametrize("place", PROVIDERS.values())
def test_a_pool_from_its_start_to_its_end(
    place: Callable[[Path], AbstractContextManager[Place]], tmp_path: Path
) -> None:
    """One pass over the life of a pool, on each provider."""
    (tmp_path / "notebook").mkdir()
    with place(tmp_path) as there, opened(tmp_path / "notebook", env=there.env) as notebook:
        # start, and a cell with a value of the notebook's
        notebook.run(there.before)
        notebook.run(f"%sky_pool lab {there.options}")
        notebook.run("scale = [1, 2]")
        cell = "import skymagic as sky\nme = sky.instance_info()\n(me.rank, me.node, me.world_size, scale)"
        assert seen(notebook, cell) == [(0, 0, 2, [1, 2]), (1, 1, 2, [1, 2])]

        # one rank's failure is its own exception, and frees the others
        failure = notebook.fail(
            "%%sky_broadcast\nimport time\nif me.rank: raise KeyError('mine')\ntime.sleep(600)"
        )
        assert (failure.ename, "rank 1" in failure.text) == ("KeyError", True)

        # stop, and all go on with what they hold
        running = at_work(notebook)
        notebook.interrupt()
        assert notebook.finish(running).failure.ename == "RunInterrupted"

        # another kernel attaches, and the ranks have their variables
        notebook.restart()
        notebook.run("%load_ext skymagic")
        assert "attached to pool 'lab'" in notebook.run("%sky_attach lab").text
        assert seen(notebook, "me.rank") == [0, 1]

        # a node's death ends the cell, and is explained; the other node's rank goes on
        running = at_work(notebook)
        there.lose()
        failure = notebook.finish(running).failure
        assert ("rank 1" in failure.text, there.lost in failure.text) == (True, True), failure.text
        assert failure.ename == "RankDied", failure.text
        assert "cannot be reached: " in failure.text, failure.text
        notebook.run("%%sky_broadcast -t 0 -o left\nme.rank")
        assert notebook.value("left") == [0]

        # the end leaves nothing
        notebook.run("%sky_down")
        assert there.left() == []
