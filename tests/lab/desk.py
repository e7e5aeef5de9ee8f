"""A desk: where notebooks of one user come and go, are killed, and others go on with what they left."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.lab.ending import cmdline, end, with_variable
from tests.lab.hosts import Host, loopback, still_there
from tests.lab.notebook import ROOT, Notebook, Shown, opened
from tests.lab.places import home_that_knows
from tests.lab.shells import pip_settings
from tests.lab.waiting import until

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from skymagic.api.command import main; sys.exit(main())",
]

ANNOUNCED = "may have been shown before"
"""In the line before what was on its way when a notebook was killed."""
GATED = """\
%%sky_broadcast -o value -g name
import os
rank = int(os.environ['RANK'])
print('before', flush=True)
if rank == 0:
    open({way}).read()
    open({over}, 'w').close()
"""
"""A cell in which rank 0 waits at a gate, the file ``way``, and says by the file ``over`` that it has passed; what follows is the test's."""


@dataclass
class Desk:
    """Notebooks that share one state folder, and the pool that they have one after the other.

    Attributes:
        made: the line that makes the pool.
    """

    folder: Path
    made: str
    more: dict[str, str] = field(default_factory=dict)
    """Of the notebooks' environment."""
    hosts: Sequence[Host] = ()
    """Those of its pool."""
    notebooks: int = 0

    @property
    def pool(self) -> str:
        """Its name."""
        return self.made.split()[1]

    @property
    def env(self) -> dict[str, str]:
        """What the notebooks have in common."""
        return {"XDG_STATE_HOME": str(self.folder / "state"), **self.more}

    @property
    def records(self) -> Path:
        """The folder of the records and keys of its pools."""
        return self.folder / "state" / "skymagic" / "pools"

    @contextmanager
    def notebook(self, *cells: str) -> Iterator[Notebook]:
        """Another notebook."""
        with opened(self._folder(), *cells, env=self.env) as one:
            yield one

    def ahead(self, count: int) -> Generator[Notebook]:
        """So many more notebooks, each of whose kernels starts while the one before is in use; closed when the next one is asked for."""
        coming: Notebook | None = self._starting()
        for left in range(count, 0, -1):
            one, coming = coming, self._starting() if left > 1 else None
            assert one is not None
            try:
                one.wait_until_ready()
                one.run("%load_ext skymagic")
                yield one
            except BaseException:
                if coming is not None:
                    coming.close()
                raise
            finally:
                one.close()

    def _starting(self) -> Notebook:
        return Notebook(self._folder(), self.env, wait=False)

    def _folder(self) -> Path:
        self.notebooks += 1
        folder = self.folder / f"notebook-{self.notebooks}"
        folder.mkdir()
        return folder

    def elsewhere(self) -> Desk:
        """The user's desk on another machine, from which he reaches the same hosts, and to which he has copied the keys of his pools."""
        folder = self.folder / "elsewhere"
        other = Desk(folder, self.made, {**self.more, "HOME": str(folder / "home")}, self.hosts)
        shutil.copytree(Path(self.more["HOME"]) / ".ssh", folder / "home" / ".ssh")
        shutil.copytree(self.records, other.records)
        for record in other.records.glob("*.json"):  # both are this machine, and have its name
            record.write_text(
                json.dumps({**json.loads(record.read_text()), "machine": "the-first-desk"})
            )
        return other

    def gate(self) -> Path:
        """A named pipe: a cell that reads it goes on when it is opened."""
        path = self.folder / f"gate-{os.urandom(4).hex()}"
        os.mkfifo(path)
        return path

    def left_alone(self, notebook: Notebook, cell: str) -> None:
        """The notebook is killed amidst a cell, which goes on then and is over soon. It has ``before`` on its output, ``way`` and ``over``."""
        way, over = self.gate(), self.folder / "over"
        over.unlink(missing_ok=True)
        shown = notebook.start(cell.format(way=repr(str(way)), over=repr(str(over))))
        notebook.watch(shown, lambda seen: "before" in seen.stdout)
        killed(notebook)
        way.write_text("go")
        until(over.exists)

    def program(self, *line: object, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """``skymagic …`` in the user's shell; `env` is added to its environment."""
        env = {**os.environ, **self.env, "PYTHONPATH": str(ROOT), **(env or {})}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*COMMAND, *map(str, line)],
            env=env,
            text=True,
            stdout=pipe,
            stderr=pipe,
            cwd=self.folder,
        )

    def ran(self, *line: object) -> tuple[int, str, str]:
        """Its exit code, standard output and standard error."""
        process = self.program(*line)
        out, err = process.communicate(timeout=90)
        return process.returncode, out, err


