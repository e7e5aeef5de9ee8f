"""Parameters of a notebook, as papermill has them: defaults in the cell tagged ``parameters``, and a cell after it that sets others."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from skymagic.plan.suggest import did_you_mean

TAG, INJECTED = "parameters", "injected-parameters"


def value(text: str) -> Any:
    """What is typed for a parameter: True, False, None, a whole number, a number, else text."""
    if text in ("True", "False", "None"):
        return ast.literal_eval(text)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def mistakes(notebook: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """What is wrong with setting these, in sentences."""
    names = list(names)
    if not names:
        return []
    place = _tagged(notebook["cells"], TAG)
    if place is None:
        return [
            f"-p {names[0]}: no cell of the notebook is tagged {TAG!r}, which is where parameters get their defaults"
        ]
    known = defaults(source(notebook["cells"][place]))
    if known is None:
        return [f"the cell tagged {TAG!r} cannot be read: it is to hold plain assignments"]
    there = f"; it sets {', '.join(known)}" if known else ""
    return [
        f"-p {name}: the cell tagged {TAG!r} sets no such name{did_you_mean(name, known) or there}"
        for name in names
        if name not in known
    ]


def defaults(text: str) -> list[str] | None:
    """The names that a cell sets; None where it is not Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    found: list[str] = []
    for one in tree.body:
        targets = (
            one.targets
            if isinstance(one, ast.Assign)
            else [one.target]
            if isinstance(one, ast.AnnAssign)
            else []
        )
        found += [
            each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
        ]
    return list(dict.fromkeys(found))


def injected(notebook: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The notebook with a cell that sets these after the one with the defaults, in the place of one that was put there before."""
    made: dict[str, Any] = deepcopy(dict(notebook))
    if not values:
        return made
    cells = made["cells"]
    lines = ["# Parameters", *(f"{name} = {_literal(one)}" for name, one in values.items())]
    cell: dict[str, Any] = {
        "cell_type": "code", "execution_count": None, "metadata": {"tags": [INJECTED]}, "outputs": [],
        "source": "\n".join(lines),
    }  # fmt: skip
    if made.get("nbformat_minor", 0) >= 5:  # which gives each cell an id
        cell["id"] = INJECTED
    before = _tagged(cells, INJECTED)
    if before is not None:
        cells[before] = cell
    else:
        place = _tagged(cells, TAG)
        cells.insert(0 if place is None else place + 1, cell)
    return made


def source(cell: Mapping[str, Any]) -> str:
    """A cell's text, which a file may have as lines."""
    found = cell.get("source") or ""
    return found if isinstance(found, str) else "".join(found)


def _tagged(cells: list[dict[str, Any]], tag: str) -> int | None:
    tagged = (
        number
        for number, cell in enumerate(cells)
        if tag in (cell.get("metadata") or {}).get("tags", ())
    )
    return next(tagged, None)


def _literal(one: Any) -> str:
    if isinstance(one, float) and not math.isfinite(one):
        return f"float({str(one)!r})"
    return repr(one)
