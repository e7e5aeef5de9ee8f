"""Stacks and variables of ranks as text, and values by rank as a small table.

Ranks with equal contents share a line. These functions have no side effects.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import PurePath
from typing import Any

from skymagic.data.values.descriptions import describe
from skymagic.display import text
from skymagic.display.run_line import short
from skymagic.display.text import NO_ANSWER, html_table, table
from skymagic.plan.units import count, ranges, rank_words, verb_form
from skymagic.wire.queries import Stack, StackFrame

PATH_PARTS = 3
"""Number of path components shown of a library's file, counted from the end."""
SHOWN_SHAPES = 8
"""Maximum number of rows for different contents of one name."""

IDLE = ": idle"
SHOW_VALUE_TYPES = ("int", "float", "bool", "str", "complex")
"""Types whose value is shown, but not used to group ranks."""


def stacks(by_rank: Mapping[int, Stack | None], other_states: Mapping[int, str]) -> str:
    """Return the position of each rank: a heading per position, and the user's frames below it.

    Frames are listed outermost first.

    Args:
        by_rank: stacks as ranks report them; None for ranks that do not answer.
        other_states: ranks that were not asked, each with its state in a word.
    """
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(by_rank.items()):
        groups.setdefault(_stack(stack), []).append(rank)
    if list(groups) == [IDLE] and not other_states:
        return (
            f"no cell runs: {rank_words(groups[IDLE])} {verb_form(len(by_rank), 'is', 'are')} idle"
        )
    return "\n".join(
        [
            *(f"{rank_words(ranks)}{position}" for position, ranks in groups.items()),
            *states(other_states),
        ]
    )


def states(by_rank: Mapping[int, str]) -> list[str]:
    """Return lines on ranks that cannot answer, grouped by their state."""
    groups: dict[str, list[int]] = {}
    for rank, state in sorted(by_rank.items()):
        groups.setdefault(state, []).append(rank)
    return [f"{rank_words(ranks)}: {state}" for state, ranks in groups.items()]


def _stack(stack: Stack | None) -> str:
    """Return a position, as the text that follows the ranks in its heading."""
    if stack is None:
        return f": {NO_ANSWER}"
    if not stack.busy:
        return IDLE
    frames = stack.frames
    if not frames:
        return ": between lines of the cell"
    rows = [(f"    {_position(frame)}", frame.code) for frame in frames_to_show(frames)]
    interpreter_note = f" ({text.INTERPRETER_HELD})" if stack.native else ""
    return f" {text.position(frames)}{interpreter_note}\n{text.table(rows)}"


def frames_to_show(frames: Sequence[StackFrame]) -> list[StackFrame]:
    """Return the frames of the user's own code, and the innermost frame."""
    return [frame for frame in frames[:-1] if not frame.is_library] + [*frames[-1:]]


def _position(frame: StackFrame) -> str:
    inside = "" if frame.name == "<module>" else f" in {frame.name}"
    if frame.cell is not None:
        number = f"cell {frame.cell}, " if isinstance(frame.cell, int) else ""
        return f"{number}line {frame.line}{inside}"
    path = PurePath(frame.file)
    is_long_path = len(path.parts) > PATH_PARTS + 1 and frame.is_library
    shown_path = "…/" + "/".join(path.parts[-PATH_PARTS:]) if is_long_path else str(path)
    return f"{shown_path}:{frame.line}{inside}"


def variables(by_rank: Mapping[int, Mapping[str, Mapping[str, str]]]) -> str:
    """Return a table with a row for each name.

    A name has several rows if its values differ in type or shape between ranks.
    """
    rows: list[tuple[str, str, str, str]] = []
    for name in sorted({name for names in by_rank.values() for name in names}):
        values_by_rank = {rank: names[name] for rank, names in by_rank.items() if name in names}
        rows += _rows(name, values_by_rank, len(by_rank))
    if not rows:
        return f"{rank_words(list(by_rank))}: no variables"
    headings = ("name", "type", "size, shape or value", "ranks" if len(by_rank) > 1 else "")
    return text.table([headings, *rows])


def _rows(
    name: str, descriptions: Mapping[int, Mapping[str, str]], rank_count: int
) -> list[tuple[str, str, str, str]]:
    ranks_by_value: dict[tuple[str, str], list[int]] = {}
    for rank, description in descriptions.items():
        shows_value = description["type"] in SHOW_VALUE_TYPES
        ranks_by_value.setdefault(
            (description["type"], "" if shows_value else description.get("value", "")), []
        ).append(rank)
    rows = []
    for (kind, description_text), ranks in list(ranks_by_value.items())[:SHOWN_SHAPES]:
        values = (
            list(dict.fromkeys(descriptions[rank]["value"] for rank in ranks))
            if kind in SHOW_VALUE_TYPES
            else [description_text]
        )
        differ = len({descriptions[rank].get("checksum", "") for rank in ranks}) > 1
        ranks_text = (
            "" if rank_count == 1 else "all" if len(ranks) == rank_count else rank_words(ranks)
        )
        shown_values = " ".join(values) if len(values) == 1 else _range_or_first(values)
        rows.append(
            (name, kind, shown_values, f"{ranks_text}{', values differ' if differ else ''}")
        )
        name = ""
    if len(ranks_by_value) > SHOWN_SHAPES:
        rows.append(("", "…", f"{len(ranks_by_value) - SHOWN_SHAPES} more", ""))
    return rows


