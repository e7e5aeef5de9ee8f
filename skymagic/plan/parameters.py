"""Parameters of a notebook, as papermill has them: defaults in the cell tagged ``parameters``, and a cell after it that sets others."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from skymagic.errors import RequestError
from skymagic.plan.suggest import did_you_mean

TAG = "parameters"


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


def assigned(texts: Sequence[str]) -> dict[str, Any]:
    """Return name → value of ``name=value`` texts. Raises RequestError with all that are something else."""
    wrong = [text for text in texts if not text.partition("=")[0].isidentifier() or "=" not in text]
    if wrong:
        raise RequestError([f"-p {text}: write -p NAME=VALUE" for text in wrong])
    return {name: value(text) for name, _, text in (each.partition("=") for each in texts)}


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


def parsed(text: str, name: str) -> dict[str, Any]:
    """Return a notebook from the text of its file. Raises RequestError: it is none, or not in Python."""
    try:
        notebook = json.loads(text)
        cells = notebook["cells"]
        valid = notebook["nbformat"] == 4 and all(
            isinstance(cell["cell_type"], str) for cell in cells
        )
    except (ValueError, TypeError, KeyError):
        valid = False
    if not valid:
        raise RequestError(f"{name} is not a notebook in nbformat 4")
    language = (notebook.get("metadata") or {}).get("kernelspec", {}).get("language", "python")
    if language.lower() != "python":
        raise RequestError(f"{name} is a notebook in {language}: the cells of a pool are Python")
    return dict(notebook)


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
