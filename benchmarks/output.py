"""20,000 printed lines of every rank on the screen of one cell: none may be lost; and how long it takes."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

from benchmarks import peers
from benchmarks.cells import do, shell_of_its_own
from benchmarks.figures import RANKS, Figure, alternate, median, say, timed

ROUNDS = 3
LINES = 20_000
LINE = re.compile(r"line (\d+) of (\d+)$")


def figures() -> Iterator[Figure]:
    """Through the magics in a shell whose standard output is kept."""
    shell = shell_of_its_own()
    missing: dict[str, list[int]] = defaultdict(list)

    def printed(magic: str, rank: str) -> float:
        """Seconds to the end of the cell; lines that are missing then are counted."""
        body = f"import os\nfor i in range({LINES}):\n    print(f'line {{i}} of {{{rank}}}')"
        screen = io.StringIO()
        with redirect_stdout(screen):
            seconds = timed(lambda: do(shell, f"{magic}\n{body}"))
        missing[magic].append(lost(screen.getvalue()))
        return seconds

    with peers.ipyparallel(RANKS) as client:
        number(client)
        do(shell, f"%sky_pool bench --nodes {RANKS}")
        say(f"{RANKS} × {LINES} lines: ours, %%px")
        ours, theirs = alternate(
            ROUNDS,
            lambda: printed("%%sky_broadcast --only all", 'os.environ["RANK"]'),
            lambda: printed("%%px", "number"),
        )
        do(shell, "%sky_down bench")
    what = f"{RANKS} × {LINES:,} printed lines"
    yield Figure(what, median(ours), "s", median(theirs), "%%px", limit=2.0)
    gone = [float(max(found)) for found in missing.values()]
    yield Figure(f"{what}: lost or out of order", gone[0], "lines", gone[1], "%%px", limit=0.0)


def number(client: Any) -> None:
    """Tell ipyparallel's engines who they are."""
    for rank in range(RANKS):
        client[rank].push({"number": rank}, block=True)


def lost(screen: str) -> int:
    """How many lines of all ranks are not on the screen, whole and in their order."""
    seen: dict[int, list[int]] = defaultdict(list)
    for line in screen.splitlines():
        if found := LINE.search(line):
            seen[int(found[2])].append(int(found[1]))
    return sum(in_order(seen[rank]) for rank in range(RANKS))


def in_order(numbers: list[int]) -> int:
    """How many of ``range(LINES)`` are not where they should be."""
    if numbers == list(range(LINES)):
        return 0
    rising = [one for before, one in zip([-1, *numbers], numbers, strict=False) if one > before]
    return max(1, LINES - len(set(rising)))
