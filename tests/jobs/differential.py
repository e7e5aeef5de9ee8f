"""Cells for `both_ways`: small families over the constructs of the language and the values that notebooks have.

Each family is a file of `cells`. A line ``====`` separates its cases. A case is ``setup ---- cell``: the setup is a plain cell of the
notebook, ``%%%`` separates several cells that follow each other. Before a line ``####`` stands the setup of the cases that have none.
What ``%%local`` begins runs in the notebook both ways.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent / "cells"


@dataclass(frozen=True)
class Case:
    """Cells to run, after a plain cell; files lie beside the notebook."""

    cell: str
    setup: str = "pass"
    files: Mapping[str, str] = field(default_factory=dict)


FILES = {
    "module_beside.py": "number = 7\n_hidden = 1\ndef twice(x): return 2 * x\nclass Box:\n    def __init__(self, n): self.n = n\n",
    "made.txt": "content\n",
    "reads_beside.py": "def train(): return lr\nprint(train())\n",
    "script_beside.py": "made = [1, 2]\nclass Made:\n    x = 3\nprint('script ran')\n",
}


def family(name: str, cases: list[str], setup: str = "pass") -> Iterator[tuple[str, Case]]:
    """The cases of a family by their names."""
    for number, case in enumerate(cases):
        before, dashes, cell = case.rpartition("\n----\n")
        beginning = " ".join(cell.replace("__import__", "").split())[:50]
        yield f"{name} {number}: {beginning}", Case(cell, before if dashes else setup, FILES)


def of_files() -> Iterator[tuple[str, Case]]:
    """The cases of all files."""
    for path in sorted(FOLDER.glob("*.txt")):
        setup, mark, rest = path.read_text().rpartition("\n####\n")
        cases = rest.removesuffix("\n").split("\n====\n")
        yield from family(path.stem.replace("_", " "), cases, setup if mark else "pass")


def raised() -> Iterator[str]:
    """A cell for each exception that this Python has."""
    arguments = {
        "UnicodeDecodeError": "'utf-8', b'a', 0, 1, 'why'",
        "UnicodeEncodeError": "'utf-8', 'a', 0, 1, 'why'",
        "UnicodeTranslateError": "'a', 0, 1, 'why'",
        "BaseExceptionGroup": "'g', [KeyboardInterrupt()]",
        "ExceptionGroup": "'g', [ValueError(1)]",
    }
    for name, kind in sorted(vars(builtins).items()):
        exception = isinstance(kind, type) and issubclass(kind, BaseException)
        if exception and kind.__name__ == name:
            yield f"raise {name}({arguments.get(name, '1, 2')})"


CASES: dict[str, Case] = {
    **dict(of_files()),
    **dict(family("raise", list(raised()))),
    "long: a thousand lines": Case("\n".join(f"x{i} = {i}" for i in range(1000))),
    "long: a thousand lines in one function": Case(
        "def f():\n" + "\n".join(f"    x = {i}" for i in range(1000)) + "\n    return x\nf()"
    ),
    "long: one line": Case("x = [" + ", ".join(map(str, range(5000))) + "]; sum(x)"),
    "long: deep nesting": Case("x = " + "[" * 80 + "]" * 80 + "\nx"),
    "long: a thousand names of the notebook": Case(
        "total = " + " + ".join(f"y{i}" for i in range(1000)) + "\ntotal",
        "\n".join(f"y{i} = {i}" for i in range(1000)),
    ),
}

KNOWN = {
    "expressions 37: 5;": "`-o` has the value of the last expression also where `;` keeps it from being shown",
    "numpy 4: a.resize(5); a": "an array from the notebook is a view of mapped memory: `a.resize(5)` is refused",
    "magics 25: get_ipython().ev('items[0]')": "or in a text built by code is not sent",
    "magics 28: %who_ls list": "show the names that the rank's cells have used, not all of the notebook's",
    "magics 29: items?": "a name that occurs only in a magic's arguments (`items?`, `%pinfo items`)",
    "magics 37: %pinfo items": "a name that occurs only in a magic's arguments (`items?`, `%pinfo items`)",
    "torch 5: loss = (w * 3).sum()": "on its way back, its numbers",
    "torch 28: h = net.register_forward_hook": "on its way back, its numbers",
    "in place 29: stream.write('more')": "streams cannot be sent, not even in-memory ones (`io.StringIO`)",
}
"""Cases that differ, by their first words, with what docs/explanation/variables.md says of it."""
