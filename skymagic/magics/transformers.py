"""Input transformers, and hints for cells that fail.

``%sky_auto on`` broadcasts every plain cell, so that cells stay plain Python and the editor's help
keeps working; a cell marked ``%%local`` runs in the notebook. Hints: a misspelled or misplaced
magic before the cell runs, a name that is on the ranks after it has failed.
"""

from __future__ import annotations

import contextlib
import re
import token
from collections.abc import Collection, Iterator, Mapping, Sequence

from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import make_tokens_by_line
from IPython.core.interactiveshell import InteractiveShell

from skymagic.data.namespace import Namespace
from skymagic.errors import RankError
from skymagic.magics.arguments.options import MAGICS
from skymagic.magics.arguments.removed import REMOVED_MAGICS
from skymagic.plan.suggest import did_you_mean
from skymagic.pool import registry
from skymagic.pool.status import State

MAGIC = re.compile(r"[ \t]*(?P<mark>%%?)(?P<name>sky_?\w+)")
ASSIGNED_MAGIC = re.compile(r"[^'\"#%]*=[ \t]*%(?P<name>sky_\w+)")
CALLS_A_LIST = "'list' object is not callable"
BODIES = tuple(name for name, magic in MAGICS.items() if magic.cell)
"""Magics whose body is code."""


def register(shell: InteractiveShell) -> None:
    """Check the magics of each cell before it runs; calling it twice is safe."""

    def skymagic_suggests(lines: list[str]) -> list[str]:
        if refusal := (
            explain_removed(lines)
            or explain_misspelled(shell, lines)
            or explain_misplaced(lines)
            or explain_empty(lines)
        ):
            raise UsageError(refusal)
        return lines

    # keeps IPython from calling it for code that is being typed
    skymagic_suggests.has_side_effects = True  # type: ignore[attr-defined]
    transformers = shell.input_transformers_cleanup
    transformers[:] = [
        transformer
        for transformer in transformers
        if getattr(transformer, "__name__", "") != skymagic_suggests.__name__
    ]
    transformers.append(skymagic_suggests)


def explain_removed(lines: Sequence[str]) -> str:
    """Return the line that names the replacement of a removed magic in a cell, or "". Pure."""
    first = next((number for number, line in enumerate(lines) if line.strip()), 0)
    if any("%sky_" in line for line in lines):
        rows = [first] if lines[first].lstrip().startswith("%%") else _statements(lines)
        for row in rows:
            magic = MAGIC.match(lines[row]) or ASSIGNED_MAGIC.match(lines[row])
            if magic is not None and magic["name"] in REMOVED_MAGICS:
                return REMOVED_MAGICS[magic["name"]]
    return ""


def explain_misspelled(shell: InteractiveShell, lines: Sequence[str]) -> str:
    """Return a refusal if a cell's first magic does not exist but resembles another, or ""."""
    magic = MAGIC.match(next((line for line in lines if line.strip()), ""))
    if magic is None or shell.find_magic(magic[2]) or shell.find_cell_magic(magic[2]):
        return ""
    nearest = did_you_mean(magic[2], MAGICS)
    return f"there is no magic {magic[1]}{magic[2]}{nearest}" if nearest else ""


def explain_misplaced(lines: Sequence[str]) -> str:
    """Return a refusal of a cell whose code would not run on the ranks, or "".

    Its magic has one per cent sign, or is not on the first line. Pure. Nothing of the cell has run
    at this point.
    """
    first = next((number for number, line in enumerate(lines) if line.strip()), 0)
    if not any(MAGIC.match(line) for line in lines) or lines[first].lstrip().startswith("%%"):
        return ""  # the body belongs to another cell magic
    for row in _statements(lines):
        magic = MAGIC.match(lines[row])
        if magic is None or magic[2] not in BODIES:
            continue
        below = any(line.strip() and line.lstrip()[0] not in "#%" for line in lines[row + 1 :])
        if magic[1] == "%%" or below:
            return (
                f"did you mean %%{magic[2]}, on the cell's first line? Nothing of this cell has run"
            )
    return ""