@contextmanager
def local_desk(folder: Path) -> Iterator[Desk]:
    """With a pool of this machine that outlives its notebooks; no other test's has its name."""
    desk = Desk(folder, f"%sky_pool lab{os.urandom(4).hex()} --nodes 2 --detached")
    with nothing_left(desk.env):
        yield desk


@contextmanager
def nothing_left(env: Mapping[str, str]) -> Iterator[None]:
    """What was started with this state folder, pools that outlive their notebooks too, has ended; else it is ended, and that is a failure."""

    def found() -> list[psutil.Process]:
        return with_variable("XDG_STATE_HOME", env["XDG_STATE_HOME"])

    try:
        yield
        left = still_there(found())
        assert not left, f"still running: {[shlex.join(cmdline(one)) for one in left]}"
    finally:
        end(found)


@contextmanager
def ssh_desk(folder: Path) -> Iterator[Desk]:
    """With a pool ``lab`` on two hosts, ``h1`` and ``h2``, reached by SSH."""
    with loopback(folder / "hosts", 2, env=pip_settings()) as hosts:
        home = home_that_knows(hosts, folder / "client")
        made = f"%sky_pool lab --provider ssh --hosts h[1-2] --python {sys.executable}"
        yield Desk(folder, made, {"HOME": str(home)}, hosts)


def daemons(job_id: str) -> list[psutil.Process]:
    """What keeps the agents of a pool on this machine."""
    nodes = re.compile(rf"{re.escape(job_id)}-\d+")
    running = psutil.process_iter(["cmdline"])
    return [one for one in running if any(map(nodes.fullmatch, one.info["cmdline"] or ()))]


@contextmanager
def killed_daemons(job_id: str) -> Iterator[None]:
    """What keeps the agents of a pool is killed. Its folders, which nobody else would remove for an hour, are removed at the end."""
    running = daemons(job_id)
    for daemon in running:
        with suppress(psutil.NoSuchProcess):  # they come as two, of which one ends with the other
            daemon.kill()
    assert still_there(running) == []
    try:
        yield
    finally:
        for place in (
            Path(tempfile.gettempdir()),
            Path("/dev/shm"),
        ):  # of the daemons, and of the agents that ended with them
            for folder in place.glob(f"skymagic-*{job_id}-*"):
                shutil.rmtree(folder, ignore_errors=True)


def killed(notebook: Notebook) -> None:
    """As by the system, out of memory."""
    process = psutil.Process(notebook.pid)
    process.kill()
    assert still_there([process]) == []


def steps(lines: list[str]) -> list[int]:
    """The numbers of lines that say ``step 7``."""
    return [int(line.removeprefix("step ")) for line in lines if line.startswith("step ")]


def without_repeats(shown: list[Shown]) -> list[str]:
    """What a user has seen of one rank in notebooks that were killed one after the other: what was announced as possibly seen, and was, is one."""
    seen: list[str] = []
    for each in shown:
        lines, doubtful = each.text.splitlines(), 0
        for line in lines:
            if ANNOUNCED in line:
                words = line.split("the next ")[1].split()
                doubtful = int(words[0]) if words[0].isdigit() else 1
            elif doubtful and (doubtful := doubtful - 1) >= 0 and line in seen:
                continue
            else:
                seen.append(line)
    return seen
