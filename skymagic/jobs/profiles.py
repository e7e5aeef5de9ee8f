"""Output of ``--profile``: a trace file for each rank, the longest operations, waiting ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skymagic.display.text import table

WAITED_SHARE, WAITED_SECONDS = 0.1, 0.1
"""Minimum extra time in collectives, compared with the rank that has the least, of a waiting rank.

A share of the time of all operations, and seconds.
"""


@dataclass(frozen=True)
class Profile:
    """Profile of a cell on a rank.

    Attributes:
        operations: name, calls and own seconds of the longest operations, the longest first.
        seconds: own time of all operations.
        collectives: time in collectives, in seconds.
        trace: gzip file for ui.perfetto.dev.
    """

    operations: tuple[tuple[str, int, float], ...]
    seconds: float
    collectives: float = 0.0
    trace: bytes = b""

    @classmethod
    def parse(cls, values: Any) -> Profile:
        """Return a profile from the values that a rank has sent."""
        return cls(
            operations=tuple((name, calls, spent) for name, calls, spent in values["operations"]),
            seconds=values["seconds"],
            collectives=values["collectives"],
            trace=values["trace"],
        )


def write_profiles(profiles: Mapping[int, Profile], cell: int, folder: Path) -> list[str]:
    """Write the traces of a cell and return lines to show about them.

    Raises:
        OSError: the folder is not writable.
    """
    lines = []
    for rank, profile in sorted(profiles.items()):
        file = folder / f"profile-cell{cell}-rank{rank}.json.gz"
        file.write_bytes(profile.trace)
        lines.append(
            f"rank {rank}, the longest operations; the trace is {file.name} (ui.perfetto.dev shows "
            "it)"
        )
        lines.append(operations_table(profile))
    collectives = {
        rank: (profile.collectives, profile.seconds) for rank, profile in profiles.items()
    }
    return [*lines, *waiting_rank_lines(collectives)]


def operations_table(profile: Profile) -> str:
    """Format the longest operations by their own time, without that of the operations they call."""
    total = profile.seconds or 1.0
    rows = [
        (name, calls, f"{1000 * seconds:.1f} ms", f"{seconds / total:.0%}")
        for name, calls, seconds in profile.operations
    ]
    return table([("operation", "calls", "time", "share"), *rows])


def waiting_rank_lines(collectives: Mapping[int, tuple[float, float]]) -> list[str]:
    """Return lines on ranks that waited for the rank that spent the least time in collectives.

    Args:
        collectives: rank → (seconds in collectives, seconds of all operations).
    """
    if len(collectives) < 2:
        return []
    last = min(collectives, key=lambda rank: collectives[rank][0])
    minimum = collectives[last][0]
    excess = {rank: seconds - minimum for rank, (seconds, _) in collectives.items() if rank != last}
    waiting = {
        rank: more
        for rank, more in excess.items()
        if more > max(WAITED_SECONDS, WAITED_SHARE * collectives[rank][1])
    }
    return [
        f"rank {rank} waited {more:.1f} s longer in collectives than rank {last}"
        for rank, more in sorted(waiting.items())
    ]
