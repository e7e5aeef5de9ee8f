"""What happens to each cell before it runs, and after it failed. ``%sky_auto on`` broadcasts every plain cell, so that cells stay plain Python
and the editor goes on helping; one that is marked ``%%local`` runs in the notebook. Hints for cells that go wrong: a magic that is misspelled or misplaced, before the cell runs; a name that is on the ranks, after it failed."""

from __future__ import annotations

import contextlib
import re
import token
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import make_tokens_by_line
from IPython.core.interactiveshell import InteractiveShell

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
    """Check the magics of each cell before it runs; twice is safe."""

    def skymagic_suggests(lines: list[str]) -> list[str]:
        if refusal := (
            removed(lines) or misspelled(shell, lines) or misplaced(lines) or empty(lines)
        ):
            raise UsageError(refusal)
        return lines

    skymagic_suggests.has_side_effects = True  # type: ignore[attr-defined]  # not for code that is being typed
    transformers = shell.input_transformers_cleanup
    transformers[:] = [
        one for one in transformers if getattr(one, "__name__", "") != skymagic_suggests.__name__
    ]
    transformers.append(skymagic_suggests)


def removed(lines: Sequence[str]) -> str:
    """Return the line that names the replacement of a removed magic that a cell uses; "" if it uses none. Pure."""
    first = next((number for number, line in enumerate(lines) if line.strip()), 0)
    if any("%sky_" in line for line in lines):
        rows = [first] if lines[first].lstrip().startswith("%%") else _statements(lines)
        for row in rows:
            magic = MAGIC.match(lines[row]) or ASSIGNED_MAGIC.match(lines[row])
            if magic is not None and magic["name"] in REMOVED_MAGICS:
                return REMOVED_MAGICS[magic["name"]]
    return ""


def misspelled(shell: InteractiveShell, lines: Sequence[str]) -> str:
    """A refusal of a cell whose first magic does not exist, where one of ours has nearly its name; "" for none."""
    found = MAGIC.match(next((line for line in lines if line.strip()), ""))
    if found is None or shell.find_magic(found[2]) or shell.find_cell_magic(found[2]):
        return ""
    nearest = did_you_mean(found[2], MAGICS)
    return f"there is no magic {found[1]}{found[2]}{nearest}" if nearest else ""


def misplaced(lines: Sequence[str]) -> str:
    """A refusal of a cell whose code would not run on the ranks: its magic has one per cent sign, or is not on the first line; "" for none.

    Pure. Nothing of the cell has run then.
    """
    first = next((number for number, line in enumerate(lines) if line.strip()), 0)
    if not any(MAGIC.match(line) for line in lines) or lines[first].lstrip().startswith("%%"):
        return ""  # the body of another cell magic is that one's own
    for row in _statements(lines):
        found = MAGIC.match(lines[row])
        if found is None or found[2] not in BODIES:
            continue
        below = any(line.strip() and line.lstrip()[0] not in "#%" for line in lines[row + 1 :])
        if found[1] == "%%" or below:
            return (
                f"did you mean %%{found[2]}, on the cell's first line? Nothing of this cell has run"
            )
    return ""


def empty(lines: Sequence[str]) -> str:
    """Return a refusal of a cell that has no line below its magic, or "".

    IPython's own would advise the same magic with one per cent sign, which runs no code either.
    """
    found = MAGIC.match(lines[0]) if len(lines) == 1 else None
    if found is None or found[1] != "%%" or found[2] not in BODIES:
        return ""
    return f"the cell is empty: write what is to run on the lines below %%{found[2]}"


def _statements(lines: Sequence[str]) -> list[int]:
    """Return the rows on which statements and magics begin; a row within a string is none of them."""
    rows = []
    for tokens in make_tokens_by_line(list(lines)):
        first = next((one for one in tokens if one.type not in (token.INDENT, token.DEDENT)), None)
        if first is not None and first.type != token.ENDMARKER:
            rows.append(first.start[0] - 1)
    return rows


def after_error(
    error: BaseException | None,
    namespace: Mapping[str, Any],
    lists: Mapping[str, Collection[int]],
    cell: str,
) -> str:
    """A line below the error of a plain cell that took a name on the ranks for one of the notebook; "" for none.

    Args:
        lists: names of lists of values by rank, with the ranks.
        cell: its text.
    """
    if isinstance(error, NameError) and not isinstance(error, RankError):
        # code of a library may lack a name by an error of its own
        tb = error.__traceback__
        while tb is not None and tb.tb_next is not None:
            tb = tb.tb_next
        own = tb is not None and tb.tb_frame.f_globals is namespace
        pool = _pool_with(error.name) if own and error.name and error.name not in namespace else ""
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
    """The pool whose ranks have this name, the one used last first; "" for none."""
    pools = [one for one in reversed(registry.pools()) if one.state is not State.DECLARED]
    return next((one.name for one in pools if name in one.shipper.names()), "")


# -- %sky_auto ------------------------------------------------------------------------------------------------------------


LOCAL = "%%local"
"""The first line of a cell that runs in the notebook whatever is switched on."""


class Auto:
    """The input transformer that puts ``%%sky_broadcast`` above a shell's plain cells.

    Attributes:
        on: whether plain cells are broadcast.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        transformers = shell.input_transformers_cleanup
        transformers[:] = [
            one for one in transformers if not isinstance(getattr(one, "__self__", None), Auto)
        ]
        transformers.append(self._transform)
        self.on = False
        self._paused = False
        self._executing = False
        """Whether what is transformed is no cell, but code that one runs, as ``%time`` does."""
        shell.events.register("pre_execute", self._begin)
        shell.events.register("post_execute", self._end)

    def switch(self, on: bool) -> None:
        """Turn it on or off; twice is safe."""
        self.on = on

    def takes(self, cell: str) -> bool:
        """Whether a cell as it was typed is broadcast by itself."""
        return self.on and bool(cell.strip()) and not cell.lstrip().startswith("%")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, code is transformed as ever; on other threads than that of cells too."""
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
        if self.takes("".join(lines)):
            return ["%%sky_broadcast\n", *lines]
        if lines and lines[0].strip() == LOCAL:
            return [f"# {lines[0]}", *lines[1:]]
        return lines
