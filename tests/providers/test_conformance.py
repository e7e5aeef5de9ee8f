"""What every provider's pools do, in one test for each provider: start, run, fail, stop, attach, lose a node, end, leave nothing.

A provider of yours passes it too: give `place` what it needs (CONTRIBUTING.md, "A provider of your own").
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.lab import ec2 as lab
from tests.lab import ray
from tests.lab.ec2 import REGION, ec2
from tests.lab.ending import JOB_ID, cmdline
from tests.lab.hosts import loopback, masters, share_code, still_there
from tests.lab.instances import booting
from tests.lab.kube import kube
from tests.lab.notebook import at_work, opened, seen
from tests.lab.shells import pip_settings
from tests.lab.slurm import cluster


@dataclass
class Place:
    """Where a provider's nodes are, as the suite needs it.

    Attributes:
        options: of ``%sky_pool``, for two nodes of one rank each.
        env: what a notebook's environment needs besides.
        lose: takes the second node away, with all that runs there.
        left: what still runs there, in words; asked after the pool's end.
    """

    options: str
    env: dict[str, str]
    lose: Callable[[], object]
    left: Callable[[], list[str]]
    before: str = ""
    """A cell that comes first."""
    lost: str = "rank 1"
    """What is said of the second node's end."""


@contextmanager
def hosts_of_ssh(folder: Path, client: str = "paramiko") -> Iterator[Place]:
    with loopback(folder / "hosts", 2, env=pip_settings()) as hosts, masters(hosts) as env:
        for host in hosts:
            share_code(host.home)

        def lose() -> None:
            job_ids = {
                one
                for process in hosts[1].processes()
                for word in cmdline(process)
                for one in JOB_ID.findall(word)
            }
            hosts[1].power_cut()
            for job_id in job_ids:  # a machine without power does not tidy up
                for path in Path("/tmp").glob(f"skymagic-daemon-*{job_id}-1"):
                    shutil.rmtree(path)

        options = f"--provider ssh --hosts h[1-2] --ssh {client} --python {sys.executable}"
        yield Place(
            options, env, lose, lambda: [str(one) for one in still_there(hosts[0].processes())]
        )


@contextmanager
def nodes_of_slurm(folder: Path) -> Iterator[Place]:
    with cluster(folder / "slurm") as slurm:
        options = f"--provider slurm --nodes 2 --time 10m --python {sys.executable}"

        def left() -> list[str]:
            slurm.wait_empty()
            return [
                " ".join(one.cmdline())
                for one in slurm.processes()
                if "ipykernel_launcher" not in one.cmdline()
            ]

        yield Place(
            options, slurm.env, lambda: slurm.lose("n2"), left, lost="Slurm has taken it from job"
        )


@contextmanager
def pods_of_kubernetes(folder: Path) -> Iterator[Place]:
    with kube(folder / "kube") as cluster:

        def left() -> list[str]:
            cluster.wait(lambda: not cluster.left())
            return [" ".join(one.cmdline()) for one in cluster.processes()]

        options = f"--provider kubernetes --nodes 2 --python {sys.executable}"
        lost = "its node is gone (DeletionByPodGC"
        yield Place(
            options, cluster.env, lambda: cluster.power_cut(cluster.pod(1).name), left, lost=lost
        )


@contextmanager
def nodes_of_ray(folder: Path) -> Iterator[Place]:
    with ray.cluster() as made:
        options = f"--provider ray --address {made.address} --nodes 2 --python {sys.executable}"
        lost = "Ray says: The actor died because its node has died"
        yield Place(options, {}, lambda: made("lose", 1), made.left, lost=lost)


@contextmanager
def nodes_of_slurm_elsewhere(folder: Path, client: str = "paramiko") -> Iterator[Place]:
    """The notebook's machine has no program of Slurm's: the login node has."""
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").symlink_to(shutil.which("ssh") or "")
    with (
        nodes_of_slurm(folder) as there,
        loopback(
            folder / "hosts", 1, env={**pip_settings(), **there.env}, names=["login"]
        ) as hosts,
        masters(hosts) as env,
    ):
        there.options += f" --login login --ssh {client}"
        there.env = {**env, "PATH": str(folder / "bin")}
        yield there


@contextmanager
def machines_of_ec2(folder: Path) -> Iterator[Place]:
    (home := folder / "home").mkdir()
    with ec2() as cloud, booting(cloud, folder / "machines") as machines:
        settings = {
            "subnet": machines.subnet, "use_private_ips": True, "ssh_port": machines.port, "user": machines.user,
            "endpoint_url": cloud.url, "deadline_factor": 0.2,  # a busy machine is no reason to give up
        }  # fmt: skip

        def lose() -> None:
            second = [one for one in lab.instances() if one.state == "running"][1]
            lab.set_state(second, "terminated", "Server.InternalError")
            machines.end(second.id)

        options = f"--provider aws --region {REGION} --nodes 2 -y --python {sys.executable}"
        env = {**lab.environment(), "HOME": str(home)}
        yield Place(options, env, lose, lambda: [f"{kind}: {ids}" for kind, ids in lab.left().items()],
                    f"%config SkyMagic.aws = {settings!r}")  # fmt: skip


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
        # the node is named as lost; ipyparallel's word for an engine that fell silent explains nothing
        assert (failure.ename, "EngineError" in failure.text) == ("RankDied", False), failure.text
        assert "cannot be reached: " in failure.text, failure.text
        notebook.run("%%sky_broadcast -t 0 -o left\nme.rank")
        assert notebook.value("left") == [0]

        # the end leaves nothing
        notebook.run("%sky_down")
        assert there.left() == []
