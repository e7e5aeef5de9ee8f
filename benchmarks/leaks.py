"""Random histories of pools in a scheduler's cluster until so many are done: whatever goes wrong, nothing is left.

A history starts a pool, runs a cell, and ends the pool. At a random moment of each of the three something happens: the user presses stop, once or
twice, the notebook's kernel is killed, or what a cluster has besides. Ends with 1 at the first history that leaves something, and prints it.

    HISTORIES=100 SEED=1 SECONDS=600 python benchmarks/ray_leaks.py
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import psutil

from tests.lab.notebook import Notebook, Shown, opened

CELL = "%%sky_broadcast --only all\nimport time\nfor _ in range(20): time.sleep(0.1)"
GONE_SECONDS = 45.0
"""Within which everything is gone: Slurm kills what has had its SIGTERM after 5 s, and answers of a lost node take their time."""


class Life:
    """Histories in one cluster, and what they happen to; of a scheduler by a subclass.

    Args:
        cluster: of the scheduler. env: of its notebooks.
    """

    PROVIDER = ""
    EVENTS: tuple[str, ...] = ("stop", "stop", "stop_twice", "kill", "nothing", "nothing")
    """Names of methods."""
    OPTIONS = ""
    """Of a pool."""

    def __init__(self, cluster: Any, folder: Path, env: dict[str, str], opened: ExitStack) -> None:
        self.cluster, self.folder, self.env, self.opened = cluster, folder, env, opened
        self.told: list[str] = []
        self.notebook = self.new()

    def new(self) -> Notebook:
        """A kernel in the place of one that was killed; it has that one's records."""
        return self.opened.enter_context(opened(self.folder, env=self.env))

    def pool(self, event: str = "") -> str:
        """What starts a pool to which this happens."""
        return f"%sky_pool lab --provider {self.PROVIDER} --nodes 2 --python {sys.executable} {self.OPTIONS}"

    def recover(self) -> None:
        """Have the cluster as it was."""

    def pools(self) -> list[str]:
        """What there is of pools that can be ended by name."""
        raise NotImplementedError

    def left(self) -> list[str]:
        """What there is of pools, and what no other kernel has of them."""
        raise NotImplementedError

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

    def nothing(self) -> None:
        pass

    # -- the history

    def live(self, random: random.Random) -> None:
        """Have it happen, and look at what it has left. Raises AssertionError."""
        self.told.clear()
        for phase, within in {"start": 9.0, "cell": 2.5, "end": 2.0}.items():
            event, moment = random.choice(self.EVENTS), random.uniform(0.0, within)
            self.told.append(f"{phase}: {event} after {moment:.1f} s")
            sources = {"start": self.pool(event), "cell": CELL, "end": "%sky_down --all"}
            self.during(sources[phase], getattr(self, event), moment)
            if event == "kill":
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
        self.recover()
        if not self.notebook.alive:
            self.notebook.close()
            self.notebook = self.new()
        finish(self.notebook, self.notebook.start("%sky_down --all"))
        deadline = time.monotonic() + GONE_SECONDS
        while left := self.left():
            assert time.monotonic() < deadline, left
            if self.pools():  # of a kernel that was killed, also while its order was handed in
                finish(
                    self.notebook, self.notebook.start(f"%sky_down lab --provider {self.PROVIDER}")
                )
            time.sleep(0.2)


def finish(notebook: Notebook, shown: Shown) -> None:
    """Wait for a cell's end, or its kernel's."""
    while not shown.done and notebook.alive:
        notebook.rest(shown)


def main(
    kind: type[Life], cluster: Callable[[Path], AbstractContextManager[Any]], env: Callable[[Any], dict[str, str]],
    before: Callable[[Any], object] = lambda life: None,
) -> int:  # fmt: skip
    """Live them all.

    Args:
        cluster: in this folder. env: of its notebooks. before: comes first, and tells something.
    """
    wanted, seed = int(os.environ.get("HISTORIES", "100")), int(os.environ.get("SEED", "1"))
    seconds = float(os.environ.get("SECONDS", "inf"))
    begun, events, lived = time.monotonic(), Counter[str](), 0
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        (folder := Path(place, "notebook")).mkdir()
        made = stack.enter_context(cluster(Path(place)))
        life = kind(made, folder, env(made), stack)
        if told := before(life):
            print(told, flush=True)
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
    print(f"{lived} histories in {time.monotonic() - begun:.0f} s: nothing left; {dict(events)}")
    return 0
