"""A selection of ranks or nodes, as users write it: ``head``, ``all``, ``0,2``, ``0:4``, ``::2``, ``-1``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from skymagic.errors import RequestError
from skymagic.plan.units import count

_INDEX = r"-?[0-9]{1,9}"


@dataclass(frozen=True)
class Selection:
    """Some of a pool's ranks or nodes, chosen before their number is known. Raises RequestError for no such choice.

    Args:
        text: the choice; kept without blanks, so that equal choices compare equal. It is all there is, so
            ``Selection(only.text)`` brings one back from JSON.
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
        """Any of the forms that Python code uses: a text, one rank, several. Raises RequestError for none of them."""
        if isinstance(choice, Selection):
            return choice
        if isinstance(choice, str):
            return cls(choice)
        return cls(str(choice) if isinstance(choice, int) else ",".join(map(str, choice)))

    def ranks(self, world_size: int, noun: str = "rank") -> tuple[int, ...]:
        """The ranks in ascending order, each once; or nodes: `noun` is what is chosen, for messages.

        Raises RequestError for a rank, or an end of a slice, that a pool of `world_size` ranks does not have.
        """
        if self.text in ("head", "all"):
            return tuple(range(world_size if self.text == "all" else 1))
        there = f"this pool has {count(world_size, noun)} (0 to {world_size - 1})"
        chosen: set[int] = set()
        for piece in self.text.split(","):
            ends = [int(end) if end else None for end in piece.split(":")]
            beyond = [
                end
                for end, most in zip(ends, (world_size - 1, world_size), strict=False)
                if end is not None and not -world_size <= end <= most
            ]
            if len(ends) == 1 and ends[0] is not None:
                picked: Iterable[int] = [ends[0] % world_size]
            else:
                picked = range(world_size)[slice(*ends)]
            if beyond or not picked:
                what = f"{piece} goes beyond the pool" if beyond and len(ends) > 1 else f"there is no {noun} {piece}"
                raise RequestError(f"{what}: {there}")
            chosen.update(picked)
        return tuple(sorted(chosen))

    def __str__(self) -> str:
        return self.text
