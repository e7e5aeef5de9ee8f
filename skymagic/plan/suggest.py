"""Spelling suggestions: the known name nearest to a word, by `difflib`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
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


class LazyNames(Collection[str]):
    """A collection of names, loaded on use: a few are at hand, and finding all of them takes time.

    Args:
        at_hand: looked at first.
        all_of_them: called for a name that is not at hand, and to iterate.
    """

    def __init__(self, at_hand: Collection[str], all_of_them: Callable[[], Collection[str]]) -> None:
        self._at_hand = at_hand
        self._all = all_of_them

    def __contains__(self, name: object) -> bool:
        return name in self._at_hand or name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
