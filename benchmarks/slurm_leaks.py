"""Random histories of pools on a real Slurm cluster until so many are done: whatever goes wrong, no job and no process is left.

    HISTORIES=100 SEED=1 python benchmarks/slurm_leaks.py          as root, with slurmctld, slurmd and munged installed

A history starts a pool, runs a cell, and ends the pool. At a random moment of each of the three the user presses stop, once or twice, or the
notebook's kernel is killed, or an administrator cancels the job, sets a node down or puts the job back into the queue, or the controller is
restarted, or a job of higher priority comes. Before them one pool lives until its time limit. Ends with 1 at the first history that leaves something, and prints it.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from tests.lab.ending import cmdline
from tests.lab.notebook import Notebook, Shown, opened
from tests.lab.slurm import Cluster, cluster

POOL = f"%sky_pool lab --provider slurm --nodes 2 --time 10m --python {sys.executable}"
REQUEUED = f"{POOL} --slurm no-requeue=none,requeue"
CELL = "%%sky_broadcast --only all\nimport time\nfor _ in range(20): time.sleep(0.1)"
GONE_SECONDS = 45.0
"""Within which everything is gone: Slurm kills what has had its SIGTERM after 5 s, and answers of a lost node take their time."""
PHASES = {"start": (POOL, 9.0), "cell": (CELL, 2.5), "end": ("%sky_down --all", 2.0)}
"""What is run → and within how many seconds something happens."""


@dataclass
class Life:
    """One history, and what it happens to."""

    slurm: Cluster
    folder: Path
    opened: ExitStack = field(default_factory=ExitStack)
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.notebook = self.new()

    def new(self) -> Notebook:
        """A kernel in the place of one that was killed; it has that one's records."""
        return self.opened.enter_context(opened(self.folder, env=self.slurm.env))

    # -- what happens

    def stop(self) -> None:
        self.notebook.interrupt()

    def stop_twice(self) -> None:
        self.notebook.interrupt()
        time.sleep(0.3)
        self.notebook.interrupt()

    def kill(self) -> None:
        psutil.Process(self.notebook.pid).kill()
        while self.notebook.alive:  # else what comes next is sent to it
            time.sleep(0.02)

    def cancel(self) -> None:
        self.slurm("scancel", "--user=root", check=False)

    def requeue(self) -> None:
        for number, _, _ in self.slurm.jobs():
            self.slurm("scontrol", "requeue", number, check=False)

    def set_down(self) -> None:
        self.slurm.lose("n2")

    def restart_controller(self) -> None:
        with self.slurm.without_controller():
            time.sleep(0.5)

    def preempt(self) -> None:
        self.slurm("sbatch", "-N2", "--exclusive", "-p", "urgent", "-t", "1", "-o", "/dev/null", "--wrap", "sleep 1")

    def nothing(self) -> None:
        pass

    EVENTS = (stop, stop, stop_twice, kill, cancel, requeue, set_down, restart_controller, preempt, nothing, nothing)

    # -- the history

    def live(self, random: random.Random) -> None:
        """Have it happen, and look at what it has left. Raises AssertionError."""
        self.told.clear()
        for phase, (source, within) in PHASES.items():
            event, moment = random.choice(self.EVENTS), random.uniform(0.0, within)
            self.told.append(f"{phase}: {event.__name__} after {moment:.1f} s")
            if event is Life.requeue and phase == "start":
                source = REQUEUED
            self.during(source, partial(event, self), moment)
            if event is Life.kill:
                break
        self.end()

    def during(self, source: str, event: Callable[[], None], moment: float) -> None:
        """Run a cell while something happens; how it ends is no matter."""
        timer = threading.Timer(moment, event)
        shown = self.notebook.start(source)
        timer.start()
        try:
            finish(self.notebook, shown)
        finally:
            timer.join()

    def end(self) -> None:
        """What a user does in the end; then nothing is left."""
        self.slurm("scontrol", "update", "nodename=n2", "state=resume", check=False)
        if not self.notebook.alive:
            self.notebook.close()
            self.notebook = self.new()
        finish(self.notebook, self.notebook.start("%sky_down --all"))
        deadline = time.monotonic() + GONE_SECONDS
        while left := self.left():
            assert time.monotonic() < deadline, left
            if self.pools():  # of a kernel that was killed, also while its job was handed in
                finish(self.notebook, self.notebook.start("%sky_down lab --provider slurm"))
            time.sleep(0.2)

    def pools(self) -> list[str]:
        return [name for _, state, name in self.slurm.jobs() if name.startswith("lab-") and state != "COMPLETING"]

    def left(self) -> list[str]:
        """Jobs, processes, and what no other kernel has of them."""
        jobs = [" ".join(one) for one in self.slurm.jobs()]
        processes = [" ".join(cmdline(one))[:200] for one in self.slurm.processes()]
        return jobs + [one for one in processes if "ipykernel_launcher" not in one]


COLLECTIVE = """\
%%sky_broadcast
import time, torch, torch.distributed as dist
import skymagic as sky
sky.on_interruption(lambda notice: None)
print("at work", flush=True)
time.sleep(600) if dist.get_rank() else dist.all_reduce(torch.ones(1))
"""


def expire(life: Life) -> str:
    """The job reaches its limit of a minute while a rank is in a collective; what the user is told. Raises AssertionError."""
    life.notebook.run(f"{POOL} --plugin torch --time 1m".replace("--time 10m", ""))
    begun = time.monotonic()
    shown = life.notebook.finish(life.notebook.start(COLLECTIVE))
    assert "its on_interruption hook has run" in shown.text, shown.text
    assert "has reached its time limit" in shown.failure.text, shown.failure.text
    life.end()
    last = next(line for line in shown.failure.text.splitlines() if "time limit" in line)
    return f"a limit of a minute, {time.monotonic() - begun:.0f} s after the pool was ready: {last.strip()}"


def finish(notebook: Notebook, shown: Shown) -> None:
    """Wait for a cell's end, or its kernel's."""
    while not shown.done and notebook.alive:
        notebook.rest(shown)


def main() -> int:
    """Live them all."""
    wanted, seed = int(os.environ.get("HISTORIES", "100")), int(os.environ.get("SEED", "1"))
    seconds = float(os.environ.get("SECONDS", "inf"))
    begun, events = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        (folder := Path(place, "notebook")).mkdir()
        slurm = stack.enter_context(cluster(Path(place, "slurm")))
        life = Life(slurm, folder, stack)
        lived = 0
        print(expire(life), flush=True)
        while lived < wanted and time.monotonic() - begun < seconds:
            chance = random.Random(f"{seed} {lived}")
            try:
                life.live(chance)
            except AssertionError as leak:
                print(f"history {lived} of seed {seed}:", *life.told, leak, sep="\n  ")
                return 1
            lived += 1
            events.update(one.split()[1] for one in life.told)
            print(lived, *life.told, sep="; ", flush=True)
    print(f"{lived} histories in {time.monotonic() - begun:.0f} s: 0 jobs and 0 processes left; {dict(events)}")
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
