"""What ``--profile`` leaves in the notebook: a trace beside it for each rank, the longest operations, and whom the ranks waited for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skymagic.display import text as display

WAITED_SHARE, WAITED_SECONDS = 0.1, 0.1
"""From so much more time in collectives than the rank with the least on, a rank is said to have waited."""


def kept(profiles: Mapping[int, Mapping[str, Any]], cell: int, folder: Path) -> list[str]:
    """Write the traces of a cell; lines to show about them.

    Raises:
        OSError: the folder cannot be written to.
    """
    said = []
    for rank, profile in sorted(profiles.items()):
        file = folder / f"profile-cell{cell}-rank{rank}.json.gz"
        file.write_bytes(profile["trace"])
        said.append(
            f"rank {rank}, the longest operations; the trace is {file.name} (ui.perfetto.dev shows it)"
        )
        said.append(operations_table(profile))
    return [
        *said,
        *waited({rank: (each["collectives"], each["seconds"]) for rank, each in profiles.items()}),
    ]


def operations_table(profile: Mapping[str, Any]) -> str:
    """The longest operations: their own time, without that of operations which they call."""
    whole = profile["seconds"] or 1.0
    rows = [
        (name, calls, f"{1000 * seconds:.1f} ms", f"{seconds / whole:.0%}")
        for name, calls, seconds in profile["operations"]
    ]
    return display.table([("operation", "calls", "time", "share"), *rows])


def waited(collectives: Mapping[int, tuple[float, float]]) -> list[str]:
    """Which rank was waited for, by (seconds in collectives, seconds of all operations) of several: it is the one that is least in them."""
    if len(collectives) < 2:
        return []
    last = min(collectives, key=lambda rank: collectives[rank][0])
    least = collectives[last][0]
    longer = {rank: seconds - least for rank, (seconds, _) in collectives.items() if rank != last}
    waiting = {
        rank: more
        for rank, more in longer.items()
        if more > max(WAITED_SECONDS, WAITED_SHARE * collectives[rank][1])
    }
    return [
        f"rank {rank} waited {more:.1f} s longer in collectives than rank {last}"
        for rank, more in sorted(waiting.items())
    ]
