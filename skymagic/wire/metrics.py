"""Numbers that ranks report, as rows of doubles, packed for the wire.

Each set of names has a separate table: ``seconds`` since the cell started on its rank, ``step``,
``total`` (NaN if it was not given), then a double for each name.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterable, Iterator, Mapping

from skymagic.wire.codec import FrozenMessage

Names = tuple[str, ...]
Rows = dict[Names, "array[float]"]
SECONDS, STEP, TOTAL = range(3)
FIXED = 3
"""Number of columns before those of the names."""
USAGE: Names = tuple(
    f"skymagic.{name}"
    for name in ("node", "waited", "stepped", "memory", "held", "gpu_memory", "gpu_use")
)
"""Names of the rows about a rank's resource use that it sends unasked (`runtime.usage`)."""

# The module's name travels in the name of a column, because rows hold numbers only.
_IMPORTING = "skymagic.importing."


def import_names(module: str) -> Names:
    """Return the names of a row that reports the module being imported; "" when that is over."""
    return (f"{_IMPORTING}{module}",)


def imported_module(names: Names) -> str | None:
    """Return the module of `import_names`, or None for all other rows."""
    name = names[0] if names else ""  # a loop reports its steps alone
    return name.removeprefix(_IMPORTING) if name.startswith(_IMPORTING) else None


class MetricBatch(FrozenMessage):
    """Rows with the same names."""

    names: Names
    rows: str
    """Doubles in base64, row by row."""


def only_imports(batches: Iterable[MetricBatch]) -> bool:
    """Return True if all batches report imports."""
    return all(imported_module(batch.names) is not None for batch in batches)


def packed(rows: Mapping[Names, array[float]]) -> tuple[MetricBatch, ...]:
    """Return the rows as messages.

    They are encoded in base64, because JSON has no NaN and formatting a double as text takes longer
    than a step of some trainings.
    """
    return tuple(
        # bytes rather than numbers: JSON has no NaN, and formatting doubles is slow
        MetricBatch(names, base64.b64encode(table.tobytes()).decode())
        for names, table in rows.items()
    )


def unpacked(batches: Iterable[MetricBatch]) -> Iterator[tuple[Names, array[float]]]:
    """Yield the names and rows of batches made by `packed`."""
    for batch in batches:
        rows = array("d")
        rows.frombytes(base64.b64decode(batch.rows))
        yield batch.names, rows
