"""Where pools run: each provider with everything that its nodes need, for tests that hold on all of them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.durations import CLOCK
from tests.lab import ec2 as lab
from tests.lab import ray
from tests.lab.ec2 import REGION, ec2
from tests.lab.ending import JOB_ID, cmdline
from tests.lab.hosts import loopback, masters, share_code, still_there
from tests.lab.instances import booting
from tests.lab.kube import kube
from tests.lab.notebook import ROOT, Notebook, opened
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


PlaceMaker = Callable[[Path], AbstractContextManager[Place]]
"""Sets a place up in an empty folder, and takes it down."""


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


MACOS = Path(__file__).parent / "darwin"
"""Folder for ``PYTHONPATH``, in which Python finds a stand-in for macOS."""


@contextmanager
def hosts_of_ssh_from_macos(folder: Path) -> Iterator[Place]:
    """The same hosts, for a notebook whose Python finds nothing that only Linux has."""
    with hosts_of_ssh(folder) as there:
        there.env = {**there.env, "PYTHONPATH": f"{MACOS}{os.pathsep}{ROOT}"}
        there.before = "import sys\nassert sys.platform == 'darwin'"
        yield there


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
    with ray.lent() as made:
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


@contextmanager
def this_machine(folder: Path) -> Iterator[Place]:
    """Two simulated nodes, which end with their notebook unless they are detached."""
    yield Place("--nodes 2", {}, lambda: None, list)


SETUP = """\
import os, signal, sys, time
import torch, torch.distributed as dist
import skymagic as sky
rank = dist.get_rank()
"""
"""What each test of a shared pool finds on the ranks."""


@dataclass
class Site:
    """A notebook at one place, with its pool ``lab`` of two nodes with one rank each and torch.

    Attributes:
        notebook: its kernel; the pool is the one used last.
        place: where the pool's nodes are.
        folder: where further notebooks of this place may have theirs.
    """

    notebook: Notebook
    place: Place
    folder: Path

    @contextmanager
    def another(self, *cells: str, env: dict[str, str] | None = None) -> Iterator[Notebook]:
        """Another notebook of the same user, which knows the same pools."""
        folder = self.folder / f"notebook-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        with opened(
            folder, *cells, env={**_environment(self.place, self.folder), **(env or {})}
        ) as notebook:
            yield notebook


def _environment(place: Place, folder: Path) -> dict[str, str]:
    """What all notebooks of one user, which lie in this folder, have in their environment."""
    return {**place.env, "XDG_STATE_HOME": str(folder / "state")}


def _ended(notebook: Notebook) -> None:
    """End all pools, where the kernel still lives: a place looks for what is left before its kernel is closed."""
    if notebook.alive:
        notebook.finish(notebook.start("%sky_down --all"))


class Sites:
    """Keeps the place used last, with its notebook and pool, from one test file to the next."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened = 0
        self._maker: PlaceMaker | None = None
        self._resources = ExitStack()
        self._site: Site | None = None

    def at(self, maker: PlaceMaker) -> Site:
        """The site of this maker, with its pool ready and what `SETUP` defines on the ranks."""
        if maker is not self._maker or self._site is None or not self._is_ready(self._site):
            self.close()
            with CLOCK.starting():
                self._site = self._open(maker)
            self._maker = maker
        return self._site

    def _is_ready(self, site: Site) -> bool:
        try:
            site.notebook.run("%sky_pool lab")
            site.notebook.run(f"%%sky_broadcast --no-push -o _ready\n{SETUP}rank")
            return bool(site.notebook.value("_ready == [0, 1]"))
        except Exception as problem:
            print(f"the pool of this place is started again: {problem}", file=sys.stderr)
            return False

    def _open(self, maker: PlaceMaker) -> Site:
        self._opened += 1
        folder = self._folder / f"place-{self._opened}"
        (folder / "notebooks").mkdir(parents=True)
        with ExitStack() as stack:
            place = stack.enter_context(maker(folder))
            env = _environment(place, folder / "notebooks")
            (folder / "notebook").mkdir()
            notebook = stack.enter_context(opened(folder / "notebook", env=env))
            notebook.run(place.before)
            notebook.run(f"%sky_pool lab {place.options} --plugin torch")
            stack.callback(_ended, notebook)
            site = Site(notebook, place, folder / "notebooks")
            assert self._is_ready(site), "a new pool does not run cells"
            self._resources = stack.pop_all()
        return site

    def close(self) -> None:
        """End the pool, its notebook, and its nodes."""
        self._site = self._maker = None
        self._resources.close()
