"""Values by rank as a small table: rank, type, shape or value; ranks that are alike share a row. Pure."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from skymagic.data.values.descriptions import describe
from skymagic.display.run_line import short
from skymagic.display.text import html_table, table
from skymagic.plan.units import count, ranges

MAX_ROWS = 16
"""Ranks that have a row of their own; of more, those that are alike share one."""
MAX_FOLDED_ROWS = 8
"""Rows of those, at most."""
MAX_CHARACTERS = 80
"""Of a value, at most."""
PLAIN = (bool, int, float, complex, str, bytes, type(None), list, tuple, dict, set, frozenset)
"""Types whose values are shown by their ``repr`` where that is short; of others the ``repr`` is the user's own code."""
SCALARS = (bool, int, float, str, type(None))
BRACKETS: Mapping[type, tuple[str, str]] = {dict: ("{", "}"), list: ("[", "]"), tuple: ("(", ")")}
HEADINGS = ("rank", "type", "shape or value")

Row = tuple[str, str, str]
"""Ranks, type, and what is known of the value."""


def as_text(ranks: Sequence[int], values: Sequence[Any]) -> str:
    """The table as text."""
    return table([HEADINGS, *rows(ranks, values)])


def as_html(ranks: Sequence[int], values: Sequence[Any]) -> str:
    """The table as HTML without styles of its own sheet: a saved notebook may be shown where there are none."""
    return html_table([HEADINGS, *rows(ranks, values)], "text-align:left")


def rows(ranks: Sequence[int], values: Sequence[Any]) -> list[Row]:
    """A row for each rank, or for ranks that are alike."""
    kinds = [type(value).__name__ for value in values]
    if len(ranks) <= MAX_ROWS:
        return [(str(rank), kind, words(value)) for rank, kind, value in zip(ranks, kinds, values, strict=True)]
    return list(_folded(list(zip(ranks, kinds, values, strict=True))))


def _folded(found: list[tuple[int, str, Any]]) -> Iterator[Row]:
    numbers = [(rank, kind, value) for rank, kind, value in found if type(value) in (int, float)]
    alike: dict[tuple[str, str], list[int]] = {}
    for kind in dict.fromkeys(kind for _, kind, _ in numbers):
        of_kind = {rank: float(value) for rank, each, value in numbers if each == kind}
        alike[kind, _spread(list(of_kind.values()))] = list(of_kind)
    for rank, kind, value in found:
        if type(value) not in (int, float):
            alike.setdefault((kind, words(value)), []).append(rank)
    several = list(alike.items())
    for (kind, what), of_these in several[:MAX_FOLDED_ROWS]:
        yield ranges(of_these), kind, what
    if rest := several[MAX_FOLDED_ROWS:]:
        yield ranges([rank for _, of_these in rest for rank in of_these]), "…", f"{len(rest)} other values"


def _spread(numbers: Sequence[float]) -> str:
    low, high = min(numbers), max(numbers)
    return short(low) if low == high else f"{short(low)} … {short(high)}, mean {short(statistics.fmean(numbers))}"


def words(value: Any) -> str:
    """A value in a line: its shape, its size, or itself where it is short."""
    if type(value) in PLAIN and (own := _repr(value) or _beginning(value)):
        return own
    about = describe(value)
    if "is" in about:
        return about["is"]
    own = _repr(value)
    return own or "…"


def _beginning(value: Any) -> str:
    """The first items of a dict, a list or a tuple, and how many there are; empty where none could be seen."""
    if type(value) not in BRACKETS:
        return ""
    shown: list[str] = []
    for item in islice(value.items() if type(value) is dict else ((one,) for one in value), MAX_CHARACTERS):
        parts = [_repr(part) if type(part) in SCALARS else "" for part in item]
        if not parts[0]:
            return ""
        shown.append(": ".join(part or "…" for part in parts))
        if sum(map(len, shown)) + 2 * len(shown) > MAX_CHARACTERS:
            shown.pop()
            break
    opening, closing = BRACKETS[type(value)]
    more = f", …{closing} {count(len(value), 'item')}" if len(shown) < len(value) else closing
    return f"{opening}{', '.join(shown)}{more}" if shown else ""


def _repr(value: Any) -> str:
    """As Python shows it, on one line; empty where that is too long, or fails."""
    with contextlib.suppress(Exception):
        if type(value) in (list, tuple, dict, set, frozenset, str, bytes) and len(value) > MAX_CHARACTERS:
            return ""
        shown = repr(value)
        return shown if len(shown) <= MAX_CHARACTERS and "\n" not in shown else ""
    return ""