def explain_empty(lines: Sequence[str]) -> str:
    """Return a refusal of a cell that has no line below its magic, or "".

    IPython's own message would suggest the same magic with one per cent sign, which runs no code
    either.
    """
    magic = MAGIC.match(lines[0]) if len(lines) == 1 else None
    if magic is None or magic[1] != "%%" or magic[2] not in BODIES:
        return ""
    return f"the cell is empty: write what is to run on the lines below %%{magic[2]}"


def _statements(lines: Sequence[str]) -> list[int]:
    """Return the rows where statements and magics begin, ignoring rows within a string."""
    rows = []
    for tokens in make_tokens_by_line(list(lines)):
        first = next((tok for tok in tokens if tok.type not in (token.INDENT, token.DEDENT)), None)
        if first is not None and first.type != token.ENDMARKER:
            rows.append(first.start[0] - 1)
    return rows


def hint_after_error(
    error: BaseException | None,
    namespace: Namespace,
    lists: Mapping[str, Collection[int]],
    cell: str,
) -> str:
    """Return a hint if a plain cell failed because it used a name of the ranks, or "".

    Args:
        lists: names of lists of values by rank, with the ranks.
        cell: its text.
    """
    if isinstance(error, NameError) and not isinstance(error, RankError):
        # a NameError raised in library code is a bug of that library
        tb = error.__traceback__
        while tb is not None and tb.tb_next is not None:
            tb = tb.tb_next
        in_notebook = tb is not None and tb.tb_frame.f_globals is namespace
        pool = (
            _pool_with(error.name)
            if in_notebook and error.name and error.name not in namespace
            else ""
        )
        return (
            f"{error.name} is on the ranks of pool {pool!r}: %sky_pull {error.name} --head"
            if pool
            else ""
        )
    name = ""
    if isinstance(error, AttributeError):
        name = next(
            (
                name
                for name in lists
                if isinstance(error.obj, list) and namespace.get(name) is error.obj
            ),
            "",
        )
    elif isinstance(error, TypeError) and str(error) == CALLS_A_LIST:
        called = [name for name in lists if re.search(rf"\b{re.escape(name)}\s*\(", cell)]
        name = next((name for name in called if isinstance(namespace.get(name), list)), "")
    ranks = list(lists.get(name, ()))
    return (
        f"{name} is a list by rank: {name}[0] is rank {ranks[0]}'s; --head brings that one alone"
        if ranks
        else ""
    )


def _pool_with(name: str) -> str:
    """Return the most recently used pool whose ranks have this name, or ""."""
    pools = [pool for pool in reversed(registry.pools()) if pool.state is not State.DECLARED]
    return next((pool.name for pool in pools if name in pool.shipper.names()), "")


# -- %sky_auto -------------------------------------------------------------------------------------


LOCAL = "%%local"
"""First line of a cell that runs in the notebook even if %sky_auto is on."""


class Auto:
    """Input transformer that puts ``%%sky_broadcast`` above a shell's plain cells.

    Attributes:
        on: True if plain cells are broadcast.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        transformers = shell.input_transformers_cleanup
        transformers[:] = [
            transformer
            for transformer in transformers
            if not isinstance(getattr(transformer, "__self__", None), Auto)
        ]
        transformers.append(self._transform)
        self.on = False
        self._paused = False
        self._executing = False
        """True while transformed text is code run by a cell, as by ``%time``, instead of a cell."""
        shell.events.register("pre_execute", self._begin)
        shell.events.register("post_execute", self._end)

    def switch(self, on: bool) -> None:
        """Turn it on or off; calling it twice is safe."""
        self.on = on

    def is_broadcast(self, cell: str) -> bool:
        """Return True if a cell, as typed, is broadcast automatically."""
        return self.on and bool(cell.strip()) and not cell.lstrip().startswith("%")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Disable the broadcast of plain cells within the context, also on other threads."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _begin(self) -> None:
        self._executing = True

    def _end(self) -> None:
        self._executing = False

    def _transform(self, lines: list[str]) -> list[str]:
        if self._paused or self._executing:
            return lines
        if self.is_broadcast("".join(lines)):
            return ["%%sky_broadcast\n", *lines]
        if lines and lines[0].strip() == LOCAL:
            return [f"# {lines[0]}", *lines[1:]]
        return lines
