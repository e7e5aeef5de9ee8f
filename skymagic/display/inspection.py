"""What ranks do and hold, as text: stacks, variables, and values by rank as a small table. Ranks that are alike share a line. Pure."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import PurePath
from typing import Any

from skymagic.data.values.descriptions import describe
from skymagic.display import text
from skymagic.display.run_line import short
from skymagic.display.text import NO_ANSWER, html_table, table
from skymagic.plan.units import agreeing, count, ranges, rank_words

PATH_PARTS = 3
"""Folders and name that are shown of a library's file: the last ones."""
SHOWN_SHAPES = 8
"""Different contents of one name that have a row of their own."""

IDLE = ": idle"
VALUED = ("int", "float", "bool", "str", "complex")
"""Types whose value is told: it is no part of what tells ranks apart."""

Frame = Mapping[str, Any]


def stacks(by_rank: Mapping[int, Mapping[str, Any] | None], others: Mapping[int, str]) -> str:
    """Where each rank is: a heading for those at the same place, and below it the user's frames, outermost first.

    Args:
        by_rank: as ranks tell; None of those that do not answer.
        others: ranks that were not asked, each with its state in a word.
    """
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(by_rank.items()):
        groups.setdefault(_stack(stack), []).append(rank)
    if list(groups) == [IDLE] and not others:
        return (
            f"no cell runs: {rank_words(groups[IDLE])} {agreeing(len(by_rank), 'is', 'are')} idle"
        )
    return "\n".join(
        [*(f"{rank_words(ranks)}{words}" for words, ranks in groups.items()), *states(others)]
    )


def states(by_rank: Mapping[int, str]) -> list[str]:
    """Lines on ranks that cannot be asked, each with its state in words."""
    groups: dict[str, list[int]] = {}
    for rank, state in sorted(by_rank.items()):
        groups.setdefault(state, []).append(rank)
    return [f"{rank_words(ranks)}: {state}" for state, ranks in groups.items()]


def _stack(stack: Mapping[str, Any] | None) -> str:
    """What follows the names of the ranks."""
    if stack is None:
        return f": {NO_ANSWER}"
    if not stack["busy"]:
        return IDLE
    frames = stack["frames"]
    if not frames:
        return ": between lines of the cell"
    rows = [(f"    {_where(frame)}", frame.get("code", "")) for frame in shown(frames)]
    held = f" ({text.INTERPRETER_HELD})" if stack.get("native") else ""
    return f" {text.place(frames)}{held}\n{text.table(rows)}"


def shown(frames: Sequence[Frame]) -> list[Frame]:
    """The frames of the user's own code, and the innermost frame."""
    return [frame for frame in frames[:-1] if not frame.get("library")] + [*frames[-1:]]


def _where(frame: Frame) -> str:
    inside = "" if frame["name"] == "<module>" else f" in {frame['name']}"
    if "cell" in frame:
        number = f"cell {frame['cell']}, " if isinstance(frame["cell"], int) else ""
        return f"{number}line {frame['line']}{inside}"
    path = PurePath(frame["file"])
    short = len(path.parts) > PATH_PARTS + 1 and frame.get("library")
    return f"{'…/' + '/'.join(path.parts[-PATH_PARTS:]) if short else path}:{frame['line']}{inside}"


def variables(by_rank: Mapping[int, Mapping[str, Mapping[str, str]]]) -> str:
    """A row for each name; several where ranks hold values of other types or shapes under it."""
    rows: list[tuple[str, str, str, str]] = []
    for name in sorted({name for names in by_rank.values() for name in names}):
        held = {rank: names[name] for rank, names in by_rank.items() if name in names}
        rows += _rows(name, held, len(by_rank))
    if not rows:
        return f"{rank_words(list(by_rank))}: no variables"
    headings = ("name", "type", "size, shape or value", "ranks" if len(by_rank) > 1 else "")
    return text.table([headings, *rows])


def _rows(
    name: str, held: Mapping[int, Mapping[str, str]], asked: int
) -> list[tuple[str, str, str, str]]:
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, about in held.items():
        valued = about["type"] in VALUED
        alike.setdefault((about["type"], "" if valued else about.get("is", "")), []).append(rank)
    rows = []
    for (kind, what), ranks in list(alike.items())[:SHOWN_SHAPES]:
        values = (
            list(dict.fromkeys(held[rank]["is"] for rank in ranks)) if kind in VALUED else [what]
        )
        differ = len({held[rank].get("checksum", "") for rank in ranks}) > 1
        who = "" if asked == 1 else "all" if len(ranks) == asked else rank_words(ranks)
        shown_values = " ".join(values) if len(values) == 1 else _between(values)
        rows.append((name, kind, shown_values, f"{who}{', values differ' if differ else ''}"))
        name = ""
    if len(alike) > SHOWN_SHAPES:
        rows.append(("", "…", f"{len(alike) - SHOWN_SHAPES} more", ""))
    return rows


def _between(values: Sequence[str]) -> str:
    """Values that differ: the lowest and the highest of numbers, the first few of all else."""
    try:
        numbers = sorted(values, key=float)
    except ValueError:
        return ", ".join(values[:3]) + (", …" if len(values) > 3 else "")
    return f"{numbers[0]} … {numbers[-1]}" if len(numbers) > 3 else ", ".join(values)


MAX_ROWS = 16
"""Ranks that have a row of their own; of more, those that are alike share one."""
MAX_FOLDED_ROWS = 8
"""Rows of those, at most."""
MAX_CHARACTERS = 80
"""Characters of a value, at most."""
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
        return [
            (str(rank), kind, words(value))
            for rank, kind, value in zip(ranks, kinds, values, strict=True)
        ]
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
        yield (
            ranges([rank for _, of_these in rest for rank in of_these]),
            "…",
            f"{len(rest)} other values",
        )


def _spread(numbers: Sequence[float]) -> str:
    low, high = min(numbers), max(numbers)
    return (
        short(low)
        if low == high
        else f"{short(low)} … {short(high)}, mean {short(statistics.fmean(numbers))}"
    )


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
    for item in islice(
        value.items() if type(value) is dict else ((one,) for one in value), MAX_CHARACTERS
    ):
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
        if (
            type(value) in (list, tuple, dict, set, frozenset, str, bytes)
            and len(value) > MAX_CHARACTERS
        ):
            return ""
        shown = repr(value)
        return shown if len(shown) <= MAX_CHARACTERS and "\n" not in shown else ""
    return ""
