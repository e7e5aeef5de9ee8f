"""A real Slurm cluster on this machine: munged, slurmctld and a slurmd for each node, with everything of theirs in one folder.

::

    with cluster(tmp_path) as slurm:
        slurm.env                          # what a notebook needs to find it
        slurm.jobs(), slurm("scancel", number)

It starts in about a second, as root. Debian builds slurmd so that several of them run on one machine (``slurmd -N NAME``).
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from skymagic.runtime.rendezvous import free_port
from tests.lab.ending import end, program, with_variable
from tests.lab.hosts import SBIN

DEADLINE = 15.0
CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
KillWait=5
InactiveLimit=0
PlugStackConfig=/dev/null
GresTypes=gpu
EnforcePartLimits=ALL
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
FirstJobId={first}
{more}
{nodes}
PartitionName=gpu Nodes=n[1-{count}] Default=YES MaxTime=60 DefaultTime=10 State=UP PriorityTier=1 GraceTime=0
PartitionName=urgent Nodes=n[1-{count}] MaxTime=60 State=UP PriorityTier=10
"""
CGROUP = """\
CgroupAutomount=no
CgroupMountpoint=/sys/fs/cgroup
ConstrainDevices=no
IgnoreSystemd=yes
"""
NODE = "NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=4000 Gres=gpu:a100:2 State=UNKNOWN"


