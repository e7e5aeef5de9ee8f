"""An empty cell as the user waits for it: ``%%sky_broadcast`` against ``%%px`` of a default ipyparallel cluster, in one shell."""

from __future__ import annotations

from collections.abc import Iterator

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
    """Milliseconds of each cell, ours and theirs: both clusters are up all the time, and idle while the other works."""
    times: dict[str, list[float]] = {"%%sky_broadcast": [], "%%px": []}

    def block(magic: str) -> float:
        found = [1000 * timed(lambda: do(shell, f"{magic}\npass")) for _ in range(cells)]
        times[magic] += found
        return median(found)

    with peers.ipyparallel(ranks) as client:
        client.activate()  # %%px is for the newest cluster
        do(shell, f"%sky_pool bench --ranks {ranks} -y")
        for magic in times:
            for _ in range(WARM):
                do(shell, f"{magic}\npass")
        say(f"an empty cell on {ranks} ranks: ours, %%px")
        alternate(blocks, lambda: block("%%sky_broadcast"), lambda: block("%%px"))
        do(shell, "%sky_down bench")
    return list(times.values())


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
        limit=1.2,
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
        limit=1.0,
        relative=True,
    )
