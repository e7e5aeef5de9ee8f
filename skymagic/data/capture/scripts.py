"""What the files need that a cell runs with ``%run``: with ``-i`` they take the notebook's names, and each may import modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from skymagic.data.capture.names import CellNames, cell_names


def with_scripts(names: CellNames) -> CellNames:
    """The names of a cell and of the files that it runs; a file that cannot be read is left to the rank's own error."""
    for script in names.scripts:
        try:
            inner = cell_names(Path(script.path).expanduser().read_text())
        except (OSError, ValueError, RuntimeError, SyntaxError):
            continue
        loads = inner.loads - script.defined if script.interactive else frozenset()
        names = replace(
            names,
            loads=names.loads | loads,
            hints=names.hints | (inner.hints if script.interactive else frozenset()),
            imports=names.imports | inner.imports,
            required=names.required | inner.required,
            attributes=names.attributes | inner.attributes,
        )
    return names
