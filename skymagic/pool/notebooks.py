"""Notebooks that are executed on pools' heads, or were: a file each beside the pools' records, until the executed notebook is taken.

The file outlives the pool: what its head keeps can be fetched when the pool has ended.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from dataclasses import dataclass, field
from pathlib import Path

from skymagic.errors import PoolError
from skymagic.plan.units import duration_text
from skymagic.pool import keys, records
from skymagic.pool.keys import PoolKey


@dataclass(frozen=True)
class NotebookRun:
    """A notebook that is a job.

    Attributes:
        key: of its pool, which leads to the head too.
        notebook: the file that is executed. output: the file that the executed one becomes.
        begun: seconds since 1970.
    """

    key: PoolKey
    notebook: Path
    output: Path
    begun: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        """The pool's."""
        return self.key.name

    @property
    def job_id(self) -> str:
        """The pool's."""
        return self.key.job_id

    @property
    def driver(self) -> str:
        """The name of its driver's run directory on the head."""
        return f"{self.job_id}-notebook"

    @property
    def words(self) -> str:
        """It in a line."""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.begun))
        return f"{self.name} ({self.job_id}): {self.notebook}, since {when}: skymagic attach {self.name}"

    @property
    def ends(self) -> str:
        """What becomes of what the head keeps of it, in words; "" where it simply stays."""
        request = self.key.plan.request
        if not self.key.plan.region:
            return ""
        limits = [
            f"{duration_text(seconds)} {words}"
            for seconds, words in ((request.idle, "after its last cell"), (request.max_lifetime, "after their start"))
            if seconds
        ]
        when = f", {' or '.join(limits)} at the latest" if limits else ""
        return f"what is rented keeps it until it ends{when}: skymagic attach {self.name} before that"

    @property
    def plain(self) -> dict[str, object]:
        """It for programs."""
        return {
            "name": self.name,
            "job_id": self.job_id,
            "notebook": str(self.notebook),
            "output": str(self.output),
            "started": self.begun,
        }


def write(run: NotebookRun) -> None:
    """Keep it, for the user alone."""
    keys.keep(_path(run.job_id), run)


def every() -> list[NotebookRun]:
    """All that were not taken, the oldest first; those that cannot be read are left out."""
    found = []
    with contextlib.suppress(OSError):
        for path in _folder().glob("*.run"):
            with contextlib.suppress(PoolError, pickle.PickleError):
                found.append(keys.kept(path, path.stem, NotebookRun))
    return sorted(found, key=lambda one: one.begun)


def find(name: str | None) -> NotebookRun | None:
    """The one on a pool of this name or job id, or the only one where no name is said; the latest of several."""
    found = [one for one in every() if name in (None, one.name, one.job_id)]
    return found[-1] if found else None


def remove(job_id: str) -> None:
    """It was taken; twice is safe."""
    with contextlib.suppress(OSError):
        _path(job_id).unlink(missing_ok=True)


def _folder() -> Path:
    return records.folder().parent / "notebook-runs"


def _path(job_id: str) -> Path:
    return _folder() / f"{job_id}.run"
