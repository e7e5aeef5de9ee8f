"""Notebook parameters, as in papermill.

The cell tagged ``parameters`` has defaults, and a cell after it sets others.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from skymagic.errors import RequestError
from skymagic.plan.suggest import did_you_mean

TAG = "parameters"


def value(text: str) -> Any:
    """Convert a typed value: True, False, None, an integer, a float, else text."""
    if text in ("True", "False", "None"):
        return ast.literal_eval(text)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def assigned(texts: Sequence[str]) -> dict[str, Any]:
    """Return name → value of ``name=value`` texts.

    Raises RequestError with all texts of another form.
    """
    wrong = [text for text in texts if not text.partition("=")[0].isidentifier() or "=" not in text]
    if wrong:
        raise RequestError([f"-p {text}: write -p NAME=VALUE" for text in wrong])
    return {name: value(text) for name, _, text in (item.partition("=") for item in texts)}


def mistakes(notebook: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return a sentence for each problem with setting these parameters."""
    names = list(names)
    if not names:
        return []
    cell_number = _tagged(notebook["cells"], TAG)
    if cell_number is None:
        return [
            f"-p {names[0]}: no cell of the notebook is tagged {TAG!r}, which is where "
            "parameters get their defaults"
        ]
    default_names = defaults(source(notebook["cells"][cell_number]))
    if default_names is None:
        return [f"the cell tagged {TAG!r} cannot be read: it is to hold plain assignments"]
    known_text = f"; it sets {', '.join(default_names)}" if default_names else ""
    return [
        f"-p {name}: the cell tagged {TAG!r} sets no such "
        f"name{did_you_mean(name, default_names) or known_text}"
        for name in names
        if name not in default_names
    ]


def defaults(text: str) -> list[str] | None:
    """Return the names that a cell sets, or None if it is not Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    names: list[str] = []
    for statement in tree.body:
        targets = (
            statement.targets
            if isinstance(statement, ast.Assign)
            else [statement.target]
            if isinstance(statement, ast.AnnAssign)
            else []
        )
        names += [
            node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)
        ]
    return list(dict.fromkeys(names))


def parsed(text: str, name: str) -> dict[str, Any]:
    """Return a notebook from the text of its file.

    Raises RequestError if it is not a notebook, or not in Python.
    """
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
    """Return a cell's source, which a file may store as lines."""
    text = cell.get("source") or ""
    return text if isinstance(text, str) else "".join(text)


def _tagged(cells: list[dict[str, Any]], tag: str) -> int | None:
    tagged = (
        number
        for number, cell in enumerate(cells)
        if tag in (cell.get("metadata") or {}).get("tags", ())
    )
    return next(tagged, None)
