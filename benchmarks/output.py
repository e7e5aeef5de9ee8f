"""Printed lines: 20,000 of every rank, none of which may be lost, and a gigabyte of one, beside which ranks still answer."""

from __future__ import annotations

import io
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.cells import do, shell_of_its_own
from benchmarks.figures import RANKS, Figure, alternate, median, say, timed
from tests.lab.notebook import opened

ROUNDS = 3
LINES = 20_000
LINE = re.compile(r"line (\d+) of (\d+)$")
FLOOD = """\
%%sky_broadcast -a
import os
begun = open({begun!r}, "w")
piece = ("x" * 199 + "\\n") * 5000
for number in range(1000):  # a gigabyte
    os.write(1, piece.encode()) if number % 2 else print(piece, end="")
open({over!r}, "w")"""
ASK = """\
import contextlib, io, os, time
def stacks():
    begun = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        get_ipython().run_line_magic("sky_stacks", "")
    return 1000 * (time.perf_counter() - begun)
def asked(over):
    times = []
    while not os.path.exists(over):
        times.append(stacks())
    return times"""


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
    with tempfile.TemporaryDirectory(prefix="bench-flood-") as folder:
        yield from flooded(Path(folder))


def flooded(folder: Path) -> Iterator[Figure]:
    """``%sky_stacks`` all the time while one rank prints a gigabyte: to its log, and to the screen."""
    with opened(folder, f"%sky_pool bench --nodes {RANKS}", ASK) as notebook:
        idle = notebook.value("[stacks() for _ in range(50)]")
        yield Figure("%sky_stacks of idle ranks", median(idle), "ms")
        for limit, where in ((1_000_000, "to its log"), (1 << 40, "to the screen")):
            notebook.run(f"%config SkyMagic.screen_limit = {limit}")
            begun, over = folder / f"begun {limit}", folder / f"over {limit}"
            say(f"%sky_stacks while a rank prints 1 GB {where}")
            cell = notebook.start(FLOOD.format(begun=str(begun), over=str(over)))
            notebook.finish(cell)
            notebook.run(f"while not os.path.exists({str(begun)!r}): pass")
            times = notebook.value(f"asked({str(over)!r})")
            name = f"%sky_stacks while a rank prints 1 GB {where}"
            yield Figure(f"{name}, median of {len(times)}", median(times), "ms")
            yield Figure(f"{name}, slowest", max(times), "ms", limit=300.0)
            notebook.watch(cell, lambda shown: "done" in shown.said)


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