@dataclass
class Cluster:
    """A cluster that runs.

    Attributes:
        env: what Slurm's programs and notebooks need to find it.
    """

    folder: Path
    count: int
    env: dict[str, str]
    within: tuple[str, ...] = ()
    """What nodes' daemons are started by."""
    _names: set[str] = field(default_factory=set)
    """Of all jobs that were seen: what Slurm kills outright leaves its folders, which a site's epilogue removes."""

    def __call__(self, *words: str, check: bool = True) -> str:
        """One of Slurm's programs: its output."""
        done = subprocess.run(
            words, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=DEADLINE
        )
        assert not check or done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def jobs(self) -> list[tuple[str, str, str]]:
        """(number, state, name) of all jobs that have not ended."""
        rows = (line.split("|") for line in self("squeue", "-h", "-o", "%i|%T|%j").splitlines())
        found = [(number, state, name) for number, state, name in rows]
        self._names |= {name for _, _, name in found}
        return found

    def running(self) -> str:
        """The number of the one job that runs."""
        (found,) = [number for number, state, _ in self.jobs() if state == "RUNNING"]
        return found

    def wait_empty(self) -> None:
        """Until no job is left, and every node is idle again."""
        self.wait(lambda: not self.jobs() and self.idle())

    def idle(self) -> bool:
        """Whether all nodes are free."""
        return set(self("sinfo", "-h", "-o", "%t").split()) == {"idle"}

    def wait(self, over: Callable[[], object]) -> None:
        """Until that is so."""
        deadline = time.monotonic() + DEADLINE
        while not over():
            assert time.monotonic() < deadline, self("squeue") + self("sinfo")
            time.sleep(0.1)  # Slurm tells of nothing by itself

    def lose(self, node: str) -> None:
        """Set a node down as an administrator does: what runs there is killed, and leaves its folders."""
        self.jobs()
        self("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def processes(self) -> list[psutil.Process]:
        """All processes of its jobs: those that know it by their environment, but for its own daemons and this process's."""
        daemons = ("slurmctld", "slurmd", "munged")
        found = with_variable("SLURM_CONF", self.env["SLURM_CONF"])
        return [one for one in found if one.pid != os.getpid() and program(one) not in daemons]

    def _start(self) -> None:
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o600)
        files = [
            f"--{name}={munge}/{name}"
            for name in ("key-file", "pid-file", "log-file", "seed-file", "socket")
        ]
        files[0] = f"--key-file={munge}/key"
        self._daemon("munged", "--force", *files)
        self._daemon("slurmctld", "-c")
        for number in range(1, self.count + 1):
            self._daemon(*self.within, "slurmd", "-N", f"n{number}")
        self.wait(self.idle)

    def _daemon(self, *command: str) -> None:
        done = subprocess.run(
            command,
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            close_fds=True,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"

    @contextmanager
    def without_controller(self) -> Iterator[None]:
        """Its controller is down meanwhile, and finds its jobs again afterwards."""
        controller = psutil.Process(int((self.folder / "run" / "slurmctld.pid").read_text()))
        controller.terminate()
        while controller.is_running() and controller.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)  # it is no child of this process
        try:
            yield
        finally:
            self._daemon("slurmctld")

    def instead_of(self, program: str, script: str) -> dict[str, str]:
        """A notebook's environment in which one of Slurm's programs is this script of sh, which finds the real one as ``$REAL``."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        (folder / program).write_text(
            f"#!/bin/sh\nREAL={shutil.which(program, path=SBIN)}\n{script}\n"
        )
        (folder / program).chmod(0o755)
        return {**self.env, "PATH": f"{folder}:{self.env['PATH']}"}

    def pids(self) -> list[int]:
        """Of its daemons."""
        files = [*(self.folder / "run").glob("*.pid"), self.folder / "munge" / "pid-file"]
        return [int(file.read_text()) for file in files if file.exists()]

    def stop(self) -> None:
        """End all jobs, and the daemons."""
        with contextlib.suppress(Exception):
            self("scancel", "--user=root", check=False)
            self.wait(lambda: not self.jobs())
        daemons = [psutil.Process(pid) for pid in self.pids() if psutil.pid_exists(pid)]
        for daemon in daemons:
            daemon.terminate()
        deadline = time.monotonic() + DEADLINE
        while any(
            daemon.is_running() and daemon.status() != psutil.STATUS_ZOMBIE for daemon in daemons
        ):
            assert time.monotonic() < deadline, daemons
            time.sleep(0.05)  # they are no children of this process
        for process in (
            psutil.process_iter()
        ):  # the step of a node that was lost would tell its controller for ever
            with contextlib.suppress(psutil.Error):
                if process.name() == "slurmstepd" and process.cwd() == str(self.folder):
                    process.kill()


@contextmanager
def cluster(
    folder: Path,
    count: int = 2,
    *,
    proctrack: str = "linuxproc",
    more: str = "",
    within: tuple[str, ...] = (),
) -> Iterator[Cluster]:
    """Nodes n1, n2, … with 8 CPUs and two devices each that Slurm takes for GPUs, in two partitions, of which one preempts the other.

    Args:
        folder: an empty folder.
        proctrack: how Slurm knows a job's processes: ``linuxproc`` or ``cgroup``.
        more: lines of slurm.conf. within: what nodes' daemons are started by, as ``unshare --mount`` is.

    At the end nothing of any job is left, or the test fails.
    """
    for name in ("state", "run", *(f"spool/n{number}" for number in range(1, count + 1))):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname().partition(".")[0]
    nodes = "\n".join(
        NODE.format(n=number, host=host, port=free_port("127.0.0.1"))
        for number in range(1, count + 1)
    )
    conf = CONF.format(
        host=host, port=free_port("127.0.0.1"), folder=folder, nodes=nodes, count=count, proctrack=proctrack, more=more,
        # a cgroup has a job's number in its name, and other clusters here have some too; a socket has it in its path of 108 characters at most
        first=random.randrange(1, 900),
    )  # fmt: skip
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text(
        f"NodeName=n[1-{count}] Name=gpu Type=a100 File=/dev/null,/dev/zero\n"
    )
    (folder / "cgroup.conf").write_text(CGROUP)
    made = Cluster(folder, count, {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SBIN}, within)
    try:
        made._start()
        yield made
        made.wait(lambda: not made.processes())
    finally:
        made.stop()
        end(made.processes)
        for name in made._names:
            for path in (
                *Path("/tmp").glob(f"skymagic*{name}*"),
                *Path("/dev/shm").glob(f"skymagic*{name}*"),
            ):
                shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        for number in range(1, count + 1) if proctrack == "cgroup" else ():
            root = Path(f"/sys/fs/cgroup/freezer/slurm_n{number}")
            for path in sorted([root, *root.rglob("*/")], reverse=True):
                with contextlib.suppress(OSError):  # another cluster's
                    path.rmdir()
