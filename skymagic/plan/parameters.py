"""Notebook parameters, as in papermill.

The cell tagged ``parameters`` has defaults, and a cell after it sets others.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.errors import RequestError
from skymagic.plan.suggest import did_you_mean

TAG = "parameters"


ParameterValue = bool | int | float | str | None


@dataclass(frozen=True)
class NotebookCell:
    """Source and tags of a notebook's cell."""

    source: str
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotebookDocument:
    """Notebook as read from its file.

    Attributes:
        content: the whole document as JSON in nbformat 4; it travels to the head unchanged.
    """

    content: dict[str, object]
    cells: tuple[NotebookCell, ...]
    nbformat_minor: int = 0

    @classmethod
    def parse(cls, text: str, name: str) -> NotebookDocument:
        """Return a notebook from the text of its file.

        Raises RequestError if it is not a notebook, or not in Python.
        """
        try:
            content = json.loads(text)
            valid = content["nbformat"] == 4 and all(
                isinstance(cell["cell_type"], str) for cell in content["cells"]
            )
        except (ValueError, TypeError, KeyError):
            valid = False
        if not valid:
            raise RequestError(f"{name} is not a notebook in nbformat 4")
        kernelspec = (content.get("metadata") or {}).get("kernelspec", {})
        language = kernelspec.get("language", "python")
        if language.lower() != "python":
            raise RequestError(
                f"{name} is a notebook in {language}: the cells of a pool are Python"
            )
        cells = tuple(map(_cell, content["cells"]))
        return cls(content, cells, content.get("nbformat_minor", 0))


def _cell(cell: Any) -> NotebookCell:
    """Return a cell of nbformat 4, whose file may store the source as lines."""
    source = cell.get("source") or ""
    tags = (cell.get("metadata") or {}).get("tags", ())
    return NotebookCell(source if isinstance(source, str) else "".join(source), tuple(tags))


def value(text: str) -> ParameterValue:
    """Convert a typed value: True, False, None, an integer, a float, else text."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def assigned(texts: Sequence[str]) -> dict[str, ParameterValue]:
    """Return name → value of ``name=value`` texts.

    Raises RequestError with all texts of another form.
    """
    wrong = [text for text in texts if not text.partition("=")[0].isidentifier() or "=" not in text]
    if wrong:
        raise RequestError([f"-p {text}: write -p NAME=VALUE" for text in wrong])
    return {name: value(text) for name, _, text in (item.partition("=") for item in texts)}


def mistakes(notebook: NotebookDocument, names: Iterable[str]) -> list[str]:
    """Return a sentence for each problem with setting these parameters."""
    names = list(names)
    if not names:
        return []
    tagged = next((cell for cell in notebook.cells if TAG in cell.tags), None)
    if tagged is None:
        return [
            f"-p {names[0]}: no cell of the notebook is tagged {TAG!r}, which is where "
            "parameters get their defaults"
        ]
    default_names = defaults(tagged.source)
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
