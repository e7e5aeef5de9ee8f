"""Numbers that ranks report, as rows of doubles, packed for the wire.

Each set of names has rows of its own: ``seconds`` since the cell began on its rank, ``step``, ``total`` (NaN where it was not
given), then a double for each name.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Names = tuple[str, ...]
Rows = dict[Names, "array[float]"]
SECONDS, STEP, TOTAL = range(3)
FIXED = 3
"""Columns before those of the names."""
USAGE: Names = tuple(
    f"skymagic.{name}"
    for name in ("node", "waited", "stepped", "memory", "held", "gpu_memory", "gpu_use")
)
"""Names of rows that a rank sends of its own accord: what may slow it down (`runtime.usage`)."""

_IMPORTING = "skymagic.importing."


def import_names(module: str) -> Names:
    """Return the names of a row that says which module a rank is importing; "" when that is over."""
    return (f"{_IMPORTING}{module}",)


def imported_module(names: Names) -> str | None:
    """Return the module of `import_names`, or None for all other rows."""
    name = names[0] if names else ""  # a loop reports its steps alone
    return name.removeprefix(_IMPORTING) if name.startswith(_IMPORTING) else None


def only_imports(batches: Iterable[Mapping[str, Any]]) -> bool:
    """Return True if all that was sent says which module is being imported."""
    return all(imported_module(tuple(batch["names"])) is not None for batch in batches)


def packed(rows: Mapping[Names, array[float]]) -> tuple[dict[str, Any], ...]:
    """As plain values. Base64, for JSON has no NaN, and the text of a double takes longer than a step of some trainings."""
    return tuple(
        {"names": list(names), "rows": base64.b64encode(found.tobytes()).decode()}
        for names, found in rows.items()
    )


def unpacked(batches: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Names, array[float]]]:
    """What `packed` gave."""
    for batch in batches:
        rows = array("d")
        rows.frombytes(base64.b64decode(batch["rows"]))
        yield tuple(batch["names"]), rows