def _range_or_first(values: Sequence[str]) -> str:
    """Return up to three values unchanged, and only the lowest and highest of more.

    If some are not numbers, return the first three.
    """
    if len(values) <= 3:
        return ", ".join(values)
    try:
        # without NaN, which is neither lower nor higher than any number
        numbers = sorted((value for value in values if not math.isnan(float(value))), key=float)
    except ValueError:
        return f"{', '.join(values[:3])}, …"
    return f"{numbers[0]} … {numbers[-1]}" + (", nan" if len(numbers) < len(values) else "")


MAX_ROWS = 16
"""With more ranks than this, ranks with equal values share a row."""
MAX_FOLDED_ROWS = 8
"""Maximum number of shared rows."""
MAX_CHARACTERS = 80
"""Maximum number of characters of a value."""
PLAIN = (bool, int, float, complex, str, bytes, type(None), list, tuple, dict, set, frozenset)
"""Types whose values are shown by their ``repr`` if it is short.

For other types, ``repr`` is the user's own code.
"""
SCALARS = (bool, int, float, str, type(None))
BRACKETS: Mapping[type, tuple[str, str]] = {dict: ("{", "}"), list: ("[", "]"), tuple: ("(", ")")}
HEADINGS = ("rank", "type", "shape or value")

Row = tuple[str, str, str]
"""Ranks, type, and description of the value."""


def as_text(ranks: Sequence[int], values: Sequence[Any]) -> str:
    """Return the table as text."""
    return table([HEADINGS, *rows(ranks, values)])


def as_html(ranks: Sequence[int], values: Sequence[Any]) -> str:
    """Return the table as HTML with inline styles.

    A saved notebook may be displayed without style sheets.
    """
    return html_table([HEADINGS, *rows(ranks, values)], "text-align:left")


def rows(ranks: Sequence[int], values: Sequence[Any]) -> list[Row]:
    """Return a row for each rank, or for ranks with equal values."""
    kinds = [type(value).__name__ for value in values]
    if len(ranks) <= MAX_ROWS:
        return [
            (str(rank), kind, short_description(value))
            for rank, kind, value in zip(ranks, kinds, values, strict=True)
        ]
    return list(_fold_rows(list(zip(ranks, kinds, values, strict=True))))


def _fold_rows(rows: list[tuple[int, str, Any]]) -> Iterator[Row]:
    numbers = [(rank, kind, value) for rank, kind, value in rows if type(value) in (int, float)]
    ranks_by_row: dict[tuple[str, str], list[int]] = {}
    for kind in dict.fromkeys(kind for _, kind, _ in numbers):
        of_kind = {rank: float(value) for rank, type_name, value in numbers if type_name == kind}
        ranks_by_row[kind, _value_range(list(of_kind.values()))] = list(of_kind)
    for rank, kind, value in rows:
        if type(value) not in (int, float):
            ranks_by_row.setdefault((kind, short_description(value)), []).append(rank)
    groups = list(ranks_by_row.items())
    for (kind, description), group_ranks in groups[:MAX_FOLDED_ROWS]:
        yield ranges(group_ranks), kind, description
    if remaining_groups := groups[MAX_FOLDED_ROWS:]:
        yield (
            ranges([rank for _, group_ranks in remaining_groups for rank in group_ranks]),
            "…",
            f"{len(remaining_groups)} other values",
        )


def _value_range(numbers: Sequence[float]) -> str:
    comparable = [number for number in numbers if not math.isnan(number)]
    if not comparable:
        return "nan"
    low, high = min(comparable), max(comparable)
    spread = short(low)
    if low != high:
        spread += f" … {short(high)}, mean {short(statistics.fmean(comparable))}"
    nans = len(numbers) - len(comparable)
    return f"{spread}; {nans} × nan" if nans else spread


def short_description(value: Any) -> str:
    """Return a value in a line: its shape, its size, or the value itself if it is short."""
    if type(value) in PLAIN and (text_form := _repr(value) or _beginning(value)):
        return text_form
    description = describe(value)
    if "value" in description:
        return description["value"]
    text_form = _repr(value)
    return text_form or "…"


def _beginning(value: Any) -> str:
    """Return the first items of a dict, a list or a tuple, and their number.

    Return "" if none of them is displayable.
    """
    if type(value) not in BRACKETS:
        return ""
    shown_items: list[str] = []
    for item in islice(
        value.items() if type(value) is dict else ((element,) for element in value), MAX_CHARACTERS
    ):
        parts = [_repr(part) if type(part) in SCALARS else "" for part in item]
        if not parts[0]:
            return ""
        shown_items.append(": ".join(part or "…" for part in parts))
        if sum(map(len, shown_items)) + 2 * len(shown_items) > MAX_CHARACTERS:
            shown_items.pop()
            break
    opening, closing = BRACKETS[type(value)]
    more = f", …{closing} {count(len(value), 'item')}" if len(shown_items) < len(value) else closing
    return f"{opening}{', '.join(shown_items)}{more}" if shown_items else ""


def _repr(value: Any) -> str:
    """Return the value's ``repr`` if it fits on one line, else "". Errors in it are ignored."""
    with contextlib.suppress(Exception):
        if (
            type(value) in (list, tuple, dict, set, frozenset, str, bytes)
            and len(value) > MAX_CHARACTERS
        ):
            return ""
        text_form = repr(value)
        return text_form if len(text_form) <= MAX_CHARACTERS and "\n" not in text_form else ""
    return ""
