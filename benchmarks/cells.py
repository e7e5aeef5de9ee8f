"""An empty cell as the user waits for it: ``%%sky_broadcast`` against ``%%px`` of a default ipyparallel cluster, in one shell."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import peers
from benchmarks.figures import RANKS, Figure, alternate, median, say, timed

WARM = 5
BLOCKS = 5
CELLS = 10
"""In a block; the blocks of both sides take turns."""


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


def figures() -> Iterator[Figure]:
    """Both clusters are up all the time, and idle while the other works."""
    shell = shell_of_its_own()
    times: dict[str, list[float]] = {"%%sky_broadcast": [], "%%px": []}

    def block(magic: str) -> float:
        found = [timed(lambda: do(shell, f"{magic}\npass")) for _ in range(CELLS)]
        times[magic] += found
        return median(found)

    with peers.ipyparallel(RANKS):
        do(shell, f"%sky_pool bench --nodes {RANKS}")
        for magic in times:
            for _ in range(WARM):
                do(shell, f"{magic}\npass")
        say("an empty cell: ours, %%px")
        alternate(BLOCKS, lambda: block("%%sky_broadcast"), lambda: block("%%px"))
        do(shell, "%sky_down bench")
    ours, theirs = ([1000 * each for each in found] for found in times.values())
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
