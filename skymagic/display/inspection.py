"""What ranks do and hold, as text: stacks and variables, those of ranks that are alike together; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from skymagic.display import text
from skymagic.display.text import NO_ANSWER
from skymagic.plan.units import agreeing, rank_words

PATH_PARTS = 3
"""Of a library's file, its last folders and its name."""
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
        return f"no cell runs: {rank_words(groups[IDLE])} {agreeing(len(by_rank), 'is', 'are')} idle"
    return "\n".join([*(f"{rank_words(ranks)}{words}" for words, ranks in groups.items()), *states(others)])


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
    """Of a stack the frames of the user's own code, and the innermost of all."""
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


def _rows(name: str, held: Mapping[int, Mapping[str, str]], asked: int) -> list[tuple[str, str, str, str]]:
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, about in held.items():
        valued = about["type"] in VALUED
        alike.setdefault((about["type"], "" if valued else about.get("is", "")), []).append(rank)
    rows = []
    for (kind, what), ranks in list(alike.items())[:SHOWN_SHAPES]:
        values = list(dict.fromkeys(held[rank]["is"] for rank in ranks)) if kind in VALUED else [what]
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
