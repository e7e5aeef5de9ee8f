"""What a misspelt word was meant to be: the nearest of the names that are known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'A100'?"`` for the known word nearest to `word`, or ``""`` when none is near.

    Case, dashes and look-alikes (o and 0, l and 1) do not count.
    """
    folded = {_fold(name): name for name in known}
    close = get_close_matches(_fold(word), folded, n=1, cutoff=0.6)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""


def _fold(word: str) -> str:
    return word.casefold().translate(str.maketrans("oil", "011", "-–—_"))
