"""Random histories of pools on a real Slurm cluster (`benchmarks.leaks`): whatever goes wrong, no job, no process and no folder is left.

    HISTORIES=100 SEED=1 python benchmarks/slurm_leaks.py          as root, with slurmctld, slurmd and munged installed

Besides what users do, an administrator cancels the job, sets a node down or puts the job back into the queue, or the controller is restarted, or
a job of higher priority comes. Before them one pool lives until its time limit.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import leaks
from tests.lab.ending import cmdline
from tests.lab.slurm import cluster

KILLED = {"set_down"}
"""Events by which Slurm kills outright what runs on a node: its folders are left, which a site's epilogue removes."""


class SlurmLife(leaks.Life):
    """Histories of Slurm's pools."""

    PROVIDER, OPTIONS = "slurm", "--time 10m"
    EVENTS = (
        "stop", "stop", "stop_twice", "kill", "cancel", "requeue", "set_down", "restart_controller", "preempt", "nothing", "nothing",
    )  # fmt: skip

    def pool(self, event: str = "") -> str:
        return super().pool() + (" --slurm no-requeue=none,requeue" if event == "requeue" else "")

    def cancel(self) -> None:
        self.cluster("scancel", "--user=root", check=False)

    def requeue(self) -> None:
        for number, _, _ in self.cluster.jobs():
            self.cluster("scontrol", "requeue", number, check=False)

    def set_down(self) -> None:
        self.cluster.lose("n2")
        time.sleep(8.0)
        self.recover()  # a job that has no nodes yet would wait for it for ever

    def restart_controller(self) -> None:
        with self.cluster.without_controller():
            time.sleep(0.5)

    def preempt(self) -> None:
        self.cluster(
            "sbatch",
            "-N2",
            "--exclusive",
            "-p",
            "urgent",
            "-t",
            "1",
            "-o",
            "/dev/null",
            "--wrap",
            "sleep 1",
        )

    def recover(self) -> None:
        self.cluster("scontrol", "update", "nodename=n2", "state=resume", check=False)
        self.cluster("scancel", "--name=wrap", check=False)

    def pools(self) -> list[str]:
        jobs = self.cluster.jobs()
        return [
            name for _, state, name in jobs if name.startswith("lab-") and state != "COMPLETING"
        ]

    def left(self) -> list[str]:
        jobs = [" ".join(one) for one in self.cluster.jobs()]
        processes = [" ".join(cmdline(one))[:200] for one in self.cluster.processes()]
        names = {
            name
            for name in self.cluster("squeue", "-h", "-t", "all", "-o", "%j").split()
            if name.startswith("lab-")
        }
        places = [
            place
            for each in names
            for place in (
                *Path("/tmp").glob(f"skymagic*{each}*"),
                *Path("/dev/shm").glob(f"skymagic*{each}*"),
            )
        ]
        if any(KILLED & {*one.split()} for one in self.told):  # nothing can remove them then
            for place in places:
                shutil.rmtree(place, ignore_errors=True)
            places = []
        return (
            jobs
            + [one for one in processes if "ipykernel_launcher" not in one]
            + [str(each) for each in places]
        )


COLLECTIVE = """\
%%sky_broadcast
import time, torch, torch.distributed as dist
import skymagic as sky
sky.on_interruption(lambda notice: None)
print("at work", flush=True)
time.sleep(600) if dist.get_rank() else dist.all_reduce(torch.ones(1))
"""


def expire(life: SlurmLife) -> str:
    """The job reaches its limit of a minute while a rank is in a collective; what the user is told. Raises AssertionError."""
    life.notebook.run(f"{life.pool()} --plugin torch --time 1m".replace("--time 10m", ""))
    begun = time.monotonic()
    shown = life.notebook.finish(life.notebook.start(COLLECTIVE))
    assert "its on_interruption hook has run" in shown.text, shown.text
    assert "has reached its time limit" in shown.failure.text, shown.failure.text
    life.end()
    last = next(line for line in shown.failure.text.splitlines() if "time limit" in line)
    return f"a limit of a minute, {time.monotonic() - begun:.0f} s after the pool was ready: {last.strip()}"


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(
            leaks.main(
                SlurmLife,
                lambda place: cluster(place / "slurm"),
                lambda slurm: dict(slurm.env),
                expire,
            )
        )
