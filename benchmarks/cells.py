"""An empty cell as the user waits for it: ``%%sky_broadcast`` against ``%%px`` of a default ipyparallel cluster, in one shell."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from benchmarks import peers
from benchmarks.figures import RANKS, Figure, alternate, median, say, timed

WARM = 5
BLOCKS = 5
CELLS = 10
"""In a block; the blocks of both sides take turns."""
MANY = 64


def shell_of_its_own():
    """An IPython shell with skymagic loaded, without a history on disk."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"hist_file": ":memory:"}}))
    do(shell, "%load_ext skymagic")
    return shell


def do(shell, cell: str) -> None:
    """Run a cell as a notebook does. Raises what it raises."""
    shell.run_cell(cell, store_history=True).raise_error()


def compared(shell, ranks: int, blocks: int, cells: int) -> list[list[float]]:
    """Milliseconds of each cell, ours and theirs: both clusters are up all the time, and idle while the other works.

    Theirs are infinite if its engines do not come up: 64 did not within five minutes on two cores.
    """
    times: dict[str, list[float]] = {"%%sky_broadcast": []}

    def block(magic: str) -> float:
        found = [1000 * timed(lambda: do(shell, f"{magic}\npass")) for _ in range(cells)]
        times[magic] += found
        return median(found)

    with ExitStack() as peer:
        try:
            peer.enter_context(
                peers.ipyparallel(ranks)
            ).activate()  # %%px is for the newest cluster
            times["%%px"] = []
        except TimeoutError as problem:
            say(f"  {problem}")
        do(shell, f"%sky_pool bench --ranks {ranks} -y")
        for magic in times:
            for _ in range(WARM):
                do(shell, f"{magic}\npass")
        say(f"an empty cell on {ranks} ranks: " + ", ".join(times))
        alternate(blocks, *(partial(block, magic) for magic in times))
        do(shell, "%sky_down bench")
    return [times["%%sky_broadcast"], times.get("%%px", [math.inf])]


def figures() -> Iterator[Figure]:
    """A few ranks, and many."""
    shell = shell_of_its_own()
    ours, theirs = compared(shell, RANKS, BLOCKS, CELLS)
    yield Figure(
        f"empty cell, median of {len(ours)}",
        median(ours),
        "ms",
        median(theirs),
        "%%px",
        limit=0.42,
        relative=True,
    )
    yield Figure("empty cell, slowest", max(ours), "ms", max(theirs), "%%px")
    ours, theirs = compared(shell, MANY, BLOCKS, CELLS // 2)
    yield Figure(
        f"empty cell on {MANY} ranks, median of {len(ours)}",
        median(ours),
        "ms",
        median(theirs),
        "%%px",
        limit=0.42,
        relative=True,
    )
