"""The cells that code of the notebook comes from, for tracebacks and ``inspect`` on a rank."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable, Mapping


def sources(files: Iterable[str]) -> dict[str, str]:
    """The text of code that exists in memory alone, by file name."""
    found = {}
    for name in files:
        entry = linecache.cache.get(name)
        if entry is not None and len(entry) == 4 and entry[1] is None:
            found[name] = "".join(entry[2])
    return found


def numbers(files: Iterable[str]) -> dict[str, int]:
    """The numbers of the cells, by file name."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    known: Mapping[str, int] = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {name: known[name] for name in files if name in known}
