"""What rank 0 of pools that have ended wrote last: a file each in the user's state folder, for the user alone, of the last few pools."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

from skymagic.wire import atomic

KEPT_POOLS = 20
"""How many files there are, at most; each is a megabyte at most (`wire.agent.HEAD_CHARACTERS`)."""


@dataclass(frozen=True)
class KeptLog:
    """The end of a log.

    Attributes:
        ended: when its pool has ended, in seconds since 1970.
    """

    name: str
    job_id: str
    ended: float
    text: str


def folder() -> Path:
    """Where the files are."""
    from platformdirs import user_state_path

    return user_state_path("skymagic") / "logs"


def write(name: str, job_id: str, text: str) -> None:
    """Keep the end of a log, and drop the oldest one too many; a home that cannot be written keeps none. Twice is safe."""
    if not text:
        return
    with contextlib.suppress(OSError):
        heading = json.dumps({"name": name, "ended": time.time()})
        atomic.write(folder() / f"{job_id}.log", f"{heading}\n{text}".encode(errors="replace"))
        for old in _newest_first()[KEPT_POOLS:]:
            old.unlink(missing_ok=True)


def find(name: str) -> KeptLog | None:
    """Of the pool of this name, or job id, that has ended last; None where nothing is kept. Damaged files are passed over."""
    with contextlib.suppress(OSError):
        for path in _newest_first():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                heading, _, text = path.read_bytes().decode(errors="replace").partition("\n")
                said = json.loads(heading)
                if name in (said["name"], path.stem):
                    return KeptLog(said["name"], path.stem, float(said["ended"]), text)
    return None


def _newest_first() -> list[Path]:
    times = []
    for path in folder().glob("*.log"):
        with contextlib.suppress(OSError):  # another notebook has dropped it
            times.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(times, reverse=True)]
