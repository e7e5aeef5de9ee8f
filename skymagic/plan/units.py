"""Units of amounts: durations, cores, gigabytes, ranks or nodes.

Functions parse what users write, and format amounts for display.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skymagic.errors import RequestError

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_SPELLINGS = {
    "d": "d(?:ays?)?",
    "h": "h(?:ours?|rs?)?",
    "m": "m(?:in(?:ute)?s?)?",
    "s": "s(?:ec(?:ond)?s?)?",
}
"""Patterns of accepted spellings of a unit: ``min``, ``hours``."""
_NUMBER = r"[0-9]{1,12}(?:\.[0-9]{1,9})?"


def duration(text: str) -> float:
    """Return the seconds of ``"90"``, ``"10m"``, ``"1h30m"``, ``"2d"``, ``"0.5h"`` or ``"5 min"``.

    Raises RequestError for anything else, and for 0.
    """
    compact = re.sub(r"\s+", "", text).lower()
    parts = re.fullmatch(
        "".join(rf"(?:({_NUMBER}){_SPELLINGS[unit]})?" for unit in _UNITS), compact
    )
    if re.fullmatch(_NUMBER, compact):
        seconds = float(compact)
    elif parts and compact:
        seconds = sum(
            float(n) * size for n, size in zip(parts.groups("0"), _UNITS.values(), strict=True)
        )
    else:
        raise RequestError(
            f"{text!r} is not a duration: write seconds (90) or units (10m, 1h30m, 2d)"
        )
    if seconds <= 0:
        raise RequestError(f"a duration must be more than 0, not {text!r}")
    return seconds


def is_unit(text: str) -> bool:
    """Return True if a word is a unit of time, as in ``"5 min"``."""
    return re.fullmatch("|".join(_SPELLINGS.values()), text.lower()) is not None


def is_number(text: str) -> bool:
    """Return True if a text is a non-negative number without a unit."""
    return re.fullmatch(_NUMBER, text) is not None


def duration_text(seconds: float) -> str:
    """Return `seconds` in the syntax that `duration` parses: ``5400.0`` is ``"1h30m"``."""
    remaining = int(seconds)
    if remaining != seconds or not remaining:
        from decimal import Decimal  # imported here because it would delay the start of a node

        return f"{Decimal(repr(float(seconds))):f}s"
    text = ""
    for unit, size in _UNITS.items():
        count, remaining = divmod(remaining, size)
        text += f"{count}{unit}" if count else ""
    return text


@dataclass(frozen=True)
class AtLeast:
    """An amount per node: exactly `amount`, or with `or_more` at least that."""

    amount: float
    or_more: bool = False

    def __str__(self) -> str:
        return f"{self.amount:.12g}{'+' if self.or_more else ''}"


def rough_duration(seconds: float) -> str:
    """Return a duration in at most two units: 2h10m, 4m10s, 0s."""
    total = max(0, round(seconds))
    for unit, fine in ((86400, 3600), (3600, 60)):
        if total >= unit:
            return duration_text(total // fine * fine)
    return duration_text(total) if total else "0s"


def at_least(text: str, unit: str = "") -> AtLeast:
    """Parse ``"8+"`` or ``"8"``; `unit` (``"GB"``) may follow.

    Raises RequestError if it is not a positive number.
    """
    ending = rf"\s*(?:{unit[:1]}i?{unit[1:]}|{unit[:1]})?" if unit else ""
    match = re.fullmatch(rf"({_NUMBER}){ending}\s*(\+?)", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise RequestError(
            f"{text!r} is not an amount: write 8 or 8+ for at least 8"
            + (f", in {unit}" if unit else "")
        )
    return AtLeast(float(match[1]), bool(match[2]))


def memory(text: str) -> AtLeast:
    """Parse ``"32"``, ``"32+"`` or ``"32GB+"`` in GB. Raises RequestError as `at_least` does."""
    return at_least(text, "GB")


def size(nbytes: float) -> str:
    """Return a number of bytes as text: "1.2 MB"."""
    if nbytes < 1000:
        return f"{nbytes:.0f} bytes"
    power = 1 if nbytes < 1e6 else 2 if nbytes < 1e9 else 3
    return f"{nbytes / 1000**power:.1f} {'KMG'[power - 1]}B"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 rank", "4 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def verb_form(number: int, singular: str, plural: str) -> str:
    """Return the matching form of a verb: ``verb_form(len(ranks), "is", "are")``."""
    return singular if number == 1 else plural


def rank_words(ranks: Sequence[int], noun: str = "rank") -> str:
    """Return ranks as text: "rank 3", "ranks 0, 2", "ranks 0–3", "ranks 0–30, 32–63"."""
    return f"{noun} {ranges(ranks)}" if len(ranks) == 1 else f"{noun}s {ranges(ranks)}"


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers in ascending order, with three or more in a row as a range: "0–3, 7, 8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )


_INDEX = r"-?[0-9]{1,9}"


@dataclass(frozen=True)
class Selection:
    """Some ranks or nodes of a pool, selected before their number is known.

    Raises RequestError for an invalid selection.

    Args:
        text: the selection; stored without blanks, so that equal selections compare equal. It is
            the only state, so ``Selection(only.text)`` restores one from JSON.
    """

    text: str = "head"

    def __post_init__(self) -> None:
        text = re.sub(r"\s+", "", self.text).lower()
        piece = rf"(?:{_INDEX}|(?:{_INDEX})?:(?:{_INDEX})?(?::(?:-?0*[1-9][0-9]{{0,8}})?)?)"
        if text not in ("head", "all") and not re.fullmatch(rf"{piece}(?:,{piece})*", text):
            raise RequestError(f"{self.text!r} names no ranks: write head, all, 0,2 or 0:4")
        object.__setattr__(self, "text", text)

    @classmethod
    def of(cls, choice: Selection | str | int | Iterable[int]) -> Selection:
        """Return a selection from a text, one rank, or several ranks.

        Raises RequestError for anything else.
        """
        if isinstance(choice, Selection):
            return choice
        if isinstance(choice, str):
            return cls(choice)
        return cls(str(choice) if isinstance(choice, int) else ",".join(map(str, choice)))

    def ranks(self, world_size: int, noun: str = "rank") -> tuple[int, ...]:
        """Return the ranks, or nodes, in ascending order without repetitions.

        `noun` names what is selected, for messages. Raises RequestError for a rank, or an end of a
        slice, that a pool of `world_size` ranks does not have.
        """
        if self.text in ("head", "all"):
            return tuple(range(world_size if self.text == "all" else 1))
        pool_text = f"this pool has {count(world_size, noun)} (0 to {world_size - 1})"
        if world_size == 1:
            pool_text = f"this pool has only {noun} 0"
        selected: set[int] = set()
        for piece in self.text.split(","):
            ends = [int(end) if end else None for end in piece.split(":")]
            out_of_range = [
                end
                for end, most in zip(ends, (world_size - 1, world_size), strict=False)
                if end is not None and not -world_size <= end <= most
            ]
            if len(ends) == 1 and ends[0] is not None:
                piece_ranks: Iterable[int] = [ends[0] % world_size]
            else:
                piece_ranks = range(world_size)[slice(*ends)]
            if out_of_range or not piece_ranks:
                problem = (
                    f"{piece} goes beyond the pool"
                    if out_of_range and len(ends) > 1
                    else f"there is no {noun} {piece}"
                )
                raise RequestError(f"{problem}: {pool_text}")
            selected.update(piece_ranks)
        return tuple(sorted(selected))

    def __str__(self) -> str:
        return self.text
