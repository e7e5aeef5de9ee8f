"""Numbers of cells by the names of their files, as IPython's compiler knows them.

IPython 8 keeps them, and the lines of each cell for as long as the process lives. IPython 7 (Google
Colab has 7.34) does neither: `number_cells` adds both to its compiler.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping, Sequence
from typing import Any

CELL_FILE = re.compile("ipykernel_|ipython-input-")
"""Found in file names of cells: of ipykernel, and of IPython in a terminal or in Google Colab."""


def numbers_by_file(compiler: Any) -> Mapping[str, int]:
    """Return the numbers of cells by file name; empty for no compiler of IPython's."""
    numbers: Mapping[str, int] = getattr(compiler, "_filename_map", {})
    return numbers


def number_cells(compiler: Any, raw: Sequence[str] = (), transformed: Sequence[str] = ()) -> None:
    """Make a compiler of IPython 7 number its cells as IPython 8 does; twice is safe.

    Args:
        compiler: the shell's compiler; IPython 8 and later need no change.
        raw: the cells that have run so far as they were typed, by their numbers.
        transformed: the same cells as Python.
    """
    if hasattr(compiler, "_filename_map"):
        return
    numbers: dict[str, int] = {}
    name_code = compiler.cache

    def cache(transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        name: str = name_code(transformed_code, number, raw_code)
        numbers[name] = number
        _keep_lines(name)
        return name

    # number 0 is no cell
    for number, (typed, python) in enumerate(zip(raw[1:], transformed[1:], strict=False), start=1):
        # IPython's history leaves out the newline at the end
        name = compiler.get_code_name(typed, f"{python}\n", number)
        if name in linecache.cache:
            numbers[name] = number
            _keep_lines(name)
    compiler._filename_map, compiler.cache = numbers, cache


def _keep_lines(name: str) -> None:
    """Mark a cell's source as no file's, which `linecache` would look for, as IPython 8 does."""
    lines = linecache.getlines(name)
    entry = (sum(map(len, lines)), None, lines, name)
    linecache.cache[name] = entry
    # IPython 7 restores its own entries after each check
    linecache._ipython_cache[name] = entry  # type: ignore[attr-defined]
